"""The linear filter with robust updates, fading memory and adaptive noise, over many keys.

The class is separate from `LinearFilter`, so that the step of `LinearFilter` stays short; both use the same recursions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from kalman import flags
from kalman.filters.clear_step import ClearStep
from kalman.filters.diffuse import BELOW, fold_finite_columns, project_columns
from kalman.filters.linear import LinearFilter, Parts, build_linear
from kalman.filters.prediction import Prediction
from kalman.filters.recursions import choose, congruence
from kalman.filters.retrodiction import retrodict
from kalman.filters.robust import updates
from kalman.filters.robust.adaptive import Adaptive
from kalman.filters.robust.step import (
    RowView,
    adapt_noise,
    gate_rows,
    locate_key_parameters,
    mask_weights,
    parse_options,
    put,
    score_innovation,
)
from kalman.filters.robust.updates import Innovation, Robust
from kalman.filters.state_layout import StateLayout, StepTarget, step_in_blocks
from kalman.filters.update import Scalar, mask_present, update
from kalman.linalg import cholesky
from kalman.linalg.entries import Entry, Matrix, Vector, is_zero, minus, plus, squared, times
from kalman.linalg.packing import packed_index
from kalman.linalg.program import Program, Recorded, Symbol, Tape
from kalman.models import definition as definitions
from kalman.models.columns import resolve
from kalman.models.structure import Values
from kalman.types import Array, ModelError, Rows, Step


class StepEntries(NamedTuple):
    """The results of one step, in entries; gated is None if the filter has no gate."""

    after: list[Entry]
    log_likelihood: Entry
    nis: Entry
    gated: Any
    weights: list[Entry]
    prior: Parts
    scalars: Sequence[Scalar]
    guard: Entry | None


@dataclass(frozen=True)
class RobustLinearFilter(StateLayout):
    """A linear model whose update is robust, whose memory fades, or whose noise is adapted.

    base: the linear filter; its key-specific parameters include the adapted parameters
    learned: names of the key-specific parameters that `with_parameters` sets

    The state is the state of `base`, followed by `gate` (2): the number of gated rows in total, and since the last
    accepted row.
    """

    base: LinearFilter
    robust: Robust
    adaptive: Adaptive = Adaptive()
    learned: tuple[str, ...] = ()

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the states."""
        return self.base.states

    @property
    def measurements(self) -> int:
        """Number of measured components."""
        return self.base.measurements

    @property
    def controls(self) -> int:
        """Number of control inputs."""
        return self.base.controls

    @property
    def own_start(self) -> Any:
        """The linear filter's start from columns, or None."""
        return self.base.own_start

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each part of a key's state, in order."""
        return {**self.base.fields, **({"gate": (2,)} if self.robust.gate else {})}

    @property
    def outputs(self) -> Mapping[str, int]:
        """Extra outputs: with Student-t or Huber noise, each component's weight, NaN if the component is missing."""
        return {"weights": self.measurements} if self.robust.noise else {}

    def initial(self, keys: int) -> Array:
        """Return the state (size, keys) of keys that have no row yet."""
        counters = np.zeros((self.size - self.base.size, keys))
        return np.concatenate([self.base.initial(keys), counters])

    def with_parameters(self, state: Array, parameters: Array) -> Array:
        """Write learned parameters (d, K) into the field `parameters` of the state."""
        state = state.copy()
        rows = [row for name in self.learned for row in self._rows(name)]
        state[rows] = parameters
        return state

    def moments(self, state: Array) -> tuple[Array, Array]:
        """Return mean (n, K) and packed lower covariance, infinite for diffuse states."""
        return self.base.moments(state)

    def measured(self, state: Array, u: Array) -> tuple[Array, Array]:
        """Return mean (m, K) and packed covariance of a measurement of these states (size, K), as in `LinearFilter`."""
        return self.base.measured(state[: self.base.size], u)

    @cached_property
    def _own(self) -> dict[str, slice]:
        """The slice of each key-specific parameter in the state."""
        start = self.places["parameters"].start if self.base.own else 0
        return locate_key_parameters(self.base.parameters, self.base.own, start)

    def _rows(self, name: str) -> range:
        return range(self._own[name].start, self._own[name].stop)

    def step(self, state: Array, rows: Rows) -> tuple[Array, Step]:
        """Return the state (size, K) after one row for each key, and the rows' `Step`.

        The key of a gated row is flagged; only the counters in the key's state change. The `Step` has the gated row's
        NIS, and NaN as its log-likelihood.
        """
        return step_in_blocks(state, rows, self.outputs, self._step_block)

    def _step_block(self, state: Array, rows: Rows, target: StepTarget) -> None:
        keys = state.shape[1]
        presents, first = mask_present(rows.y), rows.mask_first_rows()
        diffuse = self.base.is_diffuse(state)
        case = first if isinstance(first, bool) else None
        program = build_step_program(self, presents[0] is not None, case, diffuse)
        masks = [a for a in (first, *presents) if isinstance(a, np.ndarray)]
        checks = np.empty((3, keys))
        weights = target.extra.get("weights", ())
        outputs = [*target.state, target.log_likelihood, target.nis, *checks, *weights]
        program([*state, rows.dt, *rows.u, *rows.y, *masks], np.empty((program.buffers, keys)), outputs)
        total, lowest, gated = checks
        if np.isfinite(total).all() and not (lowest < 0.0).any() and not gated.any():
            return
        step = self.step_entries(list(state), rows.dt, list(rows.u), list(rows.y), first, presents, diffuse)
        summed = self.base.bound_variance_terms(state[: self.base.size], rows)
        codes = self.base.judged(target.state, total, summed, step.scalars, rows, step.guard)
        nis = target.nis.copy()
        outside = (gated > 0.0) & np.isin(codes, (flags.WELL, flags.OVERFLOW))
        counters = target.state[self.base.size :].copy()
        target.leave(state, np.where(outside, flags.GATED, codes).astype(np.uint8))
        target.nis[outside] = nis[outside]
        target.state[self.base.size :, outside] = counters[:, outside]

    def build_clear_step(self, missing: bool) -> ClearStep:
        """Return the step of rows in order; missing: whether components may be missing."""
        recorded, at = build_step_program(self, missing, False, False).recorded, self.size + 2
        total, lowest, gated = recorded.outputs[at : at + 3]
        outputs = [*recorded.outputs[:at], *recorded.outputs[at + 3 :]]
        conditions = [("isfinite", total), ("greater_equal", lowest), ("equal", gated)]
        place = self.base.places.get("diffuse", slice(0, 0))
        return ClearStep(recorded._replace(outputs=outputs), conditions, place)

    def step_entries(
        self,
        state: Sequence[Entry],
        dt: Array,
        u: Vector,
        y: Vector,
        first: Any,
        presents: Sequence[Any],
        diffuse: bool,
    ) -> StepEntries:
        """Return the results of one step.

        A key that is diffuse before the row takes the step of `LinearFilter`, because without a proper prediction no
        row can be an outlier.
        """
        base, options = self.base, self.robust
        parts = base.split(state[: base.size], diffuse)
        prior = self._predict_parts(parts, dt, u, first)
        m, P, A, values = prior
        H, R, offset = base.observed(u, values)
        undetermined = self._find_undetermined(state) if diffuse else None
        y = [minus(a, b) for a, b in zip(y, offset, strict=True)]
        mean, C = _predict_measurement(m, P, A, H)
        v = [a - b for a, b in zip(y, mean, strict=True)]
        innovation = weighed_innovation = updates.whiten(v, _add_noise(C, R), presents)
        w: list[Entry] = []
        weighed_R = R
        if options.noise is not None:
            w = updates.compute_weights(options.noise, v, C, R, presents)
            if undetermined is not None:
                w = choose(undetermined, [1.0] * len(w), w)
            weighed_R = updates.weigh_noise(R, w)
            weighed_innovation = updates.whiten(v, _add_noise(C, weighed_R), presents)
        updated = update(m, P, A, H, weighed_R, y, presents, base.apart)
        scores: list[Entry] = [updated.log_likelihood, updated.nis]
        if options.noise is not None:
            scored = score_innovation(options.noise, innovation, presents)
            scores = scored if undetermined is None else choose(undetermined, scores, scored)
        log_likelihood, nis = scores
        after = [*updated.m, *updated.P, *state[base.places["covariance"].stop :]]
        if updated.A is not None:
            after[base.places["diffuse"]] = [entry for row in updated.A for entry in row]
        if self.adaptive.names:
            view = RowView(v, C, lambda: H, weighed_R, w, presents, undetermined, first)
            self._adapt(after, view, values, weighed_innovation, dt, u)
        is_gated = None
        if options.gate is not None:
            counters = state[self.places["gate"]]
            is_gated, counters = gate_rows(options.gate, counters, nis, presents, undetermined, u)
            after = [*choose(is_gated, state[: base.size], after[: base.size]), *counters]
        return StepEntries(
            after,
            log_likelihood,
            nis,
            is_gated,
            mask_weights(w, presents),
            prior,
            updated.scalars,
            self._combine_guards(u, values, first),
        )

    def _combine_guards(self, u: Vector, values: Values, first: Any) -> Entry | None:
        """Return the guard of the linear filter, combined with the guards on the columns of gate and fading."""
        fading = [] if first is True else self.robust.fading_guards(u)
        if first is not True and first is not False:
            fading = [np.where(first, 0.0, a) for a in fading]
        own = [*fading, *self.robust.guards(u)]
        guard = self.base.guard(u, values, first)
        return cholesky.find_least([*([] if guard is None else [guard]), *own]) if own else guard

    def _adapt(
        self, after: list[Entry], view: RowView, values: Values, innovation: Innovation, dt: Array, u: Vector
    ) -> None:
        """Write the adapted noise into the state after a row; innovation: computed with the weighted R."""

        def Q() -> Vector:
            return self.base.process.transition(dt, u, values).Q

        for name, entries in adapt_noise(
            self.adaptive, self.base, values, view, innovation, Q, dt, u
        ).items():
            put(after, self._own[name], entries)

    def _find_undetermined(self, state: Sequence[Entry]) -> Any:
        """Return a mask (K,) of the keys that are still diffuse."""
        nonzero = [np.greater_equal(np.abs(a), BELOW) for a in state[self.base.places["diffuse"]]]
        found = nonzero[0]
        for a in nonzero[1:]:
            found = found | a
        return found

    def prediction(self, state: Array, rows: Rows) -> Prediction:
        """Return the prediction from the states (size, K) before the rows, for the smoother.

        Raises ModelError where the start is diffuse.
        """
        if self.base.diffuse:
            raise ModelError(
                "initial.diffuse",
                "a robust or adaptive filter with a diffuse start cannot be smoothed",
                "give a mean and a covariance",
            )
        mean, G, rest = self._predict_back(list(state), rows.dt, list(rows.u))
        shape = rows.dt.shape

        def array(entries: Vector) -> Array:
            return np.array([np.broadcast_to(a, shape) for a in entries])

        return Prediction(array(mean), np.array([array(row) for row in G]), array(rest))

    def record_clear_prediction(self) -> Recorded | None:
        """Return `prediction` of a row in order; inputs: state, dt, u; outputs: mean, gain by rows, packed rest."""
        if self.base.diffuse:
            return None
        tape = Tape()
        state, dt, u = tape.symbols(self.size), tape.symbol(), tape.symbols(self.controls)
        mean, G, rest = self._predict_back(state, dt, u)
        return Recorded(tape.operations, [*state, dt, *u], [*mean, *(a for row in G for a in row), *rest])

    def _predict_back(self, state: Vector, dt: Array, u: Vector) -> tuple[Vector, Matrix, Vector]:
        """Return the predicted mean, and gain and rest of the retrodiction, in entries."""
        parts = self.base.split(state[: self.base.size], False)
        prior = self._predict_parts(parts, dt, u, False)
        F, Q, _ = self.base.process.transition(dt, u, parts.values)
        (fading,) = resolve([self.robust.fading], u)
        more = minus(squared(fading), 1.0)
        if not is_zero(more):  # covariance added by fading counts as noise
            Q = [plus(times(more, a), q) for a, q in zip(congruence(F, parts.P), Q, strict=True)]
        back = retrodict(parts.P, F, Q, prior.P)
        return prior.m, back.G, back.rest

    def _predict_parts(self, parts: Parts, dt: Array, u: Vector, first: Any) -> Parts:
        """Return the parts just before the measurement, P = alpha^2 F P F' + Q (Simon 2006, section 7.4)."""
        if self.robust.fading == 1.0 or first is True:
            return self.base.predicted(parts, dt, u, first)
        (fading,) = resolve([self.robust.fading], u)
        alpha = squared(fading)
        wider = parts._replace(P=[times(alpha, a) for a in parts.P])
        prior = self.base.predicted(wider, dt, u, first)
        return prior if first is False else prior._replace(P=choose(first, parts.P, prior.P))


def _predict_measurement(m: Vector, P: Vector, A: Matrix | None, H: Matrix) -> tuple[Vector, Vector]:
    """Return mean and covariance of H x; the covariance includes the finite columns of the diffuse part."""
    mean, C = updates.predict_measurement(m, P, H)
    return mean, C if A is None else fold_finite_columns(C, project_columns(H, A)[1])


def _add_noise(C: Vector, R: Vector) -> list[Entry]:
    return [c + r for c, r in zip(C, R, strict=True)]


@lru_cache(maxsize=64)
def build_step_program(
    model: RobustLinearFilter, missing: bool, first: bool | None, diffuse: bool
) -> Program:
    """Return the program of one step; the cases are those of `kalman.filters.linear.build_step_program`.

    Outputs: the state's rows, log-likelihood, NIS, a number that is finite if the other outputs are, the lowest
    variance, 1 for a gated row and else 0, the weights.
    """
    tape = Tape()
    base = model.base
    state, u, y = (tape.symbols(count) for count in (model.size, model.controls, model.measurements))
    dt = tape.symbol()
    is_first: Any = tape.symbol(boolean=True) if first is None else first
    presents: list[Any] = tape.symbols(len(y), boolean=True) if missing else [None] * len(y)
    step = model.step_entries(state, dt, u, y, is_first, presents, diffuse)
    total = step.log_likelihood
    if step.gated is not None:
        total = np.where(step.gated, 0.0, total)
    for entry in step.after[: base.size]:
        total = total + entry
    covariance = step.after[base.places["covariance"]]
    lowest = covariance[0]
    for i in range(1, len(model.states)):
        lowest = np.minimum(lowest, covariance[packed_index(i, i)])
    if step.guard is not None:
        lowest = np.where(np.greater_equal(step.guard, 0.0) & np.isfinite(step.guard), lowest, -1.0)
    gated = 0.0 if step.gated is None else np.where(step.gated, 1.0, 0.0)
    masks = [a for a in (is_first, *presents) if isinstance(a, Symbol)]
    outputs = [*step.after, step.log_likelihood, step.nis, total, lowest, gated, *step.weights]
    return Program(tape, [*state, dt, *u, *y, *masks], outputs)


def build_robust_linear(definition: definitions.Definition, learned: Mapping[str, Any]) -> RobustLinearFilter:
    """Return the linear filter of a definition that has sections `robust` or `adaptive`. Raises ModelError."""
    base = build_linear(definition, learned)
    options, moving = parse_options(definition, base, base.measurements, base.controls)
    own = tuple(p.name for p in base.parameters if p.name in moving.names or p.name in base.own)
    return RobustLinearFilter(replace(base, own=own), options, moving, base.own)
