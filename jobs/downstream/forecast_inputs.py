"""Add rows and inputs to pairs of forecasts and later rows, for models with control or inputs.

The control of a row acted since the preceding row. So a forecast passes through every row of the key up to the later
row, as `forecast --future` does. The rows come from the measurements table at the time of scoring.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from jobs.downstream.forecast_pairs import INPUTS, ROWS
from jobs.encoding.keys import columns_of, key_kind, text_of
from jobs.key_inputs.table import InputsTable
from jobs.lineage.model import DeployedModel
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.storage.tables import measurements

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.encoding.keys import KeyKind

_SPAN = ["key", "made_at", "event_time"]


def with_inputs(warehouse: Warehouse, spec: ModelSpec, pairs: DataFrame) -> DataFrame:
    """Return a micro-batch's pairs with `ROWS` if the model has control, and with `INPUTS` if it has inputs.

    The inputs come from the newest version of their table; a key without inputs has NaN.
    """
    kind = key_kind(spec.key, warehouse.read(measurements(spec.name)).schema)
    if spec.control:
        pairs = _with_rows(warehouse, spec, kind, pairs)
    if spec.inputs is not None:
        pairs = _with_key_inputs(warehouse, spec, kind, pairs)
    return pairs


def _with_rows(warehouse: Warehouse, spec: ModelSpec, kind: KeyKind, pairs: DataFrame) -> DataFrame:
    times: Any = pairs.agg(F.min("made_at").alias("first"), F.max("event_time").alias("last")).first()
    if times["first"] is None:
        return pairs.withColumn(ROWS, F.lit(None).cast("array<struct<time: bigint, control: array<double>>>"))
    at = F.col(f"`{spec.time}`")
    controls = F.array(*(F.col(f"`{name}`").cast("double") for name in spec.control))
    row = F.struct(F.unix_micros(at).alias("time"), controls.cast("array<double>").alias("control"))
    table = warehouse.read(measurements(spec.name))
    within = (at > F.timestamp_micros(F.lit(times["first"]))) & (
        at <= F.timestamp_micros(F.lit(times["last"]))
    )
    rows = table.filter(within).select(text_of(kind).alias("_key"), row.alias("_row"))
    spans = pairs.select(*_SPAN).distinct()
    between = (F.col("_row.time") > F.col("made_at")) & (F.col("_row.time") <= F.col("event_time"))
    joined = spans.join(rows, (F.col("key") == F.col("_key")) & between)
    collected = joined.groupBy(*_SPAN).agg(F.collect_list("_row").alias(ROWS))
    return pairs.join(collected, _SPAN, "left")


def _with_key_inputs(warehouse: Warehouse, spec: ModelSpec, kind: KeyKind, pairs: DataFrame) -> DataFrame:
    table = InputsTable(DeployedModel(spec, warehouse))
    keys = pairs.select(F.col("key").alias("_text")).distinct()
    typed = keys.select("_text", *columns_of(kind, F.col("_text")))
    numbers = (F.coalesce(F.col(f"`{name}`"), F.lit(float("nan"))) for name in spec.input_names)
    joined = table.joined(typed, kind, table.newest().version)
    found = joined.select(F.col("_text").alias("key"), F.array(*numbers).cast("array<double>").alias(INPUTS))
    return pairs.join(found, "key")
