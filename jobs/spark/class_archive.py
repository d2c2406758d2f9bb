"""Where the archive of Java's classes is, and the Spark settings that use it."""

from __future__ import annotations

import os
from pathlib import Path

from jobs.spark.jars import jar_folder

ARCHIVE = "classes.jsa"

QUIET = "-Xlog:disable -Xlog:all=error:stderr"
"""Java would say on standard output, where JSON goes, that an archive does not fit."""


def archive_path() -> Path:
    """Return where the archive is, if there is one: beside the jars, with which it goes."""
    return jar_folder() / ARCHIVE


def archive_conf(java_options: str) -> dict[str, str]:
    """Return the Spark settings that use the archive, `java_options` among them; just these without an archive.

    Only classes of Java's own class path can be archived, so our jars are on it, before Spark adds them by itself.
    """
    if not archive_path().is_file() or os.environ.get("KALMAN_CLASS_ARCHIVE") == "0":
        return {"spark.driver.extraJavaOptions": java_options}
    return {
        "spark.driver.extraJavaOptions": f"{java_options} {QUIET} -XX:SharedArchiveFile={archive_path()}",
        "spark.driver.extraClassPath": class_path(),
    }


def class_path() -> str:
    return os.pathsep.join(str(path) for path in sorted(jar_folder().glob("*.jar")))
