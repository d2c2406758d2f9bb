"""The population of keys: the distribution of their free numbers, by empirical Bayes, robust to outlying keys.

A key's estimate is its true theta plus an error, whose covariance is the inverse of the key's information. The true
theta is drawn from the population. EM finds the population's mean and covariance; Student's t weights reduce the effect
of distant keys. A variance of zero has no logarithm, so it does not affect the mean, and only the share of keys with a
variance of zero is recorded.

References: Efron and Morris (1975); Lange, Little and Taylor (1989), for the weights; Mitchell and Beauchamp (1988),
for a prior with a mass at zero.
"""

import numpy as np

from kalman.learning.key_fits import Population
from kalman.learning.keys.directions import dot
from kalman.types import Array

DEGREES = 4.0
"""Degrees of freedom of the weights."""
ITERATIONS = 100
WIDE = 100.0
"""Variance of theta in an unknown population."""
OWN = 1.0
"""Weight, in keys, of a prior variance of one (a factor e either way) in the population's covariance."""
RARE = 1e-6
"""Smallest share of keys with a variance of zero that the evidence uses."""
SMALL = 1e-4
"""Smallest variance of theta in the population."""


def estimate_population(theta: Array, information: Array, zero: np.ndarray, start: Array) -> Population:
    """Return the population of K keys: theta (p, K), information (p, p, K), zero: mask (p, K) of variances of zero.

    start: the population's mean (p,) if the keys give no information.
    """
    p, keys = theta.shape
    J = np.moveaxis(np.where((zero[:, None] | zero[None, :]), 0.0, information), -1, 0)
    share = (zero.sum(axis=1) + 0.5) / (keys + 1.0)
    mean = np.asarray(start, float).copy()
    told = np.zeros(p, bool)
    for i in range(p):
        known = ~zero[i] & (J[:, i, i] > 0.0)
        told[i] = known.any()
        if told[i]:
            mean[i] = np.median(theta[i, known])
    covariance = np.eye(p)
    for _ in range(ITERATIONS if told.any() else 0):
        inverse = np.linalg.inv(covariance)
        C = np.linalg.inv(inverse + J)
        away = theta.T - mean
        pulled = np.einsum("kij,kj->ki", J, away)
        shift = np.einsum("kij,kj->ki", C, pulled)
        distance = np.maximum(np.einsum("ki,kij,jl,kl->k", pulled, C, inverse, away), 0.0)
        weight = (DEGREES + p) / (DEGREES + distance)
        weight *= np.einsum("kii->k", C @ J) > 1e-3
        if not weight.any():
            break
        moved = weight @ shift / weight.sum()
        rest = shift - moved
        spread = np.einsum("k,ki,kj->ij", weight, rest, rest) + C[weight > 0.0].sum(axis=0)
        count = np.count_nonzero(weight)
        following = (spread + OWN * np.eye(p)) / (count + OWN)
        following = 0.5 * (following + following.T) + SMALL * np.eye(p)
        mean = mean + moved
        if np.abs(moved).max() < 1e-6 and np.abs(following - covariance).max() < 1e-6:
            covariance = following
            break
        covariance = following
    covariance = covariance + np.diag(np.where(told, 0.0, WIDE))
    return Population(mean, covariance, keys, share)


def compute_posterior(population: Population, theta: Array, information: Array) -> tuple[Array, Array]:
    """Return the posterior mean (p, K) of theta given each key's estimate, and the posterior covariance (p, p, K)."""
    J = np.moveaxis(information, -1, 0)
    C = np.asarray(np.linalg.inv(np.linalg.inv(population.covariance) + J), np.float64)
    away = (theta - population.mean[:, None]).T
    shift = np.einsum("kij,kjl,kl->ki", C, J, away)
    return population.mean[:, None] + shift.T, np.moveaxis(C, 0, -1)


def compute_row_share(population: Population, information: Array) -> Array:
    """Return the share (K,) of each key's rows in theta: the mean of the eigenvalues of C I."""
    J = np.moveaxis(information, -1, 0)
    C = np.asarray(np.linalg.inv(np.linalg.inv(population.covariance) + J), np.float64)
    return np.clip(np.einsum("kij,kji->k", C, J) / len(population.mean), 0.0, 1.0)


def compute_evidence(
    population: Population, theta: Array, zero: np.ndarray, value: Array, information: Array
) -> Array:
    """Return the log-likelihood (K,) of keys under the population; zero: mask (p, K) of variances of zero.

    The result is Laplace's approximation at theta (p, K), where the log-likelihood given theta is `value` (K,).
    """
    p = len(population.mean)
    held = zero.T
    either = held[:, :, None] | held[:, None, :]
    covariance = np.where(either, np.eye(p), population.covariance)
    precision = np.linalg.inv(covariance)
    away = np.where(held, 0.0, (theta - population.mean[:, None]).T)
    distance = np.einsum("ki,kij,kj->k", away, precision, away)
    J = np.where(either, 0.0, np.moveaxis(information, -1, 0))
    occam = np.linalg.slogdet(np.eye(p) + covariance @ J)[1]
    share = np.zeros(p) if population.zero is None else population.zero
    share = np.clip(share, RARE, 1.0 - RARE)
    chance = np.where(zero, np.log(share)[:, None], np.log1p(-share)[:, None])
    return value - 0.5 * distance - 0.5 * occam + dot(np.ones_like(chance), chance)
