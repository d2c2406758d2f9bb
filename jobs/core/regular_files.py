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
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise UnfitFile("is no regular file")
        with open(handle, "rb", closefd=False) as file:
            content = file.read(most + 1)
    finally:
        os.close(handle)
    if len(content) > most:
        raise UnfitFile(f"is larger than {most:,} bytes")
    return content


def secret_file(path: Path, most: int) -> bytes:
    """Return the content of a file with secrets, as `read_regular` does; a link must not lead out of its folder.

    So a file that somebody else put in the place of the secret, as a link to another file, is not read.

    Raises:
        UnfitFile: as `read_regular`, or a link leads out of the folder.
        OSError: it cannot be read.
    """
    try:
        folder, real = path.expanduser().absolute().parent.resolve(), path.expanduser().resolve()
    except (ValueError, RuntimeError) as error:  # a NUL in the path, or links in a ring
        raise UnfitFile("has a path that no file can have") from error
    if not real.is_relative_to(folder):
        raise UnfitFile("is a link that leads out of its folder")
    return read_regular(real, most)


def cut(name: str, most: int = 120) -> str:
    """Return a name for a message: in one line, and not longer than a line."""
    text = name.encode("unicode_escape").decode() if not name.isprintable() else name
    return text if len(text) <= most else f"{text[: most - 3]}..."
