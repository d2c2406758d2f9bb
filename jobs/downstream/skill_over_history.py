"""Score forecasts from a history's estimates in one batch pass, with the code of the live query."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from jobs.core.errors import UserError
from jobs.core.report import Report, plural
from jobs.downstream.forecast_inputs import with_inputs
from jobs.downstream.forecast_pairs import (
    ScoringPlan,
    check_spec,
    forecaster_of,
    forecasting_definition,
    has_key_parameters,
    pair_rows,
    score_pairs,
)
from jobs.downstream.forecast_skill import key_parameters, named, skill_line, summary_of, unmatched_of
from jobs.downstream.over_history import history_of, replace
from jobs.encoding.keys import key_kind
from jobs.encoding.packet_kinds import MEASURED
from jobs.history.table import Run, runs_of
from jobs.snapshots import manifests
from jobs.spark.user_functions import ship
from jobs.spark.warehouse import Warehouse
from jobs.specs.forecast import ForecastSkill
from jobs.specs.model_spec import ModelSpec
from jobs.state.key_groups import GroupBegin, group_begin
from jobs.storage.tables import estimates_history, forecast_skill_history
from kalman.filters.state_output import OUTPUT as STATE

if TYPE_CHECKING:
    from jobs.snapshots.manifests import Manifest


def skill_history(warehouse: Warehouse, spec: ModelSpec, section: ForecastSkill) -> Report:
    """Score the forecasts from a model's history, and replace the scores of the same section.

    Forecasts for times after the newest row are not due, and are left out.

    Raises:
        UserError: the model has no history, the history lacks the measurements, or no run in it used this spec.
    """
    rows = history_of(warehouse, spec.name)
    if MEASURED not in rows.columns:
        raise UserError(
            f"the history of {spec.name} has no column of measurements: write outputs: {{measured: true}} and run "
            f"`kalman-pipeline estimate --model {spec.name}` again"
        )
    of_runs = _runs(warehouse, spec, rows)
    plan = _plan(warehouse, spec, section, of_runs, rows)
    chosen = rows.filter(F.col("generation").isin(*of_runs))
    last: Any = chosen.agg(F.unix_micros(F.max("event_time")).alias("last")).first()
    pairs = pair_rows(chosen, chosen, section, with_unmatched=True)
    pairs = pairs.filter(F.col(MEASURED).isNotNull() | (F.col("event_time") <= last["last"]))
    if plan.controls or plan.inputs:
        pairs = with_inputs(warehouse, spec, pairs)
    own = [
        key_parameters(warehouse, spec.name, run, made)
        for run, made in of_runs.items()
        if made is not None and has_key_parameters(plan.kernels[run])
    ]
    scored = score_pairs(pairs, plan, reduce(DataFrame.unionByName, own) if own else None)
    table, kind = forecast_skill_history(spec.name), key_kind(spec.key, rows.schema)
    replace(warehouse, named(spec, section, kind, scored, None), table, section.definition())
    return _report(warehouse, spec, section, table, list(of_runs))


def _runs(warehouse: Warehouse, spec: ModelSpec, rows: DataFrame) -> dict[str, Manifest | None]:
    """Return the runs with exactly this spec whose estimates are in the table, and the snapshot of each.

    Raises:
        UserError: there is no such run.
    """
    known = {one.run: one for one in runs_of(warehouse, estimates_history(spec.name))}
    there = {row["generation"] for row in rows.select("generation").distinct().collect()}
    mine = [one for name, one in known.items() if name in there and one.fingerprint == spec.fingerprint()]
    if not mine:
        raise UserError(
            f"no estimate in {estimates_history(spec.name)} is of the spec as it is now: make them with "
            f"`kalman-pipeline estimate --model {spec.name}`"
        )
    return {one.run: _snapshot_of(warehouse, one) for one in mine}


def _snapshot_of(warehouse: Warehouse, run: Run) -> Manifest | None:
    return None if run.snapshot is None else manifests.record(warehouse, run.snapshot)


def _plan(
    warehouse: Warehouse,
    spec: ModelSpec,
    section: ForecastSkill,
    runs: dict[str, Manifest | None],
    rows: DataFrame,
) -> ScoringPlan:
    """Return the forecasting plan with each run's parameters."""
    kind = key_kind(spec.key, rows.schema)
    kernels: dict[str, Any] = {}
    begins: dict[str, GroupBegin] = {}
    for run, made in runs.items():
        parameters = {} if made is None else made.parameters
        kernels[run] = forecaster_of(spec, parameters, STATE in rows.columns)
        begin = group_begin(kind, forecasting_definition(spec), parameters)
        if begin is not None:
            begins[run] = begin
    ship(warehouse.spark, spec.definition())
    steps = check_spec(spec, section)
    widths = len(spec.control), len(spec.input_names)
    return ScoringPlan(kernels, spec.unit_us, steps, section.probability, begins, *widths)


def _report(
    warehouse: Warehouse, spec: ModelSpec, section: ForecastSkill, table: str, runs: list[str]
) -> Report:
    summary = summary_of(warehouse, spec, section, table)
    lost = unmatched_of(warehouse, spec, section, table).forecasts
    scored = sum(one["forecasts"] for one in summary)
    lines = [
        f"scored {scored:,} forecasts of {plural(len(runs), 'run')} over the history of {spec.name} -> {table}"
    ]
    if not summary:
        lines.append("there is no measurement at a forecast time")
    if lost:
        lines.append(f"{plural(lost, 'forecast')} met no row at its time; `actual` is null")
    lines += [skill_line(one, section.probability) for one in summary]
    data = {"model": spec.name, "rows": scored, "unmatched": lost, "skill": summary, "runs": runs}
    return Report(lines, {**data, "table": table})
