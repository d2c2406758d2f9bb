"""Results of a verification: counts, and the first differences. Plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

EQUAL, DIFFERENT, NOTHING, NOT_VERIFIED = "equal", "different", "nothing to verify", "not verified"
"""Outcomes of a run: everything is equal; something differs; there was nothing to verify; a part was left out."""

SHOWN = 5
"""Maximum number of differences kept for each part."""

DIFFERENCES = {
    "different": "estimates that differ",
    "missing": "rows without an estimate",
    "doubled": "estimates that a row has twice",
    "strange": "estimates of no landed row",
    "baseless": "refusals of no landed row",
    "states_different": "states that differ, are missing or belong to no key",
    "uncounted": "rows by which the counts of a generation do not add up",
}
"""Counts that must be 0, in words."""
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

landed: rows of all keys; rows: rows of the sampled keys; equal: estimates that are equal to the bit; close: estimates
that are equal only within the tolerance; unrecorded: late rows that are no longer in quarantine; undecided: keys whose
rows of one time may have been replayed in another order; states: states that are equal to the bit; numerics,
states_numerics: estimates and states that differ, with the excuse that they were filtered with other numerics
(`kalman.NUMERICS`).
"""


@dataclass(frozen=True, slots=True)
class Findings:
    """Counts, and descriptions of the first differences."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    firsts: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, *firsts: dict[str, Any], **counts: int) -> Self:
        """Return findings with these counts, 0 for the others, and descriptions of differences (`difference`)."""
        return cls({**dict.fromkeys(COUNTS, 0), **counts}, list(firsts))

    @property
    def differences(self) -> int:
        """Return the number of differences of all kinds."""
        return sum(self.counts[name] for name in DIFFERENCES)

    @property
    def compared(self) -> int:
        """Return the number of estimates and states that were compared."""
        return sum(self.counts[name] for name in ("equal", "close", "states", "states_close"))


def describe_difference(what: str, key: str | None = None, batch: int | None = None) -> dict[str, Any]:
    """Return the description of a difference without a row of estimates: of a key, a micro-batch, or neither."""
    return {"key": key, "event_time": None, "batch": batch, "what": what}


def sum_findings(parts: Iterable[Findings]) -> Findings:
    """Return the sum of findings, with the first few differences of all of them."""
    total = Findings()
    firsts: list[dict[str, Any]] = []
    for part in parts:
        for name, count in part.counts.items():
            total.counts[name] = total.counts.get(name, 0) + count
        firsts += part.firsts
    return Findings(total.counts, firsts[:SHOWN])


def format_difference(difference: Mapping[str, Any]) -> str:
    """Return a difference as a sentence."""
    where = f"key {difference['key']}" if difference.get("key") is not None else "all keys"
    if difference.get("event_time") is not None:
        where += f", row of {difference['event_time']}"
    if difference.get("batch") is not None:
        where += f", micro-batch {difference['batch']}"
    if difference.get("generation"):
        where += f" of {difference['generation']}"
    return f"{where}: {difference['what']}"
