"""Examples of keys for the pages on models: the newest estimates of a key, drawn over its measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.offline.estimate_series import project_rows
from jobs.offline.stored_keys import predict_measurements
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding.arrow import build_integers, find_distinct_values, to_numpy
from jobs.state.kernel import StateProjection, list_quantities
from jobs.storage.queries import Queries, build_in_condition, quote_name
from jobs.storage.tables import measurements
from jobs.upgrades.common_rows import build_key_text_sql, build_micros_sql

Floats = NDArray[np.float64]
K = TypeVar("K", int, str)
ROWS_SHOWN = 400
MEASURED = "measured_rows"
"""The name of the model's measurements in queries."""


class EstimateLine(NamedTuple):
    """Estimates of a key by one version: arrays (N,), with times in microseconds.

    mean, deviation: moments of the drawn quantity; NaN where the row's version lacks this quantity.
    is_predicted: whether these are the moments that the row before predicted for the row's measurement.
    components: the number of components that each row has measured; 0 where the number is unknown.
    """

    time: NDArray[np.int64]
    mean: Floats
    deviation: Floats
    nis: Floats
    components: Floats
    is_predicted: bool = False


class Example(NamedTuple):
    """The newest rows of a key: its M measurements with their times in microseconds, and its estimates.

    why: the reason for choosing this key.
    quantity: the name of the drawn quantity.
    """

    key: str
    why: str
    quantity: str
    measured_at: NDArray[np.int64]
    measured: Floats
    lines: list[EstimateLine]


def join_reasons(wanted: Iterable[tuple[K, str]]) -> list[tuple[K, str]]:
    """Return keys, or their indices, with the reasons for choosing each key, each key once."""
    reasons: dict[K, str] = {}
    for at, why in wanted:
        reasons[at] = f"{reasons[at]}, {why}" if at in reasons else why
    return list(reasons.items())


def choose_quantity(*specs: ModelSpec) -> tuple[str, bool]:
    """Return the name of the quantity to draw, and whether it is measured; `specs` has the newest version last.

    The quantity is the first measured component if all versions measure it linearly, else a state that all versions
    have.
    """
    name = specs[-1].measurement[0]
    if all(name in list_quantities(one) and name in one.measurement for one in specs):
        return name, True
    common = [state for state in specs[0].states if all(state in one.states for one in specs)]
    return (common or specs[-1].states)[0], False


def build_moments_sql(projection: StateProjection) -> tuple[str, str]:
    """Return SQL for the mean and the variance of a quantity of the states; the variance is null if it is not stored.

    A column `covariance` has all n * n covariances or, for some versions, the n variances alone.
    """
    n = len(projection.weights)
    weights = [(at, float(one)) for at, one in enumerate(projection.weights) if one]
    mean = " + ".join([*(f"{one!r} * mean[{at + 1}]" for at, one in weights), repr(float(projection.offset))])
    whole = " + ".join(f"{a * b!r} * covariance[{i * n + j + 1}]" for i, a in weights for j, b in weights)
    single = (
        f"WHEN cardinality(covariance) = {n} THEN {weights[0][1] ** 2!r} * covariance[{weights[0][0] + 1}]"
    )
    only = single if len(weights) == 1 else ""
    return mean, f"CASE WHEN cardinality(covariance) = {n * n} THEN {whole} {only} END"


def read_newest_rows(queries: Queries, counted: str, most: int = ROWS_SHOWN) -> pa.Table:
    """Return the newest estimates of each key, ordered by key and by time (`time`, in microseconds).

    counted: the SQL query of the rows to read, with the columns key and event_time. most: maximum rows of a key.
    """
    numbered = (
        f"SELECT *, {build_micros_sql('event_time')} AS time, "
        f"row_number() OVER (PARTITION BY key ORDER BY event_time DESC) AS place FROM ({counted})"
    )
    return queries.run(f"SELECT * FROM ({numbered}) WHERE place <= {most} ORDER BY key, time")


def read_measured_rows(queries: Queries, spec: ModelSpec, name: str, keys: Sequence[str]) -> pa.Table | None:
    """Return the measurements of some keys, ordered by key and time; None if the table lacks a needed column."""
    schema = queries.add(MEASURED, measurements(spec.name))
    if schema is None or not {*spec.key, spec.time, name} <= set(schema.names):
        return None
    landed = (
        f"SELECT {build_key_text_sql(spec.key)} AS key, {build_micros_sql(spec.time)} AS time, "
        f"CAST({quote_name(name)} AS DOUBLE) AS value "
        f"FROM {MEASURED}"
    )
    return queries.run(f"SELECT * FROM ({landed}) WHERE {build_in_condition('key', keys)} ORDER BY key, time")


def make_examples(
    chosen: Sequence[tuple[str, str]],
    quantity: str,
    measured: pa.Table | None,
    sides: Sequence[pa.Table],
    line: Callable[[pa.Table], EstimateLine],
) -> list[Example]:
    """Return an example of each chosen key.

    Args:
        chosen: the keys, with the reasons for choosing them.
        quantity: the name of the drawn quantity.
        measured: the measurements (`read_measured_rows`); rows before a key's first estimate are left out.
        sides: the estimates of each version (`read_newest_rows`).
        line: a function that makes an `EstimateLine` of a key's estimates by one version.
    """
    found = []
    for key, why in chosen:
        lines = [line(_select_key(side, key)) for side in sides]
        time, values = np.empty(0, np.int64), np.empty(0)
        first = min((one.time[0] for one in lines if len(one.time)), default=None)
        if measured is not None and first is not None:
            landed = _select_key(measured, key)
            time, values = _read_numbers(landed, "time"), _read_numbers(landed, "value")
            time, values = time[time >= first], values[time >= first]
        found.append(Example(key, why, quantity, time, values, lines))
    return found


def _select_key(rows: pa.Table, key: str) -> pa.Table:
    """Return the rows of one key from a table that is ordered by key."""
    keys = rows["key"].to_pylist()
    return rows.slice(keys.index(key), keys.count(key)) if key in keys else rows.slice(0, 0)


def _read_numbers(rows: pa.Table, name: str) -> NDArray[Any]:
    """Return a column of numbers as an array (N,), with NaN for nulls."""
    return to_numpy(rows[name].combine_chunks(), np.nan)


def build_line(
    rows: pa.Table, components: Floats, specs: Mapping[str, ModelSpec], quantity: str
) -> EstimateLine:
    """Return the line of a key's estimates (`read_newest_rows`).

    components: (N,) number of measured components of each row.
    specs: the spec of each generation.
    """
    found = project_rows(rows, "", specs, [quantity])
    nis = _read_numbers(rows, "nis")
    return EstimateLine(_read_numbers(rows, "time"), found.mean[0], found.deviation[0], nis, components)


def predict_line(
    root: str,
    line: EstimateLine,
    rows: pa.Table,
    specs: Mapping[str, tuple[ModelSpec, str | None]],
    quantity: str,
) -> EstimateLine:
    """Return the line with the predictions of a measurement, or unchanged if no row can be predicted.

    Args:
        root: the root of the warehouse.
        line: the line of the rows (`build_line`).
        rows: a key's estimates (`read_newest_rows`).
        specs: the spec of each generation, and the snapshot with its learned parameters.
        quantity: the name of the measurement.
    """
    found = np.full((2, len(line.time)), np.nan)
    names, generation_of = find_distinct_values(rows["generation"].combine_chunks().cast(pa.string()))
    for number, name in enumerate(names):
        mine = np.flatnonzero(generation_of == number)
        if name in specs:
            part = rows.take(build_integers(mine))
            found[:, mine] = predict_measurements(root, *specs[name], part, quantity)
    if not np.isfinite(found[0]).any():
        return line
    return line._replace(mean=found[0], deviation=np.sqrt(found[1]), is_predicted=True)
