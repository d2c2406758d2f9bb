"""The project's targets beside a run's results: ratios of medians within one run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Target(NamedTuple):
    """A ratio or a rate, and its goal.

    text: description of the comparison; work, what: work and contender of the result; figure: its field, or
    `rows_per_s` for the median; goal: least value, or greatest if `most`; over: the work whose rate is divided by this
    work's, a ratio of times;
    inverse: the ratio of times is one over the field
    """

    text: str
    work: str
    what: str
    figure: str
    goal: float
    most: bool = False
    over: str | None = None
    inverse: bool = False


TARGETS = (
    Target("200k x 5 into Delta, to the limit into Delta", "dense_200k_x5_delta", "ours", "vs_limit", 1.3),
    Target("20k x 50 into Delta, to the limit into Delta", "dense_20k_x50_delta", "ours", "vs_limit", 1.3),
    Target("200k x 5 without a sink, to the limit", "dense_200k_x5", "ours", "vs_limit", 0.6),
    Target("20k x 50 without a sink, to the limit", "dense_20k_x50", "ours", "vs_limit", 0.6),
    Target("20k x 5 into Delta, to the limit into Delta", "dense_20k_x5_delta", "ours", "vs_limit", 1.0),
    Target(
        "10,000 rows into 5 million keys, to 10,000 rows into 10 thousand keys, time",
        *("scale_5000k", "ours", "rows_per_s", 1.5),
        most=True,
        over="scale_10k",
    ),
    Target(
        "1,000 rows into 2 million keys, to an empty stateful micro-batch, time",
        *("sparse_1k_of_2m", "ours", "vs_floor", 1.4),
        most=True,
        inverse=True,
    ),
    Target(
        "bytes that 1,000 rows into 2 million keys add to the state, to the raw bytes of the changed keys",
        *("sparse_1k_of_2m", "ours", "state_bytes_vs_raw", 4.0),
        most=True,
    ),
    Target("export of a million keys, keys/s", "verbs_1m", "export", "rows_per_s", 300_000),
    Target("migrate of a million keys, keys/s", "verbs_1m", "migrate", "rows_per_s", 300_000),
    Target("memory of 5 million keys, GB", "scale_5000k", "ours", "peak_memory_bytes", 4e9, most=True),
    Target("estimate, a row a key, to the limit", "history_2m_x1", "ours", "vs_limit", 0.7),
    Target("estimate, 100 rows a key, to the limit", "history_20k_x100", "ours", "vs_limit", 0.7),
    Target("estimate into Delta, a row a key, to the limit", "history_2m_x1_delta", "ours", "vs_limit", 1.0),
    Target(
        "estimate into Delta, 100 rows a key, to the limit", "history_20k_x100_delta", "ours", "vs_limit", 1.0
    ),
)


def value_of(document: Mapping[str, Any], target: Target) -> float | None:
    """Return the measured value of a target, or None if its works were not measured in one run."""
    found = {(one["work"], one["what"]): one for one in document["results"]}
    mine = found.get((target.work, target.what))
    if mine is None or target.figure not in mine:
        return None
    figure = mine[target.figure]
    value = float(figure["median"] if isinstance(figure, Mapping) else figure)
    if target.over is None:
        return 1 / value if target.inverse else value
    other = found.get((target.over, target.what))
    if other is None or other.get("measured_at") != mine.get("measured_at"):
        return None
    return float(other[target.figure]["median"]) / value


def lines(document: Mapping[str, Any]) -> list[str]:
    """Return the measured targets as a table in Markdown; empty without any."""
    rows = []
    for target in TARGETS:
        value = value_of(document, target)
        if value is None:
            continue
        reached = value <= target.goal if target.most else value >= target.goal
        rows.append(
            f"| {target.text} | {_short(value)} | {'at most' if target.most else 'at least'} {_short(target.goal)} | "
            f"{'reached' if reached else 'not reached'} |"
        )
    return rows and ["| target | measured | goal | |", "|---|---:|---:|---|", *rows]


def _short(value: float) -> str:
    if value >= 1e8:
        return f"{value / 1e9:.1f}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"
