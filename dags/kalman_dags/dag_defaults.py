"""Common parts of all DAG families: models, names, assets, default arguments, schedules, and the cut of a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import Asset, CronDataIntervalTimetable, CronTriggerTimetable, Param
from airflow.sdk.definitions.param import ParamsDict
from airflow.sdk.exceptions import AirflowTimetableInvalid

from jobs.specs.airflow import CONTINUOUS, StreamDag
from jobs.specs.loading import load_spec, spec_files
from jobs.specs.model_spec import ModelSpec, SpecError
from jobs.specs.problems import Problem
from kalman_dags.operator import place

START = datetime(2000, 1, 1, tzinfo=UTC)
"""Earliest interval that can be backfilled; `catchup=False` keeps it from meaning anything else."""

WARDEN = "kalman_stream_warden"
"""The only DAG that belongs to no model."""

DRIVEN = ("stream", "monitor", "skill")
"""Verbs that have one driver at a time and may run continuously."""

log = logging.getLogger(__name__)


def models_folder() -> Path:
    """Return the folder of the model specs: KALMAN_MODELS, else `models` beside `dags`."""
    return Path(place("KALMAN_MODELS", "models"))


def specs() -> Iterator[ModelSpec]:
    """Yield every valid spec.

    A broken one is skipped with a line in the log, so that the other models keep their DAGs;
    `model_specs.py` raises it as an import error, where Airflow shows it.
    """
    sound, problems = read_specs()
    for problem in problems:
        log.error("No DAGs for a broken spec: %s", problem)
    yield from sound


def read_specs() -> tuple[list[ModelSpec], list[Problem]]:
    """Return the valid specs of the models folder, and the problems of the others."""
    folder = models_folder()
    sound: list[ModelSpec] = []
    problems: list[Problem] = []
    try:
        for path in spec_files(folder):
            try:
                spec = load_spec(path.stem, folder)
                found = list(_bad_schedules(spec))
            except SpecError as error:
                problems += error.problems
                continue
            problems += found
            if not found:
                sound.append(spec)
    except SpecError as error:
        problems += error.problems
    return sound, problems


def _bad_schedules(spec: ModelSpec) -> Iterator[Problem]:
    for verb in ("ingest", "pretrain", "export", "upgrade", "maintain", *DRIVEN):
        schedule = getattr(spec.airflow, verb).schedule
        for_ever = verb in DRIVEN and schedule == CONTINUOUS
        try:
            if schedule is not None and not for_ever:
                CronTriggerTimetable(schedule, timezone="UTC").validate()
        except AirflowTimetableInvalid as error:
            yield Problem(
                str(spec.source_path),
                f"airflow.{verb}.schedule",
                f"'{schedule}' is not a schedule ({error})",
                "write five fields such as `0 2 * * *`, or a preset such as @daily",
            )


def dag_id(verb: str, model: str) -> str:
    """Return the name of a model's DAG."""
    return f"kalman_{verb}__{model}"


def snapshots(model: str) -> Asset:
    """Return the asset that is updated when a model has a new snapshot."""
    return Asset(name=f"kalman_snapshots__{model}", uri=f"kalman://snapshots/{model}", group="kalman")


def measurements(model: str) -> Asset:
    """Return the asset that is updated when measurements of a model were landed."""
    return Asset(name=f"kalman_measurements__{model}", uri=f"kalman://measurements/{model}", group="kalman")


def estimates(model: str) -> Asset:
    """Return the asset that is updated when a model's stream has caught up."""
    return Asset(name=f"kalman_estimates__{model}", uri=f"kalman://estimates/{model}", group="kalman")


def pool(verb: str, model: str) -> str:
    """Return the name of the one-slot pool for the drivers of a model's stream, monitor or skill query."""
    return f"kalman_{verb}__{model}"


def driven(spec: ModelSpec) -> list[str]:
    """Return those of `DRIVEN` that a model has."""
    there = {"stream": True, "monitor": spec.monitor is not None, "skill": spec.forecast is not None}
    return [verb for verb in DRIVEN if there[verb]]


def section(spec: ModelSpec, verb: str) -> StreamDag:
    """Return the section of the spec for the DAG of one of `DRIVEN`."""
    return getattr(spec.airflow, verb)


def kept_running(verb: str) -> Iterator[ModelSpec]:
    """Yield the models for which one of `DRIVEN` runs continuously."""
    yield from (spec for spec in specs() if verb in driven(spec) and section(spec, verb).continuous)


def run_at_times(verb: str) -> Iterator[ModelSpec]:
    """Yield the models for which one of `DRIVEN` processes what is there and ends."""
    yield from (spec for spec in specs() if verb in driven(spec) and not section(spec, verb).continuous)


def trigger(does: str, ends: str = "") -> Param:
    """Return the form's field for the trigger of a streaming query; `does` is the verb in its description."""
    return Param(
        "available-now",
        type="string",
        pattern=r"^(available-now|[0-9]+([.][0-9]+)?)$",
        title="Trigger",
        description=f"available-now: {does} what is there and end. A number: a micro-batch every so many seconds, "
        f"for a day at most{ends}.",
    )


def at_times(schedule: str | None) -> CronTriggerTimetable | None:
    """Return the timetable whose runs start at the times of a cron expression, in UTC; None: by hand."""
    return CronTriggerTimetable(schedule, timezone="UTC") if schedule else None


def intervals(schedule: str | None) -> CronDataIntervalTimetable | None:
    """Return the timetable whose runs each cover one interval of a cron expression, in UTC; None: by hand."""
    return CronDataIntervalTimetable(schedule, timezone="UTC") if schedule else None


def defaults(spec: ModelSpec, timeout: timedelta, retries: int = 2) -> dict[str, Any]:
    """Return the default arguments of each task of a model's DAG.

    Every verb is idempotent, so every task is retried; refused input is not (see `KalmanOperator`).
    """
    return {
        "owner": spec.airflow.owner,
        "retries": retries,
        "retry_delay": timedelta(seconds=30),
        "retry_exponential_backoff": 2.0,
        "max_retry_delay": timedelta(minutes=15),
        "execution_timeout": timeout,
    }


def tags(spec: ModelSpec, verb: str) -> list[str]:
    """Return a DAG's tags."""
    return sorted({"kalman", verb, spec.name, *spec.airflow.tags})


def arguments(
    verb: str,
    spec: ModelSpec,
    module_doc: str | None,
    description: str,
    timeout: timedelta,
    retries: int = 2,
    **params: Param,
) -> dict[str, Any]:
    """Return the arguments of every family's DAG except the schedule; `params` are the fields of its form."""
    return {
        "dag_id": dag_id(verb, spec.name),
        "description": description,
        "doc_md": doc(module_doc, spec),
        "start_date": START,
        "catchup": False,
        "max_active_runs": 1,
        "tags": tags(spec, verb),
        "default_args": defaults(spec, timeout, retries),
        "params": ParamsDict(params),
    }


def doc(module_doc: str | None, spec: ModelSpec) -> str:
    """Return a DAG's page: its module's docstring, then a description of the model."""
    schedules = (part.schedule for part in (spec.airflow.ingest, spec.airflow.pretrain, spec.airflow.stream))
    ingest, pretrain, stream = (schedule or "by hand" for schedule in schedules)
    lines = [
        (module_doc or "").strip().replace("<model>", spec.name),
        "",
        f"**Model `{spec.name}`, version {spec.version}.** {spec.description}",
        "",
        f"- spec: `{spec.source_path}`",
        f"- key: `{', '.join(spec.key)}`; time: `{spec.time}`; measured: `{', '.join(spec.measurement)}`",
        f"- runs (UTC): ingest {ingest}; pretrain {pretrain}; stream {stream}, and on a new snapshot",
    ]
    return "\n".join(lines)


def as_of(params: Mapping[str, Any], dag_run: Any) -> str:
    """Return the run's cut, ISO 8601: the form's, else the data interval's end, else the run's start.

    All three are stored with the run, so a run that is cleared has the same cut. A run whose
    form names a version has none: the version is its cut.
    """
    if params["to_version"] is not None:
        return ""
    if params["as_of"]:
        return str(params["as_of"])
    return (dag_run.data_interval_end or dag_run.run_after).astimezone(UTC).isoformat()


def learn_from(params: Mapping[str, Any], dag_run: Any, window_us: int | None) -> str:
    """Return the start of a run's learning window, ISO 8601: the form's, else the spec's window before the cut."""
    if params["learn_from"]:
        return str(params["learn_from"])
    cut = as_of(params, dag_run)
    if not cut or window_us is None:
        return ""
    return (datetime.fromisoformat(cut) - timedelta(microseconds=window_us)).isoformat()
