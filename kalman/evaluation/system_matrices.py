"""The matrices that a filter used for a row: F and Q of the prediction, H and R of the measurement.

A structure's F and Q depend on the time step, entries may come from columns of the row, and a key may have learned or
adapted parameters. So a row's matrices can differ from the matrices of the previous row and of other keys.
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
from kalman.filters.state_layout import unwrap_filter
from kalman.linalg.entries import Entry, times
from kalman.linalg.packing import unpack_symmetric
from kalman.models.columns import resolve, resolve_matrix
from kalman.models.functions import FunctionObservation, FunctionProcess
from kalman.models.learned_entries import insert_entries
from kalman.types import Array, Filter, Rows

MATRICES: tuple[str, ...] = ("F", "H", "Q", "R")

Matrices = Mapping[str, Callable[[], Any]]
"""Map the name of a matrix to a call that returns its rows of entries."""


def count_matrix_entries(model: Filter) -> dict[str, int]:
    """Return the number of entries of each matrix that the filter has; for several models, the sum over the models.

    A sigma-point filter moves points through a function, without F or H. The coefficients of a regression do not move,
    so it has neither F nor Q.
    """
    model = unwrap_filter(model)
    n, m = len(model.states), model.measurements
    sizes = {"F": n * n, "H": m * n, "Q": n * n, "R": m * m}
    if isinstance(model, MultipleModels):
        each = [count_matrix_entries(mode) for mode in model.modes]
        return {name: len(each) * size for name, size in sizes.items() if all(name in one for one in each)}
    return {name: sizes[name] for name in sorted(_list_matrix_names(model))}


def _list_matrix_names(model: Filter) -> set[str]:
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


def compute_system_matrices(
    model: Filter, before: Array, rows: Rows, names: Sequence[str]
) -> dict[str, Array]:
    """Return matrices of one row for each key, by name, as their rows one after another: (d, K).

    before (size, K): the states before the rows. For several models the matrices follow each other, mode after mode.
    F and Q are NaN at a first row, where nothing is predicted. An extended filter's F and H are the Jacobians of its
    functions, at the state before the row and at the predicted state. R is the model's, scaled and adapted, without the
    weight of an outlier. A fading memory widens F P F' and changes neither F nor Q. Where an extended filter's function
    takes its noise as an argument, Q and R are the added covariances G Q G'.
    """
    model = unwrap_filter(model)
    before = before[: model.size]
    if isinstance(model, MultipleModels):
        first = rows.mask_first_rows()
        if model.transition is not None and first is not True:
            before, _ = model.mixed(before, first)
        each = [
            compute_system_matrices(mode, before[part], rows, names)
            for mode, part in zip(model.modes, model.parts, strict=True)
        ]
        return {name: np.concatenate([one[name] for one in each]) for name in names}
    with np.errstate(all="ignore"):
        found = _build_matrices(model, before, rows)
        result = {name: _stack_rows(found[name](), rows.dt.shape) for name in names}
    for name in {"F", "Q"} & result.keys():
        result[name][:, rows.first] = np.nan
    return result


def _build_matrices(model: Filter, before: Array, rows: Rows) -> Matrices:
    if isinstance(model, RobustLinearFilter):
        return _build_linear_matrices(model.base, before[: model.base.size], rows)
    if isinstance(model, LinearFilter):
        return _build_linear_matrices(model, before, rows)
    if isinstance(model, GaussianFilter):
        return _build_gaussian_matrices(model, before, rows)
    assert isinstance(model, LeastMeanSquares | RecursiveLeastSquares)
    u = list(rows.u)
    R = getattr(model, "R", None)
    return {"H": lambda: resolve_matrix(model.H, u), "R": lambda: [resolve([R], u)]}


def _build_linear_matrices(model: LinearFilter, before: Array, rows: Rows) -> Matrices:
    u = list(rows.u)
    values = model.split(list(before), False).values
    transition = model.process.transition(rows.dt, u, values)
    seen = model.observed(u, values)
    return {
        "F": lambda: transition.F,
        "H": lambda: seen.H,
        "Q": lambda: unpack_symmetric(transition.Q),
        "R": lambda: unpack_symmetric(seen.R),
    }


def _build_gaussian_matrices(model: GaussianFilter, before: Array, rows: Rows) -> Matrices:
    n, m, u = len(model.states), model.measurements, list(rows.u)
    values = gaussian_programs.collect_entries(model, list(before))
    process, observation = model.process, model.observation

    def jacobian() -> Any:
        moved, _ = model._moved(before, rows)
        return [moved[n + i * n : n + (i + 1) * n] for i in range(n)]

    def seen_there() -> Any:
        prior, *_ = model._predict_prior(before, rows, rows.mask_first_rows())
        return model._seen(prior, rows.u, before)[0]

    def seen_jacobian() -> Any:
        seen = seen_there()
        return [seen[m + i * n : m + (i + 1) * n] for i in range(m)]

    def noise() -> list[list[Entry]]:
        if not isinstance(process, FunctionProcess):
            return unpack_symmetric(process.transition(rows.dt, u, values).Q)
        (scale,) = resolve([process.scale], u)
        given = process.noise(rows.dt, rows.u)
        packed = [times(scale, q) for q in (resolve(values["Q"], u) if given is None else [*given])]
        if process.noise_inside:
            moved, r = model._moved(before, rows)[0], process.noise_size
            noise_jacobian = [moved[n + n * n + i * r : n + n * n + (i + 1) * r] for i in range(n)]
            packed = congruence(noise_jacobian, packed)
        return unpack_symmetric(packed)

    def measurement_noise() -> list[list[Entry]]:
        packed = gaussian_programs.resolve_measurement_noise(model, values, u)
        inside = isinstance(observation, FunctionObservation) and observation.noise_inside
        return unpack_symmetric(
            gaussian_programs.compute_entering_noise(model, seen_there(), packed) if inside else packed
        )

    return {
        "F": jacobian
        if isinstance(process, FunctionProcess)
        else lambda: process.transition(rows.dt, u, values).F,
        "H": seen_jacobian
        if isinstance(observation, FunctionObservation)
        else lambda: insert_entries("H", resolve_matrix(observation, u), values),
        "Q": noise,
        "R": measurement_noise,
    }


def _stack_rows(rows: Sequence[Sequence[Entry]], shape: tuple[int, ...]) -> Array:
    return np.array([np.broadcast_to(np.asarray(entry, float), shape) for row in rows for entry in row])
