"""Find faults of rows that estimates do not show: unequal time steps, and keys whose last rows all have a flag.

Uses only NumPy, over all keys at once, so that the offline commands can use it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from jobs.core.report import format_count, format_names
from jobs.state.encoding.row_order import find_starts
from kalman.flags import FLAGS

Ints = NDArray[np.int64]

BY_ROW = {
    "seasonal_dummy": "seasonal_trigonometric",
    "explicit": "continuous, random_walk, local_linear_trend or ornstein_uhlenbeck",
}
"""Processes that take one step a row, each with processes that use the time between rows instead."""
FEWEST = 5
"""The number of flagged rows at the end of a lost key; fewer may be a few bad rows that came last."""
REMEDIES = {
    "gated": "give robust.gate a limit, or a wider threshold",
    "non_finite": "look at their measurements, controls and times",
    "out_of_support": "look at their measurements, or choose another filter",
}
OTHERWISE = (
    "leave states of a wide initial.covariance diffuse, choose form: square_root, or mend columns that give "
    "variances"
)


class Gaps(NamedTuple):
    """The number of steps that differ from their key's usual step, of all steps, and of keys with such steps."""

    gaps: int
    steps: int
    keys: int

    def __add__(self, other: Gaps) -> Gaps:  # type: ignore[override]
        """Return the sums for two parts of the keys."""
        return Gaps(*(a + b for a, b in zip(self, other, strict=True)))


def count_gaps(key: Ints, time: Ints) -> Gaps:
    """Count the steps that differ from their key's median step by more than half of this median.

    The lengths of months and leap years differ by less. Args: key (N,) and time (N,) of rows sorted by both.
    """
    inside = key[1:] == key[:-1]
    step, of = np.diff(time)[inside], key[1:][inside]
    order = np.lexsort((step, of))
    starts = np.flatnonzero(find_starts(of))
    counts = np.diff(starts, append=len(of))
    usual = np.repeat(step[order][starts + counts // 2], counts)
    odd = np.abs(step - usual) > 0.5 * usual
    return Gaps(int(odd.sum()), len(step), len(np.unique(of[odd])))


def list_row_step_kinds(definition: Any) -> list[str]:
    """Return the kinds of process in a definition that take one step a row, except processes that change no state."""
    if isinstance(definition, Mapping):
        values = cast(Mapping[str, Any], definition)
        kind = values.get("kind")
        if kind in BY_ROW:
            return [] if _is_static(values) else [kind]
        definition = list(values.values())
    found = (list_row_step_kinds(item) for item in definition) if isinstance(definition, list) else ()
    return sorted({kind for kinds in found for kind in kinds})


def _is_static(process: Mapping[str, Any]) -> bool:
    """Return whether an explicit process changes no state, such as coefficients, for which time does not matter."""
    try:
        F, Q = np.array(process.get("F"), float), np.array(process.get("Q"), float)
    except (TypeError, ValueError):  # F or Q names columns
        return False
    return F.ndim == 2 and np.array_equal(F, np.eye(len(F))) and not Q.any() and not process.get("B")


def format_gaps(kinds: list[str], found: Gaps) -> list[str]:
    """Return a line about steps that differ from the usual step, for processes that take one step a row."""
    if not kinds or not found.gaps:
        return []
    one = len(kinds) == 1
    instead = "; ".join(BY_ROW[kind] if one else f"{BY_ROW[kind]} for {kind}" for kind in kinds)
    return [
        f"note: {' and '.join(kinds)} take{'s' * one} one step a row, whatever the time between: {found.gaps:,} of "
        f"{format_count(found.steps, 'step')} ({format_count(found.keys, 'key')}) are not their key's usual "
        f"step, and a season or "
        f"trend is shifted from there on; choose {instead}, or give a row without a measurement for each that is absent"
    ]


class Lost(NamedTuple):
    """Keys whose rows after some row all have a flag: their number among `of` keys, and the number of these rows.

    worst: the number or name of the key with the most such rows.
    its_rows: the number of these rows.
    after: the number of the key's rows before them.
    flags: the number of flagged rows for each flag; empty if unknown.
    """

    keys: int
    of: int
    rows: int
    worst: int | str
    its_rows: int
    after: int
    flags: dict[str, int]


def find_lost(key: Ints, flag: NDArray[np.uint8]) -> Lost | None:
    """Find keys whose last rows all have a flag; None if there are no such keys.

    These flagged rows must be at least FEWEST, and at least half of the key's rows. Args: key (N,) and codes of flags
    (N,) of rows sorted by key and time.
    """
    if not flag.any():
        return None
    starts = np.flatnonzero(find_starts(key))
    counts = np.diff(starts, append=len(key))
    well = np.where(flag == 0, np.arange(len(key)), -1)
    last = np.maximum(np.maximum.reduceat(well, starts), starts - 1)
    after = last + 1 - starts
    tail = counts - after
    lost = (tail >= FEWEST) & (2 * tail >= counts)
    if not lost.any():
        return None
    worst = int(np.argmax(np.where(lost, tail, 0)))
    inside = np.repeat(lost, counts) & (np.arange(len(key)) > np.repeat(last, counts))
    codes = np.bincount(flag[inside], minlength=len(FLAGS))
    flags = {str(FLAGS[code]): int(codes[code]) for code in np.argsort(-codes, kind="stable") if codes[code]}
    return Lost(
        int(lost.sum()),
        len(starts),
        int(tail[lost].sum()),
        int(key[starts[worst]]),
        int(tail[worst]),
        int(after[worst]),
        flags,
    )


def format_lost(lost: Lost, name: str, model: str) -> str:
    """Return a line about a model's lost keys; name: the name of the worst key."""
    reasons = format_names(
        [flag if len(lost.flags) == 1 else f"{flag} {n:,}" for flag, n in lost.flags.items()]
    )
    where = f"after row {lost.after:,}" if lost.after else "from the first on"
    if lost.keys == 1:
        what = f"{name}: all of its {lost.its_rows:,} rows {where} are flagged"
    else:
        what = (
            f"{lost.keys:,} of {format_count(lost.of, 'key')} have flagged rows alone from some row on, "
            f"{lost.rows:,} rows, "
            f"such as {name} with {lost.its_rows:,} {where}"
        )
    why = f" ({reasons})" if reasons else ""
    look = f"the column flag of what `kalman-pipeline estimate --model {model}` writes says why"
    remedy = REMEDIES.get(next(iter(lost.flags)), OTHERWISE) if lost.flags else look
    return f"warning: {what}{why}, and the estimate stands still there; {remedy}"
