"""Stop the drivers of paused DAGs such as `kalman_stream_forever__<model>`.

A paused DAG runs no task, and its driver is a separate process, so another DAG has to ask the driver to end. This DAG
does so once a minute, for all models; it has no settings. It exists while a spec has `schedule: "@continuous"`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from airflow.providers.standard.operators.python import PythonOperator
from airflow.sdk import DAG, CronTriggerTimetable

from jobs.supervision.driver_log import DriverLog
from jobs.supervision.driver_status import format_log_name, read_driver_status, request_stop
from kalman_dags import dag_defaults, specs
from kalman_dags.places import find_warehouse_root


def stop_paused(ti: Any) -> None:
    """Stop every driver that Airflow started and whose DAG is paused."""
    for verb, model in list_continuous_dags():
        if not ti.get_dag(dag_defaults.name_dag(f"{verb}_forever", model)).is_paused:
            continue
        log = DriverLog.at(find_warehouse_root(), format_log_name(verb, model))
        sight = read_driver_status(log)
        if sight.driven and sight.launch is not None:
            request_stop(log, sight, "its DAG is paused")
            print(f"{model}: the DAG of its {verb} is paused; {sight.text()}, and was asked to end")


def list_continuous_dags() -> Iterator[tuple[str, str]]:
    """Yield verb and model of each continuous DAG."""
    for verb in specs.DRIVEN:
        yield from ((verb, spec.name) for spec in specs.list_continuous_specs(verb))


if any(list_continuous_dags()):
    with DAG(
        dag_defaults.WARDEN,
        schedule=CronTriggerTimetable("* * * * *", timezone="UTC"),
        start_date=dag_defaults.START,
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
