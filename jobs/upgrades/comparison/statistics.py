"""Compare the prediction and calibration of two generations on the rows that both have estimated.

The comparison covers all rows and the course over time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.lineage.generations import Generation, read_origin_manifest
from jobs.snapshots.row_hash import compute_row_hashes
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding.arrow import to_numpy
from jobs.storage.queries import Queries
from jobs.storage.warehouse import Tables
from jobs.upgrades.comparison.common_rows import BOTH, PAIRED, SIDES, SUMS
from jobs.upgrades.comparison.paired import BLOCKS, Gain, PairedSums, Squares, compute_gain
from kalman.evaluation.diagnostics import mean_bounds

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


Floats = NDArray[np.float64]
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
