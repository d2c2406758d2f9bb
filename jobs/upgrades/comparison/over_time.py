"""Sums of both versions over time: for the pictures in bins of equal width, for the gain in blocks of equal rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.state.encoding.arrow import to_numpy
from jobs.storage.queries import Queries
from jobs.upgrades.comparison.common_rows import BOTH, PAIRED, SIDES, SUMS
from jobs.upgrades.comparison.paired import BLOCKS, Gain, PairedSums, Squares, compute_gain

Floats = NDArray[np.float64]
BINS = 60


class VersionSums(NamedTuple):
    """The `common_rows.SUMS` of one side in N bins of time, or of N keys, (N,) each; NaN where there is no row."""

    rows: Floats
    ll: Floats
    nis: Floats
    degrees: Floats
    flagged: Floats
    innovation: Floats
    components: Floats


class TimeCourse(NamedTuple):
    """Sums over time.

    time (B,): the middles of up to `BINS` bins of equal width, in microseconds; sums: of both sides in each bin.
    block_rows, block_gain (T,): rows that both have scored, and the new version's gain on them, in up to
    `paired.BLOCKS` blocks of about equally many rows; moments: of the groups of one key and event time.
    """

    time: NDArray[np.int64]
    sums: dict[str, VersionSums]
    block_rows: Floats
    block_gain: Floats
    moments: Squares

    def gain(self, scored: Mapping[str, Any]) -> Gain:
        """Return the gain per row of the rows that both versions have scored; scored: their sums by key."""
        return compute_gain(
            PairedSums(moments=self.moments, block_rows=self.block_rows, block_gain=self.block_gain, **scored)
        )


def compute_time_course(queries: Queries) -> TimeCourse:
    """Return the sums over time of what `common_rows.keep_paired_sums` has kept.

    Equal widths alone would not do for the gain: one row with a wrong clock would put all others into one block.
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
        f"SELECT (micros - {first}) / {width} AS bin, {build_block_sql('micros', sorted(set(edges[1:-1])))} AS block, {sums} "
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
    """Return the first time in microseconds, those that divide the groups into `BLOCKS` equal parts, and the last."""
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
    """Return the sum of the known values of each group (G,); NaN where a group has none."""
    known, groups = ~np.isnan(values), int(group.max()) + 1
    total = np.bincount(group[known], values[known], groups)
    return np.where(np.bincount(group[known], minlength=groups) > 0, total, np.nan)


def build_block_sql(value: str, edges: list[int]) -> str:
    """Return how many of the sorted edges are below a value, by bisection, as SQL."""

    def between(low: int, high: int) -> str:
        if low == high:
            return str(low)
        middle = (low + high) // 2
        above, below = between(middle + 1, high), between(low, middle)
        return f"CASE WHEN {value} > {edges[middle]} THEN {above} ELSE {below} END"

    return between(0, len(edges))


def select_version_sums(sums: Mapping[str, Floats], letter: str) -> VersionSums:
    """Return the sums of one side, a row each."""
    return VersionSums(*(sums[f"{letter}_{name}"] for name in SUMS))
