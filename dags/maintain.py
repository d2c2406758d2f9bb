"""Delete what `<model>` no longer needs: old snapshots, generations and their checkpoints, resolved rows.

The spec's section `retention` decides what is kept. The last good snapshot, and everything that a live or shadow
generation or a roll-back needs, is always kept. A run by hand is a **dry run unless the form says otherwise**: its log
lists what would be deleted, and why everything else stays. A scheduled run deletes. The tables, except for the
measurements, are compacted and vacuumed. A killed run can simply be run again.
"""

from __future__ import annotations

from airflow.sdk import DAG

from jobs.specs.model_spec import ModelSpec
from kalman_dags import dag_defaults, specs
from kalman_dags.verb_dag import verb_dag


def build(spec: ModelSpec) -> DAG:
    """Make the DAG that deletes one model's old data."""
    return verb_dag(
        spec,
        "maintain",
        __doc__,
        f"Delete what nothing of {spec.name} needs any more",
        hours=6,
        params={
            "dry_run": dag_defaults.build_flag_field(
                "Dry run", "Only list what would be deleted, and why the rest stays.", default=True
            ),
            "estimates": dag_defaults.build_flag_field(
                "Estimates",
                "Also remove estimates of removed generations that are not part of the live ones.",
            ),
        },
        schedule=dag_defaults.build_times_timetable(spec.airflow.maintain.schedule),
        flags=[
            "{{ '' if (dag_run.run_type | string).endswith('scheduled') or not params.dry_run else '--dry-run' }}"
        ],
    )


for one in specs.load_specs():
    build(one)
