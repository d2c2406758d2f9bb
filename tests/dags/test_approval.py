"""The upgrade DAG through a real scheduler: refused, the live version stays; approved, it is replaced."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from demo.delta_log import rows_of
from tests.dags.conftest import DAYS, ROOT, Tiny, write_days
from tests.dags.test_scheduler import Airflow, airflow, tiny, wait_for  # noqa: F401 - two of them are fixtures

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.soak]

UPGRADE = "/dags/kalman_upgrade__tiny"


def command(tiny: Tiny, *words: str) -> None:  # noqa: F811
    done = subprocess.run(
        [sys.executable, "-m", "jobs.cli", *words, "--model", "tiny"],
        cwd=ROOT,
        env={**os.environ, **tiny.environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def statuses(tiny: Tiny) -> dict[str, str]:  # noqa: F811
    return {row["generation"]: row["status"] for row in rows_of(tiny.warehouse / "generations")}


def upgraded(airflow: Airflow, answer: str, force: bool = False) -> dict[str, str]:  # noqa: F811
    """Run the DAG, answer at its gate, and return the state that each task ended in."""
    body = {"logical_date": None, "conf": {"dry_run": False, "force": force}}
    run = f"{UPGRADE}/dagRuns/{airflow.call(f'{UPGRADE}/dagRuns', body)['dag_run_id']}"

    def tasks() -> dict[str, str]:
        found: list[dict[str, Any]] = airflow.call(f"{run}/taskInstances")["task_instances"]
        return {one["task_id"]: str(one["state"]) for one in found}

    def waits() -> bool:
        states = tasks()
        assert "failed" not in states.values(), states
        return states["approve"] in ("deferred", "awaiting_input")

    wait_for(waits, 400, "the gate")
    before = tasks()
    assert before["shadow"] == "success" and before["promote"] in ("None", "scheduled"), before
    asked = airflow.call(f"{run}/taskInstances/approve/-1/hitlDetails")["body"]
    assert (
        "**Verdict: not good.** Answer: not enough to tell" in asked
        and "there is nothing to compare" in asked
    )
    airflow.call(f"{run}/taskInstances/approve/-1/hitlDetails", {"chosen_options": [answer]}, "PATCH")
    wait_for(lambda: airflow.call(run)["state"] in ("success", "failed"), 400, "the run's end")
    assert airflow.call(run)["state"] == "success"
    return tasks()


def test_refused_then_approved(airflow: Airflow, tiny: Tiny) -> None:  # noqa: F811
    command(tiny, "pretrain")
    more = tiny.landing / "more.csv"
    write_days(more, range(DAYS - 1, DAYS))
    command(tiny, "ingest", "--input", str(more))
    command(tiny, "stream")
    spec = tiny.models / "tiny.yaml"
    first = spec.read_text()
    second = first.replace("version: 1", "version: 2").replace("variance: 0.01", "variance: 0.011")
    spec.write_text(second)
    try:
        airflow.switch("kalman_upgrade__tiny")
        refused = upgraded(airflow, "Reject")
        assert refused["approve"] == "success"
        assert {refused[name] for name in ("choose_mode", "promote", "switch_over")} == {"skipped"}
        assert statuses(tiny) == {"tiny-g0001": "live", "tiny-g0002": "shadow"}

        approved = upgraded(airflow, "Approve", force=True)  # takes up the shadow that is there
        assert (approved["promote"], approved["switch_over"]) == ("success", "skipped")
        assert statuses(tiny) == {"tiny-g0001": "retired", "tiny-g0002": "live"}
        assert (tiny.warehouse / "reports" / "tiny" / "tiny-g0002.html").exists()
    finally:
        spec.write_text(first)
