"""Find and open the files that an input names. Only regular files are opened, never pipes or endless devices."""

from __future__ import annotations

import errno
import glob
import os
import re
import stat
from collections.abc import Iterable, Sequence
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from jobs.core.errors import UserError, print_note
from jobs.core.redaction import shorten_text

SYSTEM = ("/proc", "/sys")
"""Folders in which the kernel shows processes (with their environment variables) and devices, but no data."""
OF_SYSTEM = f"lies in {' or '.join(SYSTEM)}, which show the state of the system and hold no data"


class UnfitFile(Exception):
    """A path does not lead to a regular file, or leads to a file that is too large.

    The message completes the sentence `the file ...`.
    """


def open_regular(path: str | Path, within: Sequence[str] | None = None) -> BufferedReader:
    """Open a regular file for reading; a link to a regular file is allowed.

    Args:
        path: path of the file.
        within: real paths of folders. With links resolved, the file must lie in one of them; None allows any place.

    Raises:
        UnfitFile: the path leads to a folder, a pipe, a device or a file that shows the state of the system, or to a
            place outside the folders; or the path is not valid.
        OSError: the file cannot be opened.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:
        raise UnfitFile("has a path that no file can have") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnfitFile(f"is a link to itself ({error.strerror})") from error
        raise
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
    """Return whether a file shows the state of the system, according to its real path or its file system."""
    return any(is_within(real, folder) or status.st_dev == _find_device(folder) for folder in SYSTEM)


def is_within(real: str, folder: str) -> bool:
    """Return whether a real path is the folder or lies in it."""
    return real == folder or real.startswith(folder.rstrip("/") + "/")


def _find_device(folder: str) -> int | None:
    """Return the id (`st_dev`) of the file system that is mounted at a folder; None if it is not a mount point."""
    try:
        here = os.stat(folder).st_dev
    except OSError:
        return None
    return None if here == os.stat("/").st_dev else here


def _resolve_path(handle: int, path: str | Path) -> str:
    """Return the path of an open file with links resolved."""
    try:
        return os.readlink(f"/proc/self/fd/{handle}")
    except OSError:  # the system has no /proc
        real = os.path.realpath(path)
        if not os.path.samestat(os.stat(real), os.fstat(handle)):
            raise UnfitFile("was replaced while it was opened") from None
        return real


def read_regular(path: Path, most: int | None, within: Sequence[str] | None = None) -> bytes:
    """Return the content of a regular file; a link to a regular file is allowed.

    Args:
        path: path of the file.
        most: maximum size in bytes; None for any size.
        within: as in `open_regular`.

    Raises:
        UnfitFile: as in `open_regular`, or the file is larger than `most`.
        OSError: the file cannot be read.
    """
    with open_regular(path, within) as file:
        content = file.read(-1 if most is None else most + 1)
    if most is not None and len(content) > most:
        raise UnfitFile(f"is larger than {most:,} bytes")
    return content


def read_secret_file(path: Path, most: int) -> bytes:
    """Return the content of a file with secrets, as `read_regular` does; refuse a link that leads out of its folder.

    So nobody can replace the secret by a link to a file elsewhere.

    Raises:
        UnfitFile: as in `read_regular`, or a link leads out of the folder.
        OSError: the file cannot be read.
    """
    try:
        whole = path.expanduser().absolute()
        folder = os.path.realpath(whole.parent)
    except (ValueError, RuntimeError) as error:  # a NUL in the path, or an unknown home folder
        raise UnfitFile("has a path that no file can have") from error
    return read_regular(whole, most, [folder])


_SHOWN = 80
LEADS_OUT = "it is a link that leads out of the folder; to read it, give the link itself as --input"
NO_TEXT = "its name is not UTF-8 text, and rows are kept with the name of their file; rename it"


class KnownInputs(NamedTuple):
    """The inputs of this process: folders (as the user wrote them, and with links resolved), and named files."""

    folders: dict[str, str]
    files: set[str]


_known = KnownInputs({}, set())
_warnings: set[str] = set()
"""Warnings that were already printed."""


def get_known_inputs() -> KnownInputs:
    """Return the inputs of this process; `know_inputs` passes them to another process."""
    return _known


def know_inputs(inputs: KnownInputs) -> None:
    """Take over the inputs of another process, so that `open_input` applies the same checks as in that process."""
    _known.folders.update(inputs.folders)
    _known.files.update(inputs.files)


def know_folder(folder: Path) -> str:
    """Refuse, from now on, links that lead out of a folder; return the folder's path with links resolved."""
    written = os.path.abspath(folder)
    _known.folders[written] = real = os.path.realpath(written)
    return real


def open_input(path: str | Path) -> BufferedReader:
    """Open a file of an input for reading.

    Raises:
        UserError: the path is not a regular file, shows the state of the system, or is a link that leads out of its
            folder.
        OSError: the file cannot be opened.
    """
    try:
        return open_regular(path, _find_folders(path))
    except UnfitFile as error:
        raise UserError(f"{path}: {error}") from None


def list_part_files(path: Path) -> list[Path]:
    """Return a list of one file, or the sorted files in a folder that Spark wrote, without links out of the folder."""
    if not path.is_dir():
        return [path]
    folders = _find_folders(path) or [know_folder(path)]
    return sorted(file for file in path.rglob("*") if file.is_file() and is_below(file, folders))


def _find_folders(path: str | Path) -> list[str] | None:
    """Return the folders in which a path must stay; None if the user named the path or no known folder contains it."""
    written = os.path.abspath(path)
    if written in _known.files:
        return None
    return [real for folder, real in _known.folders.items() if is_within(written, folder)] or None


def find_files(inputs: Sequence[str], suffixes: Sequence[str]) -> list[str]:
    """Return the absolute paths of the files that `inputs` (files, folders, globs) name, sorted within each input.

    Raises:
        UserError: an input names no file with one of the suffixes.
    """
    found: list[str] = []
    endings = tuple(suffixes)
    for text in inputs:
        if "://" in text:
            raise UserError(f"{text}: only files on a local or mounted file system can be read")
        names = _list_named(text, endings)
        if not names:
            raise UserError(f"{text}: no such file, or no {', '.join(endings)} file in that folder")
        for name in names:
            if not name.lower().endswith(endings):
                raise UserError(f"{name}: unknown file format; give {', '.join(endings)}")
            if not has_text_name(name):
                raise UserError(f"{name}: {NO_TEXT}")
        found += names
    return list(dict.fromkeys(str(Path(name).absolute()) for name in found))


def is_several_files(text: str, suffixes: Sequence[str]) -> bool:
    """Return whether an input is a glob or a folder of files; a folder whose name ends like a file is one Spark file.

    Raises:
        UserError: the text cannot be a path.
    """
    path = parse_path(text)
    if path.is_dir():
        return not path.name.lower().endswith(tuple(suffixes))
    return not path.exists() and bool(set(text) & set("*?["))


def parse_path(text: str) -> Path:
    """Return a path as the user wrote it, after a check that the path is valid on this system.

    Raises:
        UserError: the path is too long, contains an invalid character, names a pipe or a device, or lies in a folder
            that shows the state of the system.
    """
    shown = repr(shorten_text(text, _SHOWN))
    try:
        path = Path(text).expanduser()
        status = path.stat()
        kind = status.st_mode
        if is_of_system(os.path.realpath(path), status):
            raise UserError(f"{shown}: {OF_SYSTEM}")
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
            raise UserError(
                f"{shown}: is a pipe or a device, and no file; write its content into a file first"
            )
    except (FileNotFoundError, NotADirectoryError):
        pass
    except ValueError:
        raise UserError(f"{shown}: is no path: it has a character that no path has (NUL)") from None
    except RuntimeError as error:
        raise UserError(f"{shown}: {error}; write the folder's whole path") from None
    except OSError as error:
        raise UserError(f"{shown}: cannot be looked for ({error.strerror}); give another path") from error
    _known.files.add(os.path.abspath(path))
    return path


def list_inputs(folder: Path, endings: tuple[str, ...]) -> list[str]:
    """Return the sorted inputs in a folder, and warn once about links that lead out of the folder."""
    some = (one for one in folder.iterdir() if one.name[0] not in "._")
    return _select_within(folder, (one for one in some if one.name.lower().endswith(endings)))


def _list_named(text: str, endings: tuple[str, ...]) -> list[str]:
    path = parse_path(text)
    if path.is_dir():
        return list_inputs(path, endings)
    if path.is_file():
        return [str(path)]
    prefix = re.split(r"[^/]*[*?[]", str(path), maxsplit=1)[0]
    folder = Path(prefix or ".")
    return _select_within(folder, _expand_glob(folder, str(path), str(path)[len(prefix) :]))


def _expand_glob(folder: Path, text: str, pattern: str) -> Iterable[Path]:
    """Return the paths that match a glob; `**` does not follow links to folders, which may form a cycle.

    Args:
        folder: folder to which the pattern is relative.
        text: the whole glob.
        pattern: part of the glob after the folder.
    """
    if "**" not in Path(pattern).parts:
        return map(Path, glob.glob(text))
    found = folder.glob(f"{pattern}/*" if pattern.endswith("**") else pattern)
    return (one for one in found if not any(part.startswith(".") for part in one.relative_to(folder).parts))


def _select_within(folder: Path, paths: Iterable[Path]) -> list[str]:
    """Return the sorted inputs among paths in a folder, and warn about links that lead out of the folder."""
    real = [know_folder(folder)]
    found = sorted(str(one) for one in paths if is_input(one))
    stay = [name for name in found if is_below(Path(name), real)]
    for name in sorted({*found} - {*stay}):
        warn_once(f"{name}: is not read: {LEADS_OUT}")
    return stay


def warn_once(text: str) -> None:
    """Print a warning unless the same warning was printed before."""
    if text not in _warnings:
        _warnings.add(text)
        print_note(f"warning: {text}")


def is_below(path: str | Path, folders: Sequence[str]) -> bool:
    """Return whether a path, with links resolved, lies below one of the folders, whose paths contain no links."""
    real = os.path.realpath(path)
    return any(is_within(real, folder) for folder in folders)


def has_text_name(name: str) -> bool:
    """Return whether a file's name is valid text; on some systems names may contain any bytes."""
    return name.isascii() or not any("\ud800" <= one <= "\udfff" for one in name)


def is_input(path: Path) -> bool:
    """Return whether a path is a file or a folder (Spark writes its output as a folder), and not a pipe.

    An attempt to open a pipe would wait for a writer.
    """
    return path.is_file() or path.is_dir()
