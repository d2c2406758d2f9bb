"""The DAGs of 200 models in one Airflow, for an hour: what is scheduled runs, pages answer, memory stays."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from demo.delta_log import rows_of
from scripts.private_postgres import find_programs
from tests.dags.conftest import MODELS, VERBS
from tests.support.folders import open_to_others
from tests.support.standalone import Airflow, standalone

pytestmark = [
    pytest.mark.airflow,
    pytest.mark.soak,
    pytest.mark.skipif(
        find_programs() is None or not (find_spec("psycopg2") and find_spec("asyncpg")),
        reason="needs PostgreSQL and the extra `postgres`",
    ),
]

SECONDS = float(os.environ.get("KALMAN_MANY_SECONDS", "3600"))
COUNT = 200
SCHEDULED = 60
"""Models whose file is landed every twenty minutes, each third of them on another minute."""
EVERY = 20
NAMES = [f"m{number:03d}" for number in range(COUNT)]
ROWS = 24
PAGE_SECONDS = 10.0
"""The most that a page may take while two tasks have all processors."""


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    home = tmp_path_factory.mktemp("many")
    open_to_others(home)
    for folder in ("models", "landing"):
        (home / folder).mkdir()
    text = (MODELS / "tiny.yaml").read_text().partition("airflow:")[0]
    for number, name in enumerate(NAMES):
        spec = text.replace("name: tiny", f"name: {name}")
        if number < SCHEDULED:
            minutes = ",".join(str(minute) for minute in range(number % EVERY, 60, EVERY))
            path = home / "landing" / f"{name}.csv"
            rows = [f"s{row % 3},2024-01-01T{row:02d}:00:00Z,{row}" for row in range(ROWS)]
            path.write_text("\n".join(["sensor,at,value", *rows, ""]))
            spec += f'airflow:\n  ingest: {{schedule: "{minutes} * * * *", path: "{path}"}}\n'
            spec += "  pretrain: {schedule: on-landing}\n"
        (home / "models" / f"{name}.yaml").write_text(spec)
    settings = {
        "KALMAN_AIRFLOW_DATABASE": "postgres",
        "KALMAN_MODELS": str(home / "models"),
        "KALMAN_WAREHOUSE": str(home / "warehouse"),
        "AIRFLOW__CORE__PARALLELISM": "2",
    }
    with standalone(home, settings) as airflow:
        yield airflow


def measure_memory(airflow: Airflow) -> dict[str, float]:
    """Return the megabytes of each part's processes, shared pages counted once a process."""
    found = {}
    for part in psutil.Process(airflow.script.pid).children():
        try:
            family = [part, *part.children(recursive=True)]
            name = next((word for word in part.cmdline()[2:4] if word != "airflow"), part.name())
            found[name] = sum(one.memory_info().rss for one in family) / 1e6
        except psutil.Error:
            continue
    return found


def count_runs(airflow: Airflow) -> dict[str, int]:
    """Return the number of runs of all DAGs by their state."""
    counts = {}
    for state in ("success", "failed", "running", "queued"):
        counts[state] = airflow.call(f"/dags/~/dagRuns?limit=1&state={state}")["total_entries"]
    return counts


def test_an_hour_of_200_models(airflow: Airflow, tmp_path: Path) -> None:
    assert airflow.call("/importErrors")["import_errors"] == []
    assert airflow.call("/dags?limit=1")["total_entries"] == COUNT * len(VERBS)
    for name in NAMES[:SCHEDULED]:
        for verb in ("ingest", "pretrain"):
            airflow.switch(f"kalman_{verb}__{name}")
    pages = ("/kalman/", "/kalman/models/m000")
    paths = ("/dags?limit=50", "/dags/~/dagRuns?limit=50&order_by=-start_date", "/monitor/health")
    record = []
    began = time.monotonic()
    while time.monotonic() - began < SECONDS:
        seconds = {}
        for path in (*pages, *paths):
            asked = time.monotonic()
            (airflow.page if path in pages else airflow.call)(path)
            seconds[path] = time.monotonic() - asked
        at = time.monotonic() - began
        load = max(1.0, os.getloadavg()[0] / (2 * (os.cpu_count() or 1)))
        record.append(
            {
                "at": at,
                "load": load,
                "seconds": seconds,
                "memory": measure_memory(airflow),
                **count_runs(airflow),
            }
        )
        (tmp_path / "record.json").write_text(json.dumps(record))
        print(json.dumps(record[-1]), flush=True)
        time.sleep(20)
    for name in NAMES[:SCHEDULED]:
        airflow.switch(f"kalman_ingest__{name}", on=False)
    slowest = {path: max(one["seconds"][path] / one["load"] for one in record) for path in (*pages, *paths)}
    assert max(slowest.values()) < PAGE_SECONDS, slowest
    counts = count_runs(airflow)
    assert counts["failed"] == 0, counts
    # Each model's first minute comes within the first EVERY minutes.
    assert counts["success"] >= SCHEDULED * max(0, int(SECONDS / 60 / EVERY) - 1), counts
    assert airflow.call("/importErrors")["import_errors"] == []
    assert "started again" not in airflow.said()
    warehouse = Path(airflow.environment["KALMAN_WAREHOUSE"])
    landed = [name for name in NAMES if (warehouse / "measurements" / name).exists()]
    assert len(landed) == (SCHEDULED if SECONDS > 60 * (EVERY + 5) else len(landed))
    for name in landed:
        assert len(rows_of(warehouse / "measurements" / name)) == ROWS, name
    # Memory after the first quarter, when every part has seen all DAGs, and at the end.
    quarter, end = (record[len(record) * share // 8]["memory"] for share in (2, 7))
    grown = {name: (quarter[name], end[name]) for name in end if name in quarter}
    assert all(after < 1.3 * before + 200 for before, after in grown.values()), grown
