"""Pair forecasts with later measurements by a join of two streams over the estimates, with a watermark on both.

The join pairs an estimate with a later row of the same key that is one of the horizons away. The model's filter then
forecasts from the estimate's state to the exact time of the later row, for many pairs at once. A forecast uses no row
that is later than its estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import functions as F

import kalman
from jobs.core.errors import UserError
from jobs.core.times import MIN_US
from jobs.lineage.generations import DeployedModel
from jobs.lineage.inputs_table import INPUTS, InputsTable
from jobs.offline.horizon import count_section_steps
from jobs.spark.local_frame import Make
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.specs.monitor import ForecastSkill
from jobs.state.encoding.arrow import build_matrix
from jobs.state.encoding.keys import KeyKind, build_key_kind, build_key_text
from jobs.state.encoding.packets import MEASURED
from jobs.state.key_groups import GroupBegin, group_begin
from jobs.storage.tables import measurements
from kalman.evaluation.forecast import check_measuring, extract_variances, forecast, interval
from kalman.evaluation.scoring_rules import crps, log_score
from kalman.filters.own_parameters import FIELD, copy_key_parameters, find_key_parameters
from kalman.filters.prediction import turn_measurements
from kalman.filters.state_layout import locate_fields, unwrap_filter
from kalman.filters.state_output import OUTPUT as STATE
from kalman.filters.state_output import follows_from_moments
from kalman.run import KeyStates
from kalman.types import Filter

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

SCORED_SCHEMA = """
    key string, generation string, model_version int, made_at bigint, event_time bigint, horizon int,
    measurement int, mean double, variance double, lower double, upper double, actual double, error double,
    inside boolean, crps double, log_score double
"""
SHIFT = -MIN_US
"""Offset added to event times, because Spark's watermark starts at 1970 and earlier rows would be late."""
_NAMES = [part.split()[0] for part in SCORED_SCHEMA.split(",")]
ROWS = "rows"
"""Column of the pairs of a model with control, array<struct<time bigint, control array<double>>>: the rows of the key
after the estimate, up to the later row. The pairs of a model with inputs have the column `INPUTS`."""
_SPAN = ["key", "made_at", "event_time"]
_LEFT_OUT = ("form", "smoothing", "storage", "sliding_log_likelihood")
"""Fields of a model's definition that change how a state is stored, but do not change its forecasts."""


def has_key_parameters(kernel: Filter) -> bool:
    """Return whether keys have learned parameters that the estimates do not contain."""
    return bool(find_key_parameters(kernel).rows) and follows_from_moments(kernel)


class ScoringPlan(NamedTuple):
    """The filter of each generation, the time unit (us), and the steps of each horizon or None; sent to the workers.

    begins: for each generation with parameters by group, the initial states of keys by group. controls: number of the
    model's control columns. inputs: number of inputs of a key.
    """

    kernels: dict[str, Filter]
    unit: float
    steps: tuple[int, ...] | None
    probability: float
    begins: Mapping[str, GroupBegin] = MappingProxyType({})
    controls: int = 0
    inputs: int = 0

    @classmethod
    def of(
        cls, spec: ModelSpec, section: ForecastSkill, kind: KeyKind, used: Mapping[str, UsedModel]
    ) -> Self:
        """Return the plan for forecasts with the filter of each generation or run.

        Raises:
            UserError: the model's measurements cannot be forecast from its estimates.
        """
        begins = {
            name: group_begin(kind, build_forecasting_definition(one.spec), one.parameters)
            for name, one in used.items()
            if one.spec.key == spec.key
        }
        return cls(
            {name: one.kernel for name, one in used.items()},
            spec.unit_us,
            check_spec(spec, section),
            section.probability,
            {name: begin for name, begin in begins.items() if begin is not None},
            len(spec.control),
            len(spec.input_names),
        )


class UsedModel(NamedTuple):
    """The spec and parameters that forecast for a generation or a run, and the filter built from them."""

    spec: ModelSpec
    parameters: Mapping[str, Any]
    kernel: Filter


def build_forecasting_definition(spec: ModelSpec) -> dict[str, Any]:
    """Return the model definition for the filter that forecasts, without fields that do not change forecasts."""
    return {k: v for k, v in spec.definition().items() if k not in _LEFT_OUT}


def build_forecaster(spec: ModelSpec, parameters: Mapping[str, Any], with_state: bool = True) -> Filter:
    """Return the filter that forecasts from an estimate.

    If mean, covariance and the key's parameters are the whole state, the filter forecasts from these three. Otherwise
    the filter forecasts from the state, which the estimates table also has (`kalman.filters.state_output`). Without
    this state, the modes of a mixture are forecast from the mixture's mean and covariance, with the mode probabilities
    that a first row has.

    Raises:
        UserError: the model cannot be built, does not predict its measurements, or needs the state.
    """
    n = len(spec.states)
    try:
        whole = unwrap_filter(kalman.build(spec.definition(), parameters))
        check_measuring(whole)
        if with_state and not follows_from_moments(whole):
            return whole
        kernel = kalman.build(build_forecasting_definition(spec), parameters)
        kernel.from_moments(np.zeros((n, 1)), np.eye(n).reshape(-1, 1))
    except kalman.ModelError as error:
        raise UserError(f"{spec.name} cannot be forecast from its estimates: {error}") from error
    if find_key_parameters(kernel).adapted:
        raise UserError(
            f"{spec.name} cannot be forecast from mean and covariance, which lack its adaptive noise"
        )
    return kernel


def needs_state(spec: ModelSpec) -> bool:
    """Return whether a model's forecasts need more of a key's state than mean, covariance and parameters."""
    return not follows_from_moments(kalman.build(spec.definition()))


def check_spec(spec: ModelSpec, section: ForecastSkill) -> tuple[int, ...] | None:
    """Return the steps of each horizon, or None for a model in continuous time.

    Raises:
        UserError: the measurements cannot be forecast from the estimates.
    """
    where = spec.source_path or spec.name
    if spec.outputs.covariance != "full" and len(spec.states) > 1 and not needs_state(spec):
        raise UserError(f"{where}: forecast: needs full covariances: write outputs: {{covariance: full}}")
    if spec.control:
        if section.step is not None:
            raise UserError(
                f"{where}: forecast.step: the model has control, whose rows are the steps: remove it"
            )
        return None
    steps = count_section_steps(spec, section)
    if steps is None and section.step is not None:
        raise UserError(f"{where}: forecast.step: the model is in continuous time: remove it")
    return steps


def join_forecast_pairs(
    origins: DataFrame, actuals: DataFrame, section: ForecastSkill, with_unmatched: bool = False
) -> DataFrame:
    """Join each estimate with the later rows of its key that are one of the horizons away.

    With `with_unmatched`, a forecast that, by the watermark, no later row can match also gets a row. This row has the
    time of the forecast, and null measurements.

    Args:
        origins: stream of the live estimates, the origins of the forecasts.
        actuals: second stream of the live estimates, with the measurements.
        section: the spec's section with the horizons.
        with_unmatched: whether to return unmatched forecasts too.
    """
    made, found = _select_origins(origins, section), _select_actuals(actuals, section)
    same = F.col("o.key") == F.col("a.key")
    reach = section.tolerance_us
    if reach == 0:
        same = same & (F.col("o.due") == F.col("a.at"))
    else:
        near = F.expr(f"interval {reach} microseconds")
        same = same & (F.col("o.slot") == F.col("a.slot"))
        same = same & (F.col("a.at") >= F.col("o.due") - near) & (F.col("a.at") <= F.col("o.due") + near)
    both = made.alias("o").join(found.alias("a"), same, "left_outer" if with_unmatched else "inner")
    at = F.coalesce("a.at", "o.due") if with_unmatched else F.col("a.at")
    return both.select(
        "o.key",
        *(F.col(f"o.{name}") for name in ("generation", "model_version", "mean", "covariance", "horizon")),
        *(F.col(f"o.{name}") for name in (STATE,) if name in made.columns),
        F.unix_micros("o.made_at").alias("made_at"),
        (F.unix_micros(at) - SHIFT).alias("event_time"),
        F.col(f"a.{MEASURED}"),
    )


def _select_origins(estimates: DataFrame, section: ForecastSkill) -> DataFrame:
    ahead = F.array(*(F.lit(length) for length in section.lengths))
    columns = {"key": "key", "generation": "generation", "model_version": "model_version"}
    columns |= {"mean": "mean", "covariance": "covariance", "event_time": "made_at"}
    if STATE in estimates.columns:
        columns[STATE] = STATE
    rows = _mark_never_null(_drop_corrections(estimates), columns)
    rows = rows.select("*", F.posexplode(ahead).alias("horizon", "_ahead"))
    due = F.timestamp_micros(F.unix_micros("made_at") + F.col("_ahead") + SHIFT)
    rows = rows.withColumn("due", due).drop("_ahead")
    if section.tolerance_us:
        rows = rows.withColumn("slot", _compute_slot(F.unix_micros("due"), section))
    return rows.withWatermark("due", section.watermark_interval)


def _select_actuals(estimates: DataFrame, section: ForecastSkill) -> DataFrame:
    rows = _drop_corrections(estimates).filter(F.exists(MEASURED, lambda one: ~F.isnan(one)))
    rows = _mark_never_null(rows, {"key": "key", "event_time": "at", MEASURED: MEASURED})
    rows = rows.withColumn("at", F.timestamp_micros(F.unix_micros("at") + SHIFT))
    if section.tolerance_us:
        # A forecast is in one slot and a measurement in two slots, so a pair meets once, and the join compares few
        # rows.
        at, reach = F.unix_micros("at"), section.tolerance_us
        slots = F.array(_compute_slot(at - reach, section), _compute_slot(at + reach, section))
        rows = rows.withColumn("slot", F.explode(slots))
    return rows.withWatermark("at", section.watermark_interval)


def _mark_never_null(rows: DataFrame, columns: Mapping[str, str]) -> DataFrame:
    """Rename columns, and mark the columns as never null in the schema, because the join stores the schema.

    After a filter, Spark infers that a column cannot be null, except in a micro-batch without rows on this side. Spark
    refuses to restart from a state if the columns' nullability differs from the first micro-batch.
    """
    none = {"string": F.lit(""), "timestamp": F.timestamp_micros(F.lit(0)), "int": F.lit(0)}
    kinds = {name: rows.schema[name].dataType.simpleString() for name in columns}
    nothing = F.array().cast("array<double>")
    return rows.select(
        *(F.coalesce(F.col(a), none.get(kinds[a], nothing)).alias(b) for a, b in columns.items())
    )


def _compute_slot(micros: Column, section: ForecastSkill) -> Column:
    width = 2 * section.tolerance_us
    return F.coalesce(micros - F.pmod(micros, F.lit(width)), F.lit(0))  # never null, like every stored column


def _drop_corrections(estimates: DataFrame) -> DataFrame:
    """Remove corrections, because a forecast starts from an estimate that was available at the estimate's time."""
    if "correction" not in estimates.columns:
        return estimates
    return estimates.filter(~F.coalesce(F.col("correction"), F.lit(False)))


def join_inputs(model: DeployedModel[Warehouse], pairs: DataFrame) -> DataFrame:
    """Return pairs with `ROWS` if the model has control, and with `INPUTS` if it has inputs.

    The control of a row acted since the previous row, so a forecast goes through every row of the key up to the later
    row, as `forecast --future` does. These rows come from the measurements table. The inputs come from the newest
    version of their table at the time of the scoring; they are NaN for a key without inputs.
    """
    kind = build_key_kind(model.spec.key, model.warehouse.read(measurements(model.name)).schema)
    if model.spec.control:
        pairs = _join_rows(model, kind, pairs)
    if model.spec.inputs is not None:
        inputs, _ = InputsTable(model).by_key(pairs.select("key").distinct(), kind)
        pairs = pairs.join(inputs, "key")
    return pairs


def _join_rows(model: DeployedModel[Warehouse], kind: KeyKind, pairs: DataFrame) -> DataFrame:
    spec = model.spec
    times: Any = pairs.agg(F.min("made_at").alias("first"), F.max("event_time").alias("last")).first()
    if times["first"] is None:
        return pairs.withColumn(ROWS, F.lit(None).cast("array<struct<time: bigint, control: array<double>>>"))
    at = F.col(f"`{spec.time}`")
    controls = F.array(*(F.col(f"`{name}`").cast("double") for name in spec.control))
    row = F.struct(F.unix_micros(at).alias("time"), controls.cast("array<double>").alias("control"))
    table = model.warehouse.read(measurements(spec.name))
    within = (at > F.timestamp_micros(F.lit(times["first"]))) & (
        at <= F.timestamp_micros(F.lit(times["last"]))
    )
    rows = table.filter(within).select(build_key_text(kind).alias("_key"), row.alias("_row"))
    spans = pairs.select(*_SPAN).distinct()
    between = (F.col("_row.time") > F.col("made_at")) & (F.col("_row.time") <= F.col("event_time"))
    joined = spans.join(rows, (F.col("key") == F.col("_key")) & between)
    collected = joined.groupBy(*_SPAN).agg(F.collect_list("_row").alias(ROWS))
    return pairs.join(collected, _SPAN, "left")


def score_pairs(pairs: DataFrame, plan: ScoringPlan, own: DataFrame | None = None) -> DataFrame:
    """Forecast and score joined pairs; return a row (`SCORED_SCHEMA`) for each pair and measurement.

    own: generation, key, and state field `parameters` of the keys with learned parameters; None means no such keys.
    """
    there = (name for name in (STATE, ROWS, INPUTS) if name in pairs.columns)
    pairs = pairs.select(*_NAMES[:6], "mean", "covariance", MEASURED, *there)
    if own is not None:
        pairs = pairs.join(own, ["generation", "key"], "left")
    return pairs.mapInArrow(_build_scorer(plan), SCORED_SCHEMA)


def _build_scorer(plan: ScoringPlan) -> Make:
    def score_all(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            generation = batch.column("generation").dictionary_encode()
            codes = generation.indices.to_numpy(zero_copy_only=False)
            for code, name in enumerate(generation.dictionary.to_pylist()):
                part = batch.take(pa.array(np.flatnonzero(codes == code)))
                if name in plan.kernels and part.num_rows:
                    yield score(part, plan.kernels[name], plan, plan.begins.get(name))

    return score_all


def score(
    batch: pa.RecordBatch, kernel: Filter, plan: ScoringPlan, begin: GroupBegin | None = None
) -> pa.RecordBatch:
    """Return the scored rows (`SCORED_SCHEMA`) of pairs whose estimates have one generation."""
    n, m, size = len(kernel.states), kernel.measurements, batch.num_rows
    made, at = (batch.column(name).to_numpy() for name in ("made_at", "event_time"))
    horizon = batch.column("horizon").to_numpy()
    unmatched = batch.column(MEASURED).is_null().to_numpy(zero_copy_only=False)
    y = _read_measurements(batch.column(MEASURED), unmatched, m)
    mean, variance = np.full((2, m, size), np.nan)
    if STATE in batch.schema.names and not follows_from_moments(kernel):
        values = _read_states(batch, kernel)
    else:
        moments = (
            build_matrix(batch.column(name), width, name)
            for name, width in (("mean", n), ("covariance", n * n))
        )
        values = _add_key_parameters(kernel.from_moments(*moments), batch, kernel, begin)
    states = KeyStates(values, made, np.ones(size, np.int64), np.zeros(size))
    for which, dt, u in _iterate_steps(batch, plan, (at - made) / plan.unit, horizon):
        expected = forecast(kernel, states.take(which), dt, u)
        mean[:, which] = expected.measurement_mean[:, -1]
        variance[:, which] = extract_variances(expected.measurement_covariance)[:, -1]
    seen = turn_measurements(kernel, y, mean)
    low, high = interval(mean, variance, plan.probability)
    known = np.isfinite(mean) & ~np.isinf(variance)  # an LMS filter without R has no finite variance
    given = ~np.isnan(y) | unmatched
    measured = np.flatnonzero(given.T.ravel())  # ordered by pair, then by measurement
    pair = measured // m

    def flat(numbers: NDArray[Any]) -> NDArray[Any]:
        return np.ascontiguousarray(numbers.T).ravel()[measured]

    is_scored = flat(known)

    def column(numbers: NDArray[np.float64]) -> pa.Array:
        found = flat(numbers)
        return pa.array(found, mask=~is_scored | ~np.isfinite(found))

    columns = [
        *(batch.column(name).take(pa.array(pair)) for name in _NAMES[:6]),
        pa.array((measured % m).astype(np.int32)),
        *(column(one) for one in (mean, variance, low, high)),
        pa.array(flat(y), mask=np.isnan(flat(y))),
        column(seen - mean),
        pa.array(
            flat((low <= seen) & (seen <= high)),
            mask=~is_scored | np.isnan(flat(y)) | np.isnan(flat(variance)),
        ),
        column(crps(mean, variance, seen)),
        column(log_score(mean, variance, seen)),
    ]
    return pa.RecordBatch.from_arrays(columns, _NAMES)


def _read_states(batch: pa.RecordBatch, kernel: Filter) -> NDArray[np.float64]:
    """Return the states (size, N) of estimates; NaN for an estimate that an earlier release wrote without a state."""
    column = batch.column(STATE)
    there = np.flatnonzero(column.value_lengths().fill_null(0).to_numpy() == kernel.size)
    values = np.full((kernel.size, len(column)), np.nan)
    values[:, there] = build_matrix(column.take(pa.array(there)), kernel.size, STATE)
    return values


def _read_measurements(column: pa.ListArray, unmatched: NDArray[np.bool_], m: int) -> NDArray[np.float64]:
    """Return the measurements (m, N) of pairs; NaN for an unmatched forecast."""
    y = np.full((m, len(column)), np.nan)
    there = np.flatnonzero(~unmatched)
    y[:, there] = build_matrix(column.take(pa.array(there)), m, MEASURED)
    return y


def _add_key_parameters(
    values: NDArray[np.float64], batch: pa.RecordBatch, kernel: Filter, begin: GroupBegin | None
) -> NDArray[np.float64]:
    """Return the states with the parameters of their keys: learned parameters, else those of a new key of the group."""
    own = find_key_parameters(kernel)
    if not own.rows:
        return values
    if begin is not None:
        field = begin.build_from_texts(batch.column("key"))[locate_fields(kernel.fields)[FIELD]]
        values = copy_key_parameters(kernel, values, field)
    if FIELD not in batch.schema.names:
        return values
    column = batch.column(FIELD)
    known = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    field = build_matrix(column.take(pa.array(known)), max(rows.stop for rows in own.rows.values()), FIELD)
    values = values.copy()
    values[:, known] = copy_key_parameters(kernel, values[:, known], field)
    return values


def _iterate_steps(
    batch: pa.RecordBatch, plan: ScoringPlan, away: NDArray[np.float64], horizon: NDArray[np.int32]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64] | None]]:
    """Yield indices of pairs that need equally many steps, the time of each step (S, K) and its control (S, c, K).

    With control, the steps are the rows from the estimate to the later row; a pair whose later row is not among these
    rows is left out.
    """
    size, inputs = batch.num_rows, None
    if plan.inputs:
        inputs = build_matrix(batch.column(INPUTS), plan.inputs, INPUTS)
    if not plan.controls:
        for steps, which in _group_by_steps(plan.steps, horizon):
            dt = np.broadcast_to(away[which] / steps, (steps, len(which)))
            u = (
                None
                if inputs is None
                else np.broadcast_to(inputs[:, which], (steps, plan.inputs, len(which)))
            )
            yield which, dt, u
        return
    rows = batch.column(ROWS)
    count = rows.value_lengths().fill_null(0).to_numpy()
    flat = rows.flatten()
    pair = np.repeat(np.arange(size), count)
    made, at = (batch.column(name).to_numpy() for name in ("made_at", "event_time"))
    time = flat.field("time").to_numpy()
    control = build_matrix(flat.field("control"), plan.controls, "control")
    order = np.lexsort((*control[::-1], time, pair))
    pair, time, control = pair[order], time[order], control[:, order]
    is_own = time == at[pair]
    kept = ~(is_own & np.append(False, is_own[:-1] & (pair[1:] == pair[:-1])))  # keeps one row at that time
    pair, time, control = pair[kept], time[kept], control[:, kept]
    count = np.bincount(pair, minlength=size)
    starts = np.cumsum(count) - count
    there = np.bincount(pair, time == at[pair], minlength=size) > 0
    for steps in np.unique(count[there]):
        which = np.flatnonzero(there & (count == steps))
        place = starts[which] + np.arange(steps)[:, None]
        dt = np.diff(time[place], axis=0, prepend=made[None, which]) / plan.unit
        u = control[:, place].transpose(1, 0, 2)
        if inputs is not None:
            u = np.concatenate(
                [u, np.broadcast_to(inputs[:, which], (steps, plan.inputs, len(which)))], axis=1
            )
        yield which, dt, u


def _group_by_steps(
    steps: tuple[int, ...] | None, horizon: NDArray[np.int32]
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield each number of steps, with the indices of the pairs that need this number of steps."""
    if steps is None:
        yield 1, np.arange(len(horizon))
        return
    for number, count in enumerate(steps):
        which = np.flatnonzero(horizon == number)
        if len(which):
            yield count, which
