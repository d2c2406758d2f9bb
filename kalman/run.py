"""Run a filter over many rows of many keys, sorted by key and time, in rounds.

Round k holds the k-th row of every key that has at least k rows. The keys are ordered by descending number of
rows, so the keys of each round are a prefix of the previous round's keys, and array views stay contiguous.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kalman import flags
from kalman.types import Array, Filter, Rows, Step

Integers = npt.NDArray[np.int64]


class KeyStates(NamedTuple):
    """The states of K keys after the rows applied so far.

    values         (size, K) filter states
    event_time     (K,) int64 microseconds of the newest applied row; undefined while count is 0
    count          (K,) int64 number of applied rows
    log_likelihood (K,) sum over all applied rows
    """

    values: Array
    event_time: Integers
    count: Integers
    log_likelihood: Array

    def take(self, which: Integers) -> "KeyStates":
        """Return the states of the keys `which`, in that order."""
        values, event_time, count, log_likelihood = self
        return KeyStates(values[:, which], event_time[which], count[which], log_likelihood[which])


class SortedRows(NamedTuple):
    """N rows, sorted by key and, within a key, by time.

    key  (N,) int64 in [0, K), non-decreasing
    time (N,) int64 microseconds, non-decreasing within a key
    y    (m, N) measurement, NaN where missing
    u    (c, N) control input
    """

    key: Integers
    time: Integers
    y: Array
    u: Array

    def take(self, which: Integers | npt.NDArray[np.bool_]) -> "SortedRows":
        """Return the rows at these indices, in the order of the indices, or the rows where a mask is true."""
        return SortedRows(self.key[which], self.time[which], self.y[:, which], self.u[:, which])


class Outputs(NamedTuple):
    """The filter's outputs for each of N rows.

    mean (n, N), covariance (p, N) packed lower: NaN for a late row, the last good state for a flagged row
    log_likelihood, nis (N,): NaN for a late or flagged row; nis also NaN without a measurement
    flag (N,) uint8 code of `kalman.flags`; late (N,) bool
    extra name -> (d, N)
    """

    mean: Array
    covariance: Array
    log_likelihood: Array
    nis: Array
    flag: npt.NDArray[np.uint8]
    late: npt.NDArray[np.bool_]
    extra: dict[str, Array]


class Rounds(NamedTuple):
    """The order in which N sorted rows are applied.

    keys   (Kp,) the keys that have rows, by descending number of rows
    order  (N,) indices of the rows in the order of the rounds
    place  (N,) position of each row in `order`
    starts (rounds + 1,) position at which each round starts; the rows of a round belong to a prefix of `keys`
    """

    keys: Integers
    order: Integers
    place: Integers
    starts: list[int]

    def slices(self) -> list[slice]:
        """Return the positions of the rows of each round."""
        return [slice(a, b) for a, b in zip(self.starts[:-1], self.starts[1:], strict=True)]


def build_rounds(key: Integers) -> Rounds:
    """Return the rounds of rows whose keys (N,) are non-decreasing."""
    n = len(key)
    new = np.empty(n, bool)
    new[:1] = True
    np.not_equal(key[1:], key[:-1], out=new[1:])
    firsts = np.flatnonzero(new)
    counts = np.diff(firsts, append=n)
    by_count = np.argsort(-counts, kind="stable")
    rank = np.empty_like(by_count)
    rank[by_count] = np.arange(len(by_count))
    # the number of keys with more than k rows, for each k
    active = np.cumsum(np.bincount(counts, minlength=1)[::-1])[::-1][1:]
    starts = np.concatenate([[0], np.cumsum(active)]).astype(np.int64)
    within = np.arange(n) - np.repeat(firsts, counts)
    place = starts[within] + np.repeat(rank, counts)
    order = np.empty(n, np.int64)
    order[place] = np.arange(n)
    return Rounds(key[firsts][by_count], order, place, starts.tolist())


def initial_states(model: Filter, keys: int) -> KeyStates:
    """Return the states of keys without rows."""
    return KeyStates(
        model.initial(keys), np.zeros(keys, np.int64), np.zeros(keys, np.int64), np.zeros(keys, np.float64)
    )


class Round(NamedTuple):
    """One applied round, as `run` passes it to `on_round`.

    place  positions of the round's rows in the order of the rounds
    keys   positions of the round's keys in `Rounds.keys`
    before (size, K) states before the rows, for a first row the initial state; valid during the call only
    """

    place: slice
    keys: slice
    before: Array
    rows: Rows
    step: Step


def find_late_rows(states: KeyStates, rows: SortedRows) -> npt.NDArray[np.bool_]:
    """Return a mask (N,) of rows that are older than their key's state."""
    return (states.count[rows.key] > 0) & (rows.time < states.event_time[rows.key])


def run(
    model: Filter,
    states: KeyStates,
    rows: SortedRows,
    unit: float,
    on_round: Callable[[Round], None] | None = None,
) -> tuple[KeyStates, Outputs]:
    """Return the keys' states after the rows, and the filter's outputs for each row.

    unit: microseconds in the model's unit of time. A row older than its key's event_time is late and is not applied.
    A flagged row leaves its key's state and event time unchanged, so the next row is predicted from the last good row.
    A key's results do not depend on the other keys or on the split of rows into calls, bit for bit.
    `on_round` is called with every round of the rows that are not late.
    """
    late = find_late_rows(states, rows)
    if late.any():
        kept = np.flatnonzero(~late)
        part = SortedRows(rows.key[kept], rows.time[kept], rows.y[:, kept], rows.u[:, kept])
        states, outputs = run(model, states, part, unit, on_round)
        return states, spread_outputs(outputs, kept, late)
    plan = build_rounds(rows.key)
    time, y, u = rows.time[plan.order], rows.y[:, plan.order], rows.u[:, plan.order]
    values = states.values[:, plan.keys]
    event_time, count = states.event_time[plan.keys], states.count[plan.keys]
    total = states.log_likelihood[plan.keys]
    outputs = allocate_outputs(model, len(rows.key))
    for part in plan.slices():
        prefix = slice(0, part.stop - part.start)
        first = count[prefix] == 0
        dt = np.where(first, 0, time[part] - event_time[prefix]) / unit
        taken = Rows(dt, first, y[:, part], u[:, part])
        before, impossible = begin_states(model, values[:, prefix], taken)
        after, step = model.step(before, taken)
        if impossible is not None and impossible.any():
            after, step = _keep_states(values[:, prefix], after, step, impossible)
        if on_round is not None:
            on_round(Round(part, prefix, before, taken, step))
        outputs.mean[:, part], outputs.covariance[:, part] = model.moments(after)
        outputs.log_likelihood[part], outputs.nis[part], outputs.flag[part] = step[:3]
        for name, value in step.extra.items():
            outputs.extra[name][:, part] = value
        good = step.flag == 0
        if good.all():
            event_time[prefix] = time[part]
            count[prefix] += 1
            total[prefix] += step.log_likelihood
        else:
            event_time[prefix] = np.where(good, time[part], event_time[prefix])
            count[prefix] += good
            total[prefix] += np.where(good, step.log_likelihood, 0.0)
        values[:, prefix] = after
    after_all = KeyStates(
        states.values.copy(), states.event_time.copy(), states.count.copy(), states.log_likelihood.copy()
    )
    after_all.values[:, plan.keys] = values
    after_all.event_time[plan.keys] = event_time
    after_all.count[plan.keys] = count
    after_all.log_likelihood[plan.keys] = total
    return after_all, pick_outputs(outputs, plan.place)


def begin_states(model: Filter, state: Array, rows: Rows) -> tuple[Array, npt.NDArray[np.bool_] | None]:
    """Return the states (size, K) before the rows, and a mask (K,) of keys with an invalid start.

    If the model takes its start from columns, a key begins with the columns of its first row. Otherwise the states are
    unchanged and the mask is None.
    """
    if getattr(model, "own_start", None) is None or not rows.first.any():
        return state, None
    return model.begun(state, rows.first, rows.u)  # type: ignore[attr-defined]


def _keep_states(before: Array, after: Array, step: Step, which: npt.NDArray[np.bool_]) -> tuple[Array, Step]:
    """Return a step in which the keys `which` are flagged and keep their state."""
    after = np.where(which, before, after)
    score, nis = (np.where(which, np.nan, a) for a in (step.log_likelihood, step.nis))
    flag = np.where(which, flags.NOT_PSD, step.flag).astype(np.uint8)
    return after, Step(score, nis, flag, {name: np.where(which, np.nan, a) for name, a in step.extra.items()})


def allocate_outputs(model: Filter, n: int) -> Outputs:
    """Return outputs of n rows, whose values are not yet set."""
    states = len(model.states)
    return Outputs(
        np.empty((states, n)),
        np.empty((states * (states + 1) // 2, n)),
        np.empty(n),
        np.empty(n),
        np.zeros(n, np.uint8),
        np.zeros(n, bool),
        {name: np.empty((width, n)) for name, width in model.outputs.items()},
    )


def pick_outputs(outputs: Outputs, place: Integers) -> Outputs:
    """Return the outputs of the rows at the given places."""

    def pick(array: np.ndarray) -> np.ndarray:
        return np.take(array, place, axis=-1)

    return _map_outputs(outputs, pick)


def spread_outputs(outputs: Outputs, kept: Integers, late: np.ndarray) -> Outputs:
    """Return outputs for all rows, given the outputs of the applied rows `kept`; the other rows are late."""
    return _map_outputs(outputs, lambda array: scatter_values(array, kept, len(late)))._replace(late=late)


def scatter_values(array: np.ndarray, kept: Integers, rows: int) -> np.ndarray:
    """Return values for all `rows`: the given values at the indices `kept`, NaN (or 0 for integers) elsewhere."""
    fill = np.nan if array.dtype == np.float64 else 0
    full = np.full((*array.shape[:-1], rows), fill, array.dtype)
    full[..., kept] = array
    return full


def _map_outputs(outputs: Outputs, change: Callable[[np.ndarray], np.ndarray]) -> Outputs:
    """Return the outputs with every array changed."""
    mean, covariance, log_likelihood, nis, flag, late, extra = outputs
    return Outputs(
        change(mean),
        change(covariance),
        change(log_likelihood),
        change(nis),
        change(flag),
        change(late),
        {name: change(array) for name, array in extra.items()},
    )
