"""Robust updates, fading memory and adaptive noise for all Gaussian filters except the linear covariance form.

The update is that of `GaussianFilter` with another R (`kalman.filters.robust.updates`). In place of H, the robust
update uses the Jacobian, or with sigma points the regression of the measurement on the state. C is the covariance of
the predicted measurement.

References: as in `kalman.filters.robust.updates` and `kalman.filters.robust.adaptive`; for sigma points Karlgaard and
Schaub (2007); for the regression Arasaratnam, Haykin and Elliott (2007), equations 28-36.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from kalman import flags
from kalman.filters import gaussian_programs as programs
from kalman.filters.gaussian import GaussianFilter, list_conditions, run_program
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
from kalman.filters.robust.updates import Robust
from kalman.filters.state_layout import StepTarget
from kalman.filters.update import mask_present
from kalman.linalg import cholesky
from kalman.linalg.entries import Entry, Vector, plus, times
from kalman.linalg.program import Program, Recorded, Tape
from kalman.models.columns import Cell, resolve
from kalman.models.functions import FunctionProcess
from kalman.types import Array, Rows


@dataclass(frozen=True)
class RobustGaussianFilter(GaussianFilter):
    """A Gaussian filter whose update is robust, whose memory fades, or whose noise is adapted.

    own: includes the adapted parameters; learned: names of the key-specific parameters that `with_parameters` sets

    The state is that of `GaussianFilter`, followed by `gate` (2): the number of gated rows in total, and since the last
    accepted row.
    """

    robust: Robust = Robust()
    adaptive: Adaptive = Adaptive()
    learned: tuple[str, ...] = ()

    @property
    def fading(self) -> Cell:
        """Factor that multiplies the predicted standard deviations before process noise is added."""
        return self.robust.fading

    def fading_guards(self, u: Vector) -> list[Entry]:
        """Return entries that are zero or more for the keys whose row has columns that give a valid fading."""
        return self.robust.fading_guards(u)

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each part of a key's state, in order."""
        return {**super().fields, **({"gate": (2,)} if self.robust.gate else {})}

    @property
    def outputs(self) -> Mapping[str, int]:
        """Extra outputs: with Student-t or Huber noise, each component's weight, NaN if the component is missing."""
        return {"weights": self.measurements} if self.robust.noise else {}

    @cached_property
    def own_places(self) -> dict[str, slice]:
        """The slice of each key-specific parameter in the state."""
        start = self.places["parameters"].start if self.own else 0
        return locate_key_parameters(self.parameters, self.own, start)

    def initial(self, keys: int) -> Array:
        """Return the state (size, keys) of keys that have no row yet."""
        plain = super().initial(keys)
        return np.concatenate([plain, np.zeros((self.size - len(plain), keys))])

    def with_parameters(self, state: Array, parameters: Array) -> Array:
        """Write learned parameters (d, K) into the field `parameters` of the state."""
        state = state.copy()
        places = [range(self.own_places[name].start, self.own_places[name].stop) for name in self.learned]
        state[[row for rows in places for row in rows]] = parameters
        return state

    def _record_clear_update(
        self, missing: bool, prediction: Recorded, prior: Vector, dt: Entry, u: Vector
    ) -> tuple[Recorded, list[tuple[str, Entry]]]:
        """Return prediction and update of a row in order as a `ClearStep` has them, and the update's conditions."""
        program = update_program(self, missing)
        recorded, at = program.recorded.follow(prediction, [*prior, dt, False, *u]), self.size + 2
        total, innovation, sound, gated = recorded.outputs[at : at + 4]
        outputs = [*recorded.outputs[:at], *recorded.outputs[at + 4 :]]
        conditions = [*list_conditions(total, innovation, sound), ("equal", gated)]
        return recorded._replace(outputs=outputs), conditions

    def _step_block(self, state: Array, rows: Rows, target: StepTarget) -> None:
        """Compute one block; the key of a gated row is flagged, and only the counters in its state change."""
        prior, moved, sound = self._predict_prior(state, rows, rows.mask_first_rows())
        seen, place, sound_there = self._seen(prior, rows.u, state)
        presents = mask_present(rows.y)
        masks = [a for a in presents if a is not None]
        checks = np.empty((4, state.shape[1]))
        own = state[self.gaussian_size :]
        inputs = [*place, *own, rows.dt, rows.first, *rows.u, *seen, *rows.y, *masks]
        result = target.extra.get("weights", ())
        outputs = [*target.state, target.log_likelihood, target.nis, *checks, *result]
        run_program(update_program(self, presents[0] is not None), inputs, outputs)
        total, innovation, sound_here, is_gated = checks
        sound = np.minimum(np.minimum(sound, sound_there), sound_here)
        well = np.isfinite(total).all() and (innovation > 0.0).all() and (sound >= 0.0).all()
        if well and not is_gated.any():
            return
        codes = self._flag_rows(rows, moved, seen, sound, innovation, total)
        nis, counters = target.nis.copy(), target.state[self.size - 2 :].copy()
        outside = (is_gated > 0.0) & np.isin(codes, (flags.WELL, flags.OVERFLOW))
        target.leave(state, np.where(outside, flags.GATED, codes).astype(np.uint8))
        if outside.any():
            target.nis[outside] = nis[outside]
            target.state[self.size - 2 :, outside] = counters[:, outside]


def _sum_entries(log_likelihood: Entry, state: Sequence[Any]) -> Any:
    """Return the sum of log-likelihood and state, which is finite if all of them are finite."""
    total: Any = log_likelihood
    for entry in state:
        total = plus(total, entry)
    return total


@lru_cache(maxsize=64)
def update_program(model: RobustGaussianFilter, missing: bool) -> Program:
    """Return the program of a measurement update with robust update and adaptive noise.

    Inputs: those of `kalman.filters.gaussian_programs.update_program`, with dt and the mask of keys at their first row
    after the key-specific parameters. Outputs: the whole state, log-likelihood, NIS, a number that is finite if the
    other outputs are, the smallest innovation variance, `sound`, 1 for a gated row and else 0, the weights.
    """
    tape = Tape()
    n, count, options = len(model.states), model.measurements, model.robust
    place, own = tape.symbols(model.gaussian_size), tape.symbols(model.size - model.gaussian_size)
    dt, first = tape.symbol(), tape.symbol(boolean=True)
    u, y = tape.symbols(model.controls), tape.symbols(count)
    seen = tape.symbols(programs.count_seen_rows(model))
    masks: list[Any] = tape.symbols(count, boolean=True) if missing else []
    presents = masks or [None] * count
    state = [*place, *own]
    values = programs.collect_entries(model, state)
    here = programs.observe_row(model, place, values, u, seen, y, presents)
    v, R, C = here.e, here.R, here.C()
    innovation = updates.whiten(v, [plus(c, r) for c, r in zip(C, R, strict=True)], presents)
    w, weighed, nearer = list[Entry](), R, innovation
    if options.noise is not None:
        w = updates.compute_weights(options.noise, v, C, R, presents)
        weighed = updates.weigh_noise(R, w)
        nearer = updates.whiten(v, [plus(c, r) for c, r in zip(C, weighed, strict=True)], presents)
    result = here.update(weighed)
    log_likelihood, nis = result.log_likelihood, result.nis
    if options.noise is not None:
        log_likelihood, nis = score_innovation(options.noise, innovation, presents)
    after: list[Any] = [*(plus(a, b) for a, b in zip(place[:n], result.change, strict=True)), *result.S, *own]
    if model.adaptive.names:
        view = RowView(v, C, here.H, weighed, w, presents, None, first)

        def noise() -> Vector:
            if not isinstance(model.process, FunctionProcess):
                return model.process.transition(dt, u, values).Q
            (scale,) = resolve([model.process.scale], u)
            return [times(scale, q) for q in resolve(values["Q"], u)]

        moves = adapt_noise(model.adaptive, model, values, view, nearer, noise, dt, u)
        for name, entries in moves.items():
            put(after, model.own_places[name], entries)
    total = _sum_entries(log_likelihood, after)
    outside: Any = 0.0
    if options.gate is not None:
        is_gated, after[model.places["gate"]] = gate_rows(
            options.gate, after[model.places["gate"]], nis, presents, None, u
        )
        outside = np.where(is_gated, 1.0, 0.0)
    guards = [*programs.build_noise_guards(model, values, u), *options.guards(u)]
    sound = cholesky.find_least([result.sound, *guards])
    checks = [total, result.innovation, sound, outside]
    outputs = [*after, log_likelihood, nis, *checks, *mask_weights(w, presents)]
    return Program(tape, [*place, *own, dt, first, *u, *seen, *y, *masks], outputs)


def build_robust_gaussian(model: GaussianFilter, definition: Mapping[str, Any]) -> RobustGaussianFilter:
    """Return the Gaussian filter of a definition that has sections `robust` or `adaptive`. Raises ModelError."""
    options, moving = parse_options(definition, model, model.measurements, model.controls)
    own = tuple(p.name for p in model.parameters if p.name in moving.names or p.name in model.own)
    plain = {field.name: getattr(model, field.name) for field in fields(model)}
    return RobustGaussianFilter(**{**plain, "own": own}, robust=options, adaptive=moving, learned=model.own)
