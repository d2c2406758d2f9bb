"""The content of the report on two generations: statistics in total, over time and by key, and examples of keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.encoding.arrow import to_numpy
from jobs.lineage.generations import origin
from jobs.offline.quantity import measured_direction
from jobs.storage.queries import among, open_queries, quoted
from jobs.storage.warehouse import Tables
from jobs.upgrades.comparison.common_rows import (
    LANDED,
    SIDES,
    CommonRows,
    common_rows,
    count_unequal_rows,
    keep_paired_sums,
    key_text,
    micros,
)
from jobs.upgrades.comparison.decision import Comparison, decide
from jobs.upgrades.comparison.over_time import OverTime, Sums, sums_of, sums_over_time
from jobs.upgrades.comparison.paired import Gain, PairedSums, gain_of
from jobs.upgrades.comparison.statistics import judge_all_keys, same_model

if TYPE_CHECKING:
    from jobs.lineage.generations import Generation
    from jobs.specs.model_spec import ModelSpec

Floats = NDArray[np.float64]
SAMPLE = 5_000
"""At most so many keys are drawn; the statistics count all."""
ROWS_SHOWN = 400


class Example(NamedTuple):
    """The newest rows of one key: measurements, and both sides' estimates as times, means and standard deviations.

    why: the reason for this key; quantity: the name of what is estimated; time, measured: (N,), in microseconds.
    nis: of each side's rows, where one component is measured; else empty.
    """

    key: str
    why: str
    quantity: str
    time: NDArray[np.int64]
    measured: Floats
    old: tuple[NDArray[np.int64], Floats, Floats]
    new: tuple[NDArray[np.int64], Floats, Floats]
    nis: tuple[Floats, Floats] = (np.empty(0), np.empty(0))


class Content(NamedTuple):
    """The content of a report.

    old, new: generation, version, snapshot, status; limits: the spec's section `upgrade`; time (B,): the middle of each
    bin in microseconds; by_time, by_key: the sums of both sides in each bin, and of each key of a sample; keys, gain
    (K,): that sample's keys, and the log-likelihood per row that each gains.
    """

    model: str
    description: str
    old: dict[str, Any]
    new: dict[str, Any]
    comparison: Comparison
    limits: dict[str, Any]
    time: NDArray[np.int64]
    by_time: dict[str, Sums]
    keys: list[str]
    by_key: dict[str, Sums]
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
            "keys_best": self._ranked(order[::-1][:20]),
            "keys_worst": self._ranked(order[:20]),
        }

    def _ranked(self, places: NDArray[np.int64]) -> list[dict[str, Any]]:
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


def gather(warehouse: Tables, spec: ModelSpec, old: Generation, new: Generation, first_batch: int) -> Content:
    """Compare a new generation with an old one on the rows that both have estimated.

    Of large tables the queries use two to three times `queries.MEMORY`, and temporary files: about 100 bytes for each
    key and event time. Besides, the memory has the corrected keys and times, the sums of `SAMPLE` keys, and
    `ROWS_SHOWN` rows of each example.

    Args:
        warehouse: with both generations' estimates.
        spec: the new version's, with its thresholds (`upgrade`).
        old: for example the live generation.
        new: for example its shadow.
        first_batch: the old generation's first micro-batch whose rows the new one has too.
    """
    with open_queries(warehouse.root) as queries:
        rows = common_rows(queries, spec.name, old.generation, new.generation, first_batch)
        keep_paired_sums(warehouse, spec, rows)
        keys, course = judge_all_keys(queries, SAMPLE), sums_over_time(queries)
        numbers = {**keys.numbers, "gain": paired_gain(keys.scored, course)._asdict()}
        if same_model(warehouse, spec, old, new):
            numbers["unequal_rows"] = count_unequal_rows(rows)
        by_key, gain = {side: sums_of(keys.sums, letter) for letter, side in SIDES.items()}, keys.sums["gain"]
        chosen = [(keys.sample[at], why) for at, why in choose_examples(gain, by_key["old"].rows)]
        quantity = _shown_quantity(origin(warehouse, old).model_spec(), spec) if chosen else None
        examples = _examples(spec, rows, chosen, *quantity) if quantity else []
    return Content(
        spec.name,
        spec.description,
        _generation_data(old),
        _generation_data(new),
        decide(numbers, spec.upgrade),
        spec.upgrade.model_dump(),
        course.time,
        course.sums,
        keys.sample,
        by_key,
        gain,
        examples,
    )


def paired_gain(scored: dict[str, Any], course: OverTime) -> Gain:
    """Return the gain per row of the rows that both versions have scored, from their sums by key and over time."""
    return gain_of(
        PairedSums(
            moments=course.moments, block_rows=course.block_rows, block_gain=course.block_gain, **scored
        )
    )


def choose_examples(gain: Floats, rows: Floats) -> list[tuple[int, str]]:
    """Return the indices of the keys with the most rows and the extreme gains, each once, with the reason."""
    if not len(gain):
        return []
    enough = np.where(rows >= min(20.0, np.median(rows)), gain, np.nan)  # a key of two rows is no example
    wanted = [(int(np.argmax(rows)), "the most rows")]
    if np.isfinite(enough).any():
        wanted += [
            (int(np.nanargmax(enough)), "gains most"),
            (int(np.nanargmin(enough)), "gains least" if np.nanmin(enough) >= 0 else "loses most"),
        ]
    reasons: dict[int, str] = {}
    for at, why in wanted:
        reasons[at] = f"{reasons[at]}, {why}" if at in reasons else why
    return list(reasons.items())


def _generation_data(one: Generation) -> dict[str, Any]:
    return {
        "generation": one.generation,
        "version": one.model_version,
        "status": one.status,
        "snapshot": one.snapshot_id,
        "parent": one.parent,
        "created_at": one.created_at,
    }


def _examples(
    spec: ModelSpec,
    rows: CommonRows,
    chosen: list[tuple[str, str]],
    name: str,
    directions: tuple[Floats, Floats],
) -> list[Example]:
    """Return the newest rows of chosen keys: measurements, and the estimates of both generations.

    name, directions: of the quantity to show (`_shown_quantity`).
    """
    wanted = among("key", [key for key, _ in chosen])
    old, new = (_newest_rows(rows, letter, wanted) for letter in SIDES)
    measured = (
        _measured_rows(spec, rows, name, wanted) if name in spec.measurement and rows.has_landed else None
    )
    is_single = len(spec.measurement) == 1
    return [_example(key, why, name, (old, new), measured, directions, is_single) for key, why in chosen]


def _newest_rows(rows: CommonRows, letter: str, wanted: str) -> pa.Table:
    """Return the newest estimates of one side's keys, ordered by key and time."""
    counted = rows.of(letter, ["key", "event_time", "mean", "covariance", "nis"], wanted)
    numbered = (
        f"SELECT key, {micros('event_time')} AS time, mean, covariance, nis, "
        f"row_number() OVER (PARTITION BY key ORDER BY event_time DESC) AS place FROM ({counted})"
    )
    return rows.queries.run(f"SELECT * FROM ({numbered}) WHERE place <= {ROWS_SHOWN} ORDER BY key, time")


def _measured_rows(spec: ModelSpec, rows: CommonRows, name: str, wanted: str) -> pa.Table:
    """Return the measurements of keys in one column, ordered by key and time."""
    landed = (
        f"SELECT {key_text(spec.key)} AS key, {micros(spec.time)} AS time, CAST({quoted(name)} AS DOUBLE) AS value "
        f"FROM {LANDED}"
    )
    return rows.queries.run(f"SELECT * FROM ({landed}) WHERE {wanted} ORDER BY key, time")


def _example(
    key: str,
    why: str,
    name: str,
    sides: tuple[pa.Table, pa.Table],
    measured: pa.Table | None,
    directions: tuple[Floats, Floats],
    is_single: bool,
) -> Example:
    own = [_rows_of(side, key) for side in sides]
    old, new = (_estimate_line(rows, direction) for rows, direction in zip(own, directions, strict=True))
    time, values = np.empty(0, np.int64), np.empty(0)
    first = min((line[0][0] for line in (old, new) if len(line[0])), default=None)
    if measured is not None and first is not None:
        landed = _rows_of(measured, key)
        time, values = _numbers(landed, "time"), _numbers(landed, "value")
        time, values = time[time >= first], values[time >= first]
    nis = [_numbers(rows, "nis") if is_single else np.empty(0) for rows in own]
    return Example(key, why, name, time, values, old, new, (nis[0], nis[1]))


def _rows_of(rows: pa.Table, key: str) -> pa.Table:
    """Return the rows of a key, of rows that are ordered by key."""
    keys = rows["key"].to_pylist()
    return rows.slice(keys.index(key), keys.count(key)) if key in keys else rows.slice(0, 0)


def _numbers(rows: pa.Table, name: str) -> NDArray[Any]:
    return to_numpy(rows[name].combine_chunks(), np.nan)


def _shown_quantity(old: ModelSpec, new: ModelSpec) -> tuple[str, tuple[Floats, Floats]]:
    """Return the name of the quantity to show, and its row of weights over the states of both versions.

    It is the first measured component if both versions measure it linearly, else a state that both have.
    """
    before, after = measured_direction(old), measured_direction(new)
    if before is not None and after is not None and old.measurement[0] == new.measurement[0]:
        return new.measurement[0], (before, after)
    common = [state for state in old.states if state in new.states]
    first, second = (common[0], common[0]) if common else (old.states[0], new.states[0])
    return second, (
        np.array([1.0 * (state == first) for state in old.states]),
        np.array([1.0 * (state == second) for state in new.states]),
    )


def _estimate_line(rows: pa.Table, direction: Floats) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Return times, and mean and standard deviation of a weighted sum of states; NaN where covariances are missing."""
    n = len(direction)
    time = _numbers(rows, "time")
    if not len(time):
        return time, np.empty(0), np.empty(0)
    mean = np.array(rows["mean"].to_pylist(), float).reshape(len(time), n) @ direction
    P = np.array(rows["covariance"].to_pylist(), float)
    if P.shape[1] == n * n:
        variance = np.einsum("i,kij,j->k", direction, P.reshape(len(time), n, n), direction)
    else:
        single = np.count_nonzero(direction) == 1  # one state's deviation needs no covariances
        variance = P @ direction**2 if single else np.full(len(time), np.nan)
    return time, mean, np.sqrt(np.maximum(variance, 0.0))
