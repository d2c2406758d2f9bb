"""Apply rules to the sequence of a key's readings, for many keys at once. No Spark, no clock, no loop per key.

A rule is met by consecutive readings beyond a bound (each above the previous reading, if `rising`), or by silence. It
raises an alert once. It clears the alert with hysteresis: when consecutive readings are within bounds that may be
narrower.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

NEVER = np.iinfo(np.int64).min


class Rules(NamedTuple):
    """R rules.

    high, low (R,): a reading at or beyond one of them is out; clear_high, clear_low (R,): a reading strictly within
    both is back; readings, clear_readings (R,): number of consecutive readings that raise and clear; rising (R,): each
    reading must be above the previous one; after (R,): microseconds of silence, -1 for rules about readings.
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

    time (K,): time of the last reading, NEVER before the first; run (R, K): number of consecutive readings that are
    out; since (R, K): time of the run's first reading; calm (R, K): number of consecutive readings that are back, while
    the alert is active; last (R, K): last reading; active (R, K): whether the alert is raised.
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
    """E alerts raised or cleared, in order for each key.

    key, rule (E,): numbers; raised (E,); time (E,): time of the reading, or when the silence became too long; value
    (E,): the reading, or the seconds of silence so far; since (E,): start of the run or silence; readings (E,): length
    of the run.
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
    """Apply rows to the states of their keys.

    Args:
        rules: R rules.
        states: states of K keys.
        key: (N,) number of each row's key; rows are ordered by key, then time.
        time: (N,) microseconds. A row before its key's last reading is skipped.
        value: (R, N) each rule's reading of each row; NaN: no reading.
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
    # The k-th row of every key at once: as many rounds as the busiest key has rows.
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
    """Apply at most one row of each key, in place."""
    was = now.take(key)
    at = np.broadcast_to(time, value.shape)
    before = np.broadcast_to(was.time, value.shape)
    quiet = (rules.after >= 0)[:, None]
    # The gap before this row may exceed the limit of silence, although no alert was raised.
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
    """Return the events of the rules and keys marked in `which` (R, n)."""
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
