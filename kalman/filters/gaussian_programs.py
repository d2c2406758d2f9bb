"""The programs of a `GaussianFilter` that run between the model's functions: draw sigma points, predict, update.

The output `sound` is negative for the keys whose result is not a valid covariance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kalman.filters import posterior, sigma_points
from kalman.filters.posterior import Posterior
from kalman.filters.recursions import choose, congruence
from kalman.filters.retrodiction import (
    Retrodiction,
    retrodict,
    retrodict_by_rotation,
    retrodict_from_root,
)
from kalman.linalg import cholesky
from kalman.linalg.cholesky import Factored
from kalman.linalg.entries import Entry, Vector, apply, dot, is_zero, minus, plus, squared, times
from kalman.linalg.packing import packed_size
from kalman.linalg.program import Program, Tape
from kalman.models import angles
from kalman.models.columns import (
    Column,
    compute_lowest_pivot,
    find_columns,
    require_numbers,
    resolve,
    resolve_matrix,
)
from kalman.models.functions import FunctionObservation, FunctionProcess
from kalman.models.learned_entries import insert_entries
from kalman.models.structure import Values

if TYPE_CHECKING:
    from kalman.filters.gaussian import GaussianFilter


@lru_cache(maxsize=64)
def build_points_program(model: GaussianFilter) -> Program:
    """Return the program that draws sigma points.

    Inputs: the mean, and the covariance or its factor. Outputs: the points, the factor, `sound`.
    """
    assert model.rule is not None
    tape = Tape()
    state = tape.symbols(model.gaussian_size)
    n = len(model.states)
    L, sound = Factored(state[n:], 1.0) if model.rooted else cholesky.cholesky(state[n:])
    drawn = sigma_points.draw_points(model.rule, state[:n], L)
    return Program(tape, state, [*(entry for row in drawn for entry in row), *L, sound])


@lru_cache(maxsize=64)
def build_joint_points_program(model: GaussianFilter, rule: sigma_points.PointRule) -> Program:
    """Return the program that draws joint sigma points of the state and of a noise that a function takes as argument.

    Inputs: mean, covariance or its factor, and the packed covariance of the noise. Outputs: points, factor, `sound`.
    """
    n = len(model.states)
    r = rule.n - n
    tape = Tape()
    state, Q = tape.symbols(model.gaussian_size), tape.symbols(packed_size(r))
    L, sound = Factored(state[n:], 1.0) if model.rooted else cholesky.cholesky(state[n:])
    noise, sound_noise = cholesky.cholesky(Q)
    below = [[*[0.0] * n, *noise[packed_size(i) : packed_size(i + 1)]] for i in range(r)]
    joint = [*L, *(entry for row in below for entry in row)]
    drawn = sigma_points.draw_points(rule, [*state[:n], *[0.0] * r], joint)
    outputs = [*(entry for row in drawn for entry in row), *L, cholesky.find_least([sound, sound_noise])]
    return Program(tape, [*state, *Q], outputs)


@lru_cache(maxsize=64)
def predict_program(model: GaussianFilter, some_first: bool) -> Program:
    """Return the program of a prediction.

    Inputs: state, dt, control, the values of the process's functions, and a mask of the keys at their first row.
    Outputs: predicted mean, predicted covariance or its factor, `sound`.
    """
    tape = Tape()
    inputs, state, predicted = _record_prediction(model, tape)
    n = len(model.states)
    m, S, sound = predicted.m, predicted.S, predicted.sound
    u = inputs[model.size + 1 : model.size + 1 + model.controls]
    sound = cholesky.find_least([sound, *model.process.guards(u), *model.fading_guards(u)])
    first: list[Any] = tape.symbols(1, boolean=True) if some_first else []
    if first:
        m, S = choose(first[0], state[:n], m), choose(first[0], state[n : model.gaussian_size], S)
    return Program(tape, [*inputs, *first], [*m, *S, sound])


@lru_cache(maxsize=64)
def build_back_program(model: GaussianFilter) -> Program:
    """Return the program of the smoother's prediction.

    Inputs: those of `predict_program` without the mask of first rows. Outputs: predicted mean, the gain G back to the
    previous state (row by row), and the packed rest of a `Retrodiction`.
    """
    tape = Tape()
    inputs, _, predicted = _record_prediction(model, tape)
    back = predicted.back()
    return Program(tape, inputs, [*predicted.m, *(entry for row in back.G for entry in row), *back.rest])


class Predicted(NamedTuple):
    """A prediction: mean m, covariance or factor S, and `sound`; `back` returns the retrodiction to the last state."""

    m: list[Entry]
    S: list[Entry]
    sound: Entry
    back: Callable[[], Retrodiction]


def _record_prediction(model: GaussianFilter, tape: Tape) -> tuple[list[Any], list[Any], Predicted]:
    """Return the inputs of a prediction, the state's entries (also part of the inputs), and the prediction."""
    state, dt, u = tape.symbols(model.size), tape.symbol(), tape.symbols(model.controls)
    n, rule = len(model.states), model.rule
    m, S = state[:n], state[n : model.gaussian_size]
    values = collect_entries(model, state)
    inputs = [*state, dt, *u]
    if not isinstance(model.process, FunctionProcess):
        F, Q, c = model.process.transition(dt, u, values)
        mean = [plus(a, b) for a, b in zip(apply(F, m), c, strict=True)]
        after = _propagate_covariance(model, _fade_covariance(model, S, u), F, Q)
        return (
            inputs,
            state,
            Predicted(mean, after, np.inf, lambda: _retrodict_linear(model, S, F, Q, after, u)),
        )
    process, r = model.process, model.process.noise_size
    rule = model.process_rule or rule
    inside = n * r if process.noise_inside else 0
    moved = tape.symbols(n + n * n + inside if rule is None else n * rule.points)
    noise = [] if process.q is None else tape.symbols(packed_size(r))
    inputs += [*moved, *noise]
    Q = noise or resolve(values["Q"], u)
    Q = [times(scale, q) for q, scale in zip(Q, resolve([process.scale], u) * len(Q), strict=True)]
    offset = resolve(process.offset or (0.0,) * n, u)
    if rule is None:
        F = _split_rows(moved[n : n + n * n], n)
        noise_jacobian = _split_rows(moved[n + n * n :], r) if inside else None
        after = _propagate_covariance(model, _fade_covariance(model, S, u), F, Q, noise_jacobian)
        mean = [plus(a, b) for a, b in zip(moved[:n], offset, strict=True)]
        predicted = Predicted(
            mean, after, np.inf, lambda: _retrodict_linear(model, S, F, Q, after, u, noise_jacobian)
        )
        return inputs, state, predicted
    regressed = sigma_points.regress(rule, _split_rows(moved, rule.points))
    if inside:  # the points already include the noise
        Q = [0.0] * packed_size(n)
    after, sound = _propagate_by_points(model, rule, regressed, Q, u)
    mean = [plus(a, b) for a, b in zip(regressed.mean, offset, strict=True)]

    def back() -> Retrodiction:
        return _retrodict_by_points(model, rule, S, regressed, Q, after, u)

    return inputs, state, Predicted(mean, after, sound, back)


@lru_cache(maxsize=64)
def update_program(model: GaussianFilter, missing: bool) -> Program:
    """Return the program of a measurement update.

    Inputs: predicted state, key-specific parameters, control, the values of the observation's functions, the
    measurement, and masks of present components. Outputs: mean, covariance or its factor, log-likelihood, NIS, a
    number that is finite if all other outputs are, the smallest innovation variance, `sound`.
    """
    tape = Tape()
    n, count = len(model.states), model.measurements
    prior, own = tape.symbols(model.gaussian_size), tape.symbols(model.size - model.gaussian_size)
    u, seen = tape.symbols(model.controls), tape.symbols(count_seen_rows(model))
    values = collect_entries(model, [*prior, *own])
    y = tape.symbols(count)
    masks: list[Any] = tape.symbols(count, boolean=True) if missing else []
    here = observe_row(model, prior, values, u, seen, y, masks or [None] * count)
    result = here.update(here.R)
    sound = cholesky.find_least([result.sound, *build_noise_guards(model, values, u)])
    m_after = [plus(a, b) for a, b in zip(prior[:n], result.change, strict=True)]
    total: Any = result.log_likelihood
    for entry in (*m_after, *result.S):
        total = plus(total, entry)
    outputs = [*m_after, *result.S, result.log_likelihood, result.nis, total, result.innovation, sound]
    return Program(tape, [*prior, *own, *u, *seen, *y, *masks], outputs)


class RowObservation(NamedTuple):
    """A row's measurement at the predicted state: the innovation e, the noise covariance R, and three functions.

    update: returns the posterior for a given R
    C:      returns the packed covariance of the predicted measurement without measurement noise
    H:      returns the Jacobian of the measurement, or the regression of the measurement on the state by sigma points
    """

    e: list[Entry]
    R: list[Entry]
    update: Callable[[Vector], Posterior]
    C: Callable[[], list[Entry]]
    H: Callable[[], Any]


def observe_row(
    model: GaussianFilter,
    prior: list[Any],
    values: Values,
    u: list[Any],
    seen: list[Any],
    y: list[Any],
    presents: Sequence[Any],
) -> RowObservation:
    """Return a row's observation of the predicted state; the inputs are those of `update_program`."""
    n, count = len(model.states), model.measurements
    m, S = prior[:n], prior[n:]
    R = resolve_measurement_noise(model, values, u)
    if isinstance(model.observation, FunctionObservation) and model.rule is not None:
        return _observe_by_points(model, S, seen, R, y, u, presents)
    if not isinstance(model.observation, FunctionObservation):
        written = insert_entries("H", resolve_matrix(model.observation, u), values)
        e = _compute_innovations(model, y, _expect_measurement(model, written, m, u))
        H = posterior.mask_rows(written, presents)
    else:
        R = compute_entering_noise(model, seen, R)
        H = posterior.mask_rows(_split_rows(seen[count : count + count * n], n), presents)
        e = _compute_innovations(model, y, _add_offset(model, seen[:count], u))
    return RowObservation(
        e,
        R,
        lambda noise: _update_by_form(model, S, H, noise, e, presents),
        lambda: congruence(H, cholesky.gram(S) if model.rooted else S),
        lambda: H,
    )


def build_noise_guards(model: GaussianFilter, values: Values, u: list[Any]) -> list[Entry]:
    """Return entries that are zero or more for the keys whose row has columns that give a valid R."""
    guards = resolve([model.noise_scale], u) if isinstance(model.noise_scale, Column) else []
    return [
        *guards,
        *([compute_lowest_pivot(resolve(values["R"], u))] if find_columns(model.constants["R"]) else []),
    ]


@lru_cache(maxsize=64)
def build_measured_program(model: GaussianFilter) -> Program:
    """Return the program of the predicted measurement: its mean and packed covariance.

    Inputs: those of `update_program` except the measurement.
    """
    tape = Tape()
    n, count = len(model.states), model.measurements
    prior, own = tape.symbols(model.gaussian_size), tape.symbols(model.size - model.gaussian_size)
    u, seen = tape.symbols(model.controls), tape.symbols(count_seen_rows(model))
    values = collect_entries(model, [*prior, *own])
    R = resolve_measurement_noise(model, values, u)
    m, S = prior[:n], prior[n:]
    if isinstance(model.observation, FunctionObservation) and model.rule is not None:
        rule = model.observation_rule or model.rule
        mean, slopes, bends, shift = sigma_points.regress(rule, _split_rows(seen, rule.points))
        mean = _add_offset(model, mean, u)
        if model.observation_rule is not None:  # the points already include the noise
            R = [0.0] * packed_size(count)
        square = rule.scale**2
        spread = cholesky.square([[*a, *b] for a, b in zip(slopes, bends, strict=True)])
        lost = [
            times(model.rule.excess, times(shift[i], shift[j])) for i in range(count) for j in range(i + 1)
        ]
        spread = [minus(times(square, a), d) for a, d in zip(spread, lost, strict=True)]
    else:
        written = () if seen else insert_entries("H", resolve_matrix(model.observation, u), values)  # type: ignore[arg-type]
        H = _split_rows(seen[count : count + count * n], n) if seen else written
        R = compute_entering_noise(model, seen, R)
        mean = _add_offset(model, seen[:count], u) if seen else _expect_measurement(model, H, m, u)
        spread = congruence(H, cholesky.gram(S) if model.rooted else S)
    return Program(
        tape, [*prior, *own, *u, *seen], [*mean, *(plus(a, r) for a, r in zip(spread, R, strict=True))]
    )


def count_seen_rows(model: GaussianFilter) -> int:
    """Return how many rows the values of the observation's functions have."""
    n, count = len(model.states), model.measurements
    if not isinstance(model.observation, FunctionObservation):
        return 0
    if model.rule is not None:
        return count * (model.observation_rule or model.rule).points
    s = model.observation.noise_size if model.observation.noise_inside else 0
    return count + count * n + count * s


def resolve_measurement_noise(model: GaussianFilter, values: Values, u: Vector) -> list[Entry]:
    """Return R (packed) times the noise scale."""
    (scale,) = resolve([model.noise_scale], u)
    return [times(scale, r) for r in resolve(values["R"], u)]


def _expect_measurement(model: GaussianFilter, H: Any, m: Vector, u: Vector) -> list[Entry]:
    """Return H m + offset."""
    return _add_offset(model, [dot(row, m) for row in H], u)


def compute_entering_noise(model: GaussianFilter, seen: list[Any], R: list[Entry]) -> list[Entry]:
    """Return the packed noise covariance: R, or M R M' if h takes the noise v (M: the Jacobian of h by v)."""
    observation, n, count = model.observation, len(model.states), model.measurements
    if not isinstance(observation, FunctionObservation) or not observation.noise_inside:
        return R
    return congruence(_split_rows(seen[count + count * n :], observation.noise_size), R)


def _add_offset(model: GaussianFilter, expected: Vector, u: Vector) -> list[Entry]:
    """Return the expected measurement with its offset."""
    offset = resolve(model.offset or (0.0,) * model.measurements, u)
    return [plus(a, b) for a, b in zip(expected, offset, strict=True)]


def _split_rows(entries: list[Any], width: int) -> list[list[Any]]:
    return [entries[i : i + width] for i in range(0, len(entries), width)]


def collect_entries(model: GaussianFilter, state: list[Any]) -> Values:
    """Return the entries of all parameters: shared values from the model, key-specific values from the state."""
    if not model.own:
        return model.constants
    rows = iter(state[model.places["parameters"]])
    # a zero entry of the pooled covariance is zero for every key, so programs leave it out
    own: dict[str, list[Any]] = {}
    for p in model.parameters:
        if p.name in model.own:
            pairs = [(a, next(rows)) for a in require_numbers(p.value)]
            own[p.name] = [0.0 if p.kind == "covariance" and a == 0.0 else row for a, row in pairs]
    return {**model.constants, **own}


def _propagate_covariance(
    model: GaussianFilter, S: Vector, F: Any, Q: Vector, noise_jacobian: Any = None
) -> list[Entry]:
    """Return F P F' + Q, or F P F' + W Q W' with the noise Jacobian W.

    If S is the factor of P, return the factor of this sum.
    """
    if not model.rooted:
        Q = congruence(noise_jacobian, Q) if noise_jacobian else Q
        return [plus(a, q) for a, q in zip(congruence(F, S), Q, strict=True)]
    columns = list(zip(*cholesky.unpack_triangle(S), strict=True))
    moved = [[dot(row, column) for column in columns] for row in F]
    return cholesky.triangulate_rows(_join_columns(moved, _factor_noise(Q, noise_jacobian)))


def _take_root(a: Entry) -> Entry:
    return math.sqrt(a) if isinstance(a, float) else np.sqrt(a)


def _factor_noise(Q: Vector, noise_jacobian: Any) -> list[list[Entry]]:
    """Return the rows of a factor of Q, or of W Q W'."""
    root = cholesky.unpack_triangle(cholesky.cholesky(Q).L)
    if not noise_jacobian:
        return root
    columns = list(zip(*root, strict=True))
    return [[dot(row, column) for column in columns] for row in noise_jacobian]


def _resolve_fading(model: GaussianFilter, u: Vector) -> Entry:
    (fading,) = resolve([model.fading], u)
    return fading


def _fade_covariance(model: GaussianFilter, S: Vector, u: Vector) -> Vector:
    """Return the covariance S, or its factor, scaled by the fading."""
    if model.fading == 1.0:
        return S
    fading = _resolve_fading(model, u)
    return [times(fading if model.rooted else squared(fading), a) for a in S]


def _scale_rows(a: Entry, rows: Any) -> list[list[Entry]]:
    return [[times(a, b) for b in row] for row in rows]


def _retrodict_linear(
    model: GaussianFilter, S: Vector, F: Any, Q: Vector, after: Vector, u: Vector, noise_jacobian: Any = None
) -> Retrodiction:
    """Return the retrodiction over x' = F x + noise; covariance added by fading counts as noise."""
    more = minus(squared(_resolve_fading(model, u)), 1.0)
    fades = not is_zero(more)
    if not model.rooted:
        Q = congruence(noise_jacobian, Q) if noise_jacobian else Q
        noise = [plus(times(more, a), q) for a, q in zip(congruence(F, S), Q, strict=True)] if fades else Q
        return retrodict(S, F, noise, after)
    L = cholesky.unpack_triangle(S)
    columns = list(zip(*L, strict=True))
    moved = [[dot(row, column) for column in columns] for row in F]
    root = _factor_noise(Q, noise_jacobian)
    if fades:
        root = _join_columns(_scale_rows(_take_root(more), moved), root)
    return retrodict_by_rotation(L, moved, root)


def _retrodict_by_points(
    model: GaussianFilter,
    rule: sigma_points.PointRule,
    S: Vector,
    regressed: sigma_points.Regressed,
    Q: Vector,
    after: Vector,
    u: Vector,
) -> Retrodiction:
    """Return the retrodiction over the regression of the process by sigma points.

    The bends of the regression and the covariance added by fading count as noise.
    """
    L = cholesky.unpack_triangle(S if model.rooted else cholesky.cholesky(S).L)
    fading = _resolve_fading(model, u)
    more = minus(squared(fading), 1.0)
    n = len(model.states)
    moved = _scale_rows(rule.scale, [row[:n] for row in regressed.slopes])
    noise = _scale_rows(times(rule.scale, fading), regressed.bends)
    if rule.n > n:  # the remaining slopes belong to the noise that the function takes
        noise = _join_columns(noise, _scale_rows(rule.scale, [row[n:] for row in regressed.slopes]))
    if not is_zero(more):
        noise = _join_columns(_scale_rows(_take_root(more), moved), noise)
    if model.rooted and rule.excess == 0.0:
        return retrodict_by_rotation(
            L, moved, _join_columns(noise, cholesky.unpack_triangle(cholesky.cholesky(Q).L))
        )
    d, lost = regressed.shift, times(rule.excess, squared(fading))
    spread = [plus(a, q) for a, q in zip(cholesky.square(noise), Q, strict=True)]
    if not is_zero(lost):
        products = [times(lost, times(d[i], d[j])) for i in range(n) for j in range(i + 1)]
        spread = [minus(a, b) for a, b in zip(spread, products, strict=True)]
    return retrodict_from_root(L, moved, spread, cholesky.gram(after) if model.rooted else after)


def _propagate_by_points(
    model: GaussianFilter,
    rule: sigma_points.PointRule,
    regressed: sigma_points.Regressed,
    Q: Vector,
    u: Vector,
) -> tuple[list[Entry], Entry]:
    """Return the predicted covariance (or its factor) from the regression by sigma points, and `sound`."""
    _, slopes, bends, shift = regressed
    if model.fading != 1.0:
        fading = _resolve_fading(model, u)
        slopes, bends, shift = (
            _scale_rows(fading, slopes),
            _scale_rows(fading, bends),
            *_scale_rows(fading, [shift]),
        )
    scale = rule.scale
    noise = [times(1.0 / (scale * scale), q) for q in Q]
    if not model.rooted and rule.excess == 0.0:
        spread = cholesky.square([[*a, *b] for a, b in zip(slopes, bends, strict=True)])
        return [times(scale * scale, plus(a, q)) for a, q in zip(spread, noise, strict=True)], np.inf
    root = cholesky.unpack_triangle(cholesky.cholesky(noise).L)
    L = cholesky.triangulate_rows([[*a, *b, *q] for a, b, q in zip(slopes, bends, root, strict=True)])
    L = [times(scale, a) for a in L]
    sound: Entry = np.inf
    if rule.excess:
        L, sound = cholesky.downdate(L, [times(math.sqrt(rule.excess), d) for d in shift])
    return L if model.rooted else cholesky.gram(L), sound


def _update_by_form(
    model: GaussianFilter, S: Vector, H: Any, R: Vector, e: Vector, presents: Any
) -> Posterior:
    """Return the posterior after a linear measurement, computed in the form of the model (`GaussianFilter.form`)."""
    if model.rooted:
        return posterior.update_by_rotation(S, H, R, e, presents, model.noisy)
    if model.form == "information":
        return posterior.update_by_information(S, H, R, e, presents)
    return posterior.update_by_variance(S, H, R, e, presents)


def _observe_by_points(
    model: GaussianFilter, L: Vector, seen: list[Any], R: Vector, y: Vector, u: Vector, presents: Any
) -> RowObservation:
    """Return a row's observation from the function's values at the sigma points, which were drawn with the factor L.

    In units of L the state has unit variance, the slopes are the regression matrix, and the bends add noise.
    """
    n, rule = len(model.states), model.observation_rule or model.rule
    assert rule is not None
    values = _split_rows(seen, rule.points)
    mean, slopes, bends, shift = sigma_points.regress(rule, posterior.mask_rows(values, presents))
    slopes = [[times(rule.scale, a) for a in row] for row in slopes]
    if rule.n > n:  # the remaining slopes belong to the noise that h takes, and give R
        R = cholesky.square([row[n:] for row in slopes])
        R = _unmask_noise(R, presents)
        slopes = [row[:n] for row in slopes]
    square = rule.scale * rule.scale
    bent = [times(square, a) for a in cholesky.square(bends)]
    e = _compute_innovations(model, y, _add_offset(model, mean, u))
    lost = [times(rule.excess, times(shift[i], shift[j])) for i in range(len(e)) for j in range(i + 1)]

    def updated(noise: Vector) -> Posterior:
        added = [plus(a, r) for a, r in zip(bent, noise, strict=True)]
        if rule.excess == 0.0:
            unit = [1.0 if i == j else 0.0 for i in range(n) for j in range(i + 1)]
            result = posterior.update_by_rotation(unit, slopes, added, e, presents, model.noisy)
        else:
            spread = cholesky.square(slopes)
            joint = [plus(a, minus(r, d)) for a, r, d in zip(spread, added, lost, strict=True)]
            result = posterior.condition_by_elimination(slopes, joint, e, presents)
        after = cholesky.product(L, result.S)
        return result._replace(
            change=cholesky.apply(L, result.change), S=after if model.rooted else cholesky.gram(after)
        )

    def covariance() -> list[Entry]:
        spread = [plus(a, b) for a, b in zip(cholesky.square(slopes), bent, strict=True)]
        return spread if rule.excess == 0.0 else [minus(a, d) for a, d in zip(spread, lost, strict=True)]

    return RowObservation(e, list(R), updated, covariance, lambda: _solve_slopes(slopes, L))


def _unmask_noise(R: Vector, presents: Any) -> list[Entry]:
    """Return a noise covariance (packed) with variance 1 for missing components, because their rows of H are zero."""
    size = len(presents)
    return [
        a if i != j or presents[i] is None else np.where(presents[i], a, 1.0)
        for a, (i, j) in zip(R, ((i, j) for i in range(size) for j in range(i + 1)), strict=True)
    ]


def _solve_slopes(slopes: Any, L: Vector) -> list[list[Entry]]:
    """Return the H that solves H L = slopes; the column of a state without variance is 0."""
    n, rows = len(slopes[0]), cholesky.unpack_triangle(L)
    result: list[list[Entry]] = []
    for slope in slopes:
        h: list[Entry] = [0.0] * n
        for j in reversed(range(n)):
            rest = slope[j]
            for k in range(j + 1, n):
                rest = minus(rest, times(h[k], rows[k][j]))
            open_ = np.greater(rows[j][j], 0.0)
            h[j] = np.where(open_, np.divide(rest, np.where(open_, rows[j][j], 1.0)), 0.0)
        result.append(h)
    return result


def _compute_innovations(model: GaussianFilter, y: Vector, expected: Vector) -> list[Entry]:
    """Return y - expected; differences of angles lie within half a period."""
    y = angles.turn_angles(model.periods, y, expected)
    return [minus(a, b) for a, b in zip(y, expected, strict=True)]


def _join_columns(a: Any, b: Any) -> list[list[Entry]]:
    return [[*one, *other] for one, other in zip(a, b, strict=True)]
