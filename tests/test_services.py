"""docker-compose.yml as processes: Airflow on PostgreSQL, a Spark cluster, Kafka; one run through all."""

from __future__ import annotations

import importlib.util
import json
import re
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from demo.broker import Broker
from tests.dags.delta_rows import delta_rows
from tests.services import PATIENCE, Services, postgres_programs

pytestmark = [
    pytest.mark.soak,
    pytest.mark.airflow,
    pytest.mark.spark,
    pytest.mark.skipif(postgres_programs() is None, reason="PostgreSQL's server is not installed"),
    pytest.mark.skipif(
        importlib.util.find_spec("psycopg2") is None or importlib.util.find_spec("asyncpg") is None,
        reason="needs the extra: pip install -c requirements/lock.txt -e '.[postgres]'",
    ),
]

SENSORS = [f"s{number}" for number in range(5)]


class Api:
    """Airflow's API, for a person who has logged in."""

    def __init__(self, services: Services) -> None:
        self.address = services.address
        passwords = re.findall(r"Password for user 'admin': (\S+)", services.log("api-server"))
        self.headers = {"Content-Type": "application/json"}
        token = self.call("/auth/token", {"username": "admin", "password": passwords[-1]})["access_token"]
        self.headers["Authorization"] = f"Bearer {token}"

    def call(self, path: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.address + path, data, self.headers, method=method or ("GET" if body is None else "POST")
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read() or b"null")

    def run(self, dag_id: str, conf: dict[str, Any] | None = None) -> None:
        """Run a DAG to its end."""
        self.call(f"/api/v2/dags/{dag_id}?update_mask=is_paused", {"is_paused": False}, "PATCH")
        run = self.call(f"/api/v2/dags/{dag_id}/dagRuns", {"logical_date": None, "conf": conf or {}})
        path = f"/api/v2/dags/{dag_id}/dagRuns/{run['dag_run_id']}"
        deadline = time.monotonic() + PATIENCE
        while (state := self.call(path)["state"]) not in ("success", "failed"):
            assert time.monotonic() < deadline, f"{dag_id} is {state}"
            time.sleep(1)
        assert state == "success", self.logs(path)

    def logs(self, path: str) -> str:
        """Return what the tasks of a run said."""
        tasks = self.call(f"{path}/taskInstances")["task_instances"]
        said = [self.call(f"{path}/taskInstances/{one['task_id']}/logs/{one['try_number']}") for one in tasks]
        return json.dumps(said, indent=1)[-8000:]


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
            api = Api(services)
            errors = api.call("/api/v2/importErrors")["import_errors"]
            assert errors == []
            write_day(landing / "one.csv", 1)
            api.run("kalman_ingest__tiny", {"input": str(landing / "one.csv")})
            api.run("kalman_pretrain__tiny", {"as_of": "2024-01-02T00:00:00+00:00"})
            count = write_day(landing / "two.csv", 2)
            api.run("kalman_ingest__tiny", {"input": str(landing / "two.csv")})
            api.run("kalman_stream__tiny", {"trigger": "available-now"})
            estimates = delta_rows(services.warehouse / "estimates" / "tiny")
            assert len(estimates) == count
            assert {row["key"] for row in estimates} == set(SENSORS)
            # The jobs ran on the cluster, not in their drivers.
            applications = [path for path in (services.folder / "spark").glob("app-*")]
            assert len(applications) >= 4
        finally:
            services.stop()
