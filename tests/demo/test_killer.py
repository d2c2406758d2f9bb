"""The killer reads checkpoints and kills only in mid-batch; a driver whose micro-batch is done goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from demo import killer
from demo.check import MicroBatch
from demo.killer import Batches, Checkpoint, Killed, Killer
from demo.rates import busy_rate
from demo.run import run as run_demo
from jobs.core.errors import UserError
from jobs.supervision.driver_log import DriverIdentity, DriverLog, DriverRecord


class Stand(NamedTuple):
    """A warehouse with a checkpoint, and two idle processes in the place of a driver and its JVM."""

    warehouse: Path
    family: tuple[psutil.Process, psutil.Process]

    def write(self, folder: str, batch: int, version: int = 0) -> None:
        path = self.warehouse / "checkpoints" / "air_time-g0001" / folder
        path.mkdir(parents=True, exist_ok=True)
        (path / f".{batch}.crc").write_text("")
        (path / str(batch)).write_text("v1\n{}\n" + json.dumps({"reservoirVersion": version, "index": -1}))


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    command = [sys.executable, "-c", "import time; time.sleep(120)"]
    started = [subprocess.Popen(command) for _ in range(2)]
    family = (psutil.Process(started[0].pid), psutil.Process(started[1].pid))
    monkeypatch.setattr(killer, "find_driver", lambda warehouse, model: family)
    yield Stand(tmp_path, family)
    for process in started:
        process.kill()
        process.wait()


def test_batches_are_read_from_the_checkpoint(stand: Stand) -> None:
    checkpoint = Checkpoint(str(stand.warehouse), "air_time")
    assert checkpoint.name is None
    assert checkpoint.batches() == Batches(-1, -1)
    assert not checkpoint.has_planned(1)
    stand.write("offsets", 0, 10)
    stand.write("commits", 0)
    stand.write("offsets", 1, 12)
    assert checkpoint.batches() == Batches(1, 0)
    assert checkpoint.has_planned(11)
    assert not checkpoint.has_planned(12)


def test_the_driver_is_killed_in_mid_batch(stand: Stand) -> None:
    stand.write("offsets", 0)
    stand.write("commits", 0)
    thread = Killer(str(stand.warehouse), "air_time", seed=1)
    thread.start()
    time.sleep(0.1)
    assert thread.killed is None
    stand.write("offsets", 1)
    thread.join(10)
    assert thread.killed is not None and thread.killed.batch == 1
    assert [process.wait(5) for process in stand.family] == [-signal.SIGKILL] * 2


def test_a_driver_whose_batch_is_done_goes_on(stand: Stand) -> None:
    stand.write("offsets", 0)
    stand.write("commits", 0)
    assert Killer(str(stand.warehouse), "air_time", seed=1)._kill(0) is None
    time.sleep(0.05)
    assert all(process.status() != psutil.STATUS_STOPPED for process in stand.family)


def test_called_off_it_kills_nothing(stand: Stand) -> None:
    thread = Killer(str(stand.warehouse), "air_time", seed=1)
    thread.start()
    thread.call_off()
    assert thread.killed is None and thread.error is None


def test_no_driver_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="no driver of the stream of air_time"):
        killer.find_driver(str(tmp_path), "air_time")


def test_the_rate_leaves_out_the_batch_that_was_interrupted(stand: Stand) -> None:
    for batch, (planned, committed) in enumerate([(100, 102), (110, 150), (160, 161)]):
        for folder, when in (("offsets", planned), ("commits", committed)):
            stand.write(folder, batch)
            os.utime(stand.warehouse / "checkpoints" / "air_time-g0001" / folder / str(batch), (when, when))
    batches = {0: MicroBatch(200, 0), 1: MicroBatch(999, 0), 2: MicroBatch(400, 0)}
    killed = {"air_time": Killed(1, 2, 1, 0.5, 110.5)}
    rate = busy_rate(Checkpoint(str(stand.warehouse), "air_time"), batches, killed)
    assert (rate.rows, rate.seconds, rate.best) == (600, 3.0, 400.0)
    assert rate.rows_per_second == 200.0


def test_the_driver_is_the_one_that_the_log_of_drivers_names(tmp_path: Path) -> None:
    root, child = str(tmp_path), subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    try:
        log, now = DriverLog.at(root, "air_time"), datetime.now(UTC)
        owner = DriverIdentity.identify_process(child.pid)
        record = DriverRecord("air_time", "air_time-g0001", 1, "live", owner, now, now)
        log.write(record)
        found = killer.find_driver(root, "air_time")
        assert [one.pid for one in found] == [os.getpid(), child.pid]
        log.write(replace(record, ended_at=now, how="stopped"))
        with pytest.raises(LookupError):
            killer.find_driver(root, "air_time")
    finally:
        child.kill()
        child.wait()


def test_a_warehouse_of_somebody_s_own_must_be_empty(tmp_path: Path) -> None:
    (tmp_path / "estimates").mkdir()
    with pytest.raises(UserError, match=r"takes an empty warehouse, and in .* there is estimates"):
        run_demo(tmp_path / "demo", warehouse=str(tmp_path))
    assert not (tmp_path / "demo").exists()
