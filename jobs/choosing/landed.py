"""Read the landed rows of a sample of keys, without Spark."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from jobs.core.errors import UserError
from jobs.landing.raw_rows import RawRows
from jobs.specs.model_spec import ModelSpec
from jobs.storage.queries import open_queries, quote_name, quote_text
from jobs.storage.tables import measurements


def read_landed_rows(root: str, spec: ModelSpec, columns: Sequence[str], keys: int, rows: int) -> RawRows:
    """Return the last landed rows of the keys with the lowest hashes.

    Args:
        root: root of the warehouse with the model's measurements.
        spec: spec of the table's model.
        columns: columns to read.
        keys: number of keys.
        rows: number of rows of each key.

    Raises:
        UserError: nothing has landed, or a column is missing.
    """
    key = ", ".join(map(quote_name, spec.key))
    partition = f"PARTITION BY {key}" if key else ""
    place = f"row_number() OVER ({partition} ORDER BY {quote_name(spec.time)} DESC) AS _place"
    with open_queries(root) as queries:
        schema = queries.add("landed", measurements(spec.name))
        absent = [] if schema is None else [name for name in columns if name not in schema.names]
        if absent:
            raise UserError(
                f"the measurements of {spec.name} have no column '{absent[0]}'; give the files with "
                "--input, or name the columns that have landed"
            )
        where = "true"
        if key:
            known = queries.run(f"SELECT DISTINCT {key} FROM landed").to_pylist()
            sample = sorted(known, key=lambda row: hashlib.sha256(repr(row).encode()).digest())[:keys]
            where = " OR ".join(map(_is_key, sample)) or "false"
        found = queries.run(
            f"SELECT {', '.join(map(quote_name, columns))} FROM (SELECT *, {place} FROM landed WHERE {where}) "
            f"WHERE _place <= {rows}"
        )
    if not found.num_rows:
        raise UserError(f"nothing has landed for {spec.name}; ingest files first, or give --input")
    arrays = {name: found[name].combine_chunks() for name in columns}
    return RawRows(arrays, found.num_rows)


def _is_key(row: dict[str, Any]) -> str:
    """Return the SQL condition for the rows of a key."""
    values = {
        name: quote_text(value) if isinstance(value, str) else str(value) for name, value in row.items()
    }
    return f"({' AND '.join(f'{quote_name(name)} = {value}' for name, value in values.items())})"
