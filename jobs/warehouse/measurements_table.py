"""The measurements table: its properties, its column for new keys, the types of its key columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta.tables import DeltaTable
from pyspark.sql import functions as F

from jobs.core.errors import UserError
from jobs.specs.model_spec import ModelSpec
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.tables import SNAPSHOTS, measurements

if TYPE_CHECKING:
    from pyspark.sql import Column

KeyTypes = dict[str, str]
"""Spark type of each column of the key and of the id in the measurements table: bigint or string."""

MEASUREMENT_PROPERTIES = {
    # A stream that was stopped for months must still find every version after its position.
    "delta.logRetentionDuration": "interval 400 days",
    "delta.enableExpiredLogCleanup": "true",
}

HISTORY_PREFIX = "history:"
"""What `_origin` begins with in a marked row."""

NEW_KEYS_COLUMNS = f"{SNAPSHOTS}, meaning string"
"""Of `new_keys/<model>`: a snapshot's, and what the state means (`meaning_of`)."""


def key_types_in(warehouse: Warehouse, spec: ModelSpec) -> KeyTypes:
    """Return the types of the key columns of a measurements table that is there.

    Raises:
        UserError: it is one of other columns.
    """
    schema = warehouse.read(measurements(spec.name)).schema
    have = {field.name: field.dataType.simpleString() for field in schema.fields}
    absent = [name for name in spec.columns if name not in have]
    if absent:
        raise UserError(
            f"the measurements table of {spec.name} has no column {', '.join(absent)}, which its spec names: "
            f"give a model with other columns another name"
        )
    return {name: have[name] for name in spec.naming_columns}


def new_keys(model: str) -> str:
    """Return the name of the table of a model's newly pretrained keys."""
    return f"new_keys/{model}"


def is_history() -> Column:
    """Tell of measurements if they are history that no stream reads which takes new keys."""
    return F.coalesce(F.col("_origin").startswith(HISTORY_PREFIX), F.lit(False))


def latest_history_version(warehouse: Warehouse, table: str, version: int) -> int | None:
    """Return the newest version, up to one, that landed history of new keys; None: none did."""
    history = DeltaTable.forPath(warehouse.spark, warehouse.path(table)).history()
    landed = history.filter(F.col("userMetadata").contains('"history": true') & (F.col("version") <= version))
    row = landed.agg(F.max("version")).first()
    return None if row is None or row[0] is None else int(row[0])


def create_new_keys_table(warehouse: Warehouse, model: str) -> str:
    """Make the table of a model's newly pretrained keys unless it is there, and return its name."""

    table = new_keys(model)
    warehouse.create(table, NEW_KEYS_COLUMNS, properties=MEASUREMENT_PROPERTIES)
    return table
