"""One reading of files: the same rows in every format, for `filter` as for `ingest`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from jobs import filter, forecast
from jobs.core.errors import UserError
from jobs.core.settings import Settings
from jobs.landing.file_rows import read_rows
from jobs.landing.json_rows import NOT_AN_OBJECT
from jobs.specs.loading import load_spec
from tests.corpus.reading import filtered_rows, landed_rows

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
    settings = settings_of(tmp_path)
    lines = objects(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "rows.json").write_text(json.dumps(ROWS, indent=1))
    pd.DataFrame(ROWS).to_csv(tmp_path / "rows.csv", index=False)
    spec = load_spec("walk", tmp_path)
    wanted = filtered_rows(spec, tmp_path / "rows.csv")
    assert len(wanted.rows) == 10
    for name in ("rows.jsonl", "rows.json"):
        assert filtered_rows(spec, tmp_path / name) == wanted
        own = replace(settings, warehouse=str(tmp_path / name.replace(".", "-")))
        assert landed_rows(own, spec, tmp_path / name).ordered == wanted.ordered
    for verb, options in ((filter, {}), (forecast, {"steps": 2})):
        for path in (lines, tmp_path / "rows.csv"):
            verb.run(settings, "walk", str(path), str(path.with_suffix(".out.parquet")), **options)
        assert (tmp_path / "rows.out.parquet").exists()


@pytest.mark.parametrize("bad", ["[1, 2]", '{"at": "2024', "7", '"text"'])
def test_a_document_that_is_no_object_is_rejected_with_its_reason(tmp_path: Path, bad: str) -> None:
    settings = settings_of(tmp_path)
    path = objects(tmp_path / "rows.jsonl", ROWS)
    with path.open("a") as stream:
        stream.write(bad + "\n")
    report = filter.run(settings, "walk", str(path), str(tmp_path / "out.csv"))
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
