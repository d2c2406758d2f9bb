"""The content of the report on two generations: statistics in total, over time and by key, and examples of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.insight import examples
from jobs.insight.examples import Example
from jobs.lineage.generations import Generation, read_origin_manifest
from jobs.specs.model_spec import ModelSpec
from jobs.state.kernel import find_projection
from jobs.storage.queries import build_in_condition, open_queries
from jobs.storage.warehouse import Tables
from jobs.upgrades.common_rows import (
    SIDES,
    CommonRows,
    count_unequal_rows,
    keep_paired_sums,
    open_common_rows,
)
from jobs.upgrades.decision import VersionComparison, decide
from jobs.upgrades.statistics import (
    VersionSums,
    compute_time_course,
    is_same_model,
    judge_all_keys,
    select_version_sums,
)

Floats = NDArray[np.float64]
SAMPLE = 5_000
"""The report draws at most this number of keys; its statistics count all keys."""
ROWS_DRAWN = 120
"""Newest rows of a key that are drawn; more would hide the difference of two versions."""
MOVED = 4
"""Number of keys whose change by a promotion is listed and drawn."""


class ComparisonContent(NamedTuple):
    """The content of a comparison report.

    old, new: generation, version, snapshot and status of each side.
    limits: the spec's section `upgrade`.
    time: (B,) the middle of each time bin in microseconds.
    by_time: the sums of each side in each bin.
    by_key: the sums of each side for each key of a sample.
    keys, gain: (K,) the keys of this sample, and the log-likelihood per row that the new version gains on each key.
    """

    model: str
    description: str
    old: dict[str, Any]
    new: dict[str, Any]
    comparison: VersionComparison
    limits: dict[str, Any]
    time: NDArray[np.int64]
    by_time: dict[str, VersionSums]
    keys: list[str]
    by_key: dict[str, VersionSums]
    gain: Floats
    examples: list[Example]

    def data(self) -> dict[str, Any]:
        """Return the content of the JSON report."""
        order = np.argsort(self.gain)
        return {
            "model": self.model,
            "old": self.old,
            "new": self.new,
            "good": self.comparison.good,
            "answer": self.comparison.answer,
            "rows_needed": self.comparison.rows_needed,
            "reasons": self.comparison.reasons,
            "numbers": self.comparison.numbers,
            "thresholds": self.limits,
            "over_time": {
                "middle_us": self.time,
                **{side: sums._asdict() for side, sums in self.by_time.items()},
            },
            "keys_best": self._list_ranked(order[::-1][:20]),
            "keys_worst": self._list_ranked(order[:20]),
        }

    def _list_ranked(self, places: NDArray[np.int64]) -> list[dict[str, Any]]:
        return [
            {
                "key": self.keys[at],
                "rows": int(self.by_key["old"].rows[at]),
                "gain_a_row": float(self.gain[at]),
                **{
                    f"nis_a_component_{side}": float(sums.nis[at] / sums.degrees[at])
                    if sums.degrees[at] > 0
                    else None
                    for side, sums in self.by_key.items()
                },
            }
            for at in places.tolist()
        ]


def gather(
    warehouse: Tables, spec: ModelSpec, old: Generation, new: Generation, first_batch: int
) -> ComparisonContent:
    """Compare a new generation with an old one on the rows that both have estimated.

    For large tables the queries use two to three times `queries.MEMORY`, and temporary files of about 100 bytes for
    each key and event time. The process also keeps in memory the corrected keys and times, the sums of `SAMPLE` keys,
    and `ROWS_DRAWN` rows of each example.

    Args:
        warehouse: the warehouse with both generations' estimates.
        spec: the spec of the new version, with its thresholds (`upgrade`).
        old: the generation to compare with, for example the live one.
        new: the generation to judge, for example the live generation's shadow.
        first_batch: the old generation's first micro-batch whose rows the new generation has too.
    """
    with open_queries(warehouse.root) as queries:
        rows = open_common_rows(queries, spec.name, old.generation, new.generation, first_batch)
        keep_paired_sums(warehouse, spec, rows)
        keys, course = judge_all_keys(queries, SAMPLE), compute_time_course(queries)
        numbers = {**keys.numbers, "gain": course.gain(keys.scored)._asdict()}
        if is_same_model(warehouse, spec, old, new):
            numbers["unequal_rows"] = count_unequal_rows(rows)
        by_key = {side: select_version_sums(keys.sums, letter) for letter, side in SIDES.items()}
        gain = keys.sums["gain"]
        versions = read_origin_manifest(warehouse, old).model_spec(), spec
        numbers["moved"] = moved = find_moved_keys(rows, *versions)
        by_gain = [(keys.sample[at], why) for at, why in choose_examples(gain, by_key["old"].rows)]
        by_move = [(one["key"], f"moves {one['deviations']:.3g} sd") for one in moved]
        chosen = examples.join_reasons([*by_move, *by_gain])
        shown = _read_examples(spec, versions[0], rows, chosen) if chosen else []
    return ComparisonContent(
        spec.name,
        spec.description,
        _describe_generation(old),
        _describe_generation(new),
        decide(numbers, spec.upgrade),
        spec.upgrade.model_dump(),
        course.time,
        course.sums,
        keys.sample,
        by_key,
        gain,
        shown,
    )


def find_moved_keys(rows: CommonRows, old: ModelSpec, new: ModelSpec) -> list[dict[str, Any]]:
    """Return the keys whose newest estimate differs most between two versions, in the old one's standard deviations.

    Keys count whose newest rows have the same event time. Each has the drawn quantity (`choose_quantity`) by the old
    and by the new version, and `deviations`, the distance of these two.
    """
    (name, _), sides = examples.choose_quantity(old, new), []
    for letter, spec in zip(SIDES, (old, new), strict=True):
        projection = find_projection(spec, name)
        if projection is None or not projection.weights.any():
            return []
        mean, variance = examples.build_moments_sql(projection)
        counted = rows.of(letter, ["key", "event_time", "mean", "covariance"])
        sides.append(
            f"SELECT key, event_time, '{letter}' AS side, {mean} AS mean, {variance} AS variance FROM ({counted})"
        )
    newest = ", ".join(f"last_value({one} ORDER BY event_time) AS {one}" for one in ("mean", "variance"))
    last = f"SELECT key, side, max(event_time) AS at, {newest} FROM ({' UNION ALL '.join(sides)}) GROUP BY key, side"
    old_mean, new_mean = (f"max(mean) FILTER (WHERE side = '{letter}')" for letter in SIDES)
    both = (
        f"SELECT key, {old_mean} AS old, {new_mean} AS new, sqrt(max(variance) FILTER (WHERE side = 'a')) AS sd "
        f"FROM ({last}) GROUP BY key HAVING count(*) = 2 AND min(at) = max(at)"
    )
    # Without a deviation, and where one version has diverged, any difference counts as infinite.
    far = "nanvl(abs(new - old) / sd, CAST('Infinity' AS DOUBLE))"
    apart = f"SELECT key, old, new, CASE WHEN new = old THEN 0.0 ELSE {far} END AS deviations FROM ({both})"
    found = rows.queries.run(
        f"SELECT * FROM ({apart}) WHERE deviations > 0 ORDER BY deviations DESC, abs(new - old) DESC, key LIMIT {MOVED}"
    )
    return [{**one, "quantity": name} for one in found.to_pylist()]


def choose_examples(gain: Floats, rows: Floats) -> list[tuple[int, str]]:
    """Return the indices of the keys with the most rows and the extreme gains, each index once, with the reason."""
    if not len(gain):
        return []
    enough = np.where(rows >= min(20.0, np.median(rows)), gain, np.nan)  # two rows show too little
    wanted = [(int(np.argmax(rows)), "the most rows")]
    if np.isfinite(enough).any():
        wanted += [
            (int(np.nanargmax(enough)), "gains most"),
            (int(np.nanargmin(enough)), "gains least" if np.nanmin(enough) >= 0 else "loses most"),
        ]
    return examples.join_reasons(wanted)


def _describe_generation(one: Generation) -> dict[str, Any]:
    return {
        "generation": one.generation,
        "version": one.model_version,
        "status": one.status,
        "snapshot": one.snapshot_id,
        "parent": one.parent,
        "created_at": one.created_at,
    }


def _read_examples(
    spec: ModelSpec, old: ModelSpec, rows: CommonRows, chosen: Sequence[tuple[str, str]]
) -> list[Example]:
    """Return examples of the chosen keys: their newest measurements, and the estimates of both generations."""
    keys = [key for key, _ in chosen]
    columns = ["key", "event_time", "mean", "covariance", "nis", "generation"]
    sides = [
        examples.read_newest_rows(
            rows.queries, rows.of(letter, columns, build_in_condition("key", keys)), ROWS_DRAWN
        )
        for letter in SIDES
    ]
    name, is_measured = examples.choose_quantity(old, spec)
    measured = examples.read_measured_rows(rows.queries, spec, name, keys) if is_measured else None
    versions = {rows.old: old, rows.new: spec}

    def line(mine: pa.Table) -> examples.EstimateLine:
        components = np.full(mine.num_rows, float(len(spec.measurement) == 1))
        return examples.build_line(mine, components, versions, name)

    return examples.make_examples(chosen, name, measured, sides, line)
