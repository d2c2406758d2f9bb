"""Draw the benchmark's results, rows a second against keys: `python -m benchmarks.picture`.

On the left every key has rows in the micro-batch: ours beside the limit and state by the key. On the right a
micro-batch has a fixed number of rows whatever the number of keys: the cost of the state's size. Works that were not
measured are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.results import RESULTS, ROOT
from benchmarks.workloads.work import DENSE, SCALE, Work
from jobs.offline.plots import ESTIMATE, MEASURED, SMOOTHED, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = ROOT / "docs" / "pictures" / "throughput.png"
SERIES = (
    ("limit", "a bare shuffle through Python (the limit)", MEASURED, "s"),
    ("ours", "ours", ESTIMATE, "o"),
    ("per_key_row", "state by the key (transformWithState)", SMOOTHED, "^"),
)
DOTS = 110


class Point(NamedTuple):
    """The measurements of one work: keys, rows a key, and rows a second (least, median, greatest)."""

    keys: int
    rows: int
    least: float
    median: float
    most: float


def points(document: Mapping[str, Any], works: Sequence[Work], who: str) -> list[Point]:
    """Return a contender's rates on works, by number of keys; works that were not measured are left out."""
    measured = {(one["work"], one["what"]): one["rows_per_s"] for one in document["results"]}
    found = [
        Point(work.keys, work.rows, rate["min"], rate["median"], rate["max"])
        for work in works
        if (rate := measured.get((work.name, who))) is not None
    ]
    return sorted(found)


def short(number: float) -> str:
    """Return a number of rows or keys in short form: 607 k, 1.7 M."""
    if number >= 999_500:
        return f"{number / 1e6:.1f} M".replace(".0 M", " M")
    return f"{number / 1e3:.0f} k" if number >= 9_950 else f"{number / 1e3:.1f} k"


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Draw the results of a `latest.json` as a PNG file.

    Raises:
        ValueError: none of the drawn works was measured.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if not points(document, DENSE, "ours"):
        raise ValueError(f"none of {', '.join(work.name for work in DENSE)} was measured")
    with matplotlib.rc_context(STYLE):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(8.6, 3.5), sharey=True, width_ratios=(1.35, 1), layout="constrained"
        )
        for who, label, colour, marker in SERIES:
            for rows in sorted({work.rows for work in DENSE}):
                some = points(document, [work for work in DENSE if work.rows == rows], who)
                filled = rows == DENSE[0].rows
                _line(left, some, colour, marker, label if filled else None, filled)
        fewest, most = DENSE[0].rows, max(work.rows for work in DENSE)
        left.set(title=f"each key has {fewest} rows a micro-batch (hollow: {most})")
        left.set(xlabel="keys", ylabel="rows a second")
        _line(right, points(document, SCALE, "ours"), ESTIMATE, "o", None, above=True)
        right.set(title=f"{SCALE[0].touched or 0:,} rows a micro-batch", xlabel="keys with a state")
        for axes in (left, right):
            axes.set(xscale="log", yscale="log")
            axes.margins(x=0.2, y=0.16)
            axes.minorticks_off()
            places = sorted({float(x) for line in axes.lines for x in _numbers(line.get_xdata())})
            axes.set_xticks(places, [short(place) for place in places])
        left.set_yticks([1e3, 1e4, 1e5, 1e6, 1e7], ["1 k", "10 k", "100 k", "1 M", "10 M"])
        left.set_ylim(4e3, 4e6)
        figure.legend(loc="outside lower center", ncols=3, fontsize=8.5)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DOTS, metadata={"Software": None})
        plt.close(figure)


def _line(
    axes: Axes,
    some: Sequence[Point],
    colour: str,
    marker: str,
    label: str | None,
    filled: bool = True,
    above: bool = False,
) -> None:
    """Draw one contender: medians with their spread, and their values beside the line."""
    if not some:
        return
    keys, medians = [one.keys for one in some], [one.median for one in some]
    spread = [
        [one.median - one.least for one in some],
        [one.most - one.median for one in some],
    ]
    axes.errorbar(
        keys, medians, spread, color=colour, marker=marker, markersize=6, linewidth=1.5, elinewidth=1,
        capsize=2, markerfacecolor=colour if filled else "white", label=label,
    )  # fmt: skip
    for one in some:
        axes.annotate(
            short(one.median), (one.keys, one.median), (8 if filled else -8, -11 if filled and not above else 5),
            textcoords="offset points", fontsize=8, color=colour, ha="left" if filled else "right",
        )  # fmt: skip


def _numbers(data: Any) -> list[float]:
    return [float(value) for value in data]


def main() -> int:
    """Draw, and print the picture's path."""
    parser = argparse.ArgumentParser("python -m benchmarks.picture", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS / "latest.json")
    parser.add_argument("--output", type=Path, default=PICTURE)
    given = parser.parse_args()
    try:
        draw(json.loads(given.results.read_text()), given.output)
    except (OSError, ValueError) as problem:
        print(f"error: {given.results}: {problem}: run `make bench` first", file=sys.stderr)
        return 2
    print(f"{given.output}: {given.output.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
