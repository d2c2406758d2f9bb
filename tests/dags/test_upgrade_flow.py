"""Runs of the upgrade DAG whose drivers are scripts of ours: which task follows which, and what is final."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from airflow.models.asset import AssetEvent
from airflow.utils.session import create_session
from sqlalchemy import select

from tests.dags.conftest import FIRST_DAY, MODELS, load_bag

pytestmark = pytest.mark.airflow

DRIVER = """#!{python}
import json, os, pathlib, sys
words = sys.argv[1:]
verb = next(pathlib.Path(word).stem for word in words if word.endswith(".py") and "/jobs/" in word)
flags = [word for word in words if word in ("--dry-run", "--no-promote", "--catch-up", "--force")]
calls = pathlib.Path("{calls}")
before = json.loads(calls.read_text()) if calls.exists() else []
calls.write_text(json.dumps([*before, [verb, *flags]]))
answer = json.loads(pathlib.Path("{answers}").read_text())[" ".join([verb, *flags])]
code, said, data = answer.pop(0) if len(answer) == 1 else answer[sum(call == [verb, *flags] for call in before)]
for line in said:
    print(line, flush=True)
if not code:
    pathlib.Path(os.environ["KALMAN_REPORT_FILE"]).write_text(json.dumps(dict(lines=said, data=data)))
sys.exit(code)
"""

LAGS = [0, ["verdict: not good", "lag: tiny-g0001 has not read all rows"], {"live_lags": True}]
LEVEL = [0, ["verdict: good"], {"live_lags": False, "good": True}]
PROMOTED = [0, ["verdict: good", "promoted tiny-g0002"], {"generation": "tiny-g0002", "promoted": True}]
REFUSED = [1, ["error: tiny-g0002 was not promoted; it predicts worse. It stays in shadow"], {}]
DRIVEN = [3, ["error: process 17 drives it"], {}]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run the DAG of a model without a gate, with these answers of the drivers; return states, tries and calls."""
    (tmp_path / "models").mkdir()
    text = (MODELS / "tiny.yaml").read_text()
    (tmp_path / "models" / "tiny.yaml").write_text(text + "upgrade: {automatic: true}\n")
    monkeypatch.setenv("KALMAN_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("KALMAN_WAREHOUSE", str(tmp_path / "warehouse"))
    calls, answers, driver = tmp_path / "calls.json", tmp_path / "answers.json", tmp_path / "python"
    driver.write_text(DRIVER.format(python=sys.executable, calls=calls, answers=answers))
    driver.chmod(0o755)

    def go(given: dict[str, list[Any]], **form: Any) -> tuple[dict[str, str], list[list[str]]]:
        answers.write_text(json.dumps({"upgrade --dry-run": [[0, ["version 1 to 2"], {}]], **given}))
        calls.unlink(missing_ok=True)
        dag: Any = load_bag().dags["kalman_upgrade__tiny"]
        for task in dag.tasks:
            if hasattr(task, "env_vars"):
                task.env_vars["PYSPARK_DRIVER_PYTHON"] = str(driver)
        done = dag.test(run_conf={"dry_run": False, **form}, logical_date=FIRST_DAY)
        states = {one.task_id: str(one.state) for one in done.get_task_instances()}
        return states, json.loads(calls.read_text())

    return go


SHADOW = "upgrade --no-promote --catch-up"


def test_a_stream_that_still_lags_catches_up_before_the_comparison_counts(run: Any) -> None:
    states, calls = run(
        {
            SHADOW: [LAGS],
            "upgrade --no-promote": [LEVEL],
            "stream": [[0, ["estimated 12 rows"], {}]],
            "upgrade": [PROMOTED],
        }
    )
    assert calls == [
        ["upgrade", "--dry-run"],
        ["upgrade", "--no-promote", "--catch-up"],
        ["stream"],
        ["upgrade", "--no-promote"],
        ["upgrade"],
    ]
    assert states.pop("switch_over") == "skipped" and set(states.values()) == {"success"}
    with create_session() as session:
        event = session.scalars(select(AssetEvent).order_by(AssetEvent.id.desc())).first()
        assert event is not None and event.source_task_id == "promote"
        assert event.extra == {"generation": "tiny-g0002", "promoted": True}


@pytest.mark.slow
def test_a_driver_that_runs_already_lets_it_catch_up(run: Any) -> None:
    given = {SHADOW: [LAGS], "upgrade --no-promote": [LEVEL], "stream": [DRIVEN], "upgrade": [PROMOTED]}
    states, _ = run(given)
    assert (states["catch_up"], states["compare"], states["promote"]) == ("success",) * 3


def test_a_stream_that_is_level_is_compared_once_and_a_refusal_is_final(run: Any) -> None:
    states, calls = run({SHADOW: [LEVEL], "upgrade": [REFUSED]})
    assert [states[name] for name in ("catch_up", "compare", "choose_mode")] == [
        "skipped",
        "skipped",
        "success",
    ]
    # Not `up_for_retry`: a retry would find the same.
    assert states["promote"] == "failed" and calls[-1] == ["upgrade"]


def test_the_form_forces_it(run: Any) -> None:
    states, calls = run({SHADOW: [LEVEL], "upgrade --force": [PROMOTED]}, force=True)
    assert states["promote"] == "success" and calls[-1] == ["upgrade", "--force"]


def test_another_mode_switches_over_without_a_comparison(run: Any) -> None:
    states, calls = run({"upgrade": [PROMOTED]}, mode="stop-start")
    assert (states["switch_over"], states["promote"], states["catch_up"]) == ("success", "skipped", "skipped")
    assert calls == [["upgrade", "--dry-run"], ["upgrade", "--dry-run"], ["upgrade"]]


def test_a_dry_run_ends_after_its_preview(run: Any) -> None:
    states, calls = run({}, dry_run=True)
    assert calls == [["upgrade", "--dry-run"]]
    assert {name for name, state in states.items() if state == "success"} == {"preview", "unless_dry_run"}
