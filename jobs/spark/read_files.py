"""Paths as Spark's readers of files take them, and the files that Spark has listed for a frame."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from py4j.protocol import Py4JError

from jobs.core.roots import local_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ENCODED = re.compile(r"[^\w!$&'()+,./:;=@~-]")
"""Characters that Spark does not take as they are: Java encodes them in a URI, or they belong to patterns of names."""

_STATUS = re.compile(
    r"^\w+\{path=(.*); isDirectory=false; length=(\d+); .*?\bmodification_time=(\d+); .*\}.*$", re.MULTILINE
)
"""Hadoop's text of a file's status. A text of all files is one call to Java; three calls a file would be slow."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class ReadFile(NamedTuple):
    """A file as it was listed: Hadoop's path, bytes, and the time of its last change, as Spark casts it to a text."""

    path: str
    length: int
    modified: str


def path_for_spark(spark: SparkSession, path: str) -> str:
    """Return a path with which Spark's readers of files find a file or folder, whatever its name.

    Spark takes a name with one of `*?[]{}` for a pattern, which other files may meet, and its reader of states encodes
    a path twice. In processes of this machine they get a link; elsewhere a backslash keeps a pattern from being one.
    """
    if not ENCODED.search(path):
        return path
    local = local_path(path)
    if local is not None and str(spark.sparkContext.master).startswith("local"):
        return _link_to(str(local))
    return re.sub(r"([*?\[\]{}\\])", r"\\\1", path)


@cache
def _link_to(path: str) -> str:
    """Make a link to a file or folder that is there until this process ends, and return its path."""
    folder = tempfile.mkdtemp(prefix="kalman-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.symlink(path, f"{folder}/link")
    return f"{folder}/link"


def files_of(frame: DataFrame) -> list[ReadFile] | None:
    """Return the files of a frame that reads a folder of files and does nothing else; None if Spark does not tell."""
    java: Any = frame._jdf
    try:
        files = java.queryExecution().analyzed().relation().location().allFiles()
        count, text = files.size(), files.mkString("\n")
    except Py4JError:
        return None
    found = [
        ReadFile(path, int(length), _written(int(millis))) for path, length, millis in _STATUS.findall(text)
    ]
    # A path with a line break is not understood.
    return found if len(found) == count and text.count("\n") == max(0, count - 1) else None


def _written(millis: int) -> str:
    """Return a time in milliseconds as Spark casts it to a text in UTC."""
    at = _EPOCH + timedelta(milliseconds=millis)
    text = f"{at:%Y-%m-%d %H:%M:%S}.{at.microsecond:06d}"
    return text.rstrip("0").rstrip(".")
