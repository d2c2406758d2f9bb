"""Estimates of some keys as series to draw: from a table of the warehouse or from what `filter` wrote. No Spark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

import kalman
from jobs.core.errors import UserError
from jobs.core.report import plural
from jobs.landing.csv_parquet import read
from jobs.landing.file_rows import read_rows
from jobs.landing.parsing import parse
from jobs.landing.raw_rows import Source
from jobs.landing.values.times import find_times
from jobs.lineage.generations import live_lineage
from jobs.offline.which_estimates import LIVE, need_estimates
from jobs.specs.model_spec import ModelSpec
from jobs.storage.table_rows import read_table
from jobs.storage.tables import measurements
from jobs.storage.warehouse import Tables

Floats = NDArray[np.float64]
Frame = Any
"""A data frame of pandas, whose methods no checker knows the types of."""

_TABLE = ("key", "event_time", "mean", "covariance", "nis", "flags")
_MARKS = ("generation", "batch_id", "correction")
SMOOTHED = "smoothed_"


class Line(NamedTuple):
    """Means and covariances (N, n), (N, n, n) of the states; where only variances are known, the rest is NaN."""

    mean: Floats
    covariance: Floats


class Series(NamedTuple):
    """The estimates of one key, in the order of time.

    key: its text; time (N,) datetime64[us]; lines: the estimate, and the smoothed one where there is one; nis (N,), NaN
    where there is none; flagged (N,); measured (m, N), NaN where missing or unknown
    """

    key: str
    time: NDArray[Any]
    lines: list[Line]
    nis: Floats
    flagged: NDArray[np.bool_]
    measured: Floats

    def newest(self, rows: int | None) -> Series:
        """Return the newest rows alone, so many; None: all."""
        if rows is None:
            return self
        lines = [Line(one.mean[-rows:], one.covariance[-rows:]) for one in self.lines]
        return Series(
            self.key,
            self.time[-rows:],
            lines,
            self.nis[-rows:],
            self.flagged[-rows:],
            self.measured[:, -rows:],
        )


class Measuring(NamedTuple):
    """How the states give the measurements, by constant numbers: H (m, n), offset (m,)."""

    H: Floats
    offset: Floats


def measuring(spec: ModelSpec) -> Measuring | None:
    """Return how the states give the measurements; None where that depends on the row, or is not linear."""
    kernel: Any = kalman.build(spec.definition())
    try:
        H = np.array(kernel.H, float)
        offset = np.array(kernel.offset or np.zeros(len(H)), float)
    except (AttributeError, TypeError, ValueError, kalman.ModelError):
        return None
    return Measuring(H, offset) if H.shape == (len(spec.measurement), len(spec.states)) else None


def of_warehouse(root: str, spec: ModelSpec, which: str, keys: Sequence[str], count: int) -> list[Series]:
    """Return the live estimates of a model, or those of its history.

    Args:
        root: of the warehouse.
        spec: of the model.
        which: `live` or `history`.
        keys: the keys; none: the first ones.
        count: how many keys, if none are named.

    Raises:
        UserError: there are no such estimates or keys, or the warehouse cannot be read without Spark.
    """
    tables = Tables(root)
    name = need_estimates(tables, spec.name, which)
    have = tables.column_names(name)
    more = [one for one in (*_MARKS, f"{SMOOTHED}mean", f"{SMOOTHED}covariance") if one in have]
    chosen = _texts(spec, keys) or sorted(_distinct(tables.columns(name, ("key",))))[:count]
    found = read_table(root, name, [*_TABLE, *more], among=("key", chosen))
    frame: Any = pd.DataFrame() if found is None else found.to_pandas()
    if which == LIVE and len(frame):
        frame = frame[_is_live(tables, spec.name, frame)]
    _refuse_unknown(frame, chosen, name)
    return _series(spec, frame, chosen, _landed(tables, spec, chosen))


def of_files(
    spec: ModelSpec, path: Path, measured: str | None, keys: Sequence[str], count: int
) -> list[Series]:
    """Return the estimates of a file that `filter` wrote.

    Args:
        spec: of the model.
        path: of the file.
        measured: the file, folder or glob that was filtered, for the measured values; None: they are not drawn.
        keys: the keys; none: the first ones.
        count: how many keys, if none are named.

    Raises:
        UserError: a file cannot be read, or was not written by `filter` with this spec; there are no such keys.
    """
    source = read(path)
    n, columns = len(spec.states), source.columns
    frame: Any = pd.DataFrame(
        {"key": _key_texts(spec, source), "event_time": _times(spec, source, str(path))}
    )
    for prefix in ("", SMOOTHED):
        names = [f"{prefix}mean", f"{prefix}covariance"]
        if names[0] in columns:  # Parquet
            frame[names[0]], frame[names[1]] = (columns[name].to_pylist() for name in names)
        elif f"{names[0]}_{spec.states[0]}" in columns:
            full = [f"{names[1]}_{a}_{b}" for a in spec.states for b in spec.states]
            several = full if full[0] in columns else [f"{names[1]}_{one}" for one in spec.states]
            frame[names[0]] = _number_lists(columns, [f"{names[0]}_{one}" for one in spec.states], path)
            frame[names[1]] = _number_lists(columns, several, path)
    if "mean" not in frame or "nis" not in columns:
        raise UserError(
            f"{path}: has no estimates of {plural(n, 'state')} {', '.join(spec.states)}: give a file that "
            f"`kalman-pipeline filter --model {spec.name}` wrote"
        )
    frame["nis"] = _number_lists(columns, ["nis"], path)
    frame["nis"] = frame["nis"].str[0]
    frame["flags"] = columns["flag"].to_pylist() if "flag" in columns else None
    chosen = _texts(spec, keys) or list(dict.fromkeys(frame["key"]))[:count]
    values: Any = pd.DataFrame()
    if measured is not None:
        rows = read_rows(spec, measured)
        parsed = parse(spec, rows, measured)
        values = _measured(spec, _key_texts(spec, rows), parsed.time.astype("datetime64[us]"), parsed.y)
        values = values[parsed.reason == None]  # noqa: E711 - elementwise
    _refuse_unknown(frame, chosen, str(path))
    return _series(spec, frame, chosen, values)


def _texts(spec: ModelSpec, keys: Sequence[str]) -> list[str]:
    """Return keys as the tables have them: of several key columns a JSON array, which may be given as `a,b`."""
    if len(spec.key) < 2:
        return list(keys)
    return [key if key.startswith("[") else _json(key.split(",")) for key in keys]


def _json(values: Sequence[Any]) -> str:
    return json.dumps(list(values), ensure_ascii=False, separators=(",", ":"))


def _refuse_unknown(frame: Frame, keys: Sequence[str], where: str) -> None:
    absent = [key for key in keys if not len(frame) or not (frame["key"] == key).any()]
    if absent or not keys:
        raise UserError(f"{where}: has no estimates" + (f" of key {absent[0]}" if absent else ""))


def _series(spec: ModelSpec, frame: Frame, keys: Sequence[str], measured: Frame) -> list[Series]:
    """Return the series of the keys; `measured` has columns key, event_time and one for each measurement."""
    n, found = len(spec.states), list[Series]()
    by_key = dict(list(frame.groupby("key")))
    values = dict(list(measured.groupby("key"))) if len(measured) else {}
    for key in keys:
        rows = by_key[key].sort_values("event_time", kind="stable")
        rows = rows[rows["mean"].notna()]
        time = rows["event_time"].to_numpy("datetime64[us]")
        lines = [
            Line(_array(rows[f"{prefix}mean"], n), _covariances(rows[f"{prefix}covariance"], n))
            for prefix in ("", SMOOTHED)
            if f"{prefix}mean" in rows
        ]
        y = np.full((len(spec.measurement), len(rows)), np.nan)
        if key in values:
            known = values[key].drop_duplicates("event_time", keep="last").set_index("event_time")
            y = known.reindex(pd.DatetimeIndex(time))[spec.measurement].to_numpy(float).T
        flagged = rows["flags"].notna().to_numpy()
        found.append(Series(key, time, lines, rows["nis"].to_numpy(float), flagged, y))
    return found


def _array(values: Any, width: int) -> Floats:
    return np.array([np.full(width, np.nan) if one is None else one for one in values], float).reshape(
        -1, width
    )


def _covariances(values: Any, n: int) -> Floats:
    """Return matrices (N, n, n) from lists of n variances or n * n numbers."""
    width = next((len(one) for one in values if one is not None), n * n)
    numbers = _array(values, width)
    if width == n * n:
        return numbers.reshape(-1, n, n)
    matrices = np.full((len(numbers), n, n), np.nan)
    matrices[:, range(n), range(n)] = numbers
    return matrices


def _is_live(tables: Tables, model: str, frame: Frame) -> Any:
    """Return which rows are live, those that a later micro-batch has corrected left out."""
    live: Any = pd.Series(False, frame.index)
    for generation, last in live_lineage(tables, model):
        mine = frame["generation"] == generation
        live |= mine if last is None else mine & (frame["batch_id"] <= last)
    if "correction" in frame:
        mine = frame[live]
        same = mine.groupby(["key", "event_time"])
        corrected = same["correction"].transform("max").fillna(False).astype(bool)
        live[mine.index] = ~corrected | (mine["batch_id"] == same["batch_id"].transform("max"))
    return live


def _landed(tables: Tables, spec: ModelSpec, keys: Sequence[str]) -> Frame:
    """Return the measured values of keys that have landed."""
    name = measurements(spec.name)
    columns = [*spec.key, spec.time, *spec.measurement]
    if not tables.exists(name) or not set(columns) <= set(tables.column_names(name)):
        return pd.DataFrame()
    first = None
    if spec.key:
        texts = keys if len(spec.key) == 1 else [json.loads(key)[0] for key in keys]
        first = (spec.key[0], list(dict.fromkeys(texts)))
    found = read_table(tables.root, name, columns, among=first)
    if found is None:
        return pd.DataFrame()
    source = Source({one: found[one].combine_chunks() for one in columns}, found.num_rows)
    time = found[spec.time].cast(pa.timestamp("us")).to_numpy()
    y = np.array([found[one].cast(pa.float64()).to_numpy() for one in spec.measurement])
    return _measured(spec, _key_texts(spec, source), time, y)


def _measured(spec: ModelSpec, key: list[str], time: NDArray[Any], y: Floats) -> Frame:
    return pd.DataFrame({"key": key, "event_time": time, **dict(zip(spec.measurement, y, strict=True))})


def _key_texts(spec: ModelSpec, source: Source) -> list[str]:
    """Return the texts of the keys of rows, as in the column `key` of the tables."""
    texts = [source.columns[name].cast(pa.string()).to_pylist() for name in spec.key]
    if len(texts) == 1:
        return texts[0]
    rows = zip(*texts, strict=True) if texts else [()] * source.rows
    return [_json(row) for row in rows]


def _times(spec: ModelSpec, source: Source, file: str) -> NDArray[Any]:
    column = source.columns.get(spec.time)
    if column is None:
        raise UserError(f"{file}: has no column '{spec.time}', the time of {spec.name}")
    codes = np.unique(np.array(_key_texts(spec, source), dtype=object).astype(str), return_inverse=True)[1]
    return find_times(spec, column, codes, file).micros.astype("datetime64[us]")


def _number_lists(columns: dict[str, pa.Array], names: Sequence[str], path: Path) -> list[list[float]]:
    """Return a list of numbers for each row, from a column for each number; an empty field is NaN."""
    absent = [name for name in names if name not in columns]
    if absent:
        raise UserError(f"{path}: has no column '{absent[0]}'; was it written with another spec?")
    numbers = [pd.to_numeric(columns[name].to_pandas(), errors="coerce") for name in names]
    return np.array(numbers, float).T.tolist()


def _distinct(column: pa.Table) -> list[str]:
    return column["key"].unique().drop_null().to_pylist()
