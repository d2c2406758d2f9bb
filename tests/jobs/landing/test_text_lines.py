"""Lines of text by a regular expression: the rows of a CSV file with the same values; other lines in quarantine."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from jobs import filter as offline
from jobs import ingest, quarantine
from jobs.core.errors import UserError
from jobs.core.settings import Settings
from jobs.landing import file_landing, file_parts
from jobs.landing.text_lines import LINE, match_again
from jobs.specs.loading import load_spec
from jobs.storage.tables import measurements
from tests.jobs.support.pipeline import Pipeline, random_walk_spec

PATTERN = r"\[(?P<at>\S+)\] boiler (?P<id>\w+): a=(?P<a>\S*)(?: b=(?P<b>\S+))?(?: #.*)?"
GOOD = [
    "[2024-03-01T00:00:00] boiler x: a=1.5 b=2",
    "[2024-03-01T00:00:10] boiler y: a= # of two measurements both are missing",
    "[2024-03-01T00:00:20] boiler x: a=-3e2 b=NA",
    "[2024-03-01T00:00:30] boiler é: a=4",
]
BAD = ["out of band", "[soon] boiler x: a=1 b=2", "[2024-03-01T00:00:40] boiler x: a=1 b=2 and more"]
CSV = (
    "at,id,a,b\n2024-03-01T00:00:00,x,1.5,2\n2024-03-01T00:00:10,y,,\n2024-03-01T00:00:20,x,-3e2,NA\n"
    "2024-03-01T00:00:30,é,4,\n"
)
REASONS = {"line: does not match line_pattern": 2, "time at: not a time": 1, "row: not UTF-8 text": 1}
TEXT = "\ufeff" + "\r\n".join([GOOD[0], BAD[0], "", GOOD[1], "  ", BAD[1], GOOD[2], BAD[2]]) + "\n" + GOOD[3]


def written(folder: Path) -> Path:
    path = folder / "boilers.log"
    path.write_bytes(TEXT.encode() + b"\n[2024-03-02] boiler \xff: a=1 b=1\n")
    return path


def rows(pipeline: Pipeline) -> list[tuple[Any, ...]]:
    found = pipeline.warehouse.read(measurements("walk")).select("at", "id", "a", "b").collect()
    return sorted(tuple(row) for row in found)


@pytest.mark.spark
@pytest.mark.parametrize("inline", [16 << 20, pytest.param(0, marks=pytest.mark.slow)])
def test_lines_land_as_the_rows_of_a_csv_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline: int
) -> None:
    monkeypatch.setattr(file_landing, "INLINE_BYTES", inline)
    monkeypatch.setattr(file_parts, "PIECE_BYTES", 60)  # of many parts
    pipeline = Pipeline(tmp_path / "lines", random_walk_spec(line_pattern=PATTERN))
    path = written(tmp_path)
    (tmp_path / "notes.txt.bak").write_text("nothing")
    done = ingest.run(pipeline.settings, "walk", [str(path)])
    assert (done.data["rows"], done.data["reasons"]) == (4, REASONS)
    again = ingest.run(pipeline.settings, "walk", [str(tmp_path)])  # the folder has that one file
    assert (again.data["files_landed_before"], again.data["rows"]) == (1, 0)
    table = Pipeline(tmp_path / "table", random_walk_spec())
    (tmp_path / "table" / "rows.csv").write_text(CSV)
    table.land_files(tmp_path / "table" / "rows.csv")
    assert repr(rows(pipeline)) == repr(rows(table))
    held = [json.loads(row["payload"]) for row in pipeline.tables.rows("quarantine")]
    assert {row["_line"] for row in held} == {*BAD, r"[2024-03-02] boiler \xff: a=1 b=1"}

    path.write_bytes(path.read_bytes() + b"[2024-03-03] boiler z: a=1 b=1\n")
    with pytest.raises(UserError, match="has changed since it landed"):
        ingest.run(pipeline.settings, "walk", [str(path)])
    assert ingest.run(pipeline.settings, "walk", [str(path)], changed="append").data["rows"] == 1

    # a line is replayed by the pattern of the day
    pipeline.write_spec(random_walk_spec(line_pattern=PATTERN.replace("(?: #.*)?", "(?: #.*| and more)?")))
    outcome = quarantine.act(pipeline.settings, "replay", "walk")
    assert outcome.data["landed"] == 1
    assert [row[1:] for row in rows(pipeline)][-2:] == [("x", 1.0, 2.0), ("z", 1.0, 1.0)]


@pytest.mark.parametrize("packed", [False, True])
def test_filter_reads_lines_as_it_reads_a_csv_file(tmp_path: Path, packed: bool) -> None:
    settings = Settings.load(str(tmp_path / "warehouse"), str(tmp_path), None)
    (tmp_path / "walk.yaml").write_text(yaml.safe_dump(random_walk_spec(line_pattern=PATTERN)))
    path = tmp_path / ("boilers.log.gz" if packed else "boilers.txt")
    data = "\n".join(GOOD + BAD[:1]).encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    (tmp_path / "rows.csv").write_text(CSV)
    report = offline.run(settings, "walk", str(path), str(tmp_path / "a.csv"))
    offline.run(settings, "walk", str(tmp_path / "rows.csv"), str(tmp_path / "b.csv"))
    assert report.data["rejected_by_reason"] == {"line: does not match line_pattern": 1}
    found, expected = pd.read_csv(tmp_path / "a.csv"), pd.read_csv(tmp_path / "b.csv")
    pd.testing.assert_frame_equal(found.iloc[:4], expected, check_exact=True, check_dtype=False)


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("(?P<id>", "is no regular expression"),
        (r"(?P<id>\w+) (?P<at>\S+) (?P<a>\S+)", "has no group for column 'b'"),
        (PATTERN + "(?P<_line>x)?", "'_line' cannot be the name of a group"),
    ],
)
def test_a_pattern_that_cannot_give_the_columns_is_refused(tmp_path: Path, pattern: str, told: str) -> None:
    (tmp_path / "walk.yaml").write_text(yaml.safe_dump(random_walk_spec(line_pattern=pattern)))
    with pytest.raises(UserError, match=told):
        load_spec("walk", tmp_path)


def test_an_empty_group_of_a_line_that_is_replayed_is_null_as_in_one_that_lands() -> None:
    groups = {"at": "2024-03-01T00:00:10", "id": "y", "a": None, "b": None}
    assert match_again(PATTERN, {LINE: GOOD[1]}) == ({LINE: GOOD[1], **groups}, None)


def test_text_without_a_pattern_says_what_to_write(tmp_path: Path) -> None:
    settings = Settings.load(str(tmp_path / "warehouse"), str(tmp_path), None)
    (tmp_path / "walk.yaml").write_text(yaml.safe_dump(random_walk_spec()))
    (tmp_path / "rows.log").write_text("x")
    with pytest.raises(UserError, match="add line_pattern, a regular expression with a named group"):
        offline.run(settings, "walk", str(tmp_path / "rows.log"), str(tmp_path / "a.csv"))
