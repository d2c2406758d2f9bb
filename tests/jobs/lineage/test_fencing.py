"""A driver that has lost its lease cannot write, wherever it was stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from jobs.core.errors import ALREADY_RUNNING, RUN_FAILED, UserError
from jobs.lineage import leases
from jobs.lineage.fencing import Fence, RowGroup
from jobs.lineage.generations import Generation, build_generation_row, find_live, read_generations
from jobs.lineage.leases import Lease
from jobs.spark.warehouse import Warehouse
from jobs.storage.table_log import FileTable
from jobs.storage.tables import GENERATIONS
from jobs.supervision.driver_log import LOST, DriverIdentity, DriverLog
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, random_rows, random_walk_spec, since
from tests.jobs.support.processes import Driver, files
from tests.support.stand_ins import stand_in

pytestmark = pytest.mark.spark

ROWS = "value int, generation string, batch_id bigint"


@pytest.fixture
def warehouse(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Warehouse:
    """A warehouse with a generation, in which a driver of another machine counts as dead at once."""
    monkeypatch.setattr("jobs.supervision.driver_log.LEASE_SECONDS", 0.0)
    made = Warehouse(spark, str(tmp_path))
    made.create("generations", GENERATIONS)
    row = Generation("g1", "m", 1, "f", "s", "c", {"version": 0}, 1, 1, "live")
    frame = spark.createDataFrame([build_generation_row(row)], made.read("generations").schema)
    made.append(frame, "generations")
    return made


def acquired(warehouse: Warehouse, host: str) -> Lease:
    """Take the lease as a driver of another machine."""
    (generation,) = read_generations(warehouse, "m")
    return leases.acquire_lease(warehouse, generation, DriverIdentity(host, 1, 0.0, 2, 0.0, host))


def put(fence: Fence, batch: int, *values: int, **options: Any) -> None:
    warehouse = fence.warehouse
    frame = warehouse.spark.createDataFrame([(value, "g1", batch) for value in values], ROWS)
    fence.append(frame, "t", batch, **options)


def values(warehouse: Warehouse) -> list[int]:
    return sorted(row["value"] for row in warehouse.read("t").collect())


class Frozen(Warehouse):
    """A warehouse whose user freezes between checking the lease and committing, while `meanwhile` runs."""

    meanwhile: Callable[[], object]

    def append(self, *arguments: Any, **options: Any) -> int | None:
        self.meanwhile()
        return super().append(*arguments, **options)


def frozen(warehouse: Warehouse, meanwhile: Callable[[], object]) -> Warehouse:
    made = Frozen(warehouse.spark, warehouse.root)
    object.__setattr__(made, "meanwhile", meanwhile)
    return made


def test_the_next_driver_skips_rows_that_are_written(warehouse: Warehouse) -> None:
    first = Fence(warehouse, acquired(warehouse, "a"), None)
    put(first, 0, 1)
    put(first, 1, 2)
    second = Fence(warehouse, acquired(warehouse, "b"), 1)
    put(second, 1, 2)
    put(second, 2, 3)
    assert values(warehouse) == [1, 2, 3]
    third = Fence(warehouse, acquired(warehouse, "c"), 3)  # batch 3 was planned, but none of it was written
    put(third, 3, 4)
    assert values(warehouse) == [1, 2, 3, 4]


@pytest.mark.core
def test_the_commit_of_a_driver_that_froze_before_it_is_skipped_and_the_driver_stops(
    warehouse: Warehouse,
) -> None:
    old = acquired(warehouse, "a")
    put(Fence(warehouse, old, None), 0, 1)
    taken: list[Lease] = []

    def meanwhile() -> None:
        taken.append(acquired(warehouse, "b"))
        assert taken[0].taken_over
        put(Fence(warehouse, taken[0], 1), 1, 2)

    with pytest.raises(UserError, match="another has taken it over"):
        put(Fence(frozen(warehouse, meanwhile), old, None), 1, 200)
    assert values(warehouse) == [1, 2]
    assert old.lost.is_set()
    with pytest.raises(UserError, match="another has taken it over"):
        put(Fence(warehouse, old, None), 2, 300)


def test_a_commit_that_came_before_the_fence_is_found_by_the_new_driver(warehouse: Warehouse) -> None:
    old = acquired(warehouse, "a")
    put(Fence(warehouse, old, None), 0, 1)
    new = acquired(warehouse, "b")
    # The old driver checks its lease just before; it finds the loss after its commit, so the batch is not done.
    blind = Fence(warehouse, old, None)
    with pytest.raises(UserError), pytest.MonkeyPatch.context() as patch:
        looked = iter([False])
        patch.setattr(Lease, "overtaken", lambda self: next(looked, True))
        put(blind, 1, 2)
    put(Fence(warehouse, new, 1), 1, 200)
    assert values(warehouse) == [1, 2]


def test_appends_of_one_batch_to_one_table_have_names(warehouse: Warehouse) -> None:
    even, odd = RowGroup("even", "value % 2 = 0"), RowGroup("odd", "value % 2 = 1")
    first = Fence(warehouse, acquired(warehouse, "a"), None)
    put(first, 0, 2, part=even)  # and killed
    second = Fence(warehouse, acquired(warehouse, "b"), 0)
    put(second, 0, 2, part=even)
    put(second, 0, 1, part=odd)
    assert values(warehouse) == [1, 2]
    with pytest.raises(AssertionError, match="two appends"):
        put(second, 0, 3, part=odd)


def test_a_released_lease_needs_no_fence(warehouse: Warehouse) -> None:
    first = acquired(warehouse, "a")
    put(Fence(warehouse, first, None), 0, 1)
    leases.release(warehouse, first, "stopped")
    second = acquired(warehouse, "b")
    assert not second.taken_over
    put(Fence(warehouse, second, None), 1, 2)
    assert warehouse.latest_version("t") == 2  # made, and a commit of each driver
    leases.release(warehouse, second, "failed", "the disk is full")
    log = DriverLog.at(warehouse.root, "m").history("g1")
    assert [(one.epoch, one.how, one.error) for one in log] == [
        (1, "stopped", None),
        (2, "failed", "the disk is full"),
    ]


def test_a_living_driver_of_another_machine_keeps_its_lease(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.supervision.driver_log.LEASE_SECONDS", 60.0)
    acquired(warehouse, "a")
    with pytest.raises(UserError, match="process 1 on a drives generation g1"):
        acquired(warehouse, "b")


@pytest.mark.parametrize(
    "moment", ["before the commit", pytest.param("after the commit", marks=pytest.mark.slow)]
)
def test_a_driver_that_froze_between_the_log_and_the_commit_adds_no_row(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    # As if the drivers ran on machines that share no lock.
    monkeypatch.setattr(Warehouse, "lock", lambda *_: nullcontext())
    old = acquired(warehouse, "a")
    put(Fence(warehouse, old, None), 0, 1)
    taken = list[Lease]()

    def freezing(call: Callable[[], int], **_: object) -> int:
        version = call() if moment == "after the commit" else None
        if not taken:
            taken.append(acquired(warehouse, "b"))
            put(Fence(warehouse, taken[0], 1), 1, 2)
        return call() if version is None else version

    monkeypatch.setattr(FileTable, "_write", stand_in(FileTable._write, freezing))
    with pytest.raises(UserError, match="another has taken it over"):
        put(Fence(warehouse, old, None), 1, 2)
    assert values(warehouse) == [1, 2]


@pytest.mark.slow
def test_a_driver_that_is_frozen_replaced_and_woken_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = random_rows(6)
    pipeline = Pipeline(tmp_path, random_walk_spec())
    pipeline.land(frames[0])
    pipeline.pretrain()
    pipeline.land(*frames[1:])
    monkeypatch.setenv("KALMAN_LEASE_SECONDS", "6")
    # With host names as if the drivers ran on two machines, which share no lock: the new one finds no lock files.
    arguments = ("stream", "--model", "walk", "--trigger")
    log = DriverLog.at(pipeline.settings.warehouse, "walk")
    checkpoint = Path(pipeline.settings.warehouse, "checkpoints", "walk-g0001")

    monkeypatch.setenv("KALMAN_HOST", "one")
    old = Driver(pipeline, *arguments, "0")
    old.wait_for(lambda: "1" in files(checkpoint / "offsets"))
    os.killpg(old.process.pid, signal.SIGSTOP)
    shutil.rmtree(Path(pipeline.settings.warehouse, "_locks"))
    try:
        frozen_at = time.time()
        (before,) = log.history("walk-g0001")
        monkeypatch.setenv("KALMAN_HOST", "two")
        refused = Driver(pipeline, *arguments, "available-now")
        # The lease expires while the new driver starts; else the driver is refused and retries.
        while (code := refused.finish()) == ALREADY_RUNNING:
            assert "process" in refused.said() and "on one drives" in refused.said()
            refused = Driver(pipeline, *arguments, "available-now")
        assert code == 0, refused.said()
        history = log.history("walk-g0001")
        assert [one.epoch for one in history] == [1, 2]
        assert history[1].began_at.timestamp() > before.beat_at.timestamp() + 6
        done = versions(pipeline)
    finally:
        os.killpg(old.process.pid, signal.SIGCONT)
    assert old.finish() == RUN_FAILED, old.said()
    assert "walk-g0001" in old.said() and time.time() > frozen_at
    assert log.history("walk-g0001")[0].how == LOST
    assert versions(pipeline) == done
    assert_bit_equal(pipeline.estimates(), since(pipeline.batch(), frames[1]))
    now = find_live(pipeline.warehouse, "walk")
    assert now is not None and (now.epoch, now.owner, now.last_error) == (2, None, None)


def versions(pipeline: Pipeline) -> list[Any]:
    """Return the transactions in the log of the estimates."""
    folder = Path(pipeline.settings.warehouse, "estimates", "walk", "_delta_log")
    texts = [path.read_text().splitlines() for path in sorted(folder.glob("*.json"))]
    return [json.loads(line)["txn"] for lines in texts for line in lines if '"txn"' in line]
