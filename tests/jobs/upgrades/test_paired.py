"""The gain of one version over another and its interval: false alarms, power, and what too few rows are told."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import statsmodels.api as sm
from numpy.typing import NDArray
from scipy.fft import dct
from scipy.optimize import brentq
from scipy.signal import lfilter
from scipy.stats import t

from jobs.upgrades.statistics import (
    BLOCKS,
    FREQUENCIES,
    LEVEL,
    POWER,
    Answer,
    Gain,
    PairedSums,
    Squares,
    answer_of,
    compute_gain,
    compute_long_run_variance,
    compute_rows_needed,
)

Floats = NDArray[Any]
Series = Callable[[np.random.Generator, int, int], Floats]
"""Makes the gains (K, N) of keys over time."""


def sums_of(gains: Floats, rows: NDArray[np.int64] | None = None) -> PairedSums:
    """Return the sums of gains (K, N), of each key's first rows (K,), one of each key at a time."""
    keys, length = gains.shape
    rows = np.full(keys, length) if rows is None else rows
    there = np.arange(length) < rows[:, None]
    gains = np.where(there, gains, 0.0)
    n, total = rows.astype(float), gains.sum(1)
    at = there.sum(0).astype(float)
    block = ((np.cumsum(at) - 0.5 * at) * min(BLOCKS, length) / at.sum()).astype(int)
    block = np.unique(block, return_inverse=True)[1]
    return PairedSums(
        int(rows.sum()),
        keys,
        Squares(float((gains**2).sum()), float(gains.sum()), float(rows.sum())),
        Squares(float(total @ total), float(total @ n), float(n @ n)),
        float((n**4).sum()),
        np.asarray(np.bincount(block, at), float),
        np.asarray(np.bincount(block, gains.sum(0)), float),
    )


def steady(q: float) -> tuple[float, float]:
    """Return the gain and the innovation variance of a local level filter in the long run (R = 1, Q = q)."""
    P = 0.5 * (q + math.sqrt(q * q + 4.0 * q)) + 1.0
    return 1.0 - 1.0 / P, P


def filters(q: float, factor: float) -> Series:
    """Return the gains of two local level filters on data of Q = q: Q too large by `factor`, and so small that it is
    exactly as bad in the long run, in expectation."""

    def expected(other: float) -> float:
        gain, variance = steady(other)
        a = 1.0 - gain  # the innovations are (1 - L) / (1 - a L) of the data
        return -0.5 * math.log(variance) - 0.5 * (q + 2.0 - 2.0 * a) / (1.0 - a * a) / variance

    root: Any = brentq(lambda x: expected(q * math.exp(x)) - expected(q * factor), -25.0, -1e-3)
    small = q * math.exp(float(root))

    def make(rng: np.random.Generator, keys: int, rows: int) -> Floats:
        start = 300
        data = math.sqrt(q) * rng.standard_normal((keys, rows + start))
        data += np.diff(rng.standard_normal((keys, rows + start + 1)), axis=1)
        scores = []
        for other in (q * factor, small):
            gain, variance = steady(other)
            e = np.asarray(lfilter([1.0], [1.0, gain - 1.0], data, axis=1))[:, start:]
            scores.append(-0.5 * math.log(variance) - 0.5 * e * e / variance)
        return scores[0] - scores[1]

    return make


def autoregressive(phi: float, common: float = 0.0) -> Series:
    """Return gains of an AR(1); a share of their variance is common to all keys."""

    def make(rng: np.random.Generator, keys: int, rows: int) -> Floats:
        noise = rng.standard_normal((keys + 1, rows + 200))
        x = np.asarray(lfilter([math.sqrt(1.0 - phi * phi)], [1.0, -phi], noise, axis=1))[:, 200:]
        return math.sqrt(1.0 - common) * x[:-1] + math.sqrt(common) * x[-1]

    return make


def unlike(rng: np.random.Generator, keys: int, rows: int) -> Floats:
    """Return gains of keys of which each has its own mean and scale; the law of the means is symmetric."""
    scale = np.exp(rng.standard_normal((keys, 1)))
    return scale * (0.3 * rng.standard_normal((keys, 1)) + rng.standard_normal((keys, rows)))


def heavy(rng: np.random.Generator, keys: int, rows: int) -> Floats:
    return rng.standard_t(4, (keys, rows))


def perturbed(rng: np.random.Generator, keys: int, rows: int) -> Floats:
    """Return gains as of a Q that is another one in its last digits: rounding, and all of one sign."""
    return 1e-13 * (1.0 + rng.standard_normal((keys, rows)))


ONE_KEY = [(1, 10), (1, 30), (1, 100), (1, 300), (1, 1000), (1, 10_000), (3, 100)]
MANY = [(10, 30), (30, 10), (50, 200), (300, 10), (500, 20)]
WORLDS: dict[str, tuple[Series, list[tuple[int, int]]]] = {
    "white": (autoregressive(0.0), ONE_KEY + MANY),
    "short memory": (autoregressive(0.5), ONE_KEY + MANY),
    "long memory": (autoregressive(0.9), ONE_KEY + MANY),
    "common shocks": (autoregressive(0.5, 0.3), MANY),
    "common shocks of long memory": (autoregressive(0.8, 0.3), MANY),
    "heavy tails": (heavy, ONE_KEY + MANY),
    "unlike keys": (unlike, MANY),
    "filters, slow level": (filters(0.001, 3.0), ONE_KEY + MANY),
    "filters, close": (filters(0.1, 1.1), ONE_KEY + MANY),
    "filters, far": (filters(1.0, 10.0), ONE_KEY + MANY),
    "rounding": (perturbed, ONE_KEY + MANY),
    "the same bits": (lambda rng, keys, rows: np.zeros((keys, rows)), ONE_KEY + MANY),
}


def test_a_version_against_its_like_is_rarely_called_better_or_worse() -> None:
    rng = np.random.default_rng(19)
    cases = [(name, size) for name, (_, sizes) in WORLDS.items() for size in sizes]
    alarms, seen = Counter[str](), Counter[str]()
    for number in range(1000):
        name, (keys, rows) = cases[number % len(cases)]
        lengths = None if number % 3 else rng.integers(max(rows // 5, 1), rows + 1, keys)
        gain = compute_gain(sums_of(WORLDS[name][0](rng, keys, rows), lengths))
        # No loss is allowed, so that each difference counts.
        alarms[name] += answer_of(gain, 0.0) in (Answer.BETTER, Answer.WORSE)
        seen[name] += 1
    assert sum(seen.values()) == 1000
    assert sum(alarms.values()) <= 50, alarms
    assert alarms["rounding"] == alarms["the same bits"] == 0
    for name, count in seen.items():  # of 5 % so many may be by chance, with 99.9 %
        assert alarms[name] <= 0.05 * count + 3.1 * math.sqrt(0.05 * 0.95 * count), (
            name,
            alarms[name],
            count,
        )


@pytest.mark.parametrize(
    ("name", "keys", "first", "loss"),
    [
        ("white", 1, 400, 0.1),
        ("long memory", 1, 4000, 0.15),
        ("filters, far", 20, 40, 0.08),
        ("unlike keys", 40, 20, 0.3),
        ("common shocks", 50, 100, 0.1),
    ],
)
def test_a_worse_version_is_called_worse_once_there_are_the_predicted_rows(
    name: str, keys: int, first: int, loss: float
) -> None:
    rng, make, allowed = np.random.default_rng(7), WORLDS[name][0], 0.01

    def gains(rows: int) -> Gain:
        # Of unlike keys, more rows of the same keys tell nothing new: there are more keys.
        size = (rows // first, first) if name == "unlike keys" else (keys, rows // keys)
        return compute_gain(sums_of(make(rng, *size) - loss))

    # The number of rows is predicted from a first look, in which the true loss happens to be the one seen.
    looks = [gains(first * keys) for _ in range(40)]
    needed = [
        compute_rows_needed(one._replace(mean=-loss), allowed) for one in looks if one.deviation is not None
    ]
    predicted = float(np.median([one for one in needed if one is not None]))
    rows = int(predicted)
    answers = Counter(answer_of(gains(rows), allowed) for _ in range(400))
    assert answers[Answer.BETTER] == answers[Answer.NOT_WORSE] == 0
    assert answers[Answer.WORSE] >= 310, (predicted, answers)
    # With a tenth of them it would mostly be too early: the prediction is not a bound far from the truth.
    early = Counter(answer_of(gains(rows // 10), allowed) for _ in range(100))
    assert early[Answer.WORSE] < 60, (predicted, early)


def test_a_better_version_and_one_that_is_as_good_are_called_so() -> None:
    rng = np.random.default_rng(3)
    x = 0.2 * rng.standard_normal((4, 3000))
    assert answer_of(compute_gain(sums_of(x + 0.02)), 0.01) == Answer.BETTER
    assert answer_of(compute_gain(sums_of(x)), 0.01) == Answer.NOT_WORSE
    assert answer_of(compute_gain(sums_of(x - 0.03)), 0.01) == Answer.WORSE
    assert answer_of(compute_gain(sums_of(x - 0.03)), 0.1) == Answer.NOT_WORSE
    assert answer_of(compute_gain(sums_of(x - 0.01)), 0.01) == Answer.UNKNOWN


def test_too_few_rows_have_no_answer() -> None:
    nothing = compute_gain(sums_of(np.empty((0, 0))))
    assert (nothing.rows, nothing.mean, nothing.low) == (0, None, None)
    assert answer_of(nothing, 0.01, 0, 0) == Answer.UNKNOWN and compute_rows_needed(nothing, 0.01) == 20
    # Ten rows of one key, of which each loses a little: the interval would be a guess.
    ten = compute_gain(sums_of(np.full((1, 10), -0.002249) + 0.001 * (-1.0) ** np.arange(10)))
    assert ten.low is None and answer_of(ten, 0.0) == Answer.UNKNOWN
    assert (compute_rows_needed(ten, 0.0), compute_rows_needed(ten, 0.0, 50)) == (20, 50)
    # Many keys at few moments: they can be told apart only if they do not move together.
    rng = np.random.default_rng(1)
    alone, together = rng.standard_normal((300, 12)), rng.standard_normal((1, 12)) + np.zeros((300, 1))
    assert compute_gain(sums_of(alone)).low is not None
    assert compute_gain(sums_of(together)).low is None
    enough = compute_gain(sums_of(rng.standard_normal((1, 200))))
    assert answer_of(enough, 9.0, 200, 1) == Answer.NOT_WORSE
    assert answer_of(enough, 9.0, 201, 1) == answer_of(enough, 9.0, 200, 2) == Answer.UNKNOWN


def test_a_likelihood_that_is_no_number_is_worse() -> None:
    x = np.zeros((1, 100))
    for bad in (-np.inf, np.nan):
        x[0, 40] = bad
        assert answer_of(compute_gain(sums_of(x)), 0.01) == Answer.WORSE


def test_the_long_run_variance_is_the_mean_of_the_lowest_cosine_coefficients() -> None:
    rest = np.random.default_rng(2).standard_normal(50)
    coefficients: Any = dct(rest, type=2)  # twice the sum of rest x cosine
    expected = 2.0 * np.mean((coefficients[1:9] / 2.0) ** 2)
    np.testing.assert_allclose(compute_long_run_variance(rest, 8), expected, rtol=1e-12)


def test_the_variance_by_key_is_that_of_clustered_standard_errors() -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((60, 40)) + 2.0 * rng.standard_normal(
        (60, 1)
    )  # keys differ: by key is the larger
    found = compute_gain(sums_of(x))
    model = sm.OLS(x.ravel(), np.ones(x.size))
    fit = model.fit(
        cov_type="cluster",
        cov_kwds={"groups": np.repeat(np.arange(60), 40), "use_correction": False},
    )
    error = float(fit.bse[0]) * math.sqrt(60 / 59)
    assert found.mean is not None and found.high is not None and found.deviation is not None
    np.testing.assert_allclose(found.mean, fit.params[0], rtol=1e-12)
    np.testing.assert_allclose(found.deviation / math.sqrt(x.size), error, rtol=1e-10)
    np.testing.assert_allclose(found.high - found.mean, t.ppf(0.5 + LEVEL / 2, 59) * error, rtol=1e-10)


def test_one_long_key_has_the_interval_over_time() -> None:
    x = np.asarray(lfilter([1.0], [1.0, -0.9], np.random.default_rng(5).standard_normal((1, 6400)), axis=1))
    found = compute_gain(sums_of(x))
    rest = (x - x.mean()).reshape(BLOCKS, -1).sum(1)
    coefficients: Any = dct(rest, type=2)
    error = math.sqrt(np.mean(coefficients[1 : FREQUENCIES + 1] ** 2) / 2.0) / x.size
    assert found.high is not None and found.mean is not None and found.freedom == FREQUENCIES
    np.testing.assert_allclose(
        found.high - found.mean, t.ppf(0.5 + LEVEL / 2, FREQUENCIES) * error, rtol=1e-10
    )
    needed = (
        (t.ppf(0.5 + LEVEL / 2, FREQUENCIES) + t.ppf(POWER, FREQUENCIES)) * error / abs(found.mean + 0.01)
    )
    assert compute_rows_needed(found, 0.01) == math.ceil(needed**2 * x.size)
