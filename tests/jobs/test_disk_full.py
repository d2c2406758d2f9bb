"""A disk that is full while something is written: said in a sentence, nothing half visible, and it goes on after."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest

from jobs import errors, export, snapshots, upgrade
from jobs.errors import FULL, RUN_FAILED, is_full
from jobs.live import live_estimates
from jobs.tables import Warehouse, measurements
from tests.jobs.pipeline import Pipeline, assert_bit_equal, ordered, random_rows, random_walk_spec, since

DISK = 24 * 2**20


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


def fails_for_want_of_room(what: Callable[[], object]) -> bool:
    """Do something; True if it failed and said why in one sentence, False if there was room enough."""
    try:
        what()
    except Exception as problem:
        assert is_full(problem), repr(problem)
        told = StringIO()
        assert errors.show(problem, stream=told) == RUN_FAILED
        (line,) = told.getvalue().splitlines()
        assert line.startswith("error: ") and FULL in line
        return True
    return False


def test_what_a_full_disk_says() -> None:
    deep = RuntimeError("a lease could not be given back")
    deep.__context__ = OSError(28, "No space left on device")
    assert is_full(deep) and not is_full(RuntimeError("a lease could not be given back"))
    told = StringIO()
    assert errors.show(deep, stream=told) == RUN_FAILED
    assert told.getvalue() == f"error: {FULL}\n"


@pytest.mark.soak
@pytest.mark.spark
def test_a_disk_that_is_full_at_any_step_loses_nothing(disk: Path) -> None:
    days = random_rows(8, rows=60)
    pipeline = Pipeline(disk, random_walk_spec())
    ballast = Ballast(disk)
    failed: list[str] = []

    def tried(name: str, what: Callable[[], object], *free: int) -> None:
        """Do something with ever more room until there is enough."""
        for room in free:
            ballast.leave(room)
            if not fails_for_want_of_room(what):
                ballast.clear()
                return
            failed.append(name)
        ballast.clear()
        what()

    some = (0, 4_096, 12_288, 24_576, 40_960, 65_536, 98_304)
    pipeline.land(days[0])
    frame = disk / "day.csv"
    days[1].to_csv(frame, index=False)
    before = rows_of(pipeline.warehouse)
    tried("ingest", lambda: ingest_file(pipeline, frame), *some)
    assert rows_of(pipeline.warehouse) == before + len(days[1])
    tried("pretrain", lambda: pipeline.pretrain(to_version=1), *some)
    (manifest,) = snapshots.all_of(pipeline.warehouse)
    snapshots.verify(pipeline.warehouse, manifest)
    for day in days[2:]:
        pipeline.land(day)
        tried("stream", pipeline.stream, *some)
    tried("export", lambda: export.run(pipeline.settings, "walk"), *some)
    expected = since(pipeline.batch(), days[1])
    assert_bit_equal(ordered(live_estimates(pipeline.warehouse, "walk").toPandas()), expected)
    pipeline.write_spec(random_walk_spec(stream={"partitions": 3, "keys_per_block": 8}))
    tried("upgrade", lambda: upgrade.run(pipeline.settings, "walk", mode="repartition"), *some)
    pipeline.stream()
    assert_bit_equal(ordered(live_estimates(pipeline.warehouse, "walk").toPandas()), expected)
    assert {"ingest", "pretrain", "stream", "export", "upgrade"} <= set(failed)


def ingest_file(pipeline: Pipeline, file: Path) -> None:
    from jobs import ingest

    ingest.run(pipeline.settings, "walk", [str(file)])


def rows_of(warehouse: Warehouse) -> int:
    return warehouse.read(measurements("walk")).count()
