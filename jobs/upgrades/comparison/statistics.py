"""Compare two generations on the rows that both have estimated: which predicts better, and which is better calibrated.

Three statistics a key: the predictive log-likelihood; the NIS, whose average is the number of measured components if a
filter's covariances are right, with the chi-square bounds of that average; and the bias, the mean of the normalised
innovations, if the spec writes them (`outputs.innovation`).
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
from jobs.upgrades.comparison.common_rows import BOTH, PAIRED, SIDES
from jobs.upgrades.comparison.paired import Squares
from kalman.evaluation.diagnostics import mean_bounds

JUDGED = [f"{letter}_{what}" for letter in SIDES for what in ("nis_outside", "bias_outside")]
KeySums = dict[str, NDArray[Any]]
"""Sums of K keys by name, (K,) each; NaN where no row tells."""


def is_same_model(warehouse: Tables, spec: ModelSpec, old: Generation, new: Generation) -> bool:
    """Tell if two generations have the same model and parameters, whatever their version numbers.

    spec: the new one's.
    """
    sides: list[tuple[str, Mapping[str, Any]]] = []
    for one in (old, new):
        if one.snapshot_id:
            made = read_origin_manifest(warehouse, one)
            model, parameters = made.model_spec(), made.parameters
        else:  # a run over history with the values in the spec
            model, parameters = spec, {}
        sides.append((model.model_copy(update={"version": 1}).fingerprint(), parameters))
    return sides[0] == sides[1]


class JudgedKeys(NamedTuple):
    """The statistics of all keys, and the sums of a sample of them, which `judge_keys` has judged, ordered by key.

    scored: what `TimeCourse.gain` needs of the keys.
    """

    numbers: dict[str, Any]
    scored: dict[str, Any]
    sample: list[str]
    sums: KeySums


def judge_all_keys(queries: Queries, sample: int) -> JudgedKeys:
    """Return the statistics over all keys, the keys predicted better and worse, and the shares outside their bounds.

    The keys come some thousands at a time, so that only the sample is in memory.

    sample: so many keys are drawn.
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
    """Return the sums of keys with gain, nis_outside and bias_outside of each: 1 or 0, NaN where no row tells.

    gain: log-likelihood per row that the new generation has more; nis_outside: the average NIS is outside its 95 %
    chi-square bounds; bias_outside: the mean innovation is more than 1.96 of its standard deviations from 0.
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
    """Return what is summed over keys."""
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
    """Return the statistics over all keys, and what the gain needs, from sums over keys and how many keys have each."""

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
    """The keys with the smallest hashes, of all that were added."""

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
        """Return the keys in the order of their texts, with their sums."""
        order = np.argsort(self._keys, kind="stable")
        names = (*BOTH, "gain", *JUDGED)
        return self._keys[order].tolist(), {name: self._sums.get(name, np.empty(0))[order] for name in names}
