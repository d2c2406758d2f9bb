"""Landing files: accepted rows are appended once, rejected rows are kept with their reason, errors change nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from jobs import ingest, status
from jobs.core.errors import UserError
from jobs.storage.tables import estimates
from tests.jobs.support.pipeline import Pipeline, random_rows, random_walk_spec

pytestmark = pytest.mark.spark

BAD = """id,at,a,b,comment
1,2024-03-01T00:00:00Z,1.5,2.5,fits
2,yesterday,1,1,no time
3,2024-03-01T00:00:00Z,many,1,no number
4,2024-03-01T00:00:00Z,inf,1,infinite
,2024-03-01T00:00:00Z,1,1,no key
5,2024-03-01T00:00:00Z,,NA,"nothing measured, but fits"
6,2024-03-01T00:00:00Z,1
"""


@pytest.mark.core
def test_rejected_rows_are_kept_with_their_reason(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec())
    path = tmp_path / "bad.csv"
    path.write_text(BAD)
    first = ingest.run(pipeline.settings, "walk", [str(path)])
    assert (first.data["rows"], first.data["quarantined"]) == (2, 5)
    kept = {row["reason"]: row for row in pipeline.tables.rows("quarantine")}
    assert set(kept) == {
        "time at: not a time",
        "measurement a: not a number",
        "measurement a: not finite",
        "key id: missing",
        "row: not as many fields as the header",
    }
    row = kept["measurement a: not a number"]
    assert json.loads(row["payload"])["comment"] == "no number"
    assert (row["model"], row["source"]) == ("walk", str(path))
    again = ingest.run(pipeline.settings, "walk", [str(path)])
    assert (again.data["rows"], again.data["quarantined"], again.data["files_landed_before"]) == (0, 0, 1)
    assert pipeline.tables.row_count("quarantine") == 5
    assert pipeline.tables.row_count("measurements/walk") == 2

    (shown,) = status.run(pipeline.settings, "walk").data["models"]
    assert shown["measurements"] == {"version": 1, "rows": 2, "quarantined": 5}


def test_an_error_comes_before_anything_has_landed(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec())
    good = random_rows(1)[0]
    for bad, message in (
        (good.rename(columns={"b": "c"}), "there is no column 'b'"),
        (good.assign(a=True), "measurement column 'a' holds bool"),
        (good.assign(at=1), "time column 'at' holds numbers \\(int64\\); set time_format"),
    ):
        with pytest.raises(UserError, match=message):
            pipeline.land_files(pipeline.file_of(good), pipeline.file_of(bad))
    for name in ("absent.csv", "*.csv", "notes.txt"):
        (tmp_path / "notes.txt").touch()
        with pytest.raises(UserError, match=r"no such file|unknown file format"):
            ingest.run(pipeline.settings, "walk", [str(tmp_path / name)])
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(UserError, match="cannot be read"):
        ingest.run(pipeline.settings, "walk", [str(tmp_path / "broken.parquet")])
    assert not pipeline.tables.exists("measurements/walk")
    assert not pipeline.tables.exists("quarantine")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["quarantine", "apply"])
def test_late_rows_go_to_quarantine_once_or_are_applied(tmp_path: Path, policy: str) -> None:
    days = random_rows(3)
    late = days[1].assign(at=days[0]["at"])  # older than the state of every key, except new keys
    pipeline = Pipeline(tmp_path, random_walk_spec(late=policy))
    pipeline.land(days[0])
    pipeline.pretrain()
    pipeline.land(days[1])
    pipeline.land(late)
    done = pipeline.stream()
    assert done.data["rows"] + done.data["late"] == len(days[1]) + len(late)
    assert len(pipeline.tables.rows(estimates("walk"))) == done.data["rows"]
    if policy == "apply":
        assert done.data["late"] == 0
        return
    assert done.data["late"] > 100
    rows = pipeline.tables.rows("quarantine")
    assert len(rows) == done.data["late"]
    row = rows[0]
    assert row["reason"] == "late: older than the key's state"
    assert (row["generation"], row["batch_id"]) == ("walk-g0001", 1)
    payload = json.loads(row["payload"])
    original = late[(late["id"] == payload["id"]) & (late["at"] == pd.Timestamp(payload["at"]))]
    assert payload["a"] in [None if v != v else v for v in original["a"]]
