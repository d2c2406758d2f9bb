"""DAGs that keep a driver running, and DAGs of the queries downstream of a stream: monitor and forecast skill."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from airflow.sdk import DAG, Asset

from jobs.specs.airflow import CONTINUOUS
from jobs.specs.model_spec import ModelSpec
from kalman_dags import dag_defaults, specs
from kalman_dags.supervision.operator import StreamForeverOperator
from kalman_dags.verb_dag import verb_dag


def build_following_dag(
    spec: ModelSpec, verb: str, module_doc: str | None, description: str, does: str
) -> DAG:
    """Make the DAG that runs a model's monitor or skill query, on its schedule or after the stream.

    Args:
        spec: the spec of the model.
        verb: monitor or skill; it is also the name of the task and of the pool.
        module_doc: the docstring of the DAG's file.
        description: the description of the DAG.
        does: the verb in the form's sentence about the present estimates.
    """
    times = dag_defaults.build_times_timetable(specs.select_section(spec, verb).schedule)
    adopts = verb == "monitor" and spec.monitor is not None and bool(spec.monitor.rules)
    adopt = dag_defaults.build_text_field(
        "Adopt",
        "Rules that have changed begin with this export of the former ones' states (empty: as they were).",
    )
    return verb_dag(
        spec,
        verb,
        module_doc,
        description,
        hours=24,
        schedule=times or [dag_defaults.build_asset("estimates", spec.name)],
        params={"trigger": dag_defaults.trigger(does), **({"adopt": adopt} if adopts else {})},
    )


def build_continuous_dag(
    spec: ModelSpec, verb: str, module_doc: str | None, description: str, outlets: Sequence[Asset] = ()
) -> DAG:
    """Make the DAG that keeps the driver of a model's stream, monitor or skill query running."""
    how = specs.select_section(spec, verb)
    with DAG(
        **dag_defaults.build_dag_arguments(
            f"{verb}_forever",
            spec,
            module_doc,
            description,
            timeout=timedelta(minutes=15),
            schedule=CONTINUOUS,
            retries=5,
        ),
    ) as dag:
        StreamForeverOperator(
            task_id=verb,
            verb=verb,
            model=spec.name,
            seconds=how.seconds,
            give_up_after=how.give_up_after,
            kafka=spec.speaks_to_kafka,
            pool=dag_defaults.name_pool(verb, spec.name),
            outlets=list(outlets),
        )
    return dag
