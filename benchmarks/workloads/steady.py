"""Tell when a stream that is fed at a steady rate has caught up with its feed, and if it keeps up. Pure.

While it starts, messages pile up; each micro-batch then takes what has come during the one before, and the pile melts
away, or grows if the rate is more than the stream can take. The lag is what waits when a micro-batch becomes visible,
in seconds of the feed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from demo.delta_log import commits_of
from jobs.lineage.fencing import batch_of

CALM = 5
"""So many micro-batches in turn must be within the bound before a stream counts as caught up."""
FALLING = 0.8
"""It still catches up where the lag at their end is less than so much of that at their beginning."""


class Commit(NamedTuple):
    """A micro-batch's estimates: its number, when they became visible (seconds since 1970), and how many they are."""

    batch: int
    at: float
    rows: int


def commits(table: Path) -> list[Commit]:
    """Return the micro-batches of a table of estimates whose log is whole, oldest first."""
    found = []
    for at, actions in commits_of(table):
        numbers = [batch_of(action["txn"]["version"]) for action in actions if "txn" in action]
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
    """Tell if the last `CALM` micro-batches left at most `bound` seconds waiting, and the lag no longer falls."""
    last = behind[-CALM:]
    if len(last) < CALM or max(last) > bound:
        return False
    return statistics.fmean(last[-2:]) >= FALLING * statistics.fmean(last[:2])


def keeps_up(behind: Sequence[float], bound: float) -> bool:
    """Tell if a stream that has been measured kept up: in the second half no lag is beyond the bound."""
    half = behind[len(behind) // 2 :]
    return bool(half) and max(half) <= bound
