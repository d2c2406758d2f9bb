"""Online EM: the mixture of each key moves a step towards each row, or each batch of rows, of the key.

Reference: Cappé and Moulines (2009), "On-line expectation-maximization algorithm for latent data models", JRSS B 71,
section 2.2: s <- s + gamma_t (s(y_t; theta) - s), theta <- theta(s).
Cappé (2011), "Online expectation-maximisation", for a warm-up during which the statistics s move and theta does not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kalman import flags
from kalman.filters.program_filter import ProgramFilter, ProgramStep
from kalman.filters.state_layout import Flags
from kalman.filters.update import Present
from kalman.linalg.entries import Entry, Vector, plus, times
from kalman.linalg.packing import unpack
from kalman.mixtures.components import (
    Components,
    average_mixtures,
    bound_mixture,
    build_row_mixture,
    find_any_present,
    judge,
    nis,
    predict_moments,
    unpack_components,
)
from kalman.mixtures.families import Family
from kalman.mixtures.starts import MixtureStart
from kalman.models.columns import Cell, Column, resolve
from kalman.types import Array, ModelError


@dataclass(frozen=True)
class MixtureFilter(ProgramFilter):
    """A mixture of `count` components that moves by gamma_t = max((t + offset)^-decay, minimum) at the t-th step.

    A step takes `batch` rows. A row without a measurement changes nothing and does not count. Each of decay, offset,
    minimum and batch may be a column; the values in the row that completes a step apply. With a column for `batch`, a
    step is complete once the number of rows since the last step reaches the value in the row. During a key's first
    `warm_up` rows the components do not move; the results of these steps are stored beside the components, and the next
    step uses them.

    states  names of the entries of a component's mean
    least   lower bounds of these entries that keep components from degenerating, see `Family.bounded`
    start   the components before the first row (`Components.flat`); () before learning
    own_start  the start from columns of a key's first row; `start` is then a placeholder
    """

    states: tuple[str, ...]
    measurements: int
    controls: int
    family: Family
    count: int
    decay: Cell
    offset: Cell
    minimum: Cell
    batch: int | Column
    least: tuple[float, ...]
    start: tuple[float, ...]
    warm_up: int = 0
    own_start: MixtureStart | None = None

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """The fields: the components and the number of rows.

        If a column gives the batch size, the number of steps and the number of rows since the last step follow. With
        batches the mean of the open batch follows, and with a warm-up the result of the warm-up.
        """
        fields = self._list_shapes("")
        fields["rows"] = (1,)
        if isinstance(self.batch, Column):
            fields |= {"steps": (1,), "batch_rows": (1,)}
        fields |= self._list_shapes("batch_") if self.batch != 1 else {}
        return fields | (self._list_shapes("warm_") if self.warm_up else {})

    def _list_shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        shapes = {f"{prefix}weights": (self.count,)}
        shapes[prefix + self.family.mean] = (self.count * len(self.states),)
        if self.family.spread:
            shapes[prefix + self.family.spread] = (self.count * self.family.spreads(self.measurements),)
        return shapes

    @property
    def outputs(self) -> Mapping[str, int]:
        """The output with the probability of each component, given the row and the mixture before the row."""
        return {"responsibilities": self.count}

    @property
    def _width(self) -> int:
        return self.count * (1 + len(self.states) + self.family.spreads(self.measurements))

    def components(self, flat: Sequence[Any]) -> Components:
        """Return the components from a list of flat entries (`Components.flat`)."""
        return unpack_components(flat, self.count, len(self.states), self.family.spreads(self.measurements))

    def initial(self, keys: int) -> Array:
        """Return the state (size, keys) of keys that have no row yet. Raises ModelError before learning."""
        if not self.start:
            raise ModelError(
                f"mixture.{self.family.mean}",
                "the components are not known before they are learned",
                "run pretrain, or write them",
            )
        state = np.zeros((self.size, keys))
        return self._put(state, np.array(self.start)[:, None])

    def _put(self, state: Array, flat: Array) -> Array:
        """Write flat components into the state, also into the fields of the warm-up."""
        state[: self._width] = flat
        if self.warm_up:
            state[self.size - self._width :] = flat
        return state

    def begun(self, state: Array, first: Flags, u: Array) -> tuple[Array, Flags]:
        """Start keys at their first row from columns; arguments and results are those of `StateLayout.begun`."""
        assert self.own_start is not None
        which, wrong, state = np.flatnonzero(first), np.zeros(len(first), bool), state.copy()
        flat, wrong[which] = self.own_start.resolve_start(u[:, which])
        state[:, which] = self._put(state[:, which], flat)
        return state, wrong

    def step_entries(self, state: Vector, u: Vector, y: Vector, presents: Sequence[Present]) -> ProgramStep:
        """Return the result of one row: the E step under the mixture before the row, and a step of the components."""
        mixture, rows = self.components(state), state[self._width]
        judged = judge(self.family, mixture, y, presents)
        alone = build_row_mixture(judged)
        held = state[self.size - self._width :] if self.warm_up else state[: self._width]
        base = self.components(held)
        full: Any = True
        more: list[Entry] = []
        if isinstance(self.batch, Column):
            steps, waiting = state[self._width + 1 : self._width + 3]
            pending = self._average_batch(state, alone, waiting)
            full = np.greater_equal(plus(waiting, 1.0), u[self.batch.index])
            moved = self._moved(base, pending, plus(steps, 1.0), u).flat()
            after = [np.where(full, a, b) for a, b in zip(moved, held, strict=True)]
            counts = np.where(full, plus(steps, 1.0), steps), np.where(full, 0.0, plus(waiting, 1.0))
            more = [*counts, *pending.flat()]
        elif self.batch == 1:
            after = self._moved(base, alone, plus(rows, 1.0), u).flat()
        else:
            place = np.remainder(rows, float(self.batch))
            pending = self._average_batch(state, alone, place)
            step = np.floor((rows + 1.0) / float(self.batch))
            full = np.equal(place + 1.0, float(self.batch))
            # before the batch is full the result is not used, so any step number except 0 is valid
            moved = self._moved(base, pending, np.maximum(step, 1.0), u).flat()
            after = [np.where(full, a, b) for a, b in zip(moved, held, strict=True)]
            more = pending.flat()
        if self.warm_up:
            more = [*more, *after]
            warm = np.greater(plus(rows, 1.0), float(self.warm_up)) & full
            after = [np.where(warm, a, b) for a, b in zip(after, state[: self._width], strict=True)]
        whole: list[Entry] = [*after, plus(rows, 1.0), *more]
        some = find_any_present(presents)
        if some is not None:
            whole = [np.where(some, a, b) for a, b in zip(whole, state, strict=True)]
        score = nis(self.family, mixture, y, presents)
        return ProgramStep(whole, judged.log_likelihood, score, {"responsibilities": judged.responsibilities})

    def _average_batch(self, state: Vector, alone: Components, place: Entry) -> Components:
        """Return the mean of a batch after adding the row `alone`; place: number of earlier rows in the batch."""
        first = self._width + (3 if isinstance(self.batch, Column) else 1)
        return average_mixtures(self.components(state[first:]), alone, np.divide(1.0, place + 1.0))

    def _moved(self, mixture: Components, towards: Components, step: Entry, u: Vector) -> Components:
        offset, minimum = resolve([self.offset, self.minimum], u)
        decay = times(-1.0, u[self.decay.index]) if isinstance(self.decay, Column) else -self.decay
        gamma: Entry = np.maximum(np.power(plus(step, offset), decay), minimum)
        return bound_mixture(self.family, average_mixtures(mixture, towards, gamma), self.least)

    def codes(self, y: Array, u: Array) -> npt.NDArray[np.uint8]:
        """Return flags (K,) for measurements outside the family's support and for columns with invalid step options."""
        outside = self.family.outside(y)
        codes = np.where(outside, flags.OUT_OF_SUPPORT, flags.WELL)
        return np.where(self._find_invalid_steps(u), flags.NOT_PSD, codes).astype(np.uint8)

    def _find_invalid_steps(self, u: Array) -> npt.NDArray[np.bool_]:
        """Return a mask of rows with an invalid decay, offset, minimum or batch in the columns u (c, K)."""
        wrong = np.zeros(u.shape[1], bool)
        # for each option: the least value, whether the least value is allowed, and the greatest value
        for cell, least, closed, most in (
            (self.decay, 0.0, False, 1.0),
            (self.offset, 0.0, False, np.inf),
            (self.minimum, 0.0, True, 1.0),
            (self.batch, 1.0, True, np.inf),
        ):
            if isinstance(cell, Column):
                value = u[cell.index]
                wrong |= ~((value >= least if closed else value > least) & (value <= most))
        return wrong

    def moments(self, state: Array) -> tuple[Array, Array]:
        """Return mean (n, K) and packed covariance that the mixture predicts for the states of the next row."""
        with np.errstate(all="ignore"):
            mean, covariance = predict_moments(self.family, self.components(list(state)))
        return _stack_rows(mean, state.shape[1]), _stack_rows(covariance, state.shape[1])

    def measured(self, state: Array, u: Array) -> tuple[Array, Array]:
        """Return mean (m, K) and packed covariance of the next row's measurements."""
        with np.errstate(all="ignore"):
            mixture = self.components(list(state))
            mean, covariance = self.family.measured(*predict_moments(self.family, mixture))
        return _stack_rows(mean, state.shape[1]), _stack_rows(covariance, state.shape[1])

    def snapshot(self, state: Array) -> tuple[Array, Array, dict[str, Array]]:
        """Return mean (n, K), full row-major covariance (n*n, K) of the next row, and all fields of the state."""
        mean, covariance = self.moments(state)
        return mean, unpack(covariance), {name: state[place] for name, place in self.places.items()}

    def restore(self, mean: Array, covariance: Array, extras: Mapping[str, Array]) -> Array:
        """Return the state from the parts that `snapshot` returned, bit for bit."""
        return np.concatenate([np.asarray(extras[name], float) for name in self.fields])

    def from_moments(self, mean: Array, covariance: Array) -> Array:
        """Raise ModelError, because many mixtures have the same mean and covariance."""
        raise ModelError(
            "filter",
            "a mixture is more than its mean and covariance",
            "keep its components, or learn them again",
        )

    def with_parameters(self, state: Array, parameters: Array) -> Array:
        """Return the state with key-specific components (d, K), in the order of `Components.flat`."""
        return self._put(state.copy(), parameters)


def _stack_rows(entries: Vector, keys: int) -> Array:
    return np.array([np.broadcast_to(a, keys) for a in entries], float)
