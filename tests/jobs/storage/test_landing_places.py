"""Files land in a folder and in S3 alike: by several processes, once, and without a rest of a landing that failed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs import ingest
from jobs.core.errors import RUN_FAILED
from jobs.core.settings import Settings
from jobs.landing import csv_parquet, file_landing
from jobs.landing.landed_files import hash_path
from jobs.landing.workers import WorkerEnded, Workers
from jobs.storage.table_log import FileTable
from jobs.storage.tables import measurements
from jobs.storage.warehouse import Tables
from tests.jobs.support.pipeline import Pipeline, random_walk_spec

TABLE = measurements("walk")
ROWS = 3000

KILLED = """
import os, signal, sys
from pathlib import Path
from jobs import ingest
from jobs.core.settings import Settings
from jobs.landing import csv_parquet, file_landing
from jobs.landing.workers import Workers
from jobs.storage.table_log import FileTable

file_landing.INLINE_BYTES = file_landing._FILE_BYTES = 0
csv_parquet.PIECE_BYTES = 4000
where, warehouse, models, folder, note = sys.argv[1:]
run, commit = Workers.run, FileTable.commit_for_all

def strike(at):
    if at == where:
        os.kill(os.getpid(), signal.SIGKILL)

def striking_run(self, tasks, on_read):
    found = run(self, tasks, on_read)
    Path(note).write_text(str(self._others[0]._process.pid))
    strike("before the first commit")
    return found

def striking_commit(self, *arguments):
    if self.name != "quarantine":
        strike("between the commits")
    version = commit(self, *arguments)
    if self.name != "quarantine":
        strike("after the commits")
    return version

Workers.run, FileTable.commit_for_all = striking_run, striking_commit
ingest.run(Settings.load(warehouse, models, "local[2,4]", quiet=True), "walk", [folder])
"""


def settings_at(root: str, tmp_path: Path) -> Settings:
    return replace(Pipeline(tmp_path / "own", random_walk_spec()).settings, warehouse=root)


def write_rows(path: Path, first: int, count: int) -> None:
    """Write rows of which each hundredth has no time."""
    path.parent.mkdir(exist_ok=True)
    lines = (
        f"{row},{'soon' if row % 100 == 7 else '2024-03-01'},{row},1\n" for row in range(first, first + count)
    )
    path.write_text("id,at,a,b\n" + "".join(lines))


def landed(root: str) -> tuple[list[int], list[int]]:
    """Return the landed rows, and those in quarantine."""
    tables = Tables(root)
    good = tables.rows(TABLE, columns=["a"]) if tables.exists(TABLE) else []
    bad = tables.rows("quarantine", columns=["payload"]) if tables.exists("quarantine") else []
    return sorted(int(row["a"]) for row in good), sorted(int(json.loads(row["payload"])["a"]) for row in bad)


def wanted(count: int) -> tuple[list[int], list[int]]:
    return [row for row in range(count) if row % 100 != 7], list(range(7, count, 100))


def parts(root: str, table: str) -> int:
    return sum(name.startswith("part-") for name in Tables(root).files(table).names(""))


def test_files_land_once_wherever_the_warehouse_is(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_landing, "INLINE_BYTES", 0)
    monkeypatch.setattr(csv_parquet, "PIECE_BYTES", 4000)
    settings, path = settings_at(root, tmp_path), tmp_path / "rows.csv"
    write_rows(path, 0, ROWS)
    run = Workers.run

    def killed(self: Workers, tasks: Any, on_read: Any) -> Any:
        self.start()
        os.kill(self._others[0]._process.pid, signal.SIGKILL)
        return run(self, tasks, on_read)

    with (
        monkeypatch.context() as patch,
        pytest.raises(WorkerEnded, match=r"rows.csv was killed \(signal 9\)") as said,
    ):
        patch.setattr(Workers, "run", killed)
        ingest.run(settings, "walk", [str(path)])
    assert said.value.exit_code == RUN_FAILED
    assert (parts(root, TABLE), parts(root, "quarantine")) == (0, 0)
    for files in (1, 0):
        report = ingest.run(settings, "walk", [str(path)])
        assert (report.data["files_landed"], report.data["files_landed_before"]) == (files, 1 - files)
        assert landed(root) == wanted(ROWS)
        assert parts(root, TABLE) == 2


@pytest.mark.parametrize(
    ("root", "where"),
    [
        ("folder", "before the first commit"),
        ("s3", "between the commits"),
        ("folder", "after the commits"),
        pytest.param("s3", "before the first commit", marks=pytest.mark.slow),
        pytest.param("folder", "between the commits", marks=pytest.mark.slow),
        pytest.param("s3", "after the commits", marks=pytest.mark.slow),
    ],
    indirect=["root"],
)
def test_a_killed_landing_takes_its_processes_along_and_the_next_one_completes_it(
    root: str, tmp_path: Path, where: str
) -> None:
    settings, folder, note = settings_at(root, tmp_path), tmp_path / "in", tmp_path / "pid"
    for number in range(3):
        write_rows(folder / f"{number}.csv", number * 500, 500)
    given = [where, root, str(settings.models), str(folder), str(note)]
    done = subprocess.run([sys.executable, "-c", KILLED, *given], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    good, bad = wanted(1500)
    rows = (good if where == "after the commits" else [], [] if where == "before the first commit" else bad)
    assert landed(root) == rows and parts(root, TABLE) == 2
    until = time.monotonic() + 30
    while Path(f"/proc/{note.read_text()}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{note.read_text()}").exists()
    write_rows(folder / "3.csv", 1500, 500)  # the next landing lands these files together with another
    for _ in range(2):
        ingest.run(settings, "walk", [str(folder)])
        assert landed(root) == wanted(2000)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("where", ["before the first commit", "between the commits"])
def test_a_landing_that_was_frozen_lands_nothing_that_another_has_landed_meanwhile(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, count: int
) -> None:
    if where == "between the commits" and "://" not in root:
        pytest.skip("in a folder a lock lets no other process land until this one ends")
    # The other one lands copies, as a transaction stands for content and path: of either order of their numbers.
    files = [tmp_path / f"in-{number}" / "0.csv" for number in range(3)]
    lower, own, higher = sorted(files, key=lambda one: hash_path(str(one)))
    settings, folder = settings_at(root, tmp_path), own.parent
    for number in range(count):
        write_rows(folder / f"{number}.csv", number * 500, 500)
    run, commit = Workers.run, FileTable.commit_for_all

    def land_copies(patch: pytest.MonkeyPatch, to: Path) -> None:
        patch.undo()
        for number in range(count):
            write_rows(to.with_name(f"{number}.csv"), number * 500, 500)
        ingest.run(settings, "walk", [str(to.parent)])

    def frozen_run(self: Workers, tasks: Any, on_read: Any) -> Any:
        found = run(self, tasks, on_read)
        land_copies(patch, lower)
        return found

    def frozen_commit(self: FileTable, *arguments: Any) -> Any:
        if self.name == TABLE:
            land_copies(patch, lower if count == 1 else higher)
        return commit(self, *arguments)

    with monkeypatch.context() as patch:
        if where == "before the first commit":
            patch.setattr(Workers, "run", frozen_run)
        else:
            patch.setattr(FileTable, "commit_for_all", frozen_commit)
        report = ingest.run(settings, "walk", [str(folder)])
    assert (report.data["files_landed"], report.data["files_landed_before"]) == (0, count)
    assert landed(root) == wanted(count * 500)
