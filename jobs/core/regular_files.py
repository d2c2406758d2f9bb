"""Open files named by a user: regular files only, so that no pipe, endless device or misleading link is read.

The opened file is checked, not the path: a link could appear there between a check of the path and its opening.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path

SYSTEM = ("/proc", "/sys")
"""Folders in which the kernel shows processes (with their environment variables) and devices: they contain no data."""
OF_SYSTEM = f"lies in {' or '.join(SYSTEM)}, which show the state of the system and hold no data"


class UnfitFile(Exception):
    """A path to something other than a regular file, or to a file that is too large; the message completes
    `the file ...`.
    """


def open_regular(path: str | Path, within: Sequence[str] | None = None) -> BufferedReader:
    """Open a regular file for reading; a link to a regular file is allowed.

    Args:
        path: path of the file.
        within: real paths of folders; the file must lie below one of them after links are resolved. None: anywhere.

    Raises:
        UnfitFile: it is a folder, a pipe or a device, shows the state of the system, lies elsewhere, or its path is not
            valid.
        OSError: it cannot be opened.
    """
    try:
        # Opening a pipe would otherwise wait for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:
        raise UnfitFile("has a path that no file can have") from error
    try:
        status, real = os.fstat(handle), _resolve_path(handle, path)
        if within is not None and not any(is_within(real, folder) for folder in within):
            raise UnfitFile("is a link that leads out of its folder")
        if is_of_system(real, status):
            raise UnfitFile(OF_SYSTEM)
        if not stat.S_ISREG(status.st_mode):
            raise UnfitFile("is no regular file")
        return open(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def is_of_system(real: str, status: os.stat_result) -> bool:
    """Return whether a file shows the state of the system, by its real path or by its file system."""
    return any(is_within(real, folder) or status.st_dev == _find_device(folder) for folder in SYSTEM)


def is_within(real: str, folder: str) -> bool:
    """Return whether a real path is a folder or lies in it."""
    return real == folder or real.startswith(folder.rstrip("/") + "/")


def _find_device(folder: str) -> int | None:
    """Return the id (`st_dev`) of the file system mounted at a folder; None if none is mounted there."""
    try:
        here = os.stat(folder).st_dev
    except OSError:
        return None
    return None if here == os.stat("/").st_dev else here


def _resolve_path(handle: int, path: str | Path) -> str:
    """Return the path of an open file, with links resolved."""
    try:
        return os.readlink(f"/proc/self/fd/{handle}")
    except OSError:  # the system has no /proc
        real = os.path.realpath(path)
        if not os.path.samestat(os.stat(real), os.fstat(handle)):
            raise UnfitFile("was replaced while it was opened") from None
        return real


def read_regular(path: Path, most: int, within: Sequence[str] | None = None) -> bytes:
    """Return the content of a regular file; a link to a regular file is allowed.

    Args:
        path: path of the file.
        most: maximum size in bytes.
        within: as in `open_regular`.

    Raises:
        UnfitFile: as in `open_regular`, or the file is larger than `most`.
        OSError: it cannot be read.
    """
    with open_regular(path, within) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise UnfitFile(f"is larger than {most:,} bytes")
    return content


def read_secret_file(path: Path, most: int) -> bytes:
    """Return the content of a file with secrets, as `read_regular` does; a link must not lead out of its folder.

    So nobody can replace the secret by a link to another file.

    Raises:
        UnfitFile: as in `read_regular`, or a link leads out of the folder.
        OSError: it cannot be read.
    """
    try:
        whole = path.expanduser().absolute()
        folder = os.path.realpath(whole.parent)
    except (ValueError, RuntimeError) as error:  # a NUL in the path, or an unknown home folder
        raise UnfitFile("has a path that no file can have") from error
    return read_regular(whole, most, [folder])
