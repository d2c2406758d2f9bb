"""A clock that is put back, or differs from machine to machine, moves no lease and no order."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest
from pyspark.sql import SparkSession

from jobs.core.errors import ALREADY_RUNNING, UserError
from jobs.core.processes import read_start_time
from jobs.lineage import leases
from jobs.lineage.generations import Generation, build_generation_row, find_live, read_generations
from jobs.spark.warehouse import Warehouse
from jobs.storage.tables import GENERATIONS
from jobs.supervision import driver_status
from jobs.supervision.driver_log import DriverIdentity, DriverLog, DriverRecord, LaunchRecord

NOON = datetime(2024, 5, 1, 12, 0, tzinfo=UTC)
Set = Callable[[datetime], None]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Set:
    """Sets the time of day that leases and their log see."""

    def to(time: datetime) -> None:
        monkeypatch.setattr("jobs.core.times.now", lambda: time)

    to(NOON)
    return to


def elsewhere(name: str) -> DriverIdentity:
    return DriverIdentity(name, 1, 0.0, 2, 0.0, name)


def drive(log: DriverLog, generation: str, epoch: int, host: str = "a") -> DriverRecord:
    at = log.compute_next_time()
    made = DriverRecord("m", generation, epoch, "live", elsewhere(host), at, at)
    log.write(made)
    return made


def test_a_process_is_known_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    began = read_start_time(os.getpid())
    real = psutil.boot_time()
    # On Linux the time at which the machine began is reckoned from the clock: who sets the clock moves it.
    monkeypatch.setattr(psutil, "boot_time", lambda: real - 3600.0)
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: real - 3600.0)
    assert read_start_time(os.getpid()) == began
    assert DriverIdentity.identify_process(os.getpid()).alive(None)


def test_the_last_driver_to_begin_counts_though_the_clock_was_put_back(clock: Set, tmp_path: Path) -> None:
    log = DriverLog.at(str(tmp_path), "m")
    first = drive(log, "m-g0001", 1)
    clock(NOON - timedelta(hours=1))
    second = drive(log, "m-g0002", 1, "b")
    assert second.began_at > first.began_at
    assert [one.generation for one in log.list_drivers()] == ["m-g0001", "m-g0002"]
    launch = LaunchRecord("t", "c", log.compute_next_time())
    log.write(launch)
    assert launch.began_at > second.began_at
    third = drive(log, "m-g0001", 2)  # rolled back
    assert third.began_at > launch.began_at and log.list_drivers()[-1] == third


@pytest.mark.parametrize(
    ("back", "state"),
    [
        (timedelta(), driver_status.RUNNING),
        (timedelta(seconds=60), driver_status.RUNNING),
        (timedelta(hours=1), driver_status.ENDED),
    ],
)
def test_a_sign_of_life_from_the_future_is_none(
    clock: Set, tmp_path: Path, back: timedelta, state: str
) -> None:
    log = DriverLog.at(str(tmp_path), "m")
    clock(NOON)
    mine = DriverRecord("m", "m-g0001", 1, "live", elsewhere("b"), NOON, NOON)
    log.write(mine)
    clock(NOON - back)
    assert driver_status.read_driver_status(log).state == state
    assert elsewhere("b").alive(NOON) == (state == driver_status.RUNNING)
    clock(NOON + timedelta(hours=1))
    assert driver_status.read_driver_status(log).state == driver_status.ENDED


@pytest.fixture
def warehouse(spark: SparkSession, tmp_path: Path) -> Warehouse:
    """A warehouse with generations that were made while the clock was put back, hour by hour."""
    made = Warehouse(spark, str(tmp_path))
    made.create("generations", GENERATIONS)
    rows = []
    for number, status in ((1, "retired"), (2, "retired"), (10, "live")):
        one = Generation(f"m-g{number:04d}", "m", 1, "f", "s", "c", {}, 1, 1, status)
        rows.append({**build_generation_row(one), "created_at": NOON - timedelta(hours=number)})
    made.append(spark.createDataFrame(rows, made.read("generations").schema).coalesce(1), "generations")
    return made


@pytest.mark.spark
def test_a_lease_is_taken_over_and_generations_are_in_order(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [one.number for one in read_generations(warehouse, "m")] == [1, 2, 10]
    now = find_live(warehouse, "m")
    assert now is not None
    held = leases.acquire_lease(warehouse, now, elsewhere("a"))
    assert held.generation.heartbeat is not None
    with pytest.raises(UserError, match="process 1 on a drives generation m-g0010") as refused:
        leases.acquire_lease(warehouse, held.generation, elsewhere("b"))
    assert refused.value.exit_code == ALREADY_RUNNING
    # Here the clock is put back by an hour: the sign of life is from the future, and the driver is gone.
    past = held.generation.heartbeat - timedelta(hours=1)
    monkeypatch.setattr("jobs.core.times.now", lambda: past)
    next_one = leases.acquire_lease(warehouse, held.generation, elsewhere("b"))
    assert (next_one.generation.epoch, next_one.taken_over) == (2, True)
    assert held.overtaken() and not next_one.overtaken()
