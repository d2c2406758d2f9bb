"""Export the state of the stream of `<model>` to a snapshot, so that a recent snapshot always exists.

The state is read from the checkpoint at the end of a committed micro-batch; the stream is not disturbed. Another export
of the same micro-batch gives the same snapshot. If no generation is live yet, the run is skipped.
"""

from __future__ import annotations

from airflow.sdk import DAG

from jobs.specs.model_spec import ModelSpec
from kalman_dags import dag_defaults, specs
from kalman_dags.verb_dag import verb_dag


def build(spec: ModelSpec) -> DAG:
    """Make the DAG that exports one model's state."""
    return verb_dag(
        spec,
        "export",
        __doc__,
        f"Take a snapshot of the live state of {spec.name}",
        hours=2,
        params={
            "batch": dag_defaults.build_number_field(
                "Batch", "A committed micro-batch whose state is still kept (empty: the last).", least=0
            ),
            "monitor": dag_defaults.build_flag_field(
                "Rules of the monitor",
                "Export the states of the monitor's rules, not the stream's; the log names the export.",
            ),
        },
        schedule=dag_defaults.build_times_timetable(spec.airflow.export.schedule),
        flags=["--needed"],
    )


for one in specs.load_specs():
    build(one)
