"""Compare the prediction and calibration of two generations on the rows that both have estimated.

The comparison covers all rows, the course over time, and how much better one version predicts than the other.

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
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy.special import stdtrit

from jobs.lineage.generations import Generation, read_origin_manifest
from jobs.snapshots.row_hash import compute_row_hashes
from jobs.specs.migration import Answer
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding.arrow import to_numpy
from jobs.storage.queries import Queries
from jobs.storage.warehouse import Tables
from jobs.upgrades.common_rows import BOTH, PAIRED, SIDES, SUMS
from kalman.evaluation.diagnostics import mean_bounds

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


JUDGED = [f"{letter}_{what}" for letter in SIDES for what in ("nis_outside", "bias_outside")]
KeySums = dict[str, NDArray[Any]]
"""Sums of K keys by name, (K,) each; NaN for a key without suitable rows."""


def is_same_model(warehouse: Tables, spec: ModelSpec, old: Generation, new: Generation) -> bool:
    """Return whether two generations have the same model and parameters, even if their version numbers differ.

    spec: spec of the new generation.
    """
    sides: list[tuple[str, Mapping[str, Any]]] = []
    for one in (old, new):
        if one.snapshot_id:
            made = read_origin_manifest(warehouse, one)
            model, parameters = made.model_spec(), made.parameters
        else:  # the old side is a run over history with the values in the spec
            model, parameters = spec, {}
        sides.append((model.model_copy(update={"version": 1}).fingerprint(), parameters))
    return sides[0] == sides[1]


class JudgedKeys(NamedTuple):
    """The statistics of all keys, and the judged sums (`judge_keys`) of a sample of keys, ordered by key.

    scored: the sums over keys that `TimeCourse.gain` needs.
    """

    numbers: dict[str, Any]
    scored: dict[str, Any]
    sample: list[str]
    sums: KeySums


def judge_all_keys(queries: Queries, sample: int) -> JudgedKeys:
    """Return statistics over all keys, with the keys predicted better and worse and the shares outside their bounds.

    The keys are read in batches of some thousands, so that only the sample stays in memory.

    sample: number of keys in the sample.
    """
    columns = ", ".join(f"sum(CAST({name} AS DOUBLE)) AS {name}" for name in BOTH)
    total, count = dict.fromkeys(_SUMMED, 0.0), dict.fromkeys(_SUMMED, 0)
    keys, drawn = 0, _Sample(sample)
    for batch in queries.batches(f"SELECT key, {columns} FROM {PAIRED} GROUP BY key"):
        judged = judge_keys({name: to_numpy(batch[name], np.nan) for name in BOTH})
        keys += batch.num_rows
        drawn.add(batch["key"], judged)
        for name, values in _compute_summands(judged).items():
            known = values[~np.isnan(values)]
            total[name] += float(known.sum())
            count[name] += len(known)
    names, sums = drawn.sort_by_key_text()
    return JudgedKeys(*_compute_statistics(keys, total, count), names, sums)


def judge_keys(sums: KeySums) -> KeySums:
    """Return the sums of keys with added `gain`, `nis_outside` and `bias_outside`; NaN for a key without suitable rows.

    gain: log-likelihood per row of the new generation minus that of the old one. nis_outside: 1 if the average NIS is
    outside its 95 % chi-square bounds, else 0. bias_outside: 1 if the mean innovation differs from 0 by more than 1.96
    of its standard deviations, else 0.
    """
    judged = dict(sums)
    with np.errstate(invalid="ignore", divide="ignore"):
        judged["gain"] = (sums["b_ll"] - sums["a_ll"]) / sums["a_rows"]
    for letter in SIDES:
        degrees = np.nan_to_num(sums[f"{letter}_degrees"])
        low, high = mean_bounds(1, np.maximum(degrees, 1.0))
        ratio = sums[f"{letter}_nis"] / np.maximum(degrees, 1.0)
        known = (degrees > 0) & np.isfinite(ratio)
        judged[f"{letter}_nis_outside"] = np.where(known, (ratio < low) | (ratio > high), np.nan)
        count, total = np.nan_to_num(sums[f"{letter}_components"]), sums[f"{letter}_innovation"]
        with np.errstate(invalid="ignore", divide="ignore"):
            far = np.abs(total) / np.sqrt(count) > 1.959963984540054
        judged[f"{letter}_bias_outside"] = np.where(count > 0, far, np.nan)
    return judged


_SUMMED = [*BOTH, *JUDGED, "better", "worse", "scored_keys", *Squares._fields, "rows4"]


def _compute_summands(keys: KeySums) -> KeySums:
    """Return the values of each key that are summed over keys."""
    scored, gained, gain = keys["scored"], keys["gained"], keys["gain"]
    return {
        **{name: keys[name] for name in (*BOTH, *JUDGED)},
        "better": 1.0 * (gain > 0),
        "worse": 1.0 * (gain < 0),
        "scored_keys": 1.0 * (scored > 0),
        "gain2": gained * gained,
        "gain_rows": gained * scored,
        "rows2": scored * scored,
        "rows4": scored**4,
    }


def _compute_statistics(
    keys: int, total: Mapping[str, float], count: Mapping[str, int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the statistics over all keys and the sums for the gain; count: number of keys in each sum."""

    def average(name: str, by: str) -> dict[str, float | None]:
        return {
            side: total[f"{letter}_{name}"] / total[f"{letter}_{by}"]
            if count[f"{letter}_{name}"] and total[f"{letter}_{by}"]
            else None
            for letter, side in SIDES.items()
        }

    def share(name: str) -> dict[str, float | None]:
        names = {side: f"{letter}_{name}" for letter, side in SIDES.items()}
        return {side: total[one] / count[one] if count[one] else None for side, one in names.items()}

    numbers = {
        "keys": keys,
        "rows": int(total["a_rows"]),
        "log_likelihood_a_row": average("ll", "rows"),
        "nis_a_component": average("nis", "degrees"),
        "nis_outside": share("nis_outside"),
        "bias": average("innovation", "components"),
        "bias_outside": share("bias_outside"),
        "flagged": {side: int(total[f"{letter}_flagged"]) for letter, side in SIDES.items()},
        "keys_better": int(total["better"]),
        "keys_worse": int(total["worse"]),
    }
    by_key = Squares(*(total[name] for name in Squares._fields))
    scored = {"rows": int(total["scored"]), "keys": int(total["scored_keys"])}
    return numbers, {**scored, "by_key": by_key, "rows4": total["rows4"]}


class _Sample:
    """A sample of keys: the keys with the smallest hashes among all added keys."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._keys: NDArray[np.object_] = np.empty(0, object)
        self._hashes = np.empty(0, np.int64)
        self._sums: KeySums = {}

    def add(self, keys: pa.Array, sums: KeySums) -> None:
        hashes = np.concatenate([self._hashes, compute_row_hashes([keys]).view(np.int64)])
        kept = np.argsort(hashes, kind="stable")[: self._size]
        self._hashes = hashes[kept]
        self._keys = np.concatenate([self._keys, np.array(keys.to_pylist(), object)])[kept]
        self._sums = {
            name: np.concatenate([self._sums.get(name, np.empty(0)), values])[kept]
            for name, values in sums.items()
        }

    def sort_by_key_text(self) -> tuple[list[str], KeySums]:
        """Return the keys, ordered by their texts, with their sums."""
        order = np.argsort(self._keys, kind="stable")
        names = (*BOTH, "gain", *JUDGED)
        return self._keys[order].tolist(), {name: self._sums.get(name, np.empty(0))[order] for name in names}


BINS = 60


class VersionSums(NamedTuple):
    """The sums `common_rows.SUMS` (N,) of one side for N bins of time or N keys; NaN for a bin or key without rows."""

    rows: Floats
    ll: Floats
    nis: Floats
    degrees: Floats
    flagged: Floats
    innovation: Floats
    components: Floats


class TimeCourse(NamedTuple):
    """Sums over time.

    time (B,): the middles of up to `BINS` bins of equal width, in microseconds. sums: sums of both sides in each bin.
    block_rows, block_gain (T,): number of rows that both versions have scored, and the new version's gain on these
    rows, in up to `paired.BLOCKS` blocks of about equally many rows. moments: sums over groups of one key and event
    time.
    """

    time: NDArray[np.int64]
    sums: dict[str, VersionSums]
    block_rows: Floats
    block_gain: Floats
    moments: Squares

    def gain(self, scored: Mapping[str, Any]) -> Gain:
        """Return the gain per row on the rows that both versions have scored; scored: sums of these rows by key."""
        return compute_gain(
            PairedSums(moments=self.moments, block_rows=self.block_rows, block_gain=self.block_gain, **scored)
        )


def compute_time_course(queries: Queries) -> TimeCourse:
    """Return the sums over time of the rows in `PAIRED` (`common_rows.keep_paired_sums`).

    The gain needs blocks of equal numbers of rows besides bins of equal width: with equal widths, one row with a wrong
    clock would put all other rows into one block.
    """
    edges = _compute_edges(queries)
    if not edges:
        empty = np.empty(0)
        nothing = {side: VersionSums(*[empty] * len(SUMS)) for side in SIDES.values()}
        return TimeCourse(np.empty(0, np.int64), nothing, empty, empty, Squares())
    first, width = edges[0], max(1, -(-(edges[-1] - edges[0] + 1) // BINS))
    added = {
        **{name: name for name in BOTH},
        "gain2": "gained * gained",
        "gain_rows": "gained * scored",
        "rows2": "scored * scored",
    }
    sums = ", ".join(f"sum(CAST({what} AS DOUBLE)) AS {name}" for name, what in added.items())
    cells = queries.run(
        f"SELECT (micros - {first}) / {width} AS bin, {build_block_sql('micros', sorted(set(edges[1:-1])))} "
        f"AS block, {sums} "
        f"FROM {PAIRED} GROUP BY bin, block ORDER BY bin, block"
    )
    column = {name: to_numpy(cells[name].combine_chunks(), np.nan) for name in added}
    bins, bin_of = np.unique(to_numpy(cells["bin"].combine_chunks()), return_inverse=True)
    by_bin = {name: _sum_by_group(bin_of, column[name]) for name in BOTH}
    blocks = np.unique(to_numpy(cells["block"].combine_chunks()), return_inverse=True)[1]
    rows, gain = (
        np.nan_to_num(_sum_by_group(blocks, column[name]), posinf=np.inf, neginf=-np.inf)
        for name in ("scored", "gained")
    )
    return TimeCourse(
        first + bins * width + width // 2,
        {side: select_version_sums(by_bin, letter) for letter, side in SIDES.items()},
        rows[rows > 0],
        gain[rows > 0],
        Squares(*(float(np.nansum(column[name])) for name in Squares._fields)),
    )


def _compute_edges(queries: Queries) -> list[int]:
    """Return the times (us) that divide the groups into `BLOCKS` equal parts, including the first and the last time."""
    count = queries.run(f"SELECT count(*) AS n FROM {PAIRED}")["n"][0].as_py()
    if not count:
        return []
    places = [1, *(-(-number * count // BLOCKS) for number in range(1, BLOCKS)), count]
    wanted = ", ".join(map(str, sorted(set(places))))
    numbered = f"SELECT micros, row_number() OVER (ORDER BY micros) AS place FROM {PAIRED}"
    found = queries.run(f"SELECT place, micros FROM ({numbered}) WHERE place IN ({wanted})")
    at = dict(zip(found["place"].to_pylist(), found["micros"].to_pylist(), strict=True))
    return [at[place] for place in places]


def _sum_by_group(group: NDArray[np.int64], values: Floats) -> Floats:
    """Return the sum of the known values of each group (G,); NaN for a group without known values."""
    known, groups = ~np.isnan(values), int(group.max()) + 1
    total = np.bincount(group[known], values[known], groups)
    return np.where(np.bincount(group[known], minlength=groups) > 0, total, np.nan)


def build_block_sql(value: str, edges: list[int]) -> str:
    """Return SQL for the number of sorted edges that are below a value, found by bisection."""

    def between(low: int, high: int) -> str:
        if low == high:
            return str(low)
        middle = (low + high) // 2
        above, below = between(middle + 1, high), between(low, middle)
        return f"CASE WHEN {value} > {edges[middle]} THEN {above} ELSE {below} END"

    return between(0, len(edges))


def select_version_sums(sums: Mapping[str, Floats], letter: str) -> VersionSums:
    """Return the sums of one side as `VersionSums`; letter: the letter of the side."""
    return VersionSums(*(sums[f"{letter}_{name}"] for name in SUMS))
