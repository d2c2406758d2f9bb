"""Rank models of the same measurements by the predictive log-likelihood of the same held-out rows.

A sample of the rows in files or in the warehouse is read, each model is fitted to the first rows of every key, and
scored on the key's other rows.

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

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import kalman
from jobs.choosing.samples import FEWEST, SplitRows, fit, mark_held_out, sample_rows, score_held_out
from jobs.core.errors import UserError
from jobs.landing.checking import parse
from jobs.landing.raw_rows import RawRows
from jobs.offline.filtering import order_accepted_rows
from jobs.specs.model_spec import ModelSpec
from jobs.storage.queries import open_queries, quote_name, quote_text
from jobs.storage.tables import measurements

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


class ModelComparison(NamedTuple):
    """The ranking of models (the first given model is the reference).

    keys: the number of keys in the rows.
    rejected: the number of rejected rows.
    """

    ranking: Ranking
    keys: int
    rejected: int


def check_comparable(specs: Sequence[ModelSpec]) -> None:
    """Check that models use the same rows and predict the same numbers.

    Raises:
        UserError: the models use different rows or predict different numbers.
    """
    first = specs[0]
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--model {name} is given twice")
    for spec in specs[1:]:
        for field in ("measurement", "key", "time"):
            if getattr(spec, field) != getattr(first, field):
                raise UserError(
                    f"{spec.name} and {first.name} differ in `{field}`: {getattr(spec, field)} and "
                    f"{getattr(first, field)}; likelihoods of different rows cannot be compared"
                )
    for spec in specs:
        if spec.inputs is not None:
            raise UserError(
                f"{spec.name} has inputs from a table, which compare does not read; land them as control columns"
            )


def list_columns(specs: Sequence[ModelSpec]) -> list[str]:
    """Return all columns that the models read."""
    return list(dict.fromkeys(name for spec in specs for name in spec.columns))


def compare(
    specs: Sequence[ModelSpec], source: RawRows, what: str, most_keys: int, most_rows: int
) -> ModelComparison:
    """Rank models by the log-likelihood of held-out rows.

    Args:
        specs: the specs of the models; a row that one model rejects is left out for all models.
        source: the rows.
        what: name of the rows' source in error messages.
        most_keys: number of keys to sample.
        most_rows: number of last rows to use of each key.

    Raises:
        UserError: there are too few rows, or a model cannot be fitted.
    """
    parsed = [parse(spec, source, what) for spec in specs]
    common = parsed[0]
    for other in parsed[1:]:
        common = common._replace(reason=np.where(common.accepted, other.reason, common.reason))
    order, rows = order_accepted_rows(common, specs[0].duplicates)
    found = sample_rows(rows, parsed[0].keys, most_keys, most_rows)
    if found is None:
        raise UserError(f"{what}: no key has {FEWEST} rows with each measurement")
    places, count = order[found.places], len(found.keys)
    seen = np.asarray(np.isfinite(rows.y[:, found.places]).any(axis=0))
    held = mark_held_out(found.number, count, seen)
    scores = []
    for spec, one in zip(specs, parsed, strict=True):
        taken = kalman.SortedRows(found.number, one.time[places], one.y[:, places], one.u[:, places])
        sample = SplitRows(taken, count, held, spec.unit_us)
        try:
            definition = spec.definition()
            scores.append(score_held_out(definition, fit(definition, sample), sample))
        except kalman.ModelError as error:
            raise UserError(f"{spec.name}: {error}") from error
    names = [spec.name for spec in specs]
    try:
        ranking = rank(names, found.number[held], scores)
    except ValueError as error:
        raise UserError(f"{', '.join(names)}: {error}") from error
    return ModelComparison(ranking, parsed[0].keys, int((~common.accepted).sum()))


def read_landed_rows(root: str, spec: ModelSpec, columns: Sequence[str], keys: int, rows: int) -> RawRows:
    """Return the last landed rows of the keys with the lowest hashes.

    Args:
        root: root of the warehouse with the model's measurements.
        spec: spec of the table's model.
        columns: columns to read.
        keys: number of keys.
        rows: number of rows of each key.

    Raises:
        UserError: nothing has landed, or a column is missing.
    """
    key = ", ".join(map(quote_name, spec.key))
    partition = f"PARTITION BY {key}" if key else ""
    place = f"row_number() OVER ({partition} ORDER BY {quote_name(spec.time)} DESC) AS _place"
    with open_queries(root) as queries:
        schema = queries.add("landed", measurements(spec.name))
        absent = [] if schema is None else [name for name in columns if name not in schema.names]
        if absent:
            raise UserError(
                f"the measurements of {spec.name} have no column '{absent[0]}'; give the files with "
                "--input, or name the columns that have landed"
            )
        where = "true"
        if key:
            known = queries.run(f"SELECT DISTINCT {key} FROM landed").to_pylist()
            sample = sorted(known, key=lambda row: hashlib.sha256(repr(row).encode()).digest())[:keys]
            where = " OR ".join(map(_is_key, sample)) or "false"
        found = queries.run(
            f"SELECT {', '.join(map(quote_name, columns))} FROM (SELECT *, {place} FROM landed WHERE {where}) "
            f"WHERE _place <= {rows}"
        )
    if not found.num_rows:
        raise UserError(f"nothing has landed for {spec.name}; ingest files first, or give --input")
    arrays = {name: found[name].combine_chunks() for name in columns}
    return RawRows(arrays, found.num_rows)


def _is_key(row: dict[str, Any]) -> str:
    """Return the SQL condition for the rows of a key."""
    values = {
        name: quote_text(value) if isinstance(value, str) else str(value) for name, value in row.items()
    }
    return f"({' AND '.join(f'{quote_name(name)} = {value}' for name, value in values.items())})"
