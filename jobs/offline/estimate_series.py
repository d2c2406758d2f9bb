"""Read estimates of some keys as series to draw.

They come from a table of the warehouse, or from an output of `filter`. No Spark.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
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
from jobs.lineage.catalog import Catalog
from jobs.lineage.generations import no_live_estimates_error
from jobs.lineage.live_rows import open_estimates, read_counted_batches
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding import arrow
from jobs.state.kernel import find_projection, list_quantities, project_states
from jobs.storage.queries import build_in_condition, quote_name
from jobs.storage.table_rows import read_table
from jobs.storage.tables import estimates, estimates_history, measurements
from jobs.storage.warehouse import Tables

LIVE, HISTORY = "live", "history"


def choose_estimates(catalog: Catalog, model: str, history: bool) -> str:
    """Return the estimates to draw: `LIVE` if there are any and `history` is false, else `HISTORY`.

    Raises:
        UserError: the model has no such estimates; the message names the command that makes them.
    """
    tables, none_live = catalog.warehouse, not catalog.warehouse.exists(estimates(model))
    if (history or none_live) and tables.exists(estimates_history(model)):
        return HISTORY
    if history:
        raise UserError(
            f"model {model} has no estimates of history in {tables.root}: make them with "
            f"`kalman-pipeline estimate --model {model}`"
        )
    if none_live:
        raise no_live_estimates_error(tables, model)
    return LIVE


Floats = NDArray[np.float64]

SMOOTHED = "smoothed_"
PANELS = 3
"""The number of quantities that are drawn of each key unless the user names others."""
_MOMENTS = ("mean", "covariance", f"{SMOOTHED}mean", f"{SMOOTHED}covariance")
_TABLE = ("key", "event_time", *_MOMENTS, "nis", "flags", "model_version")


class QuantityEstimates(NamedTuple):
    """Means and standard deviations (q, N) of q quantities; a deviation is NaN where it needs unknown covariances."""

    mean: Floats
    deviation: Floats


class KeySeries(NamedTuple):
    """The estimates of one key, in the order of time.

    key: the text of the key; empty while the rows are of several keys, in any order.
    time: (N,) datetime64[us].
    lines: the estimate, and the smoothed estimate if there is one.
    nis: (N,), NaN if missing.
    flagged: (N,).
    measured: (m, N), NaN if missing or unknown.
    version: (N,) the version that estimated the row.
    """

    key: str
    time: NDArray[Any]
    lines: list[QuantityEstimates]
    nis: Floats
    flagged: NDArray[np.bool_]
    measured: Floats
    version: NDArray[np.int64]

    def take(self, at: slice | NDArray[np.int64], key: str) -> KeySeries:
        """Return some rows as the series of a key."""
        lines = [QuantityEstimates(one.mean[:, at], one.deviation[:, at]) for one in self.lines]
        flagged, version = self.flagged[at], self.version[at]
        return KeySeries(key, self.time[at], lines, self.nis[at], flagged, self.measured[:, at], version)

    def newest(self, rows: int | None) -> KeySeries:
        """Return the series with only its newest `rows` rows; None means all rows."""
        return self.take(slice(None if rows is None else -rows, None), self.key)


class DrawnSeries(NamedTuple):
    """The estimates to draw.

    spec: the spec of the live version, or of the newest run over history.
    quantities: the names of the q quantities of the estimates: first the `drawn` ones, then the states.
    series: the chosen keys.
    keys: the number of keys that have estimates.
    """

    spec: ModelSpec
    quantities: list[str]
    drawn: int
    series: list[KeySeries]
    keys: int

    @property
    def versions(self) -> str:
        """Return the versions of the drawn rows, such as `v1 and v2`."""
        known = sorted({number for one in self.series for number in one.version.tolist()})
        names = [f"v{number}" for number in known]
        return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def read_warehouse_series(
    catalog: Catalog,
    model: str,
    deployed: ModelSpec | None,
    which: str,
    keys: Sequence[str] = (),
    count: int = 3,
    wanted: Sequence[str] = (),
) -> DrawnSeries:
    """Return the live estimates of a model, or the estimates of its history, each row by the spec that made it.

    Args:
        catalog: the catalog of the warehouse.
        model: the name of the model.
        deployed: the deployed spec; None if its file is missing or broken.
        which: `live` or `history`.
        keys: the keys; an empty list means the first keys.
        count: the number of keys if `keys` is empty.
        wanted: the quantities to draw (`_choose_quantities`).

    Raises:
        UserError: there are no such estimates, keys or quantities, or the warehouse cannot be read without Spark.
    """
    tables, root = catalog.warehouse, catalog.warehouse.root
    name = (estimates if which == LIVE else estimates_history)(model)
    spec = catalog.live_spec(model, deployed)
    if spec is None:
        raise UserError(f"{name}: there is no spec to read it by: deploy the spec of {model}")
    have = tables.columns(name, ("key",))["key"].unique().drop_null().to_pylist()
    chosen = _format_keys(spec, keys) or sorted(have)[:count]
    lineage = catalog.lineage(model) if which == LIVE else []
    found: list[pa.Table] = []
    if chosen and (lineage or which != LIVE):
        is_wanted = build_in_condition(quote_name("key"), chosen)
        found = list(read_counted_batches(root, open_estimates(root, name, lineage), _TABLE, is_wanted))
    if not found:
        raise UserError(f"{name}: has no estimates" + (f" of key {chosen[0]}" if chosen else ""))
    table = pa.concat_tables(found).combine_chunks()
    specs = catalog.read_specs(model, deployed)
    if which == HISTORY:
        specs = _read_history_specs(catalog, model, deployed, table)
        spec = max(specs.values(), key=lambda one: one.version, default=spec)
    quantities, drawn = _choose_quantities(spec, wanted)
    lines = [
        project_rows(table, prefix, specs, quantities)
        for prefix in ("", SMOOTHED)
        if f"{prefix}mean" in table.column_names
    ]
    time, flags = (table[one].combine_chunks() for one in ("event_time", "flags"))
    nis = arrow.to_numpy(table["nis"].combine_chunks(), np.nan)
    rows = _build_rows(spec, arrow.convert_to_micros(time), lines, nis, flags)
    numbers = {name: one.version for name, one in specs.items()}
    by = [numbers.get(one, spec.version) for one in table["generation"].to_pylist()]
    rows = rows._replace(version=np.array(by, np.int64))
    key = np.array(table["key"].to_pylist(), dtype=object)
    series = _split_keys(spec, key, rows, chosen, _read_measured(tables, spec, chosen), name)
    return DrawnSeries(spec, quantities, drawn, series, len(have))


def _read_history_specs(
    catalog: Catalog, model: str, deployed: ModelSpec | None, table: pa.Table
) -> dict[str, ModelSpec]:
    """Return the spec of each run over history in a table, without runs by a version that is unknown."""
    known = {one.model_version: one.model_spec() for one in catalog.manifests(model)}
    if deployed is not None:
        known[deployed.version] = deployed
    found = dict(zip(table["generation"].to_pylist(), table["model_version"].to_pylist(), strict=True))
    return {run: known[version] for run, version in found.items() if version in known}


def _choose_quantities(spec: ModelSpec, wanted: Sequence[str]) -> tuple[list[str], int]:
    """Return the quantities to draw, followed by the states, and the number to draw.

    Args:
        spec: the spec of the model.
        wanted: measurements and states; an empty list means the first ones of `list_quantities`.

    Raises:
        UserError: the states do not give a wanted quantity.
    """
    drawn = list(wanted) or list_quantities(spec)[:PANELS]
    lost = [one for one in drawn if find_projection(spec, one) is None]
    if lost:
        have = ", ".join(dict.fromkeys([*list_quantities(spec), *spec.states]))
        raise UserError(f"--quantity {lost[0]}: version {spec.version} of {spec.name} estimates {have}")
    return [*drawn, *spec.states], len(drawn)


def read_file_series(
    spec: ModelSpec,
    path: Path,
    measured: str | None,
    keys: Sequence[str] = (),
    count: int = 3,
    wanted: Sequence[str] = (),
) -> DrawnSeries:
    """Return the estimates of a file written by `filter`.

    Args:
        spec: the spec of the model.
        path: the path of the file.
        measured: file, folder or glob of the filtered measurements; None means that measurements are not drawn.
        keys: the keys; an empty list means the first keys.
        count: the number of keys if `keys` is empty.
        wanted: the quantities to draw (`_choose_quantities`).

    Raises:
        UserError: a file cannot be read, `filter` did not write it with this spec, or it does not have a wanted key.
    """
    source = read(path)
    names, times = _list_key_texts(spec, source), _parse_times(spec, source, str(path))
    quantities, drawn = _choose_quantities(spec, wanted)
    line, smoothed = (_parse_estimates(spec, source, one, str(path), quantities) for one in ("", SMOOTHED))
    if line is None or "nis" not in source.columns:
        raise UserError(
            f"{path}: has no estimates of {format_count(len(spec.states), 'state')} "
            f"{', '.join(spec.states)}: give a file that `kalman-pipeline filter --model {spec.name} --input FILE "
            f"--output {shlex.quote(str(path))}` wrote"
        )
    lines, nis = (
        [line] if smoothed is None else [line, smoothed],
        _parse_numbers(source, ["nis"], str(path))[0],
    )
    estimates = _build_rows(spec, times, lines, nis, source.columns.get("flag", pa.nulls(source.rows)))
    values = None
    if measured is not None:
        rows = read_rows(spec, measured)
        parsed = parse(spec, rows, measured)
        good = parsed.accepted
        values = _Measured(_list_key_texts(spec, rows)[good], parsed.time[good], parsed.y[:, good])
    have = list(dict.fromkeys(names.tolist()))
    chosen = _format_keys(spec, keys) or have[:count]
    series = _split_keys(spec, names, estimates, chosen, values, str(path))
    return DrawnSeries(spec, quantities, drawn, series, len(have))


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


def _build_rows(
    spec: ModelSpec, time: NDArray[np.int64], lines: list[QuantityEstimates], nis: Floats, flags: pa.Array
) -> KeySeries:
    """Return the estimates of N rows of all keys, with times in microseconds, without measured values."""
    unknown = np.full((len(spec.measurement), len(time)), np.nan)
    flagged, version = arrow.to_numpy(flags.is_valid()), np.full(len(time), spec.version)
    return KeySeries("", time.astype("datetime64[us]"), lines, nis, flagged, unknown, version)


def _split_keys(
    spec: ModelSpec,
    key_of: NDArray[np.object_],
    rows: KeySeries,
    keys: Sequence[str],
    measured: _Measured | None,
    where: str,
) -> list[KeySeries]:
    """Return the estimates as one series per key, with the measured values; key_of: (N,) the key of each row."""
    if not keys:
        raise UserError(f"{where}: has no estimates")
    found: list[KeySeries] = []
    has_mean = np.asarray(~np.isnan(rows.lines[0].mean).all(axis=0))
    for key in keys:
        mine = np.flatnonzero(key_of == key)
        if not len(mine):
            raise UserError(f"{where}: has no estimates of key {key}")
        mine = mine[has_mean[mine]]
        if not len(mine):
            raise UserError(
                f"{where}: its estimates of key {key} are not of version {spec.version} of {spec.name}: deploy the "
                f"version that made them"
            )
        one = rows.take(mine[np.argsort(rows.time[mine], kind="stable")], key)
        if measured is not None:
            known, time = np.flatnonzero(measured.key == key), one.time.astype(np.int64)
            last = dict(zip(measured.time[known].tolist(), known.tolist(), strict=True))
            there = np.flatnonzero(np.isin(time, measured.time[known]))
            one.measured[:, there] = measured.y[:, [last[at] for at in time[there].tolist()]]
        found.append(one)
    return found


def _parse_estimates(
    spec: ModelSpec, source: RawRows, prefix: str, where: str, quantities: Sequence[str]
) -> QuantityEstimates | None:
    """Return the estimates of rows; with a prefix, the smoothed estimates. None means that these columns are absent."""
    mean, covariance = f"{prefix}mean", f"{prefix}covariance"
    columns, states = source.columns, spec.states
    if mean in columns:  # Parquet
        return _project(spec, _convert_lists(columns[mean]), _convert_lists(columns[covariance]), quantities)
    if f"{mean}_{states[0]}" not in columns:
        return None
    full = [f"{covariance}_{a}_{b}" for a in states for b in states]
    several = full if full[0] in columns else [f"{covariance}_{one}" for one in states]
    means = _parse_numbers(source, [f"{mean}_{one}" for one in states], where)
    return _project(spec, means.T, _parse_numbers(source, several, where).T, quantities)


def project_rows(
    rows: pa.Table, prefix: str, specs: Mapping[str, ModelSpec], quantities: Sequence[str]
) -> QuantityEstimates:
    """Return the estimates of quantities from the stored moments of N rows; NaN where a row's version lacks one.

    Args:
        rows: rows with the columns mean and covariance, named with the prefix, and generation.
        prefix: empty, or `SMOOTHED`.
        specs: the spec of each generation.
        quantities: names of measurements and states.
    """
    found = np.full((2, len(quantities), rows.num_rows), np.nan)
    names, generation_of = arrow.find_distinct_values(rows["generation"].combine_chunks().cast(pa.string()))
    # A generation may have covariances in some rows and variances in others (`outputs.covariance`).
    widths = arrow.measure_lists(rows[f"{prefix}covariance"].combine_chunks())
    for number, width in sorted(set(zip(generation_of.tolist(), widths.tolist(), strict=True))):
        name = names[number] if number < len(names) else ""
        if name in specs:
            mine = np.flatnonzero((generation_of == number) & (widths == width))
            part = rows.take(arrow.build_integers(mine))
            mean, covariance = (
                _convert_lists(part[f"{prefix}{one}"].combine_chunks()) for one in ("mean", "covariance")
            )
            found[:, :, mine] = _project(specs[name], mean, covariance, quantities)
    return QuantityEstimates(*found)


def _project(
    spec: ModelSpec, mean: Floats, covariance: Floats, quantities: Sequence[str]
) -> QuantityEstimates:
    """Return the estimates of quantities from means (N, n), and n variances or n * n covariances of each row.

    The estimates are NaN where the spec lacks a quantity, or where the moments are of other states.
    """
    n, found = len(spec.states), np.full((2, len(quantities), len(mean)), np.nan)
    matrices = np.full((len(mean), n, n), np.nan)
    if covariance.shape[1] == n * n:
        matrices = covariance.reshape(-1, n, n)
    elif covariance.shape[1] == n:
        matrices[:, range(n), range(n)] = covariance
    for at, name in enumerate(quantities):
        projection = find_projection(spec, name)
        if projection is not None and mean.shape[1] == n:
            found[:, at] = project_states(mean, matrices, *projection)
    return QuantityEstimates(found[0], np.sqrt(np.maximum(found[1], 0.0)))


def _convert_lists(column: pa.ListArray) -> Floats:
    """Return lists of d numbers as (N, d); a missing list becomes NaN."""
    valid = arrow.to_numpy(column.is_valid())
    numbers = arrow.to_numpy(column.flatten(), np.nan).reshape(max(int(valid.sum()), 1), -1)
    found = np.full((len(column), numbers.shape[1]), np.nan)
    found[valid] = numbers
    return found


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
    return _Measured(_list_key_texts(spec, source), arrow.convert_to_micros(source.columns[spec.time]), y)


def _list_key_texts(spec: ModelSpec, source: RawRows) -> NDArray[np.object_]:
    """Return the key of each row in the form of the tables' column `key`."""
    texts = [source.columns[name].cast(pa.string()).to_pylist() for name in spec.key]
    if len(texts) == 1:
        return np.array(texts[0], dtype=object)
    rows = zip(*texts, strict=True) if texts else [()] * source.rows
    return np.array([_format_json(row) for row in rows], dtype=object)


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
