"""Paused DAGs triggered by the form, twenty one after another and twenty at once, on both databases."""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from typing import Any

import psutil
import pytest

from scripts.private_postgres import find_programs
from tests.dags.conftest import MODELS, VERBS
from tests.support.airflow_api import wait_for
from tests.support.folders import open_to_others
from tests.support.standalone import Airflow, standalone

pytestmark = [pytest.mark.airflow, pytest.mark.slow]

SECONDS = 5.0
"""The most that a request may take on a machine whose load is at most twice its processors."""

NAMES = ("one", "two")
DAGS = [f"kalman_{verb}__{name}" for name in NAMES for verb in VERBS]
no_postgres = find_programs() is None or not (find_spec("psycopg2") and find_spec("asyncpg"))
POSTGRES = pytest.param(
    "postgres", marks=pytest.mark.skipif(no_postgres, reason="needs PostgreSQL and the extra `postgres`")
)


@pytest.fixture(scope="module", params=["sqlite", POSTGRES])
def airflow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    home = tmp_path_factory.mktemp("triggers")
    open_to_others(home)
    (home / "models").mkdir()
    text = (MODELS / "tiny.yaml").read_text().partition("airflow:")[0]
    for name in NAMES:
        (home / "models" / f"{name}.yaml").write_text(text.replace("name: tiny", f"name: {name}"))
    settings = {
        "KALMAN_AIRFLOW_DATABASE": request.param,
        "KALMAN_MODELS": str(home / "models"),
        "KALMAN_WAREHOUSE": str(home / "warehouse"),
        "AIRFLOW__CORE__PARALLELISM": "1",
    }
    with standalone(home, settings) as airflow:
        yield airflow


def limit() -> float:
    """Return the most that a request may take here now; the deadlock took 60 s and more on any machine."""
    return SECONDS * max(1.0, os.getloadavg()[0] / (2 * (os.cpu_count() or 1)))


def measure(airflow: Airflow, path: str, body: dict[str, Any], method: str) -> tuple[float, Any]:
    """Send a request, and return its seconds and answer."""
    began = time.monotonic()
    answer = airflow.call(path, body, method)
    return time.monotonic() - began, answer


def trigger(airflow: Airflow, dags: list[str]) -> list[float]:
    """Trigger paused DAGs at once, as the form does; each run starts. Return the seconds of each request."""
    for dag in dags:
        airflow.switch(dag, on=False)
    with ThreadPoolExecutor(2 * len(dags)) as pool:
        asked = []
        for dag in dags:
            conf = {"input": "none.csv"} if "ingest" in dag else {}
            path = f"/dags/{dag}"
            asked.append(pool.submit(measure, airflow, path, {"is_paused": False}, "PATCH"))
            body = {"logical_date": None, "conf": conf}
            asked.append(pool.submit(measure, airflow, f"{path}/dagRuns", body, "POST"))
        answers = [one.result() for one in asked]
    runs = [
        f"/dags/{dag}/dagRuns/{run['dag_run_id']}" for dag, (_, run) in zip(dags, answers[1::2], strict=True)
    ]
    for run in runs:
        wait_for(partial(lambda run: airflow.call(run)["state"] != "queued", run), 60, f"the start of {run}")
    for run in runs:
        airflow.call(run, {"state": "success"}, "PATCH")
    return [seconds for seconds, _ in answers]


def test_nothing_listens_beyond_this_machine(airflow: Airflow) -> None:
    ports = {}
    for process in psutil.Process(airflow.script.pid).children(recursive=True):
        for one in process.net_connections("inet"):
            if one.status == psutil.CONN_LISTEN:
                ports[one.laddr.port] = one.laddr.ip
    first = int(airflow.environment["KALMAN_AIRFLOW_PORT"])
    assert {first, first + 1} <= set(ports), "the page, and the server of running tasks' logs"
    assert set(ports.values()) == {"127.0.0.1"}, ports
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(f"http://127.0.0.1:{first + 1}/log/unsigned")


def test_dags_without_a_schedule_are_created_unpaused(airflow: Airflow) -> None:
    found = airflow.call("/dags?limit=100")["dags"]
    # The stream waits for snapshots, so it has a schedule.
    assert {one["dag_id"] for one in found if one["is_paused"]} == {
        f"kalman_stream__{name}" for name in NAMES
    }


def test_each_request_answers_and_each_run_starts(airflow: Airflow) -> None:
    each = [second for dag in DAGS for second in trigger(airflow, [dag])]
    assert max(each) < limit(), each
    at_once = trigger(airflow, DAGS)
    assert len(at_once) == 40 and max(at_once) < limit(), at_once
    print(f"slowest of 40 requests: {max(each):.1f} s one after another, {max(at_once):.1f} s at once")
