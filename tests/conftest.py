"""Fixtures that tests of every part share: one Spark session, a warehouse, the models, the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from demo.broker import Broker
    from tests.jobs.support.feeds import Feed

ROOT = Path(__file__).resolve().parent.parent
# Every JVM that a test starts, also in a process of its own. Tests move a few hundred rows: compiling plans to Java,
# and Java with the optimising compiler, costs far more than it saves. Without that compiler Java takes 48 MB for
# compiled code, which a session of some minutes fills: from then on it would interpret everything.
os.environ["SPARK_SUBMIT_OPTS"] = (
    "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC -Dspark.ui.enabled=false "
    "-Dspark.sql.codegen.wholeStage=false -Dspark.sql.codegen.factoryMode=NO_CODEGEN"
)
# The session that most tests share lives for a quarter of an hour: what Spark keeps of that fills its usual 1 GB.
os.environ["SPARK_DRIVER_MEMORY"] = "2g"
# Spark's processes of Python import nothing from the current folder, and find these tests and their functions here.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
os.environ["KALMAN_KAFKA_JARS"] = "1"  # one session serves the tests of this process, those of Kafka too
os.environ["KALMAN_FUNCTIONS"] = ". kalman_* tests"  # functions of tests, beside those of the models' folders
MASTER = "local[2,4]"  # two slots, and a task may fail three times before its job does


class Finished(NamedTuple):
    """What a command left: its exit code and what it printed."""

    code: int
    stdout: str
    stderr: str


RunCli = Callable[..., Finished]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the simulation of the protocol has looked at."""
    reports = [
        one for some in terminalreporter.stats.values() for one in some if hasattr(one, "user_properties")
    ]
    lines = {str(text) for one in reports for name, text in one.user_properties if name == "protocol"}
    if lines:
        terminalreporter.section("simulation of the protocol")
        for line in sorted(lines):
            terminalreporter.line(line)


@pytest.fixture(scope="session")
def models_dir() -> Path:
    """The specs that the repository ships."""
    return ROOT / "models"


@pytest.fixture(autouse=True)
def no_driver_is_left() -> Iterator[None]:
    """Kill the drivers that a test has started and, as it failed, not ended."""
    yield
    started = sys.modules.get("tests.jobs.support.processes")
    if started is not None:
        started.Driver.end_all()


@pytest.fixture
def warehouse(tmp_path: Path) -> Path:
    """An empty warehouse of this test's own."""
    return tmp_path / "warehouse"


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The one session of the run; it starts when the first test asks for it."""
    from jobs.core.settings import Settings
    from jobs.spark.session import spark_session

    folder = tmp_path_factory.mktemp("spark")
    settings = Settings.load(warehouse=str(folder / "warehouse"), models=ROOT / "models", master=MASTER)
    session = spark_session(
        settings,
        "tests",
        {
            "spark.sql.shuffle.partitions": "2",
            "spark.ui.enabled": "false",
            "spark.sql.warehouse.dir": str(folder / "spark-warehouse"),
        },
    )
    yield session
    session.stop()


@pytest.fixture
def tasks_of_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Spark's tasks do the work for few rows, too, which a command would otherwise do without Spark."""
    from jobs.batch import file_rows, forecast_run

    monkeypatch.setattr(file_rows, "FEW_ROWS", 0)
    monkeypatch.setattr(forecast_run, "FEW_KEYS", 0)


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A real Kafka broker, to which KALMAN_KAFKA points; a test that kills it starts it again."""
    from demo.broker import Broker

    with Broker(tmp_path_factory.mktemp("kafka") / "broker") as broker:
        os.environ["KALMAN_KAFKA"] = broker.address
        yield broker
        del os.environ["KALMAN_KAFKA"]


@pytest.fixture
def feed(broker: Broker, spark: SparkSession) -> Feed:
    """What makes, fills and reads the broker's topics."""
    from tests.jobs.support.feeds import Feed

    return Feed(spark)


@pytest.fixture
def run_cli(warehouse: Path, tmp_path: Path) -> RunCli:
    """Run `kalman-pipeline ARGUMENTS` as a process of its own on this test's warehouse.

    `env` adds variables (None removes one); the working directory is the test's own folder, so that nothing
    is found by accident.
    """

    def run(
        *arguments: str | Path, env: Mapping[str, str | None] | None = None, timeout: float = 300
    ) -> Finished:
        done = subprocess.run(
            [sys.executable, "-m", "jobs.cli", *map(str, arguments)],
            cwd=tmp_path,
            env=cli_environment(warehouse, env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    return run


def cli_environment(warehouse: Path | str, more: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """Return the environment in which a test starts a command of ours."""
    changes = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "KALMAN_WAREHOUSE": str(warehouse),
        "KALMAN_MODELS": str(ROOT / "models"),
        "KALMAN_MASTER": MASTER,
        "COLUMNS": "200",  # tables and messages are not wrapped
        "NO_COLOR": "1",
        "KALMAN_KAFKA_JARS": None,
        **(more or {}),
    }
    merged = {**os.environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}
