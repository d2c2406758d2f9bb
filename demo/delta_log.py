"""Read a small Delta table without Spark: committed rows only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote


def commits_of(table: Path) -> Iterator[tuple[float, list[dict[str, Any]]]]:
    """Yield each commit of a table, oldest first: when it became visible, in seconds since 1970, and its actions."""
    for path in sorted((table / "_delta_log").glob("[0-9]*.json")):
        yield path.stat().st_mtime, [json.loads(line) for line in path.read_text().splitlines()]


def files_of(table: Path) -> list[Path]:
    """Return the files of a table's newest version, whose log must be complete; [] without a table."""
    files: dict[str, None] = {}
    for _, actions in commits_of(table):
        for action in actions:
            if "add" in action:
                files[unquote(action["add"]["path"])] = None
            if "remove" in action:
                files.pop(unquote(action["remove"]["path"]), None)
    return [table / file for file in files]


def rows_of(table: Path) -> list[dict[str, Any]]:
    """Return the newest rows of a table; its times are in UTC."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = []
    for file in files_of(table):
        part = pq.read_table(file, coerce_int96_timestamp_unit="us")
        for place, field in enumerate(part.schema):
            # Delta in Java wrote times as INT96 in earlier releases, which has no zone.
            if pa.types.is_timestamp(field.type) and field.type.tz is None:
                times = part.column(place).cast(pa.timestamp("us", "UTC"))
                part = part.set_column(place, field.name, times)
        rows += part.to_pylist()
    return rows
