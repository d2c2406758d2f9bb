"""A registered driver gives signs of life, is stopped by its log, and records its end, whatever it drives."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from jobs.supervision import registered_driver
from jobs.supervision.driver_log import (
    CAUGHT_UP,
    FAILED,
    LOST,
    STOPPED,
    DriverIdentity,
    DriverLog,
    DriverRecord,
)
from jobs.supervision.registered_driver import RegisteredDriver, driving, register

LONGEST = 30.0
"""Seconds after which a driver that is not stopped fails the test."""


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a driver look at its log all the time."""
    monkeypatch.setattr(registered_driver, "LIVENESS_SECONDS", 0.01)
    monkeypatch.setattr(registered_driver, "HEARTBEAT_SECONDS", 0.02)


@pytest.fixture
def log(tmp_path: Path) -> DriverLog:
    return DriverLog.at(str(tmp_path), "monitor-tiny")


def begin(log: DriverLog, epoch: int = 1) -> RegisteredDriver:
    owner = DriverIdentity.identify_process(os.getpid())
    return RegisteredDriver(log, register(log, "monitor", epoch, "live", owner, {"queries": ["a"]}))


def last(log: DriverLog) -> DriverRecord:
    found = log.last("monitor")
    assert found is not None
    return found


def test_a_driver_runs_until_it_has_recorded_its_end(log: DriverLog) -> None:
    driver, stop = begin(log), threading.Event()
    with driving(driver, stop):
        assert last(log).runs and last(log).runs_after_waiting() and last(log).queries == ["a"]
    assert not last(log).runs and not stop.is_set()
    assert (last(log).how, last(log).error) == (CAUGHT_UP, None)


def test_a_request_in_the_log_stops_it(log: DriverLog) -> None:
    driver, stop = begin(log), threading.Event()
    with driving(driver, stop):
        log.ask_to_stop(driver.record, "a test")
        assert stop.wait(LONGEST)
    assert last(log).how == STOPPED and last(log).beat_at > driver.record.began_at


def test_a_later_driver_stops_it(log: DriverLog) -> None:
    driver, stop = begin(log), threading.Event()
    with driving(driver, stop):
        later = begin(log, 2)
        assert stop.wait(LONGEST)
    assert [one.how for one in log.history("monitor")] == [LOST, None]
    assert driver.lost.is_set() and not later.overtaken()


def test_it_is_stopped_when_its_claim_is_lost(log: DriverLog) -> None:
    driver, stop = begin(log), threading.Event()
    with driving(driver, stop, renew=lambda: False):
        assert stop.wait(LONGEST)
    assert last(log).how == LOST


def test_a_failed_report_does_not_end_it(log: DriverLog) -> None:
    driver, stop, calls = begin(log), threading.Event(), threading.Semaphore(0)

    def renew() -> bool:
        calls.release()
        raise OSError("the store is away")

    with driving(driver, stop, renew):
        assert all(calls.acquire(timeout=LONGEST) for _ in range(3))
    assert not stop.is_set() and last(log).how == CAUGHT_UP


def test_the_first_error_is_told_though_its_end_cannot_be_recorded(log: DriverLog) -> None:
    ends: list[tuple[str, str | None]] = []

    def release(how: str, error: str | None) -> None:
        ends.append((how, error))
        raise OSError("the disk is full")

    with (
        pytest.raises(ValueError, match="of the query"),
        driving(begin(log), threading.Event(), release=release),
    ):
        raise ValueError("of the query")
    with (
        pytest.raises(OSError, match="the disk is full"),
        driving(begin(log, 2), threading.Event(), release=release),
    ):
        pass
    assert ends == [(FAILED, "of the query"), (CAUGHT_UP, None)]
