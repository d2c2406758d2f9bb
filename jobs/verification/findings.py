"""Results of a verification: counts, and the first differences. Plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

EQUAL, DIFFERENT, NOTHING, NOT_VERIFIED = "equal", "different", "nothing to verify", "not verified"
"""Outcomes of a run: everything is equal, something differs, there was nothing to verify, or a part was left out."""

SHOWN = 5
"""The maximum number of differences that each part stores."""

DIFFERENCES = {
    "different": "estimates that differ",
    "missing": "rows without an estimate",
    "doubled": "estimates that a row has twice",
    "strange": "estimates of no landed row",
    "baseless": "refusals of no landed row",
    "states_different": "states that differ, are missing or belong to no key",
    "uncounted": "rows by which the counts of a generation do not add up",
}
"""The counts that must be 0, with their descriptions."""
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

landed: landed rows of all keys. rows: rows of the sampled keys. equal: estimates that are equal bit by bit. close:
estimates that are equal only within the tolerance. unrecorded: late rows that are no longer in quarantine. undecided:
keys whose rows with the same time may have been replayed in another order. states: states that are equal bit by bit.
numerics, states_numerics: estimates and states whose difference is excused, because other numerics filtered them
(`kalman.NUMERICS`).
"""


@dataclass(frozen=True, slots=True)
class Findings:
    """Counts, and descriptions of the first differences."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    firsts: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, *firsts: dict[str, Any], **counts: int) -> Self:
        """Return findings with these counts, 0 for all others, and descriptions of differences."""
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
    """Return the description of a difference that concerns a key, a micro-batch, or neither, but no estimate."""
    return {"key": key, "event_time": None, "batch": batch, "what": what}


def sum_findings(parts: Iterable[Findings]) -> Findings:
    """Return the sum of findings, with the first few differences from all of them."""
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
