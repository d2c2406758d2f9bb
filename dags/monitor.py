"""Watch the live estimates of `<model>`: windows over time, and rules over keys that raise alerts.

Runs on its schedule, or, without one, when the stream has brought new estimates. It takes what is there and ends; what
it has watched is in its checkpoints, so that every estimate counts once. Safe to kill, retry and clear at any moment.
The pool `kalman_monitor__<model>` has one slot, so that there is one monitor; one that somebody else runs makes the
task *skipped*. The tables are `windows/<model>` and `alerts/<model>`.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG

from jobs.spec import ModelSpec
from kalman_dags import family
from kalman_dags.operator import KalmanOperator


def build(spec: ModelSpec) -> DAG:
    """Make the DAG that watches one model's estimates."""
    cron = spec.airflow.monitor.schedule
    with DAG(
        schedule=family.at_times(cron) if cron else [family.estimates(spec.name)],
        **family.arguments(
            "monitor",
            spec,
            __doc__,
            f"Windows and alerts over the estimates of {spec.name}",
            timeout=timedelta(days=1),
            retries=5,
            trigger=family.trigger("watch"),
        ),
    ) as dag:
        KalmanOperator(
            task_id="monitor",
            verb="monitor",
            kafka=spec.speaks_to_kafka,
            options={"--model": spec.name, "--trigger": "{{ params.trigger }}"},
            finish_on_kill=True,
            pool=family.monitor_pool(spec.name),
        )
    return dag


for one in family.specs():
    if one.monitor is not None and not one.airflow.monitor.continuous:
        build(one)
