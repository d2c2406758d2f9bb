"""Delete what `<model>` no longer needs: old snapshots, generations and their checkpoints, resolved rows.

The spec's section `retention` says what is kept; the last good snapshot, and what a live or shadow generation or a
roll-back needs, always is. By hand it is a **dry run unless the form says otherwise**: its log lists what would be
deleted, and why everything else stays. A scheduled run deletes. The tables, except for the measurements, are compacted
and vacuumed. A run that was killed can simply be run again.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, Param

from jobs.specs.model_spec import ModelSpec
from kalman_dags import dag_defaults, specs
from kalman_dags.operator import KalmanOperator


def build(spec: ModelSpec) -> DAG:
    """Make the DAG that deletes one model's old data."""
    with DAG(
        schedule=dag_defaults.at_times(spec.airflow.maintain.schedule),
        **dag_defaults.arguments(
            "maintain",
            spec,
            __doc__,
            f"Delete what nothing of {spec.name} needs any more",
            timeout=timedelta(hours=6),
            params={
                "dry_run": Param(
                    True,
                    type="boolean",
                    title="Dry run",
                    description="Only list what would be deleted, and why the rest stays.",
                ),
                "estimates": Param(
                    False,
                    type="boolean",
                    title="Estimates",
                    description="Also remove estimates of removed generations that are not part of the live ones.",
                ),
            },
        ),
    ) as dag:
        KalmanOperator(
            task_id="maintain",
            verb="maintain",
            options={"--model": spec.name},
            flags=[
                "{{ '' if (dag_run.run_type | string).endswith('scheduled') or not params.dry_run else '--dry-run' }}",
                "{{ '--estimates' if params.estimates else '' }}",
            ],
        )
    return dag


for one in specs.load_specs():
    build(one)
