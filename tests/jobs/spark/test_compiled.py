"""Our classes for Spark's JVM: compiled by Spark's own compiler into the jar whose SHA-256 is known."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from jobs.core.errors import UserError
from jobs.spark import jars
from jobs.spark.jars import COORDINATES, find_jar_folder, read_known_digests


def test_the_sources_compile_to_the_jar_that_is_known(tmp_path: Path):
    own = COORDINATES[-1]
    jar = tmp_path / f"{own.artifact}-{own.version}.jar"
    jars.compile_jar(jar, [*jars._list_pyspark_jars(), *find_jar_folder().glob("*.jar")])
    assert read_known_digests().get(jar.name) == hashlib.sha256(jar.read_bytes()).hexdigest(), (
        "put the digest of the jar's new content into jobs/spark/jars.sha256"
    )


def test_sources_that_do_not_compile_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "Wrong.java").write_text("class Wrong { int f() { return x; } }")
    monkeypatch.setattr(jars, "SOURCES", tmp_path)
    with pytest.raises(UserError, match="our classes for Spark could not be compiled: .*Wrong.java"):
        jars.compile_jar(tmp_path / "a.jar", jars._list_pyspark_jars())
    assert not (tmp_path / "a.jar").exists()
    with pytest.raises(UserError, match="contains no Janino"):
        jars.compile_jar(tmp_path / "a.jar", [])
