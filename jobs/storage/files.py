"""Small files and folders of the warehouse.

A file is written as a whole or not at all, and survives a power failure once `write` has returned, because the content
is flushed to the disk before the name. A power failure may undo appended content, removals, and renames of folders. A
local warehouse is accessed through the operating system, an object store through one client
(`jobs.storage.object_files`).
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.faults import find_fault, name_file
from jobs.core.input_files import UnfitFile, read_regular
from jobs.core.settings import find_local_path
from jobs.storage.object_files import FileStamp, ObjectFiles

if TYPE_CHECKING:
    from jobs.storage.warehouse import Tables


REPORTS = "reports"
"""The folder of a warehouse that contains the pages about models."""


def open_lock(path: Path) -> TextIO:
    """Open a lock file for reading and writing; make the file if it is missing. Never follow a link.

    Raises:
        UserError: the name is a link, or the file cannot be opened.
    """
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+")
    except OSError as error:
        fault = find_fault(error)
        if fault is not None:
            raise UserError(fault, RUN_FAILED) from error
        why = "is a link" if path.is_symlink() else f"cannot be opened ({error.strerror})"
        raise UserError(
            f"{path}: {why}, and locks are files that the pipeline makes: remove it while no command runs on this "
            "warehouse, and run the command again"
        ) from error


def open_files(root: str) -> SmallFiles:
    """Return the files of a folder, which is given by path or URI.

    Raises:
        UserError: the package of the store's client is not installed.
    """
    local = find_local_path(root)
    return LocalFiles(local) if local is not None else ObjectFiles(root)


def open_records(root: str, folder: str) -> SmallFiles:
    """Return the files of a folder of the warehouse `root` that has records, and no links.

    Raises:
        UserError: the package of the store's client is not installed.
    """
    local = find_local_path(root)
    return ObjectFiles(f"{root}/{folder}") if local is None else LinklessFiles(local, folder)


@contextmanager
def _write_draft(path: Path, content: bytes) -> Iterator[Path]:
    """Yield a hidden file with the content beside `path`, for the caller to rename or link; remove it at the end.

    The content is flushed to the disk first. Otherwise a power failure could leave the new name without the content.
    """
    _make_folder(path.parent)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with name_file(path), draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def _make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, and flush the names of the new folders to the disk."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_names(folder.parent)


def _sync_names(folder: Path) -> None:
    """Flush the names in a folder to the disk if the file system supports this."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot flush names
            raise
    finally:
        os.close(handle)


class LocalFiles:
    """A local folder of small files."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, name: str, most: int | None = None) -> bytes | None:
        try:
            return read_regular(self.root / name, most)
        except FileNotFoundError:
            return None
        except UnfitFile as error:
            raise UserError(
                f"{self.root / name}: {error}; remove it, and see who wrote it", RUN_FAILED
            ) from error

    def read_first_line(self, name: str) -> bytes | None:
        try:
            with open(self.root / name, "rb") as file:
                return file.readline()
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        path = self.root / name
        with _write_draft(path, content) as draft:
            os.replace(draft, path)
            _sync_names(path.parent)

    def create(self, name: str, content: bytes) -> bool:
        """Write a file unless it exists; return whether this call wrote it. Of concurrent calls exactly one does."""
        path = self.root / name
        with _write_draft(path, content) as draft:
            try:
                os.link(draft, path)
            except FileExistsError:
                return False
            _sync_names(path.parent)
        return True

    def append(self, name: str, content: bytes) -> int:
        """Append content to a file, make the file if it is missing, and return its size in bytes."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with name_file(path), path.open("ab") as file:
            file.write(content)
            return file.tell()

    def remove(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    def exists(self, name: str) -> bool:
        return (self.root / name).exists()

    def seen(self, name: str) -> FileStamp | None:
        try:
            found = (self.root / name).stat()
        except FileNotFoundError:
            return None
        return FileStamp(f"{found.st_ino} {found.st_mtime_ns}", found.st_size)

    def read_modified_time(self, name: str) -> datetime:
        return datetime.fromtimestamp((self.root / name).stat().st_mtime_ns // 1_000_000 / 1000, UTC)

    def rename(self, name: str, to: str) -> bool:
        target = self.root / to
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).rename(target)
        except OSError:
            return False
        return True

    def remove_tree(self, name: str) -> bool:
        # Another process may delete a file at the same time; the other files must still be removed.
        shutil.rmtree(self.root / name, ignore_errors=True)
        return not (self.root / name).exists()

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.root / folder) if not name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []


class LinklessFiles(LocalFiles):
    """A folder of a warehouse without links to folders, so that nobody who writes there has other files changed.

    The folder, or a folder in it, that is a link has no files; writing or removing a file there raises a `UserError`.
    """

    def __init__(self, warehouse: Path, folder: str) -> None:
        super().__init__(warehouse / folder)
        self._real = f"{os.path.realpath(warehouse)}/{folder}"

    def read(self, name: str, most: int | None = None) -> bytes | None:
        return super().read(self._refuse_link(name), most)

    def write(self, name: str, content: bytes) -> None:
        super().write(self._refuse_link(name), content)

    def remove(self, name: str) -> None:
        super().remove(self._refuse_link(name))

    def names(self, folder: str) -> list[str]:
        return super().names(folder) if self._is_own(folder) else []

    def _is_own(self, folder: str) -> bool:
        path = self.root / folder
        return not path.is_symlink() and os.path.realpath(path) == f"{self._real}/{folder}".rstrip("/")

    def _refuse_link(self, name: str) -> str:
        """Return the name of a file, after a check that its folder is no link."""
        folder = os.path.dirname(name)
        if self._is_own(folder):
            return name
        raise UserError(
            f"{self.root / folder}: its path has a link, which folders of records never have; remove the link, and see "
            "who made it",
            RUN_FAILED,
        )


class ChecksumException(OSError):
    """The content of a file does not match its checksum."""


class ChecksummedFiles(LocalFiles):
    """A local folder that Spark writes through Hadoop, which puts a checksum file `.NAME.crc` beside each file NAME.

    A checksum file contains `crc`, a zero byte, the number of bytes in a block, and the CRC-32 of each block (Hadoop's
    `ChecksumFileSystem`). A file is not verified if its checksum file is missing or does not begin with `crc`.
    """

    def read(self, name: str, most: int | None = None) -> bytes | None:
        content = super().read(name, most)
        folder, _, last = name.rpartition("/")
        sums = super().read(f"{folder}/.{last}.crc" if folder else f".{last}.crc")
        if content is None or sums is None or not sums.startswith(b"crc\x00"):
            return content
        (size,) = struct.unpack(">i", sums[4:8])
        blocks = [content[start : start + size] for start in range(0, len(content), size)]
        if b"".join(struct.pack(">I", zlib.crc32(block)) for block in blocks) != sums[8:]:
            raise ChecksumException(f"{name}: its checksum differs")
        return content


def remove_folder(warehouse: Tables, name: str, really: bool = True) -> bool:
    """Remove a folder of the warehouse with its content, unless `really` is False; return whether the folder existed.

    Raises:
        UserError: the folder cannot be removed.
    """
    files = warehouse.files("")
    existed = files.exists(name)
    if existed and really and not files.remove_tree(name):
        raise _build_refusal(warehouse.path(name), "removed")
    return existed


def rename_folder(warehouse: Tables, name: str, to: str) -> None:
    """Rename a folder of the warehouse.

    Raises:
        UserError: the folder cannot be renamed.
    """
    if not warehouse.files("").rename(name, to):
        raise _build_refusal(warehouse.path(name), "renamed")


def _build_refusal(path: str, done: str) -> UserError:
    return UserError(
        f"{path} cannot be {done}: check that this user may write there and that its file system is not read-only, "
        "then run maintain again",
        RUN_FAILED,
    )


SmallFiles = LocalFiles | ObjectFiles
"""A folder of small files.

Names are paths relative to the folder; names that begin with a dot are hidden. `ObjectFiles` describes the methods that
both classes have; it alone has `send`, and `LocalFiles` alone has `append`.
"""
