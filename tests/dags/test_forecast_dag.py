"""The DAG of forecasts: for models with the section `forecast`, on its schedule, with a run's id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import CronTriggerTimetable

from jobs.specs.loading import load_spec
from jobs.specs.model_spec import SpecError
from tests.dags.conftest import load_bag
from tests.dags.test_follower_dags import MODELS, SECTIONS

pytestmark = pytest.mark.airflow
SCHEDULE = '  forecast: {schedule: "@hourly", future: "/data/{{ ds }}.csv"}\n'


def test_it_forecasts_on_its_schedule_under_the_runs_id(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KALMAN_MODELS", str(tmp_path))
    text = (MODELS / "tiny.yaml").read_text()
    (tmp_path / "tiny.yaml").write_text(text + SECTIONS["skill"])
    dag = load_bag().dags["kalman_forecast__tiny"]
    assert dag.timetable.can_be_scheduled is False and dag.max_active_runs == 1
    (tmp_path / "tiny.yaml").write_text(
        text.replace("airflow:\n", "airflow:\n" + SCHEDULE) + SECTIONS["skill"]
    )
    bag = load_bag()
    assert bag.import_errors == {}
    dag = bag.dags["kalman_forecast__tiny"]
    assert isinstance(dag.timetable, CronTriggerTimetable) and dag.timetable.expression == "0 * * * *"
    (task,) = dag.tasks
    found: Any = task
    assert found.verb == "forecast" and found.options["--run"] == "{{ run_id }}"
    assert found.options["--future"] == "/data/{{ ds }}.csv"
    assert dag.doc_md and dag.doc_md.startswith("Forecast every key of `tiny`")


def test_a_schedule_without_horizons_is_refused(tmp_path: Path) -> None:
    text = (MODELS / "tiny.yaml").read_text()
    (tmp_path / "tiny.yaml").write_text(text.replace("airflow:\n", "airflow:\n" + SCHEDULE))
    with pytest.raises(SpecError, match="airflow.forecast.schedule.* there is nothing to forecast"):
        load_spec("tiny", tmp_path)
