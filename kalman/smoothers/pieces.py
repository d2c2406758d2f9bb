"""Fixed-interval smoothing in pieces: any number of rows and keys in bounded memory.

Each piece is the rows of one segment of `kalman.smoothers.checkpoints`. The results are the same, bit for bit, as with
all states in memory, since a run does not depend on the split of its rows.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from kalman.linalg.packing import packed_size
from kalman.run import (
    Integers,
    KeyStates,
    Outputs,
    Round,
    SortedRows,
    allocate_outputs,
    build_rounds,
    find_late_rows,
    run,
    spread_outputs,
)
from kalman.smoothers.backward import BackwardPass, FilteredSteps
from kalman.smoothers.checkpoints import Footprint, KeySection, split_sections
from kalman.smoothers.kinds import Smoother, build_smoother, select_smoothed_part
from kalman.types import Array, Filter

ROOM = 64 * 2**20
"""Bytes for the current states and results, beside the rows; a key with many rows may need more."""


class Smoothed(NamedTuple):
    """The state at each of N rows, given all rows of the row's key: mean (n, N), packed covariance (p, N).

    extra: name -> (d, N), further outputs given all rows. NaN where the row is late. A flagged row repeats its key's
    last good row.
    """

    mean: Array
    covariance: Array
    extra: Mapping[str, Array]


class Observer(Protocol):
    """An observer of a run, such as `kalman.evaluation.row_figures.RowFigures`."""

    def __call__(self, taken: Round) -> None:
        """Observe one round."""
        ...

    def found(self) -> dict[str, Array]:
        """Return figures of the rows of the run, name -> (d, N)."""
        ...


ObserverMaker = Callable[[Filter, KeyStates, SortedRows], Observer]
"""Makes the observer of a run over rows, given the states before them."""


class Piece(NamedTuple):
    """The results of N rows, whose indices are `rows` (N,), ascending; found: an observer's figures.

    before: states of some keys before these rows. taken: the rows, whose keys are positions among the states `before`.
    """

    rows: Integers
    outputs: Outputs
    smoothed: Smoothed
    found: Mapping[str, Array]
    before: KeyStates
    taken: SortedRows


class Pieces:
    """The smoothed rows of K keys, in pieces: iterate over it once.

    Every row is in one piece. The pieces of a key come in order from its last rows to its first. They follow the pieces
    of keys with lower numbers, unless the keys share pieces.
    """

    def __init__(
        self,
        model: Filter,
        states: KeyStates,
        rows: SortedRows,
        unit: float,
        observer: ObserverMaker | None = None,
        room: float = ROOM,
    ) -> None:
        """Prepare for rows after these states. Raises ModelError where the filter cannot be smoothed.

        Args:
            model: the filter.
            states: states of the K keys before the rows.
            rows: the rows, possibly with late ones.
            unit: microseconds in the model's unit of time.
            observer: makes the observer whose figures the pieces contain.
            room: bytes for the work, beside these arguments.
        """
        self._backwards, self._begin = build_smoother(model), select_smoothed_part(model).initial(1)
        self._model, self._rows, self._unit = model, rows, unit
        self._observer, self._room = observer, room
        self._states = states.take(np.arange(len(states.count)))  # a copy
        none = np.empty(0, np.int64)
        seen = {} if observer is None else observer(model, states.take(none), rows.take(none)).found()
        self.observed = {name: len(values) for name, values in seen.items()}
        """The names of the observer's figures, and the count of numbers of each in a row."""

    @property
    def states(self) -> KeyStates:
        """Return the keys' states; after the iteration, the states after all rows."""
        return self._states

    def __iter__(self) -> Iterator[Piece]:
        """Return the pieces."""
        late = find_late_rows(self._states, self._rows)
        kept = None
        if late.any():
            kept = np.flatnonzero(~late)
            for start in range(0, len(late), self._rows_a_piece):
                here = start + np.flatnonzero(late[start : start + self._rows_a_piece])
                if len(here):
                    yield self._build_late_piece(here)
        starts = _locate_starts(self._rows.key, kept)
        for section in split_sections(np.diff(starts), self._footprint, self._room):
            yield from self._smooth_section(
                _Keys(self._rows, kept, starts[section.first : section.stop + 1]), section
            )

    @property
    def _rows_a_piece(self) -> int:
        return int(max(1, min(self._room // self._footprint.row, 2**40)))

    @property
    def _footprint(self) -> Footprint:
        model, begun = self._model, self._backwards.begin(self._begin)
        n = len(model.states)
        given, filtered = n + packed_size(n), sum(model.outputs.values()) + sum(self.observed.values())
        extra = sum(len(values) for values in self._backwards.extra(begun).values())
        # sorting holds a row's results twice; besides: times, flags, indices
        row = model.size + 3 * (model.measurements + model.controls) + 4 * given + 2 * (filtered + extra) + 20
        return Footprint(8 * row, 300, 8 * (model.size + 3), 8 * 4 * (model.size + len(begun)))

    def nothing(self, rows: int) -> Smoothed:
        """Return smoothed states of `rows` rows, all NaN."""
        n = len(self._model.states)
        extra = self._backwards.extra(self._backwards.begin(self._begin))
        widths = {name: len(values) for name, values in extra.items()}
        parts = {name: np.full((width, rows), np.nan) for name, width in widths.items()}
        return Smoothed(np.full((n, rows), np.nan), np.full((packed_size(n), rows), np.nan), parts)

    def _build_late_piece(self, rows: Integers) -> Piece:
        """Return the results of late rows, which are not applied."""
        late, none = np.ones(len(rows), bool), np.empty(0, np.int64)
        outputs = spread_outputs(allocate_outputs(self._model, 0), none, late)
        unseen = {name: np.full((width, len(rows)), np.nan) for name, width in self.observed.items()}
        taken = self._rows.take(rows)
        return Piece(rows, outputs, self.nothing(len(rows)), unseen, self._states, taken)

    def _smooth_section(self, keys: "_Keys", section: KeySection) -> Iterator[Piece]:
        """Yield the pieces of some keys, and store their last states."""
        states = self._states.take(keys.numbers)
        checkpoints: list[KeyStates] = []
        segments = list(zip(section.bounds[:-1], section.bounds[1:], strict=True))
        for rounds_of in segments:
            segment = keys.segment(*rounds_of)
            checkpoints.append(states.take(segment.active))
            if rounds_of != segments[-1]:
                _put(run(self._model, checkpoints[-1], segment.rows, self._unit)[0], states, segment.active)
        later = None
        while segments:
            segment, before = keys.segment(*segments.pop()), checkpoints.pop()
            filtered = _Filtered(self._model, before, segment.rows, self._unit, self._observer)
            if later is None:
                _put(filtered.states, states, segment.active)
                _put(states, self._states, keys.numbers)
                later = self._backwards.begin(states.values[: len(self._begin)])
            smoothed = filtered.smoothed(self._backwards, later, segment.active)
            found = filtered.found
            yield Piece(segment.indices, filtered.outputs, smoothed, found, before, segment.rows)


class _Segment(NamedTuple):
    """The rows of one segment and their `indices` among all rows; active: positions of its keys in the section."""

    active: Integers
    indices: Integers
    rows: SortedRows


class _Keys(NamedTuple):
    """The keys of a section; the key at position i has the rows kept[starts[i]] up to kept[starts[i + 1]].

    kept: indices of the rows that are not late; None means all rows
    """

    all_rows: SortedRows
    kept: Integers | None
    starts: Integers

    @property
    def numbers(self) -> Integers:
        """Return the keys' numbers."""
        firsts = self.starts[:-1]
        return self.all_rows.key[firsts if self.kept is None else self.kept[firsts]]

    def segment(self, first: int, stop: int) -> _Segment:
        """Return the keys' rows in the rounds from `first` up to `stop`."""
        counts = np.diff(self.starts)
        active = np.flatnonzero(counts > first)
        counts = np.minimum(counts[active], stop) - first
        key = np.repeat(np.arange(len(active)), counts)
        begins = self.starts[active] + first - (np.cumsum(counts) - counts)
        indices = np.repeat(begins, counts) + np.arange(len(key))
        if self.kept is not None:
            indices = self.kept[indices]
        return _Segment(active, indices, self.all_rows.take(indices)._replace(key=key))


class _Filtered:
    """The results of a run, and the states before each row in the order of the rounds."""

    def __init__(
        self,
        model: Filter,
        states: KeyStates,
        rows: SortedRows,
        unit: float,
        observer: ObserverMaker | None,
    ) -> None:
        n = len(rows.key)
        self._observer = None if observer is None else observer(model, states, rows)
        self._size = select_smoothed_part(model).size
        self._before = np.empty((self._size, n))
        self._dt, self._first, self._flag = np.empty(n), np.empty(n, bool), np.empty(n, np.uint8)
        self.states, self.outputs = run(model, states, rows, unit, self._keep)
        self.found = {} if self._observer is None else self._observer.found()
        self._rows = rows

    def _keep(self, taken: Round) -> None:
        if self._observer is not None:
            self._observer(taken)
        place = taken.place
        self._before[:, place] = taken.before[: self._size]
        self._dt[place], self._first[place] = taken.rows[:2]
        self._flag[place] = taken.step.flag

    def smoothed(self, backwards: Smoother, whole: Array, active: Integers) -> Smoothed:
        """Return the rows' smoothed states, and carry the backward pass's array over them.

        whole (depth, K): the array after these rows, with the keys at positions `active`; after the call, the array
        before them.
        """
        plan = build_rounds(self._rows.key)
        y, u = self._rows.y[:, plan.order], self._rows.u[:, plan.order]
        values, later = self.states.values[: self._size, plan.keys], whole[:, active[plan.keys]]
        filtered = FilteredSteps(self._before, self._dt, self._first, self._flag, y, u)
        work = BackwardPass(backwards, plan, filtered, values, later)
        work.run()
        whole[:, active[plan.keys]] = work.later
        extra = {name: array[:, plan.place] for name, array in work.extra.items()}
        return Smoothed(work.mean[:, plan.place], work.covariance[:, plan.place], extra)


def _put(part: KeyStates, whole: KeyStates, where: Integers) -> None:
    """Write the states of some keys into the array of all states."""
    for into, values in zip(whole, part, strict=True):
        into[..., where] = values


def _locate_starts(key: Integers, kept: Integers | None) -> Integers:
    """Return the position where each key's kept rows begin, and the end of the last key's rows."""
    key = key if kept is None else key[kept]
    new = np.ones(len(key), bool)
    np.not_equal(key[1:], key[:-1], out=new[1:])
    return np.append(np.flatnonzero(new), len(key))
