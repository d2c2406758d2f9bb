"""Decide when a stream with a steady feed has caught up, and whether it keeps up. Pure functions.

While the stream starts, messages pile up; each micro-batch then processes the messages that arrived during the previous
one, and the backlog shrinks, or grows if the rate is too high for the stream. The lag is the backlog when a micro-batch
becomes visible, in seconds of the feed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from demo.delta_log import commits_of
from jobs.lineage.fencing import BATCHES

CALM = 5
"""Number of consecutive micro-batches within the bound after which a stream counts as caught up."""
FALLING = 0.8
"""The stream is still catching up if the lag at their end is less than this share of the lag at their start."""


class Commit(NamedTuple):
    """A micro-batch's estimates: its number, when they became visible (seconds since 1970), and their count."""

    batch: int
    at: float
    rows: int


def commits(table: Path) -> list[Commit]:
    """Return the micro-batches of a table of estimates with a complete log, oldest first."""
    found = []
    for at, actions in commits_of(table):
        numbers = [action["txn"]["version"] % BATCHES for action in actions if "txn" in action]
        told = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
        if numbers:
            found.append(
                Commit(numbers[0], at, int(told.get("operationMetrics", {}).get("numOutputRows", 0)))
            )
    return found


def lags(visible: Iterable[Commit], began: float, rate: float) -> list[float]:
    """Return the lag in seconds at each micro-batch of a feed that sends `rate` messages a second since `began`."""
    found, taken = [], 0
    for one in visible:
        taken += one.rows
        found.append(max(0.0, one.at - began - taken / rate))
    return found


def caught_up(behind: Sequence[float], bound: float) -> bool:
    """Return whether the last `CALM` micro-batches left at most `bound` seconds waiting and the lag no longer falls."""
    last = behind[-CALM:]
    if len(last) < CALM or max(last) > bound:
        return False
    return statistics.fmean(last[-2:]) >= FALLING * statistics.fmean(last[:2])


def keeps_up(behind: Sequence[float], bound: float) -> bool:
    """Return whether a measured stream kept up: in the second half no lag exceeds the bound."""
    half = behind[len(behind) // 2 :]
    return bool(half) and max(half) <= bound
