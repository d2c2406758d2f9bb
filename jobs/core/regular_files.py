"""Read a small file that somebody has named: a regular file, of limited size, and nothing that waits or never ends."""

from __future__ import annotations

import os
import stat
from pathlib import Path


class UnfitFile(Exception):
    """A path that is no regular file, or one that is too large; the message completes `the file ...`."""


def read_regular(path: Path, most: int) -> bytes:
    """Return the content of a regular file; a link to one counts as one.

    Args:
        path: of the file.
        most: bytes that it may have.

    Raises:
        UnfitFile: it is a folder, a pipe or a device, is larger, or its path cannot be one.
        OSError: it cannot be read.
    """
    try:
        # Without waiting: opening a pipe would wait for somebody who writes into it.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:
        raise UnfitFile("has a path that no file can have") from error
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise UnfitFile("is no regular file")
        content = file.read(most + 1)
    if len(content) > most:
        raise UnfitFile(f"is larger than {most:,} bytes")
    return content
