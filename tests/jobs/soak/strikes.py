"""Kill or freeze a verb's processes on the way, run the verb again as an operator would, and judge what is left."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import psutil

from jobs.core.errors import ALREADY_RUNNING
from jobs.supervision import driver_log
from tests.jobs.soak.aimed import VARIABLE, alone_on_its_machine
from tests.jobs.soak.kills import FREEZE, HANG, Kill
from tests.jobs.soak.world import Act, World
from tests.jobs.support.processes import Driver

LEASE_SECONDS = 6.0
"""The lease in a freeze: it expires while the processes are stopped."""
HANG_SECONDS = 4.0
"""How long Java runs on without Python before both are killed."""
PATIENCE_SECONDS = 300.0
UNHARMED, MISSED, VIOLATED, BROKEN = "unharmed", "missed", "violated", "broken"
"""The last: the test itself failed on the way, so the outcome is not known."""


class Victim(Driver):
    """A verb whose processes are struck from within."""

    module: ClassVar[str] = "tests.jobs.soak.aimed"

    def await_strike(self, noted: Path) -> bool:
        """Wait until the signal is sent, and tell if it was: the verb may have ended before."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not noted.exists() and time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        return noted.exists()

    def wake(self) -> None:
        """Let frozen processes run on."""
        for one in self._family():
            try:
                one.send_signal(signal.SIGCONT)
            except psutil.NoSuchProcess:
                continue

    def ended(self) -> int | None:
        """Wait for the end of the process; None if it does not end, and is killed."""
        try:
            return self.process.wait(timeout=PATIENCE_SECONDS)
        except Exception:
            self.kill()
            return None

    def _family(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


@contextmanager
def elsewhere() -> Iterator[None]:
    """Be another machine than that of the frozen processes: of another name, seeing none of their locks."""
    before = fcntl.flock, driver_log.LEASE_SECONDS, os.environ.get("KALMAN_HOST")
    alone_on_its_machine()
    driver_log.LEASE_SECONDS = LEASE_SECONDS
    os.environ["KALMAN_HOST"] = "two"
    try:
        yield
    finally:
        fcntl.flock, driver_log.LEASE_SECONDS = before[0], before[1]
        del os.environ["KALMAN_HOST"]
        if before[2] is not None:
            os.environ["KALMAN_HOST"] = before[2]


def run(world: World, kill: Kill, seconds: float) -> dict[str, Any]:
    """Strike a verb in a world, run it again, compare everything; return what was seen as one record.

    seconds: of a random moment, after Spark's start.
    """
    marks = [time.monotonic()]
    act = world.prepared(kill)
    before = len(world.generations())
    marks.append(time.monotonic())
    notes = world.pipeline.folder / f"kill-{kill.seed}-{time.monotonic_ns()}"
    notes.mkdir()
    environment = {VARIABLE: world.aim(kill, str(notes), seconds).text(), **world.environment}
    if kill.how == FREEZE:
        environment |= {"KALMAN_HOST": "one", "KALMAN_LEASE_SECONDS": f"{LEASE_SECONDS:g}"}
    victim = Victim(world.pipeline, *act.words, **environment)
    struck = victim.await_strike(notes / "struck")
    marks.append(time.monotonic())
    said = _run_again(world, kill, act, victim) if struck else _ended_before(victim)
    marks.append(time.monotonic())
    said += _wrong(world, act)
    marks.append(time.monotonic())
    names = ("prepare", "until struck", "again", "compare")
    return {
        **kill.record(),
        "seconds_after_start": round(seconds, 2) if kill.at_random else None,
        "command": " ".join(act.words),
        "seen": _seen(notes / "trace"),
        "exit": victim.process.returncode,
        "said": victim.said().strip().splitlines()[-3:],
        "seconds": {name: round(b - a, 1) for name, a, b in zip(names, marks, marks[1:], strict=False)},
        "verdict": VIOLATED if said else UNHARMED if struck else MISSED,
        "problems": said,
        **world.verified,
        # One for an upgrade or an adoption; more if a command that was overtaken commits its own after all.
        "generations_made": len(world.generations()) - before,
        "written_by": world.written_by(),
    }


def _run_again(world: World, kill: Kill, act: Act, victim: Victim) -> list[str]:
    """Run a struck verb again, let frozen processes wake up, and return what went wrong."""
    if kill.how == HANG:
        time.sleep(HANG_SECONDS)
        victim.kill()
    if kill.how != FREEZE:
        if victim.ended() is None:
            return [f"its Python process goes on for {PATIENCE_SECONDS:g} s without Spark's"]
        return _repeated(world, act)
    time.sleep(LEASE_SECONDS + 1)
    alarm = threading.Timer(kill.wake_after or 1e6, victim.wake)
    alarm.daemon = True
    alarm.start()
    with elsewhere():
        said = _repeated(world, act)
    alarm.cancel()
    victim.wake()
    if victim.ended() is None:
        said.append(f"woken, it has not ended after {PATIENCE_SECONDS:g} s")
    return said


def _ended_before(victim: Victim) -> list[str]:
    """The verb ended before the signal: return its error, if it had one."""
    code = victim.ended()
    return [f"it ends with {code} before it is struck: {victim.said()[-500:]}"] if code else []


def _repeated(world: World, act: Act) -> list[str]:
    """Run the verb again, as long as another driver holds the stream again and again; return its error."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    code, said = world.again(act)
    while code == ALREADY_RUNNING and time.monotonic() < deadline:
        time.sleep(1.0)
        code, said = world.again(act)
    return [f"run again, it ends with {code}: {said.strip()[-500:]}"] if code else []


def _wrong(world: World, act: Act) -> list[str]:
    """Return what is not as it must be after an act."""
    said = []
    try:
        act.done()
    except AssertionError as error:
        said.append(str(error))
    return said + world.problems(catch_up=act.streams)


def _seen(trace: Path) -> list[str]:
    """Return the file at which was struck, if one was, and the last commit points that were passed, in words."""
    lines = trace.read_text().splitlines() if trace.exists() else []
    return [line for line in lines[:-3] if line.startswith("seen ")] + lines[-3:]
