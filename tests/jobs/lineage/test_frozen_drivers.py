"""A driver that froze in the middle of a write and wakes up long after, behind drivers that came and went meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from jobs.core.errors import ALREADY_RUNNING, RUN_FAILED, UserError
from jobs.core.processes import read_start_time
from jobs.lineage import leases
from jobs.lineage.fencing import Fence
from jobs.lineage.leases import Lease
from jobs.spark.warehouse import Warehouse
from jobs.supervision.driver_log import DriverIdentity, DriverLog, read_machine_name
from tests.conftest import ROOT
from tests.jobs.lineage.test_fencing import acquired, put, values, warehouse
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, random_rows, random_walk_spec, since
from tests.jobs.support.processes import Driver

pytestmark = pytest.mark.spark

LATEST = "key string, value int, generation string, batch_id bigint"

__all__ = ["warehouse"]  # the fixture


class Freezing(Warehouse):
    """A warehouse in which one call of a method waits until it is woken."""

    def freeze(self, method: str, when: Callable[..., bool] = lambda *_: True) -> Freezing:
        for name, value in {"method": method, "when": when, "left": [1]}.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "asleep", threading.Event())
        object.__setattr__(self, "woken", threading.Event())
        return self

    def _maybe(self, method: str, *arguments: Any) -> None:
        wanted: Any = self
        if method == wanted.method and wanted.left and wanted.when(*arguments):
            wanted.left.pop()
            wanted.asleep.set()
            assert wanted.woken.wait(120)

    def append(self, *arguments: Any, **options: Any) -> int | None:
        self._maybe("append", *arguments)
        return super().append(*arguments, **options)

    def upsert(self, *arguments: Any, **options: Any) -> None:
        self._maybe("upsert", *arguments)
        super().upsert(*arguments, **options)

    def lock(self, name: str) -> Any:
        self._maybe("lock", name)
        return super().lock(name)


class Sleeper:
    """A driver's write that freezes right before its commit, in a thread."""

    def __init__(
        self, warehouse: Warehouse, method: str, write: Callable[[Warehouse], object], **options: Any
    ) -> None:
        self.warehouse: Any = Freezing(warehouse.spark, warehouse.root).freeze(method, **options)
        self.error: BaseException | None = None

        def run() -> None:
            try:
                write(self.warehouse)
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        assert self.warehouse.asleep.wait(120), self.error

    def wake(self) -> None:
        """Let the write go on, and wait for its end."""
        self.warehouse.woken.set()
        self.thread.join(120)
        assert not self.thread.is_alive()


def ended(warehouse: Warehouse) -> None:
    """A driver takes over and ends cleanly, before it has written anything."""
    leases.release(warehouse, acquired(warehouse, "b"), "stopped")


def killed(warehouse: Warehouse) -> None:
    """A driver takes over on the machine of the next one, and is killed before it has written anything."""
    acquired(warehouse, read_machine_name())


def killed_without_record(warehouse: Warehouse) -> None:
    """The same, killed before its record in the log of drivers."""
    log = DriverLog.at(warehouse.root, "m")
    log.files.remove(acquired(warehouse, read_machine_name()).record.name)


def ended_in_an_earlier_release(warehouse: Warehouse) -> None:
    """A driver of an earlier release, whose record does not say whom it suspects."""
    lease = acquired(warehouse, "b")
    leases.release(warehouse, lease, "stopped")
    last = lease.log.last("g1")
    assert last is not None
    old = replace(last, **({"suspect": None} if hasattr(last, "suspect") else {}))
    lease.log.write(old)


@pytest.mark.parametrize(
    "between",
    [
        ended,
        killed,
        pytest.param(killed_without_record, marks=pytest.mark.slow),
        pytest.param(ended_in_an_earlier_release, marks=pytest.mark.slow),
    ],
)
def test_a_frozen_driver_is_fenced_behind_one_that_came_and_went(
    warehouse: Warehouse, between: Callable[[Warehouse], None]
) -> None:
    first = acquired(warehouse, "a")
    put(Fence(warehouse, first, None), 0, 1)
    old = Sleeper(warehouse, "append", lambda slow: put(Fence(slow, first, None), 1, 2))
    between(warehouse)
    third = acquired(warehouse, "c")
    # The old driver wakes up after the new one found its rows missing, and before the new one appends them.
    new = Sleeper(
        warehouse,
        "append",
        lambda slow: put(Fence(slow, third, 1), 1, 2),
        when=lambda rows, *_: not rows.isEmpty(),
    )
    old.wake()
    new.wake()
    assert new.error is None
    assert isinstance(old.error, UserError) and "another has taken it over" in str(old.error)
    assert values(warehouse) == [1, 2]


def test_a_stopped_process_of_this_machine_keeps_its_lease() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        started = read_start_time(process.pid)
        assert started is not None
        driver = DriverIdentity(read_machine_name(), process.pid, started, process.pid, started, "a")
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)  # until it has stopped
        assert driver.is_alive_after_waiting(None)
        process.kill()
        process.wait()
    assert not driver.is_alive_after_waiting(None)


def test_who_ended_or_was_fenced_costs_no_further_commit(warehouse: Warehouse) -> None:
    put(Fence(warehouse, acquired(warehouse, "a"), None), 0, 1)
    second = acquired(warehouse, "b")
    put(Fence(warehouse, second, 1), 1, 2)
    assert warehouse.latest_version("t") == 3  # made, and with the second driver's fence
    leases.release(warehouse, second, "stopped")
    third = acquired(warehouse, "c")
    assert third.suspect == 1 and third.taken_over  # the first may still run, but cannot write any more
    put(Fence(warehouse, third, None), 2, 3)
    assert warehouse.latest_version("t") == 4
    assert values(warehouse) == [1, 2, 3]


def latest_of(warehouse: Warehouse) -> list[tuple[str, int, int]]:
    rows = warehouse.read("latest/m").collect()
    return sorted((row["key"], row["value"], row["batch_id"]) for row in rows)


def some(spark: SparkSession, batch: int, **states: int) -> Any:
    return spark.createDataFrame([(key, value, "g1", batch) for key, value in states.items()], LATEST)


def begun(warehouse: Warehouse, lease: Lease, **states: int) -> None:
    Fence(warehouse, lease, None).begin(lambda: some(warehouse.spark, -1, **states), "latest/m")


def test_latest_states_stay_forgotten_though_a_frozen_driver_upserts(warehouse: Warehouse) -> None:
    spark = warehouse.spark
    first = acquired(warehouse, "a")
    warehouse.create("latest/m", LATEST, partition_by=("generation",))
    begun(warehouse, first, k1=1, k2=2)
    old = Sleeper(
        warehouse,
        "upsert",
        lambda slow: Fence(slow, first, None).upsert(some(spark, 0, k1=10), "latest/m", 0, "key"),
    )
    second = acquired(warehouse, "b")  # its spec has no table of latest states
    Fence(warehouse, second, None).forget("latest/m")
    assert latest_of(warehouse) == []
    old.wake()
    assert isinstance(old.error, UserError) and "another has taken it over" in str(old.error)
    assert latest_of(warehouse) == []
    # A driver whose spec has it again begins with the states of all keys.
    leases.release(warehouse, second, "stopped")
    begun(warehouse, acquired(warehouse, "c"), k1=11, k2=12)
    assert latest_of(warehouse) == [("k1", 11, -1), ("k2", 12, -1)]


@pytest.mark.slow
def test_latest_states_are_begun_once_though_a_frozen_driver_begins_them_too(warehouse: Warehouse) -> None:
    first = acquired(warehouse, "a")
    warehouse.create("latest/m", LATEST, partition_by=("generation",))
    old = Sleeper(warehouse, "append", lambda slow: begun(slow, first, k1=1))
    ended(warehouse)
    third = acquired(warehouse, "c")
    new = Sleeper(
        warehouse, "append", lambda slow: begun(slow, third, k1=1), when=lambda rows, *_: not rows.isEmpty()
    )
    old.wake()
    new.wake()
    assert new.error is None
    assert latest_of(warehouse) == [("k1", 1, -1)]


@pytest.mark.slow
def test_a_frozen_driver_forgets_no_latest_states_of_a_later_one(warehouse: Warehouse) -> None:
    first = acquired(warehouse, "a")
    warehouse.create("latest/m", LATEST, partition_by=("generation",))
    begun(warehouse, first, k1=1)
    leases.release(warehouse, first, "stopped")
    second = acquired(warehouse, "b")
    old = Sleeper(warehouse, "lock", lambda slow: Fence(slow, second, None).forget("latest/m"))
    third = acquired(warehouse, "c")
    begun(warehouse, third, k1=100)  # they exist
    Fence(warehouse, third, None).upsert(some(warehouse.spark, 0, k1=2), "latest/m", 0, "key")
    old.wake()
    assert latest_of(warehouse) == [("k1", 2, 0)]
    assert isinstance(old.error, UserError) and "another has taken it over" in str(old.error)


FREEZES = """
import os, signal, sys
from pathlib import Path

if "jobs.cli" in sys.orig_argv and "FREEZE" in os.environ:
    from contextlib import nullcontext

    from jobs.lineage import leases
    from jobs.storage.table_log import FileTable
    from jobs.storage.warehouse import Tables

    from tests.support.stand_ins import stand_in

    flag = Path(os.environ["FREEZE"])

    def freeze(number):
        if number % 2**32 == 1 and not flag.exists():
            flag.touch()
            os.killpg(0, signal.SIGSTOP)

    def write(call, self, properties, **_):
        if self.name == "estimates/walk":
            for one in properties.app_transactions or []:
                freeze(one.version)
        return call()

    FileTable._write = stand_in(FileTable._write, write)
    # As if the drivers ran on different machines: a stopped process does not let go of its locks.
    leases.stream_lock = lambda *_, **__: nullcontext()
    Tables.lock = lambda *_: nullcontext()
"""
"""Started with each driver: it stops its whole process group, Spark's too, right before a commit of micro-batch 1."""


@pytest.mark.slow
def test_real_drivers_one_frozen_one_ended_one_frozen_at_the_worst_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = random_rows(4)
    pipeline = Pipeline(tmp_path, random_walk_spec())
    pipeline.land(frames[0])
    pipeline.pretrain()
    pipeline.land(*frames[1:])
    (tmp_path / "sitecustomize.py").write_text(FREEZES)
    monkeypatch.setenv("KALMAN_LEASE_SECONDS", "6")

    def driver(host: str) -> tuple[Driver, Path]:
        flag = tmp_path / f"frozen-{host}-{time.monotonic_ns()}"
        path = os.pathsep.join([str(tmp_path), str(ROOT)])
        given = {"KALMAN_HOST": host, "PYTHONPATH": path, "FREEZE": str(flag)}
        return Driver(pipeline, "stream", "--model", "walk", **given), flag

    def started(host: str) -> tuple[Driver, Path]:
        """Start a driver; a lease of another machine expires while it starts, else it is refused and retries."""
        log = DriverLog.at(pipeline.settings.warehouse, "walk")
        before = len(log.history("walk-g0001"))
        while True:
            one, flag = driver(host)
            while one.process.poll() is None and len(log.history("walk-g0001")) == before:
                time.sleep(0.1)
            if one.process.poll() != ALREADY_RUNNING:
                return one, flag

    old, frozen = driver("one")
    old.wait_for(frozen.exists)
    pipeline.write_spec(random_walk_spec(sinks={"functions": ["absent:take"]}))
    between, _ = started("two")
    assert between.finish() != 0 and "absent" in between.said()
    pipeline.write_spec(random_walk_spec())
    new, at_commit = started("three")
    new.wait_for(at_commit.exists)  # it has found that micro-batch 1 is not there
    os.killpg(old.process.pid, signal.SIGCONT)
    assert old.finish() == RUN_FAILED, old.said()
    os.killpg(new.process.pid, signal.SIGCONT)
    assert new.finish() == 0, new.said()
    ends = [one.how for one in DriverLog.at(pipeline.settings.warehouse, "walk").history("walk-g0001")]
    assert ends == ["lost", "failed", "caught up"]
    assert_bit_equal(pipeline.estimates(), since(pipeline.batch(), frames[1]))
