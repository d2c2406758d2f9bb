"""What a verification has found: counts, and the first differences. Plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

EQUAL, DIFFERENT, NOTHING, NOT_VERIFIED = "equal", "different", "nothing to verify", "not verified"
"""The outcomes of a run: all was verified and is equal; something differs; there was nothing; a part was left out."""

SHOWN = 5
"""Differences that are kept of each part."""

DIFFERENCES = {
    "different": "estimates that differ",
    "missing": "rows without an estimate",
    "doubled": "estimates that a row has twice",
    "strange": "estimates of no landed row",
    "baseless": "refusals of no landed row",
    "states_different": "states that differ, are missing or belong to no key",
    "uncounted": "rows by which the counts of a generation do not add up",
}
"""The counts that must be 0, in words."""
COUNTS = (
    "landed",
    "keys",
    "rows",
    "equal",
    "close",
    "refused",
    "waiting",
    "states",
    "states_close",
    "unrecorded",
    "undecided",
    "numerics",
    "states_numerics",
    *DIFFERENCES,
)
"""Names of all counts.

landed: rows of all keys; rows: those of the sampled keys; equal: estimates that are equal to the bit; close: within
the tolerance only; unrecorded: late rows that are no longer in quarantine; undecided: keys of which rows of one time
may have been replayed in another order; states: those that are equal to the bit; numerics, states_numerics: estimates
and states that differ, and may do so since they were filtered with other numerics (`kalman.NUMERICS`).
"""


@dataclass(frozen=True, slots=True)
class Findings:
    """Counts, and descriptions of the first differences."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    firsts: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, *firsts: dict[str, Any], **counts: int) -> Self:
        """Return counts, of which the others are 0, with descriptions of differences (`difference`)."""
        return cls({**dict.fromkeys(COUNTS, 0), **counts}, list(firsts))

    @property
    def differences(self) -> int:
        """Return the number of differences of all kinds."""
        return sum(self.counts[name] for name in DIFFERENCES)

    @property
    def compared(self) -> int:
        """Return the number of estimates and states that were compared."""
        return sum(self.counts[name] for name in ("equal", "close", "states", "states_close"))


def difference(what: str, key: str | None = None, batch: int | None = None) -> dict[str, Any]:
    """Return the description of a difference that no row of estimates shows: of a key, a micro-batch, or of neither."""
    return {"key": key, "event_time": None, "batch": batch, "what": what}


def added(parts: Iterable[Findings]) -> Findings:
    """Return the sum of findings, with the first few differences of all."""
    total = Findings()
    firsts: list[dict[str, Any]] = []
    for part in parts:
        for name, count in part.counts.items():
            total.counts[name] = total.counts.get(name, 0) + count
        firsts += part.firsts
    return Findings(total.counts, firsts[:SHOWN])


def sentence(difference: Mapping[str, Any]) -> str:
    """Return a difference in words."""
    where = f"key {difference['key']}" if difference.get("key") is not None else "all keys"
    if difference.get("event_time") is not None:
        where += f", row of {difference['event_time']}"
    if difference.get("batch") is not None:
        where += f", micro-batch {difference['batch']}"
    if difference.get("generation"):
        where += f" of {difference['generation']}"
    return f"{where}: {difference['what']}"
