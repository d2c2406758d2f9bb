"""Export the state of the stream of `<model>` to a snapshot, so that there is always a recent one.

The state is read from the checkpoint at the end of a committed micro-batch; the stream is not disturbed. Exporting the
same micro-batch again gives the same snapshot. If no generation is live yet, the run is skipped.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, Param

from jobs.specs.model_spec import ModelSpec
from kalman_dags import dag_defaults, specs
from kalman_dags.operator import KalmanOperator


def build(spec: ModelSpec) -> DAG:
    """Make the DAG that exports one model's state."""
    with DAG(
        schedule=dag_defaults.at_times(spec.airflow.export.schedule),
        **dag_defaults.arguments(
            "export",
            spec,
            __doc__,
            f"Take a snapshot of the live state of {spec.name}",
            timeout=timedelta(hours=2),
            params={
                "batch": Param(
                    None,
                    type=["null", "integer"],
                    minimum=0,
                    title="Batch",
                    description="A committed micro-batch whose state is still kept (empty: the last).",
                ),
                "monitor": Param(
                    False,
                    type="boolean",
                    title="Rules of the monitor",
                    description="Export the states of the monitor's rules, not the stream's; the log names the export.",
                ),
            },
        ),
    ) as dag:
        KalmanOperator(
            task_id="export",
            verb="export",
            options={
                "--model": spec.name,
                "--batch": "{{ params.batch if params.batch is not none else '' }}",
            },
            flags=["--needed", "{{ '--monitor' if params.monitor else '' }}"],
        )
    return dag


for one in specs.load_specs():
    build(one)
