"""Check the payloads of rejected rows again with the model's current spec.

Payloads are JSON objects in the quarantine table; their members are texts, as in a file, or typed values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.landing.checking import check_rows
from jobs.landing.json_rows import find_member
from jobs.landing.raw_rows import RawRows, find_shape_problem
from jobs.landing.text_lines import match_again
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding import arrow
from jobs.storage.measurements_table import KeyTypes
from jobs.storage.quarantine import REASON

NOT_AN_OBJECT = "payload: not a JSON object"


class Rechecked(NamedTuple):
    """Reason of rejection, or row to land (a JSON object with the time in microseconds), for each payload."""

    reasons: list[str | None]
    landings: list[str | None]


def recheck_payloads(
    spec: ModelSpec,
    key_types: KeyTypes,
    payloads: Sequence[str | None],
    landed: NDArray[np.int64] | None = None,
) -> Rechecked:
    """Check payloads as `ingest` checks rows; a time may also be in ISO 8601 instead of the spec's format.

    landed: time at which each payload was quarantined, in microseconds since 1970; None: now.
    """
    rows = [_parse_object(payload) for payload in payloads]
    known = [place for place, row in enumerate(rows) if row is not None]
    reasons: list[str | None] = [NOT_AN_OBJECT] * len(rows)
    landings: list[str | None] = [None] * len(rows)

    def check(spec: ModelSpec, places: list[int]) -> None:
        source = _build_rows(spec, [rows[place] or {} for place in places])
        source = source._replace(landed=None if landed is None else landed[places])
        batch = check_rows(spec, source, key_types, "payload")
        found = _format_payloads(spec, batch)
        for place, reason, landing in zip(places, batch.column(REASON).to_pylist(), found, strict=True):
            reasons[place], landings[place] = reason, landing
        # The stream writes the time of a rejected row in ISO 8601, whatever the files' format is.
        mistimed = [place for place in places if (reasons[place] or "").startswith(f"time {spec.time}:")]
        if spec.time_format is not None and mistimed:
            check(spec.model_copy(update={"time_format": None}), mistimed)

    # A row that the stream rejected has the table's column names.
    by_table = {place for place in known if _has_names_of_table(spec, rows[place] or {})}
    check(spec, [place for place in known if place not in by_table])
    if by_table:
        plain = spec.files.model_copy(update={"names": {}})
        check(spec.model_copy(update={"files": plain}), sorted(by_table))
    return Rechecked(reasons, landings)


def _parse_object(payload: str | None) -> dict[str, Any] | None:
    try:
        value = json.loads(payload or "")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _has_names_of_table(spec: ModelSpec, row: dict[str, Any]) -> bool:
    renamed = spec.files.names.keys() & {*spec.columns}
    return any(name in row for name in renamed) and not row.keys() & {*spec.list_file_columns(renamed)}


def _build_rows(spec: ModelSpec, rows: list[dict[str, Any]]) -> RawRows:
    names = set(spec.list_file_columns(spec.naming_columns))
    problems = [find_shape_problem(row) for row in rows]
    if spec.line_pattern is not None:
        again = [match_again(spec.line_pattern, row) for row in rows]
        rows, unmatched = [row for row, _ in again], [problem for _, problem in again]
        problems = [one or other for one, other in zip(problems, unmatched, strict=True)]
    decimal = spec.files.decimal
    numbers = {*spec.list_file_columns([*spec.measurement, *spec.control])} if decimal == "," else set()
    named = [] if spec.key_from_name is None else [spec.key_from_name]
    columns = {
        name: arrow.build_texts(
            [_format_value(find_member(row, name), name in names, name in numbers) for row in rows]
        )
        for name in (*spec.file_columns, *named)
    }
    return RawRows(columns, len(rows), np.array(problems, object), decimal)


def _format_value(value: Any, whole: bool, comma: bool) -> str | None:
    """Return a value as the text that a file would have.

    whole: write whole numbers (of a key or id column) without a fraction. comma: write a number with a decimal comma.
    """
    if value is None or isinstance(value, str):
        return value
    if whole and isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value).replace(".", ",") if comma and isinstance(value, float) else json.dumps(value)


def _format_payloads(spec: ModelSpec, batch: pa.RecordBatch) -> list[str | None]:
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
