"""The files of the journeys: readings of many keys, one long series, and a person's own CSV."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from benchmarks.workloads.data import names
from benchmarks.workloads.filter_models import TREND
from benchmarks.workloads.readings import write_readings

START = np.datetime64("2024-01-01", "s")
FIRST, SECOND, THIRD = range(8), range(8, 10), range(10, 11)
"""Minutes of the rows that land first, before the first stream, and before the next one: each has a row of each key."""
HALVES = 2
"""Parquet files of the first ten minutes, each with half of the keys."""
ROWS_OF_OWN = 1_000
"""Rows of each key in the person's own CSV."""


class Sizes(NamedTuple):
    """How many keys and rows there are: of the readings, of the long series, and of the person's own CSV."""

    keys: int
    series_rows: int
    own_keys: int

    @property
    def own_rows(self) -> int:
        """Return the rows of the person's own CSV."""
        return self.own_keys * ROWS_OF_OWN


def build_sizes(scale: float) -> Sizes:
    """Build the sizes; at scale 1 a million keys, a month of a row a second, and a CSV of 100,000 rows."""
    return Sizes(max(20, round(1e6 * scale)), max(200, round(2.6e6 * scale)), max(2, round(100 * scale)))


def build_spec(model: str, unit: str) -> str:
    """Build the spec of the benchmark's trend for the columns of the files."""
    columns = {"name": model, "key": ["sensor"], "time": "at", "measurement": ["value"], "time_unit": unit}
    return yaml.safe_dump({**yaml.safe_load(TREND.read_text()), **columns}, sort_keys=False)


def write_minutes(folder: Path, minutes: range, keys: int) -> None:
    """Write a CSV for each minute, with a row of each key in random order."""
    folder.mkdir(parents=True)
    sensors = pa.array(names(np.arange(keys)))
    for minute in minutes:
        draw = np.random.default_rng(minute)
        order = draw.permutation(keys)
        numbers = {
            "value": draw.normal(20.0, 5.0, keys).round(6),
            "other": draw.normal(0.0, 1.0, keys).round(4),
        }
        at = np.full(keys, START + 60 * minute)
        write_readings(folder / f"minute-{minute:02}.csv", sensors.take(pa.array(order)), at, numbers)


def write_halves(folder: Path, minutes: range, keys: int) -> None:
    """Write the same minutes as Parquet files, each with all rows of some keys in random order."""
    folder.mkdir(parents=True)
    sensors = pa.array(names(np.arange(keys)))
    bounds = [keys * part // HALVES for part in range(HALVES + 1)]
    for part, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        draw = np.random.default_rng(1_000 + part)
        order = np.concatenate([draw.permutation(np.arange(start, stop)) for _ in minutes])
        at = START + 60 * np.repeat(np.array(minutes), stop - start)
        values = draw.normal(20.0, 5.0, len(order)).round(6)
        path = folder / f"half-{part}.parquet"
        write_readings(path, sensors.take(pa.array(order)), at, {"value": values})


def write_series(path: Path, rows: int) -> None:
    """Write one series with a row each second."""
    draw = np.random.default_rng(7)
    sensors = pa.array(["sensor-1"]).take(pa.array(np.zeros(rows, np.int64)))
    values = np.cumsum(draw.normal(0.0, 0.7, rows)) + draw.normal(0.0, 1.0, rows)
    write_readings(path, sensors, START + np.arange(rows), {"value": values.round(6)})


def write_own(path: Path, keys: int) -> None:
    """Write a person's own CSV: an hourly level of each key that wanders, with noise."""
    draw = np.random.default_rng(11)
    level = 20.0 + np.cumsum(draw.normal(0.0, 0.3, (keys, ROWS_OF_OWN)), axis=1)
    values = level + draw.normal(0.0, 1.0, level.shape)
    sensors = pa.array(names(np.tile(np.arange(keys), ROWS_OF_OWN)))
    at = START + 3_600 * np.repeat(np.arange(ROWS_OF_OWN), keys)
    write_readings(path, sensors, at, {"value": values.T.ravel().round(3)})


def count_file_rows(folder: Path) -> int:
    """Count the rows of a Parquet file, or of all Parquet files of a folder."""
    files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    return sum(pq.read_metadata(file).num_rows for file in files)
