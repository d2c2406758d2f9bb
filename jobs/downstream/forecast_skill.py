"""Score forecasts of the live estimates against later measurements, as a streaming query."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from jobs.core.errors import UserError
from jobs.core.report import Report, format_count
from jobs.downstream.forecast_pairs import (
    ScoringPlan,
    UsedModel,
    build_forecaster,
    check_spec,
    has_key_parameters,
    join_forecast_pairs,
    join_inputs,
    needs_state,
    score_pairs,
)
from jobs.downstream.queries import SKILL, begin_query, list_queries
from jobs.downstream.runner import LiveQueries
from jobs.lineage import generations
from jobs.lineage.compatibility import PARTITIONS
from jobs.lineage.generations import DeployedModel
from jobs.snapshots import manifests
from jobs.snapshots.learned import NONE
from jobs.snapshots.model_runtime import ship
from jobs.snapshots.verified_rows import read_rows
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.specs.monitor import ForecastSkill
from jobs.state.encoding.keys import build_key_columns, build_key_kind
from jobs.state.encoding.packets import MEASURED
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.tables import estimates, forecast_skill
from kalman.filters.own_parameters import FIELD
from kalman.filters.state_output import OUTPUT as STATE

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

    from jobs.snapshots.manifests import Manifest
    from jobs.state.encoding.keys import KeyKind

_get_row_columns = attrgetter("measurement", "control", "input_names", "time_unit")
"""What two specs must have in common so that their rows can be scored together."""


@dataclass
class ForecastScorer(LiveQueries):
    """One run of the query that scores forecasts."""

    section: ForecastSkill
    sink: Scores | None = None
    queries: tuple[StreamingQuery, ...] = ()
    sources: dict[str, Manifest | None] = field(default_factory=dict)
    """The snapshot whose learned parameters forecast for each generation; None for a generation without a snapshot."""
    is_outer: bool = True
    """Whether the join returns unmatched forecasts."""
    with_state: bool = False
    """Whether the pairs contain the filter's states."""
    by_mixture: bool = False
    """Whether modes are forecast from the mixture's mean and covariance, as in earlier releases."""

    label = "the forecast skill"

    @property
    def model(self) -> DeployedModel[Warehouse]:
        """Return the handle of the model."""
        return DeployedModel(self.spec, self.warehouse)

    def start(self) -> list[StreamingQuery]:
        """Start the only query of the run."""
        table = self.warehouse.read(estimates(self.spec.name))
        (query,) = list_queries(self.spec, SKILL)
        if self.sink is None:
            kind = build_key_kind(self.spec.key, table.schema)
            begun = begin_query(self.warehouse, query, STATE in table.columns)
            self.is_outer, self.with_state = begun.is_outer, begun.with_state
            self.sink = Scores(self.warehouse, self.spec, self.section, begun.application, kind)
        spark = self.warehouse.spark
        spark.conf.set("spark.sql.shuffle.partitions", _find_partition_count(self.model, query.checkpoint))
        # Spark stores the watermark policy in the checkpoint, so another policy needs another definition and
        # checkpoint.
        spark.conf.set("spark.sql.streaming.multipleWatermarkPolicy", self.section.watermark_policy)
        measurements = len(self.spec.measurement)
        origins, actuals = self.source(query), self.source(query, 1)
        if not self.with_state:
            origins = origins.drop(STATE)
            self._check_without_states(STATE in table.columns)
        plan = self._plan()
        origins, actuals = (_select_generations(rows, plan, measurements) for rows in (origins, actuals))
        pairs = join_forecast_pairs(origins, actuals, self.section, self.is_outer)
        own = read_key_parameters(self.warehouse, self.spec.name, plan, self.sources)
        if plan.controls or plan.inputs:  # scoring needs the tables as they are when the micro-batch runs
            self.sink.score = lambda found: score_pairs(join_inputs(self.model, found), plan, own)
        else:
            pairs = score_pairs(pairs, plan, own)
        running = self.start_query(pairs, query, self.sink)
        self.queries = (*self.queries, running)
        return [running]

    def _check_without_states(self, are_there: bool) -> None:
        """Refuse a model whose forecasts need the filter's states if the query began without these states.

        are_there: whether the estimates table has the states.
        """
        if not needs_state(self.spec):
            return
        name, why = self.spec.name, "without which this kind of filter cannot be forecast"
        try:
            build_forecaster(self.spec, {}, with_state=False)
        except UserError as error:
            if are_there:
                raise UserError(
                    f"the skill of {name} was begun before its estimates had the filter's states, {why}: change the "
                    f"section `forecast`, and it begins anew"
                ) from error
            raise UserError(
                f"the estimates of {name} have no states of the filter yet, {why}: its stream writes them beside the "
                f"rows that it reads from now on: land newer rows, run `kalman-pipeline stream --model {name}`, then "
                f"`kalman-pipeline skill --model {name}`"
            ) from error
        self.by_mixture = True

    def _plan(self) -> ScoringPlan:
        """Return the forecasting plan for each counted generation that has the measurements of the spec.

        Raises:
            UserError: the live generation cannot be forecast, or cannot be forecast with the parameters of the named
                snapshot.
        """
        known = {one.generation: one for one in generations.read_generations(self.warehouse, self.spec.name)}
        used: dict[str, UsedModel] = {}
        for place, name in enumerate(self.generations):
            manifest = manifests.record(self.warehouse, known[name].snapshot_id)
            if manifest is None:
                continue
            spec = manifest.model_spec(self.spec.folder)
            try:
                check_spec(spec, self.section)
                if _get_row_columns(spec) == _get_row_columns(self.spec):
                    source, parameters = self._find_learned(manifest)
                    kernel = build_forecaster(spec, parameters, self.with_state)
                    used[name] = UsedModel(spec, parameters, kernel)
                    self.sources[name] = source if parameters else None
                    ship(self.warehouse.spark, spec.definition())
            except UserError:
                if place == 0:
                    raise
        kind = build_key_kind(self.spec.key, self.warehouse.read(estimates(self.spec.name)).schema)
        return ScoringPlan.of(self.spec, self.section, kind, used)

    def _find_learned(self, manifest: Manifest) -> tuple[Manifest, dict[str, Any]]:
        """Return the snapshot whose parameters forecast for a generation, and these parameters.

        manifest: the snapshot from which the generation began; its parameters made the generation's estimates.

        Raises:
            UserError: the named snapshot does not exist, or belongs to another model.
        """
        wanted = self.section.snapshot
        if wanted is None:
            return manifest, manifest.parameters
        if wanted == NONE:
            return manifest, {}
        found = manifests.find(self.warehouse, wanted)
        if found is None or found.model != self.spec.name:
            raise UserError(f"--snapshot {wanted}: model {self.spec.name} has no such snapshot")
        if found.fingerprint != manifest.fingerprint:
            raise UserError(
                f"--snapshot {wanted}: it is of version {found.model_version} of {self.spec.name}, and the live "
                f"estimates are of version {manifest.model_version} as its spec was when {manifest.snapshot_id} was "
                f"made: name a snapshot of that, or leave the option out"
            )
        return found, found.parameters

    def format_progress(self) -> str:
        """Return the number of scored forecasts as text."""
        return "" if self.sink is None else f"{self.sink.rows:,} forecasts scored"

    def report(self, seconds: float) -> Report:
        """Return the report of this run, with the skill over all runs."""
        rows = 0 if self.sink is None else self.sink.rows
        late = sum(_count_dropped_rows(query) for query in self.queries)
        scores = self.model, self.section, forecast_skill(self.spec.name)
        summary = summarise_scores(*scores)
        unmatched = count_unmatched(*scores) if self.is_outer else None
        scored = rows - (0 if self.sink is None else self.sink.unmatched)
        lines = [f"scored {scored:,} forecasts of {self.spec.name} against measurements, {seconds:.1f} s"]
        if late:
            lines.append(
                f"{late:,} estimates or measurements were late by the watermark and paired with nothing"
            )
        if not summary:
            lines.append("there is no measurement at a forecast time yet")
        if self.by_mixture:
            lines.append(
                "the modes are forecast from the mixture's mean and covariance, as the query was begun without the "
                "states of the modes; with a changed section `forecast` it begins anew, with them"
            )
        lines += _format_unmatched(unmatched, forecast_skill(self.spec.name))
        lines += [
            f"forecasts of {name} with the parameters of snapshot {one.snapshot_id}"
            for name, one in self.sources.items()
            if one is not None
        ]
        lines += [format_skill(one, self.section.probability) for one in summary]
        data = {
            "model": self.spec.name,
            "rows": scored,
            "unmatched": None if unmatched is None else unmatched.forecasts,
            "unmatched_keys": None if unmatched is None else unmatched.keys,
            "late": late,
            "state_rows": sum(_count_state_rows(query) for query in self.queries[-1:]),
            "skill": summary,
            "snapshots": {name: one and one.snapshot_id for name, one in self.sources.items()},
            "seconds": seconds,
        }
        return Report(lines, data)


@dataclass
class Scores:
    """The `foreachBatch` function that stores scored forecasts."""

    warehouse: Warehouse
    spec: ModelSpec
    section: ForecastSkill
    application: str
    kind: KeyKind
    rows: int = 0
    unmatched: int = 0
    score: Callable[[DataFrame], DataFrame] = lambda found: found
    """Function that scores the pairs of a micro-batch; it changes nothing if the query has already scored the pairs."""

    def __call__(self, found: DataFrame, batch_id: int) -> None:
        """Append the rows of a micro-batch. A repeated call changes nothing."""
        found = self.score(found).persist()
        try:
            count = found.count()
            self.unmatched += found.filter(F.col("actual").isNull()).count()
            if count:
                self.warehouse.append(
                    name_scores(self.spec, self.section, self.kind, found, batch_id).coalesce(1),
                    forecast_skill(self.spec.name),
                    (self.application, batch_id),
                    more_columns=True,
                )
            self.rows += count
        finally:
            found.unpersist()


def read_key_parameters(
    warehouse: Warehouse, model: str, plan: ScoringPlan, sources: Mapping[str, Manifest | None]
) -> DataFrame | None:
    """Return generation, key and `parameters` of the keys with learned parameters; None if there are no such keys.

    sources: for each generation or run, the snapshot whose parameters forecast for it.
    """
    parts = [
        read_rows(warehouse, source.snapshot_id, model).select(
            F.lit(name).alias("generation"), "key", F.col("extras")[FIELD].alias(FIELD)
        )
        for name, source in sources.items()
        if source is not None and has_key_parameters(plan.kernels[name])
    ]
    return reduce(DataFrame.unionByName, parts) if parts else None


def name_scores(
    spec: ModelSpec, section: ForecastSkill, kind: KeyKind, found: DataFrame, batch_id: int | None
) -> DataFrame:
    """Replace the numbers of measurements and horizons in scored rows (`forecast_pairs.SCORED_SCHEMA`) by names.

    batch_id: number of the micro-batch; None for rows of history.
    """
    lengths = [length / 1e6 for length in section.lengths]

    def nth(values: list[Any], column: str) -> Any:
        return F.get(F.array(*(F.lit(value) for value in values)), F.col(column))

    return found.select(
        "key",
        *([] if kind.is_plain_key else build_key_columns(kind, F.col("key"))),
        nth(spec.measurement, "measurement").alias("measurement"),
        nth(list(section.horizons), "horizon").alias("horizon"),
        nth(lengths, "horizon").alias("horizon_seconds"),
        F.timestamp_micros("made_at").alias("made_at"),
        F.timestamp_micros("event_time").alias("event_time"),
        *("mean", "variance", "lower", "upper", "actual", "error", "inside", "crps", "log_score"),
        "model_version",
        "generation",
        F.lit(section.definition()).alias("definition"),
        F.lit(batch_id).cast("bigint").alias("batch_id"),
    )


def summarise_scores(
    model: DeployedModel[Warehouse], section: ForecastSkill, table: str
) -> list[dict[str, Any]]:
    """Return the scores of each measurement and horizon; `coverage` should equal the `probability` of the section.

    table: name of the table with the scored forecasts.
    """
    if not model.warehouse.exists(table):
        return []
    rows = model.warehouse.read(table).filter(F.col("definition") == section.definition())
    made = (
        rows.filter(F.col("actual").isNotNull())
        .groupBy("measurement", "horizon", "horizon_seconds")
        .agg(
            F.count("*").alias("forecasts"),
            F.avg(F.col("inside").cast("double")).alias("coverage"),
            F.avg("error").alias("mean_error"),
            F.sqrt(F.avg(F.col("error") * F.col("error"))).alias("rmse"),
            F.avg("crps").alias("crps"),
            F.avg("log_score").alias("log_score"),
        )
    )
    order = {name: place for place, name in enumerate(model.spec.measurement)}
    found = [row.asDict() for row in made.collect()]
    return sorted(found, key=lambda one: (order.get(one["measurement"], len(order)), one["horizon_seconds"]))


class Unmatched(NamedTuple):
    """Numbers of unmatched forecasts and of their keys, and the keys with the most unmatched forecasts, with counts."""

    forecasts: int
    keys: int
    most: list[tuple[str, int]]


def count_unmatched(model: DeployedModel[Warehouse], section: ForecastSkill, table: str) -> Unmatched:
    """Count the forecasts in a table that no row has matched; the measurements of one forecast count once."""
    if not model.warehouse.exists(table):
        return Unmatched(0, 0, [])
    mine = (F.col("definition") == section.definition()) & F.col("actual").isNull()
    rows = model.warehouse.read(table).filter(mine & (F.col("measurement") == model.spec.measurement[0]))
    by_key = rows.groupBy("key").agg(F.count("*").alias("forecasts"))
    total: Any = by_key.agg(F.sum("forecasts").alias("forecasts"), F.count("*").alias("keys")).first()
    most = by_key.orderBy(F.desc("forecasts"), "key").limit(5).collect()
    return Unmatched(total["forecasts"] or 0, total["keys"], [(one["key"], one["forecasts"]) for one in most])


def _format_unmatched(found: Unmatched | None, table: str) -> list[str]:
    if found is None:
        return [
            "forecasts that no row has matched are not counted, as an earlier release has begun the query; with a "
            "changed section `forecast` it begins anew"
        ]
    if not found.forecasts:
        return []
    keys = ", ".join(f"{key} ({count:,})" for key, count in found.most)
    others = found.keys - len(found.most)
    more = f" and {format_count(others, 'more key')}" if others else ""
    return [
        f"never matched: {format_count(found.forecasts, 'forecast')}, as nothing was measured at their time, of "
        f"{keys}{more}; in {table} their `actual` is null"
    ]


def format_skill(one: dict[str, Any], probability: float) -> str:
    """Return the scores of one measurement and horizon (from `summarise_scores`) as text."""

    def number(name: str) -> str:
        return "-" if one[name] is None or not math.isfinite(one[name]) else f"{one[name]:.4g}"

    inside = "-" if one["coverage"] is None else f"{100 * one['coverage']:.1f} %"
    return (
        f"{one['measurement']} {one['horizon']} ahead: {one['forecasts']:,} forecasts, {inside} inside the "
        f"{100 * probability:g} % interval, mean error {number('mean_error')}, RMSE {number('rmse')}, "
        f"CRPS {number('crps')}, log score {number('log_score')}"
    )


def _select_generations(rows: DataFrame, plan: ScoringPlan, m: int) -> DataFrame:
    """Remove the estimates of generations whose measurements differ from those of the spec."""
    mine = F.col("generation").isin(*plan.kernels)
    return rows.filter(mine & (F.coalesce(F.size(MEASURED), F.lit(m)).isin(m, -1)))


def _find_partition_count(model: DeployedModel[Warehouse], checkpoint: str) -> int:
    """Return the number of partitions of the join, which Spark fixes in the first micro-batch."""
    kept = Checkpoint(model.warehouse, checkpoint).settings().get(PARTITIONS)
    return int(kept or model.spec.stream.partitions or model.warehouse.spark.sparkContext.defaultParallelism)


def _count_dropped_rows(query: StreamingQuery) -> int:
    """Return how many rows arrived behind the watermark in the micro-batches whose progress Spark still has."""
    return sum(
        int(operator.get("numRowsDroppedByWatermark", 0))
        for progress in query.recentProgress
        for operator in json.loads(progress.json)["stateOperators"]
    )


def _count_state_rows(query: StreamingQuery) -> int:
    """Return how many forecasts and measurements wait in the join's state; a measurement counts once for each slot."""
    last = query.lastProgress
    return (
        0
        if last is None
        else sum(int(one["numRowsTotal"]) for one in json.loads(last.json)["stateOperators"])
    )
