"""Compute how much better one version predicts than another, with an interval that allows for noise, in NumPy only.

The gain of a row is the new version's predictive log-likelihood minus that of the old version. The mean gain over all
rows is compared with zero (Diebold and Mariano, 1995, Comparing predictive accuracy, JBES 13). The gains of a key are
autocorrelated, gains of different keys at the same time may be correlated, and the distribution of gains is skewed. So
the variance of the mean is the larger of two estimates:

- over time: the gains of all keys are summed in up to `BLOCKS` blocks of about equally many rows, and the lowest
  frequencies of these sums give their long-run variance (the equal-weighted cosine estimator: Lazarus, Lewis, Stock and
  Watson, 2018, HAR inference, JBES 36). This estimate allows for any dependence between keys.
- by key: the sums of the keys are independent clusters (Carter, Schnepel and Steigerwald, 2017, Review of Economics
  and Statistics 99, for the effective number of clusters). This estimate allows for any dependence within a key.

If there are few rows in few stretches of time, neither estimate can be trusted. Then there is no interval, and the
answer is that there are not enough rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from jobs.upgrades.comparison.answers import Answer

Floats = NDArray[np.float64]

BLOCKS = 64
"""Maximum number of blocks of time."""
FREQUENCIES = 8
"""Number of the lowest frequencies that estimate the long-run variance. Fewer frequencies allow for longer
autocorrelation, more frequencies give a narrower interval."""
STRETCHES = 20.0
"""Minimum number of blocks of time, reduced for autocorrelation, for an interval over time."""
FEW_KEYS = 10.0
"""Effective number of keys from which keys are also used as clusters."""
MANY_KEYS, SHORT = 20.0, 10
"""From `MANY_KEYS` independent keys on, `SHORT` blocks of time are enough."""
INDEPENDENT = 2.0
"""Keys count as independent if the variance over time is at most this many times the variance of independent keys."""
LEVEL = 0.97
"""Nominal level of the interval. With this level the interval contains the mean in at least 95 % of the cases, even for
few, skewed and autocorrelated rows. The test of false alarms measures the rate: at a level of 0.95, the interval misses
the mean in 9 % of the cases for the hardest case of 100 rows."""
POWER = 0.95
"""Nominal probability that the predicted number of rows is enough to detect a difference as large as the observed one.
The variance is estimated too, so the probability in the tests is 80 to 95 %."""
ROUNDING = 1e-9
"""A gain per row up to this size is attributed to rounding."""


class Squares(NamedTuple):
    """Sums over groups of rows of three products: gain squared, gain x number of rows, number of rows squared."""

    gain2: float = 0.0
    gain_rows: float = 0.0
    rows2: float = 0.0

    def around(self, mean: float) -> float:
        """Return the sum of (gain - rows x mean)^2."""
        return max(self.gain2 - 2.0 * mean * self.gain_rows + mean * mean * self.rows2, 0.0)


class PairedSums(NamedTuple):
    """Sums of the gains of the rows that both versions have scored; sums of different rows can be added.

    rows, keys: number of rows and of keys. moments: sums over groups of the same key and event time; by_key: sums over
    keys. rows4: the sum, over keys, of the number of rows to the fourth power. block_rows, block_gain (T,): number of
    rows, and gain, in each block of time, in order.
    """

    rows: int
    keys: int
    moments: Squares
    by_key: Squares
    rows4: float
    block_rows: Floats
    block_gain: Floats


class Gain(NamedTuple):
    """The mean gain per row and its interval.

    low, high: bounds of the interval; None if there are too few rows for an interval. keys, rows: number of keys and
    rows in the mean. needed: estimated total number of rows for an interval; 0 if there is an interval. deviation: the
    standard deviation of the mean times the square root of the number of rows. freedom: the degrees of freedom.
    """

    rows: int
    keys: int
    mean: float | None
    low: float | None
    high: float | None
    deviation: float | None
    freedom: float | None
    needed: int


def compute_gain(sums: PairedSums) -> Gain:
    """Return the mean gain per row with its interval."""
    rows, keys = sums.rows, sums.keys
    if rows == 0:
        return Gain(0, 0, None, None, None, None, None, int(STRETCHES))
    mean = float(sums.block_gain.sum() / sums.block_rows.sum())
    if not math.isfinite(mean):
        return Gain(rows, keys, mean, None, None, None, None, 0)
    rest = sums.block_gain - sums.block_rows * mean
    blocks = len(rest)
    moments, by_key = sums.moments.around(mean), sums.by_key.around(mean)
    white = float(rest @ rest)
    clusters = sums.by_key.rows2**2 / sums.rows4
    by_keys = (by_key * clusters / (clusters - 1.0), clusters - 1.0) if clusters >= FEW_KEYS else None
    frequencies = min(FREQUENCIES, blocks // 4)
    over_time = (compute_long_run_variance(rest, frequencies), float(frequencies)) if frequencies else None
    stretches = blocks / max(over_time[0] / white, 1.0) if over_time and white else float(blocks)
    if stretches >= STRETCHES:
        known = [one for one in (over_time, by_keys) if one is not None]
    elif clusters >= MANY_KEYS and blocks >= SHORT and white <= INDEPENDENT * moments and by_keys:
        known = [by_keys]
    else:
        return Gain(rows, keys, mean, None, None, None, None, math.ceil(rows * STRETCHES / stretches))
    # Rows whose gains cancel can make an estimate too small, so the estimate for independent rows is the minimum.
    known.append((moments, max(blocks - 1.0, 1.0)))
    total, freedom = max(known, key=lambda one: one[0] * _compute_quantile(one[1]) ** 2)
    half = _compute_quantile(freedom) * math.sqrt(total) / rows
    deviation = math.sqrt(total / rows)
    return Gain(rows, keys, mean, mean - half, mean + half, deviation, freedom, 0)


def compute_long_run_variance(rest: Floats, frequencies: int) -> float:
    """Return the variance of the sum of a series (T,) with mean zero, estimated from its lowest frequencies."""
    T = len(rest)
    time = np.pi * (np.arange(T) + 0.5) / T
    waves = np.cos(np.arange(1, frequencies + 1)[:, None] * time) @ rest
    return float(2.0 * np.mean(waves * waves))


def answer_of(gain: Gain, allowed: float, least_rows: int = 1, least_keys: int = 1) -> Answer:
    """Return whether the new version predicts better, not worse or worse, or that this is unknown.

    Args:
        gain: gain of the new version.
        allowed: log-likelihood per row, 0 or more, that the new version may lose without counting as worse.
        least_rows: minimum number of rows for an answer.
        least_keys: minimum number of keys for an answer.
    """
    if gain.mean is not None and not math.isfinite(gain.mean):  # the new version has lost all it can
        return Answer.BETTER if gain.mean == math.inf else Answer.WORSE
    if gain.low is None or gain.high is None or gain.rows < least_rows or gain.keys < least_keys:
        return Answer.UNKNOWN
    if gain.low > ROUNDING:
        return Answer.BETTER
    if gain.low >= -max(allowed, ROUNDING):
        return Answer.NOT_WORSE
    return Answer.WORSE if gain.high < -allowed else Answer.UNKNOWN


def compute_rows_needed(gain: Gain, allowed: float, least_rows: int = 1) -> int | None:
    """Return the estimated total number of rows for an answer; None if no number of rows would give an answer.

    The estimate assumes that the true mean equals the observed mean, and that future rows (later rows, or rows of other
    keys) are as independent as the present rows. Then this number of rows shows with probability `POWER` on which side
    of the allowed loss the mean is.
    """
    least = max(least_rows, gain.needed, 1)
    if gain.mean is None or gain.deviation is None or gain.freedom is None:
        return least
    distance = abs(gain.mean + allowed)
    if distance * 1e6 <= gain.deviation:
        return None
    spread = _compute_quantile(gain.freedom) + float(stdtrit(gain.freedom, POWER))
    return max(least, math.ceil((spread * gain.deviation / distance) ** 2))


def _compute_quantile(freedom: float) -> float:
    return float(stdtrit(freedom, 0.5 + LEVEL / 2.0))
