"""One reading of files: the same rows in every format, for `filter` as for `ingest`."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jobs import filter, forecast
from jobs.core.errors import UserError
from jobs.core.settings import Settings
from jobs.landing.file_rows import read_all, read_rows
from jobs.landing.json_rows import NOT_AN_OBJECT
from jobs.landing.reading import select_reader
from jobs.specs.loading import load_spec
from jobs.specs.model_spec import ModelSpec
from jobs.storage.quarantine import REASON
from tests.corpus.reading import ReadRows, filtered_rows, instant_of, landed_rows, row_of

SPEC = """
name: walk
version: 1
key: [sensor]
time: at
measurement: [value]
states: [level]
process: {kind: random_walk, variance: 1.0}
observation: {R: [[1.0]]}
initial: {mean: [0.0], covariance: [[100.0]]}
"""
ROWS: list[dict[str, Any]] = [
    {"at": f"2024-01-0{1 + i}T00:00:00Z", "sensor": sensor, "value": i + 0.25}
    for i in range(5)
    for sensor in ("a", "b")
]


def settings_of(folder: Path, text: str = SPEC) -> Settings:
    (folder / "walk.yaml").write_text(text)
    return Settings.load(str(folder / "warehouse"), str(folder), None)


def objects(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_json_gives_the_rows_that_csv_gives(tmp_path: Path) -> None:
    own = settings_of(tmp_path)
    lines = objects(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "rows.json").write_text(json.dumps(ROWS, indent=1))
    pd.DataFrame(ROWS).to_csv(tmp_path / "rows.csv", index=False)
    spec = load_spec("walk", tmp_path)
    wanted = filtered_rows(spec, tmp_path / "rows.csv")
    assert len(wanted.rows) == 10
    for name in ("rows.jsonl", "rows.json"):
        assert filtered_rows(spec, tmp_path / name) == wanted
        other = replace(own, warehouse=str(tmp_path / name.replace(".", "-")))
        assert landed_rows(other, spec, tmp_path / name).sort_by_key_text == wanted.sort_by_key_text
    for verb, options in ((filter, {}), (forecast, {"steps": 2})):
        for path in (lines, tmp_path / "rows.csv"):
            verb.run(own, "walk", str(path), str(path.with_suffix(".out.parquet")), **options)
        assert (tmp_path / "rows.out.parquet").exists()


@pytest.mark.parametrize("bad", ["[1, 2]", '{"at": "2024', "7", '"text"'])
def test_a_document_that_is_no_object_is_rejected_with_its_reason(tmp_path: Path, bad: str) -> None:
    own = settings_of(tmp_path)
    path = objects(tmp_path / "rows.jsonl", ROWS)
    with path.open("a") as stream:
        stream.write(bad + "\n")
    report = filter.run(own, "walk", str(path), str(tmp_path / "out.csv"))
    assert report.data["rejected_by_reason"] == {NOT_AN_OBJECT: 1} and report.data["rows"] == 11


def test_numbers_in_some_documents_and_texts_in_others_are_the_same_column(tmp_path: Path) -> None:
    settings_of(tmp_path)
    mixed = [row | {"value": str(row["value"])} if i > 6 else row for i, row in enumerate(ROWS)]
    spec = load_spec("walk", tmp_path)
    found = filtered_rows(spec, objects(tmp_path / "mixed.jsonl", mixed))
    assert found == filtered_rows(spec, objects(tmp_path / "rows.jsonl", ROWS))


def test_a_folder_of_files_of_all_formats_is_read_in_order_of_their_names(tmp_path: Path) -> None:
    settings_of(tmp_path)
    folder = tmp_path / "in"
    folder.mkdir()
    texts = [row | {"value": str(row["value"])} for row in ROWS]
    objects(folder / "a.jsonl", texts[:4])
    pd.DataFrame(ROWS[4:]).to_csv(folder / "b.csv", index=False)
    spec = load_spec("walk", tmp_path)
    assert read_rows(spec, str(folder)).columns["value"].to_pylist() == [row["value"] for row in texts]
    objects(folder / "c.jsonl", ROWS[:2])
    assert read_rows(spec, str(folder)).rows == 12
    pd.DataFrame(ROWS).to_parquet(folder / "d.parquet")
    with pytest.raises(UserError, match=r"d.parquet: column 'value' holds double, and string in the files"):
        read_rows(spec, str(folder))


ZONES = ("UTC", "Europe/Vienna", "America/Sao_Paulo", "Asia/Kathmandu")
FORMS = (None, "%d.%m.%Y %H:%M", "epoch_seconds", "epoch_milliseconds")
KEYS = st.sampled_from(["a", "b c", "007", "é", ""])
VALUES = st.one_of(st.none(), st.sampled_from(["1.5", "-2", "1e3", "", "NA", "text", "inf", "1,5"]))


@st.composite
def drawn_files(draw: st.DrawFn) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Draw settings of a spec, and rows with times written as these say, good values and bad ones."""
    form = draw(st.sampled_from(FORMS))
    settings = {"time_zone": draw(st.sampled_from(ZONES)), **({"time_format": form} if form else {})}
    rows = []
    for _ in range(draw(st.integers(1, 12))):
        at = datetime(2024, 3, 31) + timedelta(minutes=draw(st.integers(0, 300)))
        if form is None:
            text = at.isoformat(draw(st.sampled_from([" ", "T"])))
        elif form.startswith("epoch"):
            text = str(int(at.timestamp()) * (1 if form == "epoch_seconds" else 1000))
        else:
            text = at.strftime(form)
        at_text = draw(st.sampled_from([text, text, text, "no time", ""]))
        rows.append({"at": at_text, "sensor": draw(KEYS), "value": draw(VALUES)})
    return settings, rows


def checked_rows(spec: ModelSpec, path: Path) -> ReadRows:
    """Return the rows that `ingest` and `estimate --input` accept of a file."""
    reader = select_reader(spec, str(path))
    batches = [one for piece in reader.pieces() for one in reader.read(piece, {"sensor": "string"})]
    found = [row for batch in batches for row in batch.to_pylist()]
    rows = [row_of(spec, row | {"at": instant_of(row["at"])}) for row in found if row[REASON] is None]
    return ReadRows(rows, list(spec.measurement), len(found) - len(rows))


@settings(max_examples=60, deadline=None)
@given(drawn_files())
@example(
    (
        {"time_zone": "UTC", "time_format": "%d.%m.%Y %H:%M"},
        [
            {"at": "no time", "sensor": "a", "value": "NA"},
            {"at": "31.03.2024 00:00", "sensor": "b c", "value": None},
        ],
    )
)
@example(
    (
        {"time_zone": "UTC", "time_format": "%d.%m.%Y %H:%M"},
        [
            {"at": "", "sensor": "a", "value": None},
            {"at": "31.03.2024 00:00", "sensor": "b c", "value": None},
        ],
    )
)
def test_files_of_every_format_have_one_reading(drawn: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    wishes, rows = drawn
    with TemporaryDirectory() as name:
        folder = Path(name)
        settings_of(folder, SPEC + yaml.safe_dump(wishes))
        spec = load_spec("walk", folder)
        frame = pd.DataFrame(rows, dtype="string")
        frame.to_csv(folder / "rows.csv", index=False)
        objects(folder / "rows.jsonl", rows)
        frame.to_parquet(folder / "rows.parquet", index=False)
        found = [checked_rows(spec, folder / f"rows.{ending}") for ending in ("csv", "jsonl", "parquet")]
        assert found[0] == found[1] == found[2]
        assert found == [
            filtered_rows(spec, folder / f"rows.{ending}") for ending in ("csv", "jsonl", "parquet")
        ]


def test_a_table_that_is_no_models_is_read_from_json_as_from_csv(tmp_path: Path) -> None:
    rows = [{"site": "a", "gain": 1.5}, {"site": "b", "gain": 2}]
    path = objects(tmp_path / "inputs.jsonl", rows)
    pd.DataFrame(rows).to_parquet(tmp_path / "inputs.parquet")
    wanted = read_all(str(tmp_path / "inputs.parquet"), ["site", "gain"])
    for columns in (["site", "gain"], None):
        found = read_all(str(path), columns)
        assert {name: column.to_pylist() for name, column in found.columns.items()} == {
            name: column.to_pylist() for name, column in wanted.columns.items()
        }
    odd = objects(tmp_path / "odd.jsonl", [{**row, "more": {"n": -0.0}} for row in rows])
    assert read_all(str(odd), ["site", "gain"]).columns["site"].to_pylist() == ["a", "b"]
    odd.write_text('{"site": "a", "gain": 1.5, "n": -0}\n' * 3)
    assert read_all(str(odd), ["site", "gain"]).rows == 3
    with pytest.raises(UserError, match="there is no column 'loss'"):
        read_all(str(path), ["site", "loss"])
    with path.open("a") as stream:
        stream.write("3\n")
    with pytest.raises(UserError, match="inputs.jsonl: 1 row: value: not a JSON object; write one object"):
        read_all(str(path), None)
