"""The status of a driver, and how the last one ended: from files and processes alone, without Spark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest

from jobs import resume, stop
from jobs.core.errors import ALREADY_RUNNING, UserError
from jobs.core.processes import read_start_time
from jobs.core.settings import Settings
from jobs.lineage import leases
from jobs.storage.files import LocalFiles, SmallFiles
from jobs.supervision.driver_log import (
    DriverIdentity,
    DriverLog,
    DriverRecord,
    Hold,
    LaunchRecord,
    read_machine_name,
)
from jobs.supervision.driver_status import ENDED, NONE, RUNNING, SILENT, STARTING, read_driver_status
from jobs.supervision.launcher import LAUNCH_VARIABLE, detach  # noqa: F401 - SCRIPT uses it

ROOT = Path(__file__).resolve().parents[3]
NOW = datetime.now(UTC)


@pytest.fixture
def log(tmp_path: Path) -> DriverLog:
    return DriverLog.at(str(tmp_path), "tiny")


def drive(epoch: int = 1, pid: int | None = None, host: str | None = None, **changes: object) -> DriverRecord:
    pid = pid or os.getpid()
    at = read_start_time(pid) or 0.0
    owner = DriverIdentity(host or read_machine_name(), pid, at, pid, at, "t")
    made = DriverRecord("tiny", "tiny-g0001", epoch, "live", owner, NOW, datetime.now(UTC))
    return replace(made, **changes)  # pyright: ignore[reportArgumentType]


def wait_for(what: Callable[[], object], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_small_files(tmp_path: Path) -> None:
    files: SmallFiles = LocalFiles(tmp_path)
    assert files.read("a/b.json") is None and files.names("a") == []
    files.remove("a/b.json")
    files.write("a/b.json", b"1")
    files.write("a/b.json", b"2")
    files.write("a/a.json", b"")
    assert files.read("a/b.json") == b"2" and files.names("a") == ["a.json", "b.json"]
    files.remove("a/b.json")
    assert files.names("a") == ["a.json"] and files.names("") == ["a"]


def test_records_are_read_as_they_were_written(log: DriverLog) -> None:
    one, launch = drive(error="no"), LaunchRecord("t", "h", NOW, 1, 2.0, 3, 4.0, "log", "about", -9, NOW, "e")
    for record in (one, launch):
        log.write(record)
    assert log.history("tiny-g0001") == [one] and log.launch("t") == launch
    # A field of a later release is passed over, half a file is no record.
    log.files.write(one.name, one.text().replace(b"{", b'{"later": 1, ', 1))
    assert log.history("tiny-g0001") == [one]
    log.files.write(one.name, one.text()[:30])
    assert log.history("tiny-g0001") == []


def test_the_log_forgets_old_drivers(log: DriverLog) -> None:
    for epoch in range(1, 8):
        log.write(drive(epoch))
        log.ask_to_stop(drive(epoch), "test")
    log.prune("tiny-g0001", keep=2)
    assert log.files.names("tiny-g0001") == [f"0000000{n}.{end}" for n in (6, 7) for end in ("json", "stop")]
    assert log.overtaken("tiny-g0001", 6) and not log.overtaken("tiny-g0001", 7)


def test_the_status_of_a_driver(log: DriverLog, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_driver_status(log).state == NONE
    log.write(drive(1, ended_at=NOW, how="stopped"))
    assert (read_driver_status(log).state, read_driver_status(log).how) == (ENDED, "stopped")
    log.write(drive(2))
    assert read_driver_status(log).state == RUNNING
    old = datetime.now(UTC) - timedelta(seconds=100)
    log.write(drive(3, beat_at=old))
    assert read_driver_status(log).state == SILENT
    log.write(drive(4, host="elsewhere"))
    assert read_driver_status(log).state == RUNNING
    log.write(drive(5, host="elsewhere", beat_at=old))
    assert read_driver_status(log).state == ENDED and read_driver_status(log).killed
    gone = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    log.write(drive(6, pid=gone.pid))
    assert read_driver_status(log).state == RUNNING
    gone.kill()
    gone.wait()
    assert read_driver_status(log).state == ENDED and read_driver_status(log).killed
    assert read_driver_status(log).text() == "the driver of tiny-g0001 was killed"
    shadow = drive(1, generation="tiny-g0002", status="shadow")
    log.write(shadow)
    assert read_driver_status(log).state == ENDED
    log.write(replace(shadow, status="live"))  # promoted
    assert read_driver_status(log).state == RUNNING


SCRIPT = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from tests.jobs.supervision.test_driver_status import *
log = DriverLog.at(sys.argv[1], "tiny")
one = replace(drive(), launch=os.environ[LAUNCH_VARIABLE])
time.sleep(float(sys.argv[2]))
log.write(one)
print("error: it is full", flush=True)
while sys.argv[3] == "stays" and not log.read_stop_request(one):
    time.sleep(0.05)
log.write(replace(one, ended_at=datetime.now(UTC), how="stopped"))
sys.exit(0 if sys.argv[3] == "stays" else int(sys.argv[3]))
"""


def launched(tmp_path: Path, seconds: float, what: str) -> LaunchRecord:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(seconds), what]
    return detach(str(tmp_path), "tiny", command, os.environ, tmp_path / "logs" / "log", ROOT, "about")


def test_a_launched_driver_is_seen_from_start_to_end(tmp_path: Path, log: DriverLog) -> None:
    launch = launched(tmp_path, 1.0, "1")
    assert launch.pid is not None and os.getsid(launch.pid) not in (launch.pid, os.getsid(0))
    sight = read_driver_status(log)
    assert (sight.state, sight.launch) == (STARTING, launch)
    wait_for(lambda: (one := log.launch(launch.token)) and one.ended_at)
    sight = read_driver_status(log)
    assert (sight.state, sight.exit_code, sight.error, sight.killed) == (ENDED, 1, "it is full", False)
    assert sight.launch and sight.launch.about == "about" and 0.5 < sight.seconds < 60
    assert sight.driver is not None
    assert sight.text() == "the driver ended with exit code 1 (stopped): it is full"


def test_a_launched_driver_that_is_killed(tmp_path: Path, log: DriverLog) -> None:
    launch = launched(tmp_path, 0.0, "stays")
    wait_for(lambda: read_driver_status(log).state == RUNNING)
    assert launch.pid is not None
    os.kill(launch.pid, signal.SIGKILL)
    wait_for(lambda: (one := log.launch(launch.token)) and one.ended_at)
    sight = read_driver_status(log)
    assert (sight.exit_code, sight.killed) == (-9, True)


def test_a_driver_outlives_its_launcher(tmp_path: Path, log: DriverLog) -> None:
    launch = launched(tmp_path, 0.0, "stays")
    wait_for(lambda: read_driver_status(log).state == RUNNING)
    assert launch.pid is not None
    launcher = psutil.Process(os.getsid(launch.pid))
    launcher.kill()
    wait_for(lambda: not launcher.is_running() or launcher.status() == psutil.STATUS_ZOMBIE)
    sight = read_driver_status(log)
    assert sight.state == RUNNING and sight.driver
    log.ask_to_stop(sight.driver, "test")
    wait_for(lambda: read_driver_status(log).state == ENDED)
    assert read_driver_status(log).how == "stopped" and not read_driver_status(log).killed


def test_a_driver_that_has_not_begun_is_stopped_by_sigterm(tmp_path: Path, log: DriverLog) -> None:
    launch = launched(tmp_path, 60.0, "stays")
    log.ask_to_stop(launch, "test")
    wait_for(lambda: read_driver_status(log).state == ENDED)
    assert read_driver_status(log).exit_code == -signal.SIGTERM


def test_a_command_that_cannot_start_says_where_to_look(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="could not be started: see .*log"):
        detach(str(tmp_path), "tiny", [str(tmp_path / "absent")], os.environ, tmp_path / "log", ROOT)
    assert "FileNotFoundError" in (tmp_path / "log").read_text()


def test_stop_and_resume(tmp_path: Path) -> None:
    settings = Settings.load(warehouse=str(tmp_path), models=ROOT / "models", quiet=True)
    log = DriverLog.at(str(tmp_path), "nile")
    with pytest.raises(UserError, match="the stream of nile has no driver") as caught:
        stop.run(settings, "nile", restart=True, needed=True)
    assert caught.value.exit_code == ALREADY_RUNNING and log.hold() is None
    command = [sys.executable, "-c", SCRIPT.replace('"tiny"', '"nile"'), str(tmp_path), "0.5", "stays"]
    detach(str(tmp_path), "nile", command, os.environ, tmp_path / "log", ROOT)
    said = stop.run(settings, "nile")
    assert said.data["stopped"] and said.data["held"] and read_driver_status(log).state == ENDED
    assert "Airflow does not restart it until `kalman-pipeline resume --model nile`" in said.lines
    assert not stop.run(settings, "nile", hold="1h").data["stopped"]
    held = log.hold()
    assert held is not None and held.until is not None and timedelta(minutes=59) < held.until - NOW
    assert resume.run(settings, "nile").data == {"model": "nile", "held": True}
    assert resume.run(settings, "nile").data["held"] is False
    log.put_hold(Hold("test", NOW, NOW))
    assert log.hold() is None  # it has run out
    with pytest.raises(UserError, match="--hold soon: 'soon' is not a duration"):
        stop.run(settings, "nile", hold="soon")


def test_a_stream_is_paused_and_resumed(
    tmp_path: Path, log: DriverLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.05)
    launched(tmp_path, 0.5, "stays")
    with pytest.raises(ValueError, match="it failed"):
        with leases.pause_stream(log, "an upgrade") as was:
            assert was.driven and read_driver_status(log).state == ENDED
            held = log.hold()
            assert held is not None and held.reason == "an upgrade" and held.until is not None
            # Killed here, it would be held for some minutes and no longer.
            assert timedelta(minutes=4) < held.until - datetime.now(UTC) <= leases.HOLD
            wait_for(lambda: (now := log.hold()) is not None and now.until != held.until)
            raise ValueError("it failed")
    assert log.hold() is None

    mine = Hold("a person", NOW)
    log.put_hold(mine)
    with leases.pause_stream(log, "an upgrade") as was:
        assert not was.driven
    assert log.hold() == mine
    log.put_hold(None)
    renew, renewals = leases._PauseHold.renew, []

    def counted(hold: leases._PauseHold, first: bool = False) -> None:
        renew(hold, first)
        renewals.append(first)

    monkeypatch.setattr(leases._PauseHold, "renew", counted)
    with leases.pause_stream(log, "an upgrade"):
        log.put_hold(mine)  # a person stops it meanwhile
        before = len(renewals)
        wait_for(lambda: len(renewals) >= before + 2)  # the second one began after that
        assert log.hold() == mine
    assert log.hold() == mine
