"""Run a filter over many rows of many keys, sorted by key and time, in rounds.

Round k holds the k-th row of every key that has at least k rows. The keys are ordered by descending number of
rows, so the keys of each round are a prefix of the previous round's keys, and array views stay contiguous.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kalman import flags
from kalman.long_series import FEW_OTHERS, PATIENCE, SeriesWalk, build_walk, walk_places
from kalman.types import Array, Filter, Rows, Step

Integers = npt.NDArray[np.int64]

FEW_KEYS, MANY_ROUNDS = 128, 4096
"""At most so many keys in at least so many rounds are walked by compiled code, which takes 0.1 s to start.

A round of NumPy calls over so few keys takes as long as over one.
"""


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
    starts: Integers

    def slices(self, stop: int | None = None) -> list[slice]:
        """Return the positions of the rows of each round, or of the rounds before `stop`."""
        starts = self.starts[: None if stop is None else stop + 1].tolist()
        return [slice(a, b) for a, b in pairwise(starts)]

    def find_long_tail(self) -> int | None:
        """Return the first of the rounds that are many and of few keys each, at the end; None without such rounds."""
        widths = np.diff(self.starts)
        first = int(np.searchsorted(-widths, -FEW_KEYS))
        return first if len(widths) - first >= MANY_ROUNDS else None

    def list_rest(
        self, first: int, done: Integers, left: Integers, backwards: bool = False
    ) -> Iterator[tuple[Integers, Integers]]:
        """Yield the rounds of rows that are left from round `first` on: places (k,), positions of their keys (k,).

        done, left (J,): of the key at each position in `keys`, how many of these rows come before those that are left,
        and how many are left. backwards: whether the last rounds come first.
        """
        order = np.argsort(-left, kind="stable")
        rounds = range(int(left.max(initial=0)))
        for t in reversed(rounds) if backwards else rounds:
            keys = order[: int(np.searchsorted(-left[order], -t))]
            yield self.starts[first + done[keys] + t] + keys, keys

    def list_places(self, key: int, first: int) -> Integers:
        """Return the places of the rows of the key at a position in `keys`, from a round on."""
        starts = self.starts[first:]
        return starts[: int(np.searchsorted(-np.diff(starts), -key))] + key


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
    return Rounds(key[firsts][by_count], order, place, starts)


def initial_states(model: Filter, keys: int) -> KeyStates:
    """Return the states of keys without rows."""
    return KeyStates(
        model.initial(keys), np.zeros(keys, np.int64), np.zeros(keys, np.int64), np.zeros(keys, np.float64)
    )


class Round(NamedTuple):
    """One applied round, as `run` passes it to `on_round`.

    place  positions of the round's rows in the order of the rounds; consecutive rows of one key may come as one round
    before (size, K) states before the rows, for a first row the initial state; valid during the call only
    """

    place: slice | Integers
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
    work = _RowRounds(model, states, rows, unit, on_round)
    work.apply_all()
    return work.collect_states(states), work.outputs if work.ordered else pick_outputs(
        work.outputs, work.plan.place
    )


class _RowRounds:
    """The rows of one call of `run`, and what is known of their keys; arrays of rows are in the order of the rounds."""

    def __init__(
        self,
        model: Filter,
        states: KeyStates,
        rows: SortedRows,
        unit: float,
        on_round: Callable[[Round], None] | None,
    ) -> None:
        self.model, self.unit, self.on_round = model, unit, on_round
        self.plan = plan = build_rounds(rows.key)
        self.ordered = len(plan.keys) <= 1
        """Whether the rows are in the order of the rounds, as those of a single key are."""
        self.time, self.y, self.u = rows.time, rows.y, rows.u
        if not self.ordered:
            self.time, self.y, self.u = rows.time[plan.order], rows.y[:, plan.order], rows.u[:, plan.order]
        self.values = states.values[:, plan.keys]
        self.event_time, self.count = states.event_time[plan.keys], states.count[plan.keys]
        self.total = states.log_likelihood[plan.keys]
        self.outputs = allocate_outputs(model, len(rows.key))

    def apply_all(self) -> None:
        """Apply all rows: in rounds of many keys, and key by key where few keys have many rows."""
        plan, first, walk = self.plan, self.plan.find_long_tail(), None
        if first is not None:
            missing = bool(np.isnan(self.y[:, plan.starts[first] :]).any())
            walk = build_walk(self.model, missing)
        slices = plan.slices(None if walk is None or first is None else first + PATIENCE)
        for at, part in enumerate(slices):
            keys = slice(0, part.stop - part.start)
            if walk is not None and first is not None and at >= first and self._are_ready(keys, walk):
                return self._walk_keys(at, walk)
            self.apply_round(part, keys)
        if walk is not None:
            self._walk_keys(len(slices), walk)

    def _are_ready(self, keys: slice, walk: SeriesWalk) -> bool:
        """Return whether keys have a row, and no diffuse part in their state."""
        return bool(self.count[keys].all()) and walk.is_clear(self.values[:, keys])

    def _walk_keys(self, first: int, walk: SeriesWalk) -> None:
        """Apply the rows from round `first` on, key by key; those of keys with many rows not in order, by rounds."""
        plan = self.plan
        if first >= len(plan.starts) - 1:
            return
        keys = int(plan.starts[first + 1] - plan.starts[first])
        places = [plan.list_places(key, first) for key in range(keys)]
        done = np.array([self._walk_key(key, places[key], walk, keys) for key in range(keys)])
        for part, which in plan.list_rest(first, done, np.array([len(a) for a in places]) - done):
            self.apply_round(part, which)

    def apply_round(self, part: slice | Integers, prefix: slice | Integers) -> None:
        """Apply a row of each of the keys at positions `prefix`; part: positions of the rows."""
        model, time, event_time, count, total = self.model, self.time, self.event_time, self.count, self.total
        values = self.values
        first = count[prefix] == 0
        dt = np.where(first, 0, time[part] - event_time[prefix]) / self.unit
        taken = Rows(dt, first, self.y[:, part], self.u[:, part])
        before, impossible = begin_states(model, values[:, prefix], taken)
        after, step = model.step(before, taken)
        if impossible is not None and impossible.any():
            after, step = _keep_states(values[:, prefix], after, step, impossible)
        if self.on_round is not None:
            self.on_round(Round(part, before, taken, step))
        self._put_outputs(part, after, step)
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

    def _put_outputs(self, part: slice | Integers, after: Array, step: Step) -> None:
        outputs = self.outputs
        outputs.mean[:, part], outputs.covariance[:, part] = self.model.moments(after)
        outputs.log_likelihood[part], outputs.nis[part], outputs.flag[part] = step[:3]
        for name, value in step.extra.items():
            outputs.extra[name][:, part] = value

    def _walk_key(self, key: int, places: Integers, walk: SeriesWalk, keys: int) -> int:
        """Apply the rows of a key at these places, those that are in order by compiled code.

        Return how many rows were applied: not all, if so many are not in order that rounds of all `keys` are faster.
        """

        def walk_some(at: int, end: int) -> int:
            state = np.ascontiguousarray(self.values[:, key])
            if not self.count[key] or not walk.is_clear(state):
                return 0
            return self._walk_rows(key, state, places[at:end], walk)

        def take(at: int) -> None:
            self.apply_round(slice(places[at], places[at] + 1), slice(key, key + 1))

        return walk_places(len(places), lambda at: FEW_OTHERS + at // (FEW_OTHERS * keys), walk_some, take)

    def _walk_rows(self, key: int, state: Array, places: Integers, walk: SeriesWalk) -> int:
        """Apply the rows of a key at these places up to one that is not in order; return how many were applied."""
        part = slice(places[0], places[-1] + 1) if self.ordered else places
        time = self.time[part]
        dt = np.diff(time, prepend=self.event_time[key]) / self.unit
        taken = Rows(dt, np.zeros(len(dt), bool), self.y[:, part], self.u[:, part])
        after, step = walk.apply(state, taken)
        done = after.shape[1]
        if not done:
            return 0
        part = slice(places[0], places[done - 1] + 1) if self.ordered else places[:done]
        if self.on_round is not None:
            before = np.concatenate([state[:, None], after[:, :-1]], axis=1)
            dt, first, y, u = taken
            self.on_round(Round(part, before, Rows(dt[:done], first[:done], y[:, :done], u[:, :done]), step))
        self._put_outputs(part, after, step)
        self.values[:, key] = after[:, -1]
        self.event_time[key] = time[done - 1]
        self.count[key] += done
        # one sum after another, as by rounds
        self.total[key] = np.cumsum(np.concatenate([self.total[key : key + 1], step.log_likelihood]))[-1]
        return done

    def collect_states(self, states: KeyStates) -> KeyStates:
        """Return the states of all keys, given the states before the rows."""
        values, event_time, count, total = states
        found = KeyStates(values.copy(), event_time.copy(), count.copy(), total.copy())
        keys = self.plan.keys
        found.values[:, keys], found.event_time[keys] = self.values, self.event_time
        found.count[keys], found.log_likelihood[keys] = self.count, self.total
        return found


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
