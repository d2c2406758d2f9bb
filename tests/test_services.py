"""docker-compose.yml as processes: Airflow on PostgreSQL, a Spark cluster, Kafka; one run through all."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from demo.broker import Broker
from demo.delta_log import rows_of
from scripts.private_postgres import find_programs
from tests.support.airflow_api import Api
from tests.support.services import Services

pytestmark = [
    pytest.mark.soak,
    pytest.mark.airflow,
    pytest.mark.spark,
    pytest.mark.skipif(find_programs() is None, reason="PostgreSQL's server is not installed"),
    pytest.mark.skipif(
        importlib.util.find_spec("psycopg2") is None or importlib.util.find_spec("asyncpg") is None,
        reason="needs the extra: pip install -c requirements/lock.txt -e '.[postgres]'",
    ),
]

SENSORS = [f"s{number}" for number in range(5)]


def logged_in(services: Services) -> Api:
    return Api(services.address, lambda: services.password)


SPEC = """
name: tiny
version: 1
key: [sensor]
time: at
measurement: [value]
states: [level]
process: {kind: random_walk, variance: 0.01}
observation: {H: [[1.0]], R: [[1.0]]}
initial: {mean: [0.0], covariance: [[100.0]]}
"""


def write_day(file: Path, day: int) -> int:
    rows = [
        f"{sensor},2024-01-{day:02d}T{hour:02d}:00:00Z,{day + hour / 24}"
        for sensor in SENSORS
        for hour in range(24)
    ]
    file.write_text("\n".join(["sensor,at,value", *rows]) + "\n")
    return len(rows)


def test_the_pipeline_runs_through_the_services(tmp_path: Path) -> None:
    models, landing = tmp_path / "models", tmp_path / "landing"
    for folder in (models, landing):
        folder.mkdir()
    (models / "tiny.yaml").write_text(SPEC)
    with Broker(tmp_path / "kafka") as broker:
        services = Services(tmp_path / "services", models, broker.address)
        try:
            services.start()
            api = logged_in(services)
            errors = api.call("/importErrors")["import_errors"]
            assert errors == []
            write_day(landing / "one.csv", 1)
            api.run("kalman_ingest__tiny", {"input": str(landing / "one.csv")})
            api.run("kalman_pretrain__tiny", {"as_of": "2024-01-02T00:00:00+00:00"})
            count = write_day(landing / "two.csv", 2)
            api.run("kalman_ingest__tiny", {"input": str(landing / "two.csv")})
            api.run("kalman_stream__tiny", {"trigger": "available-now"})
            estimates = rows_of(services.warehouse / "estimates" / "tiny")
            assert len(estimates) == count
            assert {row["key"] for row in estimates} == set(SENSORS)
            # The stream ran on the cluster, not in its driver; the others' rows are too few to start Spark for.
            assert list((services.folder / "spark").glob("app-*"))
        finally:
            services.stop()
