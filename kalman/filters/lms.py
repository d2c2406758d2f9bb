"""Least mean squares: each row moves the coefficients a step down the gradient of its squared error.

References: Haykin (2014), chapter 6 (LMS: w + mu u e) and chapter 7 (normalised LMS: w + mu u e / (epsilon + |u|^2)).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kalman.filters.program_filter import ProgramFilter, ProgramStep
from kalman.filters.regression import parse_regression, parse_section
from kalman.filters.update import LOG_2PI, Present
from kalman.linalg.entries import Entry, Vector, dot, minus, over, plus, times
from kalman.linalg.packing import packed_size
from kalman.models import checks
from kalman.models.columns import Cell, Cells, find_columns, parse_covariance_cells, resolve
from kalman.models.definition import Definition, parse_names
from kalman.types import Array, ModelError, Rows


@dataclass(frozen=True)
class LeastMeanSquares(ProgramFilter):
    """LMS for one measurement, or normalised LMS if `epsilon` is given.

    The entries of the covariance are NaN. If the noise variance R is given, log-likelihood and NIS are those of the
    row's error under N(0, R).
    """

    states: tuple[str, ...]
    measurements: int
    controls: int
    H: Cells
    offset: tuple[Cell, ...]
    rate: float
    epsilon: float | None
    R: Cell | None
    mean: tuple[float, ...]

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """The only field, which holds the coefficients."""
        return {"mean": (len(self.states),)}

    def initial(self, keys: int) -> Array:
        """Return the state (size, keys) of keys that have no row yet."""
        return np.repeat(np.array(self.mean)[:, None], keys, axis=1)

    def step_entries(self, state: Vector, u: Vector, y: Vector, presents: Sequence[Present]) -> ProgramStep:
        """Return the result of one row, a step along h in proportion to the prediction error."""
        h, (has,) = resolve(self.H[0], u), presents
        error = minus(minus(y[0], resolve(self.offset, u)[0]), dot(h, state))
        if has is not None:
            error = np.where(has, error, 0.0)
        step = times(self.rate, error)
        if self.epsilon is not None:
            step = over(step, plus(self.epsilon, dot(h, h)))
        after = [plus(a, times(b, step)) for a, b in zip(state, h, strict=True)]
        if self.R is None:
            return ProgramStep(after, 0.0, np.nan, {})
        (R,) = resolve([self.R], u)
        nis = over(times(error, error), R)
        score: Entry = -0.5 * (np.log(R) + nis + LOG_2PI)
        if has is not None:
            score, nis = np.where(has, score, 0.0), np.where(has, nis, np.nan)
        return ProgramStep(after, score, nis, {})

    def residual(self, state: Array, rows: Rows) -> tuple[Array, Array]:
        """Return the rows' prediction errors (1, K) and the noise variance R, NaN if R is not given."""
        u = list(rows.u)
        error = rows.y[0] - resolve(self.offset, u)[0] - dot(resolve(self.H[0], u), list(state))
        (R,) = (np.nan,) if self.R is None else resolve([self.R], u)
        return error[None], np.array(np.broadcast_to(np.asarray(R, float), error.shape))[None]

    def moments(self, state: Array) -> tuple[Array, Array]:
        """Return the coefficients (n, K), and NaN for their packed covariance."""
        return state, np.full((packed_size(len(self.states)), state.shape[1]), np.nan)

    def measured(self, state: Array, u: Array) -> tuple[Array, Array]:
        """Return the mean (1, K) of h w + offset and the variance R of its error, NaN if R is not given.

        The uncertainty of the coefficients is unknown, so the variance is that of the measurement noise alone.
        u: (c, K) controls.
        """
        row, keys = list(u), state.shape[1]
        mean = plus(resolve(self.offset, row)[0], dot(resolve(self.H[0], row), list(state)))
        variance = np.nan if self.R is None else resolve([self.R], row)[0]
        return np.full((1, keys), mean), np.full((1, keys), variance)

    def snapshot(self, state: Array) -> tuple[Array, Array, dict[str, Array]]:
        """Return the coefficients (n, K), NaN for their row-major covariance, and no other fields."""
        return state, np.full((len(self.states) ** 2, state.shape[1]), np.nan), {}

    def restore(self, mean: Array, covariance: Array, extras: Mapping[str, Array]) -> Array:
        """Return the state from the parts that `snapshot` returned, bit for bit."""
        return np.array(mean, float)

    def from_moments(self, mean: Array, covariance: Array) -> Array:
        """Raise ModelError: the state cannot hold the coefficients' covariance."""
        raise ModelError(
            "filter", "the filter keeps no covariance", "keep its coefficients, or learn them again"
        )


def build_lms(given: Definition, learned: Mapping[str, Any]) -> LeastMeanSquares:
    """Return the LMS filter of a definition. Raises ModelError."""
    return _build(given, "lms", ("step",), None)


def build_nlms(given: Definition, learned: Mapping[str, Any]) -> LeastMeanSquares:
    """Return the normalised LMS filter of a definition. Raises ModelError."""
    options = parse_section(given, "nlms", ("step", "epsilon"))
    epsilon = checks.parse_positive("nlms.epsilon", options.get("epsilon", 1e-6), zero=True)
    return _build({**given, "nlms": {"step": 0.5, **options}}, "nlms", ("step", "epsilon"), epsilon)


def _build(given: Definition, kind: str, known: Sequence[str], epsilon: float | None) -> LeastMeanSquares:
    controls = parse_names("control", given.get("control") or (), empty=True)
    R = (given.get("observation") or {}).get("R")
    variance = None if R is None else parse_covariance_cells("observation.R", R, 1, controls)[0]
    found = parse_regression({**given, "control": controls}, kind, ("R",), find_columns(variance))
    if found.measurements != 1:
        raise ModelError("measurement", f"{found.measurements} are named", f"{kind} takes one")
    step = checks.parse_positive(
        f"{kind}.step", checks.require_key(kind, parse_section(given, kind, known), "step")
    )
    if epsilon is not None and step >= 2.0:
        raise ModelError(f"{kind}.step", f"{step!r} never settles", "write a number below 2")
    initial = given.get("initial") or {}
    checks.check_keys("initial", initial, ("mean",))
    n = len(found.states)
    mean = checks.parse_vector("initial.mean", initial.get("mean") or [0.0] * n, n)
    return LeastMeanSquares(*found, step, epsilon, variance, mean)
