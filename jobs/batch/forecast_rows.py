"""Forecast the keys of state rows on Spark's workers, with their inputs: a row for each key and future time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as F

from jobs.core.input_files import open_input
from jobs.lineage.generations import DeployedModel
from jobs.lineage.inputs_table import INPUTS, InputsTable
from jobs.offline.ahead import ForecastKeys, Future, forecast_ahead, list_forecasts, read_future
from jobs.offline.horizon import Horizon
from jobs.snapshots.state_rows import find_state_extras_widths, parse_states, split_extras
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding.arrow import build_integers, build_lists, build_matrix, build_vectors
from jobs.state.encoding.estimates import find_flag_names
from jobs.state.encoding.keys import KeyKind, build_key_text
from kalman.run import KeyStates
from kalman.types import Filter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ROWS = (
    "key string, made_at bigint, event_time bigint, step bigint, mean array<double>, covariance array<double>, "
    "lower array<double>, upper array<double>, measurement_mean array<double>, measurement_covariance array<double>, "
    "measurement_lower array<double>, measurement_upper array<double>, flag string"
)
"""The columns of a forecast. `made_at` is the time of the key's newest row, `step` the number of the forecast; the
others are the same as in the files that `forecast` writes.
"""
FUTURE = "future"
"""The column with the key's future rows, beside the states and `INPUTS`: array<struct<time bigint, control
array<double>, inputs array<double>>>.
"""
_FUTURE = f"struct<time: bigint, control: array<double>, {INPUTS}: array<double>>"
NUMBERS_AT_ONCE = 8_000_000
"""The number of values in the forecasts of one call: some tens of megabytes."""


class ForecastPlan(NamedTuple):
    """The settings for the workers: the model, its filter, the horizon, and the source of future rows, if any.

    own_inputs: future rows have inputs that replace the inputs of their keys.
    """

    spec: ModelSpec
    kernel: Filter
    horizon: Horizon
    probability: float
    future: str | None = None
    own_inputs: bool = False


class FutureRows(NamedTuple):
    """Future rows by key (`key` and `FUTURE`), their digest, and whether they have inputs."""

    rows: DataFrame
    digest: str
    own_inputs: bool


def join_inputs(
    model: DeployedModel[Warehouse], kind: KeyKind, states: DataFrame
) -> tuple[DataFrame, int | None]:
    """Return states with their keys' inputs, and the version of the table of inputs (None if the model has no inputs).

    A key that is not in the table gets the defaults; without defaults it gets NaN, so its forecasts have a flag.
    """
    if model.spec.inputs is None:
        return states, None
    inputs, version = InputsTable(model).by_key(states.select("key"), kind)
    return states.join(inputs, "key"), version


def read_future_rows(model: DeployedModel[Warehouse], kind: KeyKind, file: str) -> FutureRows:
    """Read a file of future rows (`read_future`) and group the rows by key.

    Raises:
        UserError: the file cannot be read, or has a row that cannot be used.
    """
    future = read_future(model.spec, file)
    names = [f"k{i}" for i in range(len(model.spec.key))]
    none = pa.nulls(len(future.time), pa.list_(pa.float64()))
    columns = [
        *future.keys,
        build_integers(future.time),
        build_lists(future.control) if model.spec.control else none,
        none if future.inputs is None else build_lists(future.inputs),
    ]
    table = pa.table(columns, names=[*names, "time", "control", INPUTS])
    typed = (F.col(a).cast(t).alias(b) for a, b, t in zip(names, kind.columns, kind.types, strict=True))
    frame = model.warehouse.spark.createDataFrame(table).select(*typed, "time", "control", INPUTS)
    row = F.struct(F.col("time"), F.col("control"), F.col(INPUTS)).cast(_FUTURE)
    grouped = frame.select(build_key_text(kind).alias("key"), row.alias("row")).groupBy("key")
    found = grouped.agg(F.collect_list("row").alias(FUTURE))
    with open_input(file) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    return FutureRows(found, digest, future.inputs is not None)


def forecast_rows(states: DataFrame, plan: ForecastPlan) -> DataFrame:
    """Forecast the keys of a snapshot's rows (with `INPUTS` and `FUTURE`, if the model takes them); return `ROWS`."""
    columns = states.select(
        "key",
        F.unix_micros("event_time").alias("event_time"),
        F.col("state_index").alias("count"),
        "mean",
        "covariance",
        *split_extras(find_state_extras_widths(plan.kernel)),
        *(name for name in (INPUTS, FUTURE) if name in states.columns),
    )
    return columns.mapInArrow(build_forecaster(plan), ROWS)


def build_forecaster(plan: ForecastPlan) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function that forecasts the keys in batches with the columns that `forecast_rows` selects."""

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for part in _split_batch(batch, plan):
                yield _forecast_batch(part, plan)

    return work


def _split_batch(batch: pa.RecordBatch, plan: ForecastPlan) -> Iterator[pa.RecordBatch]:
    """Cut a batch so that the forecasts of each part fit into memory; the cuts do not change the forecasts."""
    if batch.num_rows == 0:
        return
    n, m = len(plan.spec.states), len(plan.spec.measurement)
    if plan.future is not None:
        steps = max(int(batch.column(FUTURE).value_lengths().fill_null(0).to_numpy().max()), 1)
    else:
        steps = plan.horizon.count_steps(int(batch.column("event_time").to_numpy().min()))
    size = max(int(NUMBERS_AT_ONCE // (steps * (n + n * n + m + m * m))), 1)
    for start in range(0, batch.num_rows, size):
        yield batch.slice(start, size)


def _forecast_batch(batch: pa.RecordBatch, plan: ForecastPlan) -> pa.RecordBatch:
    spec, kernel, size = plan.spec, plan.kernel, batch.num_rows
    values = kernel.restore(*parse_states(batch, len(spec.states), find_state_extras_widths(kernel)))
    made, count = (batch.column(name).to_numpy() for name in ("event_time", "count"))
    own = len(spec.input_names)
    inputs = build_matrix(batch.column(INPUTS), own, INPUTS) if own else np.empty((0, size))
    names = batch.column("key")
    keys = ForecastKeys([names], KeyStates(values, made, count, np.zeros(size)), inputs)
    future = None if plan.future is None else _build_future(batch, plan)
    found = forecast_ahead(spec, kernel, keys, plan.horizon, future)
    rows = list_forecasts(spec, found, plan.probability)
    arrays = [
        names.take(build_integers(rows.key)),
        *map(build_integers, (made[rows.key], rows.time, rows.step)),
    ]
    arrays += [build_vectors(column.values, rows.flag == 0) for column in rows.columns]
    arrays.append(find_flag_names(rows.flag).cast(pa.string()))
    return pa.RecordBatch.from_arrays(arrays, [part.split()[0] for part in ROWS.split(", ")])


def _build_future(batch: pa.RecordBatch, plan: ForecastPlan) -> Future:
    """Return the future rows of the keys of a batch."""
    assert plan.future is not None
    column = batch.column(FUTURE)
    counts = column.value_lengths().fill_null(0).to_numpy()
    rows = column.flatten()
    controls, own = len(plan.spec.control), len(plan.spec.input_names)
    names = batch.column("key").take(build_integers(np.repeat(np.arange(batch.num_rows), counts)))
    time = rows.field("time").to_numpy()
    control = (
        build_matrix(rows.field("control"), controls, "control") if controls else np.empty((0, len(rows)))
    )
    inputs = build_matrix(rows.field(INPUTS), own, INPUTS) if plan.own_inputs else None
    return Future(plan.future, [names], time, control, inputs)
