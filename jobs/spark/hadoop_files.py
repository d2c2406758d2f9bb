"""Access files through Spark.

The module returns paths that Spark's readers accept, and accesses small files, in a store that only Spark can access,
through Hadoop's file system.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
import uuid
from functools import cache
from typing import Any

from pyspark.sql import SparkSession

from jobs.core.settings import find_local_path


class HadoopFiles:
    """A folder of published files, in a store that only the JVM can access."""

    def __init__(self, spark: SparkSession, folder: str) -> None:
        self._jvm: Any = spark._jvm
        self._root = folder.rstrip("/")
        session: Any = spark._jsparkSession
        self._files: Any = self._path("").getFileSystem(session.sessionState().newHadoopConf())

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
        if not self._files.rename(draft, path):  # HDFS cannot rename a file to the name of an existing file
            self._files.delete(path, False)
            self._files.rename(draft, path)

    def remove(self, name: str) -> None:
        self._files.delete(self._path(name), False)

    def exists(self, name: str) -> bool:
        return bool(self._files.exists(self._path(name)))

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


ENCODED = re.compile(r"[^\w!$&'()+,./:;=@~-]")
"""Characters that Spark misreads in a path, because Java encodes them in a URI or they are glob characters."""


def convert_path(spark: SparkSession, path: str) -> str:
    """Return a path by which Spark's file readers find a file or folder, whatever its name.

    Spark reads a name with one of `*?[]{}` as a glob, which may match other files, and Spark's state reader encodes a
    path twice. If all processes run on this machine, the path is a link. Otherwise a backslash escapes glob characters.
    """
    if not ENCODED.search(path):
        return path
    local = find_local_path(path)
    if local is not None and str(spark.sparkContext.master).startswith("local"):
        return _make_link(str(local))
    return re.sub(r"([*?\[\]{}\\])", r"\\\1", path)


@cache
def _make_link(path: str) -> str:
    """Make a link to a file or folder, which lasts until this process ends; return the path of the link."""
    folder = tempfile.mkdtemp(prefix="kalman-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.symlink(path, f"{folder}/link")
    return f"{folder}/link"
