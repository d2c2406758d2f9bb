"""Random models and random ragged rows for them."""

from typing import Any

import numpy as np

import kalman


def random_covariance(rng: np.random.Generator, n: int, scale: float = 1.0) -> list[list[float]]:
    a = rng.normal(size=(n, n))
    return (scale * (a @ a.T + 0.3 * np.eye(n))).tolist()


def random_process(rng: np.random.Generator, kind: str, n: int, c: int) -> dict[str, Any]:
    if kind == "random_walk":
        return {"kind": kind, "variance": rng.uniform(0.1, 2)}
    if kind == "local_linear_trend":
        return {"kind": kind, "level_variance": rng.uniform(0.1, 2), "slope_variance": rng.uniform(0.1, 2)}
    if kind == "constant_velocity":
        return {"kind": kind, "acceleration_variance": rng.uniform(0.1, 2), "dimensions": n // 2}
    if kind == "constant_acceleration":
        return {"kind": kind, "jerk_variance": rng.uniform(0.001, 0.02), "dimensions": n // 3}
    if kind == "damped_trend":
        names = ("level_variance", "slope_variance", "damping")
        return {"kind": kind, **{name: rng.uniform(0.1, 2) for name in names}}
    if kind == "seasonal_trigonometric":
        return {
            "kind": kind,
            "period": rng.uniform(2, 12),
            "variance": rng.uniform(0.1, 2),
            "harmonics": n // 2,
        }
    if kind == "seasonal_dummy":
        return {"kind": kind, "period": n + 1, "variance": rng.uniform(0.1, 2)}
    if kind == "continuous":
        A = rng.normal(size=(n, n))
        A -= (np.linalg.eigvals(A).real.max() + rng.uniform(0.05, 1)) * np.eye(n)
        return {
            "kind": kind,
            "A": A.tolist(),
            "diffusion": random_covariance(rng, n),
            "offset": rng.normal(size=n).tolist(),
        }
    if kind == "ornstein_uhlenbeck":
        return {
            "kind": kind,
            "rate": rng.uniform(0.1, 2),
            "variance": rng.uniform(0.1, 2),
            "mean": rng.normal(),
        }
    if kind == "sum":
        parts = [
            random_process(rng, part, size, 0)
            for part, size in (("local_linear_trend", 2), ("ornstein_uhlenbeck", 1))
        ]
        return {"kind": kind, "parts": parts}
    F = rng.normal(size=(n, n))
    F *= 0.95 / np.abs(np.linalg.eigvals(F)).max()
    process = {"kind": "explicit", "F": F.tolist(), "Q": random_covariance(rng, n)}
    if c:
        process["B"] = rng.normal(size=(n, c)).tolist()
    return process


SIZES = {
    "random_walk": 1,
    "local_linear_trend": 2,
    "damped_trend": 2,
    "constant_velocity": 4,
    "constant_acceleration": 3,
    "ornstein_uhlenbeck": 1,
    "seasonal_trigonometric": 4,
    "continuous": 3,
    "sum": 3,
}
"""The structures that know the time, and how many states they have here."""
STEPS = {"seasonal_dummy": 3}
"""Those that take one step a row, besides `explicit`."""


def random_definition(
    rng: np.random.Generator, kind: str, n: int = 2, m: int = 1, c: int = 0
) -> dict[str, Any]:
    n = (SIZES | STEPS).get(kind, n)
    H = rng.normal(size=(m, n))
    H[rng.random((m, n)) < 0.2] = 0.0
    return {
        "filter": "linear",
        "states": [f"x{i}" for i in range(n)],
        "measurement": [f"y{i}" for i in range(m)],
        "control": [f"u{i}" for i in range(c)],
        "process": random_process(rng, kind, n, c),
        "observation": {"H": H.tolist(), "R": random_covariance(rng, m)},
        "initial": {"mean": rng.normal(size=n).tolist(), "covariance": random_covariance(rng, n, 3.0)},
    }


def random_rows(
    rng: np.random.Generator, definition: dict[str, Any], keys: int, longest: int, missing: float = 0.25
) -> kalman.SortedRows:
    """Rows of several lengths, some keys without any, with irregular times that sometimes repeat."""
    count = rng.integers(0, longest + 1, keys)
    n = int(count.sum())
    gaps = rng.choice([0, 1_000, 2_000_000, 137_000, 10_000_000], n, p=[0.1, 0.1, 0.4, 0.3, 0.1])
    y = rng.normal(size=(len(definition["measurement"]), n)) * 3
    y[rng.random(y.shape) < missing] = np.nan
    u = rng.normal(size=(len(definition["control"]), n))
    return kalman.SortedRows(np.repeat(np.arange(keys), count), np.cumsum(gaps).astype(np.int64), y, u)


def same(a: Any, b: Any) -> None:
    """Assert that two (nested) tuples or dicts of arrays are equal to the last bit, NaN to NaN."""
    if isinstance(a, np.ndarray):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a:
            same(a[name], b[name])
    else:
        for x, y in zip(a, b, strict=True):
            same(x, y)


def states_with(model: Any, parameters: Any) -> Any:
    """Return the states of K keys without rows, each with its own learned parameters (d, K)."""
    states = kalman.initial_states(model, parameters.shape[1])
    return states._replace(values=model.with_parameters(states.values, parameters))
