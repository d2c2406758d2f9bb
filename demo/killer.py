"""Kill a stream's driver with SIGKILL in the middle of a micro-batch, and verify it."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from dataclasses import dataclass

import psutil

from jobs.core.settings import find_local_path
from jobs.storage.files import open_files
from jobs.supervision.driver_log import DriverLog

POLL_SECONDS = 0.01
SETTLE_SECONDS = 0.5
"""Seconds for a store to finish the requests that a driver sent right before it was stopped."""


@dataclass(frozen=True, slots=True)
class Killed:
    """A killed driver: its processes, its micro-batch, and the seconds from the micro-batch's start to the kill."""

    driver: int
    jvm: int
    batch: int
    after: float
    at: float


@dataclass(frozen=True, slots=True)
class Batches:
    """The micro-batches of a checkpoint, by its files: the last planned one and the last committed one."""

    planned: int
    committed: int


class Checkpoint:
    """The checkpoint of a model's first generation, below a warehouse's root, read without Spark."""

    def __init__(self, root: str, model: str) -> None:
        self.root, self.model = root, model
        self._files = open_files(f"{root}/checkpoints")
        self._name: str | None = None

    @property
    def name(self) -> str | None:
        """Return the name of its folder, or None if it does not exist yet."""
        if self._name is None:
            found = (name for name in self._files.names("") if name.startswith(f"{self.model}-g"))
            self._name = next(found, None)
        return self._name

    def batches(self) -> Batches:
        """Return the last planned and the last committed micro-batch; -1 without one."""
        # Commits are read first, so that a micro-batch committed in between does not hide the open one.
        committed = max(self.numbers("commits"), default=-1)
        return Batches(max(self.numbers("offsets"), default=-1), committed)

    def has_planned(self, version: int) -> bool:
        """Return whether a micro-batch has been planned that contains this version of the measurements completely."""
        planned = max(self.numbers("offsets"), default=-1)
        content = None if planned < 0 else self._files.read(f"{self.name}/offsets/{planned}")
        if content is None:
            return False
        lines = content.decode().splitlines()
        return (
            int(json.loads(lines[2])["reservoirVersion"]) > version
        )  # version of the log, metadata, a line for each source

    def numbers(self, folder: str) -> list[int]:
        """Return the micro-batches that have a file in `folder` (offsets, commits)."""
        if self.name is None:
            return []
        return [int(name) for name in self._files.names(f"{self.name}/{folder}") if name.isdigit()]

    def times(self, folder: str) -> dict[int, float]:
        """Return when each micro-batch's file in `folder` was written, Unix seconds; a store may round to seconds."""
        return {number: self.time(folder, number) for number in self.numbers(folder)}

    def time(self, folder: str, number: int) -> float:
        """Return when a micro-batch's file in `folder` was written, Unix seconds."""
        return self._files.read_modified_time(f"{self.name}/{folder}/{number}").timestamp()


def find_driver(root: str, model: str) -> tuple[psutil.Process, psutil.Process]:
    """Return the Python driver that holds a model's stream, and the JVM of its Spark.

    Raises:
        LookupError: the model has no driver on this machine.
    """
    running = [one.owner for one in DriverLog.at(root, model).list_drivers() if one.ended_at is None]
    try:
        owner = next(one for one in reversed(running) if one.alive(None))
        return psutil.Process(owner.pid), psutil.Process(owner.jvm)
    except (StopIteration, psutil.NoSuchProcess) as error:
        raise LookupError(f"no driver of the stream of {model} runs here on {root}") from error


class Killer(threading.Thread):
    """Wait for a half-done micro-batch of a stream, and kill the driver.

    The driver is stopped first. It is killed only if its micro-batch is then planned and not committed; else it
    continues. So the kill is always in the middle of a micro-batch.
    """

    def __init__(self, root: str, model: str, seed: int) -> None:
        super().__init__(name=f"killer {model}", daemon=True)
        self.checkpoint = Checkpoint(root, model)
        self.root, self.model = root, model
        self.killed: Killed | None = None
        self.error: Exception | None = None
        self._random = random.Random(f"{seed} {model}")
        self._called_off = threading.Event()

    def run(self) -> None:
        """Wait and kill."""
        try:
            while self.killed is None and not self._called_off.wait(POLL_SECONDS):
                batches = self.checkpoint.batches()
                if batches.planned > batches.committed >= 0:
                    self._called_off.wait(self._random.uniform(0.0, 0.7) * self._usual_seconds())
                    self.killed = self._kill(batches.planned)
        except Exception as error:  # the error is raised by the caller that joins the thread
            self.error = error

    def call_off(self) -> None:
        """Stop killing."""
        self._called_off.set()
        self.join()

    def _usual_seconds(self) -> float:
        """Return the seconds of the last committed micro-batch."""
        last = max(self.checkpoint.numbers("commits"))
        took = self.checkpoint.time("commits", last) - self.checkpoint.time("offsets", last)
        return max(0.0, min(took, 10.0))

    def _kill(self, batch: int) -> Killed | None:
        family = find_driver(self.root, self.model)
        for process in family:
            process.send_signal(signal.SIGSTOP)
        try:
            for process in family:
                _await_stop(process)
            if find_local_path(self.root) is None:
                time.sleep(SETTLE_SECONDS)
            batches = self.checkpoint.batches()
            if not batches.planned > batches.committed:
                return None
            began = self.checkpoint.time("offsets", batches.planned)
            for process in family:
                process.send_signal(signal.SIGKILL)
            now = time.time()
            return Killed(family[0].pid, family[1].pid, batches.planned, now - began, now)
        finally:
            for process in family:
                if process.is_running():
                    process.send_signal(signal.SIGCONT)


def _await_stop(process: psutil.Process, seconds: float = 5.0) -> None:
    """Wait until a process has stopped after SIGSTOP: its last write has then happened or not."""
    until = time.monotonic() + seconds
    while process.status() != psutil.STATUS_STOPPED and time.monotonic() < until:
        time.sleep(POLL_SECONDS / 10)
