"""Run verbs as processes, and kill them at chosen moments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import psutil

from tests.conftest import cli_environment
from tests.jobs.support.pipeline import Pipeline

PATIENCE = 240.0


class Driver:
    """A verb that runs as a process in its own session.

    After a failed test, `tests/conftest.py` kills the processes that still run.
    """

    running: ClassVar[list[Driver]] = []
    module: ClassVar[str] = "jobs.cli"

    def __init__(self, pipeline: Pipeline, *arguments: str, **environment: str) -> None:
        given = {"KALMAN_MODELS": str(pipeline.settings.models), **environment}
        self.log = pipeline.folder / f"driver-{time.monotonic_ns()}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module, *arguments],
                cwd=pipeline.folder,
                env=cli_environment(pipeline.settings.warehouse, given),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running.append(self)

    @classmethod
    def end_all(cls) -> None:
        """Kill the drivers that still run, and their child processes."""
        while cls.running:
            left = cls.running.pop()
            if left.process.poll() is None:
                left.kill()

    def wait_for(self, what: Callable[[], object], pause: float = 0.01) -> None:
        """Wait until a condition holds, checked every `pause` seconds; the process must not end before."""
        deadline = time.monotonic() + PATIENCE
        while not what():
            assert self.process.poll() is None, f"the process ended before: {self.said()}"
            assert time.monotonic() < deadline, f"the condition never held: {self.said()}"
            time.sleep(pause)

    def kill(self, whole_group: bool = True) -> None:
        """Send SIGKILL to the Python driver and Spark's JVM, or to the Python driver alone."""
        if whole_group:
            os.killpg(self.process.pid, signal.SIGKILL)
        else:
            self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        """Send SIGTERM to the driver and return its exit code."""
        self.process.terminate()
        return self.finish()

    def interrupt(self) -> int:
        """Send Ctrl-C's signal to the driver and return its exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.finish()

    def finish(self) -> int:
        """Wait for the end and return the exit code."""
        return self.process.wait(timeout=PATIENCE)

    def said(self) -> str:
        """Return the output so far."""
        return self.log.read_text()

    def python_workers(self) -> list[psutil.Process]:
        """Return the Python workers that Spark runs for the driver."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        return [one for one in family if _is_worker(one)][1:]


def _is_worker(process: psutil.Process) -> bool:
    """Return whether a process is one of Spark's Python workers; an ended or zombie process is not."""
    try:
        return "jobs.spark.worker_daemon" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a zombie too
        return False


def files(folder: str | Path) -> set[str]:
    """Return the names of a folder's finished files; none if there is no folder."""
    path = Path(folder)
    return {name for name in os.listdir(path) if name[0] not in "._"} if path.is_dir() else set()
