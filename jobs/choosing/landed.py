"""Read the landed rows of a sample of keys."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Window
from pyspark.sql import functions as F

from jobs.core.errors import UserError
from jobs.landing.raw_rows import Source
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.storage.tables import measurements

_ONLY = "_only"
"""The column that stands for the key of a model without key columns."""


def landed_rows(
    warehouse: Warehouse, spec: ModelSpec, columns: Sequence[str], keys: int, rows: int
) -> Source:
    """Return the last landed rows of the keys whose hashes are the lowest.

    Args:
        warehouse: with the model's measurements.
        spec: of the model whose table it is.
        columns: to read.
        keys: how many keys.
        rows: of each key.

    Raises:
        UserError: nothing has landed, or a column is missing.
    """
    table = measurements(spec.name)
    if not warehouse.exists(table):
        raise UserError(f"nothing has landed for {spec.name}; ingest files first, or give --input")
    landed = warehouse.read(table)
    absent = [name for name in columns if name not in landed.columns]
    if absent:
        raise UserError(
            f"the measurements of {spec.name} have no column '{absent[0]}'; give the files with "
            "--input, or name the columns that have landed"
        )
    key = [F.col(f"`{name}`") for name in spec.key]
    if not key:
        landed, key = landed.withColumn(_ONLY, F.lit(0)), [F.col(_ONLY)]
    sample = landed.select(*key).distinct().orderBy(F.xxhash64(*key), *key).limit(keys)
    last = Window.partitionBy(*key).orderBy(F.col(f"`{spec.time}`").desc())
    chosen = (
        landed.join(F.broadcast(sample), on=sample.columns, how="left_semi")
        .withColumn("_place", F.row_number().over(last))
        .filter(F.col("_place") <= rows)
        .select(*(F.col(f"`{name}`") for name in columns))
    )
    found = chosen.toArrow().combine_chunks()
    if not found.num_rows:
        raise UserError(f"nothing has landed for {spec.name}; ingest files first, or give --input")
    arrays = {name: found.column(name).chunk(0) for name in columns}
    return Source(arrays, found.num_rows)
