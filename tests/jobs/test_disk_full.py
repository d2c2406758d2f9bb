"""A disk that is full while something is written: said in a sentence, nothing half visible, and it goes on after."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pandas as pd
import pytest

from jobs import export, upgrade
from jobs.core.errors import RUN_FAILED
from jobs.lineage.live import live_estimates
from jobs.snapshots import manifests, store
from jobs.storage.tables import measurements
from tests.jobs.support.pipeline import (
    Pipeline,
    assert_bit_equal,
    ordered,
    random_rows,
    random_walk_spec,
    since,
)
from tests.jobs.support.processes import Driver

FULL = (
    "there is no room left on a disk that it writes to (No space left on device): make room and run the command again; "
    "no reader sees what was half written, and nothing is lost"
)
DISK = 24 * 2**20
ROOM = (0, 12_288, 40_960)
"""Bytes that are left, in the order in which a verb is tried with them: it fails at another write with each."""
OTHER_ROOM = (4_096, 24_576, 65_536)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


class Ballast:
    """Fills a disk but for some bytes."""

    def __init__(self, disk: Path) -> None:
        self.disk, self.file = disk, disk / "ballast"

    def leave(self, free: int) -> None:
        self.clear()
        room = os.statvfs(self.disk)
        with self.file.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, room.f_bavail * room.f_frsize - free))

    def clear(self) -> None:
        self.file.unlink(missing_ok=True)


def fails_for_want_of_room(pipeline: Pipeline, *command: str) -> bool:
    """Run a verb as a process of its own; True if it failed and said why in one sentence, False if it did its work."""
    driver = Driver(pipeline, *command)
    code, said = driver.finish(), driver.said()
    if code == 0:
        return False
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert (code, len(lines)) == (RUN_FAILED, 1), said
    assert FULL in lines[0] and "Traceback" not in said, said
    return True


@pytest.mark.soak
@pytest.mark.spark
def test_a_disk_that_is_full_at_any_step_loses_nothing(disk: Path, tmp_path: Path) -> None:
    days = random_rows(4, rows=60)
    folder = tmp_path / "pipeline"
    folder.mkdir()
    (disk / "warehouse").mkdir()
    (folder / "warehouse").symlink_to(disk / "warehouse")  # what tests write for themselves is elsewhere
    pipeline = Pipeline(folder, random_walk_spec())
    ballast = Ballast(disk)
    failed: set[str] = set()

    def tried(*command: str, at_last: Callable[[], object], rooms: Sequence[int] = ROOM) -> None:
        """Run a verb with ever more room until there is enough, at last in this process."""
        for room in rooms:
            ballast.leave(room)
            if not fails_for_want_of_room(pipeline, *command, "--model", "walk"):
                ballast.clear()
                return
            failed.add(command[0])
        ballast.clear()
        at_last()

    def live() -> pd.DataFrame:
        return ordered(live_estimates(pipeline.warehouse, "walk").toPandas())

    pipeline.land(days[0])
    file = folder / "day.csv"
    days[1].to_csv(file, index=False)
    tried("ingest", "--input", str(file), at_last=lambda: pipeline.land_files(file))
    assert pipeline.warehouse.read(measurements("walk")).count() == len(days[0]) + len(days[1])
    tried("pretrain", "--to-version", "1", at_last=lambda: pipeline.pretrain(to_version=1))
    (manifest,) = manifests.read_manifests(pipeline.warehouse)
    store.verify(pipeline.warehouse, manifest)
    for day, rooms in zip(days[2:], (ROOM, OTHER_ROOM), strict=True):
        pipeline.land(day)
        tried("stream", at_last=pipeline.stream, rooms=rooms)
    tried("export", at_last=lambda: export.run(pipeline.settings, "walk"))
    expected = since(pipeline.batch(), days[1])
    assert_bit_equal(live(), expected)
    pipeline.write_spec(random_walk_spec(stream={"partitions": 3, "keys_per_block": 8}))
    tried(
        *("upgrade", "--mode", "repartition"),
        at_last=lambda: upgrade.run(pipeline.settings, "walk", mode="repartition"),
    )
    pipeline.stream()
    assert_bit_equal(live(), expected)
    assert failed == {"ingest", "pretrain", "stream", "export", "upgrade"}
