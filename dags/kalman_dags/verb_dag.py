"""A DAG with one task, which runs a verb for a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, Param

from jobs.specs.model_spec import ModelSpec
from kalman_dags import dag_defaults
from kalman_dags.operator import KalmanOperator
from kalman_dags.specs import DRIVEN


def verb_dag(
    spec: ModelSpec,
    name: str,
    module_doc: str | None,
    description: str,
    hours: int,
    schedule: Any = None,
    params: Mapping[str, Param] | None = None,
    macros: Mapping[str, Callable[..., str]] | None = None,
    **task: Any,
) -> DAG:
    """Make the DAG whose only task runs a verb for a model.

    Args:
        spec: the spec of the model.
        name: the name of the task and its DAG; also the verb, unless the task's arguments name another verb.
        module_doc: the docstring of the DAG's file.
        description: the description of the DAG.
        hours: the timeout of the task.
        schedule: the timetable of the DAG; None means runs by hand only.
        params: the fields of the form, by name. A field is an option of the verb with the same name, unless the task's
            options or flags name that option.
        macros: functions for templates.
        task: arguments of the `KalmanOperator`; the option `--model` is added to its options. A verb of `DRIVEN` has
            its own pool, more retries, and the time to finish a micro-batch.
    """
    if name in DRIVEN:
        pool = dag_defaults.name_pool(name, spec.name)
        task = {"kafka": spec.speaks_to_kafka, "finish_on_kill": True, "pool": pool, "retries": 5, **task}
    options, flags = {"--model": spec.name, **task.pop("options", {})}, list(task.pop("flags", ()))
    for field, param in (params or {}).items():
        option = f"--{field.replace('_', '-')}"
        if option in options or option in " ".join(flags):
            continue
        if param.schema.get("type") == "boolean":
            flags.append(f"{{{{ '{option}' if params['{field}'] else '' }}}}")
        else:
            options[option] = f"{{{{ '' if params['{field}'] is none else params['{field}'] }}}}"
    with DAG(
        user_defined_macros=dict(macros or {}),
        **dag_defaults.build_dag_arguments(
            name, spec, module_doc, description, timedelta(hours=hours), schedule, params=params
        ),
    ) as dag:
        KalmanOperator(task_id=name, **{"verb": name, **task}, options=options, flags=flags)
    return dag
