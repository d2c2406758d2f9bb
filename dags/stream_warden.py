"""Stop the drivers of streams whose DAG `kalman_stream_forever__<model>` is paused.

A paused DAG runs no task, and a driver is a process of its own: somebody else has to ask it to end. This DAG does so
once a minute, for all models; there is nothing to set. It is there while a spec says `schedule: "@continuous"`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.providers.standard.operators.python import PythonOperator
from airflow.sdk import DAG, CronTriggerTimetable

from jobs.lease_log import LeaseLog
from jobs.stop import ask
from jobs.watch import look
from kalman_dags import family
from kalman_dags.operator import place


def stop_paused(ti: Any) -> None:
    """Ask every driver to end that Airflow started and whose DAG is paused."""
    for spec in family.specs():
        if (
            not spec.airflow.stream.continuous
            or not ti.get_dag(family.dag_id("stream_forever", spec.name)).is_paused
        ):
            continue
        log = LeaseLog.at(place("KALMAN_WAREHOUSE", "warehouse"), spec.name)
        sight = look(log)
        if sight.driven and sight.launch is not None:
            ask(log, sight, "its DAG is paused")
            print(f"{spec.name}: its DAG is paused; {sight.text()}, and was asked to end")


if any(spec.airflow.stream.continuous for spec in family.specs()):
    with DAG(
        family.WARDEN,
        schedule=CronTriggerTimetable("* * * * *", timezone="UTC"),
        start_date=family.START,
        catchup=False,
        max_active_runs=1,
        is_paused_upon_creation=False,
        description="Stop the drivers of streams whose DAG is paused",
        doc_md=__doc__,
        tags=["kalman", "stream"],
    ):
        PythonOperator(
            task_id="stop_paused",
            python_callable=stop_paused,
            retries=1,
            retry_delay=timedelta(seconds=10),
            execution_timeout=timedelta(minutes=5),
        )
