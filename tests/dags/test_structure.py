"""What each family's DAG looks like: its task, schedule, assets, pool and arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk import (
    Asset,
    AssetAll,
    AssetAny,
    AssetOrTimeSchedule,
    CronDataIntervalTimetable,
    CronTriggerTimetable,
)

from kalman_dags.submit import find_application
from tests.dags.conftest import ROOT, VERBS, load_bag

pytestmark = [pytest.mark.airflow, pytest.mark.core]


def uris(condition: Any) -> set[str]:
    """Return the assets that all have to be new for a DAG to run."""
    assert isinstance(condition, AssetAll)
    return {asset.uri for asset in condition.objects if isinstance(asset, Asset)}


def test_each_model_has_each_family(bag: DagBag) -> None:
    assert bag.import_errors == {}
    assert {dag.dag_id: sorted(dag.task_ids) for dag in bag.dags.values()} == {
        "kalman_estimate__tiny": ["estimate"],
        "kalman_export__tiny": ["export"],
        "kalman_import__tiny": ["import"],
        "kalman_ingest__tiny": ["ingest"],
        "kalman_maintain__tiny": ["maintain"],
        "kalman_pretrain__tiny": ["pretrain"],
        "kalman_rollback__tiny": ["rollback"],
        "kalman_stream__tiny": ["stream"],
        "kalman_verify__tiny": ["verify"],
        "kalman_upgrade__tiny": [
            *("approve", "catch_up", "choose_mode", "compare", "if_the_stream_lags", "preview", "promote"),
            *("shadow", "switch_over", "unless_dry_run"),
        ],
    }


def test_only_dags_with_a_schedule_are_created_paused(bag: DagBag) -> None:
    # None means paused, unless Airflow's settings say otherwise.
    by_hand = {name for name, dag in bag.dags.items() if dag.is_paused_upon_creation is False}
    verbs = ("export", "import", "maintain", "rollback", "upgrade", "verify")
    assert by_hand == {f"kalman_{verb}__tiny" for verb in verbs}
    assert {dag.is_paused_upon_creation for name, dag in bag.dags.items() if name not in by_hand} == {None}


def test_the_shipped_models_have_their_dags(monkeypatch: pytest.MonkeyPatch, models_dir: Path) -> None:
    monkeypatch.setenv("KALMAN_MODELS", str(models_dir))
    shipped = load_bag()
    names = sorted(path.stem for path in models_dir.glob("*.yaml"))
    assert shipped.import_errors == {}
    assert sorted(shipped.dags) == sorted(f"kalman_{verb}__{name}" for verb in VERBS for name in names)


def test_ingest_pretrain_and_estimate_run_on_the_intervals_of_their_schedule(bag: DagBag) -> None:
    for name in ("kalman_ingest__tiny", "kalman_pretrain__tiny", "kalman_estimate__tiny"):
        timetable = bag.dags[name].timetable
        assert isinstance(timetable, CronDataIntervalTimetable)
        assert (timetable.expression, str(timetable.timezone)) == ("0 0 * * *", "UTC")
        assert bag.dags[name].catchup is False


def test_the_stream_runs_on_a_new_snapshot_and_on_its_schedule(bag: DagBag) -> None:
    timetable = bag.dags["kalman_stream__tiny"].timetable
    assert isinstance(timetable, AssetOrTimeSchedule)
    assert isinstance(timetable.timetable, CronTriggerTimetable)
    assert timetable.timetable.expression == "*/10 * * * *"
    waits_for = uris(timetable.asset_condition)
    gives = {outlet.uri for outlet in bag.dags["kalman_pretrain__tiny"].get_task("pretrain").outlets}
    assert waits_for == gives == {"kalman://snapshots/tiny"}


def test_a_model_without_schedules_is_run_by_hand_and_by_snapshots(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = (ROOT / "models" / "nile.yaml").read_text()
    (tmp_path / "nile.yaml").write_text(text)
    monkeypatch.setenv("KALMAN_MODELS", str(tmp_path))
    dags = load_bag().dags
    assert dags["kalman_pretrain__nile"].timetable.can_be_scheduled is False
    assert dags["kalman_ingest__nile"].timetable.can_be_scheduled is False
    assert uris(dags["kalman_stream__nile"].timetable.asset_condition) == {"kalman://snapshots/nile"}


def spec_with(tmp_path: Path, **schedules: str) -> Path:
    """Write Nile's spec with these sections of `airflow`, and return the folder."""
    text = (ROOT / "models" / "nile.yaml").read_text()
    sections = "".join(f"  {verb}: {section}\n" for verb, section in schedules.items())
    (tmp_path / "nile.yaml").write_text(f"{text}\nairflow:\n{sections}" if schedules else text)
    return tmp_path


def test_landing_wakes_what_waits_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    both = {"stream": "{schedule: on-landing}", "pretrain": "{schedule: on-landing}"}
    monkeypatch.setenv("KALMAN_MODELS", str(spec_with(tmp_path, **both)))
    found = load_bag()
    assert found.import_errors == {}
    condition = found.dags["kalman_stream__nile"].timetable.asset_condition
    assert isinstance(condition, AssetAny), "a new snapshot wakes it as well"
    woken = {asset.uri for asset in condition.objects if isinstance(asset, Asset)}
    assert woken == {"kalman://snapshots/nile", "kalman://measurements/nile"}
    pretrain: Any = found.dags["kalman_pretrain__nile"]
    assert uris(pretrain.timetable.asset_condition) == {"kalman://measurements/nile"}
    # It takes history up to the version that has landed, so that a run that is cleared takes the same.
    landed = {"measurements": [SimpleNamespace(extra={"version": 3})]}
    values = {"params": pretrain.params, "triggering_asset_events": landed, **pretrain.user_defined_macros}
    options = pretrain.get_task("pretrain").options
    run = {"dag_run": SimpleNamespace(data_interval_end=None, run_after=None)}
    rendered = {name: jinja2.Template(text).render(values, **run) for name, text in options.items()}
    assert (rendered["--to-version"], rendered["--as-of"]) == ("3", "")


@pytest.mark.parametrize("verb", ["ingest", "export", "monitor"])
def test_nothing_else_waits_for_a_landing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str) -> None:
    folder = spec_with(tmp_path, **{verb: "{schedule: on-landing}"})
    monkeypatch.setenv("KALMAN_MODELS", str(folder))
    (error,) = load_bag().import_errors.values()
    assert f"airflow.{verb}" in error


def test_an_empty_form_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bag: DagBag) -> None:
    from airflow.sdk.exceptions import ParamValidationError

    monkeypatch.setenv("KALMAN_MODELS", str(spec_with(tmp_path)))
    form = load_bag().dags["kalman_ingest__nile"].params
    with pytest.raises(ParamValidationError, match="input"):
        form.validate()
    with pytest.raises(ParamValidationError):
        form.get_param("input").resolve("")
    assert form.get_param("input").resolve("/data/nile.csv") == "/data/nile.csv"
    # A run that no form has started is refused by the task, before it starts Spark.
    task: Any = load_bag().dags["kalman_ingest__nile"].get_task("ingest")
    assert jinja2.Template(task.needed).render(params={"input": None}) == ""
    assert "airflow.ingest.path" in task.unless
    bag.dags["kalman_ingest__tiny"].params.validate()  # its spec has a path


def test_names_and_tags_sort_by_model(bag: DagBag) -> None:
    names = {dag.dag_id: dag.dag_display_name for dag in bag.dags.values()}
    assert names["kalman_ingest__tiny"] == "tiny · ingest"
    assert all(name.startswith("tiny · ") for name in names.values())
    assert all("model:tiny" in dag.tags for dag in bag.dags.values())
    page = bag.dags["kalman_stream__tiny"].doc_md or ""
    assert "](/kalman/models/tiny)" in page


NOTIFIER = "airflow.providers.smtp.notifications.smtp.SmtpNotifier"


def test_the_spec_says_who_approves_and_who_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = f"{{{NOTIFIER}: {{to: ops@example.org, subject: 'an upgrade waits'}}}}"
    folder = spec_with(tmp_path, upgrade=f"{{assigned_users: [ada, bo], notifiers: {told}}}")
    monkeypatch.setenv("KALMAN_MODELS", str(folder))
    found = load_bag()
    assert found.import_errors == {}
    approve: Any = found.dags["kalman_upgrade__nile"].get_task("approve")
    assert [user["id"] for user in approve.assigned_users] == ["ada", "bo"]
    assert [type(one).__name__ for one in approve.notifiers] == ["SmtpNotifier"]
    assert list(approve.params) == ["force"]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("os.system", "is not one of the notifiers that a spec may name: list os in KALMAN_NOTIFIERS"),
        ("airflow.providers.none.Notifier", "cannot be imported"),
        ("airflow.providers.smtp.hooks.smtp.SmtpHook", "is not a notifier"),
        (NOTIFIER, "does not accept these arguments"),
    ],
)
def test_a_notifier_that_cannot_be_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str, said: str
) -> None:
    folder = spec_with(tmp_path, upgrade=f"{{notifiers: {{{path}: {{nothing: 1}}}}}}")
    monkeypatch.setenv("KALMAN_MODELS", str(folder))
    (error,) = load_bag().import_errors.values()
    assert "airflow.upgrade.notifiers" in error and said in error


def test_estimate_takes_its_interval_from_the_run_or_the_form(bag: DagBag) -> None:
    dag: Any = bag.dags["kalman_estimate__tiny"]
    task: Any = dag.get_task("estimate")
    run = SimpleNamespace(
        data_interval_start=datetime(2013, 10, 1, tzinfo=UTC),
        data_interval_end=datetime(2013, 10, 2, tzinfo=UTC),
    )

    def rendered(**form: Any) -> list[str]:
        values = {"params": {**dict(dag.params), **form}, "dag_run": run, **dag.user_defined_macros}
        texts = [*task.options.values(), *task.flags]
        return [jinja2.Template(text).render(values) for text in texts]

    assert rendered() == ["tiny", "2013-10-01T00:00:00+00:00", "2013-10-02T00:00:00+00:00", "", ""]
    form = {"from": "2013-09-01T00:00:00Z", "snapshot": "none", "smooth": True}
    expected = ["tiny", "2013-09-01T00:00:00Z", "2013-10-02T00:00:00+00:00", "none", "--smooth"]
    assert rendered(**form) == expected
    assert {outlet.uri for outlet in task.outlets} == {"kalman://history/tiny"}


def test_one_driver_a_stream(bag: DagBag) -> None:
    dag = bag.dags["kalman_stream__tiny"]
    assert dag.max_active_runs == 1
    assert dag.get_task("stream").pool == "kalman_stream__tiny"
    # A retry waits longer each time, and the task as long as a stream may need.
    assert dag.get_task("stream").retry_exponential_backoff


def test_the_pools_file_names_every_pool_that_a_dag_asks_for(bag: DagBag, models: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kalman_dags.pools"],
        cwd=ROOT / "dags",
        env={**os.environ, "KALMAN_MODELS": str(models), "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'dags'}"},
        capture_output=True,
        text=True,
        check=True,
    )
    pools = json.loads(done.stdout)
    asked = {task.pool for dag in bag.dags.values() for task in dag.tasks} - {"default_pool"}
    assert set(pools) == asked
    assert all(pool["slots"] == 1 and pool["include_deferred"] for pool in pools.values())


def test_airflow_names_a_pool_that_is_missing(models: Path) -> None:
    warned = {warning.message for warning in load_bag(known_pools={"default_pool"}).dag_warnings}
    assert warned == {
        f"Dag 'kalman_{verb}__tiny' references non-existent pools: ['kalman_stream__tiny']"
        for verb in ("stream", "upgrade")
    }
    # What a person sees first when runs stay in `scheduled` is the DAG's page.
    page = load_bag().dags["kalman_stream__tiny"].doc_md or ""
    assert "airflow pools set kalman_stream__tiny 1" in " ".join(page.split())


def test_a_roll_back_takes_the_last_state_only_if_it_is_asked_to(bag: DagBag) -> None:
    dag = bag.dags["kalman_rollback__tiny"]
    assert dag.params["last_state"] is False
    (flag,) = dag.get_task("rollback").flags  # pyright: ignore[reportAttributeAccessIssue]
    given = {asked: jinja2.Template(flag).render(params={"last_state": asked}) for asked in (False, True)}
    assert given == {False: "", True: "--last-state"}


def test_ingest_refuses_changed_files_unless_the_form_says_what_they_are(bag: DagBag) -> None:
    from jobs.landing.file_landing import CHANGED

    dag: Any = bag.dags["kalman_ingest__tiny"]
    assert dag.params["changed"] == "refuse"
    assert dag.params.get_param("changed").schema["enum"] == list(CHANGED)
    option = jinja2.Template(dag.get_task("ingest").options["--changed"])
    given = {one: option.render(params={"changed": one}) for one in CHANGED}
    assert given == {"refuse": "", "append": "append", "new": "new"}


def test_an_upgrade_is_a_dry_run_by_hand_and_needs_approval(
    bag: DagBag, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dag = bag.dags["kalman_upgrade__tiny"]
    assert dag.params["dry_run"] is True
    assert dag.get_task("approve").upstream_task_ids == {"if_the_stream_lags", "compare"}
    assert dag.get_task("choose_mode").upstream_task_ids == {"approve"}
    assert dag.get_task("choose_mode").downstream_task_ids == {"promote", "switch_over"}
    # What drives or ends the old generation waits until its driver is gone.
    pools = {task.task_id for task in dag.tasks if task.pool == "kalman_stream__tiny"}
    assert pools == {"catch_up", "switch_over"}
    check_the_gate(dag)
    assert dag.get_task("switch_over").flags == []  # pyright: ignore[reportAttributeAccessIssue]
    text = (ROOT / "models" / "nile.yaml").read_text()
    (tmp_path / "nile.yaml").write_text(
        text + 'upgrade: {automatic: true}\nairflow: {upgrade: {schedule: "@hourly"}}\n'
    )
    monkeypatch.setenv("KALMAN_MODELS", str(tmp_path))
    automatic = load_bag().dags["kalman_upgrade__nile"]
    assert "approve" not in automatic.task_ids
    assert automatic.get_task("promote").flags[-1] == "--needed"  # pyright: ignore[reportAttributeAccessIssue]
    assert automatic.timetable.can_be_scheduled


def check_the_gate(dag: Any) -> None:
    """Check that approval shows the comparison, and that nothing but the form's box forces a promotion."""
    pulled: dict[str, Any] = {"shadow": {"lines": ["answer: not enough to tell"], "data": {}}}
    macros = {
        **dag.user_defined_macros,
        "ti": SimpleNamespace(xcom_pull=lambda task_ids: pulled.get(task_ids)),
    }

    def body(mode: str) -> str:
        template = jinja2.Template(dag.get_task("approve").body)
        return template.render(macros, params={**dag.params, "mode": mode})

    assert "answer: not enough to tell" in body("blue-green") and "is **refused**" in body("blue-green")
    pulled["shadow"] = None  # in another mode, or where the driver's output is not seen
    assert "None" not in body("stop-start") and "without a comparison" in body("stop-start")
    assert dag.params["force"] is False
    (flag,) = map(jinja2.Template, dag.get_task("promote").flags)
    assert [flag.render(macros, params={"force": force}) for force in (False, True)] == ["", "--force"]
    pulled["approve"] = {"chosen_options": ["Approve"], "params_input": {"force": True}}
    assert flag.render(macros, params={"force": False}) == "--force"
    pulled["approve"] = {"chosen_options": ["Approve"], "params_input": {}}
    assert flag.render(macros, params={"force": False}) == ""


def test_an_upgrade_of_a_continuous_stream_does_not_wait_for_its_slot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = (ROOT / "models" / "nile.yaml").read_text()
    (tmp_path / "nile.yaml").write_text(text + 'airflow: {stream: {schedule: "@continuous", trigger: 10s}}\n')
    monkeypatch.setenv("KALMAN_MODELS", str(tmp_path))
    dags = load_bag().dags
    upgrade: Any = dags["kalman_upgrade__nile"]
    assert dags["kalman_stream_forever__nile"].get_task("stream").pool == "kalman_stream__nile"
    assert {task.pool for task in upgrade.tasks} == {"default_pool"}
    assert upgrade.get_task("switch_over").flags == ["--drain"]
    assert "--catch-up" not in str(upgrade.get_task("shadow").flags)  # its own driver catches up
    assert "--drain" not in str(upgrade.get_task("promote").flags)


def test_an_upgrade_can_change_the_layout(bag: DagBag) -> None:
    from jinja2 import Template

    from jobs.upgrades.modes import MODES

    dag: Any = bag.dags["kalman_upgrade__tiny"]
    form = dag.params.get_param("mode").schema["enum"]
    assert form == [
        mode for mode in MODES if mode != "stateless"
    ]  # which only a person at a terminal may want
    assert dag.params["partitions"] is None
    values = {"params": {"mode": "repartition", "partitions": 5}}
    task = dag.get_task("switch_over")
    rendered = {name: Template(value).render(values) for name, value in task.options.items()}
    assert rendered == {"--model": "tiny", "--mode": "repartition", "--partitions": "5"}
    flags = [Template(flag).render(values) for flag in dag.get_task("shadow").flags]
    assert flags == ["--dry-run", ""]


def test_an_adoption_may_leave_rows_without_estimates_if_the_form_says_so(bag: DagBag) -> None:
    dag = bag.dags["kalman_stream__tiny"]
    assert dag.params["allow_missing_estimates"] is False
    task: Any = dag.get_task("stream")
    (flag,) = task.flags
    said = [jinja2.Template(flag).render(params={"allow_missing_estimates": one}) for one in (False, True)]
    assert said == ["", "--allow-missing-estimates"]


def test_an_import_is_a_dry_run_unless_the_form_says_otherwise(bag: DagBag) -> None:
    dag = bag.dags["kalman_import__tiny"]
    assert dag.timetable.can_be_scheduled is False
    task: Any = dag.get_task("import")
    params = {**dict(dag.params), "input": "theirs.csv", "to_version": 3}
    values = {name: jinja2.Template(text).render(params=params) for name, text in task.options.items()}
    assert values == {"--model": "tiny", "--input": "theirs.csv", "--to-version": "3"}
    assert [jinja2.Template(flag).render(params=params) for flag in task.flags] == ["--dry-run"]
    assert Path(find_application(task.verb)).is_file()
    assert task.needed == "{{ params.input }}" and "name the table" in task.unless


def test_maintain_is_a_dry_run_by_hand_alone(
    bag: DagBag, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from jinja2 import Template

    dag = bag.dags["kalman_maintain__tiny"]
    assert (dag.params["dry_run"], dag.params["estimates"]) == (True, False)
    assert dag.timetable.can_be_scheduled is False
    said: dict[tuple[str, bool], list[str]] = {}
    for run_type in ("manual", "scheduled"):
        for dry in (True, False):
            values = {"params": {"dry_run": dry, "estimates": dry}, "dag_run": {"run_type": run_type}}
            task: Any = dag.get_task("maintain")
            said[run_type, dry] = [
                text for text in (Template(flag).render(values) for flag in task.flags) if text
            ]
    assert said == {
        ("manual", True): ["--dry-run", "--estimates"],
        ("manual", False): [],
        ("scheduled", True): ["--estimates"],
        ("scheduled", False): [],
    }
    text = (ROOT / "models" / "nile.yaml").read_text()
    (tmp_path / "nile.yaml").write_text(text + 'airflow: {maintain: {schedule: "@daily"}}\n')
    monkeypatch.setenv("KALMAN_MODELS", str(tmp_path))
    assert load_bag().dags["kalman_maintain__nile"].timetable.can_be_scheduled


def test_verify_takes_its_share_from_the_spec_and_its_form(bag: DagBag) -> None:
    from jinja2 import Template

    dag = bag.dags["kalman_verify__tiny"]
    assert (dag.params["share"], dag.params["key"], dag.params["since"]) == ("1%", None, None)
    assert dag.timetable.can_be_scheduled is False
    task: Any = dag.get_task("verify")
    values = {"params": {"share": "100%", "key": "7", "since": None}}
    rendered = {name: Template(value).render(values) for name, value in task.options.items()}
    assert rendered == {"--model": "tiny", "--share": "100%", "--key": "7", "--since": ""}
