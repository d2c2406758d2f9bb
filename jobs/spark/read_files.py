"""Paths as Spark's readers of files take them."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from functools import cache
from typing import TYPE_CHECKING

from jobs.core.roots import local_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ENCODED = re.compile(r"[^\w!$&'()+,./:;=@~-]")
"""Characters that Spark does not take as they are: Java encodes them in a URI, or they belong to patterns of names."""


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
