"""Verify the live estimates of `<model>`: recompute a share of its keys from their lineage, and compare bit by bit.

The stream is not disturbed. Each day's run verifies other keys. A difference fails the task at once, with key, row and
first difference, because a retry would find it again. If there is nothing to verify, or a part cannot be verified, the
run is skipped and its log gives the reason. The retry of a killed run continues it.
"""

from __future__ import annotations

from airflow.sdk import DAG, Param

from jobs.specs.model_spec import ModelSpec
from kalman_dags import dag_defaults, specs
from kalman_dags.verb_dag import verb_dag


def build(spec: ModelSpec) -> DAG:
    """Make the DAG that verifies one model's live estimates."""
    return verb_dag(
        spec,
        "verify",
        __doc__,
        f"Recompute live estimates of {spec.name} and compare",
        hours=12,
        params={
            "share": Param(
                spec.airflow.verify.share,
                type="string",
                pattern=dag_defaults.match_whole(r"[0-9]+([.][0-9]+)?%"),
                title="Share",
                description="Share of the keys; 100% takes all.",
            ),
            "key": dag_defaults.build_text_field("Key", "This key alone, as the estimates have it."),
            "since": dag_defaults.build_text_field(
                "Since", "Compare estimates from this event time on (ISO 8601; empty: all)."
            ),
        },
        schedule=dag_defaults.build_times_timetable(spec.airflow.verify.schedule),
    )


for one in specs.load_specs():
    build(one)
