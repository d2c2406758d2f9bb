"""The types of columns in the Parquet files of a warehouse's tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.storage.table_rows import UTC_MICROSECONDS


def tables_of(root: str | Path) -> list[Path]:
    """Return the folders of the tables below a warehouse's root."""
    found = [log.parent for log in Path(root).rglob("_delta_log") if "checkpoints" not in log.parts]
    return sorted(found)


def files_of(table: Path) -> list[Path]:
    """Return all existing files that a table's log has ever named."""
    names = {
        action["add"]["path"]
        for commit in (table / "_delta_log").glob("*.json")
        for action in map(json.loads, commit.read_text().splitlines())
        if "add" in action
    }
    return [path for path in (table / unquote(name) for name in sorted(names)) if path.is_file()]


def types_of(table: Path) -> dict[str, set[pa.DataType]]:
    """Return the types that each column of a table has in its files."""
    found: dict[str, set[pa.DataType]] = {}
    for path in files_of(table):
        # Not by `read_table`, which would read `model=walk` in a path as a column.
        for field in pq.ParquetFile(path).read().schema:
            # delta-rs asks Arrow to store updated or merged texts as views: Parquet's type is the same.
            kind = pa.string() if pa.types.is_string_view(field.type) else field.type
            found.setdefault(field.name, set()).add(kind)
    return found


def _plain(kind: pa.DataType) -> Iterator[pa.DataType]:
    """Yield a type, or the types within a list, a map or a struct."""
    if kind.num_fields:
        for place in range(kind.num_fields):
            yield from _plain(kind.field(place).type)
    else:
        yield kind


def several_types(root: str | Path) -> dict[str, str]:
    """Return the columns with several types in the files of their table, or with times other than UTC in
    microseconds."""
    odd = {}
    for table in tables_of(root):
        for name, kinds in types_of(table).items():
            times = {one for kind in kinds for one in _plain(kind) if pa.types.is_timestamp(one)}
            if len(kinds) > 1 or times - {UTC_MICROSECONDS}:
                odd[f"{table.relative_to(root)}: {name}"] = ", ".join(sorted(map(str, kinds)))
    return odd
