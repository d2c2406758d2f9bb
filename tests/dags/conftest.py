"""Fixtures of the DAG tests: an Airflow of their own, the bag of DAGs, a tiny data set.

Airflow reads its settings when it is first imported, so they are made here, before any test module is.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from airflow.dag_processing.dagbag import DagBag

ROOT = Path(__file__).resolve().parents[2]
MODELS = Path(__file__).with_name("models")
HOME = Path(tempfile.mkdtemp(prefix="kalman-airflow-"))
atexit.register(shutil.rmtree, HOME, ignore_errors=True)

os.environ.update(
    AIRFLOW_HOME=str(HOME),
    AIRFLOW__CORE__DAGS_FOLDER=str(ROOT / "dags"),
    AIRFLOW__CORE__PLUGINS_FOLDER=str(ROOT / "plugins"),
    AIRFLOW__CORE__LOAD_EXAMPLES="False",
    AIRFLOW__CORE__UNIT_TEST_MODE="False",
    AIRFLOW__DATABASE__SQL_ALCHEMY_CONN=f"sqlite:///{HOME / 'airflow.db'}",
    AIRFLOW__DATABASE__LOAD_DEFAULT_CONNECTIONS="False",
    AIRFLOW_CONN_SPARK_DEFAULT=json.dumps({"conn_type": "spark", "host": "local[2,4]"}),
)

FIRST_DAY = datetime(2013, 1, 1, tzinfo=UTC)
DAYS = 4
SENSORS = 3
ROWS_A_DAY = 12
VERBS = (
    "estimate",
    "export",
    "import",
    "ingest",
    "maintain",
    "pretrain",
    "rollback",
    "stream",
    "upgrade",
    "verify",
)
"""The verbs of the DAGs that every model has."""


@pytest.fixture(scope="session", autouse=True)
def airflow_db() -> None:
    """Give the tests' Airflow its database."""
    subprocess.run([sys.executable, "-m", "airflow", "db", "migrate"], check=True, capture_output=True)


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the DAGs be those of the tests' own models."""
    monkeypatch.setenv("KALMAN_MODELS", str(MODELS))
    return MODELS


@pytest.fixture
def bag(models: Path) -> DagBag:
    """The DAGs of the tests' own models."""
    return load_bag()


def load_bag(**options: object) -> DagBag:
    """Parse the DAG files as they are now, with the environment of now."""
    from airflow.dag_processing.dagbag import DagBag

    return DagBag(ROOT / "dags", **options)  # pyright: ignore[reportArgumentType]


class Tiny(NamedTuple):
    """A small installation: specs, files to land, a warehouse, and a copy of what was first landed in it."""

    models: Path
    landing: Path
    warehouse: Path
    first_days: Path

    def environment(self) -> dict[str, str]:
        """Return the variables that make it the one in use."""
        return {
            "KALMAN_MODELS": str(self.models),
            "KALMAN_WAREHOUSE": str(self.warehouse),
            "KALMAN_SHUFFLE_PARTITIONS": "2",
            # Each run is a JVM of its own that lives for seconds: the full compiler would cost more than it saves.
            "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        }


def write_days(file: Path, days: range, *bad: str) -> None:
    """Write some days' measurements: three sensors, four rows each a day, and rows that are no good."""
    rows = []
    for day in days:
        for part in range(ROWS_A_DAY // SENSORS):
            at = FIRST_DAY + timedelta(days=day, hours=6 * part)
            rows += [f"s{sensor},{at.isoformat()},{day + sensor / 10}" for sensor in range(SENSORS)]
    file.write_text("\n".join(["sensor,at,value", *rows, *bad]) + "\n")


def run_dag(tiny: Tiny, dag_id: str, day: int, conf: dict[str, Any] | None = None) -> dict[str, str]:
    """Run a DAG once for the interval of a day, on local Spark; return the state that each task ended in."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in tiny.environment().items():
            patch.setenv(name, value)
        dag = load_bag().dags[dag_id]
        # By hand a run's interval is the last whole one before its logical date.
        run = dag.test(run_conf=conf, logical_date=FIRST_DAY + timedelta(days=day + 1))
        return {task.task_id: str(task.state) for task in run.get_task_instances()}


def events(uri: str) -> list[tuple[dict[str, Any], str | None]]:
    """Return extra and partition of the events of an asset, oldest first."""
    from airflow.models.asset import AssetEvent, AssetModel
    from airflow.utils.session import create_session
    from sqlalchemy import select

    with create_session() as session:
        query = (
            select(AssetEvent.extra, AssetEvent.partition_key)
            .join(AssetModel, AssetModel.id == AssetEvent.asset_id)
            .where(AssetModel.uri == uri)
            .order_by(AssetEvent.id)
        )
        return [(extra, key) for extra, key in session.execute(query)]


@pytest.fixture(scope="session")
def landed(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """An installation whose first three days the ingest DAG has landed."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny = Tiny(folder / "models", folder / "landing", folder / "warehouse", folder / "first_days")
    for new in (tiny.models, tiny.landing):
        new.mkdir()
    text = (MODELS / "tiny.yaml").read_text()
    (tiny.models / "tiny.yaml").write_text(text.replace("landing/", f"{tiny.landing}/"))
    # One file, so that all but the last of these days end in the middle of a version of the table.
    first = tiny.landing / "first.csv"
    write_days(first, range(DAYS - 1), f"s0,{FIRST_DAY.isoformat()},warm")
    assert run_dag(tiny, "kalman_ingest__tiny", 0, {"input": str(first)}) == {"ingest": "success"}
    shutil.copytree(tiny.warehouse / "measurements", tiny.first_days / "measurements")
    return tiny
