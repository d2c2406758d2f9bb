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
from obstore import store as stores

from jobs.core.errors import UserError
from jobs.core.processes import identify_command, read_start_time
from jobs.supervision.driver_log import (
    LARGEST,
    DriverIdentity,
    DriverLog,
    DriverRecord,
    Hold,
    LaunchRecord,
    read_machine_name,
)
from jobs.supervision.driver_status import SILENT, list_killable_processes, read_driver_status
from jobs.supervision.launcher import LAUNCH_VARIABLE, read_tail
from tests.conftest import ROOT

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


# What is somewhere else


@pytest.mark.parametrize(
    "above", ["_leases", "_leases/tiny", "_leases/tiny/tiny-g0001", "_leases/tiny/launches"]
)
def test_no_file_is_written_read_or_removed_through_a_link(tmp_path: Path, above: str) -> None:
    """A folder of the log is a link to somebody's folder with files that are named as the log's are."""
    link, victim = tmp_path / "warehouse" / above, tmp_path / "victim"
    inner = victim / Path("_leases/tiny/tiny-g0001").relative_to(above) if "launches" not in above else victim
    inner.mkdir(parents=True)
    for epoch in range(120):
        (inner / f"{epoch:08d}.json").write_bytes(json.dumps({**DRIVER, "epoch": epoch}).encode())
        (inner / f"{epoch:08d}.stop").write_text("text")
    (victim / "hold.json").write_bytes(Hold("theirs", NOW).text())
    link.parent.mkdir(parents=True)
    link.symlink_to(victim)
    before = {one: one.stat() for one in victim.rglob("*")}
    log = DriverLog.at(str(tmp_path / "warehouse"), "tiny")
    driver = DriverRecord("tiny", "tiny-g0001", 200, "live", HERE, NOW, NOW, TOKEN)
    launch = LaunchRecord(TOKEN, read_machine_name(), NOW)
    mine = launch if above.endswith("launches") else driver
    for change in (log.write, lambda record: log.ask_to_stop(record, "a test")):
        with pytest.raises(UserError, match="has a link.*remove the link"):
            change(mine)
    for folder in ("tiny-g0001", "launches"):
        log.prune(folder, keep=1)
    assert read_driver_status(log).driver is None and log.hold() is None
    if inner != victim or above == "_leases/tiny":
        with pytest.raises(UserError, match="has a link"):
            log.put_hold(None)
    assert {one: one.stat() for one in victim.rglob("*")} == before


def test_only_the_files_of_drivers_are_pruned(log: DriverLog, tmp_path: Path) -> None:
    folder = tmp_path / "warehouse" / "_leases" / "tiny" / "tiny-g0001"
    folder.mkdir(parents=True)
    names = [
        "a.json",
        "b.stop",
        "00000009.txt",
        "9.json",
        "notes.json",
        *(f"{n:08d}.json" for n in range(1, 9)),
    ]
    for name in names:
        (folder / name).touch()
    (folder / "00000003.stop").touch()
    log.prune("tiny-g0001", keep=2)
    assert {one.name for one in folder.iterdir()} == {*names[:5], "00000007.json", "00000008.json"}


def test_a_record_that_is_a_link_is_replaced_and_its_target_stays(log: DriverLog, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("text")
    folder = tmp_path / "warehouse" / "_leases" / "tiny" / "launches"
    folder.mkdir(parents=True)
    (folder / f"{TOKEN}.json").symlink_to(target)
    (folder / f"{TOKEN}.stop").symlink_to(target)
    launch = LaunchRecord(TOKEN, read_machine_name(), NOW)
    log.write(launch)
    assert log.launch(TOKEN) == launch
    log.write(LaunchRecord("later", read_machine_name(), NOW + timedelta(hours=1)))
    log.prune("launches", keep=1)
    assert target.read_text() == "text" and [one.name for one in folder.iterdir()] == ["later.json"]


def test_a_huge_record_takes_no_memory(log: DriverLog, tmp_path: Path) -> None:
    """The record is a sparse file of 8 GB, and this process may take 1 GB more."""
    for name in (f"launches/{TOKEN}.json", f"launches/{TOKEN}.stop", "tiny-g0001/00000001.json", "hold.json"):
        path = tmp_path / "warehouse" / "_leases" / "tiny" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.truncate(path, 8 << 30)
    read = (
        "import resource, sys; from jobs.supervision.driver_log import *; "
        "from jobs.supervision.driver_status import read_driver_status; log = DriverLog.at(sys.argv[1], 'tiny'); "
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096; "
        "resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2); "
        "print(read_driver_status(log).text(), log.hold(), log.list_launches())"
    )
    done = subprocess.run(
        [sys.executable, "-c", read, str(tmp_path / "warehouse")], capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout == "there has been no driver None []\n", done.stderr


def test_a_huge_record_of_a_store_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    store = stores.MemoryStore()
    monkeypatch.setattr("jobs.storage.object_files._open_client", lambda place: store)
    log = DriverLog.at("s3a://bucket/warehouse", "tiny")
    log.files.write("hold.json", Hold("theirs", NOW).text())
    assert log.hold() == Hold("theirs", NOW)
    log.files.write("hold.json", Hold("theirs" * (LARGEST // 6), NOW).text())
    with pytest.raises(UserError, match="has more than 1,048,576 bytes"):
        log.files.read("hold.json", LARGEST)
    assert log.hold() is None and log.files.read("hold.json") is not None


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become a user without rights")
def test_a_record_that_this_user_may_not_read_is_none(log: DriverLog, tmp_path: Path) -> None:
    driver = DriverRecord("tiny", "tiny-g0001", 1, "live", HERE, NOW, NOW, TOKEN)
    log.write(driver)
    log.write(replace(driver, generation="tiny-g0002"))
    log.write(LaunchRecord(TOKEN, read_machine_name(), NOW))
    log.put_hold(Hold("theirs", NOW))
    folder = tmp_path / "warehouse" / "_leases" / "tiny"
    for name in (driver.name, f"launches/{TOKEN}.json", "hold.json", "tiny-g0002"):
        (folder / name).chmod(0)
    above = tmp_path
    while above != above.parent and above.stat().st_uid == 0 and not above.stat().st_mode & 0o005 == 0o005:
        above.chmod(above.stat().st_mode | 0o055)
        above = above.parent
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            with pytest.raises(PermissionError):
                open(folder / "hold.json")
            assert log.list_drivers() == log.list_launches() == [] and log.hold() is None
            assert read_driver_status(log).text() == "there has been no driver"
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


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


@pytest.mark.parametrize("cut", range(-12, 12))
def test_a_secret_across_the_place_where_a_log_is_cut_is_not_shown(tmp_path: Path, cut: int) -> None:
    """Neither its end, in any of its places across the cut, nor the lines of a private key that began before."""
    log, words = tmp_path / "own.log", "MYSQL_PASSWORD=hunter22-QQ"
    lines = f"{words}\n" + "line\n" * 900
    log.write_text("x" * 500 + "\n" + lines[: len(words) + 3989 - cut])
    assert "QQ" not in read_tail(log, tmp_path) and len(read_tail(log, tmp_path)) > 3900
    key = "-----BEGIN PRIVATE KEY-----\n" + "MIIEQQ\n" * 400 + "-----END PRIVATE KEY-----\n"
    log.write_text("x\n" * 9000 + key + "line\n" * (300 + cut))
    assert "QQ" not in read_tail(log, tmp_path)
    log.write_text("x" * 30_000 + words)  # a line of any length
    assert "QQ" not in read_tail(log, tmp_path)


def test_the_last_lines_of_a_log_are_shown_whole(tmp_path: Path) -> None:
    log = tmp_path / "own.log"
    for count in (1, 100, 2_000, 10_000):
        lines = [f"line {number} é" for number in range(count)]
        log.write_text("\n".join(lines) + "\n")
        shown = read_tail(log, tmp_path).splitlines()
        assert shown == lines[-len(shown) :] and (
            len(shown) == count or 3_900 < len("\n".join(shown)) <= 4_000
        )
    log.write_text("start\n" + "y" * 9_000 + "\n")
    assert read_tail(log, tmp_path) == "y" * 3_999 + "\n"
