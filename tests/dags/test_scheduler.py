"""Airflow as `make airflow` starts it, with its scheduler: a backfill of three days, and a cleared run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from demo.delta_log import rows_of
from tests.dags.conftest import FIRST_DAY, ROWS_A_DAY, VERBS, Tiny
from tests.support.airflow_api import wait_for
from tests.support.standalone import Airflow, standalone

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.slow]

PRETRAIN = "/dags/kalman_pretrain__tiny"


@pytest.fixture(scope="module")
def tiny(landed: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The measurements of the first days in a warehouse of this module's own."""
    warehouse = tmp_path_factory.mktemp("scheduler") / "warehouse"
    shutil.copytree(landed.first_days, warehouse)
    return landed._replace(warehouse=warehouse)


@pytest.fixture(scope="module")
def airflow(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    """Airflow, started by the script and stopped by SIGTERM."""
    with standalone(tmp_path_factory.mktemp("airflow"), tiny.environment()) as running:
        yield running


def runs(airflow: Airflow) -> list[dict[str, Any]]:
    """Return the backfill's runs."""
    return airflow.call(f"{PRETRAIN}/dagRuns?order_by=logical_date&run_type=backfill")["dag_runs"]


def all_succeeded(airflow: Airflow, count: int) -> bool:
    """Tell if so many runs have succeeded; none may have failed."""
    states = [run["state"] for run in runs(airflow)]
    assert "failed" not in states, states
    return states == ["success"] * count


def test_the_script_says_where_and_how_to_log_in(airflow: Airflow) -> None:
    assert airflow.address in airflow.said()
    assert f"admin / {airflow.password()}" in airflow.said()
    names = {dag["dag_id"] for dag in airflow.call("/dags")["dags"]}
    assert names == {f"kalman_{verb}__tiny" for verb in VERBS}
    assert airflow.call("/importErrors")["import_errors"] == []


def test_the_script_makes_the_pools(airflow: Airflow) -> None:
    assert airflow.call("/pools/kalman_stream__tiny")["slots"] == 1


def test_backfill_and_clear(airflow: Airflow, tiny: Tiny) -> None:
    first, last = FIRST_DAY, FIRST_DAY + timedelta(days=2)
    airflow.command(
        *("backfill", "create", "--dag-id", "kalman_pretrain__tiny", "--max-active-runs", "1"),
        *("--from-date", first.date().isoformat(), "--to-date", last.date().isoformat()),
    )
    # Runs of a paused DAG wait. Switched on, it also runs its newest interval, as by schedule.
    airflow.switch("kalman_pretrain__tiny")
    wait_for(lambda: all_succeeded(airflow, 3), 900, "the backfill")

    manifests = sorted(rows_of(tiny.warehouse / "manifests"), key=lambda row: row["rows"])
    assert len({row["snapshot_id"] for row in manifests}) == 3
    assert [row["rows"] for row in manifests] == [ROWS_A_DAY * day for day in (1, 2, 3)]
    # Each is cut at the end of its day. What was landed first ends with day three: there is a position.
    cuts = [row["cut"] and row["cut"].isoformat()[:19] for row in manifests]
    assert cuts == ["2013-01-02T00:00:00", "2013-01-03T00:00:00", None]
    versions = [json.loads(row["position"])["version"] for row in manifests]

    cleared = runs(airflow)[0]["dag_run_id"]
    body = {"dry_run": False, "dag_run_id": cleared, "only_failed": False, "reset_dag_runs": True}
    airflow.call(f"{PRETRAIN}/clearTaskInstances", body)
    task = f"{PRETRAIN}/dagRuns/{cleared}/taskInstances/pretrain"

    def ran_again() -> bool:
        found = airflow.call(task)
        assert found["state"] not in ("failed", "up_for_retry"), found
        return found["state"] == "success" and found["try_number"] == 2

    wait_for(ran_again, 600, "the cleared run")
    log = json.dumps(airflow.call(f"{task}/logs/2"))
    assert "Spark-Submit cmd" in log and f"snapshot {manifests[0]['snapshot_id']}" in log
    # It ran, and found the same snapshot: nothing is there twice.
    again = sorted(rows_of(tiny.warehouse / "manifests"), key=lambda row: row["rows"])
    assert again == manifests
    assert versions == sorted(versions)


def test_a_pool_that_is_missing_is_named(airflow: Airflow) -> None:
    airflow.call("/pools/kalman_stream__tiny", method="DELETE")
    airflow.switch("kalman_stream__tiny")
    found = wait_for(
        lambda: airflow.call("/dags/kalman_stream__tiny/dagRuns")["dag_runs"], 60, "a run of the stream"
    )
    task = f"/dags/kalman_stream__tiny/dagRuns/{found[0]['dag_run_id']}/taskInstances/stream"
    wait_for(lambda: airflow.call(task)["state"] == "scheduled", 60, "the task")
    reasons = [one["reason"] for one in airflow.call(f"{task}/dependencies")["dependencies"]]
    assert "Tasks using non-existent pool 'kalman_stream__tiny' will not be scheduled" in reasons


def test_stopping_ends_everything_also_a_running_task(airflow: Airflow) -> None:
    airflow.switch("kalman_pretrain__tiny")
    body = {"logical_date": (FIRST_DAY + timedelta(days=9)).isoformat()}
    run = airflow.call(f"{PRETRAIN}/dagRuns", body)["dag_run_id"]
    task = f"{PRETRAIN}/dagRuns/{run}/taskInstances/pretrain"
    wait_for(lambda: airflow.call(task)["state"] == "running", 120, "the task")
    wait_for(
        lambda: any("pretrain.py" in command for command in airflow.processes().values()), 120, "its driver"
    )
    airflow.script.terminate()
    wait_for(lambda: "stopping Airflow" in airflow.said(), 60, "the beginning of the end")
    airflow.script.terminate()  # a person who is in a hurry
    assert airflow.script.wait(60) == 0
    wait_for(lambda: not airflow.processes(), 20, f"the end of {airflow.processes()}")
