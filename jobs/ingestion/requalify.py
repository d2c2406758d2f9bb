"""Judge rejected rows again by the model's spec as it is now: what each would land as, or why it still does not fit.

Payloads are the JSON objects that quarantine keeps: texts as a file had them, or values with types of their own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from jobs.encoding import arrow
from jobs.ingestion.checking import check_rows
from jobs.ingestion.csv_parquet import CORRUPT, Source
from jobs.specs.model_spec import ModelSpec
from jobs.warehouse.measurements_table import KeyTypes
from jobs.warehouse.quarantine import REASON

NOT_AN_OBJECT = "payload: not a JSON object"


class Judged(NamedTuple):
    """For each payload the reason why it does not fit, or what it lands as: a JSON object with the time in us."""

    reasons: list[str | None]
    landings: list[str | None]


def judge(spec: ModelSpec, key_types: KeyTypes, payloads: Sequence[str | None]) -> Judged:
    """Check payloads as `ingest` checks rows; a time that is not in the spec's format may be ISO 8601."""
    rows = [_object(payload) for payload in payloads]
    known = [place for place, row in enumerate(rows) if row is not None]
    reasons: list[str | None] = [NOT_AN_OBJECT] * len(rows)
    landings: list[str | None] = [None] * len(rows)

    def check(spec: ModelSpec, places: list[int]) -> None:
        batch = check_rows(spec, _source(spec, [rows[place] or {} for place in places]), key_types, "payload")
        found = _landings(spec, batch)
        for place, reason, landing in zip(places, batch.column(REASON).to_pylist(), found, strict=True):
            reasons[place], landings[place] = reason, landing

    check(spec, known)
    if spec.time_format is not None:
        # A row that the stream rejected has its time written out, whatever the files' format is.
        mistimed = [place for place in known if (reasons[place] or "").startswith(f"time {spec.time}:")]
        check(spec.model_copy(update={"time_format": None}), mistimed)
    return Judged(reasons, landings)


def _object(payload: str | None) -> dict[str, Any] | None:
    try:
        value = json.loads(payload or "")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _source(spec: ModelSpec, rows: list[dict[str, Any]]) -> Source:
    names = set(spec.naming_columns)
    columns = {
        name: arrow.texts([_text(row.get(name), name in names) for row in rows]) for name in spec.columns
    }
    misshapen = np.array([row.get(CORRUPT) is not None for row in rows], bool)
    return Source(columns, misshapen, len(rows))


def _text(value: Any, whole: bool) -> str | None:
    """Return a value as a file would have it; a key or id that is a whole number is written as one."""
    if value is None or isinstance(value, str):
        return value
    if whole and isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value)


def _landings(spec: ModelSpec, batch: pa.RecordBatch) -> list[str | None]:
    fits = batch.column(REASON).is_null().to_pylist()
    columns = {name: batch.column(name) for name in spec.columns}
    columns[spec.time] = columns[spec.time].cast(pa.int64())
    values = {name: column.to_pylist() for name, column in columns.items()}
    return [
        json.dumps({name: values[name][place] for name in values if values[name][place] is not None})
        if fit
        else None
        for place, fit in enumerate(fits)
    ]
