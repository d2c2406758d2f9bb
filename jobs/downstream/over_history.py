"""Compute windows, rules and forecast scores over a history in one batch pass, with the code of the live queries."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

import pandas as pd
from pyspark.sql import functions as F

from jobs.batch.history_table import list_history_runs
from jobs.core.errors import UserError
from jobs.core.report import Report, format_count
from jobs.downstream.forecast_pairs import (
    ScoringPlan,
    UsedModel,
    build_forecaster,
    join_forecast_pairs,
    join_inputs,
    score_pairs,
)
from jobs.downstream.forecast_skill import (
    count_unmatched,
    format_skill,
    name_scores,
    read_key_parameters,
    summarise_scores,
)
from jobs.downstream.rule_operator import (
    OUTPUT,
    RulePlan,
    build_alert_rows,
    build_event_columns,
    build_rule_packets,
    list_read_columns,
    update_bucket,
)
from jobs.downstream.rules import NEVER
from jobs.downstream.windows import Windows, align_readings
from jobs.lineage.generations import DeployedModel
from jobs.snapshots import manifests
from jobs.snapshots.model_runtime import ship
from jobs.spark.warehouse import Warehouse, format_ddl
from jobs.specs.model_spec import ModelSpec
from jobs.specs.monitor import ForecastSkill, Monitor
from jobs.state.encoding.keys import build_key_kind
from jobs.state.encoding.packets import MEASURED
from jobs.storage.tables import alerts_history, estimates_history, forecast_skill_history, windows_history
from kalman.filters.state_output import OUTPUT as STATE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.snapshots.manifests import Manifest


ROWS_A_BUCKET = 1_000_000


def monitor_history(warehouse: Warehouse, spec: ModelSpec, monitor: Monitor) -> Report:
    """Compute windows and alerts over a model's history, and replace the earlier rows of the same monitor definition.

    Raises:
        UserError: the model has no history.
    """
    rows = read_history(warehouse, spec.name, list_read_columns(spec, monitor))
    specs, unknown = _read_run_specs(warehouse, spec, rows)
    rows = align_readings(rows, spec, specs)
    table = estimates_history(spec.name)
    lines = [
        f"the spec of version {one} is unknown: its rows are read by version {spec.version}"
        for one in unknown
    ]
    data = {"model": spec.name, "table": table, "version": warehouse.latest_version(table)}
    if monitor.windows:
        name = windows_history(spec.name)
        found = Windows(warehouse, spec, monitor, "").complete(rows)
        replace(warehouse, found, name, monitor.definition("windows"))
        lines.append(f"windows over {table} -> {name}")
    if monitor.rules:
        name, kind = alerts_history(spec.name), build_key_kind(spec.key, rows.schema)
        found = build_alert_rows(compute_events(spec, monitor, rows), monitor, kind)
        replace(warehouse, found, name, monitor.definition("rules"))
        mine = warehouse.read(name).filter(F.col("definition") == monitor.definition("rules"))
        counts = {row["status"]: row["count"] for row in mine.groupBy("status").count().collect()}
        raised, cleared = (int(counts.get(status, 0)) for status in ("raised", "cleared"))
        lines.append(f"{format_count(raised, 'alert')} raised and {cleared:,} cleared -> {name}")
        data |= {"raised": raised, "cleared": cleared}
    return Report(lines, data)


def _read_run_specs(
    warehouse: Warehouse, spec: ModelSpec, rows: DataFrame
) -> tuple[dict[str, ModelSpec], list[int]]:
    """Return the spec of each run by another version in a history, and the versions without a known spec."""
    runs: Any = rows.select("generation", "model_version").distinct().collect()
    others = {run: version for run, version in runs if version != spec.version}
    known = {one.model_version: one for one in manifests.read_manifests(warehouse, spec.name)}
    specs = {run: known[at].model_spec(spec.folder) for run, at in others.items() if at in known}
    return specs, sorted({*others.values()} - {*known})


def read_history(warehouse: Warehouse, model: str, columns: Collection[str]) -> DataFrame:
    """Return the estimates of a model's history; columns: columns that they must have.

    Raises:
        UserError: the history has no estimates, or no such column.
    """
    table = estimates_history(model)
    if not warehouse.exists(table):
        raise UserError(
            f"model {model} has no history in {warehouse.root}: make it with "
            f"`kalman-pipeline estimate --model {model}`"
        )
    missing = sorted(set(columns) - set(warehouse.column_names(table)))
    if missing:
        raise UserError(
            f"the history of {model} has no column {' and no column '.join(missing)}: run `kalman-pipeline estimate "
            f"--model {model}` again, which writes it"
        )
    return warehouse.read(table)


def compute_events(spec: ModelSpec, monitor: Monitor, estimates: DataFrame) -> DataFrame:
    """Return the events by which estimates raise and clear alerts (`rule_operator.OUTPUT`)."""
    buckets = max(1, -(-estimates.count() // ROWS_A_BUCKET))
    plan, packed = build_rule_packets(spec, monitor, estimates, buckets)
    return packed.repartition(buckets, "bucket").mapInPandas(_build_event_worker(plan), OUTPUT)


def _build_event_worker(plan: RulePlan) -> Callable[[Iterator[pd.DataFrame]], Iterator[pd.DataFrame]]:
    def work(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        payloads: dict[int, list[bytes]] = {}
        clock = NEVER
        for frame in frames:
            for bucket, payload in zip(frame["bucket"], frame["payload"], strict=True):
                if payload is not None:
                    payloads.setdefault(bucket, []).append(payload)
            clock = max(clock, int(frame["clock"].max()))
        for bucket in sorted(payloads):
            records, events = update_bucket(plan, plan.layout.empty(), payloads[bucket], clock)
            if len(events.key):
                yield pd.DataFrame(build_event_columns(records, events))

    return work


def replace(warehouse: Warehouse, rows: DataFrame, table: str, definition: str) -> None:
    """Replace the rows of a definition in a table in one commit; create the table if it does not exist."""
    warehouse.create(table, format_ddl(rows.schema))
    warehouse.replace(rows, table, [[("definition", "=", definition)]])


def score_history(model: DeployedModel[Warehouse], section: ForecastSkill) -> Report:
    """Score the forecasts from a model's history, and replace the earlier scores of the same section.

    Forecasts for times after the newest row cannot be scored yet, and are left out.

    Raises:
        UserError: the model has no history, the history lacks the measurements, or no run of the history used this
            spec.
    """
    warehouse, spec = model.warehouse, model.spec
    rows = read_history(warehouse, spec.name, {MEASURED})
    of_runs, kind = _list_scored_runs(model, rows), build_key_kind(spec.key, rows.schema)
    used: dict[str, UsedModel] = {}
    for run, made in of_runs.items():
        parameters = {} if made is None else made.parameters
        used[run] = UsedModel(spec, parameters, build_forecaster(spec, parameters, STATE in rows.columns))
    ship(warehouse.spark, spec.definition())
    plan = ScoringPlan.of(spec, section, kind, used)
    chosen = rows.filter(F.col("generation").isin(*of_runs))
    last: Any = chosen.agg(F.unix_micros(F.max("event_time")).alias("last")).first()
    pairs = join_forecast_pairs(chosen, chosen, section, with_unmatched=True)
    pairs = pairs.filter(F.col(MEASURED).isNotNull() | (F.col("event_time") <= last["last"]))
    if plan.controls or plan.inputs:
        pairs = join_inputs(model, pairs)
    scored = score_pairs(pairs, plan, read_key_parameters(warehouse, spec.name, plan, of_runs))
    table = forecast_skill_history(spec.name)
    replace(warehouse, name_scores(spec, section, kind, scored, None), table, section.definition())
    return _report(model, section, table, list(of_runs))


def _list_scored_runs(model: DeployedModel[Warehouse], rows: DataFrame) -> dict[str, Manifest | None]:
    """Return the runs with exactly this spec whose estimates are in the table, and the snapshot that each run used.

    Raises:
        UserError: no run had exactly this spec.
    """
    warehouse, spec = model.warehouse, model.spec
    known = {one.run: one for one in list_history_runs(warehouse, estimates_history(spec.name))}
    there = {row["generation"] for row in rows.select("generation").distinct().collect()}
    mine = [one for name, one in known.items() if name in there and one.fingerprint == spec.fingerprint()]
    if not mine:
        raise UserError(
            f"no estimate in {estimates_history(spec.name)} is of the spec as it is now: make them with "
            f"`kalman-pipeline estimate --model {spec.name}`"
        )
    return {
        one.run: None if one.snapshot is None else manifests.record(warehouse, one.snapshot) for one in mine
    }


def _report(model: DeployedModel[Warehouse], section: ForecastSkill, table: str, runs: list[str]) -> Report:
    summary = summarise_scores(model, section, table)
    lost = count_unmatched(model, section, table).forecasts
    scored = sum(one["forecasts"] for one in summary)
    lines = [
        f"scored {scored:,} forecasts of {format_count(len(runs), 'run')} over the history of {model.name} -> {table}"
    ]
    if not summary:
        lines.append("there is no measurement at a forecast time")
    if lost:
        lines.append(f"{format_count(lost, 'forecast')} met no row at its time; `actual` is null")
    lines += [format_skill(one, section.probability) for one in summary]
    data = {"model": model.name, "rows": scored, "unmatched": lost, "skill": summary, "runs": runs}
    return Report(lines, {**data, "table": table})
