"""Compile the Java classes of the project (`jobs/spark/java`) into a jar, with Spark's own compiler.

Spark compiles its plans with Janino, which needs only a Java runtime. Janino's output depends only on the sources, so
the SHA-256 of the jar is known in advance, like that of every other jar. The name of the jar has a digest of the
sources.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from jobs.core.errors import RUN_FAILED, UserError
from jobs.spark.doctor import find_java

GROUP = "kalman"
"""The Maven group of the jars that are compiled here instead of being downloaded."""
SOURCES = Path(__file__).with_name("java")
_COMPILER = ("janino-", "commons-compiler-")
_MAIN = "org.codehaus.commons.compiler.samples.CompilerDemo"
_SECONDS = 300
_LONG_AGO = (1980, 1, 1, 0, 0, 0)


def compute_source_digest() -> str:
    """Return a short digest of the sources, which serves as their version."""
    digest = hashlib.sha256()
    for file in sorted(SOURCES.rglob("*.java")):
        digest.update(f"{file.relative_to(SOURCES).as_posix()}\n".encode())
        digest.update(file.read_bytes().replace(b"\r\n", b"\n"))
    return f"0.{int.from_bytes(digest.digest()[:4], 'big')}"


def compile_jar(jar: Path, class_path: Sequence[Path]) -> None:
    """Compile the sources into a jar.

    Args:
        jar: path of the jar to write.
        class_path: jars with the compiler, and with the classes that the sources use.

    Raises:
        UserError: the compiler is not among the jars, or cannot compile the sources.
    """
    compiler = [path for path in class_path if path.name.startswith(_COMPILER)]
    if len(compiler) < len(_COMPILER):
        raise UserError(
            "this PySpark contains no Janino, which compiles our classes: reinstall pyspark", RUN_FAILED
        )
    with tempfile.TemporaryDirectory(prefix="kalman-") as folder:
        command = [
            find_java(),
            "-cp",
            _join_paths(compiler),
            _MAIN,
            "-rebuild",
            "-g:none",
            "-encoding",
            "UTF-8",
        ]
        command += ["-d", folder, "-classpath", _join_paths(class_path)]
        command += [str(file) for file in sorted(SOURCES.rglob("*.java"))]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS
            )
        except subprocess.TimeoutExpired as error:
            raise UserError("our classes for Spark could not be compiled: timed out", RUN_FAILED) from error
        classes = sorted(Path(folder).rglob("*.class"))
        if done.returncode or not classes:
            said = (done.stdout + done.stderr).strip()[:400] or "the compiler said nothing"
            raise UserError(f"our classes for Spark could not be compiled: {said}", RUN_FAILED)
        # Times and compression differ between releases; without them, the jar is the same everywhere.
        with zipfile.ZipFile(jar, "w", zipfile.ZIP_STORED) as packed:
            for file in classes:
                entry = zipfile.ZipInfo(file.relative_to(folder).as_posix(), _LONG_AGO)
                packed.writestr(entry, file.read_bytes())


def _join_paths(paths: Sequence[Path]) -> str:
    return os.pathsep.join(map(str, paths))
