"""Forecast every key of `<model>` from the state of its stream, or of a snapshot, into the table `forecasts/<model>`.

The forecasts are at the horizons of the spec's section `forecast`, unless the form sets others, and begin at each key's
newest row. The stream is not disturbed: its state is read from the checkpoint at the end of the last micro-batch.
Without a live stream the forecasts begin from the newest snapshot. The rows of a run have the run's id in the column
`run`, and are written in one commit. So a run that is cleared, retried or killed never has its rows twice or in part.
The task's log names the state that was used, and its age.
"""

from __future__ import annotations

from airflow.sdk import DAG

from jobs.specs.model_spec import ModelSpec
from kalman_dags import dag_defaults, specs
from kalman_dags.verb_dag import verb_dag


def build(spec: ModelSpec) -> DAG:
    """Make the DAG that forecasts one model's keys."""
    return verb_dag(
        spec,
        "forecast",
        __doc__,
        f"Forecast the keys of {spec.name} from their live state",
        hours=6,
        params={
            "steps": dag_defaults.build_number_field(
                "Steps",
                "How many steps ahead of each key's newest row (empty: the spec's horizons).",
                least=1,
            ),
            "to": dag_defaults.build_text_field(
                "To", "Up to this time (ISO 8601), in place of a number of steps."
            ),
            "every": dag_defaults.build_text_field("Every", "A step, such as 1h."),
            "key": dag_defaults.build_text_field("Key", "This key alone, as the estimates have it."),
            "snapshot": dag_defaults.build_text_field(
                "Snapshot", "Forecast from this snapshot, or newest (empty: from the live stream)."
            ),
            "output": dag_defaults.build_text_field(
                "Output", "Another table than the model's own: below the warehouse, or a path."
            ),
        },
        schedule=dag_defaults.build_times_timetable(spec.airflow.forecast.schedule),
        options={"--future": spec.airflow.forecast.future, "--run": "{{ run_id }}"},
    )


for one in specs.load_specs():
    if one.forecast is not None:
        build(one)
