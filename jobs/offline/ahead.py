"""Forecast keys from their states, or every key of a file from its newest row. No Spark.

The horizon is a number of steps, a time, a list of horizons, or the rows of a file of future inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

import kalman
from jobs.core.errors import UserError
from jobs.core.report import format_count
from jobs.landing.checking import ParsedRows, parse
from jobs.landing.file_parts import check_columns
from jobs.landing.file_rows import read_all
from jobs.landing.raw_rows import RawRows, reject, take_columns
from jobs.landing.values.keys import find_places
from jobs.landing.values.number_reading import build_rules, parse_numbers
from jobs.offline.calendar_steps import CalendarStep, find_calendar_step
from jobs.offline.filtering import build_list_columns, order_accepted_rows, save
from jobs.offline.horizon import ForecastRequest, ForecastSteps, Horizon, plan_steps
from jobs.offline.key_inputs import convert_key_texts, refuse_rows
from jobs.offline.prior import Prior, build_spec_prior
from jobs.specs.model_spec import ModelSpec
from jobs.specs.row_order import TimeRange
from jobs.state.encoding import arrow
from jobs.state.expiry import run_lives
from jobs.state.row_filter import RowFilter
from kalman.evaluation.forecast import Forecast, extract_variances, forecast, interval
from kalman.linalg.packing import unpack
from kalman.types import Filter

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Future(NamedTuple):
    """The N rows of a file of future inputs.

    file: the name of the file.
    keys: the texts of each key column.
    time: (N,) microseconds.
    control: (c, N).
    inputs: (i, N) if the file has the columns of the spec's `inputs`; None means that the inputs of the keys' table
        apply.
    """

    file: str
    keys: list[pa.Array]
    time: Ints
    control: Floats
    inputs: Floats | None


def read_future(spec: ModelSpec, file: str) -> Future:
    """Read a file of future inputs: key, time and control columns, and optionally the columns of the spec's `inputs`.

    Raises:
        UserError: the file cannot be read, lacks a column, or has an unusable row; the message names key and time.
    """
    source = read_all(file, None, spec.files.model_copy(update={"wide": None}))
    check_columns(
        Path(file), list(source.columns), spec.list_file_columns([*spec.key, spec.time, *spec.control])
    )
    inputs_columns = [] if spec.inputs is None else list(spec.inputs.columns.values())
    source = take_columns(spec, source, [*spec.columns, *inputs_columns])
    empty = {name: pa.nulls(source.rows) for name in (*spec.measurement, *spec.id_columns)}
    any_time = spec.model_copy(update={"time_range": TimeRange(latest=None)})
    rows = parse(any_time, source._replace(columns={**source.columns, **empty}), file)
    inputs = None
    if inputs_columns and all(name in source.columns for name in inputs_columns):
        rules = build_rules(spec.missing_values, spec.files)
        inputs = parse_numbers(inputs_columns, "input", source, rules, file, rows.reason)
        for name, values in zip(inputs_columns, inputs, strict=True):
            reject(rows.reason, np.isnan(values), f"input {name}: missing")
    names = {"key": [source.columns[name] for name in spec.key], spec.time: [source.columns[spec.time]]}
    refuse_rows(f"--future {file}", rows.reason, names, "a forecast needs every input of every future row")
    keys = [convert_key_texts(source.columns[name]) for name in spec.key]
    return Future(file, keys, rows.time, rows.u[: len(spec.control)], inputs)


def plan_future_steps(
    future: Future, keys: list[pa.Array], last: Ints, inputs: Floats, horizon: Horizon
) -> ForecastSteps:
    """Return the steps of K keys through the future rows after each key's newest row.

    Args:
        future: the future rows.
        keys: the texts of the K keys, column by column.
        last: (K,) time of each key's newest row.
        inputs: (i, K) each key's inputs from the table, used if the file has no inputs.
        horizon: the horizon of the forecast.

    Raises:
        UserError: a row appears twice, or a wanted row is missing; the message names key and time.
    """
    size = len(last)
    key = find_places(future.keys, keys, len(future.time), size)
    after = np.flatnonzero((key >= 0) & (future.time > np.append(last, 0)[key]))
    order = after[np.lexsort((future.time[after], key[after]))]
    key, time = key[order], future.time[order]
    again = np.flatnonzero((key[1:] == key[:-1]) & (time[1:] == time[:-1]))
    if len(again):
        raise UserError(
            f"--future {future.file}: {_format_moment(keys, int(key[again[0]]), int(time[again[0]]))} is there twice"
        )
    rank = np.arange(len(key)) - np.searchsorted(key, key)
    here = _mark_wanted(future.file, keys, last, key, time, rank, horizon)
    newest = np.full(size, -1)
    np.maximum.at(newest, key[here], rank[here])
    used = rank <= newest[key]
    order, key, time, rank, here = order[used], key[used], time[used], rank[used], here[used]
    steps = int(newest.max(initial=-1)) + 1
    widths = len(future.control), len(inputs)
    at, wanted = np.tile(last, (steps, 1)), np.zeros((steps, size), bool)
    u = np.zeros((steps, sum(widths), size))
    u[:, widths[0] :] = inputs
    for s in range(steps):
        row = np.flatnonzero(rank == s)
        if s:
            at[s], u[s] = at[s - 1], u[s - 1]
        at[s, key[row]], wanted[s, key[row]] = time[row], here[row]
        u[s, : widths[0], key[row]] = future.control[:, order[row]].T
        if future.inputs is not None:
            u[s, widths[0] :, key[row]] = future.inputs[:, order[row]].T
    return ForecastSteps(at, wanted, u, horizon.length)


def _mark_wanted(
    file: str, keys: list[pa.Array], last: Ints, key: Ints, time: Ints, rank: Ints, horizon: Horizon
) -> NDArray[np.bool_]:
    """Return which rows (N,), ordered by key and time, must be forecast; refuse a key that lacks such a row."""
    steps, end, length = horizon.steps, horizon.end, horizon.length
    count = np.bincount(key, minlength=len(last))
    if length is None:
        if steps is None:
            return np.ones(len(key), bool) if end is None else time <= end
        short = np.flatnonzero(count < steps)
        if len(short):
            k = int(short[0])
            newest = last[k] if count[k] == 0 else time[key == k][-1]
            raise UserError(
                f"--future {file}: {_format_moment(keys, k, int(newest))} is the last row, the key has "
                f"{count[k]} of the "
                f"{steps} that --steps asks for"
            )
        return rank < steps
    if steps is None:
        assert end is not None
        number = np.maximum((end - last) // length, 0)
    else:
        number = np.full(len(last), steps)
    passed = time - last[key]
    here = (passed % length == 0) & (passed // length <= number[key])
    short = np.flatnonzero(np.bincount(key[here], minlength=len(last)) < number)
    if len(short):
        k = int(short[0])
        there = set((passed[here & (key == k)] // length).tolist())
        missing = next(i for i in range(1, int(number[k]) + 1) if i not in there)
        raise UserError(
            f"--future {file}: has no row of {_format_moment(keys, k, int(last[k] + missing * length))}, "
            f"whose inputs the "
            f"forecast needs"
        )
    return here


def _format_moment(keys: list[pa.Array], k: int, time: int) -> str:
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time)
    return f"key {', '.join(column[k].as_py() for column in keys)} at {moment.isoformat()}"


class ForecastKeys(NamedTuple):
    """K keys to forecast.

    names: the texts of each key column.
    states: the states of the keys.
    inputs: (i, K) the inputs of the keys.
    """

    names: Sequence[pa.Array]
    states: kalman.KeyStates
    inputs: Floats


class Ahead(NamedTuple):
    """Forecasts of J of K keys: those with a time within the horizon.

    kept: (J,) the places of these keys among the K keys.
    time: (S, J) microseconds.
    wanted: (S, J) whether the time is within the horizon.
    expected: the forecasts.
    length: microseconds of a step, or a step by the calendar; None means that steps have no common length.
    omitted: number of keys without a time within the horizon.
    """

    kept: Ints
    time: Ints
    wanted: NDArray[np.bool_]
    expected: Forecast
    length: int | CalendarStep | None
    omitted: int

    @property
    def count(self) -> int:
        """Return the number of forecasts."""
        return int(self.wanted.sum())

    @property
    def flagged(self) -> int:
        """Return the number of forecasts with a flag."""
        return int((self.expected.flag != 0)[self.wanted].sum())

    @property
    def unbounded(self) -> int:
        """Return the number of forecasts with an infinite bound of a measurement."""
        variances = extract_variances(self.expected.measurement_covariance)
        return int(np.isinf(variances[:, self.wanted]).any(axis=0).sum())


def format_flawed(flagged: int, unbounded: int) -> list[str]:
    """Return a line on the forecasts with a flag, and one on those with infinite bounds, if there are any."""
    lines = [f"flagged {flagged:,}"] if flagged else []
    if unbounded:
        lines.append(
            f"warning: the bounds of {format_count(unbounded, 'forecast')} are infinite: the state of the key is "
            f"diffuse until enough rows come"
        )
    return lines


class ForecastColumn(NamedTuple):
    """Numbers (d, N) of a column of forecasts, and the names of the d parts, or of the pairs of a covariance."""

    name: str
    values: Floats
    parts: list[str]


def forecast_ahead(
    spec: ModelSpec,
    kernel: Filter,
    keys: ForecastKeys,
    horizon: Horizon,
    future: Future | None = None,
    typical: int | CalendarStep | None = None,
) -> Ahead:
    """Forecast K keys from their states.

    Args:
        spec: the spec of the model.
        kernel: the filter of the model.
        keys: the keys.
        horizon: the horizon of the forecasts.
        future: inputs of future rows, for a model with controls or inputs.
        typical: a step, in microseconds or by the calendar, used if the horizon has none.

    Raises:
        UserError: the horizon is out of range, a future input is missing, or the model cannot be forecast.
    """
    states, inputs = keys.states, keys.inputs
    if future is not None:
        steps = plan_future_steps(future, list(keys.names), states.event_time, inputs, horizon)
    else:
        steps = plan_steps(states.event_time, horizon, typical)
        if len(inputs):
            steps = steps._replace(u=np.tile(inputs, (len(steps.time), 1, 1)))
    kept = np.flatnonzero(steps.wanted.any(axis=0))
    time, wanted = steps.time[:, kept], steps.wanted[:, kept]
    u = None if steps.u is None else steps.u[:, :, kept]
    try:
        expected = _forecast_steps(kernel, states.take(kept), time, u, spec.unit_us, bool(horizon.direct))
    except kalman.ModelError as error:
        raise UserError(f"{spec.name} v{spec.version} cannot be forecast: {error}") from error
    return Ahead(kept, time, wanted, expected, steps.length, len(states.count) - len(kept))


def _forecast_steps(
    kernel: Filter, states: kalman.KeyStates, time: Ints, u: Floats | None, unit: float, direct: bool
) -> Forecast:
    """Forecast step by step or, if `direct`, reach each time by one step from the state, as `skill` does."""
    if not direct:
        dt = np.diff(time, axis=0, prepend=states.event_time[None]) / unit
        return forecast(kernel, states, dt, u)
    dt = (time - states.event_time) / unit
    parts = [
        forecast(kernel, states, dt[s : s + 1], None if u is None else u[s : s + 1]) for s in range(len(dt))
    ]
    return Forecast(*(np.concatenate(each, axis=-2) for each in zip(*parts, strict=True)))


class ForecastRows(NamedTuple):
    """N forecasts; the forecasts of each key follow each other.

    key: (N,) the place of the forecast's key among the K given keys.
    step: (N,) the number of the forecast among the key's wanted steps, from 1.
    time: (N,) microseconds.
    flag: (N,) codes of `kalman.FLAGS`.
    columns: mean, covariance and bounds of state and measurement.
    """

    key: Ints
    step: Ints
    time: Ints
    flag: NDArray[np.uint8]
    columns: list[ForecastColumn]


def list_forecasts(spec: ModelSpec, found: Ahead, probability: float) -> ForecastRows:
    """Return the wanted forecasts of a model's keys as rows.

    probability: the probability that a value lies between its bounds.
    """
    key, step = np.nonzero(found.wanted.T)
    expected, columns = found.expected, list[ForecastColumn]()
    for prefix, names, mean, packed in (
        ("", spec.states, expected.mean, expected.covariance),
        ("measurement_", spec.measurement, expected.measurement_mean, expected.measurement_covariance),
    ):
        mean, packed = mean[:, step, key], packed[:, step, key]
        low, high = interval(mean, extract_variances(packed), probability)
        pairs = [f"{a}_{b}" for a in names for b in names]
        columns += [
            ForecastColumn(f"{prefix}mean", mean, names),
            ForecastColumn(f"{prefix}covariance", unpack(packed), pairs),
            ForecastColumn(f"{prefix}lower", low, names),
            ForecastColumn(f"{prefix}upper", high, names),
        ]
    number = np.cumsum(found.wanted, axis=0, dtype=np.int64)[step, key]
    return ForecastRows(found.kept[key], number, found.time[step, key], expected.flag[step, key], columns)


def forecast_keys(
    spec: ModelSpec,
    source: RawRows,
    rows: ParsedRows,
    horizon: Horizon,
    prior: Prior | None = None,
    future: Future | None = None,
) -> tuple[Ahead, dict[str, pa.Array]]:
    """Filter the rows of a file and forecast each key from its newest row.

    Also return the values of the key columns for the keys with a state.

    Args:
        spec: the spec of the model.
        source: columns of the file.
        rows: rows of the file, with the inputs of their keys.
        horizon: the horizon of the forecasts.
        prior: the filter and the initial states of the keys; None means the spec's values.
        future: inputs of future rows, for a model with controls or inputs.

    Raises:
        UserError: no row could be applied, the horizon is out of range, a future input is missing, or the model cannot
            be forecast.
    """
    order, sorted_rows = order_accepted_rows(rows, spec.duplicates)
    prior = prior or build_spec_prior(spec, rows.keys)
    kernel, initial = prior.kernel, prior.key_states()
    if spec.idle_us is None:
        states, _ = kalman.run(kernel, initial, sorted_rows, spec.unit_us)
    else:
        states = run_lives(RowFilter(kernel, spec.unit_us), initial, initial, sorted_rows, spec.idle_us).after
    places, states = _select_keys_with_state(rows, order, states)
    columns = {name: source.columns[name].take(arrow.build_integers(places)) for name in spec.key}
    keys = ForecastKeys(
        list(map(convert_key_texts, columns.values())), states, rows.u[len(spec.control) :, places]
    )
    typical = horizon.calendar or _find_usual_step(sorted_rows, spec)
    if isinstance(typical, CalendarStep):
        typical = typical.follow_rows(sorted_rows.key, sorted_rows.time, rows.key[places])
        horizon = horizon._replace(calendar=horizon.calendar and typical)
    return forecast_ahead(spec, kernel, keys, horizon, future, typical), columns


def _select_keys_with_state(
    rows: ParsedRows, order: Ints, states: kalman.KeyStates
) -> tuple[Ints, kalman.KeyStates]:
    """Return the place of a row of each key with a state, in the order of the input, and the states of these keys."""
    codes, firsts = np.unique(rows.key[order], return_index=True)
    earliest = np.full(len(codes), len(rows.key))
    np.minimum.at(earliest, np.searchsorted(codes, rows.key[order]), order)
    known = np.flatnonzero(states.count[codes] > 0)
    if len(known) == 0:
        raise UserError("no row of the input could be applied: there is nothing to forecast from")
    known = known[np.argsort(earliest[known])]
    return earliest[known], states.take(codes[known])


def _find_usual_step(rows: kalman.SortedRows, spec: ModelSpec) -> int | CalendarStep:
    """Return the usual step of a key's rows: by the calendar, or their median distance in microseconds.

    Without two rows of a key it is the unit of time.
    """
    later = np.flatnonzero((rows.key[1:] == rows.key[:-1]) & (np.diff(rows.time) > 0))
    if not len(later):
        return int(spec.unit_us)
    before, after = rows.time[later], rows.time[later + 1]
    return find_calendar_step(before, after, spec.time_zone) or int(np.median(after - before))


BRIEF = ("measurement_mean", "measurement_lower", "measurement_upper")
"""The columns of numbers that a file of forecasts has unless all columns are wanted."""


def write_forecasts(
    path: Path, spec: ModelSpec, found: Ahead, keys: Mapping[str, pa.Array], request: ForecastRequest
) -> None:
    """Write a row for each key and wanted time; the rows of a key follow each other.

    Args:
        path: the path of the file.
        spec: the spec of the model.
        found: the forecasts.
        keys: for each key column, its values for the keys that were forecast.
        request: the request; without `all_columns` the file has the columns `BRIEF` alone beside key, time and step,
            and `flag` if a row has one.

    Raises:
        UserError: a key column has the name of an output column, or the file cannot be written.
    """
    rows = list_forecasts(spec, found, request.probability)
    columns = {name: values.take(arrow.build_integers(rows.key)) for name, values in keys.items()}
    clashes = {*keys, spec.time} & {"step", "flag"}
    columns[spec.time] = arrow.build_times(rows.time, np.ones(len(rows.time), bool))
    columns["step"] = arrow.build_integers(rows.step)
    for field, values, parts in (one for one in rows.columns if request.all_columns or one.name in BRIEF):
        new = build_list_columns(path, field, values, rows.flag == 0, parts)
        clashes |= columns.keys() & new.keys()
        columns |= new
    if request.all_columns or rows.flag.any():
        columns["flag"] = arrow.build_texts(list(np.array(kalman.FLAGS, dtype=object)[rows.flag]))
    if clashes:
        raise UserError(
            f"column {sorted(clashes)[0]} of the input has the name of an output column; rename it"
        )
    save(path, columns)
