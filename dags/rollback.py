"""Make the version of `<model>` before the live one live again, in one commit.

It goes on from its own checkpoint, behind the last row that it has seen itself; the stream's next run catches up. The
generation that was live is retired and keeps its checkpoint, so that it can be rolled back to in turn.

With **last state** in the form it begins anew instead, from the live generation's state, carried back to what the older
version's states mean, and goes on from exactly the next row. The stream's driver is asked to end first, and may start
again as soon as that is done or has failed. What has no way back is refused, and the log says what to write.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, Param

from jobs.specs.model_spec import ModelSpec
from kalman_dags import dag_defaults, specs
from kalman_dags.operator import KalmanOperator


def build(spec: ModelSpec) -> DAG:
    """Make the DAG that rolls one model's stream back."""
    with DAG(
        schedule=None,
        **dag_defaults.arguments(
            "rollback",
            spec,
            __doc__,
            f"Make the generation of {spec.name} before the live one live again",
            timeout=timedelta(hours=1),
            to=Param(
                None,
                type=["null", "string"],
                title="Generation",
                description="A retired generation to go back to (empty: the one that the live one came from).",
            ),
            last_state=Param(
                False,
                type="boolean",
                title="Last state",
                description="Go on from the live generation's state, carried back, not from the older checkpoint.",
            ),
        ),
    ) as dag:
        KalmanOperator(
            task_id="rollback",
            verb="rollback",
            options={"--model": spec.name, "--to": "{{ params.to or '' }}"},
            flags=["{{ '--last-state' if params.last_state else '' }}"],
            outlets=[dag_defaults.estimates(spec.name)],
        )
    return dag


for one in specs.load_specs():
    build(one)
