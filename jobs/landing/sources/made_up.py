"""Land made-up rows to try out a model (`source: {kind: rate}`); the same seed always gives the same rows.

Row n depends only on the seed and on n. The number n determines the time and the key; the keys take turns. The Philox
generator, which can begin at any number, determines the noise. Therefore the only state is the number of landed rows,
which each commit to the measurements table records. Each row lands once, and a landing that was killed continues at
the next row.
"""

from __future__ import annotations

import threading
import time
from datetime import UTC
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.core.errors import UserError
from jobs.core.processes import stop_signal
from jobs.core.progress import Progress
from jobs.core.report import Report
from jobs.core.settings import Settings
from jobs.core.times import TimeParser, parse_duration_us
from jobs.landing.checking import ROWS_A_FILE
from jobs.landing.remarks import build_source_report
from jobs.landing.target_table import LandingTables, prepare
from jobs.landing.written_pieces import ORIGIN, RowCounts, write_rows
from jobs.lineage.leases import stream_lock
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding import arrow
from jobs.storage.measurements_table import KeyTypes
from jobs.storage.quarantine import REASON
from jobs.storage.tables import measurements
from jobs.storage.warehouse import Tables

WAVE_ROWS = 200
"""Number of rows of a key in one wave of its values."""


class Made(NamedTuple):
    """Number of landed rows, and the time (seconds since 1970) from which rows are due at the spec's rate."""

    rows: int
    since: float


def make_up_rows(spec: ModelSpec, first: int, stop: int, types: KeyTypes) -> pa.Table:
    """Return the rows from `first` up to, but not including, `stop`, with the spec's columns.

    Each measurement is a sine wave with standard normal noise, and is rounded to a value that the filter accepts. Each
    control is a sine wave without noise.
    """
    assert spec.source is not None
    rate = spec.source.rate
    number = np.arange(first, stop, dtype=np.int64)
    keys = rate.keys if spec.key else 1
    turn, key = number // keys, number % keys
    begin = TimeParser(None, UTC)(rate.begin)
    if begin is None:
        raise UserError(f"source.rate.begin: '{rate.begin}' is not a time; write it as 2024-01-01")
    columns: dict[str, pa.Array] = {}
    for place, name in enumerate(spec.key):  # only the first key column has different values
        value = key if place == 0 else np.zeros_like(key)
        texts = [f"{name}-{one}" for one in value.tolist()]
        columns[name] = arrow.build_integers(value) if types[name] == "bigint" else arrow.build_texts(texts)
    columns[spec.time] = arrow.build_times(
        begin + turn * parse_duration_us(rate.every), np.ones(len(turn), bool)
    )
    noise, chance = _draw_noise(rate.seed, number, len(spec.measurement))
    for place, name in enumerate(spec.measurement):
        wave = 10.0 + 3.0 * np.sin(2.0 * np.pi * (turn / WAVE_ROWS + key / keys) + place) + noise[place]
        values = _round_to_kind(spec, place, wave)
        columns[name] = arrow.build_numbers(np.where(chance[place] < rate.missing, np.nan, values))
    for place, name in enumerate(spec.control):
        columns[name] = arrow.build_numbers(np.sin(2.0 * np.pi * turn / WAVE_ROWS + place))
    for name in spec.id_columns:
        columns[name] = (
            arrow.build_integers(number)
            if types[name] == "bigint"
            else arrow.build_texts(list(map(str, number.tolist())))
        )
    return pa.table({name: columns[name] for name in spec.columns})


def _draw_noise(
    seed: int, number: NDArray[np.int64], m: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return standard normal numbers (m, N) and uniform numbers (m, N) that depend only on seed and row number."""
    normal, uniform = np.empty((m, len(number))), np.empty((m, len(number)))
    for place in range(m):
        # In each step, Philox draws four 64-bit numbers. Each row has one step, and uses three of these numbers.
        counter = np.random.Philox(key=[seed, place], counter=[int(number[0]) if len(number) else 0, 0, 0, 0])
        raw = np.random.Generator(counter).random((len(number), 4))
        radius = np.sqrt(-2.0 * np.log1p(-raw[:, 0]))  # Box and Muller (1958)
        normal[place], uniform[place] = radius * np.cos(2.0 * np.pi * raw[:, 1]), raw[:, 2]
    return normal, uniform


def _round_to_kind(spec: ModelSpec, place: int, wave: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return values rounded for the filter: to counts, to 0 or 1, or to category codes; else unchanged."""
    if spec.filter == "poisson_mixture":
        return np.maximum(np.rint(wave), 0.0)
    if spec.filter == "bernoulli_mixture":
        return (wave > 10.0).astype(float)
    if spec.filter == "categorical_mixture":
        given = None if spec.mixture is None else spec.mixture.categories
        count = given[place] if isinstance(given, list) else given or 2
        return np.clip(np.floor((wave - 5.0) / 10.0 * count), 0, count - 1)
    return wave


def land_made_up(settings: Settings, spec: ModelSpec, seconds: float | None) -> Report:
    """Land the rows that are due now; if `seconds` is given, repeat this at that interval until SIGTERM.

    Raises:
        UserError: another process lands the model, or the spec's rate or start is invalid.
    """
    began, title = time.monotonic(), f"ingest {spec.name}"
    with stream_lock(settings.warehouse, title.replace(" ", "-")), stop_signal() as stop:
        tables = Tables(settings.warehouse)
        types = prepare(tables, spec, dict.fromkeys(spec.naming_columns, "string"))
        with Progress(title, None, quiet=settings.quiet) as progress:
            counts = _land(tables, spec, types, stop, seconds, progress)
    return build_source_report(tables, spec, counts, began)


def _land(
    tables: Tables,
    spec: ModelSpec,
    types: KeyTypes,
    stop: threading.Event,
    seconds: float | None,
    progress: Progress,
) -> RowCounts:
    assert spec.source is not None
    rate, counts = spec.source.rate, RowCounts()
    made = find_progress(tables, spec) or Made(0, time.time())
    while True:
        due = rate.first_rows + int(max(0.0, time.time() - made.since) * rate.rows_per_second)
        while made.rows < due and not stop.is_set():
            upto = min(due, made.rows + ROWS_A_FILE)
            counts.add(_append(tables, spec, types, made, upto))
            made = made._replace(rows=upto)
            progress.advance(1, f"{counts.rows:,} rows")
        if seconds is None or stop.wait(seconds):
            return counts


def find_progress(warehouse: Tables, spec: ModelSpec) -> Made | None:
    """Return the progress for the seed of a spec; None before the first landing with this seed."""
    assert spec.source is not None
    seed = spec.source.rate.seed
    known = (one.detail.get("made_up") for one in warehouse.read_log_entries(measurements(spec.name)))
    found = next((one for one in known if one is not None and one["seed"] == seed), None)
    return None if found is None else Made(found["rows"], found["since"])


def _append(tables: Tables, spec: ModelSpec, types: KeyTypes, made: Made, upto: int) -> RowCounts:
    assert spec.source is not None
    seed = spec.source.rate.seed
    rows = make_up_rows(spec, made.rows, upto, types)
    rows = rows.append_column(REASON, pa.nulls(rows.num_rows, pa.string()))
    rows = rows.append_column(ORIGIN, arrow.repeat_text(f"rate:{seed}", rows.num_rows))
    with LandingTables.of(tables, spec) as attempt:
        written = write_rows(attempt.task(), rows.to_batches())
        place = {"made_up": {"seed": seed, "rows": upto, "since": made.since}}
        attempt.commit([written], (f"ingest-{spec.name}-rate-{seed}", upto), place)
    return written.counts
