"""The image's entrypoint: what it makes of what Spark says to a container. Spark and Java are scripts here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ENTRYPOINT = Path(__file__).resolve().parent.parent / "scripts" / "entrypoint"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Spark's and Java's folder, whose programs say how they were called."""
    (tmp_path / "bin").mkdir()
    for name in ("spark-submit", "java"):
        program = tmp_path / "bin" / name
        program.write_text('#!/bin/sh\nprintf "%s\\n" "${0##*/}" "$@"\n')
        program.chmod(0o755)
    return tmp_path


def said(home: Path, *words: str, **environment: str) -> list[str]:
    """Run it and return the words of the program that it became."""
    given = {"PATH": "/usr/bin:/bin", "SPARK_HOME": str(home), "JAVA_HOME": str(home), **environment}
    done = subprocess.run([ENTRYPOINT, *words], env=given, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_a_driver(home: Path) -> None:
    words = said(home, "driver", "--class", "A", "local:///a b.py", SPARK_DRIVER_BIND_ADDRESS="10.0.0.1")
    assert words[:3] == ["spark-submit", "--deploy-mode", "client"]
    assert "spark.driver.bindAddress=10.0.0.1" in words
    assert words[-3:] == ["--class", "A", "local:///a b.py"]


def test_an_executor(home: Path) -> None:
    options = {f"SPARK_JAVA_OPT_{number}": f"-Da{number}=x y={number}" for number in range(12)}
    given = {
        "SPARK_CONF_DIR": "/conf",
        "SPARK_CLASSPATH": "/more.jar",
        "SPARK_EXECUTOR_MEMORY": "1g",
        "SPARK_DRIVER_URL": "spark://driver:7078",
        "SPARK_EXECUTOR_ID": "1",
        "SPARK_EXECUTOR_CORES": "2",
        "SPARK_APPLICATION_ID": "app",
        "SPARK_EXECUTOR_POD_IP": "10.0.0.2",
        "SPARK_RESOURCE_PROFILE_ID": "0",
        "SPARK_EXECUTOR_POD_NAME": "exec-1",
    }
    words = said(home, "executor", **given, **options)
    assert words[:13] == ["java", *options.values()]
    assert words[13:15] == ["-Xms1g", "-Xmx1g"]
    assert words[words.index("-cp") + 1] == f"/conf:{home}/jars/*:/more.jar"
    assert words[words.index("--driver-url") + 1] == "spark://driver:7078"
    assert words[words.index("--hostname") + 1] == "10.0.0.2"


def test_any_other_command_is_run_as_it_is(home: Path) -> None:
    assert said(home, "printf", "%s\\n", "a b", "c") == ["a b", "c"]


def test_spark_s_secret_goes_into_a_file_that_nobody_else_can_read(home: Path, tmp_path: Path) -> None:
    own = tmp_path / "conf"
    own.mkdir()
    (own / "spark-defaults.conf").write_text("spark.executor.memory 3g")
    show = 'ls -l "$SPARK_CONF_DIR" | cut -c1-10; cat "$SPARK_CONF_DIR"/spark-defaults.conf; env'
    given = {"KALMAN_SPARK_SECRET": "s3cret", "SPARK_CONF_DIR": str(own), "SPARK_LOCAL_HOSTNAME": "scheduler"}
    words = said(home, "sh", "-c", show, **given)
    assert "-rw-------" in words
    wanted = {
        "spark.authenticate true",
        "spark.authenticate.secret s3cret",
        "spark.master.rest.enabled false",
    }
    assert {"spark.executor.memory 3g", "spark.driver.bindAddress 0.0.0.0", *wanted} <= set(words)
    assert [line for line in words if "s3cret" in line] == ["spark.authenticate.secret s3cret"]
