"""Bring the stream of `<model>` to the version of its spec: tested in shadow, approved, then live in one commit.

1. `preview` shows what becomes of every state. If the live generation already has that version, all other tasks are
   skipped.
2. `unless_dry_run` ends the run here if it is a **dry run, which a run by hand is unless the form says otherwise**. A
   scheduled run continues, because its purpose is to notice a newly deployed version.
3. `shadow` (mode blue-green) starts the new version from an export of the live state and lets it process the same rows.
   If the live stream lags and no driver runs it, the same Spark lets it read these rows too, because rows that only one
   version has estimated cannot be compared. It compares the predictions of both versions and writes the report; readers
   do not see the shadow's estimates yet.
4. If the live stream still lags, because another driver runs it, `catch_up` reads the rows unless that driver still
   runs, and `compare` compares again. Otherwise both tasks are skipped.
5. `approve` shows a person the evidence (verdict, interval, rows and keys, losses and gains, a link to the report) and
   waits for the answer. The spec names who may answer, and who is notified (`airflow.upgrade.assigned_users`,
   `.notifiers`). A model with `upgrade: {automatic: true}` in its spec has no such gate: a version whose comparison is
   good goes live by itself. While there are too few rows to decide, the task `promote` is skipped, and the next run
   compares again.
6. `promote` lets the shadow catch up, compares once more, and makes the shadow live if the comparison is good. **A
   version that predicts worse, or that the present rows cannot distinguish, is not promoted, not even after an
   approval**, unless *Force* was ticked in the form of the approval or of the run. A refusal is final: it is not
   retried. In the other modes `switch_over` ends the old generation and begins the new one. This needs a stream without
   a driver, so the task runs in the stream's pool. For a continuous stream the task stops the driver, and Airflow
   starts the next driver afterwards.

Mode `repartition` does not change the version: it gives the state the number of partitions and blocks in the spec, or
in the form.

Every step finds the results of an earlier attempt, so a run can be cleared or retried at any task. The DAG
`kalman_rollback__<model>` undoes the upgrade.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.providers.standard.operators.python import BranchPythonOperator, ShortCircuitOperator
from airflow.sdk import DAG, Param, TriggerRule, chain

from jobs.specs.model_spec import ModelSpec
from kalman_dags import approval, dag_defaults, specs
from kalman_dags.approval import BLUE_GREEN
from kalman_dags.notifiers import build_notifiers
from kalman_dags.operator import KalmanOperator

MODES = (BLUE_GREEN, "stop-start", "retrain", "repartition")

COMPARISON = ("compared on ", "gain per row: ", "answer: ", "verdict: ", "lag: ", "report: ")
"""Prefixes of the comparison's lines that a person sees if the driver's report is unreadable."""

REFUSALS = {
    " was not promoted; ": "In Airflow: start this DAG again when more rows have come, or tick Force in the form of "
    "its approval, or of the run"
}
"""The words of a refusal that a retry would only repeat, and the remedy: a person decides, or more rows must arrive."""

AFTER_A_CHOICE = TriggerRule.NONE_FAILED_MIN_ONE_SUCCESS


def goes_on(params: Mapping[str, Any], dag_run: Any) -> bool:
    """Return whether a run continues after the preview, because it is not a dry run."""
    return str(dag_run.run_type).endswith("scheduled") or not params["dry_run"]


def task_of_mode(params: Mapping[str, Any]) -> str:
    """Return the task that makes the new version live."""
    return "promote" if params["mode"] == BLUE_GREEN else "switch_over"


def lagging(ti: Any, params: Mapping[str, Any], otherwise: str) -> str:
    """Return the task after `shadow`: `catch_up` if the live stream lags the shadow, else `otherwise`."""
    found = ti.xcom_pull(task_ids="shadow") or {}
    lags = found.get("data", {}).get("live_lags") or any(
        line.startswith("lag: ") for line in found.get("lines", ())
    )
    return "catch_up" if params["mode"] == BLUE_GREEN and lags else otherwise


def evidence(ti: Any, params: Mapping[str, Any], model: str) -> str:
    """Return the evidence for the person who approves."""
    preview, shadow, again = (ti.xcom_pull(task_ids=task) for task in ("preview", "shadow", "compare"))
    root = dag_defaults.read_airflow_root()
    return approval.format_approval(model, params["mode"], preview, again or shadow, bool(again), root)


def forced(ti: Any, params: Mapping[str, Any]) -> str:
    """Return the flag that promotes despite the comparison, if the form of the run or of the approval sets it."""
    answer = ti.xcom_pull(task_ids="approve") or {}
    return "--force" if params["force"] or (answer.get("params_input") or {}).get("force") else ""


def build_force_field() -> Param:
    """Return the form's field that promotes a version despite its comparison."""
    return dag_defaults.build_flag_field(
        "Force", "Of mode blue-green: promote it whatever the comparison says, or without a row to compare."
    )


def _choose_pool(spec: ModelSpec) -> dict[str, Any]:
    """Return the pool of the tasks that drive the stream or need it without a driver.

    A continuous stream always occupies the only slot of its pool, and its driver outlives its runs. So with such a
    stream the tasks have no pool, its driver catches up by itself, and `switch_over` stops this driver.
    """
    return {} if spec.airflow.stream.continuous else {"pool": dag_defaults.name_pool("stream", spec.name)}


def _build_approval(spec: ModelSpec) -> ApprovalOperator:
    users = spec.airflow.upgrade.assigned_users
    return ApprovalOperator(
        task_id="approve",
        subject=f"Let version {spec.version} of {spec.name} take over?",
        body="{{ evidence(ti, params, '" + spec.name + "') }}",
        params={"force": build_force_field()},
        assigned_users=[{"id": user, "name": user} for user in users] or None,
        notifiers=build_notifiers(spec),
        response_timeout=timedelta(hours=11),
        trigger_rule=AFTER_A_CHOICE,
    )


def _build_verb_task(spec: ModelSpec, task: str, flags: list[str], **more: Any) -> KalmanOperator:
    """Return a task that runs the verb `upgrade`."""
    options = {
        "--model": spec.name,
        "--mode": "{{ params.mode }}",
        "--partitions": "{{ params.partitions or '' }}",
    }
    return KalmanOperator(
        task_id=task, verb="upgrade", kafka=spec.speaks_to_kafka, options=options, flags=flags, **more
    )


def _catch_up(spec: ModelSpec, pool: dict[str, Any]) -> KalmanOperator:
    """Return the task that lets the live stream catch up; if a driver is running, this driver does so already."""
    return KalmanOperator(
        task_id="catch_up",
        verb="stream",
        kafka=spec.speaks_to_kafka,
        options={"--model": spec.name, "--trigger": "available-now"},
        wait_for_other=True,
        finish_on_kill=True,
        outlets=[dag_defaults.build_asset("estimates", spec.name)],
        **pool,
    )


def _build_tasks(spec: ModelSpec) -> None:
    """Make the DAG's tasks, inside the DAG's context."""
    automatic = spec.upgrade.automatic
    # Without a person, too few rows to decide are a reason to wait, not a failure.
    flags = ["{{ forced(ti, params) }}", *(["--needed"] if automatic else [])]
    live = {"outlets": [dag_defaults.build_asset("estimates", spec.name)]}
    compares = ["{{ '--no-promote' if params.mode == 'blue-green' else '--dry-run' }}"]
    preview = _build_verb_task(spec, "preview", ["--dry-run", "--needed"], returned=COMPARISON)
    unless = ShortCircuitOperator(task_id="unless_dry_run", python_callable=goes_on)
    pool, live_too = _choose_pool(spec), ["{{ '--catch-up' if params.mode == 'blue-green' else '' }}"]
    # Without the pool: the stream goes on beside its shadow, and its lease lets one driver read at a time.
    together = {"flags": [*compares, *live_too], **live} if pool else {"flags": compares}
    shadow = _build_verb_task(spec, "shadow", returned=COMPARISON, **together)
    lags = BranchPythonOperator(
        task_id="if_the_stream_lags",
        python_callable=lagging,
        op_kwargs={"otherwise": "choose_mode" if automatic else "approve"},
    )
    compare = _build_verb_task(spec, "compare", compares, returned=COMPARISON)
    choose = BranchPythonOperator(
        task_id="choose_mode",
        python_callable=task_of_mode,
        trigger_rule=AFTER_A_CHOICE if automatic else TriggerRule.ALL_SUCCESS,
    )
    after = choose if automatic else _build_approval(spec)
    chain(preview, unless, shadow, lags, _catch_up(spec, pool), compare, after)
    chain(lags, after)
    if not automatic:
        chain(after, choose)
    promote = _build_verb_task(spec, "promote", flags, refusals=REFUSALS, **live)
    switch_over = _build_verb_task(spec, "switch_over", [] if pool else ["--drain"], **live, **pool)
    chain(choose, [promote, switch_over])


def build(spec: ModelSpec) -> DAG:
    """Make the DAG that upgrades one model's stream."""
    with DAG(
        user_defined_macros={"evidence": evidence, "forced": forced},
        **dag_defaults.build_dag_arguments(
            "upgrade",
            spec,
            __doc__,
            f"Bring the stream of {spec.name} to version {spec.version}",
            timeout=timedelta(hours=12),
            schedule=dag_defaults.build_times_timetable(spec.airflow.upgrade.schedule),
            params={
                "dry_run": dag_defaults.build_flag_field(
                    "Dry run", "Only show what would become of the states.", default=True
                ),
                "mode": Param(
                    BLUE_GREEN,
                    type="string",
                    enum=list(MODES),
                    title="Mode",
                    description="blue-green: prove it in shadow first. stop-start: migrate at once. retrain: from "
                    "history. repartition: the same version in another layout.",
                ),
                "force": build_force_field(),
                "partitions": dag_defaults.build_number_field(
                    "Partitions",
                    "Of mode repartition: how many state partitions (empty: as the spec says).",
                    least=1,
                ),
            },
        ),
    ) as dag:
        _build_tasks(spec)
    return dag


for one in specs.load_specs():
    build(one)
