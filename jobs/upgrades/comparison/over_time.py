"""Sums of both versions over time: for the pictures in bins of equal width, for the gain in blocks of equal rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pyspark.sql import functions as F

from jobs.upgrades.comparison.paired import BLOCKS, Squares
from jobs.upgrades.comparison.statistics import SIDES, SUMS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

Floats = NDArray[np.float64]
BINS = 60


class Sums(NamedTuple):
    """The `statistics.SUMS` of one side in N bins of time, or of N keys, (N,) each; NaN where there is no row."""

    rows: Floats
    ll: Floats
    nis: Floats
    degrees: Floats
    flagged: Floats
    innovation: Floats
    components: Floats


class OverTime(NamedTuple):
    """Sums over time.

    time (B,): the middles of up to `BINS` bins of equal width, in microseconds; sums: of both sides in each bin.
    block_rows, block_gain (T,): rows that both have scored, and the new version's gain on them, in up to
    `paired.BLOCKS` blocks of about equally many rows; moments: of the groups of one key and event time.
    """

    time: NDArray[np.int64]
    sums: dict[str, Sums]
    block_rows: Floats
    block_gain: Floats
    moments: Squares


def sums_over_time(both: DataFrame) -> OverTime:
    """Return the sums over time of `statistics.paired_sums`.

    Equal widths alone would not do for the gain: one row with a wrong clock would put all others into one block.
    """
    micros = F.unix_micros("event_time")
    shares = [number / BLOCKS for number in range(1, BLOCKS)]
    span = both.agg(
        F.min(micros).alias("first"),
        F.max(micros).alias("last"),
        F.percentile_approx(micros, shares).alias("edges"),
    ).first()
    if span is None or span["first"] is None:
        empty = np.empty(0)
        nothing = {side: Sums(*[empty] * len(SUMS)) for side in SIDES.values()}
        return OverTime(np.empty(0, np.int64), nothing, empty, empty, Squares())
    first, width = int(span["first"]), max(1, -(-(int(span["last"]) - int(span["first"]) + 1) // BINS))
    number = F.floor((micros - first) / width).cast("bigint")
    names = [f"{letter}_{name}" for letter in SIDES for name in SUMS]
    added = {name: F.col(name) for name in [*names, "scored", "gained"]} | {
        "gain2": F.col("gained") * F.col("gained"),
        "gain_rows": F.col("gained") * F.col("scored"),
        "rows2": F.col("scored") * F.col("scored"),
    }
    frame = (
        both.groupBy(number.alias("bin"), block_of(micros, sorted(set(span["edges"]))).alias("block"))
        .agg(*(F.sum(column.cast("double")).alias(name) for name, column in added.items()))
        .orderBy("bin", "block")
        .toPandas()
    )
    # A sum of nulls alone stays null: no row of the bin has the statistic.
    bins = frame.groupby("bin")[names].sum(min_count=1).reset_index()
    blocks: Any = frame.groupby("block")[["scored", "gained"]].sum()
    blocks = blocks[blocks["scored"] > 0]
    moments = Squares(*(float(frame[name].sum()) for name in Squares._fields))
    return OverTime(
        first + bins["bin"].to_numpy(np.int64) * width + width // 2,
        {side: sums_of(bins, letter) for letter, side in SIDES.items()},
        blocks["scored"].to_numpy(np.float64),
        blocks["gained"].to_numpy(np.float64),
        moments,
    )


def block_of(value: Column, edges: list[int]) -> Column:
    """Return how many of the sorted edges are below a value, by bisection."""

    def between(low: int, high: int) -> Column:
        if low == high:
            return F.lit(low)
        middle = (low + high) // 2
        return F.when(value > edges[middle], between(middle + 1, high)).otherwise(between(low, middle))

    return between(0, len(edges))


def sums_of(frame: Any, letter: str) -> Sums:
    """Return the sums of one side, a row each."""
    return Sums(*(frame[f"{letter}_{name}"].to_numpy(np.float64) for name in SUMS))
