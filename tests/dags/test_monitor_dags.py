"""The DAGs of monitors: a model that has one gets a DAG, which runs after the stream, on a schedule, or for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import AssetAll, CronTriggerTimetable

from jobs.spec import SpecError, load_spec
from kalman_dags.family import specs
from kalman_dags.pools import pools
from kalman_dags.stream_operator import StreamForeverOperator
from tests.dags.conftest import MODELS, load_bag

pytestmark = pytest.mark.airflow

MONITOR = "monitor: {watermark: 1h, windows: [{size: 1d}]}\n"


def write(folder: Path, monitor: str = MONITOR, schedule: str | None = None) -> None:
    text = (MODELS / "tiny.yaml").read_text() + monitor
    if schedule is not None:
        text = text.replace("airflow:\n", f"airflow:\n  monitor: {schedule}\n")
    (folder / "tiny.yaml").write_text(text)


def test_a_monitor_runs_on_new_estimates_or_on_its_schedule(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KALMAN_MODELS", str(tmp_path))
    write(tmp_path)
    bag = load_bag(known_pools={*pools(list(specs())), "default_pool"})
    assert bag.import_errors == {} and not bag.dag_warnings
    dag = bag.dags["kalman_monitor__tiny"]
    condition = dag.timetable.asset_condition
    assert isinstance(condition, AssetAll)
    assert list(condition.objects) == list(bag.dags["kalman_stream__tiny"].get_task("stream").outlets)
    task: Any = dag.get_task("monitor")
    assert task.pool == "kalman_monitor__tiny" and dag.max_active_runs == 1
    assert task.options == {"--model": "tiny", "--trigger": "{{ params.trigger }}"}
    assert dag.doc_md and dag.doc_md.startswith("Watch the live estimates of `tiny`")

    write(tmp_path, schedule='{schedule: "@hourly"}')
    timetable = load_bag().dags["kalman_monitor__tiny"].timetable
    assert isinstance(timetable, CronTriggerTimetable) and timetable.expression == "0 * * * *"


def test_a_monitor_that_runs_for_ever_is_kept_running_like_a_stream(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KALMAN_MODELS", str(tmp_path))
    write(tmp_path, schedule='{schedule: "@continuous", trigger: 30s}')
    dags = load_bag().dags
    assert "kalman_monitor__tiny" not in dags and "kalman_stream_warden" in dags
    dag = dags["kalman_monitor_forever__tiny"]
    assert type(dag.timetable).__name__ == "ContinuousTimetable"
    (task,) = dag.tasks
    assert isinstance(task, StreamForeverOperator)
    assert (task.verb, task.seconds, task.pool) == ("monitor", 30.0, "kalman_monitor__tiny")
    assert task._work.name == "monitor-tiny"


def test_a_schedule_of_a_monitor_that_is_not_there_is_refused(tmp_path: Path) -> None:
    write(tmp_path, monitor="", schedule='{schedule: "@hourly"}')
    with pytest.raises(SpecError, match="airflow.monitor.* there is nothing to monitor"):
        load_spec("tiny", tmp_path)
