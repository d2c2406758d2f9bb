"""Fuzz cases of the log of drivers: records and logs of a warehouse that somebody else may write."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jobs.core.processes import read_start_time
from jobs.supervision.driver_log import (
    Crashes,
    DriverIdentity,
    DriverLog,
    DriverRecord,
    Hold,
    LaunchRecord,
    read_machine_name,
)
from jobs.supervision.driver_status import NONE, CrashCounter, list_killable_processes, read_driver_status
from jobs.supervision.launcher import read_tail
from tests.fuzz.damage import damaged
from tests.fuzz.judge import CLEAR, REFUSED, Wrong, check_sentence

SECRET = "a secret of another file"
ODD: list[Any] = [
    None, True, 0, -1, 1, 2**31, 2**70, 10**400, 0.5, 1e308, float("nan"), float("inf"), "", "x", "\0", "\ud800",
    "x" * 5000, [], [[]], {}, {"a": 1}, "../../../victim", "/", "2024-01-01", "2024-01-01T00:00:00",
    "9999-12-31T23:59:59.999999+00:00", "0001-01-01T00:00:00+23:59", os.getpid(), os.getppid(),
]  # fmt: skip
LOGS = [
    "/proc/self/environ",
    "/dev/zero",
    "{}/secret",
    "{}/logs/link.log",
    "{}/logs/../secret",
    "{}/logs/pipe.log",
]


def record_case(chance: random.Random, folder: Path) -> str:
    """Records with odd values or damaged bytes, and logs that lead elsewhere: nothing is read, removed or killed."""
    root = folder / "warehouse"
    log = DriverLog.at(str(root), "tiny")
    now, pid = datetime.now(UTC), os.getpid()
    began = read_start_time(pid) or 0.0
    owner = DriverIdentity(read_machine_name(), pid, began, pid, began, "t")
    launch = LaunchRecord("t", read_machine_name(), now, pid, began, pid, began, _make_log(chance, folder))
    driver = DriverRecord("tiny", "tiny-g0001", 1, "live", owner, now, now, "t", rules={"queries": ["a"]})
    (root / "victim.json").parent.mkdir(parents=True, exist_ok=True)
    (root / "victim.json").write_text("{}")
    for name, record in (
        (launch.name, launch),
        (driver.name, driver),
        ("hold.json", Hold("x", now)),
        ("crashes.json", Crashes(1, {"a": 1}, "x")),
    ):
        log.files.write(name, _exchange(json.loads(record.text()), chance))
    log.write(replace(launch, token="last", began_at=log.compute_next_time()))
    status = read_driver_status(log)
    check_sentence(ascii(status.text())[:2000])
    for read in (log.hold, log.crashes, CrashCounter(str(root), log).committed):
        read()
    log.prune("launches", 1)
    if list_killable_processes(status):
        raise Wrong("a process without the launch's token would be killed")
    if not (root / "victim.json").exists():
        raise Wrong("a file outside the log of drivers was removed")
    for one in log.list_launches():
        if SECRET in read_tail(Path(one.log or ""), folder / "logs"):
            raise Wrong(f"{one.log!r} was shown")
    return REFUSED if status.state == NONE else CLEAR


def _make_log(chance: random.Random, folder: Path) -> str:
    (folder / "logs").mkdir()
    (folder / "secret").write_text(SECRET)
    (folder / "logs" / "link.log").symlink_to(folder / "secret")
    os.mkfifo(folder / "logs" / "pipe.log")
    return chance.choice(LOGS).format(folder)


def _exchange(values: dict[str, Any], chance: random.Random) -> bytes:
    """Return a record as JSON, with odd values in some fields, also of its owner, or with damaged bytes."""
    for _ in range(chance.randint(0, 2)):
        inner = values["owner"] if isinstance(values.get("owner"), dict) and chance.random() < 0.5 else values
        inner[chance.choice(["x", *inner])] = chance.choice(ODD)
    content = json.dumps(values).encode()
    return damaged(content, chance) if chance.random() < 0.3 else content
