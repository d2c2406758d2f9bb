"""The upgrade DAG through a real scheduler: refused, the live version stays; approved, it is replaced.

The live stream lags when the DAG starts, so the task of its shadow lets it catch up before a person is asked. Who may
answer, and who is told, is in the spec.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from typing import Any

import pytest

from demo.delta_log import rows_of
from tests.dags.conftest import DAYS, ROOT, ROWS_A_DAY, Tiny, write_days
from tests.support.airflow_api import wait_for
from tests.support.standalone import Airflow, standalone

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.soak]

UPGRADE = "/dags/kalman_upgrade__tiny"
NOTIFIER = "tests.support.file_notifier.FileNotifier"


def command(tiny: Tiny, *words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jobs.cli", *words, "--model", "tiny"],
        cwd=ROOT,
        env={**os.environ, **tiny.environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def statuses(tiny: Tiny) -> dict[str, str]:
    return {row["generation"]: row["status"] for row in rows_of(tiny.warehouse / "generations")}


@pytest.fixture(scope="module")
def tiny(landed: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The measurements of the first days in a warehouse of this module's own, and a spec with approvers."""
    folder = tmp_path_factory.mktemp("approval")
    shutil.copytree(landed.first_days, folder / "warehouse")
    shutil.copytree(landed.models, folder / "models")
    own = landed._replace(models=folder / "models", warehouse=folder / "warehouse")
    spec = own.models / "tiny.yaml"
    told = f"{{path: '{folder / 'told.txt'}', text: '{{{{ task.subject }}}} {{{{ run_id }}}}'}}"
    upgrade = f"  upgrade: {{assigned_users: [admin], notifiers: {{{NOTIFIER}: {told}}}}}\n"
    spec.write_text(spec.read_text().replace("airflow:\n", f"airflow:\n{upgrade}"))
    return own


@pytest.fixture(scope="module")
def airflow(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    """Airflow with a second user, who may start DAGs, and whom the spec does not name."""
    environment = {
        **tiny.environment(),
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": "admin:admin,guest:user",
        "KALMAN_NOTIFIERS": NOTIFIER.rpartition(".")[0],
    }
    with standalone(tmp_path_factory.mktemp("airflow"), environment) as running:
        yield running


def asked(airflow: Airflow, run: str) -> str:
    """Wait until the run asks for approval, and return the text that a person sees."""

    def waits() -> bool:
        states = tasks(airflow, run)
        assert "failed" not in states.values(), (states, airflow.logs(run))
        return states["approve"] in ("deferred", "awaiting_input")

    wait_for(waits, 600, "the gate")
    return str(airflow.call(f"{run}/taskInstances/approve/-1/hitlDetails")["body"])


def answer(api: Any, run: str, option: str, force: bool = False) -> None:
    """Answer as a user."""
    form = {"chosen_options": [option], "params_input": {"force": force}}
    api.call(f"{run}/taskInstances/approve/-1/hitlDetails", form, "PATCH")


def started(airflow: Airflow) -> str:
    """Start the DAG, and return the address of the run."""
    body = {"logical_date": None, "conf": {"dry_run": False}}
    return f"{UPGRADE}/dagRuns/{airflow.call(f'{UPGRADE}/dagRuns', body)['dag_run_id']}"


def ended(airflow: Airflow, run: str) -> str:
    """Wait for the run's end, and return its state."""
    wait_for(lambda: airflow.call(run)["state"] in ("success", "failed"), 600, "the run's end")
    return airflow.call(run)["state"]


def tasks(airflow: Airflow, run: str) -> dict[str, str]:
    """Return the state of each task."""
    found = airflow.call(f"{run}/taskInstances")["task_instances"]
    return {one["task_id"]: str(one["state"]) for one in found}


def test_refused_then_approved(airflow: Airflow, tiny: Tiny) -> None:
    command(tiny, "pretrain")
    more = tiny.landing / "more.csv"
    write_days(more, range(DAYS - 1, DAYS))
    command(tiny, "ingest", "--input", str(more))
    command(tiny, "stream")
    write_days(more.with_name("last.csv"), range(DAYS, DAYS + 1))
    command(tiny, "ingest", "--input", str(more.with_name("last.csv")))  # which the stream has not read
    spec = tiny.models / "tiny.yaml"
    first = spec.read_text()
    spec.write_text(first.replace("version: 1", "version: 2").replace("variance: 0.01", "variance: 0.011"))
    airflow.switch("kalman_upgrade__tiny")

    run = started(airflow)
    text = asked(airflow, run)
    states = tasks(airflow, run)
    assert [states[name] for name in ("shadow", "catch_up", "compare")] == ["success", "skipped", "skipped"]
    assert states["promote"] in ("None", "scheduled"), states
    assert f"| rows compared | {ROWS_A_DAY} |" in text, text
    assert "**Verdict: not good.** Answer: not enough to tell" in text and "95 % interval" in text, text
    assert "What is lost and gained" in text and "| states | none | none |" in text, text
    # The link opens the report in Airflow, and the page of the model names its DAGs.
    assert "](/kalman/reports/tiny/tiny-g0002.html)" in text, text
    assert "tiny-g0002" in airflow.page("/kalman/reports/tiny/tiny-g0002.html")
    assert 'href="/dags/kalman_upgrade__tiny"' in airflow.page("/kalman/models/tiny")
    # The spec names who answers, and who is told.
    with pytest.raises(urllib.error.HTTPError, match="403"):
        answer(airflow.as_user("guest"), run, "Approve")
    told = (tiny.models.parent / "told.txt").read_text()
    assert told == f"Let version 2 of tiny take over? {run.rpartition('/')[2]}\n"
    answer(airflow, run, "Reject")
    assert ended(airflow, run) == "success"
    states = tasks(airflow, run)
    assert {states[name] for name in ("choose_mode", "promote", "switch_over")} == {"skipped"}
    assert statuses(tiny) == {"tiny-g0001": "live", "tiny-g0002": "shadow"}

    run = started(airflow)  # takes up the shadow that is there
    asked(airflow, run)
    answer(airflow, run, "Approve")
    assert ended(airflow, run) == "failed"
    refused = airflow.call(f"{run}/taskInstances/promote")
    assert (refused["state"], refused["try_number"]) == ("failed", 1), "a retry would be refused again"
    assert "was not promoted" in airflow.logs(run)

    run = started(airflow)
    asked(airflow, run)
    answer(airflow, run, "Approve", force=True)  # the remedy is in the form
    assert ended(airflow, run) == "success", airflow.logs(run)
    assert (tasks(airflow, run)["promote"], tasks(airflow, run)["switch_over"]) == ("success", "skipped")
    assert statuses(tiny) == {"tiny-g0001": "retired", "tiny-g0002": "live"}
    events = airflow.call("/assets/events?order_by=-timestamp")["asset_events"]
    promoted = next(one for one in events if one["source_task_id"] == "promote")
    assert promoted["extra"]["generation"] == "tiny-g0002" and promoted["extra"]["promoted"] is True
    assert promoted["extra"]["page"] == "/kalman/reports/tiny/tiny-g0002.html"
