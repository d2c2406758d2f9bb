"""Estimate every row of `<model>` in batch, into `estimates_history/<model>`.

The run's data interval determines the rows: rows with an event time in the interval are estimated, and their estimates
are replaced in the table. So a run can be cleared, and any part of the past can be backfilled, even while a stream is
live, because the stream's estimates stay as they are. The states before the interval come from the newest snapshot that
reflects exactly the rows before it. Without such a snapshot these rows are filtered too. A run by hand without an
interval estimates all rows. The form overrides the interval. The retry of a killed run continues after the last commit.
"""

from __future__ import annotations

from airflow.sdk import DAG

from jobs.specs.model_spec import ModelSpec
from kalman_dags import cut, dag_defaults, specs
from kalman_dags.verb_dag import verb_dag


def build(spec: ModelSpec) -> DAG:
    """Make the DAG that estimates one model's history."""
    return verb_dag(
        spec,
        "estimate",
        __doc__,
        f"Estimate every row of {spec.name} in batch",
        hours=12,
        params={
            "from": dag_defaults.build_instant_field(
                "From",
                "Rows from this event time on (empty: the beginning of the run's data interval).",
            ),
            "to": dag_defaults.build_instant_field(
                "To", "Rows before this event time (empty: the end of the run's data interval)."
            ),
            "snapshot": dag_defaults.build_text_field(
                "Snapshot",
                "Take parameters from this snapshot; none: the spec's values (empty: the best one).",
            ),
            "smooth": dag_defaults.build_flag_field(
                "Smooth", "Also estimate each row's state from all rows of its key before the end."
            ),
        },
        schedule=dag_defaults.build_interval_timetable(spec.airflow.estimate.schedule),
        macros={"first": cut.first, "last": cut.last},
        options={
            "--from": "{{ first(params, dag_run) }}",
            "--to": "{{ last(params, dag_run) }}",
        },
        outlets=[dag_defaults.build_asset("history", spec.name)],
    )


for one in specs.load_specs():
    build(one)
