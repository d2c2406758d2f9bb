"""Airflow as `make airflow` starts it, with its scheduler: a backfill of three days, and a cleared run."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from tests.dags.conftest import FIRST_DAY, ROOT, ROWS_A_DAY, Tiny
from tests.dags.delta_rows import delta_rows

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.slow]

SCRIPT = [sys.executable, str(ROOT / "scripts" / "airflow-standalone")]
PRETRAIN = "/dags/kalman_pretrain__tiny"
T = TypeVar("T")


class Airflow:
    """A running Airflow and its API."""

    def __init__(self, environment: dict[str, str], home: Path, script: subprocess.Popen[bytes]) -> None:
        self.environment, self.home, self.script = environment, home, script
        self.address = f"http://127.0.0.1:{environment['KALMAN_AIRFLOW_PORT']}"
        self.token = ""

    def command(self, *words: str) -> str:
        """Run an airflow command in the same environment."""
        done = subprocess.run([*SCRIPT, *words], env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def api(self, path: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
        """Call the API."""
        if not self.token:
            passwords = json.loads((self.home / "simple_auth_manager_passwords.json.generated").read_text())
            login = {"username": "admin", "password": passwords["admin"]}
            self.token = self._call("/auth/token", login, "POST")["access_token"]
        return self._call(f"/api/v2{path}", body, method or ("GET" if body is None else "POST"))

    def processes(self) -> list[str]:
        """Return the commands of everything that was started by this Airflow and still runs."""
        found = []
        for one in psutil.process_iter(["pid", "status", "cmdline"]):
            try:
                ours = one.environ().get("KALMAN_AIRFLOW_HOME") == str(self.home)
            except psutil.Error:
                continue
            if ours and one.pid != self.script.pid and one.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(" ".join(one.info["cmdline"] or [])[:200])
        return found

    def switch_on(self, dag_id: str) -> None:
        """Unpause a DAG."""
        self.api(f"/dags/{dag_id}?update_mask=is_paused", {"is_paused": False}, "PATCH")

    def _call(self, path: str, body: dict[str, Any] | None, method: str) -> Any:
        request = urllib.request.Request(
            self.address + path, None if body is None else json.dumps(body).encode(), method=method
        )
        request.add_header("Content-Type", "application/json")
        request.add_header("Accept", "application/json")
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read() or b"null")


def free_ports(count: int) -> int:
    """Return the first of so many ports in a row that nobody uses."""
    for first in range(18080, 30000, count):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for offset, one in enumerate(sockets):
                one.bind(("127.0.0.1", first + offset))
            return first
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
    raise AssertionError("no free ports")


def wait_for(ask: Callable[[], T], seconds: float, what: str) -> T:
    """Ask until the answer is true."""
    end = time.monotonic() + seconds
    while not (answer := ask()):
        assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}"
        time.sleep(1)
    return answer


@pytest.fixture(scope="module")
def tiny(landed: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The measurements of the first days in a warehouse of this module's own."""
    warehouse = tmp_path_factory.mktemp("scheduler") / "warehouse"
    shutil.copytree(landed.first_days, warehouse)
    return landed._replace(warehouse=warehouse)


@pytest.fixture(scope="module")
def airflow(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    """Airflow, started by the script and stopped by SIGTERM."""
    home = tmp_path_factory.mktemp("airflow")
    # The settings of the tests' other Airflow must not reach this one, as a user's must not.
    environment = {
        **os.environ,
        **tiny.environment(),
        "KALMAN_AIRFLOW_HOME": str(home),
        "KALMAN_AIRFLOW_PORT": str(free_ports(4)),
    }
    said = home / "said.txt"
    with said.open("w") as out:
        process = subprocess.Popen(SCRIPT, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:

        def ready() -> bool:
            assert process.poll() is None, said.read_text()
            return "Ctrl-C stops Airflow" in said.read_text()

        wait_for(ready, 400, "Airflow")
        yield Airflow(environment, home, process)
    finally:
        process.terminate()
        process.wait(60)


def runs(airflow: Airflow) -> list[dict[str, Any]]:
    """Return the backfill's runs."""
    return airflow.api(f"{PRETRAIN}/dagRuns?order_by=logical_date&run_type=backfill")["dag_runs"]


def all_succeeded(airflow: Airflow, count: int) -> bool:
    """Tell if so many runs have succeeded; none may have failed."""
    states = [run["state"] for run in runs(airflow)]
    assert "failed" not in states, states
    return states == ["success"] * count


def test_the_script_says_where_and_how_to_log_in(airflow: Airflow) -> None:
    said = (airflow.home / "said.txt").read_text()
    passwords = json.loads((airflow.home / "simple_auth_manager_passwords.json.generated").read_text())
    assert airflow.address in said
    assert f"admin / {passwords['admin']}" in said
    names = {dag["dag_id"] for dag in airflow.api("/dags")["dags"]}
    verbs = ("export", "ingest", "maintain", "pretrain", "rollback", "stream", "upgrade")
    assert names == {f"kalman_{verb}__tiny" for verb in verbs}
    assert airflow.api("/importErrors")["import_errors"] == []


def test_the_script_makes_the_pools(airflow: Airflow) -> None:
    assert airflow.api("/pools/kalman_stream__tiny")["slots"] == 1


def test_backfill_and_clear(airflow: Airflow, tiny: Tiny) -> None:
    first, last = FIRST_DAY, FIRST_DAY + timedelta(days=2)
    airflow.command(
        *("backfill", "create", "--dag-id", "kalman_pretrain__tiny", "--max-active-runs", "1"),
        *("--from-date", first.date().isoformat(), "--to-date", last.date().isoformat()),
    )
    # Runs of a paused DAG wait. Switched on, it also runs its newest interval, as by schedule.
    airflow.switch_on("kalman_pretrain__tiny")
    wait_for(lambda: all_succeeded(airflow, 3), 900, "the backfill")

    manifests = sorted(delta_rows(tiny.warehouse / "manifests"), key=lambda row: row["rows"])
    assert len({row["snapshot_id"] for row in manifests}) == 3
    assert [row["rows"] for row in manifests] == [ROWS_A_DAY * day for day in (1, 2, 3)]
    # Each is cut at the end of its day. What was landed first ends with day three: there is a position.
    cuts = [row["cut"] and row["cut"].isoformat()[:19] for row in manifests]
    assert cuts == ["2013-01-02T00:00:00", "2013-01-03T00:00:00", None]
    versions = [json.loads(row["position"])["version"] for row in manifests]

    cleared = runs(airflow)[0]["dag_run_id"]
    body = {"dry_run": False, "dag_run_id": cleared, "only_failed": False, "reset_dag_runs": True}
    airflow.api(f"{PRETRAIN}/clearTaskInstances", body)
    task = f"{PRETRAIN}/dagRuns/{cleared}/taskInstances/pretrain"

    def ran_again() -> bool:
        found = airflow.api(task)
        assert found["state"] not in ("failed", "up_for_retry"), found
        return found["state"] == "success" and found["try_number"] == 2

    wait_for(ran_again, 600, "the cleared run")
    log = json.dumps(airflow.api(f"{task}/logs/2"))
    assert "Spark-Submit cmd" in log and f"snapshot {manifests[0]['snapshot_id']}" in log
    # It ran, and found the same snapshot: nothing is there twice.
    again = sorted(delta_rows(tiny.warehouse / "manifests"), key=lambda row: row["rows"])
    assert again == manifests
    assert versions == sorted(versions)


def test_a_pool_that_is_missing_is_named(airflow: Airflow) -> None:
    airflow.api("/pools/kalman_stream__tiny", method="DELETE")
    airflow.switch_on("kalman_stream__tiny")
    found = wait_for(
        lambda: airflow.api("/dags/kalman_stream__tiny/dagRuns")["dag_runs"], 60, "a run of the stream"
    )
    task = f"/dags/kalman_stream__tiny/dagRuns/{found[0]['dag_run_id']}/taskInstances/stream"
    wait_for(lambda: airflow.api(task)["state"] == "scheduled", 60, "the task")
    reasons = [one["reason"] for one in airflow.api(f"{task}/dependencies")["dependencies"]]
    assert "Tasks using non-existent pool 'kalman_stream__tiny' will not be scheduled" in reasons


def test_stopping_ends_everything_also_a_running_task(airflow: Airflow) -> None:
    body = {"logical_date": (FIRST_DAY + timedelta(days=9)).isoformat()}
    run = airflow.api(f"{PRETRAIN}/dagRuns", body)["dag_run_id"]
    task = f"{PRETRAIN}/dagRuns/{run}/taskInstances/pretrain"
    wait_for(lambda: airflow.api(task)["state"] == "running", 120, "the task")
    wait_for(lambda: any("pretrain.py" in command for command in airflow.processes()), 120, "its driver")
    airflow.script.terminate()
    time.sleep(1)
    airflow.script.terminate()  # a person who is in a hurry
    assert airflow.script.wait(60) == 0
    wait_for(lambda: not airflow.processes(), 20, f"the end of {airflow.processes()}")
