"""Start or resume the stream of `<model>`, and process the newest measurements.

Runs on its schedule and when there is a new snapshot; with `airflow.stream.schedule: on-landing` also when the ingest
DAG has landed measurements. Airflow merges and delays events, so an event means only that something newer exists: the
driver reads from Delta which snapshot to start from, and resumes the checkpoint if a generation is live. A newer
snapshot never replaces a live generation's state by itself; only the form's *Adopt* does that.

Safe to kill, retry and clear at any moment: each measurement is reflected exactly once. The pool
`kalman_stream__<model>` has one slot, so there is one driver; if another process drives the stream, the task is
*skipped*, not failed. **If a run stays in `scheduled`, that pool is missing**: `airflow pools set
kalman_stream__<model> 1 "one driver" --include-deferred`.
"""

from __future__ import annotations

from typing import Any

from airflow.sdk import DAG, AssetOrTimeSchedule, CronTriggerTimetable

from jobs.specs.model_spec import ModelSpec
from kalman_dags import dag_defaults, specs
from kalman_dags.verb_dag import verb_dag

NO_SNAPSHOT = (" has no snapshot that a stream can start from",)


def schedule(spec: ModelSpec) -> Any:
    """Return the stream's schedule: on a new snapshot, and at its times or on landing, as the spec defines."""
    snapshots, cron = dag_defaults.build_asset("snapshots", spec.name), spec.airflow.stream.schedule
    if spec.airflow.stream.on_landing:
        return snapshots | dag_defaults.build_asset("measurements", spec.name)
    if cron is None:
        return [snapshots]
    return AssetOrTimeSchedule(timetable=CronTriggerTimetable(cron, timezone="UTC"), assets=[snapshots])


def build(spec: ModelSpec) -> DAG:
    """Make the DAG that drives one model's stream."""
    return verb_dag(
        spec,
        "stream",
        __doc__,
        f"Continue the estimates of {spec.name} from its snapshot or checkpoint",
        hours=24,
        params={
            "trigger": dag_defaults.trigger(
                "process", " (the execution timeout), then again by retry or schedule"
            ),
            "adopt": dag_defaults.build_text_field(
                "Adopt",
                "Snapshot from which to begin a new generation; the live one retires (empty: resume).",
            ),
            "allow_missing_estimates": dag_defaults.build_flag_field(
                "Allow missing estimates",
                "With Adopt: also where rows would have no live estimate; the failed task says how many.",
            ),
        },
        schedule=schedule(spec),
        # The first landing also starts pretrain, whose snapshot starts the stream again.
        too_early=NO_SNAPSHOT if spec.airflow.stream.on_landing else (),
        outlets=[dag_defaults.build_asset("estimates", spec.name)],
    )


for one in specs.load_specs():
    if not one.airflow.stream.continuous:
        build(one)
