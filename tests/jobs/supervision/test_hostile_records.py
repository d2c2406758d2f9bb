"""The log of drivers lies in the warehouse: whoever may write there reads no other file, and ends no other process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from jobs.core.processes import identify_command, read_start_time
from jobs.supervision.driver_log import (
    DriverIdentity,
    DriverLog,
    DriverRecord,
    LaunchRecord,
    read_machine_name,
)
from jobs.supervision.driver_status import SILENT, list_killable_processes, read_driver_status
from jobs.supervision.launcher import LAUNCH_VARIABLE, read_tail

NOW = datetime.now(UTC)
TOKEN = "a1b2c3d4e5f6"


@pytest.fixture
def log(tmp_path: Path) -> DriverLog:
    return DriverLog.at(str(tmp_path / "warehouse"), "tiny")


def list_values(record: DriverRecord | LaunchRecord) -> dict[str, Any]:
    return json.loads(record.text())


HERE = DriverIdentity(
    read_machine_name(),
    os.getpid(),
    read_start_time(os.getpid()) or 0.0,
    os.getpid(),
    read_start_time(os.getpid()) or 0.0,
    "t",
)
DRIVER = list_values(DriverRecord("tiny", "tiny-g0001", 1, "live", HERE, NOW, NOW, TOKEN))
LAUNCH = list_values(LaunchRecord(TOKEN, read_machine_name(), NOW, os.getpid(), 1.0, os.getpid(), 1.0))
OWNER = asdict(HERE)
HOSTILE: list[bytes] = [
    b"",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"[]",
    b"1",
    b"null",
    b'"text"',
    b"9" * 5_000,
    b"{}" + b" " * 3_000_000,
    *(
        json.dumps({**DRIVER, **change}).encode()
        for change in (
            {"pid": -1},
            {"owner": None},
            {"owner": []},
            {"owner": {}},
            {"owner": {**OWNER, "pid": -1}},
            {"owner": {**OWNER, "pid": 2**70}},
            {"owner": {**OWNER, "pid": "1"}},
            {"owner": {**OWNER, "pid": True}},
            {"owner": {**OWNER, "jvm": 1e308}},
            {"owner": {**OWNER, "jvm": [1]}},
            {"owner": {**OWNER, "host": 7}},
            {"owner": {**OWNER, "more": 7}},
            {"began_at": "2024-01-01"},
            {"began_at": "2024-01-01T00:00:00"},
            {"began_at": "9999-12-31T23:59:59.999999+00:00"},
            {"began_at": "0001-01-01T00:00:00+14:00"},
            {"began_at": 7},
            {"beat_at": None},
            {"epoch": "1"},
            {"epoch": 1e300},
            {"epoch": -1},
            {"launch": ["a"]},
            {"rules": "x"},
            {"rules": {"queries": 7}},
            {"rules": {"queries": [None]}},
            {"rules": {"queries": {"a": 1}}},
            {"error": {"a": 1}},
            {"status": None},
            {"generation": "../../elsewhere"},
            {"generation": "other"},
            {"model": None},
        )
    ),
]
HOSTILE_LAUNCHES = [
    *HOSTILE[:10],
    *(
        json.dumps({**LAUNCH, **change}).encode()
        for change in (
            {"pid": -1},
            {"pid": 0},
            {"pid": "all"},
            {"pid": 2**70},
            {"keeper": -1},
            {"keeper": 10**400},
            {"started": "x"},
            {"log": 7},
            {"log": ["/etc/passwd"]},
            {"token": "../../../victim"},
            {"token": "b"},
            {"token": 7},
            {"exit_code": "x"},
            {"began_at": "9999-12-31T23:59:59.999999+00:00"},
            {"ended_at": "2024-01-01T00:00:00"},
            {"error": 7},
        )
    ),
]


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_record_of_a_driver_is_no_traceback(log: DriverLog, content: bytes) -> None:
    log.files.write("tiny-g0001/00000001.json", content)
    status = read_driver_status(log)
    assert status.text() and log.compute_next_time().year < 9000
    assert not list_killable_processes(status)
    log.prune("tiny-g0001")


@pytest.mark.parametrize("content", HOSTILE_LAUNCHES, ids=range(len(HOSTILE_LAUNCHES)))
def test_a_hostile_record_of_a_launch_is_no_traceback(log: DriverLog, content: bytes, tmp_path: Path) -> None:
    victim = tmp_path / "warehouse" / "victim.json"
    log.files.write(f"launches/{TOKEN}.json", content)
    victim.write_text("{}")
    status = read_driver_status(log)
    assert status.text() and log.compute_next_time().year < 9000
    if status.launch is not None:
        log.ask_to_stop(status.launch, "a test")
    later = LaunchRecord("later", read_machine_name(), NOW + timedelta(hours=1))
    log.write(later)
    log.prune("launches", keep=1)
    assert victim.exists() and {one.name for one in (tmp_path / "warehouse").iterdir()} == {
        "_leases",
        "victim.json",
    }


@pytest.mark.parametrize("name", ["hold.json", "crashes.json", "launches/a.stop"])
@pytest.mark.parametrize(
    "content",
    [*HOSTILE[:10], b'{"reason": 7}', b'{"reason": "x", "began_at": "x"}',
     b'{"reason": "x", "began_at": "2024-01-01T00:00:00Z", "until": "2024-01-01"}',
     b'{"count": "x", "done": [], "error": ""}', b'{"count": 1, "done": {"a": "b"}, "error": ""}'],
)  # fmt: skip
def test_a_hostile_note_is_none(log: DriverLog, name: str, content: bytes) -> None:
    log.files.write(name, content)
    launch = LaunchRecord("a", "elsewhere", NOW)
    assert log.hold() is None and log.crashes() is None and log.read_stop_request(launch) is None


def test_what_is_no_file_is_not_waited_for(log: DriverLog, tmp_path: Path) -> None:
    folder = tmp_path / "warehouse" / "_leases" / "tiny" / "launches"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "pipe.json")
    (folder / "zero.json").symlink_to("/dev/zero")
    (folder / "environ.json").symlink_to("/proc/self/environ")
    (folder / "folder.json").mkdir()
    (folder / "ring.json").symlink_to(folder / "ring.json")
    assert log.list_launches() == []


# What is killed


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that carries a launch's token."""
    made = start(TOKEN)
    yield made
    made.kill()
    made.wait()


def start(token: str | None) -> subprocess.Popen[bytes]:
    more = {} if token is None else {LAUNCH_VARIABLE: token}
    return subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, **more}
    )


def write_silent(log: DriverLog, pid: int, **changes: Any) -> None:
    """Write the records of a driver that gives no sign of life."""
    began = read_start_time(pid) or 0.0
    owner = DriverIdentity(read_machine_name(), pid, began, pid, began, "t")
    command = identify_command(pid) or ""
    before = NOW - timedelta(minutes=5)
    driver = DriverRecord(
        "tiny", "tiny-g0001", 1, "live", owner, before, before, TOKEN, commands=[command, command]
    )
    log.write(LaunchRecord(TOKEN, read_machine_name(), before))
    log.write(replace(driver, **changes))


def test_only_a_process_with_start_time_command_and_token_of_the_record_is_killed(
    log: DriverLog, process: subprocess.Popen[bytes]
) -> None:
    write_silent(log, process.pid)
    status = read_driver_status(log)
    assert status.state == SILENT
    assert [one.pid for one in list_killable_processes(status)] == [process.pid]
    for changes in (
        {"commands": None},
        {"commands": []},
        {"commands": ["x", "y"]},
        {"launch": None},
        {"launch": ""},
        {"launch": "b" * 12},
        {"owner": replace(HERE, pid=process.pid, started=1.0, jvm=process.pid, jvm_started=1.0)},
    ):
        write_silent(log, process.pid, **changes)
        assert list_killable_processes(read_driver_status(log)) == [], changes


@pytest.mark.parametrize("token", [None, "", "b" * 12])
def test_a_process_of_somebody_else_is_not_killed(log: DriverLog, token: str | None) -> None:
    """Its id, its start time and its command can be read by everybody."""
    stranger = start(token)
    try:
        write_silent(log, stranger.pid)
        assert read_driver_status(log).state == SILENT
        for launch in (TOKEN, "", None):
            write_silent(log, stranger.pid, launch=launch)
            assert list_killable_processes(read_driver_status(log)) == []
    finally:
        stranger.kill()
        stranger.wait()


# What is shown


def test_only_logs_of_the_launch_folder_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "logs" / "tiny"
    folder.mkdir(parents=True)
    (tmp_path / "secret.log").write_text("a secret")
    (folder / "own.log").write_text("the end")
    (folder / "link.log").symlink_to(tmp_path / "secret.log")
    (folder / "environ.log").symlink_to("/proc/self/environ")
    (folder / "folder.log").mkdir()
    (tmp_path / "logs" / "linked").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe.log")
    monkeypatch.setenv("OUR_SECRET", "in the environment")
    assert read_tail(folder / "own.log", folder) == "the end"
    assert read_tail(folder / "none.log", folder) == ""
    for name in (
        "/proc/self/environ", "/etc/passwd", "/dev/zero", str(tmp_path / "secret.log"), "secret.log", "", "\0",
        "\ud800", "x" * 5000, str(folder), *(f"{folder}/{name}" for name in (
            "link.log", "environ.log", "folder.log", "pipe.log", "../../secret.log", "../linked/secret.log",
        )),
    ):  # fmt: skip
        shown = read_tail(Path(name), folder)
        assert "secret" not in shown.replace("secret.log", "") and "root:" not in shown, name
        assert "in the environment" not in shown, name
