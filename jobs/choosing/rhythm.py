"""Find the rhythm of a table's rows: the usual step, gaps, repeats, and the unit for rates."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.core.times import UNIT_US

GAP = 1.5
"""Number of usual steps from which a pause is a gap."""
_NAMES = (
    ("week", "w"),
    ("day", "d"),
    ("hour", "h"),
    ("minute", "min"),
    ("second", "s"),
    ("millisecond", "ms"),
)


class Rhythm(NamedTuple):
    """Rhythm of rows in time.

    step      median microseconds between two rows of a key; regular: share of steps that equal it
    gaps      number of pauses of more than GAP steps; longest: microseconds of the longest
    repeats   number of rows that repeat key and time of another row
    late      number of rows that stand after a later row of their key
    unit      unit of time for the spec
    """

    step: int
    regular: float
    gaps: int
    longest: int
    repeats: int
    late: int
    unit: str

    @property
    def step_in_units(self) -> float:
        """Return the step in the spec's unit of time."""
        return self.step / UNIT_US[self.unit]


def find_rhythm(key: NDArray[np.int64], time: NDArray[np.int64]) -> Rhythm:
    """Return the rhythm of rows (N,) in the files' order."""
    order = np.lexsort((time, key))
    same = np.diff(key[order]) == 0
    steps = np.diff(time[order])[same]
    positive = steps[steps > 0]
    step = int(np.median(positive)) if len(positive) else UNIT_US["second"]
    regular = float((positive == step).mean()) if len(positive) else 0.0
    in_file = np.argsort(key, kind="stable")
    late = int((np.diff(time[in_file])[np.diff(key[in_file]) == 0] < 0).sum())
    gaps = positive[positive > GAP * step]
    return Rhythm(
        step, regular, len(gaps), int(gaps.max(initial=0)), int((steps == 0).sum()), late, _choose_unit(step)
    )


def _choose_unit(step: int) -> str:
    """Return the longest unit up to the step; a week only for whole weeks."""
    units = sorted(UNIT_US, key=UNIT_US.__getitem__, reverse=True)
    fitting = [
        unit for unit in units if UNIT_US[unit] <= step and (unit != "week" or step % UNIT_US[unit] == 0)
    ]
    return fitting[0] if fitting else "microsecond"


def format_span(micros: float) -> str:
    """Format a time span for a person: `5 min`, `1.5 d`."""
    for name, short in _NAMES:
        if micros >= UNIT_US[name] and (name != "week" or micros % UNIT_US[name] == 0):
            return f"{micros / UNIT_US[name]:.4g} {short}"
    return f"{micros:.4g} µs"
