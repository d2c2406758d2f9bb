"""Make the previous version of `<model>` live again, in one commit.

The previous version resumes from its own checkpoint, after the last row that it has processed; the stream's next run
catches up. The generation that was live is retired and keeps its checkpoint, so that a later roll-back can return to
it.

With **last state** in the form, a new generation starts instead from the live generation's state, mapped back to the
older version, and continues with exactly the next row. The stream's driver is stopped first, and may be started again
as soon as the roll-back is done or has failed. A state that cannot be mapped back is refused, and the log names what to
add to the spec.
"""

from __future__ import annotations

from airflow.sdk import DAG

from jobs.specs.model_spec import ModelSpec
from kalman_dags import dag_defaults, specs
from kalman_dags.verb_dag import verb_dag


def build(spec: ModelSpec) -> DAG:
    """Make the DAG that rolls one model's stream back."""
    return verb_dag(
        spec,
        "rollback",
        __doc__,
        f"Make the previous generation of {spec.name} live again",
        hours=1,
        params={
            "to": dag_defaults.build_text_field(
                "To", "A retired generation to return to (empty: the parent of the live one)."
            ),
            "last_state": dag_defaults.build_flag_field(
                "Last state",
                "Continue from the live generation's state, mapped back, not from the older checkpoint.",
            ),
        },
        outlets=[dag_defaults.build_asset("estimates", spec.name)],
    )


for one in specs.load_specs():
    build(one)
