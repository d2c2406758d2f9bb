"""Rank models by the predictive log-likelihood of the same held-out rows, with the noise of the comparison.

A model's score is the mean over keys of each key's mean per row, so that a key with many rows counts like any other
key. Two models are compared by their differences on the same rows. With several keys, the standard error of the mean
difference comes from the spread over keys. With few keys, it comes from the rows of each key. It then allows for
autocorrelation (Newey and West 1987, with Bartlett's weights), because the errors of neighbouring rows are correlated.

If only one of the models expects an outlier, this row's difference is far larger than all others. It also enlarges the
standard error, so a much better model could seem no better. Therefore the differences are compared a second time by a
Winsorised mean (Tukey and McLaughlin 1963), with each row limited to MOST. Two models differ if either comparison shows
a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SEVERAL = 8
"""The number of keys from which on the standard error is computed over keys."""
APART = 2.0
"""The number of standard errors by which the scores of two models must differ."""
TIE = 0.01
"""A negligible log-likelihood per row: a key that loses less than this is not worse."""
MOST = 3.0
"""The maximum difference of a row in the second comparison: a likelihood 20 times as high."""
EVERY = 0.95
"""The share of keys that must lose nothing if a structure is chosen instead of the simplest structure."""
FEW = 5
"""From this number of keys on, one key may lose; otherwise it could veto a gain of all other keys."""


class ModelScore(NamedTuple):
    """The score of one model.

    name, place: the name of the model, and its index in the given order.
    mean: log-likelihood per held-out row, as the mean over keys.
    wins: the share of keys for which the model is the best.
    behind, error: the distance to the best model, and the paired standard error of this distance; 0 for the best.
    at_least: the share of keys for which the reference is not better by more than TIE and noise.
    missing: the number of held-out rows without a likelihood under this model; they are left out for all models.
    capped, capped_error: the same as behind and error, with each row limited to MOST.
    """

    name: str
    place: int
    mean: float
    wins: float
    behind: float
    error: float
    at_least: float
    missing: int
    capped: float = 0.0
    capped_error: float = float("inf")

    @property
    def is_apart(self) -> bool:
        """Return whether the best model is better than this model by more than noise."""
        return self.behind > APART * self.error or self.capped > APART * self.capped_error

    def is_near(self, best: ModelScore) -> bool:
        """Return whether this model is within one standard error, or TIE, of the best of a group of models."""
        return self.behind - best.behind <= max(self.error, TIE) and (
            self.capped - best.capped <= max(self.capped_error, TIE)
        )


class Ranking(NamedTuple):
    """Scores, the best first, and the numbers of keys and rows behind them.

    means: (M, K) mean log-likelihood per row for each model, in the given order, and each key.
    """

    scores: list[ModelScore]
    keys: int
    rows: int
    means: Floats

    @property
    def best(self) -> ModelScore:
        """Return the score of the best model."""
        return self.scores[0]

    @property
    def equals(self) -> list[ModelScore]:
        """Return the best model, followed by the models that do not differ from it."""
        return [self.best, *(one for one in self.scores[1:] if not one.is_apart)]

    def may_replace_the_simplest(self, one: ModelScore, share: float = EVERY) -> bool:
        """Return whether few enough keys lose with a model: a share of 1 - `share`, or one key of FEW or more."""
        losers = round((1.0 - one.at_least) * self.keys)
        return losers <= max((1.0 - share) * self.keys, float(self.keys >= FEW))

    def of(self, name: str) -> ModelScore:
        """Return the score of a model."""
        return next(one for one in self.scores if one.name == name)


def rank(names: Sequence[str], key: Ints, scores: Sequence[Floats]) -> Ranking:
    """Rank models by scores (H,) of held-out rows whose keys (H,) are non-decreasing.

    Args:
        names: the names of the models; the first one is the reference of `at_least`.
        key: the key of each held-out row.
        scores: for each model, the log-likelihood of each held-out row; NaN if the row has no likelihood.

    Raises:
        ValueError: no row has a likelihood under every model.
    """
    table = np.array(scores)
    good = np.isfinite(table).all(axis=0)
    measured = np.isfinite(table).any(axis=0)
    missing = (~np.isfinite(table) & measured).sum(axis=1)
    table, key = table[:, good], key[good]
    if not len(key):
        raise ValueError("no held-out row has a likelihood under every model; give more rows of each key")
    code = np.unique(key, return_inverse=True)[1]
    counts = np.bincount(code)
    means = np.array([np.bincount(code, row) / counts for row in table])
    overall = means.mean(axis=1)
    order = np.argsort(-overall, kind="stable")
    best = int(order[0])
    winner = means.argmax(axis=0)
    behind = table[best] - table
    capped = np.minimum(behind, MOST)
    found = [
        ModelScore(
            names[int(m)],
            int(m),
            float(overall[m]),
            float((winner == m).mean()),
            float(overall[best] - overall[m]),
            0.0 if m == best else compute_standard_error(code, behind[m]),
            float(1.0 - find_losing_keys(code, table[0] - table[m]).mean()),
            int(missing[m]),
            float((np.bincount(code, capped[m]) / counts).mean()),
            0.0 if m == best else compute_standard_error(code, capped[m]),
        )
        for m in order
    ]
    return Ranking(found, len(counts), len(key), means)


def compute_standard_error(code: Ints, differences: Floats) -> float:
    """Return the standard error of the mean over keys of each key's mean difference (H,); infinite if unknown."""
    counts = np.bincount(code)
    means = np.bincount(code, differences) / counts
    if len(counts) >= SEVERAL:
        return float(means.std(ddof=1) / np.sqrt(len(counts)))
    ends = np.cumsum(counts)
    variances = [
        _compute_mean_variance(differences[end - n : end]) for n, end in zip(counts, ends, strict=True)
    ]
    return float(np.sqrt(sum(variances))) / len(counts)


def find_losing_keys(code: Ints, differences: Floats) -> NDArray[np.bool_]:
    """Return which keys (K,) have a mean difference (H,) above TIE and above its noise."""
    counts = np.bincount(code)
    means = np.bincount(code, differences) / counts
    found = means > TIE
    ends = np.cumsum(counts)
    for k in np.flatnonzero(found).tolist():
        error = np.sqrt(_compute_mean_variance(differences[ends[k] - counts[k] : ends[k]]))
        found[k] = means[k] > APART * error
    return found


def _compute_mean_variance(values: Floats) -> float:
    """Return the variance of a series' (n,) mean, with autocovariances up to a lag of about n^(1/3)."""
    n = len(values)
    if n < 4:
        return float("inf")
    away = values - values.mean()
    lags = max(1, int(round(1.5 * n ** (1 / 3))))
    total = float(away @ away) / n
    for lag in range(1, min(lags, n - 1) + 1):
        total += 2.0 * (1.0 - lag / (lags + 1.0)) * float(away[lag:] @ away[:-lag]) / n
    return max(total, float(away @ away) / n / n) / n


def choose(ranking: Ranking, simplest: Sequence[str], share: float = EVERY) -> ModelScore:
    """Return the simplest model that is near the best.

    This is the one-standard-error rule (Breiman, Friedman, Olshen and Stone 1984, section 3.4.3): among models that do
    not differ on these rows, the model with the fewest parameters predicts other rows best.

    The reference may always be chosen. Another model may be chosen only if at least `share` of the keys lose nothing
    against the reference. With FEW keys or more, one key may always lose.

    Args:
        ranking: the ranking of the models.
        simplest: the names of the models, the simplest first; the first one is the reference.
        share: the share of keys that must lose nothing.
    """
    allowed = [
        one
        for one in ranking.scores
        if one.name == simplest[0] or ranking.may_replace_the_simplest(one, share)
    ]
    best = allowed[0]  # the scores are sorted
    for name in simplest:
        one = next((one for one in allowed if one.name == name), None)
        if one is not None and one.is_near(best):
            return one
    return best
