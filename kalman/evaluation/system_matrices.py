"""The matrices that a filter used for a row: F and Q of the prediction, H and R of the measurement.

A structure's F and Q depend on the time step, entries may come from columns of the row, and a key may have learned or
adapted parameters. So a row's matrices can differ from those of the row before and from other keys'.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kalman.filters import gaussian_programs
from kalman.filters.gaussian import GaussianFilter
from kalman.filters.linear import LinearFilter
from kalman.filters.lms import LeastMeanSquares
from kalman.filters.multiple_models import MultipleModels
from kalman.filters.recursions import congruence
from kalman.filters.rls import RecursiveLeastSquares
from kalman.filters.robust.linear import RobustLinearFilter
from kalman.filters.state_layout import innermost
from kalman.linalg.entries import Entry, times
from kalman.linalg.packing import symmetric
from kalman.models.columns import resolve, resolve_matrix
from kalman.models.functions import FunctionObservation, FunctionProcess
from kalman.models.learned_entries import entered
from kalman.types import Array, Filter, Rows

MATRICES: tuple[str, ...] = ("F", "H", "Q", "R")

Matrices = Mapping[str, Callable[[], Any]]
"""Map the name of a matrix to a call that returns its rows of entries."""


def widths(model: Filter) -> dict[str, int]:
    """Return the number of entries of each matrix that the filter has; for several models, the sum over the models.

    A sigma-point filter moves points through a function, without F or H. A regression's coefficients do not move: F and
    Q are missing.
    """
    model = innermost(model)
    n, m = len(model.states), model.measurements
    sizes = {"F": n * n, "H": m * n, "Q": n * n, "R": m * m}
    if isinstance(model, MultipleModels):
        each = [widths(mode) for mode in model.modes]
        return {name: len(each) * size for name, size in sizes.items() if all(name in one for one in each)}
    return {name: sizes[name] for name in sorted(_names(model))}


def _names(model: Filter) -> set[str]:
    if isinstance(model, LinearFilter | RobustLinearFilter):
        return set(MATRICES)
    if isinstance(model, GaussianFilter):
        by_points = model.rule is not None
        lacking = {"F"} if by_points and isinstance(model.process, FunctionProcess) else set()
        lacking |= {"H"} if by_points and isinstance(model.observation, FunctionObservation) else set()
        lacking |= {"Q"} if model.process_rule is not None else set()
        lacking |= {"R"} if model.observation_rule is not None else set()
        return set(MATRICES) - lacking
    if isinstance(model, LeastMeanSquares):
        return {"H"} if model.R is None else {"H", "R"}
    return {"H"} if isinstance(model, RecursiveLeastSquares) else set()


def system_matrices(model: Filter, before: Array, rows: Rows, names: Sequence[str]) -> dict[str, Array]:
    """Return matrices of one row for each key, by name, as their rows one after another: (d, K).

    before (size, K): the states before the rows. For several models the matrices follow each other, mode after mode.
    F and Q are NaN at a first row, where nothing is predicted. An extended filter's F and H are the Jacobians of its
    functions, at the state before the row and at the predicted state. R is the model's, scaled and adapted, without the
    weight of an outlier. A fading memory widens F P F' and changes neither F nor Q. Where an extended filter's function
    takes its noise as an argument, Q and R are the added covariances G Q G'.
    """
    model = innermost(model)
    before = before[: model.size]
    if isinstance(model, MultipleModels):
        first = rows.which_first()
        if model.transition is not None and first is not True:
            before, _ = model.mixed(before, first)
        each = [
            system_matrices(mode, before[part], rows, names)
            for mode, part in zip(model.modes, model.parts, strict=True)
        ]
        return {name: np.concatenate([one[name] for one in each]) for name in names}
    with np.errstate(all="ignore"):
        found = _matrices(model, before, rows)
        result = {name: _array(found[name](), rows.dt.shape) for name in names}
    for name in {"F", "Q"} & result.keys():
        result[name][:, rows.first] = np.nan
    return result


def _matrices(model: Filter, before: Array, rows: Rows) -> Matrices:
    if isinstance(model, RobustLinearFilter):
        return _linear(model.base, before[: model.base.size], rows)
    if isinstance(model, LinearFilter):
        return _linear(model, before, rows)
    if isinstance(model, GaussianFilter):
        return _gaussian(model, before, rows)
    assert isinstance(model, LeastMeanSquares | RecursiveLeastSquares)
    u = list(rows.u)
    R = getattr(model, "R", None)
    return {"H": lambda: resolve_matrix(model.H, u), "R": lambda: [resolve([R], u)]}


def _linear(model: LinearFilter, before: Array, rows: Rows) -> Matrices:
    u = list(rows.u)
    values = model.split(list(before), False).values
    transition = model.process.transition(rows.dt, u, values)
    seen = model.observed(u, values)
    return {
        "F": lambda: transition.F,
        "H": lambda: seen.H,
        "Q": lambda: symmetric(transition.Q),
        "R": lambda: symmetric(seen.R),
    }


def _gaussian(model: GaussianFilter, before: Array, rows: Rows) -> Matrices:
    n, m, u = len(model.states), model.measurements, list(rows.u)
    values = gaussian_programs.values_of(model, list(before))
    process, observation = model.process, model.observation

    def jacobian() -> Any:
        moved, _ = model._moved(before, rows)
        return [moved[n + i * n : n + (i + 1) * n] for i in range(n)]

    def seen_there() -> Any:
        prior, *_ = model._prior(before, rows, rows.which_first())
        return model._seen(prior, rows.u, before)[0]

    def seen_jacobian() -> Any:
        seen = seen_there()
        return [seen[m + i * n : m + (i + 1) * n] for i in range(m)]

    def noise() -> list[list[Entry]]:
        if not isinstance(process, FunctionProcess):
            return symmetric(process.transition(rows.dt, u, values).Q)
        (scale,) = resolve([process.scale], u)
        given = process.noise(rows.dt, rows.u)
        packed = [times(scale, q) for q in (resolve(values["Q"], u) if given is None else [*given])]
        if process.noise_inside:
            moved, r = model._moved(before, rows)[0], process.noise_size
            noise_jacobian = [moved[n + n * n + i * r : n + n * n + (i + 1) * r] for i in range(n)]
            packed = congruence(noise_jacobian, packed)
        return symmetric(packed)

    def measurement_noise() -> list[list[Entry]]:
        packed = gaussian_programs.measurement_noise(model, values, u)
        inside = isinstance(observation, FunctionObservation) and observation.noise_inside
        return symmetric(gaussian_programs.entering(model, seen_there(), packed) if inside else packed)

    return {
        "F": jacobian
        if isinstance(process, FunctionProcess)
        else lambda: process.transition(rows.dt, u, values).F,
        "H": seen_jacobian
        if isinstance(observation, FunctionObservation)
        else lambda: entered("H", resolve_matrix(observation, u), values),
        "Q": noise,
        "R": measurement_noise,
    }


def _array(rows: Sequence[Sequence[Entry]], shape: tuple[int, ...]) -> Array:
    return np.array([np.broadcast_to(np.asarray(entry, float), shape) for row in rows for entry in row])
