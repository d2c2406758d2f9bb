"""The backward pass of a smoother over the rows of a run, in rounds of many keys or key by key."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kalman import flags
from kalman.long_series import FEW_OTHERS, walk_places
from kalman.run import Integers, Rounds
from kalman.smoothers.kinds import CompiledBack, Smoother, compile_back
from kalman.types import Array, Rows


class FilteredSteps(NamedTuple):
    """What the backward pass needs of N filtered rows, in the order of the rounds.

    before: (size, N) states before the rows; dt, first, flag: (N,); y: (m, N); u: (c, N)
    """

    before: Array
    dt: Array
    first: npt.NDArray[np.bool_]
    flag: npt.NDArray[np.uint8]
    y: Array
    u: Array

    def take(self, place: Any) -> Rows:
        """Return the rows at these places."""
        return Rows(self.dt[place], self.first[place], self.y[:, place], self.u[:, place])


class BackwardPass:
    """The backward pass over rows; afterwards `mean`, `covariance` and `extra` hold the rows' smoothed states.

    values (size, K), later (depth, K): states after the rows, and the smoother's array there, of the keys in the
    plan's order; the pass carries both back.
    """

    def __init__(
        self, backwards: Smoother, plan: Rounds, filtered: FilteredSteps, values: Array, later: Array
    ) -> None:
        self._backwards, self._plan, self._filtered = backwards, plan, filtered
        self._values, self.later = values, later
        rows = len(filtered.dt)
        mean, covariance = backwards.smoothed(values[:, :1], later[:, :1])
        self.mean, self.covariance = np.empty((len(mean), rows)), np.empty((len(covariance), rows))
        self.extra = {name: np.empty((len(a), rows)) for name, a in backwards.extra(later).items()}

    def run(self) -> None:
        """Go back over all rows."""
        plan, first, back = self._plan, self._plan.find_long_tail(), None
        if first is not None:
            missing = bool(np.isnan(self._filtered.y[:, plan.starts[first] :]).any())
            back = compile_back(self._backwards, missing)
        if first is not None and back is not None:
            keys = int(plan.starts[first + 1] - plan.starts[first])
            places = [plan.list_places(key, first)[::-1] for key in range(keys)]
            left = np.array([self._walk_key(key, places[key], back, keys) for key in range(keys)])
            for part, which in plan.list_rest(first, np.zeros_like(left), left, backwards=True):
                self._go_back(part, which)
        for place in reversed(plan.slices(None if back is None else first)):
            self._go_back(place, slice(0, place.stop - place.start))

    def _go_back(self, place: slice | Integers, keys: slice | Integers) -> None:
        """Go back over a row of each of the keys at positions `keys`."""
        backwards, filtered, later = self._backwards, self._filtered, self.later
        self.mean[:, place], self.covariance[:, place] = backwards.smoothed(
            self._values[:, keys], later[:, keys]
        )
        for name, value in backwards.extra(later[:, keys]).items():
            self.extra[name][:, place] = value
        before = filtered.before[:, place].copy()
        earlier = backwards.back(before, filtered.take(place), later[:, keys])
        later[:, keys] = np.where(filtered.flag[place] == flags.WELL, earlier, later[:, keys])
        self._values[:, keys] = before

    def _walk_key(self, key: int, places: Integers, back: CompiledBack, keys: int) -> int:
        """Go back over the rows of a key at these places, the last row first; return how many rows are left.

        The first rows of a key are left if they are not in order, and all are if rounds of all `keys` are faster.
        """
        filtered = self._filtered
        clear = (filtered.flag[places] == flags.WELL) & ~filtered.first[places]
        if back.diffuse.stop > back.diffuse.start:
            clear &= ~filtered.before[back.diffuse][:, places].any(axis=0)
        end = int(np.flatnonzero(clear)[-1]) + 1 if clear.any() else 0
        if np.count_nonzero(~clear[:end]) > FEW_OTHERS + end // (FEW_OTHERS * keys):
            return len(places)

        def walk_some(at: int, stop: int) -> int:
            ready = clear[at:stop]
            return self._walk_rows(key, places[at : stop if ready.all() else at + int(ready.argmin())], back)

        def take(at: int) -> None:
            self._go_back(slice(places[at], places[at] + 1), slice(key, key + 1))

        return len(places) - walk_places(end, lambda at: end, walk_some, take)

    def _walk_rows(self, key: int, places: Integers, back: CompiledBack) -> int:
        """Go back over the rows of a key at these places up to one that is not in order; return how many."""
        if not len(places):
            return 0
        filtered, n, p = self._filtered, len(self.mean), len(self.covariance)
        rows = filtered.take(places)
        row = [*filtered.before[: back.size, places], rows.dt, *rows.u, *rows.y]
        row += [~np.isnan(y) for y in rows.y] if back.missing else []
        carried = np.ascontiguousarray(self.later[:, key])
        earlier, _ = back.cut.apply(carried, row)
        done = earlier.shape[1]
        if done:
            # a row's smoothed state is what was carried to it
            given = np.concatenate([carried[: n + p, None], earlier[: n + p, : done - 1]], axis=1)
            self.mean[:, places[:done]], self.covariance[:, places[:done]] = given[:n], given[n:]
            self.later[:, key] = earlier[:, -1]
            self._values[:, key] = filtered.before[:, places[done - 1]]
        return done
