"""A model's own functions: the process x' = f(x, dt, u) + w, and the observation y = h(x) + v.

x is (n, K), dt (K,), u (c, K): each function works on K keys at once, each by itself. Their results are checked at
the initial mean when the model is built; Jacobians that a model does not give are taken by differences.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kalman.linalg.entries import Entry
from kalman.linalg.packing import packed_index
from kalman.models import angles, checks, columns, differences
from kalman.models.columns import Cell, Column, resolve
from kalman.models.differences import Slope
from kalman.models.inputs import noise_scale
from kalman.models.named import Named, find
from kalman.models.structure import Parameter
from kalman.types import Array, ModelError

SLACK = 1e-5
"""By how much of a row's largest slope, in standard deviations, a given Jacobian may differ from differences."""


@dataclass(frozen=True)
class FunctionProcess:
    """x' = f(x, dt, u) + w, w ~ N(0, Q): once a row, dt being the time since the previous row.

    Q (packed) is the noise of each row, or q gives it for each dt as (n, n, K); `scale` multiplies it.
    """

    size: int
    f: Named
    jacobian: Named | None
    Q: tuple[Cell, ...]
    q: Named | None
    scale: Cell = 1.0
    controlled = True
    observes = None

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Q, where it is a matrix."""
        return () if self.q is not None else (Parameter("Q", "covariance", self.Q),)

    def value(self, x: Array, dt: Array, u: Array) -> Array:
        """Return f(x, dt, u) (n, K)."""
        return called(self.f, (x, dt, u), (self.size,))

    def slope(self, x: Array, dt: Array, u: Array, spread: Array) -> Array:
        """Return the Jacobian of f by x (n, n, K), by differences where the model gives none.

        spread (n, K): standard deviations, which the steps of the differences are fitted to.
        """
        if self.jacobian is not None:
            return called(self.jacobian, (x, dt, u), (self.size, self.size))
        return self.differences(x, dt, u, spread).value

    def differences(self, x: Array, dt: Array, u: Array, spread: Array) -> Slope:
        """Return the Jacobian by differences, and what it may be wrong by."""
        many = differences.points_of(self.size)

        def moved(points: Array, which: np.ndarray | slice) -> Array:
            return self.value(points, np.tile(dt[which], many), np.tile(u[:, which], many))

        return differences.slope(moved, x, spread, self.size)

    def guards(self, u: Sequence[Entry]) -> list[Entry]:
        """Return entries that are zero or more where what the row's columns say of the noise is possible."""
        guards = resolve([self.scale], u) if isinstance(self.scale, Column) else []
        return [*guards, *([columns.psd(resolve(self.Q, u))] if columns.used(self.Q) else [])]

    def noise(self, dt: Array) -> Array | None:
        """Return the packed Q of each key where it depends on dt."""
        if self.q is None:
            return None
        full = called(self.q, (dt,), (self.size, self.size))
        return np.array([full[i, j] for i in range(self.size) for j in range(i + 1)])


@dataclass(frozen=True)
class FunctionObservation:
    """y = h(x) + v, of m measurements and n states; periods of those that are angles (`kalman.models.angles`)."""

    size: int
    states: int
    h: Named
    jacobian: Named | None
    periods: tuple[float, ...] = ()

    def value(self, x: Array) -> Array:
        """Return h(x) (m, K)."""
        return called(self.h, (x,), (self.size,))

    def slope(self, x: Array, spread: Array) -> Array:
        """Return the Jacobian of h by x (m, n, K), by differences where the model gives none."""
        if self.jacobian is not None:
            return called(self.jacobian, (x,), (self.size, self.states))
        return self.differences(x, spread).value

    def differences(self, x: Array, spread: Array) -> Slope:
        """Return the Jacobian by differences, and what it may be wrong by."""
        within = partial(angles.within_half, self.periods) if self.periods else None
        return differences.slope(lambda points, which: self.value(points), x, spread, self.size, within)


def called(function: Callable[..., Any], arguments: tuple[Array, ...], shape: tuple[int, ...]) -> Array:
    """Return a function's result as float64 (*shape, K). Raises ValueError where it has another shape."""
    result = np.asarray(function(*arguments))
    keys = arguments[0].shape[-1]
    if shape == (1,) and result.shape == (keys,):
        result = result[None]  # one measurement or state without its axis
    if result.shape != (*shape, keys):
        raise ValueError(f"it gives shape {result.shape} for {keys} keys where {(*shape, keys)} is needed")
    if result.dtype.kind not in "fiu":
        raise ValueError(f"it gives {result.dtype}, not numbers")
    return np.asarray(result, np.float64)


def parse_process(
    definition: Mapping[str, Any], states: int, controls: Sequence[str], folder: str | None
) -> FunctionProcess:
    """Read a process of kind `function`. Raises ModelError."""
    checks.known("process", definition, ("kind", "name", "f", "Q", "q", "jacobian", "noise_scale"))
    f, jacobian, q = (_named("process", definition, key, folder) for key in ("f", "jacobian", "q"))
    if f is None:
        raise ModelError("process.f", "is missing", "name a function, such as f: my_module:move")
    if (q is None) == (definition.get("Q") is None):
        raise ModelError(
            "process.Q",
            "is missing" if q is None else "is given beside q",
            f"write the noise of one row as a {states} x {states} matrix Q, or name a function q of dt",
        )
    Q = () if q is not None else columns.covariance("process.Q", definition["Q"], states, controls)
    return FunctionProcess(states, f, jacobian, Q, q, noise_scale("process", definition, controls))


def parse_observation(
    definition: Mapping[str, Any],
    states: int,
    measurements: int,
    periods: tuple[float, ...],
    folder: str | None,
) -> FunctionObservation:
    """Read an observation by a function h. Raises ModelError."""
    checks.known("observation", definition, ("h", "R", "jacobian", "noise_scale", "wrap"))
    h, jacobian = (_named("observation", definition, key, folder) for key in ("h", "jacobian"))
    assert h is not None
    return FunctionObservation(measurements, states, h, jacobian, periods)


def _named(section: str, definition: Mapping[str, Any], key: str, folder: str | None) -> Named | None:
    if definition.get(key) is None:
        return None
    find(definition[key], folder, f"{section}.{key}")
    return Named(definition[key], folder)


def check_process(
    process: FunctionProcess, mean: tuple[float, ...], spread: tuple[float, ...], controls: int
) -> None:
    """Check a process at the initial mean, (n,), and near it. Raises ModelError."""
    x, sigma = _places(mean, spread)
    dt = np.array([1.0, 0.5, 1.0])
    u = np.zeros((controls, 3))
    n = process.size
    _check("process.f", process.f, (x, dt, u), (n,))
    if process.jacobian is not None:
        _check("process.jacobian", process.jacobian, (x, dt, u), (n, n))
        with np.errstate(all="ignore"):
            given, numeric = process.slope(x, dt, u, sigma), process.differences(x, dt, u, sigma)
        _check_slope("process.jacobian", given, numeric, sigma)
    if process.q is not None:
        _check("process.q", process.q, (dt,), (n, n))
        for key in range(len(dt)):
            checks.covariance("process.q", called(process.q, (dt,), (n, n))[:, :, key], n)


def check_observation(
    observation: FunctionObservation, mean: tuple[float, ...], spread: tuple[float, ...]
) -> None:
    """Check an observation at the initial mean, (n,), and near it. Raises ModelError."""
    x, sigma = _places(mean, spread)
    m, n = observation.size, observation.states
    _check("observation.h", observation.h, (x,), (m,))
    if observation.jacobian is not None:
        _check("observation.jacobian", observation.jacobian, (x,), (m, n))
        with np.errstate(all="ignore"):
            given, numeric = observation.slope(x, sigma), observation.differences(x, sigma)
        _check_slope("observation.jacobian", given, numeric, sigma)


def deviations(covariance: tuple[float, ...], n: int) -> tuple[float, ...]:
    """Return the standard deviations of a packed covariance."""
    return tuple(float(np.sqrt(covariance[packed_index(i, i)])) for i in range(n))


def _places(mean: tuple[float, ...], spread: tuple[float, ...]) -> tuple[Array, Array]:
    """Return the points of the checks, (n, 3), the initial mean first, and the standard deviations there."""
    m, sigma = np.array(mean)[:, None], np.array(spread)[:, None]
    offsets = np.array([[0.0, 0.1, -0.07]]) * (1.0 + 0.1 * np.arange(len(m)))[:, None]
    small = np.minimum(sigma, np.maximum(np.abs(m), 1.0))
    return np.asarray(m + offsets * small, float), np.repeat(sigma, 3, axis=1)


def _check(field: str, function: Named, arguments: tuple[Array, ...], shape: tuple[int, ...]) -> None:
    """Check shape, finiteness, independence of keys, and that the arguments are unchanged."""
    copies = tuple(a.copy() for a in arguments)
    keys = arguments[0].shape[-1]
    try:
        with np.errstate(all="ignore"):
            whole = called(function, copies, shape)
            each = [called(function, tuple(a[..., k : k + 1] for a in copies), shape) for k in range(keys)]
    except ModelError:
        raise
    except ValueError as error:
        needed = ", ".join(map(str, shape))
        raise ModelError(field, f"{function.name}: {error}", f"return an array ({needed}, K)") from error
    except Exception as error:
        raise ModelError(
            field,
            f"{function.name} fails at the initial mean with {type(error).__name__}: {error}",
            "it takes arrays whose last axis is the keys",
        ) from error
    if not all(np.array_equal(a, b) for a, b in zip(arguments, copies, strict=True)):
        raise ModelError(field, f"{function.name} changes its arguments", "let it return new arrays")
    if not np.isfinite(whole[..., 0]).all():
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


def _check_slope(field: str, given: Array, numeric: Slope, sigma: Array) -> None:
    """Compare a Jacobian (r, n, K) with differences, in units of each state's standard deviation.

    It is wrong where it is off by more than the differences may be, by their own account.
    """
    b, scale = numeric.value, np.where(sigma > 0.0, sigma, 1.0)
    with np.errstate(all="ignore"):  # differences may leave the function's domain
        allowed = 4.0 * numeric.error + SLACK * differences.row_size(b, sigma) / scale
        wrong = ~(np.abs(given - b) <= allowed) & np.isfinite(b) & np.isfinite(allowed)
    wrong[..., 0] |= ~np.isfinite(given[..., 0])
    if wrong.any():
        i, j, k = (int(a) for a in np.argwhere(wrong)[0])
        raise ModelError(
            f"{field}",
            f"entry [{i}][{j}] is {given[i, j, k]:.6g}, and by differences {b[i, j, k]:.6g}",
            "mend it, or leave it out: then differences are used",
        )
