"""Keep the monitor of `<model>` running for ever, with one driver at any time.

As for a stream that runs for ever, the task starts a driver, or finds the one that runs, and defers, so that no worker
is held. A monitor that fails or is killed is started again from its checkpoints, after a pause that grows.

**To stop the monitor, pause this DAG.** `kalman-pipeline stop --model <model> --monitor` stops it until
`kalman-pipeline resume --model <model> --monitor`, whoever started it. A run watches for an hour; the next one finds
the monitor running.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG

from jobs.spec import ModelSpec
from jobs.spec_sections import CONTINUOUS
from kalman_dags import family
from kalman_dags.stream_operator import StreamForeverOperator


def build(spec: ModelSpec) -> DAG:
    """Make the DAG that keeps one model's monitor running."""
    with DAG(
        schedule=CONTINUOUS,
        **family.arguments(
            "monitor_forever",
            spec,
            __doc__,
            f"Windows and alerts over the estimates of {spec.name}, for ever",
            timeout=timedelta(minutes=15),
            retries=5,
        ),
    ) as dag:
        StreamForeverOperator(
            task_id="monitor",
            verb="monitor",
            model=spec.name,
            seconds=spec.airflow.monitor.seconds,
            kafka=spec.speaks_to_kafka,
            pool=family.monitor_pool(spec.name),
        )
    return dag


for one in family.specs():
    if one.monitor is not None and one.airflow.monitor.continuous:
        build(one)
