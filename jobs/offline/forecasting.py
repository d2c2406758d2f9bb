"""Forecast the state and the measurements of every key of a file from the key's newest row. No Spark."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

import kalman
from jobs.core.errors import UserError
from jobs.core.times import TimeParser, duration_us, zone_of
from jobs.encoding import arrow
from jobs.landing.parsing import ParsedRows
from jobs.landing.raw_rows import Source
from jobs.offline.ahead import Keys, ahead, numbers_of
from jobs.offline.filtering import in_order
from jobs.offline.future import Future, Horizon
from jobs.offline.key_inputs import key_texts
from jobs.offline.prior import Prior, specs_prior
from jobs.offline.result_files import lists, save
from jobs.specs.model_spec import ModelSpec, takes_steps
from jobs.state.expiry import run_lives
from jobs.state.row_filter import RowFilter
from kalman.evaluation.forecast import Forecast
from kalman.types import Filter

Ints = NDArray[np.int64]


class Forecasts(NamedTuple):
    """Forecasts of K keys at S times.

    keys     the K values of each key column
    time     (S, K) microseconds since 1970-01-01 UTC
    wanted   (S, K) whether the time is within the horizon
    expected the forecasts
    length   microseconds of a step, None for a single time or for the rows of a file
    omitted  number of keys without a time in the horizon
    """

    keys: dict[str, pa.Array]
    time: Ints
    wanted: NDArray[np.bool_]
    expected: Forecast
    length: int | None
    omitted: int


def parse_horizon(
    spec: ModelSpec,
    steps: int | None,
    until: str | None,
    every: str | None,
    probability: float,
    future: str | None = None,
    with_rows: bool = True,
) -> Horizon:
    """Check a command's options and return their horizon.

    Args:
        spec: spec of the model.
        steps, until, every, probability: the options.
        future: a file of future inputs, whose rows are the steps unless `every` is given.
        with_rows: rows of a file are forecast, and the length of a step follows from them. Otherwise the length must be
            given, and the default horizons are those of the spec's section `forecast`.

    Raises:
        UserError: the options contradict each other, or the model needs future inputs and `future` is None.
    """
    _check_future(spec, future)
    unsaid = steps is None and until is None and future is None
    if unsaid and not with_rows:
        _check_probability(probability)
        return _sections_horizon(spec, every)
    if (steps is not None and until is not None) or unsaid:
        raise UserError("give either --steps or --until")
    if every is not None and steps is None and until is None:
        raise UserError("--every: with --future, say how far with --steps or --until, or leave it out")
    _check_probability(probability)
    end = length = None
    if not with_rows and steps is not None and every is None and future is None:
        every = None if spec.forecast is None else spec.forecast.step
        if every is None:
            raise UserError(
                "--steps: add --every with the time of a step, such as 1h: a state does not tell it"
            )
    if every is not None:
        try:
            length = duration_us(every)
        except ValueError as error:
            raise UserError(
                f"--every: {error}; write a number and one of ms, s, min, h, d, w, such as 1h"
            ) from error
    if until is not None:
        end = TimeParser(None, zone_of(spec.time_zone))(until)
        if end is None:
            raise UserError(f"--until: {until!r} is not a time; write one such as 2024-01-31T17:00")
        if length is None and future is None and takes_steps(spec.definition()):
            raise UserError(
                f"--until: {spec.name} has an explicit process, which takes one step a row whatever the time; "
                "add --every with the time of a step"
            )
    return Horizon(steps, end, length)


def _check_probability(probability: float) -> None:
    if not 0.0 < probability < 1.0:
        raise UserError(f"--probability: {probability:g} is not between 0 and 1; give one such as 0.95")


def _sections_horizon(spec: ModelSpec, every: str | None) -> Horizon:
    """Return the horizons of the spec's section `forecast`, which `skill` scores."""
    section = spec.forecast
    if section is None:
        raise UserError(
            f"give --steps with --every, or --until; without them the horizons are those of the spec's section "
            f"`forecast`, and {spec.name} has none"
        )
    if every is not None:
        raise UserError("--every: say how far with --steps or --until, or leave it out")
    lengths = tuple(sorted(section.lengths))
    if not takes_steps(spec.definition()):
        return Horizon(None, None, None, direct=lengths)
    if section.step is None:
        raise UserError(
            f"{spec.source_path}: forecast.step: is missing: the process takes one step a row, whatever the time; give "
            f"the time of a step, such as 1h"
        )
    step = duration_us(section.step)
    return Horizon(None, None, step, multiples=tuple(length // step for length in lengths))


def _check_future(spec: ModelSpec, future: str | None) -> None:
    if spec.control and future is None:
        raise UserError(
            f"{spec.name} has control inputs: give their future values with --future FILE, a row for each key and time "
            f"with the columns {', '.join([*spec.key, spec.time, *spec.control])}"
        )
    if future is not None and not spec.control and spec.inputs is None:
        raise UserError(f"--future: {spec.name} takes no inputs: leave the option out")


def forecast_keys(
    spec: ModelSpec,
    source: Source,
    rows: ParsedRows,
    horizon: Horizon,
    prior: Prior | None = None,
    future: Future | None = None,
) -> Forecasts:
    """Filter the rows of a file and forecast each key from its newest row.

    Args:
        spec: spec of the model.
        source: columns of the file.
        rows: rows of the file, with the inputs of their keys.
        horizon: the horizon of the forecasts.
        prior: filter and initial states of the keys; None: the spec's values.
        future: inputs of future rows, for a model with controls or inputs.

    Raises:
        UserError: no row could be applied, the horizon is out of range, a future input is missing, or the model cannot
            be forecast.
    """
    order, sorted_rows = in_order(rows, spec.duplicates)
    prior = prior or specs_prior(spec, rows.keys)
    kernel, initial = prior.kernel, prior.key_states()
    if spec.idle_us is None:
        states, _ = kalman.run(kernel, initial, sorted_rows, spec.unit_us)
    else:
        states = run_lives(RowFilter(kernel, spec.unit_us), initial, initial, sorted_rows, spec.idle_us).after
    places, states = _with_state(rows, order, states)
    columns = {name: source.columns[name].take(arrow.integers(places)) for name in spec.key}
    keys = Keys(list(map(key_texts, columns.values())), states, rows.u[len(spec.control) :, places])
    typical = _median_gap(sorted_rows, int(spec.unit_us))
    return forecast_states(spec, kernel, keys, columns, horizon, future, typical)


def forecast_states(
    spec: ModelSpec,
    kernel: Filter,
    keys: Keys,
    columns: Mapping[str, pa.Array],
    horizon: Horizon,
    future: Future | None,
    typical: int | None = None,
) -> Forecasts:
    """Forecast K keys from their states by `ahead`.

    columns: the K values of each key column.

    Raises:
        UserError: the horizon is out of range, a future input is missing, or the model cannot be forecast.
    """
    found = ahead(spec, kernel, keys, horizon, future, typical)
    kept = {name: values.take(arrow.integers(found.kept)) for name, values in columns.items()}
    omitted = len(keys.states.count) - len(found.kept)
    return Forecasts(kept, found.time, found.wanted, found.expected, found.length, omitted)


def _with_state(rows: ParsedRows, order: Ints, states: kalman.KeyStates) -> tuple[Ints, kalman.KeyStates]:
    """Return one row of each key with a state, in the order of the input, and the states of these keys."""
    codes, firsts = np.unique(rows.key[order], return_index=True)
    earliest = np.full(len(codes), len(rows.key))
    np.minimum.at(earliest, np.searchsorted(codes, rows.key[order]), order)
    known = np.flatnonzero(states.count[codes] > 0)
    if len(known) == 0:
        raise UserError("no row of the input could be applied: there is nothing to forecast from")
    known = known[np.argsort(earliest[known])]
    return earliest[known], states.take(codes[known])


def _median_gap(rows: kalman.SortedRows, unit: int) -> int:
    """Return the median time between two rows of a key, in microseconds; without such rows, the unit of time."""
    gaps = np.diff(rows.time)[rows.key[1:] == rows.key[:-1]]
    gaps = gaps[gaps > 0]
    return int(np.median(gaps)) if len(gaps) else unit


def write_forecasts(path: Path, spec: ModelSpec, forecasts: Forecasts, probability: float) -> None:
    """Write a row for each key and wanted time; the rows of a key are adjacent.

    Raises:
        UserError: a key column has the name of an output column, or the file cannot be written.
    """
    keys, expected = forecasts.keys, forecasts.expected
    key, step = np.nonzero(forecasts.wanted.T)
    flag = expected.flag[step, key]
    columns = {name: values.take(arrow.integers(key)) for name, values in keys.items()}
    clashes = {*keys, spec.time} & {"step", "flag"}
    columns[spec.time] = arrow.times(forecasts.time[step, key], np.ones(len(key), bool))
    columns["step"] = arrow.integers(np.cumsum(forecasts.wanted, axis=0, dtype=np.int64)[step, key])
    for field, values, parts in numbers_of(spec, expected, step, key, probability):
        new = lists(path, field, values, flag == 0, parts)
        clashes |= columns.keys() & new.keys()
        columns |= new
    columns["flag"] = arrow.texts(list(np.array(kalman.FLAGS, dtype=object)[flag]))
    if clashes:
        raise UserError(
            f"column {sorted(clashes)[0]} of the input has the name of an output column; rename it"
        )
    save(path, columns)
