"""Join states with what their forecasts need beside them: the inputs of their keys, and the inputs of future rows."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
from pyspark.sql import functions as F

from jobs.batch.forecast_rows import FUTURE
from jobs.core.input_files import open_input
from jobs.encoding.arrow import integers, lists
from jobs.encoding.keys import KeyKind, text_of
from jobs.key_inputs.table import INPUTS, InputsTable
from jobs.lineage.model import DeployedModel
from jobs.offline.future import read_future
from jobs.spark.warehouse import Warehouse

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_FUTURE = f"struct<time: bigint, control: array<double>, {INPUTS}: array<double>>"


class FutureRows(NamedTuple):
    """Future rows by key (`key`, and `FUTURE`), a digest of them, and whether they have inputs of their own."""

    rows: DataFrame
    digest: str
    own_inputs: bool


def with_inputs(
    model: DeployedModel[Warehouse], kind: KeyKind, states: DataFrame
) -> tuple[DataFrame, int | None]:
    """Return states with their keys' inputs from the newest version of the table, and that version; None: no inputs.

    A key that is not in the table, and has no defaults, gets NaN: its forecasts are flagged.
    """
    if model.spec.inputs is None:
        return states, None
    inputs, version = InputsTable(model).by_key(states.select("key"), kind)
    return states.join(inputs, "key"), version


def future_rows(model: DeployedModel[Warehouse], kind: KeyKind, file: str) -> FutureRows:
    """Read a file of future rows (`read_future`) and group them by key.

    Raises:
        UserError: the file cannot be read, or has a row that cannot be used.
    """
    future = read_future(model.spec, file)
    names = [f"k{i}" for i in range(len(model.spec.key))]
    none = pa.nulls(len(future.time), pa.list_(pa.float64()))
    columns = [
        *future.keys,
        integers(future.time),
        lists(future.control) if model.spec.control else none,
        none if future.inputs is None else lists(future.inputs),
    ]
    table = pa.table(columns, names=[*names, "time", "control", INPUTS])
    typed = (F.col(a).cast(t).alias(b) for a, b, t in zip(names, kind.columns, kind.types, strict=True))
    frame = model.warehouse.spark.createDataFrame(table).select(*typed, "time", "control", INPUTS)
    row = F.struct(F.col("time"), F.col("control"), F.col(INPUTS)).cast(_FUTURE)
    grouped = frame.select(text_of(kind).alias("key"), row.alias("row")).groupBy("key")
    found = grouped.agg(F.collect_list("row").alias(FUTURE))
    with open_input(file) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    return FutureRows(found, digest, future.inputs is not None)
