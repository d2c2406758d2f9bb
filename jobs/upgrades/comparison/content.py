"""Gather what the report on two generations shows: the numbers, their course over time, the keys, some estimates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pyspark.sql import functions as F

from jobs.encoding.keys import key_kind, text_of
from jobs.lineage.live import latest_corrections
from jobs.lineage.start_point import origin
from jobs.upgrades.comparison.decision import Comparison, decide
from jobs.upgrades.comparison.statistics import SIDES, SUMS, moments, per_key, same_model, totals, unequal
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.tables import estimates, measurements

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.lineage.generations import Generation
    from jobs.specs.model_spec import ModelSpec

Floats = NDArray[np.float64]
BINS = 60
SAMPLE = 5_000
"""Keys that the pictures show at most; the numbers are of all."""
ROWS_SHOWN = 400


class Sums(NamedTuple):
    """Sums of one side over N bins or keys (N,), as `compare.SUMS` says; NaN where there is nothing."""

    rows: Floats
    ll: Floats
    nis: Floats
    degrees: Floats
    flagged: Floats
    innovation: Floats
    components: Floats


class Shown(NamedTuple):
    """One key's rows: time (N,) microseconds, what was measured, and both estimates with their deviations."""

    key: str
    why: str
    what: str
    time: NDArray[np.int64]
    measured: Floats
    old: tuple[NDArray[np.int64], Floats, Floats]
    new: tuple[NDArray[np.int64], Floats, Floats]


class Content(NamedTuple):
    """What the report says.

    old, new: generation, version, snapshot, status; limits: the spec's section `upgrade`; time (B,): the middle of each
    bin in microseconds; course, keys: sums of both sides by bin, and by key of a sample; names, gain (K,): of the keys.
    """

    model: str
    description: str
    old: dict[str, Any]
    new: dict[str, Any]
    found: Comparison
    limits: dict[str, Any]
    time: NDArray[np.int64]
    course: dict[str, Sums]
    names: list[str]
    keys: dict[str, Sums]
    gain: Floats
    shown: list[Shown]

    def data(self) -> dict[str, Any]:
        """Return the same for a program."""
        order = np.argsort(self.gain)
        return {
            "model": self.model,
            "old": self.old,
            "new": self.new,
            "good": self.found.good,
            "reasons": self.found.reasons,
            "numbers": self.found.numbers,
            "thresholds": self.limits,
            "over_time": {
                "middle_us": self.time,
                **{side: self.course[side]._asdict() for side in self.course},
            },
            "keys_best": self._ranked(order[::-1][:20]),
            "keys_worst": self._ranked(order[:20]),
        }

    def _ranked(self, places: NDArray[np.int64]) -> list[dict[str, Any]]:
        return [
            {
                "key": self.names[at],
                "rows": int(self.keys["old"].rows[at]),
                "gain_a_row": float(self.gain[at]),
                **{
                    f"nis_a_component_{side}": float(sums.nis[at] / sums.degrees[at])
                    if sums.degrees[at] > 0
                    else None
                    for side, sums in self.keys.items()
                },
            }
            for at in places.tolist()
        ]


def gather(
    warehouse: Warehouse, spec: ModelSpec, old: Generation, new: Generation, first_batch: int
) -> Content:
    """Compare a new generation with an old one on the rows that both have, and gather what the report shows.

    Args:
        warehouse: where.
        spec: the new version's, with its thresholds (`upgrade`).
        old: the live generation, say.
        new: its shadow.
        first_batch: of the old generation, whose rows the new one has too.
    """
    both = moments(warehouse, spec, old.generation, new.generation, first_batch).persist()
    keys = per_key(both).persist()
    try:
        numbers = totals(keys)
        if same_model(warehouse, old, new):
            table = warehouse.read(estimates(spec.name))
            numbers["unequal_rows"] = unequal(table, old.generation, new.generation, first_batch)
        time, course = _course(both)
        sample = (
            keys.orderBy(F.xxhash64("key")).limit(SAMPLE).toPandas().sort_values("key", ignore_index=True)
        )
    finally:
        keys.unpersist()
        both.unpersist()
    names, gain = sample["key"].tolist(), sample["gain"].to_numpy(np.float64)
    by_key = {side: _sums(sample, letter) for letter, side in SIDES.items()}
    chosen = [(names[at], why) for at, why in choose(gain, by_key["old"].rows)]
    shown = _shown(warehouse, spec, old, new, first_batch, chosen)
    return Content(
        spec.name,
        spec.description,
        _about(old),
        _about(new),
        decide(numbers, spec.upgrade),
        spec.upgrade.model_dump(),
        time,
        course,
        names,
        by_key,
        gain,
        shown,
    )


def choose(gain: Floats, rows: Floats) -> list[tuple[int, str]]:
    """Return which keys to show, and why: most rows, most gained, most lost; each once."""
    if not len(gain):
        return []
    enough = np.where(rows >= min(20.0, np.median(rows)), gain, np.nan)  # a key of two rows shows nothing
    wanted = [(int(np.argmax(rows)), "the most rows")]
    if np.isfinite(enough).any():
        wanted += [
            (int(np.nanargmax(enough)), "gains most"),
            (int(np.nanargmin(enough)), "gains least" if np.nanmin(enough) >= 0 else "loses most"),
        ]
    found: dict[int, str] = {}
    for at, why in wanted:
        found[at] = f"{found[at]}, {why}" if at in found else why
    return list(found.items())


def _about(one: Generation) -> dict[str, Any]:
    return {
        "generation": one.generation,
        "version": one.model_version,
        "status": one.status,
        "snapshot": one.snapshot_id,
        "parent": one.parent,
        "created_at": one.created_at,
    }


def _course(both: DataFrame) -> tuple[NDArray[np.int64], dict[str, Sums]]:
    """Return the sums of both sides over equal pieces of time, and the middle of each."""
    micros = F.unix_micros("event_time")
    span = both.agg(F.min(micros).alias("first"), F.max(micros).alias("last")).first()
    if span is None or span["first"] is None:
        nothing = np.empty(0)
        return np.empty(0, np.int64), {side: Sums(*[nothing] * len(SUMS)) for side in SIDES.values()}
    first, width = int(span["first"]), max(1, -(-(int(span["last"]) - int(span["first"]) + 1) // BINS))
    number = F.floor((micros - first) / width).cast("bigint")
    names = [f"{letter}_{name}" for letter in SIDES for name in SUMS]
    sums = [F.sum(F.col(name).cast("double")).alias(name) for name in names]
    frame = both.groupBy(number.alias("bin")).agg(*sums).orderBy("bin").toPandas()
    time = first + frame["bin"].to_numpy(np.int64) * width + width // 2
    return time, {side: _sums(frame, letter) for letter, side in SIDES.items()}


def _sums(frame: Any, letter: str) -> Sums:
    return Sums(*(frame[f"{letter}_{name}"].to_numpy(np.float64) for name in SUMS))


def _shown(
    warehouse: Warehouse,
    spec: ModelSpec,
    old: Generation,
    new: Generation,
    first_batch: int,
    chosen: list[tuple[str, str]],
) -> list[Shown]:
    """Return the newest rows of keys, with why each is shown: what was measured, what both versions make of it."""

    if not chosen:
        return []
    name, directions = _what(origin(warehouse, old).model_spec(), spec)
    wanted = F.col("key").isin([key for key, _ in chosen])
    theirs = (F.col("generation") == old.generation) & (F.col("batch_id") >= first_batch)
    theirs = theirs | (F.col("generation") == new.generation)
    columns = ("key", "generation", F.unix_micros("event_time").alias("time"), "mean", "covariance")
    table = (
        latest_corrections(warehouse.read(estimates(spec.name)).filter(wanted & theirs))
        .select(*columns)
        .toPandas()
    )
    table = table.sort_values("time", kind="stable")
    measured = None
    if name in spec.measurement and warehouse.exists(measurements(spec.name)) and len(table):
        landed = warehouse.read(measurements(spec.name))
        at, key = F.unix_micros(F.col(f"`{spec.time}`")), text_of(key_kind(spec.key, landed.schema))
        rows = landed.select(
            key.alias("key"), at.alias("time"), F.col(f"`{name}`").cast("double").alias("value")
        )
        measured = rows.filter(wanted & (F.col("time") >= int(table["time"].min()))).toPandas()
    return [_one(key, why, name, table, measured, (old, new), directions) for key, why in chosen]


def _one(
    key: str,
    why: str,
    name: str,
    table: Any,
    measured: Any,
    sides: tuple[Generation, Generation],
    directions: tuple[Floats, Floats],
) -> Shown:
    mine = table[table["key"] == key]
    lines = [
        _line(mine[mine["generation"] == one.generation].tail(ROWS_SHOWN), direction)
        for one, direction in zip(sides, directions, strict=True)
    ]
    time, values = np.empty(0, np.int64), np.empty(0)
    first = min((line[0][0] for line in lines if len(line[0])), default=None)
    if measured is not None and first is not None:
        seen = measured[(measured["key"] == key) & (measured["time"] >= first)].sort_values("time")
        time, values = seen["time"].to_numpy(np.int64), seen["value"].to_numpy(np.float64)
    return Shown(key, why, name, time, values, lines[0], lines[1])


def _what(old: ModelSpec, new: ModelSpec) -> tuple[str, tuple[Floats, Floats]]:
    """Return what is shown, and its direction among the states of both: what is measured, else a state of both."""
    before, after = measured_direction(old), measured_direction(new)
    if before is not None and after is not None and old.measurement[0] == new.measurement[0]:
        return new.measurement[0], (before, after)
    common = [state for state in old.states if state in new.states]
    first, second = (common[0], common[0]) if common else (old.states[0], new.states[0])
    return second, (
        np.array([1.0 * (state == first) for state in old.states]),
        np.array([1.0 * (state == second) for state in new.states]),
    )


def measured_direction(spec: ModelSpec) -> Floats | None:
    """Return how the first measured component depends on the state, None where that is no fixed row of numbers."""
    observation = spec.definition().get("observation") or {}
    if "h" in observation or observation.get("offset"):
        return None
    H = observation.get("H")
    if H is None:
        return np.eye(1, len(spec.states))[0] if len(spec.states) == len(spec.measurement) else None
    try:
        row = np.array(H[0], np.float64)
    except (TypeError, ValueError):
        return None
    return row if row.shape == (len(spec.states),) else None


def _line(rows: Any, direction: Floats) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Return times, and mean and standard deviation of the state in a direction; NaN without covariances."""
    n = len(direction)
    time = rows["time"].to_numpy(np.int64)
    if not len(time):
        return time, np.empty(0), np.empty(0)
    mean = np.array([np.asarray(value, float) for value in rows["mean"]]).reshape(len(time), n) @ direction
    P = np.array([np.asarray(value, float) for value in rows["covariance"]])
    if P.shape[1] == n * n:
        variance = np.einsum("i,kij,j->k", direction, P.reshape(len(time), n, n), direction)
    else:
        alone = np.count_nonzero(direction) == 1  # variances alone tell the deviation of one state
        variance = P @ direction**2 if alone else np.full(len(time), np.nan)
    return time, mean, np.sqrt(np.maximum(variance, 0.0))
