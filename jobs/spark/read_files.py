"""The files that Spark has listed for a frame, without a second listing."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from py4j.protocol import Py4JError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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
