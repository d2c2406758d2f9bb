"""The archive of Java's classes: its path, and the Spark settings that use it."""

from __future__ import annotations

import os
from pathlib import Path

from jobs.spark.jars import jar_folder

ARCHIVE = "classes.jsa"

QUIET = "-Xlog:disable -Xlog:all=error:stderr"
"""Without these options Java reports an archive that does not fit on standard output, where JSON goes."""


def archive_path() -> Path:
    """Return the path of the archive: in the folder of the jars, as it belongs to them."""
    return jar_folder() / ARCHIVE


def archive_conf(java_options: str) -> dict[str, str]:
    """Return the Spark settings with `java_options`, and with the archive if there is one.

    Java archives only classes of its own class path, so the jars are on it before Spark adds them itself.
    """
    if not archive_path().is_file() or os.environ.get("KALMAN_CLASS_ARCHIVE") == "0":
        return {"spark.driver.extraJavaOptions": java_options}
    return {
        "spark.driver.extraJavaOptions": f"{java_options} {QUIET} -XX:SharedArchiveFile={archive_path()}",
        "spark.driver.extraClassPath": class_path(),
    }


def class_path() -> str:
    """Return the jars as a Java class path."""
    return os.pathsep.join(str(path) for path in sorted(jar_folder().glob("*.jar")))
