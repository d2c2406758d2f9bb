"""Make the previous version of `<model>` live again, in one commit.

It resumes from its own checkpoint, after the last row that it has processed itself; the stream's next run catches up.
The generation that was live is retired and keeps its checkpoint, so that it can be rolled back to in turn.

With **last state** in the form, a new generation starts instead from the live generation's state, mapped back to the
older version, and continues with exactly the next row. The stream's driver is stopped first, and may be started again
as soon as the roll-back is done or has failed. A state that cannot be mapped back is refused, and the log says what to
add to the spec.
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
            f"Make the previous generation of {spec.name} live again",
            timeout=timedelta(hours=1),
            params={
                "to": Param(
                    None,
                    type=["null", "string"],
                    title="To",
                    description="A retired generation to return to (empty: the parent of the live one).",
                ),
                "last_state": Param(
                    False,
                    type="boolean",
                    title="Last state",
                    description="Continue from the live generation's state, mapped back, not from the older "
                    "checkpoint.",
                ),
            },
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
