"""Keep small files beside the tables: written whole or not at all, and read without Spark.

The folder is named as the warehouse is. A local one is reached by the system, any other by the driver through the file
system that Spark uses (`hadoop_files`), and by processes without Spark through fsspec, which needs the package of that
store (s3fs, gcsfs, adlfs) beside it.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote, urlsplit

import fsspec

from jobs.core.errors import RUN_FAILED, UserError

if TYPE_CHECKING:
    from jobs.warehouse.delta import Warehouse

_FSSPEC_NAMES = {"s3a": "s3", "s3n": "s3", "abfss": "abfs", "wasbs": "abfs", "wasb": "abfs"}
"""What Hadoop and fsspec call the same store."""


class Files(Protocol):
    """A folder of small files; names are paths within it."""

    def read(self, name: str) -> bytes | None:
        """Return a file's content, or None where there is no such file."""
        ...

    def write(self, name: str, content: bytes) -> None:
        """Write a file, in place of one that is there: a reader sees the old content or the new."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        ...

    def names(self, folder: str) -> list[str]:
        """Return the names within a folder, in order; none where there is no such folder."""
        ...


def files_of(root: str) -> Files:
    """Return the folder of a path or URI, reached without Spark.

    Raises:
        UserError: the URI needs a package that is not installed.
    """
    local = local_path(root)
    return LocalFiles(local) if local is not None else FsspecFiles(root)


def hadoop_files(warehouse: Warehouse, folder: str) -> Files:
    """Return a folder of the warehouse, reached as Spark reaches it."""
    local = local_path(warehouse.path(folder))
    return LocalFiles(local) if local is not None else HadoopFiles(warehouse, folder)


def local_path(root: str) -> Path | None:
    """Return the path of a folder of this machine, or None for any other."""
    if root.startswith("file:/"):
        return Path(unquote(urlsplit(root).path))
    return None if "://" in root else Path(root)


@contextmanager
def _draft(path: Path, content: bytes) -> Iterator[Path]:
    """Have the content under a hidden name beside `path`, to be given its own name at once; it does not stay."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        draft.write_bytes(content)
        yield draft
    finally:
        draft.unlink(missing_ok=True)


class LocalFiles:
    """A folder of this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, name: str) -> bytes | None:
        try:
            return (self.root / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        path = self.root / name
        with _draft(path, content) as draft:
            os.replace(draft, path)

    def create(self, name: str, content: bytes) -> bool:
        """Write a file unless it is there, and tell if that was done: of two that try it, one does."""
        path = self.root / name
        with _draft(path, content) as draft:
            try:
                os.link(draft, path)
            except FileExistsError:
                return False
        return True

    def remove(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.root / folder) if not name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []


class FsspecFiles:
    """A folder that fsspec reaches. Object stores write a file whole; elsewhere a reader may find half of one."""

    def __init__(self, root: str) -> None:
        scheme, rest = root.split("://", 1)
        try:
            self._files: Any = fsspec.filesystem(_FSSPEC_NAMES.get(scheme, scheme), use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise UserError(f"cannot reach {root} without Spark: {error}") from error
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

    def names(self, folder: str) -> list[str]:
        self._files.invalidate_cache()
        try:
            found = self._files.ls(f"{self._root}/{folder}", detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = (str(path).rstrip("/").rsplit("/", 1)[-1] for path in found)
        return sorted(name for name in names if not name.startswith("."))


class HadoopFiles:
    """A folder that a running Spark reaches."""

    def __init__(self, warehouse: Warehouse, folder: str) -> None:
        self._jvm: Any = warehouse.spark._jvm
        self._root = warehouse.path(folder)
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

    def write(self, name: str, content: bytes) -> None:
        path = self._path(name)
        draft = self._path(f"{name.rpartition('/')[0]}/.{uuid.uuid4().hex}")
        stream = self._files.create(draft, True)
        try:
            stream.write(bytearray(content))
        finally:
            stream.close()
        if not self._files.rename(draft, path):  # HDFS does not rename onto a file
            self._files.delete(path, False)
            self._files.rename(draft, path)

    def remove(self, name: str) -> None:
        self._files.delete(self._path(name), False)

    def names(self, folder: str) -> list[str]:
        path = self._path(folder)
        if not self._files.exists(path):
            return []
        names = (str(status.getPath().getName()) for status in self._files.listStatus(path))
        return sorted(name for name in names if not name.startswith("."))

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(f"{self._root}/{name}".rstrip("/"))


class Folder:
    """A folder of the warehouse, which may be there or not."""

    def __init__(self, warehouse: Warehouse, name: str) -> None:
        jvm: Any = warehouse.spark._jvm
        session: Any = warehouse.spark._jsparkSession
        self._path: Any = jvm.org.apache.hadoop.fs.Path(warehouse.path(name))
        self._files: Any = self._path.getFileSystem(session.sessionState().newHadoopConf())

    def exists(self) -> bool:
        """Tell if it is there."""
        return bool(self._files.exists(self._path))

    def remove(self, really: bool = True) -> bool:
        """Tell if it is there, and remove it with all that is in it, unless it is not meant.

        Raises:
            UserError: it cannot be removed.
        """
        there = self.exists()
        if there and really and not self._files.delete(self._path, True):
            raise UserError(
                f"{self._path} cannot be removed: look who may write there, and run maintain again",
                RUN_FAILED,
            )
        return there

    def rename(self, to: Folder) -> None:
        """Give it another name, at once.

        Raises:
            UserError: it cannot be renamed.
        """
        if not self._files.rename(self._path, to._path):
            raise UserError(
                f"{self._path} cannot be renamed: look who may write there, and run maintain again",
                RUN_FAILED,
            )
