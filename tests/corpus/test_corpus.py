"""Files as exporters write them: `init`, `filter`, `ingest` and `estimate --input` read each one as a person would."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from jobs import estimate, filter, init
from jobs.core.errors import UserError
from jobs.core.report import Report
from jobs.core.settings import Settings
from jobs.spark.session import open_warehouse
from jobs.specs.loading import load_spec
from jobs.specs.model_spec import ModelSpec
from tests.corpus import make
from tests.corpus.reading import (
    EXPECTED,
    differences,
    estimated_rows,
    file_of,
    filtered_rows,
    landed_rows,
    right_rows,
)


def settings_of(folder: Path) -> Settings:
    return Settings.load(str(folder / "warehouse"), str(folder / "models"), None)


class Begun(NamedTuple):
    """What `init` makes of a case's file, and the settings with the folder of its spec."""

    settings: Settings
    report: Report

    @property
    def spec(self) -> ModelSpec:
        return load_spec("case", self.settings.models)


Begin = Callable[[str], Begun]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Begin:
    """Return a function that lets `init` find a model for a case once."""

    @cache
    def begin(name: str) -> Begun | UserError:
        settings = settings_of(tmp_path_factory.mktemp("case"))
        wishes = EXPECTED[name]["options"]
        try:
            report = init.run(
                settings, str(file_of(name)), name="case", quick=True, no_picture=True, **wishes
            )
        except UserError as refusal:
            return refusal
        return Begun(settings, report)

    def raising(name: str) -> Begun:
        found = begin(name)
        if isinstance(found, UserError):
            raise found
        return found

    return raising


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if k % 2 else []) for k, name in enumerate(EXPECTED)],
)
def test_a_file_is_read_as_its_exporter_meant_it_or_refused_with_a_remedy(
    tmp_path: Path, begun: Begin, name: str
) -> None:
    expected, path = EXPECTED[name], file_of(name)
    try:
        settings, report = begun(name)
    except UserError as refusal:
        pattern, said = expected["refusal"], str(refusal).replace(str(path), "")
        assert pattern is not None and re.search(pattern, said), said
        return
    spec = begun(name).spec
    read = filtered_rows(spec, path)
    assert read.sort_by_key_text == landed_rows(settings, spec, path).sort_by_key_text
    said = "\n".join(report.lines).replace(str(path), "")
    found = differences(right_rows(name), read, expected["free"], expected["within"])
    note = expected["note"]
    assert not found or (note is not None and re.search(note, said)), (found[:3], said)
    data = filter.run(settings, "case", str(path), str(tmp_path / "out.parquet")).data
    assert (data["rows"], data["rejected"]) == (len(read.rows) + read.rejected, read.rejected)


@pytest.mark.spark
@pytest.mark.core
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 12])
def test_estimate_reads_the_rows_that_filter_reads(begun: Begin, every: int) -> None:
    wrong, names = [], []
    for name in list(EXPECTED)[::every]:
        try:
            settings, spec = begun(name).settings, begun(name).spec
        except UserError:
            continue
        names.append(name)
        estimated = estimated_rows(open_warehouse(settings, "corpus"), spec, file_of(name))
        if estimated.sort_by_key_text != filtered_rows(spec, file_of(name)).sort_by_key_text:
            wrong.append(name)
    assert len(names) > 30 // every and not wrong
    # The verb itself, over local times that the clocks repeat.
    last = begun("vienna_clock_change_csv")
    path = file_of("vienna_clock_change_csv")
    data = estimate.run(last.settings, "case", input=str(path)).data
    assert data["rows"] == len(filtered_rows(last.spec, path).rows)


def test_the_generator_gives_the_files_that_are_kept() -> None:
    cases = make.cases()
    assert list(EXPECTED) == [make.name_of(case) for case in cases] and len(cases) >= 50
    kept = {path.name for path in (make.HERE / "files").iterdir()}
    assert kept == {case.file for case in cases}
    for case in cases:
        assert (make.HERE / "golden" / f"{make.name_of(case)}.csv").read_text() == make.golden(case)
        if isinstance(case.content, str):
            assert file_of(make.name_of(case)).read_bytes() == case.content.encode()
