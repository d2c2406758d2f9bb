"""A model's own functions: the process x' = f(x, dt, u) + w, and the observation y = h(x, u) + v.

x is (n, K), dt (K,), u (c, K): each function works on K keys at once, elementwise. A function may also take the noise
as an argument, as in x' = f(x, dt, u, w). The functions are checked at the initial mean when the model is built.
Jacobians that the model does not give are computed by differences.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kalman.linalg.entries import Entry
from kalman.linalg.packing import packed_index
from kalman.models import angles, checks, columns, differences
from kalman.models.arguments import count_arguments
from kalman.models.columns import Cell, Column, resolve
from kalman.models.differences import Slope
from kalman.models.inputs import noise_scale
from kalman.models.named import Named, find
from kalman.models.structure import Parameter
from kalman.types import Array, ModelError

SLACK = 1e-5
"""Largest allowed deviation of a Jacobian from differences, relative to the largest slope in its row.

Slopes are per standard deviation of the state.
"""
TRIED = (0.0, 1.0)
"""Values of the inputs u at which functions are checked, since the rows' inputs are unknown when a model is built."""


@dataclass(frozen=True)
class Call:
    """A function that the model names, and the number of arguments that the function takes."""

    function: Named
    count: int

    @property
    def name(self) -> str:
        """The function's name, `module:function`."""
        return self.function.name

    def __call__(self, *arguments: Array) -> Any:
        return self.function(*arguments[: self.count])


@dataclass(frozen=True)
class FunctionProcess:
    """x' = f(x, dt, u) + offset + w, w ~ N(0, Q), applied once a row; dt is the time since the previous row.

    If f takes w as an argument, x' = f(x, dt, u, w) + offset with w of any length; `noise_jacobian` is df/dw at w = 0.
    The noise covariance of a row is the matrix Q (packed), or the result (r, r, K) of the function q of dt (and u).
    `scale` multiplies the noise covariance.
    """

    size: int
    f: Call
    jacobian: Call | None
    Q: tuple[Cell, ...]
    q: Call | None
    scale: Cell = 1.0
    offset: tuple[Cell, ...] = ()
    noise_size: int = 0
    noise_jacobian: Call | None = None
    controlled = True
    observes = None

    @property
    def noise_inside(self) -> bool:
        """Whether f takes the noise as its last argument."""
        return self.f.count == len(INSIDE)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameter Q; empty if the function q gives the noise covariance."""
        return () if self.q is not None else (Parameter("Q", "covariance", self.Q),)

    def value(self, x: Array, dt: Array, u: Array, w: Array | None = None) -> Array:
        """Return f(x, dt, u) (n, K), or f(x, dt, u, w) if f takes the noise; w: (r, K), None means zeros."""
        if w is None and self.noise_inside:
            w = np.zeros((self.noise_size, x.shape[1]))
        return evaluate_function(self.f, (x, dt, u) if w is None else (x, dt, u, w), (self.size,))

    def slope(self, x: Array, dt: Array, u: Array, spread: Array) -> Array:
        """Return the Jacobian of f by x (n, n, K), computed by differences if the model gives no Jacobian.

        spread: (n, K) standard deviations of the states, which scale the steps of the differences.
        """
        if self.jacobian is not None:
            return evaluate_function(self.jacobian, (x, dt, u), (self.size, self.size))
        return self.differences(x, dt, u, spread).value

    def differences(self, x: Array, dt: Array, u: Array, spread: Array) -> Slope:
        """Return the Jacobian by x, computed by differences, and its error bound."""
        many = differences.count_points(self.size)

        def moved(points: Array, which: np.ndarray | slice) -> Array:
            return self.value(points, np.tile(dt[which], many), np.tile(u[:, which], many))

        return differences.compute_slope(moved, x, spread, self.size)

    def compute_noise_slope(self, x: Array, dt: Array, u: Array, spread: Array) -> Array:
        """Return the Jacobian of f by w at w = 0, (n, r, K); spread: (r, K) standard deviations of the noise."""
        if self.noise_jacobian is not None:
            return evaluate_function(self.noise_jacobian, (x, dt, u), (self.size, self.noise_size))
        return self.compute_noise_differences(x, dt, u, spread).value

    def compute_noise_differences(self, x: Array, dt: Array, u: Array, spread: Array) -> Slope:
        """Return the Jacobian by w, computed by differences, and its error bound."""
        many = differences.count_points(self.noise_size)

        def moved(points: Array, which: np.ndarray | slice) -> Array:
            return self.value(
                np.tile(x[:, which], many), np.tile(dt[which], many), np.tile(u[:, which], many), points
            )

        return differences.compute_slope(moved, np.zeros_like(spread), spread, self.size)

    def guards(self, u: Sequence[Entry]) -> list[Entry]:
        """Return entries that are zero or more for the keys whose row has columns that give a valid noise."""
        guards = resolve([self.scale], u) if isinstance(self.scale, Column) else []
        return [
            *guards,
            *([columns.compute_lowest_pivot(resolve(self.Q, u))] if columns.find_columns(self.Q) else []),
        ]

    def noise(self, dt: Array, u: Array) -> Array | None:
        """Return the packed Q of each key from the function q; None if Q is a matrix."""
        if self.q is None:
            return None
        r = self.noise_size
        full = evaluate_function(self.q, (dt, u), (r, r))
        return np.array([full[i, j] for i in range(r) for j in range(i + 1)])

    def resolve_row_noise(self, dt: Array, u: Array, Q: Sequence[Any]) -> Array:
        """Return the packed, scaled noise covariance of each key (r(r+1)/2, K); Q: entries of the matrix, if any."""
        packed = self.noise(dt, u)
        if packed is None:
            packed = np.array([np.broadcast_to(a, dt.shape) for a in resolve(Q, list(u))])
        (scale,) = resolve([self.scale], list(u))
        return np.asarray(scale * packed)


@dataclass(frozen=True)
class FunctionObservation:
    """y = h(x, u) + v with m measurements (`size`) and n states; periods: see `kalman.models.angles`.

    If h takes v as an argument, y = h(x, u, v) with `noise_size` entries in v; `noise_jacobian` is dh/dv at v = 0.
    """

    size: int
    states: int
    h: Call
    jacobian: Call | None
    periods: tuple[float, ...] = ()
    noise_size: int = 0
    noise_jacobian: Call | None = None

    @property
    def controlled(self) -> bool:
        """Whether h depends on the row's inputs."""
        return any(one is not None and one.count > 1 for one in (self.h, self.jacobian, self.noise_jacobian))

    @property
    def noise_inside(self) -> bool:
        """Whether h takes the noise as its last argument."""
        return self.h.count == len(DISTURBED)

    def value(self, x: Array, u: Array, v: Array | None = None) -> Array:
        """Return h(x, u) (m, K), or h(x, u, v) if h takes the noise; v: (s, K), None means zeros."""
        if v is None and self.noise_inside:
            v = np.zeros((self.noise_size, x.shape[1]))
        return evaluate_function(self.h, (x, u) if v is None else (x, u, v), (self.size,))

    def compute_noise_slope(self, x: Array, u: Array, spread: Array) -> Array:
        """Return the Jacobian of h by v at v = 0, (m, s, K); spread: (s, K) standard deviations of the noise."""
        if self.noise_jacobian is not None:
            return evaluate_function(self.noise_jacobian, (x, u), (self.size, self.noise_size))
        return self.compute_noise_differences(x, u, spread).value

    def compute_noise_differences(self, x: Array, u: Array, spread: Array) -> Slope:
        """Return the Jacobian by v by differences, and its error bound."""
        many = differences.count_points(self.noise_size)
        within = partial(angles.turn_differences, self.periods) if self.periods else None

        def seen(points: Array, which: np.ndarray | slice) -> Array:
            return self.value(np.tile(x[:, which], many), np.tile(u[:, which], many), points)

        return differences.compute_slope(seen, np.zeros_like(spread), spread, self.size, within)

    def slope(self, x: Array, u: Array, spread: Array) -> Array:
        """Return the Jacobian of h by x (m, n, K), computed by differences if the model gives no Jacobian."""
        if self.jacobian is not None:
            return evaluate_function(self.jacobian, (x, u), (self.size, self.states))
        return self.differences(x, u, spread).value

    def differences(self, x: Array, u: Array, spread: Array) -> Slope:
        """Return the Jacobian by x, computed by differences, and its error bound."""
        many = differences.count_points(self.states)
        within = partial(angles.turn_differences, self.periods) if self.periods else None

        def seen(points: Array, which: np.ndarray | slice) -> Array:
            return self.value(points, np.tile(u[:, which], many) if self.controlled else u)

        return differences.compute_slope(seen, x, spread, self.size, within)


INSIDE = ("x", "dt", "u", "w")
MOVED = (INSIDE[:2], INSIDE[:3])
SEEN = ("x", "u")
DISTURBED = ("x", "u", "v")
"""Arguments that the functions of a process and of an observation may take."""


def evaluate_function(
    function: Callable[..., Any], arguments: tuple[Array, ...], shape: tuple[int, ...]
) -> Array:
    """Return a function's result as float64 (*shape, K). Raises ValueError if the result has another shape."""
    result = np.asarray(function(*arguments))
    keys = arguments[0].shape[-1]
    if shape == (1,) and result.shape == (keys,):
        result = result[None]  # a single measurement or state without its axis
    if result.shape != (*shape, keys):
        raise ValueError(f"it gives shape {result.shape} for {keys} keys where {(*shape, keys)} is needed")
    if result.dtype.kind not in "fiu":
        raise ValueError(f"it gives {result.dtype}, not numbers")
    return np.asarray(result, np.float64)


def parse_process(
    definition: Mapping[str, Any], states: int, controls: Sequence[str], folder: str | None
) -> FunctionProcess:
    """Read a process of kind `function`. Raises ModelError."""
    fields = ("kind", "name", "f", "Q", "q", "jacobian", "noise_jacobian", "noise_scale", "offset")
    checks.check_keys("process", definition, fields)
    f = _parse_function("process", definition, "f", folder, (*MOVED, INSIDE), 3)
    if f is None:
        raise ModelError("process.f", "is missing", "name a function, such as f: my_module:move")
    jacobian, inside = (
        _parse_function("process", definition, key, folder, MOVED, 3)
        for key in ("jacobian", "noise_jacobian")
    )
    q = _parse_function("process", definition, "q", folder, (("dt",), ("dt", "u")), 1)
    if (q is None) == (definition.get("Q") is None):
        raise ModelError(
            "process.Q",
            "is missing" if q is None else "is given beside q",
            f"write the noise of one row as a {states} x {states} matrix Q, or name a function q of dt",
        )
    noisy = f.count == len(INSIDE)
    if inside is not None and not noisy:
        remedy = "remove it, or let f take x, dt, u and w"
        raise ModelError("process.noise_jacobian", f"{f.name} takes no noise w", remedy)
    size = _count_noise_entries(definition, q, len(controls)) if noisy else states
    Q = () if q is not None else columns.parse_covariance_cells("process.Q", definition["Q"], size, controls)
    offset = _parse_offset("process", definition, states, controls)
    scale = noise_scale("process", definition, controls)
    return FunctionProcess(states, f, jacobian, Q, q, scale, offset, size, inside)


def _count_noise_entries(definition: Mapping[str, Any], q: Call | None, controls: int) -> int:
    """Return the number of entries of the noise w that f takes, which is the number of rows of Q."""
    if q is None:
        Q = definition["Q"]
        return len(Q) if isinstance(Q, (list, tuple)) and Q else 1
    with np.errstate(all="ignore"):
        try:
            found = np.asarray(q(np.ones(1), np.zeros((controls, 1))))
        except Exception as error:
            problem = f"{q.name} fails at dt = 1 with {type(error).__name__}: {error}"
            raise ModelError("process.q", problem, "it takes arrays whose last axis is the keys") from error
    if found.ndim != 3:
        raise ModelError(
            "process.q",
            f"{q.name}: it gives shape {found.shape}",
            "return an array (r, r, K) for r entries of w",
        )
    return len(found)


def _parse_offset(
    section: str, definition: Mapping[str, Any], size: int, controls: Sequence[str]
) -> tuple[Cell, ...]:
    """Return the offset that is added to a function's values, () if none is given. Raises ModelError."""
    written = definition.get("offset")
    return () if written is None else columns.parse_vector_cells(f"{section}.offset", written, size, controls)


def parse_observation(
    definition: Mapping[str, Any],
    states: int,
    measurements: int,
    periods: tuple[float, ...],
    folder: str | None,
) -> FunctionObservation:
    """Read an observation that a function h describes. Raises ModelError."""
    fields = ("h", "R", "jacobian", "noise_jacobian", "offset", "noise_scale", "wrap")
    checks.check_keys("observation", definition, fields)
    h = _parse_function("observation", definition, "h", folder, (SEEN[:1], SEEN, DISTURBED), 1)
    jacobian, inside = (
        _parse_function("observation", definition, key, folder, (SEEN[:1], SEEN), 1)
        for key in ("jacobian", "noise_jacobian")
    )
    assert h is not None
    noisy = h.count == len(DISTURBED)
    if inside is not None and not noisy:
        remedy = "remove it, or let h take x, u and v"
        raise ModelError("observation.noise_jacobian", f"{h.name} takes no noise v", remedy)
    R = definition.get("R")
    size = len(R) if noisy and isinstance(R, (list, tuple)) and R else 1 if noisy else measurements
    return FunctionObservation(measurements, states, h, jacobian, periods, size, inside)


def parse_observation_offset(
    definition: Mapping[str, Any], measurements: int, controls: Sequence[str]
) -> tuple[Cell, ...]:
    """Return the offset that is added to the values of h, () if none is given. Raises ModelError."""
    return _parse_offset("observation", definition, measurements, controls)


def _parse_function(
    section: str,
    definition: Mapping[str, Any],
    key: str,
    folder: str | None,
    allowed: Sequence[Sequence[str]],
    usual: int,
) -> Call | None:
    """Return the function that a section names under `key`. Raises ModelError."""
    if definition.get(key) is None:
        return None
    field = f"{section}.{key}"
    find(definition[key], folder, field)
    function = Named(definition[key], folder)
    return Call(function, count_arguments(field, function, allowed, usual))


def check_process(
    process: FunctionProcess,
    mean: tuple[float, ...],
    spread: tuple[float, ...],
    controls: int,
    sure: bool,
) -> None:
    """Check a process at and near the initial mean. Raises ModelError.

    mean, spread: (n,) initial mean and standard deviations; sure: whether all keys start at this mean.
    """
    x, sigma = _choose_check_points(mean, spread)
    dt = np.array([1.0, 0.5, 1.0])
    n, r = process.size, process.noise_size
    w = (np.zeros((r, 3)),) if process.noise_inside else ()
    trials = _Trials(controls, sure)
    for u in trials.inputs(3):
        trials.check("process.f", process.f, (x, dt, u, *w), (n,))
        if process.jacobian is not None:
            trials.check("process.jacobian", process.jacobian, (x, dt, u), (n, n))
            with np.errstate(all="ignore"):
                given, numeric = process.slope(x, dt, u, sigma), process.differences(x, dt, u, sigma)
            trials.check_slope("process.jacobian", given, numeric, sigma)
        if process.q is not None:
            trials.check("process.q", process.q, (dt, u), (r, r))
            for key in range(len(dt)):
                Q = evaluate_function(process.q, (dt, u), (r, r))[:, :, key]
                if np.isfinite(Q).all() or not controls:
                    checks.parse_covariance("process.q", Q, r)
        if process.noise_jacobian is not None:
            trials.check("process.noise_jacobian", process.noise_jacobian, (x, dt, u), (n, r))
            ones = np.ones((r, 3))
            with np.errstate(all="ignore"):
                given = process.compute_noise_slope(x, dt, u, ones)
                numeric = process.compute_noise_differences(x, dt, u, ones)
            trials.check_slope("process.noise_jacobian", given, numeric, ones)


def check_observation(
    observation: FunctionObservation,
    mean: tuple[float, ...],
    spread: tuple[float, ...],
    controls: int,
    sure: bool,
) -> None:
    """Check an observation at and near the initial mean. Raises ModelError.

    mean, spread: (n,) initial mean and standard deviations; sure: whether all keys start at this mean.
    """
    x, sigma = _choose_check_points(mean, spread)
    m, n = observation.size, observation.states
    trials = _Trials(controls if observation.controlled else 0, sure)
    for u in trials.inputs(3):
        v = (np.zeros((observation.noise_size, 3)),) if observation.noise_inside else ()
        trials.check("observation.h", observation.h, (x, u, *v), (m,))
        if observation.noise_jacobian is not None:
            s = observation.noise_size
            trials.check("observation.noise_jacobian", observation.noise_jacobian, (x, u), (m, s))
            ones = np.ones((s, 3))
            with np.errstate(all="ignore"):
                given, numeric = (
                    observation.compute_noise_slope(x, u, ones),
                    observation.compute_noise_differences(x, u, ones),
                )
            trials.check_slope("observation.noise_jacobian", given, numeric, ones)
        if observation.jacobian is not None:
            trials.check("observation.jacobian", observation.jacobian, (x, u), (m, n))
            with np.errstate(all="ignore"):
                given, numeric = observation.slope(x, u, sigma), observation.differences(x, u, sigma)
            trials.check_slope("observation.jacobian", given, numeric, sigma)


def compute_deviations(covariance: tuple[float, ...], n: int) -> tuple[float, ...]:
    """Return the standard deviations of a packed covariance."""
    return tuple(float(np.sqrt(covariance[packed_index(i, i)])) for i in range(n))


def _choose_check_points(mean: tuple[float, ...], spread: tuple[float, ...]) -> tuple[Array, Array]:
    """Return three points for the checks, (n, 3), starting with the initial mean, and standard deviations (n, 3)."""
    m, sigma = np.array(mean)[:, None], np.array(spread)[:, None]
    offsets = np.array([[0.0, 0.1, -0.07]]) * (1.0 + 0.1 * np.arange(len(m)))[:, None]
    small = np.minimum(sigma, np.maximum(np.abs(m), 1.0))
    return np.asarray(m + offsets * small, float), np.repeat(sigma, 3, axis=1)


@dataclass(frozen=True)
class _Trials:
    """Checks of functions at a few values of the inputs; controls: number of inputs, sure: as in `check_process`.

    A function may be undefined at some inputs, and the spec does not give their range. A model with inputs may
    therefore return non-finite results in the checks; a row with such a result is flagged later.
    """

    controls: int
    sure: bool

    @property
    def finite(self) -> bool:
        """Whether a function's result at the initial mean must be finite."""
        return self.sure and not self.controls

    def inputs(self, keys: int) -> list[Array]:
        """Return the inputs of the checks, one array (c, K) for each check."""
        return [np.full((self.controls, keys), a) for a in (TRIED if self.controls else TRIED[:1])]

    def check(self, field: str, function: Call, arguments: tuple[Array, ...], shape: tuple[int, ...]) -> None:
        """Check the values of one function, as `_check` does. Raises ModelError."""
        _check(field, function, arguments, shape, self.finite)

    def check_slope(self, field: str, given: Array, numeric: Slope, sigma: Array) -> None:
        """Check a Jacobian against differences. Raises ModelError."""
        _check_slope(field, given, numeric, sigma, self.finite)


def _check(
    field: str, function: Call, offered: tuple[Array, ...], shape: tuple[int, ...], finite: bool
) -> None:
    """Check a function: shape, finite values (if `finite`), independence of the keys, and unchanged arguments."""
    arguments = offered[: function.count]
    copies = tuple(a.copy() for a in arguments)
    keys = arguments[0].shape[-1]
    try:
        with np.errstate(all="ignore"):
            whole = evaluate_function(function, copies, shape)
            each = [
                evaluate_function(function, tuple(a[..., k : k + 1] for a in copies), shape)
                for k in range(keys)
            ]
    except ModelError:
        raise
    except ValueError as error:
        needed = ", ".join(map(str, shape))
        raise ModelError(field, f"{function.name}: {error}", f"return an array ({needed}, K)") from error
    except Exception as error:
        given = " and ".join(str(a.shape) for a in arguments)
        raise ModelError(
            field,
            f"{function.name} fails at the initial mean with {type(error).__name__}: {error}",
            f"it takes arrays whose last axis is the keys, here of shapes {given}",
        ) from error
    if not all(np.array_equal(a, b) for a, b in zip(arguments, copies, strict=True)):
        raise ModelError(field, f"{function.name} changes its arguments", "let it return new arrays")
    if finite and not np.isfinite(whole[..., 0]).all():
        raise ModelError(
            field,
            f"{function.name} is not finite at the initial mean",
            "start the state where the function is defined",
        )
    if not np.allclose(whole, np.concatenate(each, axis=-1), rtol=1e-9, atol=1e-12, equal_nan=True):
        raise ModelError(
            field,
            f"{function.name} of several keys at once differs from that of each",
            "let it act on each key by itself: elementwise along the last axis",
        )


def _check_slope(field: str, given: Array, numeric: Slope, sigma: Array, finite: bool) -> None:
    """Compare a Jacobian (r, n, K) with differences, in units of each state's standard deviation.

    An entry is wrong if it deviates from the differences by more than their error bound.
    """
    b, scale = numeric.value, np.where(sigma > 0.0, sigma, 1.0)
    with np.errstate(all="ignore"):  # differences may leave the function's domain
        allowed = 4.0 * numeric.error + SLACK * differences.compute_row_sizes(b, sigma) / scale
        wrong = ~(np.abs(given - b) <= allowed) & np.isfinite(b) & np.isfinite(allowed)
    if finite:
        wrong[..., 0] |= ~np.isfinite(given[..., 0])
    if wrong.any():
        i, j, k = (int(a) for a in np.argwhere(wrong)[0])
        raise ModelError(
            f"{field}",
            f"entry [{i}][{j}] is {given[i, j, k]:.6g}, and by differences {b[i, j, k]:.6g}",
            "mend it, or leave it out: then differences are used",
        )
