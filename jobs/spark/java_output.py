"""Filter useless lines out of the standard error of Spark's processes.

The Python worker in which Spark prepares a stateful query prints ten lines about its start, which no log level
silences. The standard error of Java and its workers is read line by line, and all other lines are passed on.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LAST_WORDS_SECONDS = 0.1
"""Seconds for which the end of this process waits for remaining lines."""

_NOISE = (
    b"Starting Streaming TransformWithStateInPandas",
    b"Streaming TransformWithStateInPandas Python worker",
    b"WARNING: Using incubator modules",
)


@contextmanager
def filter_output() -> Iterator[None]:
    """Filter the standard error of the processes that are started in the block.

    They keep the filter for life. Lines that they write after the end of this process are lost.
    """
    console = os.dup(2)
    read, write = os.pipe()
    os.dup2(write, 2)
    os.close(write)
    # The thread ends with the last process that has the pipe: at once if no process was started.
    reader = threading.Thread(target=_forward, args=(read, os.dup(console)), name="java output", daemon=True)
    reader.start()
    atexit.register(reader.join, LAST_WORDS_SECONDS)
    try:
        yield
    finally:
        os.dup2(console, 2)
        os.close(console)


def _forward(read: int, console: int) -> None:
    after_noise = False
    with os.fdopen(read, "rb") as lines, os.fdopen(console, "wb", buffering=0) as out:
        for line in lines:
            noise = line.startswith(_NOISE)
            if not noise and not (after_noise and line == b"\n"):  # an empty line follows each such line
                out.write(line)
            after_noise = noise
