"""Start a driver that outlives whoever starts it, and write down how it ends.

`python -m jobs.supervision.launcher ROOT MODEL TOKEN LOG ABOUT -- COMMAND...` runs the command as its child in a session of its own.
The log of drivers (`jobs.supervision.driver_log`) then says which process it is and, after it, its exit code and its last `error:`
line. Killed itself, the driver goes on, and its end is then seen from its process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from jobs.core.errors import RUN_FAILED, UserError
from jobs.supervision.driver_identity import machine, started_at
from jobs.supervision.driver_log import LAUNCHES, DriverLog, LaunchRecord

POLL_SECONDS = 0.5
BEGIN_SECONDS = 60.0
LAUNCH_VARIABLE = "KALMAN_LAUNCH"
"""Names the launch that a driver belongs to, where something started it that wants to find it again."""


def new_token() -> str:
    """Return a name for a launch that no other has."""
    return uuid.uuid4().hex[:12]


def detach(
    root: str,
    model: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    folder: Path,
    about: str = "",
) -> LaunchRecord:
    """Start a command detached from this process, and return once it is in the log of drivers.

    Args:
        root: of the warehouse.
        model: whose stream it drives.
        command: its words.
        environment: all of its variables.
        log: file for what it prints.
        folder: where it runs.
        about: what the launch is to remember.

    Raises:
        UserError: it could not be started.
    """
    token = new_token()
    log.parent.mkdir(parents=True, exist_ok=True)
    words = [
        sys.executable,
        "-m",
        "jobs.supervision.launcher",
        root,
        model,
        token,
        str(log),
        about,
        "--",
        *command,
    ]
    with log.open("ab") as out:
        process = subprocess.Popen(
            words,
            env=dict(environment),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    known, deadline = DriverLog.at(root, model), time.monotonic() + BEGIN_SECONDS
    while (found := known.launch(token)) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise UserError(f"the driver of {model} could not be started: see {log}", RUN_FAILED)
        time.sleep(0.05)
    return found


def main(words: Sequence[str]) -> int:
    """Run a command to its end."""
    root, model, token, log, about, dashes, *command = words
    assert dashes == "--"
    known = DriverLog.at(root, model)
    began = known.next_time()
    child = subprocess.Popen(command, env={**os.environ, LAUNCH_VARIABLE: token})

    def stop(number: int, frame: FrameType | None) -> None:
        child.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    mine, its = os.getpid(), child.pid
    launch = LaunchRecord(token, machine(), began, its, started_at(its), mine, started_at(mine), log, about)
    known.write(launch)
    known.prune(LAUNCHES)
    asked = False
    while child.poll() is None:
        if not asked and known.asked_to_stop(launch) is not None:
            asked = True
            child.send_signal(signal.SIGTERM)
        time.sleep(POLL_SECONDS)
    known.write(
        replace(launch, exit_code=child.returncode, ended_at=datetime.now(UTC), error=said_error(Path(log)))
    )
    return 0


def said_error(log: Path, size: int = 20_000) -> str | None:
    """Return the last `error:` line of a driver's log."""
    lines = tail(log, size).splitlines()
    return next((line[len("error: ") :] for line in reversed(lines) if line.startswith("error: ")), None)


def tail(log: Path, size: int = 4_000) -> str:
    """Return the end of a log; nothing if it is not here."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
