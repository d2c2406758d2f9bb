"""Files land in a folder and in S3 alike: by several processes, once, and without a rest of a landing that failed."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs import ingest
from jobs.landing import csv_parquet, file_groups
from jobs.landing.workers import WorkerEnded, Workers
from jobs.storage.tables import measurements
from jobs.storage.warehouse import Tables
from tests.jobs.support.pipeline import Pipeline, random_walk_spec


def test_files_land_once_wherever_the_warehouse_is(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_groups, "INLINE_BYTES", 0)
    monkeypatch.setattr(csv_parquet, "PIECE_BYTES", 4000)
    pipeline, path, tables = (
        Pipeline(tmp_path / "own", random_walk_spec()),
        tmp_path / "rows.csv",
        Tables(root),
    )
    settings = replace(pipeline.settings, warehouse=root)
    lines = (f"{row},{'soon' if row % 100 == 7 else '2024-03-01'},{row},1\n" for row in range(3000))
    path.write_text("id,at,a,b\n" + "".join(lines))
    run = Workers.run

    def killed(self: Workers, tasks: Any, on_read: Any) -> Any:
        self.start()
        os.kill(self._others[0].pid, signal.SIGKILL)
        return run(self, tasks, on_read)

    def parts(table: str) -> int:
        return sum(name.startswith("part-") for name in tables.files(table).names(""))

    with monkeypatch.context() as patch, pytest.raises(WorkerEnded):
        patch.setattr(Workers, "run", killed)
        ingest.run(settings, "walk", [str(path)])
    assert (parts(measurements("walk")), parts("quarantine")) == (0, 0)
    for landed in (1, 0):
        report = ingest.run(settings, "walk", [str(path)])
        assert (report.data["files_landed"], report.data["files_landed_before"]) == (landed, 1 - landed)
        assert tables.row_count(measurements("walk")) == 2970 and tables.row_count("quarantine") == 30
        assert parts(measurements("walk")) == 2
    assert sorted(row["a"] for row in tables.rows(measurements("walk"))) == [
        float(row) for row in range(3000) if row % 100 != 7
    ]
