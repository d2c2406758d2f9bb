"""Map the columns of a file, a message or a table to the columns of a spec.

Only this module renames a file's columns to the spec's names, and joins several columns into one time.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from jobs.landing.raw_rows import RawRows
from jobs.landing.values.time_columns import combine_times
from jobs.specs.model_spec import ModelSpec


def take_columns(spec: ModelSpec, source: RawRows, names: Sequence[str] | None = None) -> RawRows:
    """Return unparsed rows with only the columns of the spec, by the spec's names.

    A column that the rows lack is left out. The key from the file's name already has the spec's name.

    Args:
        spec: the model, with the names of the files' columns.
        source: N rows with the files' column names.
        names: spec columns to take; None: all columns that the rows have.
    """
    if not spec.files.names:
        return source
    columns: dict[str, pa.Array] = {}
    for name in spec.columns if names is None else names:
        given = name if name == spec.key_from_name else spec.files.names.get(name, name)
        if isinstance(given, str):
            if given in source.columns:
                columns[name] = source.columns[given]
            continue
        parts = spec.time_parts
        if all(column in source.columns for column in parts.values()):
            found = {part: source.columns[column] for part, column in parts.items()}
            columns[name] = combine_times(found, parts, spec.time_format)
    before = source.before
    if before is None:
        return source._replace(columns=columns)
    earlier = lambda: (take_columns(spec, part, names) for part in before())  # noqa: E731
    return source._replace(columns=columns, before=earlier)


def build_spec_schema(spec: ModelSpec, schema: pa.Schema) -> pa.Schema:
    """Return the types of a file's columns by the spec's names, without a time that several columns make."""
    if not spec.files.names:
        return schema
    names = {name: spec.list_file_columns([name])[0] for name in spec.columns if name != spec.key_from_name}
    if spec.time_parts:
        del names[spec.time]
    if spec.key_from_name is not None:
        names[spec.key_from_name] = spec.key_from_name
    return pa.schema([(name, schema.field(column).type) for name, column in names.items()])
