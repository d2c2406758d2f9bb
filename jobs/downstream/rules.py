"""Apply built-in rules and function rules to the readings of many keys at once, without Spark and without a clock."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.core.errors import UserError, extract_first_line
from jobs.state.encoding.packets import PacketColumn
from kalman.models.named import Named

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

NEVER = np.iinfo(np.int64).min


class Rules(NamedTuple):
    """R rules. Rules about readings and rules about silence share these arrays.

    high, low (R,): bounds; a reading at or beyond a bound is out of bounds. clear_high, clear_low (R,): a reading
    strictly between them is back within bounds. readings, clear_readings (R,): number of consecutive readings that
    raise, and that clear, an alert. rising (R,): whether each reading must be above the previous reading. after (R,):
    microseconds of silence that raise an alert; -1 for a rule about readings.
    """

    high: Floats
    low: Floats
    clear_high: Floats
    clear_low: Floats
    readings: Ints
    clear_readings: Ints
    rising: Bools
    after: Ints


class RuleStates(NamedTuple):
    """States of R rules for K keys.

    time (K,): time of the key's last reading; NEVER if it has no reading. run (R, K): number of consecutive readings
    out of bounds. since (R, K): time of the first reading of this run. calm (R, K): number of consecutive readings
    back within bounds while the alert is active. last (R, K): last reading. active (R, K): whether the alert is raised.
    """

    time: Ints
    run: Ints
    since: Ints
    calm: Ints
    last: Floats
    active: Bools

    def take(self, keys: Ints) -> RuleStates:
        """Return the states of the given keys."""
        return RuleStates(**{name: getattr(self, name)[..., keys] for name in self._fields})

    def copy(self) -> RuleStates:
        """Return a copy that may be changed in place."""
        return RuleStates(**{name: np.array(getattr(self, name)) for name in self._fields})


class Events(NamedTuple):
    """E events, each of which raises or clears an alert; the events of a key are in order.

    key, rule (E,): number of the key and of the rule. raised (E,): True if the alert is raised, False if it is cleared.
    time (E,): time of the reading, or the time at which the silence became too long. value (E,): the reading, or the
    seconds of silence so far. since (E,): start of the run of readings or of the silence. readings (E,): length of the
    run.
    """

    key: Ints
    rule: Ints
    raised: Bools
    time: Ints
    value: Floats
    since: Ints
    readings: Ints

    def take(self, index: Ints) -> Events:
        """Return the given events."""
        return Events(**{name: getattr(self, name)[index] for name in self._fields})


def build_empty_states(rules: Rules, keys: int) -> RuleStates:
    """Return the states of keys without readings."""
    shape = (len(rules.high), keys)
    return RuleStates(
        np.full(keys, NEVER),
        np.zeros(shape, np.int64),
        np.zeros(shape, np.int64),
        np.zeros(shape, np.int64),
        np.zeros(shape),
        np.zeros(shape, bool),
    )


def apply_rules(
    rules: Rules, states: RuleStates, key: Ints, time: Ints, value: Floats
) -> tuple[RuleStates, Events]:
    """Apply rows to the states of their keys; return the new states and the events.

    Args:
        rules: R rules.
        states: states of K keys.
        key: (N,) number of the key of each row; the rows are ordered by key, then by time.
        time: (N,) microseconds. A row that is earlier than the last reading of its key is skipped.
        value: (R, N) the reading of each rule in each row; NaN means that the row has no reading for the rule.
    """
    kept = np.flatnonzero(time >= states.time[key])
    key, time, value = key[kept], time[kept], value[:, kept]
    now = states.copy()
    found: list[Events] = []
    if len(key) == 0:
        return now, _sort_events(found)
    first = np.r_[0, np.flatnonzero(np.diff(key)) + 1]
    turn = np.arange(len(key)) - np.repeat(first, np.diff(np.r_[first, len(key)]))
    order = np.argsort(turn, kind="stable")
    # Each round applies the k-th row of every key, so there are as many rounds as the busiest key has rows.
    for rows in np.split(order, np.cumsum(np.bincount(turn))[:-1]):
        found += _round(rules, now, key[rows], time[rows], value[:, rows])
    return now, _sort_events(found)


def raise_silence_alerts(rules: Rules, states: RuleStates, clock: int) -> tuple[RuleStates, Events]:
    """Raise the alerts of keys that have been silent for too long at the time `clock` (microseconds)."""
    known = np.where(states.time == NEVER, clock, states.time)
    gap = np.broadcast_to(clock - known, states.active.shape)
    raised = _is_too_long(rules, gap) & ~states.active
    time = np.broadcast_to(known, raised.shape)
    events = _select_events(
        raised, True, np.arange(len(known)), time + rules.after[:, None], gap / 1e6, time, 0
    )
    return states._replace(active=states.active | raised), events


def _round(rules: Rules, now: RuleStates, key: Ints, time: Ints, value: Floats) -> list[Events]:
    """Apply at most one row of each key to the states `now`, in place; return the events."""
    was = now.take(key)
    at = np.broadcast_to(time, value.shape)
    before = np.broadcast_to(was.time, value.shape)
    quiet = (rules.after >= 0)[:, None]
    # The gap before this row may exceed the limit of silence although the operator has not yet raised the alert.
    gap = np.where(before == NEVER, 0, at - np.where(before == NEVER, at, before))
    noticed = _is_too_long(rules, gap) & ~was.active
    broken = quiet & (was.active | noticed)
    seen = ~np.isnan(value) & ~quiet
    column = {name: getattr(rules, name)[:, None] for name in rules._fields}
    with np.errstate(invalid="ignore"):
        out = seen & ((value >= column["high"]) | (value <= column["low"]))
        back = seen & (value < column["clear_high"]) & (value > column["clear_low"])
        onward = out & (was.run > 0) & (~column["rising"] | (value > was.last))
    run = np.where(seen, np.where(onward, was.run + 1, out), was.run)
    since = np.where(out & ~onward, at, was.since)
    raised = seen & ~was.active & (run >= column["readings"])
    calm = np.where(seen & was.active, np.where(back, was.calm + 1, 0), was.calm)
    cleared = seen & was.active & (calm >= column["clear_readings"])
    active = np.where(quiet, False, (was.active | raised) & ~cleared)
    left = np.where(raised | cleared, 0, calm)
    last = np.where(seen, value, was.last)
    for array, changed in zip(now, (time, run, since, left, last, active), strict=True):
        array[..., key] = changed
    return [
        _select_events(noticed, True, key, before + rules.after[:, None], gap / 1e6, before, 0),
        _select_events(broken, False, key, at, gap / 1e6, before, 0),
        _select_events(raised, True, key, at, value, since, run),
        _select_events(cleared, False, key, at, value, at, calm),
    ]


def _is_too_long(rules: Rules, gap: Ints) -> Bools:
    after = rules.after[:, None]
    return (after >= 0) & (gap > after)


def _select_events(
    which: Bools, raised: bool, key: Ints, time: Ints, value: Floats, since: Ints, readings: Ints | int
) -> Events:
    """Return the events at the places of `which` (R, n), a mask over rules and rows, that are True."""
    rule, place = np.nonzero(which)
    counts = np.broadcast_to(readings, which.shape)
    return Events(
        key[place],
        rule,
        np.full(len(rule), raised),
        time[rule, place],
        value[rule, place],
        since[rule, place],
        counts[rule, place],
    )


def concatenate_events(parts: list[Events]) -> Events:
    """Return the events of all parts in order."""
    if not parts:
        none = np.zeros(0, np.int64)
        return Events(none, none, none.astype(bool), none, none.astype(float), none, none)
    return Events(**{name: np.concatenate([getattr(one, name) for one in parts]) for name in Events._fields})


def _sort_events(parts: list[Events]) -> Events:
    """Return the events of all parts sorted by key and time."""
    whole = concatenate_events(parts)
    return whole.take(np.lexsort((np.arange(len(whole.key)), whole.time, whole.key)))


State = Mapping[str, NDArray]

FAILED = -1
"""`readings` of an event that reports a row at which the rule's function failed."""
MOST_FAILURES = 100
"""Maximum number of failing rows in one call. More failures count as an error in the function, and end the query."""
_TYPES = {"float64": "<f8", "int64": "<i8", "timestamp": "<i8", "bool": "|u1"}
_FRESH = {"float64": np.nan, "int64": 0, "timestamp": NEVER, "bool": False}
_GIVEN = {"row": np.int64, "raised": np.bool_, "value": np.float64, "since": np.int64, "readings": np.int64}
"""The arrays that a function may return as events, and their types; only `row` is required."""


class Field(NamedTuple):
    """Field of a function's state: its type and, if the field is an array, its length (`width`) for each key."""

    name: str
    type: str
    width: int | None = None

    def shape(self, keys: int) -> tuple[int, ...]:
        """Return the shape of the field's array for `keys` keys."""
        return (keys,) if self.width is None else (self.width, keys)

    def fresh(self, keys: int) -> NDArray:
        """Return the field for keys without rows: NaN, 0 (false), or NEVER (the least integer) for a timestamp."""
        return np.full(self.shape(keys), _FRESH[self.type], _TYPES[self.type])


class FunctionRule(NamedTuple):
    """A rule for which a function of the user decides when to raise and clear alerts.

    number: number of the rule among all rules. called: name of the function in the spec; function: the function.
    reads: name of each reading, and its position among the readings of a row. fields: fields of the function's state.
    parameters: keyword arguments of the function. forget: microseconds of silence after which the state of a key begins
    anew; None means that it never does.
    """

    number: int
    name: str
    called: str
    function: Named
    reads: tuple[tuple[str, int], ...]
    fields: tuple[Field, ...]
    parameters: Mapping[str, float]
    forget: int | None = None

    @property
    def columns(self) -> list[PacketColumn]:
        """Return the packet columns of the function's state."""
        return [PacketColumn(self.place(field), _TYPES[field.type], field.width) for field in self.fields]

    def place(self, field: Field) -> str:
        """Return the name of a field's column among the columns of all rules."""
        return f"{self.name}.{field.name}"

    def fresh(self, keys: int) -> dict[str, NDArray]:
        """Return the packet arrays of keys without rows."""
        return {self.place(field): field.fresh(keys) for field in self.fields}

    def apply(
        self, arrays: Mapping[str, NDArray], key: Ints, time: Ints, value: NDArray[np.float64]
    ) -> tuple[dict[str, NDArray], Events]:
        """Apply rows to the states of their keys; return the state's packet arrays and the events.

        Args:
            arrays: packet arrays of all keys of the bucket, and `time`, the time of the last row of each key.
            key: (N,) position of the key of each row in the arrays; the rows are ordered by key, then by time.
            time: (N,) microseconds.
            value: (., N) all readings of each row.

        Raises:
            UserError: the function breaks its contract, or fails at too many rows.
        """
        now, found, calls = dict(arrays), [], _Calls(self)
        for rows, new in self._split_lives(arrays["time"], key, time):
            if len(new):
                for name, fresh in self.fresh(len(new)).items():
                    now[name] = np.array(now[name])
                    now[name][..., new] = fresh
            changed, events = self._apply(calls, now, key[rows], time[rows], value[:, rows])
            now |= changed
            found.append(events)
        return {self.place(field): now[self.place(field)] for field in self.fields}, concatenate_events(found)

    def _split_lives(self, last: Ints, key: Ints, time: Ints) -> Iterator[tuple[Any, Ints]]:
        """Yield groups of rows to apply together, each with the keys whose state begins anew before these rows.

        A silence longer than `forget` ends a life of a key.
        last (K,): time of the last row of each key in the bucket.
        """
        if len(key) == 0:
            return
        first = np.r_[True, key[1:] != key[:-1]]
        before = np.where(first, last[key], np.r_[NEVER, time[:-1]])
        ended = np.zeros(len(key), bool)
        if self.forget is not None:
            known = before != NEVER
            ended[known] = time[known] - before[known] > self.forget
        if not ended.any():
            yield slice(None), np.zeros(0, np.int64)
            return
        lives = np.cumsum(ended)
        start = np.flatnonzero(first)
        lives -= np.repeat((lives - ended)[start], np.diff(start, append=len(key)))
        for number in range(int(lives.max()) + 1):
            rows = np.flatnonzero(lives == number)
            yield rows, key[rows[ended[rows]]]

    def _apply(
        self, calls: _Calls, arrays: Mapping[str, NDArray], key: Ints, time: Ints, value: NDArray[np.float64]
    ) -> tuple[dict[str, NDArray], Events]:
        if len(key) == 0:
            return {}, concatenate_events([])
        start = np.r_[0, np.flatnonzero(np.diff(key)) + 1, len(key)]
        here = key[start[:-1]]
        code = np.repeat(np.arange(len(here)), np.diff(start))
        rows = RuleRows(code, time, start, {name: value[place] for name, place in self.reads})
        state = {field.name: np.array(arrays[self.place(field)][..., here]) for field in self.fields}
        state = {
            f.name: state[f.name].astype(bool) if f.type == "bool" else state[f.name] for f in self.fields
        }
        calls.events = []
        after = calls.over(rows, state, 0)
        changed = {}
        for field in self.fields:
            whole = np.array(arrays[self.place(field)])
            whole[..., here] = after[field.name]
            changed[self.place(field)] = whole
        found = concatenate_events(calls.events)
        return changed, found._replace(key=here[found.key])


@dataclass(frozen=True)
class RuleRows:
    """The N rows of K keys, ordered by key and time.

    key (N,): number of the key of each row, from 0 to K - 1. time (N,): microseconds since 1970. start (K + 1,): the
    rows of key k are start[k] to start[k + 1] - 1. columns: values (N,) of each reading, NaN where a row has no value.
    `rows["nis"]` returns one of the readings.
    """

    key: Ints
    time: Ints
    start: Ints
    columns: Mapping[str, NDArray[np.float64]]

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        """Return the values of a reading (N,)."""
        return self.columns[name]

    @property
    def keys(self) -> int:
        """Return K, the number of keys."""
        return len(self.start) - 1

    def iterate_turns(self) -> Iterator[tuple[Ints, Ints]]:
        """Yield the key numbers and row numbers of the first rows of all keys, then of their second rows, and so on."""
        turn = np.arange(len(self.key)) - self.start[self.key]
        order = np.argsort(turn, kind="stable")
        for row in np.split(order, np.cumsum(np.bincount(turn))[:-1]):
            yield self.key[row], row

    def of_keys(self, first: int, stop: int) -> RuleRows:
        """Return the rows of the keys first..stop-1; these keys are numbered from 0."""
        some = slice(self.start[first], self.start[stop])
        return self._some(some, first, self.start[first : stop + 1] - self.start[first])

    def select_span(self, first: int, stop: int) -> RuleRows:
        """Return the rows first..stop-1 of a call with one key."""
        return self._some(slice(first, stop), 0, np.array([0, stop - first]))

    def _some(self, some: slice, first: int, start: Ints) -> RuleRows:
        columns = {name: values[some] for name, values in self.columns.items()}
        return RuleRows(self.key[some] - first, self.time[some], start, columns)


class _Calls:
    """Calls of a rule's function for the rows of one bucket."""

    def __init__(self, rule: FunctionRule) -> None:
        self.rule = rule
        # Looked up before any call, so that a missing function does not count as a failure at a row.
        self.function = rule.function.function
        self.events: list[Events] = []
        self.failures = 0

    def over(self, rows: RuleRows, state: State, first: int) -> dict[str, NDArray]:
        """Return the state after the given rows; first: number of the first key of these rows among all keys."""
        n = len(rows.key)
        given = {name: np.array(array) for name, array in state.items()}
        try:
            with np.errstate(all="ignore"):
                found = self.function(rows, given, **self.rule.parameters)
        except Exception as error:
            if rows.keys > 1:
                half = rows.keys // 2
                left = self.over(rows.of_keys(0, half), _slice_keys(state, 0, half), first)
                right = self.over(
                    rows.of_keys(half, rows.keys), _slice_keys(state, half, rows.keys), first + half
                )
                return {name: np.concatenate([left[name], right[name]], -1) for name in state}
            if n > 1:
                before = self.over(rows.select_span(0, n // 2), state, first)
                return self.over(rows.select_span(n // 2, n), before, first)
            self._record_failure(rows, first, error)
            return dict(state)
        after, events = self._check_result(found, rows)
        if events is not None:
            self.events.append(events._replace(key=events.key + first))
        return after

    def _record_failure(self, rows: RuleRows, first: int, error: Exception) -> None:
        rule = self.rule
        what = f"rule {rule.name}: {rule.called} failed ({type(error).__name__}: {extract_first_line(error)})"
        if self.failures == 0:
            print(f"{what}; the row is left out", file=sys.stderr)  # goes to the log of the executor
        self.failures += 1
        if self.failures > MOST_FAILURES:
            raise UserError(f"{what}, at more than {MOST_FAILURES} rows of a micro-batch: mend the function")
        one = np.ones(1, np.int64)
        self.events.append(
            Events(
                one * first,
                one * rule.number,
                one < 0,
                rows.time,
                np.full(1, np.nan),
                rows.time,
                one * FAILED,
            )
        )

    def _check_result(self, found: Any, rows: RuleRows) -> tuple[dict[str, NDArray], Events | None]:
        """Check and return the state and the events that a function has returned.

        Raises:
            UserError: the function broke its contract.
        """
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Mapping)):
            raise self._build_error("must return a pair: the state by field, and the events or None")
        after, given = found
        names = [field.name for field in self.rule.fields]
        if set(after) != set(names):
            raise self._build_error(
                f"returned the state {', '.join(sorted(map(str, after))) or 'without fields'}: its rule keeps "
                f"{', '.join(sorted(names)) or 'nothing'}"
            )
        types = {field.name: _FRESH_KIND[field.type] for field in self.rule.fields}
        state = {
            field.name: self._check_array(
                f"state {field.name}", after[field.name], types[field.name], field.shape(rows.keys)
            )
            for field in self.rule.fields
        }
        return state, None if given is None else self._build_events(given, rows)

    def _build_events(self, given: Any, rows: RuleRows) -> Events | None:
        if not isinstance(given, Mapping) or "row" not in given or set(given) - set(_GIVEN):
            raise self._build_error(
                f"must return events as arrays by name, row and any of {', '.join(_GIVEN)}"
            )
        size = len(np.atleast_1d(np.asarray(given["row"])))
        arrays = {
            name: self._check_array(
                f"events {name}", given[name] if size else np.zeros(0, kind), kind, (size,)
            )
            for name, kind in _GIVEN.items()
            if name in given
        }
        if size == 0:
            return None
        if arrays.get("readings", np.zeros(1)).min() < 0:
            raise self._build_error("returned an event with less than 0 readings")
        row = arrays["row"]
        if row.min() < 0 or row.max() >= len(rows.key):
            raise self._build_error(f"returned an event of a row outside 0 to {len(rows.key) - 1}")
        return Events(
            rows.key[row],
            np.full(size, self.rule.number),
            arrays.get("raised", np.ones(size, bool)),
            rows.time[row],
            arrays.get("value", np.full(size, np.nan)),
            arrays.get("since", rows.time[row]),
            arrays.get("readings", np.ones(size, np.int64)),
        )

    def _check_array(self, what: str, given: Any, kind: Any, shape: tuple[int, ...]) -> NDArray:
        array = np.asarray(given)
        if array.shape != shape:
            raise self._build_error(f"returned {what} of shape {array.shape}, which must be {shape}")
        if not np.can_cast(array.dtype, kind, "same_kind"):
            raise self._build_error(
                f"returned {what} of type {array.dtype}, which does not fit {np.dtype(kind).name}"
            )
        return array.astype(kind)

    def _build_error(self, what: str) -> UserError:
        return UserError(f"rule {self.rule.name}: {self.rule.called} {what}: mend the function")


_FRESH_KIND = {"float64": np.float64, "int64": np.int64, "timestamp": np.int64, "bool": np.bool_}


def _slice_keys(state: State, first: int, stop: int) -> dict[str, NDArray]:
    return {name: array[..., first:stop] for name, array in state.items()}
