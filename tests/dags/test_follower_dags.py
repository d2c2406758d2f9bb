"""The DAGs of monitor and forecast skill: after the stream, on a schedule, or continuous."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import pytest
from airflow.sdk import AssetAll, CronTriggerTimetable

from jobs.specs.loading import load_spec
from jobs.specs.model_spec import SpecError
from kalman_dags.pools import list_pools
from kalman_dags.specs import load_specs
from kalman_dags.supervision.operator import StreamForeverOperator
from tests.dags.conftest import MODELS, load_bag

pytestmark = pytest.mark.airflow

SECTIONS = {
    "monitor": "monitor: {watermark: 1h, windows: [{size: 1d}]}\n",
    "skill": "outputs: {measured: true}\nforecast: {horizons: [6h]}\n",
}
PAGES = {
    "monitor": "Watch the live estimates of `tiny`",
    "skill": "Compare forecasts from the live estimates of `tiny`",
}
BOTH = pytest.mark.parametrize("verb", list(SECTIONS))


def write(folder: Path, *verbs: str, **schedules: str) -> None:
    text = (MODELS / "tiny.yaml").read_text() + "".join(SECTIONS[verb] for verb in verbs)
    for verb, schedule in schedules.items():
        text = text.replace("airflow:\n", f"airflow:\n  {verb}: {schedule}\n")
    (folder / "tiny.yaml").write_text(text)


@BOTH
def test_it_runs_on_new_estimates_or_on_its_schedule(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str
) -> None:
    monkeypatch.setenv("KALMAN_MODELS", str(tmp_path))
    write(tmp_path, verb)
    bag = load_bag(known_pools={*list_pools(list(load_specs())), "default_pool"})
    assert bag.import_errors == {} and not bag.dag_warnings
    assert {"monitor", "skill"} & {name.split("_")[1] for name in bag.dags} == {verb}
    dag = bag.dags[f"kalman_{verb}__tiny"]
    condition = dag.timetable.asset_condition
    assert isinstance(condition, AssetAll)
    assert list(condition.objects) == list(bag.dags["kalman_stream__tiny"].get_task("stream").outlets)
    task: Any = dag.get_task(verb)
    assert task.pool == f"kalman_{verb}__tiny" and dag.max_active_runs == 1
    given = {name: jinja2.Template(text).render(params=dag.params) for name, text in task.options.items()}
    assert task.verb == verb and given == {"--model": "tiny", "--trigger": "available-now"}
    assert dag.doc_md and dag.doc_md.startswith(PAGES[verb])

    write(tmp_path, verb, **{verb: '{schedule: "@hourly"}'})
    timetable = load_bag().dags[f"kalman_{verb}__tiny"].timetable
    assert isinstance(timetable, CronTriggerTimetable) and timetable.expression == "0 * * * *"


def test_rules_that_have_changed_adopt_what_the_form_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KALMAN_MODELS", str(tmp_path))
    rules = "monitor: {rules: [{name: high, kind: nis, at_least: 9.0}]}\n"
    (tmp_path / "tiny.yaml").write_text((MODELS / "tiny.yaml").read_text() + rules)
    dags = load_bag().dags
    task: Any = dags["kalman_monitor__tiny"].get_task("monitor")
    given = [jinja2.Template(task.options["--adopt"]).render(params={"adopt": one}) for one in (None, "one")]
    assert given == ["", "one"]
    export: Any = dags["kalman_export__tiny"].get_task("export")
    flags = [jinja2.Template(export.flags[-1]).render(params={"monitor": one}) for one in (False, True)]
    assert flags == ["", "--monitor"]


@BOTH
def test_a_continuous_one_is_kept_running_like_a_stream(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str
) -> None:
    monkeypatch.setenv("KALMAN_MODELS", str(tmp_path))
    write(tmp_path, *SECTIONS, **{verb: '{schedule: "@continuous", trigger: 30s, give_up_after: 3}'})
    dags = load_bag().dags
    assert f"kalman_{verb}__tiny" not in dags and "kalman_stream_warden" in dags
    (other,) = set(SECTIONS) - {verb}
    assert f"kalman_{other}__tiny" in dags and f"kalman_{other}_forever__tiny" not in dags
    dag = dags[f"kalman_{verb}_forever__tiny"]
    assert type(dag.timetable).__name__ == "ContinuousTimetable"
    (task,) = dag.tasks
    assert isinstance(task, StreamForeverOperator)
    assert (task.verb, task.seconds, task.pool) == (verb, 30.0, f"kalman_{verb}__tiny")
    assert task.give_up_after == 3 and task._work.name == f"{verb}-tiny"


@pytest.mark.parametrize(
    ("verb", "said"), [("monitor", "there is nothing to monitor"), ("skill", "there is nothing to forecast")]
)
def test_a_schedule_without_its_section_is_refused(tmp_path: Path, verb: str, said: str) -> None:
    write(tmp_path, **{verb: '{schedule: "@hourly"}'})
    with pytest.raises(SpecError, match=f"airflow.{verb}.* {said}"):
        load_spec("tiny", tmp_path)
