"""Read estimates of some keys as series to draw.

They come from a table of the warehouse, or from an output of `filter`. No Spark.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.core.errors import UserError
from jobs.core.report import format_count
from jobs.landing.checking import parse
from jobs.landing.csv_parquet import read
from jobs.landing.dialects import ANY
from jobs.landing.file_rows import read_rows
from jobs.landing.raw_rows import RawRows
from jobs.landing.values.keys import assign_codes, join_codes
from jobs.landing.values.number_reading import build_rules, parse_numbers
from jobs.landing.values.times import find_times
from jobs.lineage.generations import no_live_estimates_error, read_live_lineage
from jobs.lineage.live_rows import open_estimates, read_counted_batches
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding import arrow
from jobs.storage.queries import build_in_condition, quote_name
from jobs.storage.table_rows import read_table
from jobs.storage.tables import estimates, estimates_history, measurements
from jobs.storage.warehouse import Tables

LIVE, HISTORY = "live", "history"


def need_estimates(tables: Tables, model: str, which: str) -> str:
    """Return the table of a model's live estimates, or of the estimates of its history.

    Raises:
        UserError: the table does not exist; the message names the command that makes it.
    """
    name = (estimates if which == LIVE else estimates_history)(model)
    if tables.exists(name):
        return name
    if which == HISTORY:
        raise UserError(
            f"model {model} has no estimates of history in {tables.root}: make them with "
            f"`kalman-pipeline estimate --model {model}`"
        )
    raise no_live_estimates_error(tables, model)


Floats = NDArray[np.float64]

SMOOTHED = "smoothed_"
_MOMENTS = ("mean", "covariance", f"{SMOOTHED}mean", f"{SMOOTHED}covariance")
_TABLE = ("key", "event_time", *_MOMENTS, "nis", "flags")


class StateEstimates(NamedTuple):
    """Means (N, n) and covariances (N, n, n) of the states; if only variances are known, covariances are NaN."""

    mean: Floats
    covariance: Floats


class KeySeries(NamedTuple):
    """The estimates of one key, in the order of time.

    key: the text of the key.
    time: (N,) datetime64[us].
    lines: the estimate, and the smoothed estimate if there is one.
    nis: (N,), NaN if missing.
    flagged: (N,).
    measured: (m, N), NaN if missing or unknown.
    """

    key: str
    time: NDArray[Any]
    lines: list[StateEstimates]
    nis: Floats
    flagged: NDArray[np.bool_]
    measured: Floats

    def newest(self, rows: int | None) -> KeySeries:
        """Return the series with only its newest `rows` rows; None means all rows."""
        if rows is None:
            return self
        lines = [StateEstimates(one.mean[-rows:], one.covariance[-rows:]) for one in self.lines]
        return KeySeries(
            self.key,
            self.time[-rows:],
            lines,
            self.nis[-rows:],
            self.flagged[-rows:],
            self.measured[:, -rows:],
        )


def read_warehouse_series(
    root: str, spec: ModelSpec, which: str, keys: Sequence[str], count: int
) -> list[KeySeries]:
    """Return the live estimates of a model, or the estimates of its history.

    Args:
        root: the root of the warehouse.
        spec: the spec of the model.
        which: `live` or `history`.
        keys: the keys; an empty list means the first keys.
        count: the number of keys if `keys` is empty.

    Raises:
        UserError: there are no such estimates or keys, or the warehouse cannot be read without Spark.
    """
    tables = Tables(root)
    name = need_estimates(tables, spec.name, which)
    chosen = _format_keys(spec, keys)
    if not chosen:
        have = tables.columns(name, ("key",))["key"].unique().drop_null().to_pylist()
        chosen = sorted(have)[:count]
    lineage = read_live_lineage(tables, spec.name) if which == LIVE else []
    found: list[pa.Table] = []
    if chosen and (lineage or which != LIVE):
        wanted = build_in_condition(quote_name("key"), chosen)
        found = list(read_counted_batches(root, open_estimates(root, name, lineage), _TABLE, wanted))
    if not found:
        raise UserError(f"{name}: has no estimates" + (f" of key {chosen[0]}" if chosen else ""))
    table = pa.concat_tables(found)
    columns = {one: table[one].combine_chunks() for one in table.column_names}
    source = RawRows(columns, table.num_rows)
    lines = [_parse_estimates(spec, source, prefix, name) for prefix in ("", SMOOTHED)]
    estimates = _Estimates(
        np.array(columns["key"].to_pylist(), dtype=object),
        _convert_to_micros(columns["event_time"]),
        [one for one in lines if one is not None],
        arrow.to_numpy(columns["nis"], np.nan),
        arrow.to_numpy(columns["flags"].is_valid()),
    )
    return _build_series(spec, estimates, chosen, _read_measured(tables, spec, chosen), name)


def read_file_series(
    spec: ModelSpec, path: Path, measured: str | None, keys: Sequence[str], count: int
) -> list[KeySeries]:
    """Return the estimates of a file written by `filter`.

    Args:
        spec: the spec of the model.
        path: the path of the file.
        measured: file, folder or glob of the filtered measurements; None means that measurements are not drawn.
        keys: the keys; an empty list means the first keys.
        count: the number of keys if `keys` is empty.

    Raises:
        UserError: a file cannot be read, `filter` did not write it with this spec, or it does not have a wanted key.
    """
    source = read(path)
    names, times = _list_key_texts(spec, source), _parse_times(spec, source, str(path))
    line = _parse_estimates(spec, source, "", str(path))
    smoothed = _parse_estimates(spec, source, SMOOTHED, str(path))
    if line is None or "nis" not in source.columns:
        raise UserError(
            f"{path}: has no estimates of {format_count(len(spec.states), 'state')} "
            f"{', '.join(spec.states)}: give a file that `kalman-pipeline filter --model {spec.name} --input FILE "
            f"--output {shlex.quote(str(path))}` wrote"
        )
    flag = source.columns.get("flag", pa.nulls(source.rows))
    estimates = _Estimates(
        names,
        times,
        [line] if smoothed is None else [line, smoothed],
        _parse_numbers(source, ["nis"], str(path))[0],
        arrow.to_numpy(flag.is_valid()),
    )
    values = None
    if measured is not None:
        rows = read_rows(spec, measured)
        parsed = parse(spec, rows, measured)
        good = parsed.accepted
        values = _Measured(_list_key_texts(spec, rows)[good], parsed.time[good], parsed.y[:, good])
    chosen = _format_keys(spec, keys) or list(dict.fromkeys(names.tolist()))[:count]
    return _build_series(spec, estimates, chosen, values, str(path))


class _Estimates(NamedTuple):
    """Estimates of N rows in any order: text of the key, microseconds, lines, NIS, and whether the row has a flag."""

    key: NDArray[np.object_]
    time: NDArray[np.int64]
    lines: list[StateEstimates]
    nis: Floats
    flagged: NDArray[np.bool_]


class _Measured(NamedTuple):
    """The measured values (m, N) of rows, with keys as texts (N,) and times in microseconds (N,)."""

    key: NDArray[np.object_]
    time: NDArray[np.int64]
    y: Floats


def _format_keys(spec: ModelSpec, keys: Sequence[str]) -> list[str]:
    """Return keys in the form of the tables: a JSON array for several key columns, which may be given as `a,b`."""
    if len(spec.key) < 2:
        return list(keys)
    return [key if key.startswith("[") else _format_json(key.split(",")) for key in keys]


def _format_json(values: Sequence[Any]) -> str:
    return json.dumps(list(values), ensure_ascii=False, separators=(",", ":"))


def _build_series(
    spec: ModelSpec, estimates: _Estimates, keys: Sequence[str], measured: _Measured | None, where: str
) -> list[KeySeries]:
    """Return the estimates as one series per key."""
    if not keys:
        raise UserError(f"{where}: has no estimates")
    found: list[KeySeries] = []
    has_mean = np.asarray(~np.isnan(estimates.lines[0].mean).all(axis=1))
    for key in keys:
        mine = np.flatnonzero(estimates.key == key)
        if not len(mine):
            raise UserError(f"{where}: has no estimates of key {key}")
        mine = mine[has_mean[mine]]
        mine = mine[np.argsort(estimates.time[mine], kind="stable")]
        time = estimates.time[mine]
        y = np.full((len(spec.measurement), len(mine)), np.nan)
        if measured is not None:
            known = np.flatnonzero(measured.key == key)
            last = dict(zip(measured.time[known].tolist(), known.tolist(), strict=True))
            there = np.flatnonzero(np.isin(time, measured.time[known]))
            y[:, there] = measured.y[:, [last[at] for at in time[there].tolist()]]
        lines = [StateEstimates(one.mean[mine], one.covariance[mine]) for one in estimates.lines]
        nis, flagged = estimates.nis[mine], estimates.flagged[mine]
        found.append(KeySeries(key, time.astype("datetime64[us]"), lines, nis, flagged, y))
    return found


def _parse_estimates(spec: ModelSpec, source: RawRows, prefix: str, where: str) -> StateEstimates | None:
    """Return the estimates of rows; with a prefix, the smoothed estimates. None means that these columns are absent."""
    mean, covariance = f"{prefix}mean", f"{prefix}covariance"
    columns, states = source.columns, spec.states
    if mean in columns:  # Parquet
        return StateEstimates(
            _convert_lists(columns[mean]), _build_matrices(_convert_lists(columns[covariance]), len(states))
        )
    if f"{mean}_{states[0]}" not in columns:
        return None
    full = [f"{covariance}_{a}_{b}" for a in states for b in states]
    several = full if full[0] in columns else [f"{covariance}_{one}" for one in states]
    means = _parse_numbers(source, [f"{mean}_{one}" for one in states], where)
    return StateEstimates(means.T, _build_matrices(_parse_numbers(source, several, where).T, len(states)))


def _convert_lists(column: pa.ListArray) -> Floats:
    """Return lists of d numbers as (N, d); a missing list becomes NaN."""
    valid = arrow.to_numpy(column.is_valid())
    numbers = arrow.to_numpy(column.flatten(), np.nan).reshape(int(valid.sum()), -1)
    found = np.full((len(column), numbers.shape[1]), np.nan)
    found[valid] = numbers
    return found


def _build_matrices(values: Floats, n: int) -> Floats:
    """Return matrices (N, n, n) from n variances or n * n covariances of each row."""
    if values.shape[1] == n * n:
        return values.reshape(-1, n, n)
    matrices = np.full((len(values), n, n), np.nan)
    matrices[:, range(n), range(n)] = values
    return matrices


def _read_measured(tables: Tables, spec: ModelSpec, keys: Sequence[str]) -> _Measured | None:
    """Return the measured values of keys from the measurements table."""
    name = measurements(spec.name)
    columns = [*spec.key, spec.time, *spec.measurement]
    if not tables.exists(name) or not set(columns) <= set(tables.column_names(name)):
        return None
    first = None
    if spec.key:
        texts = keys if len(spec.key) == 1 else [json.loads(key)[0] for key in keys]
        first = (spec.key[0], list(dict.fromkeys(texts)))
    found = read_table(tables.root, name, columns, among=first)
    if found is None:
        return None
    source = RawRows({one: found[one].combine_chunks() for one in columns}, found.num_rows)
    y = _parse_numbers(source, spec.measurement, name)
    return _Measured(_list_key_texts(spec, source), _convert_to_micros(source.columns[spec.time]), y)


def _list_key_texts(spec: ModelSpec, source: RawRows) -> NDArray[np.object_]:
    """Return the key of each row in the form of the tables' column `key`."""
    texts = [source.columns[name].cast(pa.string()).to_pylist() for name in spec.key]
    if len(texts) == 1:
        return np.array(texts[0], dtype=object)
    rows = zip(*texts, strict=True) if texts else [()] * source.rows
    return np.array([_format_json(row) for row in rows], dtype=object)


def _convert_to_micros(column: pa.Array) -> NDArray[np.int64]:
    return arrow.to_numpy(column.cast(pa.timestamp("us")).cast(pa.int64()))


def _parse_times(spec: ModelSpec, source: RawRows, file: str) -> NDArray[np.int64]:
    column = source.columns.get(spec.time)
    if column is None:
        raise UserError(f"{file}: has no column '{spec.time}', the time of {spec.name}")
    codes = join_codes(
        [np.zeros(source.rows, np.int64), *(assign_codes(source.columns[name]) for name in spec.key)]
    )
    return find_times(spec, column, codes, file).micros


def _parse_numbers(source: RawRows, names: Sequence[str], where: str) -> Floats:
    """Return the numbers (d, N) in columns, with NaN for a missing number."""
    absent = [name for name in names if name not in source.columns]
    if absent:
        raise UserError(f"{where}: has no column '{absent[0]}'; was it written with another spec?")
    reason = np.full(source.rows, None, dtype=object)
    return parse_numbers(names, "estimate", source, build_rules((), ANY), where, reason)
