"""Write an archive of the classes that the jobs load, which Java maps into memory: commands start in half the time.

Spark loads some 20,000 classes for a job, and reading and verifying them takes most of a short command. Set-up runs a
tiny model through ingest, pretrain, stream and status once, and Java writes the loaded classes into the archive
("application class-data sharing", JEP 350). The archive only saves time: Java ignores an archive of another version or
class path, and commands work without it. KALMAN_CLASS_ARCHIVE=0 disables it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jobs.core.errors import RUN_FAILED, UserError, extract_first_line, show
from jobs.core.settings import Settings

_SECONDS = 600.0

_MODEL = """
name: warm_up
version: 1
key: [key]
time: at
measurement: [y]
states: [level]
process: {kind: random_walk, variance: 1.0}
observation: {R: [[1.0]]}
initial: {diffuse: true}
learn: {parameters: [variance, R]}
"""
_HEADER = "key,at,y"
_ROWS = [f"{'ab'[n % 2]},2020-01-01T00:00:{n:02d},{(n * 7) % 5 - 2}" for n in range(40)]
_BAD_ROW = "a,2020-01-01T00:00:50,none of it"


def record() -> bool:
    """Write the archive and return True; return False if it exists. It appears complete or not at all.

    Raises:
        UserError: Spark's jars are missing, or the run that loads the classes failed.
    """
    from jobs.spark.conf import ARCHIVE, find_archive, is_archive_trusted
    from jobs.spark.jars import list_jars

    list_jars()
    target = find_archive()
    if is_archive_trusted():
        return False
    with tempfile.TemporaryDirectory(prefix="kalman-warm-up-") as scratch:
        command = [sys.executable, "-m", "jobs.warm_up", "run", scratch]
        # Java writes no archive if the class path contains a folder with files, such as Spark's folder of settings.
        environment = {name: value for name, value in os.environ.items() if name != "SPARK_CONF_DIR"}
        done = subprocess.run(
            command,
            env={**environment, "KALMAN_CLASS_ARCHIVE": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        written = Path(scratch, ARCHIVE)
        if done.returncode != 0 or not written.is_file():
            reason = (done.stderr.strip() or done.stdout.strip() or "Java wrote none").splitlines()[-1]
            raise UserError(f"the archive of classes could not be written: {reason}", RUN_FAILED)
        partial = target.with_name(f".{ARCHIVE}-{os.getpid()}")
        try:
            partial.write_bytes(written.read_bytes())
            partial.chmod(0o644)
            partial.rename(target)
        finally:
            partial.unlink(missing_ok=True)
    if not is_archive_trusted():
        raise UserError(f"others may write into {target.parent}: `chmod go-w {target.parent}`", RUN_FAILED)
    return True


def _run(scratch: Path) -> None:
    """Run a tiny model through the verbs in this process, and end Java, which then writes the archive."""
    from pyspark import SparkContext

    from jobs import ingest, pretrain, status, stream
    from jobs.spark.conf import ARCHIVE, QUIET, build_spark_conf
    from jobs.spark.jars import list_jars
    from jobs.spark.session import spark_session

    models = scratch / "models"
    models.mkdir()
    (models / "warm_up.yaml").write_text(_MODEL, encoding="utf-8")
    for name, rows in (("first", _ROWS[:20]), ("second", [*_ROWS[20:], _BAD_ROW])):
        (scratch / f"{name}.csv").write_text("\n".join([_HEADER, *rows, ""]), encoding="utf-8")
    settings = Settings.load(str(scratch / "warehouse"), models, "local[2]", quiet=True)
    options = [build_spark_conf()["spark.driver.extraJavaOptions"], QUIET]
    options += ["-XX:TieredStopAtLevel=1", f"-XX:ArchiveClassesAtExit={scratch / ARCHIVE}"]
    recording = {
        "spark.driver.extraJavaOptions": " ".join(options),
        "spark.driver.extraClassPath": os.pathsep.join(list_jars()),
        "spark.sql.shuffle.partitions": "2",
    }
    spark = spark_session(settings, "warm-up", recording)
    ingest.run(settings, "warm_up", [str(scratch / "first.csv")])
    pretrain.run(settings, "warm_up")
    ingest.run(settings, "warm_up", [str(scratch / "second.csv")])
    stream.run(settings, ["warm_up"])
    status.run(settings)
    gateway: Any = SparkContext._gateway
    spark.stop()
    java: Any = gateway.proc
    gateway.shutdown()
    java.stdin.close()
    java.wait(_SECONDS)


def main(arguments: list[str]) -> int:
    """Write the archive if it does not exist. If it cannot be written, print the reason and return 0 all the same."""
    from jobs.spark.conf import find_archive

    if arguments[:1] == ["run"]:
        try:
            _run(Path(arguments[1]))
        except Exception as error:
            return show(error)
        return 0
    began = time.monotonic()
    try:
        print("Archive of Java's classes, so that commands start in half the time", flush=True)
        written = record()
        size = find_archive().stat().st_size / 1e6
        how = f"written in {time.monotonic() - began:.0f} s" if written else "there"
        print(f"Archive of Java's classes: {find_archive()} ({size:.0f} MB), {how}")
    except Exception as error:
        print(f"Archive of Java's classes: none, so commands start more slowly ({extract_first_line(error)})")
    except KeyboardInterrupt as error:
        return show(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
