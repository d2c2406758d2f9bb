"""Read the model specs of the DAGs once per parse, and report broken specs."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG, CronTriggerTimetable
from airflow.sdk.exceptions import AirflowTimetableInvalid

from jobs.core.errors import extract_first_line
from jobs.specs.airflow import CONTINUOUS, ON_LANDING, StreamDag
from jobs.specs.loading import list_spec_files, load_spec
from jobs.specs.model_spec import ModelSpec, SpecError
from jobs.specs.problems import Problem
from kalman_dags import dag_defaults
from kalman_dags.dag_defaults import log
from kalman_dags.notifiers import build_notifiers
from kalman_dags.places import find_models_path
from kalman_dags.templates import find_template_problem

DRIVEN = ("stream", "monitor", "skill")
"""Verbs that have one driver at a time, which may run for ever."""

WORDS = {
    **dict.fromkeys(DRIVEN, (CONTINUOUS,)),
    "stream": (CONTINUOUS, ON_LANDING),
    "pretrain": (ON_LANDING,),
}
"""The words that a verb's schedule may be, apart from a cron expression or a preset."""


def load_specs() -> Iterator[ModelSpec]:
    """Yield every valid spec.

    A broken spec is left out with a line in the log, so that the other models keep their DAGs. `model_specs.py` raises
    the problem as an import error, so that Airflow shows people what to fix.
    """
    sound, problems = read_specs()
    for problem in problems:
        log.error("No DAGs for a broken spec: %s", problem)
    yield from sound


def read_specs() -> tuple[list[ModelSpec], list[Problem]]:
    """Return the valid specs of the models folder, and the problems of the other specs."""
    folder = Path(find_models_path())
    sound: list[ModelSpec] = []
    problems: list[Problem] = []
    try:
        for path in list_spec_files(folder):
            try:
                spec = load_spec(path.stem, folder)
                found = list(_find_bad_settings(spec))
                if not found:
                    _try_dag(spec)
            except SpecError as error:
                problems += error.problems
                continue
            except Exception as error:
                # Whatever is wrong with one spec, the other models keep their DAGs.
                text = f"has no DAGs ({type(error).__name__}: {extract_first_line(error, 200)})"
                problems.append(Problem(str(path), "", text, "mend it, or move it out of the folder"))
                continue
            problems += found
            if not found:
                sound.append(spec)
    except SpecError as error:
        problems += error.problems
    return sound, problems


def _try_dag(spec: ModelSpec) -> None:
    """Make a hidden DAG of a spec, because Airflow refuses some values, such as long tags, only when a DAG is made."""
    DAG(**dag_defaults.build_dag_arguments("forever", spec, None, "", timedelta(hours=1))).validate()


def _find_bad_settings(spec: ModelSpec) -> Iterator[Problem]:
    for verb in type(spec.airflow).model_fields:
        if not hasattr(getattr(spec.airflow, verb), "schedule"):
            continue
        schedule = getattr(spec.airflow, verb).schedule
        try:
            if schedule is not None and schedule not in WORDS.get(verb, ()):
                CronTriggerTimetable(schedule, timezone="UTC").validate()
        except AirflowTimetableInvalid as error:
            either = " or ".join(("a preset such as @daily", *WORDS.get(verb, ())))
            yield Problem(
                str(spec.source_path),
                f"airflow.{verb}.schedule",
                f"'{schedule}' is not a schedule ({error})",
                f"write five fields such as `0 2 * * *`, or {either}",
            )
    how = spec.airflow
    for field, text in (("ingest.path", how.ingest.path), ("forecast.future", how.forecast.future)):
        problem = find_template_problem(text)
        if problem:
            yield Problem(str(spec.source_path), f"airflow.{field}", *problem)
    try:
        build_notifiers(spec)
    except ValueError as error:
        yield Problem(str(spec.source_path), "airflow.upgrade.notifiers", str(error), "or leave it out")


def list_driven_verbs(spec: ModelSpec) -> list[str]:
    """Return the verbs of `DRIVEN` that a model uses."""
    there = {"stream": True, "monitor": spec.monitor is not None, "skill": spec.forecast is not None}
    return [verb for verb in DRIVEN if there[verb]]


def select_section(spec: ModelSpec, verb: str) -> StreamDag:
    """Return the spec's section for the DAG of a verb of `DRIVEN`."""
    return getattr(spec.airflow, verb)


def list_continuous_specs(verb: str, continuous: bool = True) -> Iterator[ModelSpec]:
    """Yield the models for which this verb of `DRIVEN` runs continuously, or else the models for which it does not."""
    for spec in load_specs():
        if verb in list_driven_verbs(spec) and select_section(spec, verb).continuous == continuous:
            yield spec


def run_at_times(verb: str) -> Iterator[ModelSpec]:
    """Yield the models for which this verb of `DRIVEN` processes the present rows and ends."""
    return list_continuous_specs(verb, continuous=False)
