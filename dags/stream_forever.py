"""Keep the stream of `<model>` running for ever, with one driver at any time.

The task starts a driver, or finds the one that runs, and defers, so that no worker is held. A driver is a process of
its own: it goes on when task, worker, scheduler or triggerer die. One that fails or is killed is started again from
its checkpoint, after a pause that grows; each measurement is reflected exactly once whatever happens.

**To stop the stream, pause this DAG**: the driver finishes its micro-batch within a minute or two. Switched on again,
it goes on. A task that is cleared, or whose state is marked, stops its driver too, and is followed by the next run.
`kalman-pipeline stop --model <model>` stops it until `kalman-pipeline resume --model <model>`, whoever started it.

A run watches for an hour; the next one finds the driver running.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG

from jobs.spec import ModelSpec
from jobs.spec_sections import CONTINUOUS
from kalman_dags import family
from kalman_dags.stream_operator import StreamForeverOperator


def build(spec: ModelSpec) -> DAG:
    """Make the DAG that keeps one model's stream running."""
    with DAG(
        schedule=CONTINUOUS,
        **family.arguments(
            "stream_forever",
            spec,
            __doc__,
            f"Keep the estimates of {spec.name} up to date, for ever",
            timeout=timedelta(minutes=15),
            retries=5,
        ),
    ) as dag:
        StreamForeverOperator(
            task_id="stream",
            model=spec.name,
            seconds=spec.airflow.stream.seconds,
            kafka=spec.speaks_to_kafka,
            pool=family.stream_pool(spec.name),
            outlets=[family.estimates(spec.name)],
        )
    return dag


for one in family.specs():
    if one.airflow.stream.continuous:
        build(one)
