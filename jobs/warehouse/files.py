"""Small files and folders of the warehouse: the only module that calls Hadoop's file system.

A file is written as a whole or not at all, and outlives a loss of power once `write` returns: first its content is on
the disk, then its name. Appended content, removals and renamed folders may be undone by one. A local warehouse is read
and written through the operating system. In any other warehouse, a Spark driver goes through Hadoop's file system
(`hadoop_files`), and a process without Spark through fsspec (`files_of`), which needs the package of that store (gcsfs,
adlfs). S3 is reached by one client in both (`jobs.stores.s3_files`).
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
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import fsspec

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.roots import local_path
from jobs.stores.s3_files import S3Files
from jobs.stores.settings import in_s3

if TYPE_CHECKING:
    from jobs.warehouse.delta import Warehouse
    from jobs.warehouse.reading import Tables

_FSSPEC_NAMES = {"abfss": "abfs"}
"""fsspec's name of a store by Hadoop's."""
_FSSPEC_PACKAGES = {"abfs": "adlfs", "abfss": "adlfs", "gs": "gcsfs"}
"""The package with which fsspec reaches a store."""
_BLOCK = 16_384
"""How many bytes are read at a time to find the end of a line."""


class Files(Protocol):
    """A folder of small files. Names are paths relative to it; names that begin with a dot are hidden."""

    def read(self, name: str) -> bytes | None:
        """Return a file's content, or None if the file does not exist."""
        ...

    def write(self, name: str, content: bytes) -> None:
        """Write or replace a file: a reader sees the old content or the new."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        ...

    def names(self, folder: str) -> list[str]:
        """Return the names within a folder, sorted; an empty list if the folder does not exist."""
        ...

    def modified_at(self, name: str) -> datetime:
        """Return when a file was last modified."""
        ...


class WarehouseFiles(Files, Protocol):
    """A folder of the warehouse, whose files and folders can also be renamed and removed as a whole."""

    def first_line(self, name: str) -> bytes | None:
        """Return a file's first line, or None if the file does not exist; the rest is not read."""
        ...

    def exists(self, name: str) -> bool:
        """Tell if a file or folder exists."""
        ...

    def rename(self, name: str, to: str) -> bool:
        """Rename a file or folder, and tell if that succeeded; missing parent folders of `to` are made."""
        ...

    def remove_tree(self, name: str) -> bool:
        """Remove a folder with its content, and tell if that succeeded."""
        ...


def open_lock(path: Path) -> TextIO:
    """Open a lock file for reading and writing, made if it is not there; what a link points to is left alone.

    Raises:
        UserError: the name is a link, or the file cannot be opened.
    """
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+")
    except OSError as error:
        why = "is a link" if path.is_symlink() else f"cannot be opened ({error.strerror})"
        raise UserError(
            f"{path}: {why}, and locks are files that the pipeline makes: remove it while no command runs on this "
            "warehouse, and run the command again"
        ) from error


def files_of(root: str) -> Files:
    """Return the files of a folder, given by path or URI, without Spark.

    Raises:
        UserError: the URI needs a package that is not installed.
    """
    local = local_path(root)
    if in_s3(root):
        return S3Files(root)
    return LocalFiles(local) if local is not None else FsspecFiles(root)


def hadoop_files(warehouse: Tables, folder: str) -> WarehouseFiles:
    """Return the files of a folder of the warehouse, through Hadoop's file system unless the folder is local."""
    local = local_path(warehouse.path(folder))
    return LocalFiles(local) if local is not None else warehouse.spark_files(folder)


@contextmanager
def _draft(path: Path, content: bytes) -> Iterator[Path]:
    """Lend a hidden file with the content beside `path`, for the caller to rename or link; it is removed at the end.

    Its content is on the disk before: else a loss of power could leave the new name with no content.
    """
    _make_folder(path.parent)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing, and put their names on the disk."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_names(folder.parent)


def _sync_names(folder: Path) -> None:
    """Put the names in a folder on the disk, where its file system can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # of some network file systems
            raise
    finally:
        os.close(handle)


class LocalFiles:
    """A local folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, name: str) -> bytes | None:
        try:
            return (self.root / name).read_bytes()
        except FileNotFoundError:
            return None

    def first_line(self, name: str) -> bytes | None:
        try:
            with open(self.root / name, "rb") as file:
                return file.readline()
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        path = self.root / name
        with _draft(path, content) as draft:
            os.replace(draft, path)
            _sync_names(path.parent)

    def create(self, name: str, content: bytes) -> bool:
        """Write a file unless it exists, and tell if this call wrote it: of concurrent calls exactly one does."""
        path = self.root / name
        with _draft(path, content) as draft:
            try:
                os.link(draft, path)
            except FileExistsError:
                return False
            _sync_names(path.parent)
        return True

    def append(self, name: str, content: bytes) -> int:
        """Append to a file, which is made if it does not exist, and return the file's size in bytes."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(content)
            return file.tell()

    def remove(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    def exists(self, name: str) -> bool:
        return (self.root / name).exists()

    def modified_at(self, name: str) -> datetime:
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
        # A file that another process deletes meanwhile must not leave the rest behind.
        shutil.rmtree(self.root / name, ignore_errors=True)
        return not (self.root / name).exists()

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.root / folder) if not name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []


class ChecksumException(OSError):
    """A file's content is not what its checksum says."""


class ChecksummedFiles(LocalFiles):
    """A local folder that Spark writes through Hadoop, which keeps `.NAME.crc` beside each file NAME.

    That file has `crc`, a zero byte, the number of bytes of a block, and the CRC-32 of each block (Hadoop's
    `ChecksumFileSystem`). A file without it, or one with another beginning, is not verified.
    """

    def read(self, name: str) -> bytes | None:
        content = super().read(name)
        folder, _, last = name.rpartition("/")
        sums = super().read(f"{folder}/.{last}.crc" if folder else f".{last}.crc")
        if content is None or sums is None or not sums.startswith(b"crc\x00"):
            return content
        (size,) = struct.unpack(">i", sums[4:8])
        blocks = [content[start : start + size] for start in range(0, len(content), size)]
        if b"".join(struct.pack(">I", zlib.crc32(block)) for block in blocks) != sums[8:]:
            raise ChecksumException(f"{name}: its checksum differs")
        return content


class FsspecFiles:
    """A folder read through fsspec. Object stores write a file as a whole; elsewhere a reader may see half of it."""

    def __init__(self, root: str) -> None:
        scheme, rest = root.split("://", 1)
        try:
            self._files: Any = fsspec.filesystem(_FSSPEC_NAMES.get(scheme, scheme), use_listings_cache=False)
        except (ImportError, ValueError) as error:
            package = _FSSPEC_PACKAGES.get(scheme)
            if package is None:
                raise UserError(f"cannot reach {root} without Spark: {error}") from error
            raise UserError(
                f"a process without Spark that reads {root} needs the package {package}: pip install {package} "
                "(docs/deploy.md)"
            ) from error
        self._root = self._files._strip_protocol(f"{_FSSPEC_NAMES.get(scheme, scheme)}://{rest}")

    def read(self, name: str) -> bytes | None:
        try:
            return self._files.cat_file(f"{self._root}/{name}")
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        path = f"{self._root}/{name}"
        self._files.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        self._files.pipe_file(path, content)

    def remove(self, name: str) -> None:
        try:
            self._files.rm_file(f"{self._root}/{name}")
        except FileNotFoundError:
            return

    def modified_at(self, name: str) -> datetime:
        return self._files.modified(f"{self._root}/{name}")

    def names(self, folder: str) -> list[str]:
        self._files.invalidate_cache()
        try:
            found = self._files.ls(f"{self._root}/{folder}", detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = (str(path).rstrip("/").rsplit("/", 1)[-1] for path in found)
        return sorted(name for name in names if not name.startswith("."))


class HadoopFiles:
    """A folder of the warehouse, read and written by the JVM through the file system that Spark uses for it.

    For a local folder, too: Hadoop keeps a checksum beside each file that Spark writes, and verifies it on reading.
    """

    def __init__(self, warehouse: Warehouse, folder: str) -> None:
        self._jvm: Any = warehouse.spark._jvm
        self._root = warehouse.path(folder).rstrip("/")
        session: Any = warehouse.spark._jsparkSession
        self._files: Any = self._path("").getFileSystem(session.sessionState().newHadoopConf())

    def read(self, name: str) -> bytes | None:
        path = self._path(name)
        if not self._files.exists(path):
            return None
        stream = self._files.open(path)
        try:
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
        finally:
            stream.close()

    def first_line(self, name: str) -> bytes | None:
        path = self._path(name)
        if not self._files.exists(path):
            return None
        stream, line = self._files.open(path), b""
        try:
            while b"\n" not in line and (more := bytes(stream.readNBytes(_BLOCK))):
                line += more
        finally:
            stream.close()
        return line.split(b"\n", 1)[0]

    def write(self, name: str, content: bytes) -> None:
        path = self._path(name)
        draft = self._path(f"{name.rpartition('/')[0]}/.{uuid.uuid4().hex}")
        stream = self._files.create(draft, True)
        try:
            stream.write(bytearray(content))
            if stream.hasCapability("hsync"):
                stream.hsync()
        finally:
            stream.close()
        if not self._files.rename(draft, path):  # HDFS does not rename onto a file
            self._files.delete(path, False)
            self._files.rename(draft, path)

    def remove(self, name: str) -> None:
        self._files.delete(self._path(name), False)

    def exists(self, name: str) -> bool:
        return bool(self._files.exists(self._path(name)))

    def modified_at(self, name: str) -> datetime:
        """Return when a file was last modified."""
        status = self._files.getFileStatus(self._path(name))
        return datetime.fromtimestamp(status.getModificationTime() / 1000, UTC)

    def rename(self, name: str, to: str) -> bool:
        target = self._path(to)
        self._files.mkdirs(target.getParent())
        return bool(self._files.rename(self._path(name), target))

    def remove_tree(self, name: str) -> bool:
        path = self._path(name)
        return bool(self._files.delete(path, True)) or not self._files.exists(path)

    def names(self, folder: str) -> list[str]:
        path = self._path(folder)
        if not self._files.exists(path):
            return []
        names = (str(status.getPath().getName()) for status in self._files.listStatus(path))
        return sorted(name for name in names if not name.startswith("."))

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(f"{self._root}/{name}".rstrip("/"))


class Folder:
    """A folder of the warehouse that `maintain` removes. It need not exist."""

    def __init__(self, warehouse: Tables, name: str) -> None:
        self._files, self._name, self._path = hadoop_files(warehouse, ""), name, warehouse.path(name)

    def exists(self) -> bool:
        """Tell if the folder exists."""
        return self._files.exists(self._name)

    def remove(self, really: bool = True) -> bool:
        """Remove the folder with its content, unless `really` is False, and tell if it existed.

        Raises:
            UserError: the folder cannot be removed.
        """
        existed = self.exists()
        if existed and really and not self._files.remove_tree(self._name):
            raise self._refused("removed")
        return existed

    def rename(self, to: Folder) -> None:
        """Rename the folder.

        Raises:
            UserError: the folder cannot be renamed.
        """
        if not self._files.rename(self._name, to._name):
            raise self._refused("renamed")

    def _refused(self, done: str) -> UserError:
        return UserError(
            f"{self._path} cannot be {done}: check who may write there, then run maintain again", RUN_FAILED
        )
