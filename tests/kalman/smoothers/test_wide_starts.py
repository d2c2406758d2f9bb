"""Smoothing after proper starts of 1e2 to 1e14 measurement variances, against rational numbers without rounding."""

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

import kalman
from kalman.filters.linear import LinearFilter
from kalman.learning.em_entries import compute_second_moments
from kalman.smoothers.smooth import smooth
from tests.kalman.support import rationals
from tests.kalman.support.oracles import UNIT, full

STARTS = [1e2, 1e4, 1e6, 1e8, 1e10, 1e12, 1e13, 1e14]
EPS = float(np.finfo(float).eps)
SLACK = 20.0
KINDS: dict[str, dict[str, Any]] = {
    "linear": {},
    "extended": {"filter": "extended"},
    "information": {"form": "information"},
    "unscented": {"filter": "unscented"},
    "cubature": {"filter": "cubature"},
    "gated": {"robust": {"gate": {"probability": 0.999999999}}},
    "extended, gated": {"filter": "extended", "robust": {"gate": {"probability": 0.999999999}}},
    "imm": {"filter": "imm", "transition": [[0.9, 0.1], [0.2, 0.8]]},
    "mmae": {"filter": "mmae"},
    "square_root": {"form": "square_root"},
    "extended, square_root": {"filter": "extended", "form": "square_root"},
    "unscented, square_root": {"filter": "unscented", "form": "square_root"},
    "cubature, square_root": {"filter": "cubature", "form": "square_root"},
}
BY_POINTS = {
    "unscented": {"filter": "unscented"},
    "unscented, by a difference": {
        "filter": "unscented",
        "unscented": {"alpha": 1.0, "beta": 0.0, "kappa": -0.3},
    },
    "cubature": {"filter": "cubature"},
    "cubature, fading": {"filter": "cubature", "robust": {"fading": 1.05}},
    "unscented, square_root": {"filter": "unscented", "form": "square_root"},
    "cubature, square_root": {"filter": "cubature", "form": "square_root"},
}
LAGGED = [kind for kind in KINDS if kind not in ("imm", "mmae")]
TREND = {
    "F": [[1.0, 1.0], [0.0, 1.0]],
    "Q": [[0.01, 0.0], [0.0, 0.01]],
    "H": [[1.0, 0.0]],
    "R": [[1.0]],
}
DUMMIES = {
    "F": [[1, 1, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, -1, -1, -1], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0]],
    "Q": np.diag([1e-3, 1e-4, 1e-3, 0, 0]).tolist(),
    "H": [[1.0, 0.0, 1.0, 0.0, 0.0]],
    "R": [[1e-3]],
}
GAS = [160.1, 129.7, 84.8, 120.1, 160.1, 124.9, 84.8, 116.9, 169.7, 140.9, 89.7, 123.3, 187.3, 144.1]
LOG_GAS = np.log(GAS)
WALK = np.cumsum(np.random.default_rng(1).normal(size=14))


def definition(model: dict[str, Any], start: float, kind: str = "linear") -> dict[str, Any]:
    n, more = len(model["F"]), KINDS[kind]
    process = {"kind": "explicit", "F": model["F"], "Q": model["Q"]}
    observation = {"H": model["H"], "R": model["R"]}
    written: dict[str, Any] = {"process": process, "observation": observation}
    if more.get("filter") in ("imm", "mmae"):
        written = {"modes": [written, written]}
    return {
        "states": [f"x{i}" for i in range(n)],
        "measurement": ["y"],
        "initial": {"mean": [0.0] * n, "covariance": (start * np.eye(n)).tolist()},
        **more,
        **written,
    }


def rows_of(y: np.ndarray) -> kalman.SortedRows:
    time = np.arange(len(y)) * int(UNIT)
    return kalman.SortedRows(np.zeros(len(y), np.int64), time, y[None].copy(), np.empty((0, len(y))))


def smoothed(written: dict[str, Any], y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    model = kalman.build(written)
    _, outputs, found = smooth(model, kalman.initial_states(model, 1), rows_of(y), UNIT)
    assert not outputs.flag.any()
    return found.mean.T, full(found.covariance)


@lru_cache(maxsize=32)
def exact(name: str, start: float) -> tuple[np.ndarray, np.ndarray]:
    line = {**TREND, "Q": [[0.0, 0.0], [0.0, 0.0]]}
    model, y = {"trend": (TREND, WALK), "line": (line, WALK), "dummies": (DUMMIES, LOG_GAS)}[name]
    P = start * np.eye(len(model["F"]))
    return rationals.smoothed(model["F"], model["Q"], model["H"], model["R"], P, y[:, None])


@lru_cache(maxsize=32)
def faded(start: float, factor: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the trend's states where the predicted covariance is factor^2 F P F' + Q."""
    model, P = TREND, start * np.eye(2)
    return rationals.smoothed(model["F"], model["Q"], model["H"], model["R"], P, WALK[:, None], factor)


def rounding(model: dict[str, Any], start: float, kind: str) -> float:
    """What the filter's own form leaves of a double's digits: a covariance holds start and R in one number."""
    ratio = start / model["R"][0][0]
    return SLACK * EPS * (np.sqrt(ratio) if "square_root" in kind else ratio) + 1e-12


def compare(found: Any, truth: Any, tolerance: float) -> None:
    (x, V), (mean, covariance) = found, truth
    deviations = np.sqrt(np.diagonal(covariance, axis1=1, axis2=2))
    size = deviations[:, :, None] * deviations[:, None, :]
    assert np.abs((x - mean) / deviations).max() < tolerance
    assert np.abs((V - covariance) / size).max() < tolerance


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", STARTS)
def test_a_trend(kind, start):
    found = smoothed(definition(TREND, start, kind), WALK)
    compare(found, exact("trend", start), rounding(TREND, start, kind))
    assert (np.linalg.eigvalsh(found[1]) > 0.0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", STARTS)
def test_a_straight_line(kind, start):
    """Without process noise the first state is known far better from all rows than from those up to the second."""
    line = {**TREND, "Q": [[0.0, 0.0], [0.0, 0.0]]}
    found = smoothed(definition(line, start, kind), WALK)
    compare(found, exact("line", start), rounding(line, start, kind))


@pytest.mark.parametrize("kind", BY_POINTS)
@pytest.mark.parametrize("start", [1e2, 1e6, 1e10, 1e14])
def test_a_trend_by_points(kind, start):
    """The process as a function, which the unscented and cubature filters take by its values at points."""
    written = definition(TREND, start) | BY_POINTS[kind]
    process = {"kind": "function", "f": "tests.kalman.support.nonlinear:line", "Q": TREND["Q"]}
    fading = written.get("robust", {}).get("fading", 1.0)
    truth = exact("trend", start) if fading == 1.0 else faded(start, fading)
    compare(smoothed(written | {"process": process}, WALK), truth, rounding(TREND, start, kind))


@pytest.mark.parametrize("form", ["covariance", "square_root", "information"])
@pytest.mark.parametrize("start", [1e2, 1e6, 1e10, 1e14])
def test_fading(form, start):
    written = definition(TREND, start) | {"form": form, "robust": {"fading": 1.05}}
    compare(smoothed(written, WALK), faded(start, 1.05), rounding(TREND, start, form))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", [1e2, 1e6, 1e8])
def test_quarterly_dummies(kind, start):
    """The logarithm of the UK's gas consumption by quarters from 1960; a start of 1e6 is 1e9 measurement variances."""
    found = smoothed(definition(DUMMIES, start, kind), LOG_GAS)
    compare(found, exact("dummies", start), rounding(DUMMIES, start, kind))


@pytest.mark.parametrize("kind", LAGGED)
@pytest.mark.parametrize("start", STARTS)
def test_fixed_lag(kind, start):
    lag = 5
    model = kalman.build({**definition(TREND, start, kind), "smoothing": {"lag": lag}})
    _, outputs = kalman.run(model, kalman.initial_states(model, 1), rows_of(WALK[: lag + 1]), UNIT)
    mean = outputs.extra["lagged_mean"][:, lag:].T
    V = outputs.extra["lagged_covariance"][:, lag:].T.reshape(1, 2, 2)
    P = start * np.eye(2)
    truth = rationals.smoothed(TREND["F"], TREND["Q"], TREND["H"], TREND["R"], P, WALK[: lag + 1, None])
    compare((mean, V), [a[:1] for a in truth], rounding(TREND, start, kind))


@pytest.mark.parametrize("start", STARTS)
def test_the_moments_that_em_sums(start):
    """The regression of F and H takes sums of E[x x'] given all rows."""
    model = kalman.build(definition(TREND, start))
    rows = rows_of(WALK)
    assert isinstance(model, LinearFilter)
    starts, measured = compute_second_moments(model, model.initial(1), rows, 1, UNIT, np.ones(len(WALK)))
    mean, V = exact("trend", start)
    products = V + mean[:, :, None] * mean[:, None, :]
    tolerance = rounding(TREND, start, "linear")
    np.testing.assert_allclose(starts[:, 0], products[:-1].sum(axis=0)[np.tril_indices(2)], rtol=tolerance)
    np.testing.assert_allclose(measured[:, 0], products.sum(axis=0)[np.tril_indices(2)], rtol=tolerance)


@pytest.mark.parametrize("kind", ["imm", "mmae"])
def test_unlike_modes_forget_how_wide_the_start_was(kind):
    """Modes of different noise: a start of 1e8 tells what one of 1e5 does, but for its share of 1e-5."""
    quiet, wild = ({**TREND, "Q": [[q, 0.0], [0.0, q]]} for q in (1e-4, 1.0))
    found = []
    for start in (1e5, 1e8):
        written = definition(TREND, start, kind)
        processes = [{"kind": "explicit", "F": TREND["F"], "Q": each["Q"]} for each in (quiet, wild)]
        written["modes"] = [{**written["modes"][0], "process": process} for process in processes]
        found.append(smoothed(written, WALK))
    compare(found[1], found[0], 1e-3)
    assert (np.linalg.eigvalsh(found[1][1]) > 0.0).all()
