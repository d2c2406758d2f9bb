"""The rows that are right, and the rows that a verb reads, in one form that can be compared."""

from __future__ import annotations

import csv
import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pyspark.sql import functions as F

from jobs import ingest
from jobs.batch.history_rows import read_history_rows
from jobs.core.settings import Settings
from jobs.landing.checking import parse
from jobs.landing.file_rows import read_rows
from jobs.lineage.generations import DeployedModel
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.storage.quarantine import REASON
from jobs.storage.table_rows import read_table
from jobs.storage.tables import measurements

HERE = Path(__file__).parent
EXPECTED: dict[str, dict[str, Any]] = json.loads((HERE / "expected.json").read_text())


class ReadRow(NamedTuple):
    """A row: its key's texts joined by a slash, microseconds since 1970, values (NaN: missing)."""

    key: str
    micros: int
    values: tuple[float, ...]


class ReadRows(NamedTuple):
    """Accepted rows in order, the names of their values, and how many rows were rejected."""

    rows: list[ReadRow]
    names: list[str]
    rejected: int

    @property
    def sort_by_key_text(self) -> ReadRows:
        """Return them in an order that does not depend on how a table keeps them."""
        return self._replace(rows=sorted(self.rows, key=str))


def file_of(name: str) -> Path:
    """Return the file of a case."""
    return HERE / "files" / EXPECTED[name]["file"]


def right_rows(name: str) -> ReadRows:
    """Return the rows that are right."""
    with (HERE / "golden" / f"{name}.csv").open(newline="") as stream:
        head, *found = csv.reader(stream)
    rows = [
        ReadRow(key, _micros(at), tuple(float(value) if value else math.nan for value in values))
        for key, at, *values in found
    ]
    return ReadRows(rows, head[2:], 0)


def _micros(text: str) -> int:
    at = datetime.fromisoformat(text)
    return round(at.replace(microsecond=0).timestamp()) * 1_000_000 + at.microsecond


def filtered_rows(spec: ModelSpec, path: Path) -> ReadRows:
    """Return the rows that `filter`, `forecast`, `plot` and `compare` read."""
    source = read_rows(spec, str(path))
    parsed = parse(spec, source, str(path))
    good = np.flatnonzero(parsed.reason == None)  # noqa: E711 - elementwise
    keys = [source.columns[name].to_pylist() for name in spec.key]
    rows = [
        ReadRow(
            "/".join(str(column[i]) for column in keys), int(parsed.time[i]), _values(parsed.y[:, i].tolist())
        )
        for i in good.tolist()
    ]
    return ReadRows(rows, spec.list_file_columns(spec.measurement), source.rows - len(good))


def landed_rows(settings: Settings, spec: ModelSpec, path: Path) -> ReadRows:
    """Return the rows that `ingest` lands of a file, in order."""
    done = ingest.run(settings, spec.name, [str(path)])
    table = read_table(str(settings.warehouse), measurements(spec.name), spec.columns)
    assert table is not None
    rows = [row_of(spec, {**row, spec.time: instant_of(row[spec.time])}) for row in table.to_pylist()]
    return ReadRows(rows, spec.list_file_columns(spec.measurement), done.data["quarantined"])


def estimated_rows(warehouse: Warehouse, spec: ModelSpec, path: Path) -> ReadRows:
    """Return the rows that `estimate --input` reads of a file."""
    frame = read_history_rows(DeployedModel(spec, warehouse), str(path), None).frame
    at = F.unix_micros(F.col(f"`{spec.time}`")).alias(spec.time)
    columns = [F.col(REASON), at, *(F.col(f"`{name}`") for name in (*spec.key, *spec.measurement))]
    found = [row.asDict() for row in frame.select(*columns).collect()]
    rows = [row_of(spec, row) for row in found if row[REASON] is None]
    return ReadRows(rows, spec.list_file_columns(spec.measurement), len(found) - len(rows))


def instant_of(at: datetime) -> int:
    """Return a time in microseconds since 1970."""
    return round(at.replace(microsecond=0).timestamp()) * 1_000_000 + at.microsecond


def row_of(spec: ModelSpec, row: dict[str, Any]) -> ReadRow:
    """Return a row of a table, whose time is in microseconds."""
    values = _values([row[name] for name in spec.measurement])
    return ReadRow("/".join(str(row[name]) for name in spec.key), row[spec.time], values)


def _values(found: list[float | None]) -> tuple[float, ...]:
    """Return values with one and the same NaN, so that rows can be compared."""
    return tuple(math.nan if one is None or math.isnan(one) else float(one) for one in found)


def differences(right: ReadRows, read: ReadRows, free: bool, within: float) -> list[str]:
    """Return in words how read rows differ from the right ones; none where they are the same.

    free: the reader names the values as it likes.
    within: seconds by which a time may differ.
    """
    unknown = [] if free else [one for one in read.names if one not in right.names]
    if unknown:
        return [f"measurements {unknown}, not {right.names}"]
    if not free and len(right.names) <= 4 and len(read.names) != len(right.names):
        return [f"measurements {read.names}, not {right.names}"]
    places = [0] if free else [right.names.index(one) for one in read.names]
    wanted = [row._replace(values=tuple(row.values[i] for i in places)) for row in right.rows]
    empty = sum(all(map(math.isnan, row.values)) for row in wanted)
    if read.rejected and read.rejected == empty:
        # A row without a value may be rejected as well as taken without one: both say it.
        wanted = [row for row in wanted if not all(map(math.isnan, row.values))]
    if len(wanted) != len(read.rows):
        return [f"{len(read.rows)} rows and {read.rejected} rejected ones, not {len(wanted)}"]
    names, problem = _pairs(wanted, read.rows)
    if problem is not None:
        return [problem]
    renamed = sorted((row._replace(key=names[row.key]) for row in wanted), key=lambda row: row[:2])
    found = sorted(read.rows, key=lambda row: row[:2])
    return [
        f"{found_one}, not {right_one}"
        for right_one, found_one in zip(renamed, found, strict=True)
        if right_one.key != found_one.key
        or abs(right_one.micros - found_one.micros) > within * 1e6
        or not np.allclose(right_one.values, found_one.values, rtol=1e-12, atol=0.0, equal_nan=True)
    ]


def _pairs(right: list[ReadRow], read: list[ReadRow]) -> tuple[dict[str, str], str | None]:
    """Return the read key of each right one, or why they do not correspond one to one."""
    wanted, have = ({row.key: None for row in rows} for rows in (right, read))
    if len(wanted) == len(have) == 1:
        return dict(zip(wanted, have, strict=True)), None
    pairs = {key: [one for one in have if set(key.split("/")) <= set(one.split("/"))] for key in wanted}
    found = {key: some[0] for key, some in pairs.items() if len(some) == 1}
    if len(found) != len(wanted) or len(set(found.values())) != len(have):
        return {}, f"keys {list(have)[:5]}, not {list(wanted)[:5]}"
    return found, None
