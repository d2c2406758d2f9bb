"""Land files in the measurements table of `<model>`.

Rejected rows go to `quarantine` with the reason. Landing is idempotent, so a run can be retried, cleared or backfilled
at will. A landed file that has changed since makes the task fail, unless the form says how to treat it. The path comes
from the form or, if the form has none, from the model's spec (`airflow.ingest.path`, in which templates such as `{{
data_interval_start | ds }}` choose the file).
"""

from __future__ import annotations

from typing import Any

from airflow.sdk import DAG, Param

from jobs.specs.model_spec import ModelSpec
from kalman_dags import dag_defaults, specs
from kalman_dags.verb_dag import verb_dag


def build_input_field(spec: ModelSpec) -> Param:
    """Return the form's field for the input to land; the field is required if the spec names no input."""
    path, source = spec.airflow.ingest.path, spec.source
    empty = f" (empty: {path or (source and source.title)})" if path or source else ""
    says: dict[str, Any] = {
        "title": "Input",
        "description": f"File, folder or glob to land, seen from the worker{empty}.",
    }
    if not empty and spec.airflow.ingest.schedule is None:
        return Param(type="string", minLength=1, **says)
    return Param(None, type=["null", "string"], **says)


def build(spec: ModelSpec) -> DAG:
    """Make the DAG that lands one model's files."""
    path = spec.airflow.ingest.path
    return verb_dag(
        spec,
        "ingest",
        __doc__,
        f"Land files for {spec.name}",
        hours=2,
        params={
            "input": build_input_field(spec),
            "history": dag_defaults.build_flag_field(
                "History",
                "Treat the files as history of new keys: pretrain offers their states to the stream.",
            ),
            "changed": Param(
                "refuse",
                type="string",
                enum=["refuse", "append", "new"],
                title="Changed",
                description="What to do with a landed file whose content has changed. refuse: report an error; append: "
                "land the rows added at its end; new: land it whole, as another file.",
            ),
        },
        schedule=dag_defaults.build_interval_timetable(spec.airflow.ingest.schedule),
        kafka=spec.speaks_to_kafka,
        options={
            "--input": "{% if params.input %}{{ params.input }}{% else %}" + (path or "") + "{% endif %}",
            "--changed": "{{ params.changed if params.changed != 'refuse' else '' }}",
        },
        needs=(
            "{{ params.input or '' }}" + (path or ("source" if spec.source else "")),
            f"there is nothing to land: fill in the form's field Input, or write airflow.ingest.path into the "
            f"spec of {spec.name}",
        ),
        outlets=[
            dag_defaults.build_asset("measurements", spec.name),
            *([dag_defaults.build_interval_asset(spec.name)] if spec.airflow.ingest.schedule else []),
        ],
    )


for one in specs.load_specs():
    build(one)
