"""Run a command as a new process, and record its time and its memory."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import psutil

from benchmarks.results import ROOT


class ProcessRun(NamedTuple):
    """A finished process: wall time, the sum of the memory peaks of its process tree, and its output."""

    seconds: float
    memory_mb: float
    output: str = ""


def run_process(command: Sequence[str], variables: Mapping[str, str], period: float = 0.05) -> ProcessRun:
    """Run a command to its end.

    Args:
        command: program and arguments.
        variables: environment variables to add to those of this process.
        period: seconds between two readings of the memory. A reading takes milliseconds for each GB in use.

    Raises:
        RuntimeError: the command fails.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    began = time.perf_counter()
    process = subprocess.Popen(
        command,
        env={**os.environ, **variables, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    peaks: dict[int, int] = {}
    watcher = threading.Thread(target=_watch_memory, args=(process, peaks, period))
    watcher.start()
    output, errors = process.communicate()
    seconds = time.perf_counter() - began
    watcher.join()
    if process.returncode:
        said = (output + errors).decode(errors="replace")
        raise RuntimeError(f"{' '.join(command)[:300]}: exit code {process.returncode}: {said[-2000:]}")
    return ProcessRun(seconds, sum(peaks.values()) / 1e6, output.decode(errors="replace"))


def _watch_memory(process: subprocess.Popen[bytes], peaks: dict[int, int], period: float) -> None:
    """Record the peak of private memory of each process in a tree, until the process ends."""
    while process.poll() is None:
        try:
            parent = psutil.Process(process.pid)
            for member in (parent, *parent.children(recursive=True)):
                memory = member.memory_full_info()
                peaks[member.pid] = max(peaks.get(member.pid, 0), memory.uss)
        except psutil.Error:
            pass
        time.sleep(period)
