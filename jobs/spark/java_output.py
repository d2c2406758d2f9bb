"""Keep from the terminal what Spark's processes say that tells a user nothing.

The Python worker in which Spark prepares a stateful query tells each step of its start, in ten lines of its own names,
by `print`: no level of logging silences it. What Java and its workers write to standard error is read line by line, and
all other lines go on to where they would have gone.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LAST_WORDS_SECONDS = 0.1
"""How long the end of this process waits for what has been written and not yet passed on."""

_NOISE = (
    b"Starting Streaming TransformWithStateInPandas",
    b"Streaming TransformWithStateInPandas Python worker",
    b"WARNING: Using incubator modules",
)


@contextmanager
def filtered() -> Iterator[None]:
    """Let processes that are started meanwhile write to a standard error without those lines.

    They keep it for life. When this process ends before them, what they write goes nowhere.
    """
    console = os.dup(2)
    read, write = os.pipe()
    os.dup2(write, 2)
    os.close(write)
    # It ends when the last process that has the pipe has ended: at once if none was started.
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
            if not noise and not (after_noise and line == b"\n"):  # an empty line follows each
                out.write(line)
            after_noise = noise
