"""Start a driver that outlives its parent process, and record how it ends.

`python -m jobs.supervision.launcher ROOT MODEL TOKEN LOG ABOUT -- COMMAND...` runs the command as a child process in a
new session. The launcher writes the child's process id to the log of drivers (`jobs.supervision.driver_log`). When
the child has ended, the launcher adds the child's exit code and its last `error:` line. If the launcher is killed, the
driver continues to run, and only the absence of its process shows that it has ended.
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
from jobs.core.input_files import UnfitFile, open_regular
from jobs.core.processes import read_start_time
from jobs.core.redaction import redact_secrets
from jobs.supervision.driver_log import LAUNCH_VARIABLE, LAUNCHES, DriverLog, LaunchRecord, read_machine_name

POLL_SECONDS = 0.5
BEGIN_SECONDS = 60.0


def make_token() -> str:
    """Return a unique token for a launch."""
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
    """Start a command that is detached from this process; return once its launch is in the log of drivers.

    Args:
        root: root of the warehouse.
        model: name of the log of drivers (`jobs.supervision.driver_status.format_log_name`).
        command: program and arguments to start.
        environment: all environment variables of the command.
        log: file for the output of the command.
        folder: working directory of the command.
        about: description of the driver in the record of the launch.

    Raises:
        UserError: the command could not be started.
    """
    token = make_token()
    log.parent.mkdir(parents=True, exist_ok=True)
    launcher = [sys.executable, "-m", "jobs.supervision.launcher"]
    words = [*launcher, root, model, token, str(log), about, "--", *command]
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
    drivers, deadline = DriverLog.at(root, model), time.monotonic() + BEGIN_SECONDS
    while (found := drivers.launch(token)) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise UserError(f"the driver of {model} could not be started: see {log}", RUN_FAILED)
        time.sleep(0.05)
    return found


def main(words: Sequence[str]) -> int:
    """Run a command until it ends, and update its record in the log of drivers."""
    root, model, token, log, about, dashes, *command = words
    assert dashes == "--"
    drivers = DriverLog.at(root, model)
    began = drivers.compute_next_time()
    child = subprocess.Popen(command, env={**os.environ, LAUNCH_VARIABLE: token})

    def stop(number: int, frame: FrameType | None) -> None:
        child.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    started, keeper = ((pid, read_start_time(pid)) for pid in (child.pid, os.getpid()))
    launch = LaunchRecord(token, read_machine_name(), began, *started, *keeper, log, about)
    drivers.write(launch)
    drivers.prune(LAUNCHES)
    asked = False
    while child.poll() is None:
        if not asked and drivers.read_stop_request(launch) is not None:
            asked = True
            child.send_signal(signal.SIGTERM)
        time.sleep(POLL_SECONDS)
    error = find_last_error(Path(log))
    drivers.write(replace(launch, exit_code=child.returncode, ended_at=datetime.now(UTC), error=error))
    return 0


def find_last_error(log: Path, size: int = 20_000) -> str | None:
    """Return the last `error:` line in the last `size` bytes of a driver's log."""
    lines = read_tail(log, log.parent, size).splitlines()
    return next((line[len("error: ") :] for line in reversed(lines) if line.startswith("error: ")), None)


_BEFORE = 16_000
"""Bytes before the end of a log that are read only to recognize secrets which begin in them, such as private keys."""


def read_tail(log: Path, folder: Path, size: int = 4_000) -> str:
    """Return about the last `size` bytes of a log in whole lines without secrets; empty if the log is elsewhere.

    A record in the warehouse names the log, so only files of the folder of logs are read.
    """
    try:
        with open_regular(log, [os.path.realpath(folder)]) as file:
            start = max(0, os.fstat(file.fileno()).st_size - size - _BEFORE)
            file.seek(start)
            text = file.read(size + _BEFORE).decode(errors="replace")
    except UnfitFile:
        return f"(not shown: it is no file in {folder})"
    except OSError:
        return ""
    # Secrets are hidden before the text is cut, and what is left of a line that was cut is dropped.
    text = redact_secrets(text.partition("\n")[2] if start else text)
    last = text[-size:]
    return last if len(text) <= size else last.partition("\n")[2] or last


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
