"""Rows whose right reading is known, in the formats that are read, and references that read damaged ones."""

from __future__ import annotations

import csv
import io
import json
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from jobs.landing import reading
from jobs.specs.model_spec import ModelSpec
from jobs.storage.quarantine import REASON
from tests.fuzz.judge import ANY, REJECT, Checked

SPEC = ModelSpec.model_validate(
    {
        "name": "fuzz",
        "version": 1,
        "key": ["id"],
        "time": "at",
        "time_range": {"latest": None},
        "measurement": ["x"],
        "states": ["level"],
        "process": {"kind": "random_walk", "variance": 1.0},
        "observation": {"H": [[1.0]], "R": [[1.0]]},
        "initial": {"mean": [0.0], "covariance": [[1.0]]},
    }
)
COLUMNS = ("id", "at", "x")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
KEYS = [
    "a",
    "B 7",
    "Zürich",
    'quo"te',
    "com,ma",
    "line\nbreak",
    " blank ",
    "0",
    "007",
    "-5",
    "=1+1",
    "名前",
    "x" * 300,
]
NUMBERS = [0.0, -0.0, 1.5, -273.15, 1e-300, 1.7976931348623157e308, 5e-324, 0.1, 123456789.123456789, 3e8]


class Row(NamedTuple):
    """A row as texts, and what is right: its values, or REJECT."""

    texts: dict[str, Any]
    right: Any


def good(chance: random.Random) -> Row:
    """Return a row that is accepted."""
    key = chance.choice(KEYS)
    at = EPOCH + timedelta(microseconds=chance.randrange(0, 4_000_000_000_000_000))
    value = chance.choice([chance.choice(NUMBERS), chance.uniform(-1e6, 1e6)])
    micros = (at - EPOCH) // timedelta(microseconds=1)
    return Row({"id": key, "at": at.isoformat(), "x": repr(value)}, (key, micros, value))


def bad(chance: random.Random) -> Row:
    """Return a row that is rejected."""
    texts = dict(good(chance).texts)
    field, value = chance.choice(
        [
            *(("x", text) for text in ("many", "1,5", "1e999", "inf", "0x10", "--1", "1 2", "٣")),
            *(("at", text) for text in ("", "yesterday", "2024-13-01T00:00:00Z", "2024-02-30", "9" * 30)),
            ("id", ""),
        ]
    )
    return Row({**texts, field: value}, REJECT)


def some(chance: random.Random, most: int = 12) -> list[Row]:
    """Return rows, a good one first: it gives the columns of a new table their types."""
    rest = (good(chance) if chance.random() < 0.7 else bad(chance) for _ in range(chance.randint(0, most)))
    return [good(chance), *rest]


def as_csv(rows: list[Row], ends: str = "\n") -> bytes:
    """Return rows as CSV, with every field in quotes that needs them."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator=ends)
    writer.writerow(COLUMNS)
    writer.writerows([[row.texts[name] for name in COLUMNS] for row in rows])
    return out.getvalue().encode()


def document(row: Row) -> bytes:
    """Return a row as a JSON object; numbers are numbers where they can be."""
    texts = dict(row.texts)
    try:
        number = float(texts["x"])
        written = repr(number) if number - number == 0 and row.right is not REJECT else json.dumps(texts["x"])
    except ValueError:
        written = json.dumps(texts["x"])
    head = json.dumps({"id": texts["id"], "at": texts["at"]}, ensure_ascii=False)[:-1]
    return f'{head}, "x": {written}}}'.encode()


def read(path: Path) -> list[Checked]:
    """Return all rows of a file as `ingest` reads and checks them, in order."""
    types = {"id": "string"}
    found: list[Checked] = []
    reader = reading.select_reader(SPEC, str(path))
    for piece in reader.pieces():
        for batch in reader.read(piece, types):
            found += rows_of(batch)
    return found


def rows_of(batch: pa.RecordBatch) -> list[Checked]:
    """Return the rows of checked Arrow batches."""
    reasons = batch.column(REASON).to_pylist()
    times = batch.column("at").cast(pa.int64()).to_pylist()
    values = zip(batch.column("id").to_pylist(), times, batch.column("x").to_pylist(), strict=True)
    return [
        Checked(None if reason is not None else _plain(row), reason)
        for reason, row in zip(reasons, values, strict=True)
    ]


def _plain(row: tuple[Any, ...]) -> tuple[Any, ...]:
    key, at, value = row
    return key, at, float("nan") if value is None else value


def reference_csv(data: bytes, right: list[Row]) -> list[Any] | None:
    """Return what Python's own reader finds in a damaged CSV file: rows that are untouched, and others (ANY).

    None: it does not say how many rows there are.
    """
    text = data.decode("utf-8", "surrogateescape").removeprefix("\ufeff")
    csv.field_size_limit(1 << 30)
    try:
        records = list(csv.reader(io.StringIO(text, newline=""), strict=False))
    except csv.Error:
        return None
    if not records or tuple(records[0]) != COLUMNS:
        return None
    known = {tuple(str(row.texts[name]) for name in COLUMNS): row.right for row in right}
    return [known.get(tuple(record), ANY) for record in records[1:] if record]


def reference_object(text: bytes, known: dict[bytes, Any]) -> Any:
    """Return what is right for a JSON object: of an untouched one its row; another one must not be lost."""
    return known.get(text.strip(), ANY)
