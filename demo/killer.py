"""Kill a stream's driver with SIGKILL while a micro-batch is half done, and verify that it was."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Killed:
    """A driver that was killed: its processes, its micro-batch, and how many seconds after that one began."""

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
    """The checkpoint of a model's first generation, in a warehouse on this machine."""

    def __init__(self, warehouse: Path, model: str) -> None:
        self.warehouse, self.model = warehouse, model

    @property
    def path(self) -> Path | None:
        """Return the folder, or None if it does not exist yet."""
        found = sorted((self.warehouse / "checkpoints").glob(f"{self.model}-g*"))
        return found[0] if found else None

    def batches(self) -> Batches:
        """Return the last planned and the last committed micro-batch; -1 where there is none."""
        return Batches(max(self.times("offsets"), default=-1), max(self.times("commits"), default=-1))

    def has_planned(self, version: int) -> bool:
        """Return whether a micro-batch has been planned that contains this version of the measurements completely."""
        planned = self.batches().planned
        if planned < 0 or self.path is None:
            return False
        lines = (self.path / "offsets" / str(planned)).read_text().splitlines()
        return (
            int(json.loads(lines[2])["reservoirVersion"]) > version
        )  # version of the log, metadata, a line a source

    def times(self, folder: str) -> dict[int, float]:
        """Return when each micro-batch's file in `folder` (offsets, commits) was written, Unix seconds."""
        if self.path is None or not (self.path / folder).is_dir():
            return {}
        return {int(e.name): e.stat().st_mtime for e in os.scandir(self.path / folder) if e.name.isdigit()}


def find_driver(warehouse: Path, model: str) -> tuple[psutil.Process, psutil.Process]:
    """Return the Python driver that holds a model's stream, and the JVM of its Spark.

    Raises:
        LookupError: it has no driver.
    """
    lock = warehouse / "_locks" / f"stream-{model}.lock"
    try:
        driver = psutil.Process(int(lock.read_text()))
        family = [
            driver.parent(),
            *driver.children(),
        ]  # under spark-submit the JVM is the parent, else a child
        return driver, next(one for one in family if one is not None and one.name() == "java")
    except (OSError, ValueError, StopIteration, psutil.NoSuchProcess) as error:
        raise LookupError(f"no driver of the stream of {model} is found by {lock}") from error


class Killer(threading.Thread):
    """Wait for the next micro-batch of a stream that is half done, and kill the driver in it.

    The driver is stopped first and killed only if its micro-batch is then still planned and not committed,
    else it continues. So the driver is always killed in the middle of a micro-batch.
    """

    def __init__(self, warehouse: Path, model: str, seed: int) -> None:
        super().__init__(name=f"killer {model}", daemon=True)
        self.checkpoint = Checkpoint(warehouse, model)
        self.warehouse, self.model = warehouse, model
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
        except Exception as error:  # what went wrong is raised where the thread is waited for
            self.error = error

    def call_off(self) -> None:
        """Stop killing."""
        self._called_off.set()
        self.join()

    def _usual_seconds(self) -> float:
        """Return how long the last committed micro-batch took."""
        planned, committed = self.checkpoint.times("offsets"), self.checkpoint.times("commits")
        last = max(committed)
        return max(0.0, min(committed[last] - planned[last], 10.0))

    def _kill(self, batch: int) -> Killed | None:
        family = find_driver(self.warehouse, self.model)
        for process in family:
            process.send_signal(signal.SIGSTOP)
        try:
            for process in family:
                _await_stop(process)
            batches = self.checkpoint.batches()
            if not batches.planned > batches.committed:
                return None
            began = self.checkpoint.times("offsets")[batches.planned]
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
