"""A file a key on its way into the measurements table: exactly once by name and content."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from jobs import ingest
from jobs.core.report import Report
from jobs.landing import file_landing
from jobs.storage.tables import measurements
from tests.jobs.support.pipeline import Pipeline, random_walk_spec

pytestmark = pytest.mark.spark


def rows(pipeline: Pipeline) -> list[tuple[str, float]]:
    frame = pipeline.warehouse.read(measurements("walk")).select("id", "a").collect()
    return sorted((row["id"], row["a"]) for row in frame)


def land(pipeline: Pipeline, *paths: Path, changed: str = "refuse") -> Report:
    return ingest.run(pipeline.settings, "walk", [str(path) for path in paths], changed=changed)  # type: ignore[arg-type]


@pytest.mark.parametrize("inline", [pytest.param(16 << 20, marks=pytest.mark.slow), 0])
def test_files_of_equal_rows_are_two_keys_and_land_once_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline: int
) -> None:
    monkeypatch.setattr(file_landing, "INLINE_BYTES", inline)
    folder = tmp_path / "in"
    (tmp_path / "moved").mkdir()
    folder.mkdir()
    pipeline = Pipeline(tmp_path, random_walk_spec(key_from_name="id"))
    (folder / "x.csv").write_text("at,a,b\n2024-03-01,1,1\nsoon,2,2\n")
    shutil.copy(folder / "x.csv", folder / "y.csv")
    (folder / "z.jsonl").write_text('{"at": "2024-03-01", "a": 3, "b": 1}\n{"at": "soon", "a": 4, "b": 1}\n')
    assert land(pipeline, folder).data["rows"] == 3
    assert rows(pipeline) == [("x", 1.0), ("y", 1.0), ("z", 3.0)]
    kept = pipeline.tables.rows("quarantine", columns=["payload"])
    assert sorted(json.loads(row["payload"])["id"] for row in kept) == ["x", "y", "z"]  # can be replayed
    shutil.move(folder / "x.csv", tmp_path / "moved" / "x.csv")
    again = land(pipeline, folder, tmp_path / "moved")
    assert (again.data["files_landed_before"], again.data["rows"]) == (3, 0)
    (folder / "y.csv").write_text((folder / "y.csv").read_text() + "2024-03-02,5,1\n")
    assert land(pipeline, folder / "y.csv", changed="append").data["rows"] == 1
    assert rows(pipeline) == [("x", 1.0), ("y", 1.0), ("y", 5.0), ("z", 3.0)]
