"""Bring the stream of `<model>` to the version of its spec: tested in shadow, approved, then live in one commit.

1. `preview` shows what becomes of every state. If the live generation already has that version, the rest is skipped.
2. `proceed` ends the run here if it is a **dry run, which a run by hand is unless the form says otherwise**. A
   scheduled run continues: it exists to notice that a newer version was deployed.
3. `shadow` (mode blue-green) starts the new version from an export of the live state and lets it process the same
   rows. Its log compares the predictions of both versions and names the report; readers do not see its estimates yet.
4. `approve` waits for a person, to whom it shows the comparison: the answer (better, not worse, worse, or not enough to
   tell), the interval, and the rows and keys that it rests on. (A model with `upgrade: {automatic: true}` in its spec
   has no such gate: a version whose comparison is good goes live by itself; while the rows are not enough to tell, the
   task `promote` is skipped, and the next run compares again.)
5. `promote` lets the shadow catch up, compares once more, and makes it live if the comparison is good. **What predicts
   worse, or cannot be told from the rows that have come, is not promoted, also after an approval**, unless the form's
   *Promote it anyway* was ticked. In the other modes, `replace` ends the old generation and begins the new one, which
   needs a stream without a driver: it runs in the stream's pool; a continuous stream's driver it stops, and Airflow
   starts the next one afterwards.

Mode `repartition` does not change the version: it gives the state the number of partitions and blocks in the spec, or
in the form.

Every step finds what an earlier attempt left, so a run can be cleared or retried at any task. The DAG
`kalman_rollback__<model>` undoes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.providers.standard.operators.python import BranchPythonOperator, ShortCircuitOperator
from airflow.sdk import DAG, Param, chain

from jobs.specs.model_spec import ModelSpec
from kalman_dags import dag_defaults, specs
from kalman_dags.operator import KalmanOperator

BLUE_GREEN = "blue-green"
MODES = (BLUE_GREEN, "stop-start", "retrain", "repartition")

COMPARISON = ("compared on ", "gain per row: ", "answer: ", "verdict: ", "report: ")
"""The lines of the comparison that a person sees who is asked for approval."""


def goes_on(params: Mapping[str, Any], dag_run: Any) -> bool:
    """Return whether a run is more than a dry run."""
    return str(dag_run.run_type).endswith("scheduled") or not params["dry_run"]


def way(params: Mapping[str, Any]) -> str:
    """Return the task that takes the new version live."""
    return "promote" if params["mode"] == BLUE_GREEN else "replace"


def _without_a_driver(spec: ModelSpec) -> dict[str, Any]:
    """Return the arguments of a task that needs a stream without a driver.

    A continuous stream always occupies its pool's only slot, and its driver outlives its runs: there the task itself
    stops the driver.
    """
    if spec.airflow.stream.continuous:
        return {"flags": ["--drain"]}
    return {"pool": dag_defaults.pool("stream", spec.name)}


def _approval(spec: ModelSpec) -> ApprovalOperator:
    return ApprovalOperator(
        task_id="approve",
        subject=f"Let version {spec.version} of {spec.name} take over?",
        body="{{ ti.xcom_pull(task_ids='shadow') or '' }}\n\n"
        "The log of the task `shadow` has more: it compares the new version with the live one on the same rows, and "
        "names the report (in another mode than blue-green: it says what becomes of the states). A version whose "
        "verdict is not good is not promoted by an approval: reject it, and start this DAG again later, when more rows "
        "have come, or with *Promote it anyway*.",
        response_timeout=timedelta(hours=11),
    )


def build(spec: ModelSpec) -> DAG:
    """Make the DAG that upgrades one model's stream."""
    with DAG(
        schedule=dag_defaults.at_times(spec.airflow.upgrade.schedule),
        **dag_defaults.arguments(
            "upgrade",
            spec,
            __doc__,
            f"Bring the stream of {spec.name} to version {spec.version}",
            timeout=timedelta(hours=12),
            dry_run=Param(
                True,
                type="boolean",
                title="Dry run",
                description="Only show what would become of the states.",
            ),
            mode=Param(
                BLUE_GREEN,
                type="string",
                enum=list(MODES),
                title="Mode",
                description="blue-green: prove it in shadow first. stop-start: migrate at once. retrain: from history. "
                "repartition: the same version in another layout.",
            ),
            force=Param(
                False,
                type="boolean",
                title="Promote it anyway",
                description="Of mode blue-green: promote it whatever the comparison says, or without a row to compare.",
            ),
            partitions=Param(
                None,
                type=["null", "integer"],
                minimum=1,
                title="Partitions",
                description="Of mode repartition: how many state partitions (empty: as the spec says).",
            ),
        ),
    ) as dag:
        common = {
            "--model": spec.name,
            "--mode": "{{ params.mode }}",
            "--partitions": "{{ params.partitions or '' }}",
        }
        preview = KalmanOperator(
            task_id="preview",
            verb="upgrade",
            kafka=spec.speaks_to_kafka,
            options=common,
            flags=["--dry-run", "--needed"],
        )
        proceed = ShortCircuitOperator(task_id="proceed", python_callable=goes_on)
        shadow = KalmanOperator(
            task_id="shadow",
            verb="upgrade",
            kafka=spec.speaks_to_kafka,
            options=common,
            flags=["{{ '--no-promote' if params.mode == 'blue-green' else '--dry-run' }}"],
            returned=COMPARISON,
        )
        choose = BranchPythonOperator(task_id="way", python_callable=way)
        promote = KalmanOperator(
            task_id="promote",
            verb="upgrade",
            kafka=spec.speaks_to_kafka,
            options=common,
            # Without a person, rows that are not enough to tell are a reason to wait, not a failure.
            flags=[
                "{{ '--force' if params.force else '' }}",
                *(["--needed"] if spec.upgrade.automatic else []),
            ],
            outlets=[dag_defaults.estimates(spec.name)],
        )
        replace = KalmanOperator(
            task_id="replace",
            verb="upgrade",
            kafka=spec.speaks_to_kafka,
            options=common,
            outlets=[dag_defaults.estimates(spec.name)],
            **_without_a_driver(spec),
        )
        gate = [] if spec.upgrade.automatic else [_approval(spec)]
        chain(preview, proceed, shadow, *gate, choose, [promote, replace])
    return dag


for one in specs.load_specs():
    build(one)
