"""Check whether a table's properties and features allow that Parquet files are committed to it.

Users may set properties of this product's tables, and add features, by any tool. Plain Parquet files satisfy some
properties and features. Others demand more of a writer: to check rows, to rename columns, or to write other statistics.
A table with such a demand is refused before any row is written, and the message names the property to remove. So all
tables are written in the same way.
"""

from __future__ import annotations

from collections.abc import Collection

import pyarrow as pa
from deltalake import DeltaTable, Field, Schema

from jobs.storage.table_rows import read_columns

_WRITER_VERSION = 4
"""The newest writer version of Delta's protocol with features that are all known here. Newer tables list features."""
_FEATURES = {
    "appendOnly",
    "invariants",
    "changeDataFeed",
    "deletionVectors",
    "timestampNtz",
    "vacuumProtocolCheck",
    "variantType",
}
"""Features that plain new files satisfy. Readers derive the change feed of an added file from the file."""
_META = {
    "delta.invariants": "an invariant",
    "delta.generationExpression": "a generation expression",
    "delta.identity.start": "an identity",
    "delta.columnMapping.id": "a mapped name",
}
"""Metadata of columns that demand more of a writer than to write the values."""
SETTINGS = {
    "delta.appendOnly",
    "delta.checkpointInterval",
    "delta.dataSkippingNumIndexedCols",
    "delta.deletedFileRetentionDuration",
    "delta.enableChangeDataFeed",
    "delta.enableDeletionVectors",
    "delta.enableExpiredLogCleanup",
    "delta.isolationLevel",
    "delta.logRetentionDuration",
    "delta.setTransactionRetentionDuration",
    "delta.targetFileSize",
}
"""Table properties that commits of files satisfy, or that do not affect commits of files. Other properties may demand
more of a writer, such as to compact files, to list files for other engines, or to write other statistics."""


def find_refusal(log: DeltaTable, settings: Collection[str] = ()) -> str | None:
    """Return why files cannot be committed to a table, and what the user must undo; None if they can be committed.

    Args:
        log: log of the table.
        settings: further properties, besides `SETTINGS`, that the files satisfy.
    """
    about, protocol = log.metadata(), log.protocol()
    for name, text in sorted(about.configuration.items()):
        if name.startswith("delta.constraints."):
            return f"it has the constraint {name[18:]}: ALTER TABLE ... DROP CONSTRAINT {name[18:]}"
        asks = name.startswith("delta.") and text.lower() not in ("false", "none")
        if asks and name not in SETTINGS and name not in settings:
            return f"it has the property {name}: ALTER TABLE ... UNSET TBLPROPERTIES ('{name}')"
    for field in log.schema().fields:
        more = next((_META[name] for name in _META if name in field.metadata), None)
        if more is None and not field.nullable:
            more = "NOT NULL"
        if more is not None:
            return f"its column {field.name} has {more}: make it a plain column that may be null"
    features = {*(protocol.writer_features or ()), *(protocol.reader_features or ())} - _FEATURES
    if features:
        one = min(features)
        return f"it has the feature {one}: ALTER TABLE ... DROP FEATURE {one}"
    if protocol.min_writer_version > _WRITER_VERSION and not protocol.writer_features:
        return f"its writers need version {protocol.min_writer_version} of Delta's protocol: make it anew"
    return None


def find_other_type(log: DeltaTable, schema: pa.Schema) -> str | None:
    """Describe the first column whose type in the files differs from its type in the table; None if all types agree."""
    have = {field.name: field.type for field in read_columns(log)}
    for field in schema:
        known = have.get(field.name)
        if known is not None and _strip_type(known) != _strip_type(field.type):
            return f"its column {field.name} has the type {known}, and the new rows have {field.type}"
    return None


def find_absent_fields(log: DeltaTable, schema: pa.Schema) -> list[Field]:
    """Return the columns of the files that the table lacks, as fields of Delta's schema."""
    have = {field.name for field in log.schema().fields}
    absent = pa.schema([field for field in schema if field.name not in have])
    return list(Schema.from_arrow(absent).fields) if len(absent) else []


def _strip_type(kind: pa.DataType) -> pa.DataType:
    """Return a type without its nested field names, its nested nullability, and the width of its offsets."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_list_view(kind):
        return pa.list_(_strip_type(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(_strip_type(kind.key_type), _strip_type(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(one.name, _strip_type(one.type)) for one in kind])
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    return kind
