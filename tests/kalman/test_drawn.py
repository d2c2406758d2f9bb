"""Filter, smoother, fixed lag, forecast and likelihood of random structures against arithmetic in 200 digits."""

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kalman
from kalman.evaluation.forecast import forecast
from kalman.smoothers.smooth import smooth
from tests.kalman.support.drawn import LAG, Drawn, Exact, draw, exact, rows_of
from tests.kalman.support.oracles import UNIT

FIXTURE = Path(__file__).parent.parent / "fixtures" / "drawn.npz"
LIVE = range(10_000, 10_020)
PARTS = 10
"""In which the kept results are compared, as slow tests; some of the first part are compared always."""
TOLERANCE = 1e-6
"""Of a standard deviation, and of a variance."""


@cache
def kept() -> list[Exact]:
    """Return the exact results of the models 0, 1, 2, ... that `tests.fixtures.make_drawn` wrote."""
    with np.load(FIXTURE) as found:
        parts = [np.split(found[name], found[f"{name}_ends"][:-1]) for name in Exact._fields]
        n = [len(kalman.build(draw(seed).definition).states) for seed in range(len(parts[0]))]
    result = []
    for states, each in zip(n, zip(*parts, strict=True), strict=True):
        k = len(each[0])
        widths = (None, states, None, states, None, None, 2)
        shaped = [a if w is None else a.reshape(-1, w) for a, w in zip(each, widths, strict=True)]
        shaped[2], shaped[4] = shaped[2].reshape(k, -1), shaped[4].reshape(k, -1)
        result.append(Exact(*shaped))
    return result


def compare(drawn: Drawn, truth: Exact) -> None:
    model: Any = kalman.build(drawn.definition)
    rows, start = rows_of(drawn), kalman.initial_states(model, 1)
    states, outputs, smoothed = smooth(model, start, rows, UNIT)
    assert not outputs.flag.any()
    assert outputs.log_likelihood.sum() == pytest.approx(
        float(np.ravel(truth.log_likelihood)[0]), rel=1e-9, abs=TOLERANCE
    )
    noise = noise_of(model)
    at = truth.rows
    close(outputs.mean[:, at], outputs.covariance[:, at], truth.filtered, truth.covariances, noise)
    close(smoothed.mean[:, at], smoothed.covariance[:, at], truth.smoothed, truth.smoothed_covariances, noise)
    lagging: Any = kalman.build({**drawn.definition, "smoothing": {"lag": LAG}})
    _, lagged = kalman.run(lagging, kalman.initial_states(lagging, 1), rows, UNIT)
    n, low, here = len(noise), np.tril_indices(len(noise)), list(at).index(len(drawn.y) - 1 - LAG)
    packed = lagged.extra["lagged_covariance"][:, -1:].reshape(n, n, 1)[low]
    wanted = truth.smoothed[here : here + 1], truth.smoothed_covariances[here : here + 1]
    close(lagged.extra["lagged_mean"][:, -1:], packed, *wanted, noise)
    ahead = forecast(model, states, np.ones((len(truth.forecast), 1)))
    found = ahead.measurement_mean[0].T, ahead.measurement_covariance[0].T
    for k, (mean, variance) in enumerate(truth.forecast):
        close(
            found[0][:, k : k + 1],
            found[1][:, k : k + 1],
            np.array([[mean]]),
            np.array([[variance]]),
            noise[:1],
        )


def close(
    mean: np.ndarray, covariance: np.ndarray, means: np.ndarray, truth: np.ndarray, noise: np.ndarray
) -> None:
    """Compare means (n, k) and packed covariances (p, k) in units of each state's true deviation."""
    n = len(mean)
    i, j = np.tril_indices(n)
    np.testing.assert_array_equal(np.isinf(covariance.T)[~np.isnan(truth)], np.isinf(truth)[~np.isnan(truth)])
    variances = truth[:, i == j] + 1e-9 * noise
    known = np.isfinite(variances)
    assert known.any() or np.isinf(variances).any()
    size = np.sqrt(np.where(known, variances, 1.0))
    away = np.abs(mean.T - means) / (size + 1e-5 * np.abs(means) + 1e-290)
    assert away[known].max(initial=0.0) < TOLERANCE
    finite = np.isfinite(truth) & known[:, i] & known[:, j]
    with np.errstate(invalid="ignore"):
        away = np.abs(covariance.T - truth) / (size[:, i] * size[:, j] + 1e-290)
    assert away[finite].max(initial=0.0) < TOLERANCE


def noise_of(model: Any) -> np.ndarray:
    """Return the variances (n,) that a step of one second adds."""
    _, Q, _ = model.process.transition(np.ones(1), [], {p.name: p.value for p in model.parameters})
    n = len(model.states)
    return np.array([float(np.ravel(Q[i * (i + 1) // 2 + i])[0]) for i in range(n)])


def test_against_some_results_that_were_kept():
    for seed in range(0, 200, 4 * PARTS):
        compare(draw(seed), kept()[seed])


@pytest.mark.slow
@pytest.mark.parametrize("first", range(PARTS))
def test_against_results_that_were_kept(first):
    for seed in range(first, 200, PARTS):
        compare(draw(seed), kept()[seed])


@pytest.mark.parametrize(
    "seed", [pytest.param(k, marks=pytest.mark.slow if k % 2 == 0 else ()) for k in LIVE]
)
def test_against_results_of_now(seed):
    drawn = draw(seed)
    compare(drawn, exact(drawn))


@pytest.mark.soak
def test_against_thousands():
    """KALMAN_DRAWN: how many."""
    wrong = []
    for seed in range(20_000, 20_000 + int(os.environ.get("KALMAN_DRAWN", "3000"))):
        drawn = draw(seed)
        try:
            compare(drawn, exact(drawn))
        except AssertionError as error:
            wrong.append((seed, str(error).splitlines()[0]))
    assert not wrong, wrong
