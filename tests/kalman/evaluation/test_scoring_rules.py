"""Scores of normal forecasts against their definitions: integrals and densities from SciPy."""

import numpy as np
from scipy.integrate import quad
from scipy.stats import norm

from kalman.evaluation.scoring_rules import crps, log_score


def test_crps_is_the_integral_that_defines_it() -> None:
    rng = np.random.default_rng(1)
    for mean, spread, y in rng.normal(size=(20, 3)) * [5.0, 1.0, 6.0]:
        spread = abs(spread) + 0.05
        below = quad(lambda x, m=mean, s=spread: norm.cdf(x, m, s) ** 2, -np.inf, y, limit=200)[0]
        above = quad(lambda x, m=mean, s=spread: norm.sf(x, m, s) ** 2, y, np.inf, limit=200)[0]
        found = crps(np.array([mean]), np.array([spread**2]), np.array([y]))
        np.testing.assert_allclose(found, below + above, rtol=1e-7)


def test_crps_of_a_forecast_without_spread_is_the_absolute_error() -> None:
    mean, y = np.array([1.0, 2.0]), np.array([3.5, 2.0])
    np.testing.assert_array_equal(crps(mean, np.zeros(2), y), [2.5, 0.0])
    np.testing.assert_allclose(crps(mean, np.full(2, 1e-30), y), [2.5, 0.0], atol=1e-14)


def test_scores_have_the_unit_of_the_measurement() -> None:
    mean, variance, y = np.array([1.0]), np.array([4.0]), np.array([2.0])
    np.testing.assert_allclose(
        crps(1e3 * mean, 1e6 * variance, 1e3 * y), 1e3 * crps(mean, variance, y), rtol=1e-14
    )


def test_the_log_score_is_minus_the_log_density() -> None:
    rng = np.random.default_rng(2)
    mean, y = rng.normal(size=(2, 3, 50)) * 10.0
    variance = rng.uniform(0.01, 9.0, (3, 50))
    np.testing.assert_allclose(
        log_score(mean, variance, y), -norm.logpdf(y, mean, np.sqrt(variance)), rtol=1e-13
    )
    assert log_score(mean, variance, np.full((3, 50), np.nan)).shape == (3, 50)
