"""Rows of estimates with all columns of their table, in Arrow: what tasks write as files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa


def table_batch(found: pa.RecordBatch, schema: pa.Schema, constants: Mapping[str, Any]) -> pa.RecordBatch:
    """Return rows of `jobs.encoding.estimates.estimate_batch` with the columns of a table, in its order.

    Args:
        found: the rows (N).
        schema: the table's columns.
        constants: values of columns that are the same in all rows, by name.
    """
    columns = dict(zip(found.schema.names, found.columns, strict=True))
    arrays = [
        columns[field.name].cast(field.type)
        if field.name in columns
        else _repeated(constants[field.name], field.type, found.num_rows)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, names=schema.names)


def _repeated(value: Any, kind: pa.DataType, size: int) -> pa.Array:
    """Return an array (N,) of one value; a text is held once, and is written as any other text column is."""
    if pa.types.is_string(kind):
        return pa.DictionaryArray.from_arrays(pa.array(np.zeros(size, np.int32)), pa.array([value], kind))
    return pa.repeat(pa.scalar(value, kind), size)
