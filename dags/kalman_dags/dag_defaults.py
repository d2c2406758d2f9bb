"""Common parts of all DAGs: assets, fields of forms, timetables, default arguments, and names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

from airflow.sdk import Asset, CronDataIntervalTimetable, CronTriggerTimetable, Param
from airflow.sdk.configuration import conf
from airflow.sdk.definitions.param import ParamsDict

from jobs.specs.model_spec import ModelSpec
from kalman_dags.asset_events import BY_INTERVAL
from kalman_dags.places import find_model_page, name_dag

START = datetime(2000, 1, 1, tzinfo=UTC)
"""The earliest interval for backfills; because of `catchup=False` it has no other effect."""

WARDEN = "kalman_stream_warden"
"""The only DAG that does not belong to a model."""

LONGEST = 4096
"""The maximum number of characters in a form's text, which is also the maximum for a path."""

log = logging.getLogger(__name__)


def match_whole(pattern: str) -> str:
    """Return a pattern that matches only the whole text, because `$` also matches before a final newline."""
    return rf"^({pattern})$(?!\n)"


def restrict_text(param: Param) -> Param:
    """Return a form's field that refuses invalid text: options, control characters, and too many characters.

    A field that already has a pattern or a list of values keeps this pattern or list.
    """
    if "string" not in param.schema.get("type", "string"):
        return param
    if "pattern" not in param.schema and "enum" not in param.schema:
        param.schema["pattern"] = TEXT
    param.schema.setdefault("maxLength", LONGEST)
    return param


def build_asset(kind: str, model: str) -> Asset:
    """Return the asset whose events report that something of a model has been written.

    kind: `measurements` have landed, a snapshot is among `snapshots`, the stream's `estimates` have caught up, or an
        interval of `history` has been estimated.
    """
    return Asset(name=f"kalman_{kind}__{model}", uri=f"kalman://{kind}/{model}", group="kalman")


def build_interval_asset(model: str) -> Asset:
    """Return the asset whose events have the landed intervals as partitions, so that missing intervals are visible."""
    name = f"kalman_measurements_by_interval__{model}"
    return Asset(name=name, uri=f"kalman://measurements/{model}{BY_INTERVAL}", group="kalman")


def read_airflow_root() -> str:
    """Return the path prefix of Airflow's address, for links to its pages; it is often empty."""
    return urlsplit(conf.get("api", "base_url", fallback="") or "").path.rstrip("/")


def name_pool(verb: str, model: str) -> str:
    """Return the name of the one-slot pool for the drivers of a model's stream, monitor or skill query."""
    return f"kalman_{verb}__{model}"


def trigger(does: str, ends: str = "") -> Param:
    """Return the form's field for the trigger of a streaming query; `does` is the verb in the field's description."""
    return Param(
        "available-now",
        type="string",
        pattern=match_whole(r"available-now|[0-9]+([.][0-9]+)?"),
        title="Trigger",
        description=f"available-now: {does} what is there and end. A number: a micro-batch every so many seconds, "
        f"for a day at most{ends}.",
    )


TEXT = match_whole(r"(?!--)[^\x00-\x1f\x7f]*")
"""The pattern of a form's text, which is one line and does not begin like an option."""


def build_text_field(title: str, description: str) -> Param:
    """Return a form's field for a text, which may stay empty."""
    return Param(None, type=["null", "string"], title=title, description=description)


def build_flag_field(title: str, description: str, default: bool = False) -> Param:
    """Return a form's field for a choice of yes or no."""
    return Param(default, type="boolean", title=title, description=description)


def build_number_field(title: str, description: str, least: int) -> Param:
    """Return a form's field for a whole number of at least `least`, which may stay empty."""
    return Param(None, type=["null", "integer"], minimum=least, title=title, description=description)


def build_instant_field(title: str, description: str) -> Param:
    """Return a form's field for an instant, which may stay empty."""
    return Param(
        None,
        type=["null", "string"],
        format="date-time",
        pattern=match_whole(
            r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2}([.][0-9]+)?([Zz]|[+-][0-9]{2}:[0-9]{2})"
        ),
        title=title,
        description=description,
    )


def build_times_timetable(schedule: str | None) -> CronTriggerTimetable | None:
    """Return the timetable of runs at the times of a cron expression, in UTC; None means runs by hand only."""
    return CronTriggerTimetable(schedule, timezone="UTC") if schedule else None


def build_interval_timetable(schedule: str | None) -> CronDataIntervalTimetable | None:
    """Return the timetable with a run for each interval of a cron expression, in UTC; None means runs by hand only."""
    return CronDataIntervalTimetable(schedule, timezone="UTC") if schedule else None


def build_dag_arguments(
    verb: str,
    spec: ModelSpec,
    module_doc: str | None,
    description: str,
    timeout: timedelta,
    schedule: Any = None,
    retries: int = 2,
    params: Mapping[str, Param] | None = None,
) -> dict[str, Any]:
    """Return the arguments of a model's DAG; `params` are the fields of its form, by name.

    A DAG without a schedule is created unpaused, because it runs only by hand. A schedule that it gets later starts at
    once, because Airflow decides this once for each DAG.
    """
    return {
        "dag_id": name_dag(verb, spec.name),
        "dag_display_name": f"{spec.name} · {verb.replace('_', ' ')}",
        "description": description,
        "doc_md": format_dag_doc(module_doc, spec),
        "schedule": schedule,
        "is_paused_upon_creation": False if schedule is None else None,
        "start_date": START,
        "catchup": False,
        "max_active_runs": 1,
        "tags": sorted({"kalman", verb, f"model:{spec.name}", *spec.airflow.tags}),
        # Every verb is idempotent, so every task is retried, except after refused input (see `KalmanOperator`).
        "default_args": {
            "owner": spec.airflow.owner,
            "retries": retries,
            "retry_delay": timedelta(seconds=30),
            "retry_exponential_backoff": 2.0,
            "max_retry_delay": timedelta(minutes=15),
            "execution_timeout": timeout,
        },
        "params": ParamsDict({name: restrict_text(param) for name, param in (params or {}).items()}),
    }


def format_dag_doc(module_doc: str | None, spec: ModelSpec) -> str:
    """Return the text of a DAG's page: the docstring of the DAG's file, then a description of the model."""
    schedules = (part.schedule for part in (spec.airflow.ingest, spec.airflow.pretrain, spec.airflow.stream))
    ingest, pretrain, stream = (schedule or "by hand" for schedule in schedules)
    key = ", ".join(f"`{name}`" for name in spec.key) or "none, all rows are of one system"
    lines = [
        (module_doc or "").strip().replace("<model>", spec.name),
        "",
        f"**Model `{spec.name}`, version {spec.version}.** {spec.description}",
        "",
        f"- spec: `{spec.source_path}`",
        f"- key: {key}; time: `{spec.time}`; measured: `{', '.join(spec.measurement)}`",
        f"- [DAGs, tables, reports and commands of {spec.name}]({read_airflow_root()}{find_model_page(spec.name)})",
        f"- runs (UTC): ingest {ingest}; pretrain {pretrain}; stream {stream}, and on a new snapshot",
    ]
    return "\n".join(lines)
