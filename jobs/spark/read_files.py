"""Convert paths for Spark's file readers."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from functools import cache
from typing import TYPE_CHECKING

from jobs.core.roots import find_local_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ENCODED = re.compile(r"[^\w!$&'()+,./:;=@~-]")
"""Characters that Spark misreads in a path: Java encodes them in a URI, or they are glob characters."""


def convert_path(spark: SparkSession, path: str) -> str:
    """Return a path with which Spark's file readers find a file or folder, whatever its name.

    Spark reads a name with one of `*?[]{}` as a glob, which may match other files, and its state reader encodes a path
    twice. If all processes run on this machine, they get a link; otherwise a backslash escapes glob characters.
    """
    if not ENCODED.search(path):
        return path
    local = find_local_path(path)
    if local is not None and str(spark.sparkContext.master).startswith("local"):
        return _make_link(str(local))
    return re.sub(r"([*?\[\]{}\\])", r"\\\1", path)


@cache
def _make_link(path: str) -> str:
    """Make a link to a file or folder that lasts until this process ends, and return its path."""
    folder = tempfile.mkdtemp(prefix="kalman-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.symlink(path, f"{folder}/link")
    return f"{folder}/link"
