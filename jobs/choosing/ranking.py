"""Rank models by the predictive log-likelihood of the same held-out rows, with the noise of the comparison.

A model's score is the mean over keys of each key's mean a row, so that a key with many rows counts like any other.
Two models are compared by the differences on the same rows. The standard error of their mean is over keys where
there are several; with few keys, over the rows of each, and it allows for autocorrelation (Newey and West 1987, with
Bartlett's weights), because the errors of neighbouring rows go together.

An outlier that one model expects and the other does not makes a difference far larger than all others, and with it the
standard error: the better the one model, the less it would count. So the differences are compared a second time, each
row's counted up to MOST, by a Winsorised mean (Tukey and McLaughlin 1963). Two models are told apart where either
comparison does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SEVERAL = 8
"""Keys from which on the standard error is over keys."""
APART = 2.0
"""Standard errors from which on two models differ."""
TIE = 0.01
"""Log-likelihood a row that does not count: a key that loses less is not worse."""
MOST = 3.0
"""Log-likelihood by which a row counts at most in the second comparison: a likelihood 20 times as high."""
EVERY = 0.95
"""Share of the keys that must lose nothing with a structure that is chosen instead of the simplest."""
FEW = 5
"""Keys from which on one of them may lose: one of a handful is no rule, and would veto what all others gain by."""


class Score(NamedTuple):
    """One model's score.

    name, place     of the model, in the order given
    mean            log-likelihood a held-out row, the mean over keys
    wins            share of the keys for which it is the best
    behind, error   by how much it is behind the best, and the paired standard error of that; 0 for the best
    at_least        share of the keys for which the reference is not better by more than TIE and noise
    missing         held-out rows for which it gave no likelihood, and which no model is judged by
    capped, capped_error  as behind and error, each row counted up to MOST
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
        """Tell if the best is better than this one by more than noise."""
        return self.behind > APART * self.error or self.capped > APART * self.capped_error

    def is_near(self, best: Score) -> bool:
        """Tell if it is no worse than the best of some by more than a standard error, or than TIE."""
        return self.behind - best.behind <= max(self.error, TIE) and (
            self.capped - best.capped <= max(self.capped_error, TIE)
        )


class Ranking(NamedTuple):
    """Scores, the best first; keys and rows that they rest on; means (M, K) of each model, in the order given."""

    scores: list[Score]
    keys: int
    rows: int
    means: Floats

    @property
    def best(self) -> Score:
        """The model with the highest score."""
        return self.scores[0]

    @property
    def equals(self) -> list[Score]:
        """The models that cannot be told apart from the best, which is the first."""
        return [self.best, *(one for one in self.scores[1:] if not one.is_apart)]

    def may_replace_the_simplest(self, one: Score, share: float = EVERY) -> bool:
        """Tell if at most 1 - `share` of the keys, or one key of FEW or more, lose with a model."""
        losers = round((1.0 - one.at_least) * self.keys)
        return losers <= max((1.0 - share) * self.keys, float(self.keys >= FEW))

    def of(self, name: str) -> Score:
        """Return the score of a model."""
        return next(one for one in self.scores if one.name == name)


def rank(names: Sequence[str], key: Ints, scores: Sequence[Floats]) -> Ranking:
    """Rank models by scores (H,) of held-out rows whose keys (H,) are non-decreasing.

    Args:
        names: of the models; the first one is that which `at_least` compares with.
        key: of each held-out row.
        scores: log-likelihood of each held-out row, for each model; NaN where a model has none.

    Raises:
        ValueError: there is no row that every model gives a likelihood for.
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
        Score(
            names[int(m)],
            int(m),
            float(overall[m]),
            float((winner == m).mean()),
            float(overall[best] - overall[m]),
            0.0 if m == best else standard_error(code, behind[m]),
            float(1.0 - losing(code, table[0] - table[m]).mean()),
            int(missing[m]),
            float((np.bincount(code, capped[m]) / counts).mean()),
            0.0 if m == best else standard_error(code, capped[m]),
        )
        for m in order
    ]
    return Ranking(found, len(counts), len(key), means)


def standard_error(code: Ints, differences: Floats) -> float:
    """Return the standard error of the mean over keys of the mean difference (H,) of each; infinite if unknown."""
    counts = np.bincount(code)
    means = np.bincount(code, differences) / counts
    if len(counts) >= SEVERAL:
        return float(means.std(ddof=1) / np.sqrt(len(counts)))
    ends = np.cumsum(counts)
    variances = [_variance_of_mean(differences[end - n : end]) for n, end in zip(counts, ends, strict=True)]
    return float(np.sqrt(sum(variances))) / len(counts)


def losing(code: Ints, differences: Floats) -> NDArray[np.bool_]:
    """Return for which keys (K,) the mean difference (H,) is above TIE, and by more than its own noise."""
    counts = np.bincount(code)
    means = np.bincount(code, differences) / counts
    found = means > TIE
    ends = np.cumsum(counts)
    for k in np.flatnonzero(found).tolist():
        error = np.sqrt(_variance_of_mean(differences[ends[k] - counts[k] : ends[k]]))
        found[k] = means[k] > APART * error
    return found


def _variance_of_mean(values: Floats) -> float:
    """Return the variance of the mean of a series (n,), with autocovariances up to a lag of about n^(1/3)."""
    n = len(values)
    if n < 4:
        return float("inf")
    away = values - values.mean()
    lags = max(1, int(round(1.5 * n ** (1 / 3))))
    total = float(away @ away) / n
    for lag in range(1, min(lags, n - 1) + 1):
        total += 2.0 * (1.0 - lag / (lags + 1.0)) * float(away[lag:] @ away[:-lag]) / n
    return max(total, float(away @ away) / n / n) / n


def choose(ranking: Ranking, simplest: Sequence[str], share: float = EVERY) -> Score:
    """Return the simplest model that is near the best.

    That is the rule of one standard error (Breiman, Friedman, Olshen and Stone 1984, section 3.4.3): among models that
    the rows cannot tell apart, the one with fewest parameters predicts other rows best.

    The reference itself may always be chosen; another one only if at least `share` of the keys, or all but one of FEW
    or more, lose nothing with it against the reference.

    Args:
        ranking: of the models.
        simplest: their names, the simplest first; the first one is the reference.
        share: of keys.
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
