"""Gaussian filters: extended, unscented and cubature, and the square-root and information forms.

One step consists of two programs, prediction and update. The model's function f is called before the prediction, and
h before the update. `kalman.filters.gaussian_programs` builds the programs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kalman import flags
from kalman.filters import gaussian_programs as programs
from kalman.filters.clear_step import ClearStep
from kalman.filters.prediction import Prediction
from kalman.filters.sigma_points import PointRule
from kalman.filters.state_layout import StateLayout, StepTarget, step_in_blocks
from kalman.filters.update import mask_present
from kalman.linalg import cholesky
from kalman.linalg.entries import Entry, Vector
from kalman.linalg.packing import pack, packed_index, packed_size, unpack, unpack_symmetric
from kalman.linalg.program import Program, Recorded
from kalman.models import angles
from kalman.models.columns import Cell, Cells, find_columns, require_numbers, resolve
from kalman.models.functions import FunctionObservation, FunctionProcess
from kalman.models.starts import Start
from kalman.models.structure import Parameter, Structure
from kalman.types import Array, Rows, Step

FORMS = ("covariance", "square_root", "information")
BLOCK = 1024
"""Number of keys in a block. Sigma points take many rows; those of 1024 keys fit into the processor's cache."""


@dataclass(frozen=True)
class GaussianFilter(StateLayout):
    """A filter that propagates a mean and a covariance (or its factor) by first derivatives or sigma points.

    rule        points of the unscented or cubature filter; None means first derivatives (linear and extended filter)
    process_rule, observation_rule  joint points of state and noise, if f or h takes the noise; else None
    form        form of the state and of the update: covariance, square_root or information
    parameters  all parameters (of the process, and R) with their values
    own         names of the key-specific parameters, whose values are in the state
    mean, covariance (packed): mean and covariance of the state at a key's first row
    offset, noise_scale: offset added to H x, and factor of R
    periods     period of each measured component, 0 for a component that is not an angle; () without angles
    own_start   initial distribution from columns of a key's first row; mean and covariance are then placeholders

    Entries of offset, noise_scale, H, R and the process may come from columns of the row.
    """

    states: tuple[str, ...]
    measurements: int
    controls: int
    process: Structure | FunctionProcess
    observation: Cells | FunctionObservation
    rule: PointRule | None
    form: str
    parameters: tuple[Parameter, ...]
    mean: tuple[float, ...]
    covariance: tuple[float, ...]
    own: tuple[str, ...] = ()
    offset: tuple[Cell, ...] = ()
    noise_scale: Cell = 1.0
    periods: tuple[float, ...] = ()
    process_rule: PointRule | None = None
    own_start: Start | None = None
    observation_rule: PointRule | None = None

    @property
    def fading(self) -> Cell:
        """Factor that multiplies the predicted standard deviations before process noise is added."""
        return 1.0

    def fading_guards(self, u: Vector) -> list[Entry]:
        """Return entries that are zero or more for the keys whose row has columns that give a valid fading."""
        return []

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each part of a key's state, in order."""
        n = len(self.states)
        second = "factor" if self.rooted else "covariance"
        fields: dict[str, tuple[int, ...]] = {"mean": (n,), second: (packed_size(n),)}
        if self.own:
            fields["parameters"] = (len(self.pooled),)
        return fields

    @property
    def rooted(self) -> bool:
        """Whether the state holds a factor instead of the covariance."""
        return self.form == "square_root"

    @cached_property
    def pooled(self) -> tuple[float, ...]:
        """The values of the key-specific parameters that a new key starts with, in the order of the state's field."""
        return tuple(
            value for p in self.parameters if p.name in self.own for value in require_numbers(p.value)
        )

    @cached_property
    def constants(self) -> dict[str, Sequence[Cell]]:
        """The values of all parameters; keys share them except where a parameter is key-specific."""
        return {p.name: p.value for p in self.parameters}

    @cached_property
    def noisy(self) -> bool:
        """Whether R is known to be positive definite."""
        if "R" in self.own or find_columns([self.noise_scale, self.constants["R"]]):
            return False
        if isinstance(self.observation, FunctionObservation) and self.observation.noise_inside:
            return False
        R = np.array(unpack_symmetric(require_numbers(self.constants["R"])))
        eigenvalues = np.linalg.eigvalsh(R)
        return self.noise_scale != 0.0 and bool(eigenvalues.min() > 1e-12 * eigenvalues.max())

    @cached_property
    def seen_controls(self) -> list[int]:
        """Indices of the controls that a row's measurement depends on, also in a key's first row."""
        H = self.observation
        if isinstance(H, FunctionObservation):
            if H.controlled:
                return list(range(self.controls))
            H = ()
        return sorted(find_columns([H, self.constants["R"], self.offset, self.noise_scale]))

    @property
    def gaussian_size(self) -> int:
        """Number of entries of the mean and the covariance (or its factor) in the state."""
        n = len(self.states)
        return n + packed_size(n)

    def initial(self, keys: int) -> Array:
        """Return the state (size, keys) of keys that have no row yet."""
        second = cholesky.cholesky(self.covariance).L if self.rooted else self.covariance
        return np.repeat(np.array([*self.mean, *second, *self.pooled])[:, None], keys, axis=1)

    def moments(self, state: Array) -> tuple[Array, Array]:
        """Return mean (n, K) and packed lower covariance (n(n+1)/2, K)."""
        if not self.rooted:
            return super().moments(state)
        return state[self.places["mean"]], np.array(cholesky.gram(list(state[self.places["factor"]])))

    def snapshot(self, state: Array) -> tuple[Array, Array, dict[str, Array]]:
        """Return mean (n, K), full row-major covariance (n*n, K), and all other fields, including the factor."""
        mean, covariance = self.moments(state)
        others = [name for name in self.fields if name not in ("mean", "covariance")]
        return mean, unpack(covariance), {name: state[self.places[name]] for name in others}

    def restore(self, mean: Array, covariance: Array, extras: Mapping[str, Array]) -> Array:
        """Return the state from the parts that `snapshot` returned, bit for bit."""
        if not self.rooted:
            return super().restore(mean, covariance, extras)
        others = [np.asarray(extras[name], float) for name in list(self.fields)[1:]]
        return np.concatenate([np.asarray(mean, float), *others])

    def from_moments(self, mean: Array, covariance: Array) -> Array:
        """Return the states of keys with this mean (n, K) and full row-major covariance (n*n, K)."""
        if not self.rooted:
            return super().from_moments(mean, covariance)
        state = self.initial(np.shape(mean)[1])
        state[self.places["mean"]] = mean
        with np.errstate(all="ignore"):
            factor = cholesky.cholesky(list(pack(np.asarray(covariance, float)))).L
        for place, entry in zip(range(*self.places["factor"].indices(self.size)), factor, strict=True):
            state[place] = entry
        return state

    def step(self, state: Array, rows: Rows) -> tuple[Array, Step]:
        """Return the state (size, K) after one row for each key, and the rows' `Step`."""
        return step_in_blocks(state, rows, self.outputs, self._step_block, BLOCK)

    def prediction(self, state: Array, rows: Rows) -> Prediction:
        """Return the predicted mean and the retrodiction to the states (size, K) before the rows."""
        keys, n = state.shape[1], len(self.states)
        with np.errstate(all="ignore"):
            moved, _ = self._moved(state, rows)
            out = np.empty((n + n * n + packed_size(n), keys))
            run_program(programs.build_back_program(self), [*state, rows.dt, *rows.u, *moved], list(out))
        return Prediction(out[:n], out[n : n + n * n].reshape(n, n, keys), out[n + n * n :])

    def record_clear_prediction(self) -> Recorded | None:
        """Return `prediction` of a row in order, None with a function for the process.

        Inputs: state, dt, u. Outputs: mean, gain by rows, packed rest.
        """
        return (
            None if isinstance(self.process, FunctionProcess) else programs.build_back_program(self).recorded
        )

    def measured(self, state: Array, u: Array) -> tuple[Array, Array]:
        """Return the mean (m, K) and packed covariance of a measurement of these states (size, K).

        u: (c, K) controls of the measurement's row, for entries that come from columns.
        """
        m, keys = self.measurements, state.shape[1]
        with np.errstate(all="ignore"):
            seen, place, _ = self._seen(state[: self.gaussian_size], u, state)
            out = np.empty((m + packed_size(m), keys))
            run_program(
                programs.build_measured_program(self),
                [*place, *state[self.gaussian_size :], *u, *seen],
                [*out],
            )
        return out[:m], out[m:]

    def _step_block(self, state: Array, rows: Rows, target: StepTarget) -> None:
        first = rows.mask_first_rows()
        prior, moved, sound = self._predict_prior(state, rows, first)
        seen, place, sound_there = self._seen(prior, rows.u, state)
        presents = mask_present(rows.y)
        masks = [a for a in presents if a is not None]
        checks = np.empty((3, state.shape[1]))
        own = state[self.gaussian_size :]
        target.state[self.gaussian_size :] = own
        run_program(
            programs.update_program(self, presents[0] is not None),
            [*place, *own, *rows.u, *seen, *rows.y, *masks],
            [*target.state[: self.gaussian_size], target.log_likelihood, target.nis, *checks],
        )
        total, innovation, sound_here = checks
        sound = np.minimum(np.minimum(sound, sound_there), sound_here)
        if np.isfinite(total).all() and (innovation > 0.0).all() and (sound >= 0.0).all():
            return
        target.leave(state, self._flag_rows(rows, moved, seen, sound, innovation, total))

    def build_clear_step(self, missing: bool) -> ClearStep | None:
        """Return the step of rows in order, None with functions; missing: whether components may be missing."""
        if isinstance(self.process, FunctionProcess) or isinstance(self.observation, FunctionObservation):
            return None
        prediction = programs.predict_program(self, False).recorded
        *prior, sound = prediction.outputs
        own, (dt, *u) = prediction.inputs[self.gaussian_size : self.size], prediction.inputs[self.size :]
        recorded, conditions = self._record_clear_update(missing, prediction, [*prior, *own], dt, u)
        return ClearStep(recorded, [*conditions, ("greater_equal", sound)])

    def _record_clear_update(
        self, missing: bool, prediction: Recorded, prior: Vector, dt: Entry, u: Vector
    ) -> tuple[Recorded, list[tuple[str, Entry]]]:
        """Return prediction and update of a row in order as a `ClearStep` has them, and the update's conditions."""
        recorded = programs.update_program(self, missing).recorded.follow(prediction, [*prior, *u])
        *outputs, total, innovation, sound = recorded.outputs
        end = self.gaussian_size
        outputs = [*outputs[:end], *prior[end:], *outputs[end:]]
        return recorded._replace(outputs=outputs), list_conditions(total, innovation, sound)

    def _flag_rows(
        self,
        rows: Rows,
        moved: list[Array],
        seen: list[Array],
        sound: Array,
        innovation: Array,
        total: Array,
    ) -> np.ndarray:
        """Return a flag for each key."""
        wrong = np.isinf(rows.y).any(axis=0) | ~np.isfinite(rows.dt) | ~_is_finite(seen)
        wrong |= ~rows.first & ~_is_finite(moved)
        if self.controls:
            wrong |= ~np.isfinite(rows.u).all(axis=0) & ~rows.first
            wrong |= ~np.isfinite(rows.u[self.seen_controls]).all(axis=0)
        reasons = [wrong, innovation <= 0.0, sound < 0.0, ~np.isfinite(total)]
        codes = [flags.NON_FINITE, flags.SINGULAR_INNOVATION, flags.NOT_PSD, flags.OVERFLOW]
        return np.select(reasons, codes, flags.WELL).astype(np.uint8)

    def _predict_prior(
        self, state: Array, rows: Rows, first: np.ndarray | bool
    ) -> tuple[Array, list[Array], Array | float]:
        """Return the predicted state (n + p, K), the values of the process's functions, and `sound`."""
        if first is True:
            return state[: self.gaussian_size], [], np.inf
        moved, sound = self._moved(state, rows)
        masks = [first] if isinstance(first, np.ndarray) else []
        prior = np.empty((self.gaussian_size, state.shape[1]))
        sound_after = np.empty(state.shape[1])
        program = programs.predict_program(self, bool(masks))
        run_program(program, [*state, rows.dt, *rows.u, *moved, *masks], [*prior, sound_after])
        sound = np.minimum(sound, sound_after)
        return prior, moved, np.where(rows.first, np.inf, sound) if masks else sound

    def _moved(self, state: Array, rows: Rows) -> tuple[list[Array], Array | float]:
        """Return the values of the process's functions as a list of rows (K,), and `sound`."""
        process = self.process
        if not isinstance(process, FunctionProcess):
            return [], np.inf
        keys = state.shape[1]
        sound: Array | float = np.inf
        if self.rule is None:
            x = np.ascontiguousarray(state[: len(self.states)])
            value = process.value(x, rows.dt, rows.u)
            slope = process.slope(x, rows.dt, rows.u, self._compute_state_deviations(state))
            moved = [*value, *slope.reshape(-1, keys)]
            if process.noise_inside:
                spread = _compute_deviations(
                    process.resolve_row_noise(rows.dt, rows.u, self._entries("Q", state)), process.noise_size
                )
                moved += [*process.compute_noise_slope(x, rows.dt, rows.u, spread).reshape(-1, keys)]
        elif process.noise_inside:
            assert self.process_rule is not None
            many = self.process_rule.points
            noise = process.resolve_row_noise(rows.dt, rows.u, self._entries("Q", state))
            x, w, _, sound = self._draw_joint_points(self.process_rule, state, noise)
            moved = [*process.value(x, np.tile(rows.dt, many), np.tile(rows.u, many), w).reshape(-1, keys)]
        else:
            x, _, sound = self._draw_points(state)
            times, controls = np.tile(rows.dt, self.rule.points), np.tile(rows.u, self.rule.points)
            moved = [*process.value(x, times, controls).reshape(-1, keys)]
        noise = process.noise(rows.dt, rows.u)
        return moved + ([] if noise is None else [*noise]), sound

    def _seen(self, prior: Array, u: Array, state: Array) -> tuple[list[Array], list[Array], Array | float]:
        """Return the values of the observation's functions as rows (K,), the predicted state, and `sound`.

        With sigma points, the predicted state has the factor in place of the covariance.
        state: (size, K) whole state, including key-specific parameters.
        """
        observation, n, keys = self.observation, len(self.states), prior.shape[1]
        if not isinstance(observation, FunctionObservation):
            return [], [*prior], np.inf
        if self.rule is None:
            x = np.ascontiguousarray(prior[:n])
            slope = observation.slope(x, u, self._compute_state_deviations(prior))
            seen = [*observation.value(x, u), *slope.reshape(-1, keys)]
            if observation.noise_inside:
                spread = _compute_deviations(self._resolve_row_noise(u, state), observation.noise_size)
                seen += [*observation.compute_noise_slope(x, u, spread).reshape(-1, keys)]
            return seen, [*prior], np.inf
        v, rule = None, self.observation_rule or self.rule
        if self.observation_rule is not None:
            x, v, L, sound = self._draw_joint_points(
                self.observation_rule, prior, self._resolve_row_noise(u, state)
            )
        else:
            x, L, sound = self._draw_points(prior)
        many = rule.points
        inputs = np.tile(u, many) if observation.controlled else u
        found = observation.value(x, inputs, v).reshape(self.measurements, many, keys)
        if self.periods:  # move angles near the angle at the centre, so that their mean is valid
            centre = np.ascontiguousarray(prior[:n])
            middle = found[:, 0] if self.rule.centre else observation.value(centre, u)
            found = np.array(angles.turn_angles(self.periods, list(found), list(middle)))
        return [*found.reshape(-1, keys)], [*prior[:n], *L], sound

    def _draw_points(self, state: Array) -> tuple[Array, Array, Array]:
        """Return points (n, P K), the covariance's factor (p, K), and `sound`."""
        assert self.rule is not None
        n, keys, many = len(self.states), state.shape[1], self.rule.points
        drawn = np.empty((n * many, keys))
        L, sound = np.empty((packed_size(n), keys)), np.empty((1, keys))
        run_program(
            programs.build_points_program(self), list(state[: self.gaussian_size]), [*drawn, *L, *sound]
        )
        return drawn.reshape(n, many * keys), L, sound[0]

    def _draw_joint_points(
        self, rule: PointRule, state: Array, Q: Array
    ) -> tuple[Array, Array, Array, Array]:
        """Return points of the state (n, P K) and of the noise of f or h (r, P K), the factor (p, K), and `sound`.

        Q: (packed, K) covariance of the noise.
        """
        n, keys, many = len(self.states), state.shape[1], rule.points
        drawn, sound = np.empty((rule.n * many, keys)), np.empty((1, keys))
        L = np.empty((packed_size(n), keys))
        program = programs.build_joint_points_program(self, rule)
        run_program(program, [*state[: self.gaussian_size], *Q], [*drawn, *L, *sound])
        drawn = drawn.reshape(rule.n, many * keys)
        return drawn[:n], drawn[n:], L, sound[0]

    def _entries(self, name: str, state: Array) -> Sequence[Any]:
        """Return the packed entries of a parameter: shared cells or arrays (K,); () if there is no such parameter."""
        return programs.collect_entries(self, list(state)).get(name, ())

    def _resolve_row_noise(self, u: Array, state: Array) -> Array:
        """Return the packed R of each key, times the noise scale."""
        (scale,) = resolve([self.noise_scale], list(u))
        R = [np.broadcast_to(a, u.shape[1]) for a in resolve(self._entries("R", state), list(u))]
        return np.asarray(scale * np.array(R))

    def _compute_state_deviations(self, state: Array) -> Array:
        """Return each state's standard deviation (n, K)."""
        n = len(self.states)
        second = state[n : self.gaussian_size]
        if self.rooted:
            packed = cholesky.gram(list(second))
            return np.sqrt(np.array([packed[packed_index(i, i)] for i in range(n)]))
        return _compute_deviations(second, n)


def run_program(program: Program, inputs: list[Array], outputs: list[Array]) -> None:
    """Run a program on inputs (K,) and write the results into outputs (K,)."""
    program(inputs, np.empty((program.buffers, len(outputs[0]))), outputs)


def list_conditions(total: Entry, innovation: Entry, sound: Entry) -> list[tuple[str, Entry]]:
    """Return the conditions of a `ClearStep` on the checks of an update."""
    return [("isfinite", total), ("greater", innovation), ("greater_equal", sound)]


def _compute_deviations(packed: Array, n: int) -> Array:
    """Return the standard deviations (n, K) of packed covariances."""
    return np.sqrt(np.maximum(packed[[packed_index(i, i) for i in range(n)]], 0.0))


def _is_finite(rows: list[Array]) -> Any:
    return np.logical_and.reduce([np.isfinite(row) for row in rows]) if rows else np.True_
