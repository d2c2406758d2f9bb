"""Weights in log space, and the moments of a mixture."""

import numpy as np
import pytest
from scipy.special import logsumexp

from kalman.filters import mixture_moments
from kalman.filters.mixture_moments import GaussianMoments, log_sum_exp, normalise_weights


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_log_sum_exp_is_that_of_scipy(count, scale):
    rng = np.random.default_rng(count)
    a = rng.normal(size=(count, 200)) * scale
    a[rng.random(a.shape) < 0.2] = -np.inf
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(
            log_sum_exp(list(a)), np.asarray(logsumexp(a, axis=0)), rtol=1e-13, atol=1e-13
        )


def test_log_sum_exp_in_its_corners():
    with np.errstate(all="ignore"):
        for a in ([-1000.0, -1000.0, -1001.0], [1000.0, 999.0, -1000.0], [-np.inf, -3.0, -np.inf]):
            found = log_sum_exp([np.array([x]) for x in a])
            np.testing.assert_allclose(found, np.asarray(logsumexp(a)), rtol=1e-14)
        assert log_sum_exp([np.array([-np.inf])] * 3) == [-np.inf]
        assert log_sum_exp([np.array([np.inf]), np.array([1.0]), np.array([2.0])]) == [np.inf]
        assert np.isnan(log_sum_exp([np.array([np.nan]), np.array([1.0]), np.array([2.0])]))


def test_the_floor_is_below_no_weight_and_the_rest_keep_their_ratios():
    logs = [np.array([0.0, -5000.0]), np.array([-1.0, 0.0]), np.array([-2000.0, -np.inf])]
    weights = np.exp(np.array(normalise_weights(logs, 1e-6)))
    np.testing.assert_allclose(weights.sum(axis=0), 1.0, rtol=1e-15)
    np.testing.assert_allclose(weights[0, 0] / weights[1, 0], np.e, rtol=1e-12)
    np.testing.assert_allclose(weights[2], 1e-6, rtol=1e-5)
    np.testing.assert_allclose(np.exp(np.array(normalise_weights(logs)))[:, 1], [0, 1, 0])


def test_the_covariance_has_the_spread_of_the_means():
    """Two points a distance 2 apart, half each: variance 1 beside their own."""
    parts = [GaussianMoments([np.array([m]), 0.0], [np.array([4.0]), 0.0, 1.0]) for m in (-1.0, 1.0)]
    mixed = mixture_moments.mix_moments([0.5, 0.5], parts)
    assert [float(np.squeeze(a)) for a in (*mixed.m, *mixed.P)] == [0.0, 0.0, 5.0, 0.0, 1.0]
