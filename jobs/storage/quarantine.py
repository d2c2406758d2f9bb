"""The quarantine: one table for all rejected rows of any source, with their payload and the reason.

A row's `status` is its fate: null (held), `replaying` (a replay has selected it and fixed, in `landing`, what it lands
as; if that replay is killed, the next one finishes it), `replayed` or `discarded`. Held rows are never removed;
`maintain` removes the others once they are old.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.times import duration_us
from jobs.specs.row_order import QuarantineLimit
from jobs.storage.positions import parse_time, to_datetime
from jobs.storage.warehouse import Tables

REASON, PAYLOAD, POSITION = "_reason", "_payload", "_position"

TABLE = "quarantine"
HELD, REPLAYING, REPLAYED, DISCARDED = "held", "replaying", "replayed", "discarded"


@dataclass(frozen=True, slots=True)
class Choice:
    """A selection of held rows: those that meet all conditions that are given.

    Attributes:
        reason: prefix of the reason.
        since: quarantined at or after this time (ISO 8601), or within this duration (2d) from now.
        ids: these rows.
    """

    reason: str | None = None
    since: str | None = None
    ids: tuple[str, ...] = ()

    @property
    def all(self) -> bool:
        """Tell if no condition is given, so that all held rows are selected."""
        return self.reason is None and self.since is None and not self.ids

    def earliest(self) -> datetime | None:
        """Return the time from which on rows are selected; None: from the first."""
        return None if self.since is None else _since(self.since)


class TooMany(UserError):
    """More rows were rejected than the spec allows."""


def too_many(limit: QuarantineLimit | None, reasons: Mapping[str, int], accepted: int) -> bool:
    """Tell if the rejected rows, counted by reason, exceed the spec's limit."""
    rejected = sum(reasons.values())
    return (
        limit is not None
        and rejected >= limit.fail_from
        and rejected > limit.fail_above * (rejected + accepted)
    )


def refusal(
    limit: QuarantineLimit | None,
    reasons: Mapping[str, int],
    accepted: int,
    where: str,
    code: int = RUN_FAILED,
) -> TooMany:
    """Return the error for a micro-batch or file with too many rejected rows, of which nothing is written.

    Args:
        limit: of the spec.
        reasons: number of rejected rows by reason.
        accepted: number of the other rows.
        where: source of the rows, such as "micro-batch 7".
        code: the command's exit code.
    """
    rejected = sum(reasons.values())
    first = max(reasons, key=lambda reason: reasons[reason])
    allowed = "" if limit is None else f" ({limit.fail_above:g})"
    return TooMany(
        f"{where}: {rejected:,} of {rejected + accepted:,} rows would go to quarantine, most for '{first}', and "
        f"quarantine.fail_above{allowed} allows less: nothing of it was written; correct the rows at their source, "
        f"or raise quarantine.fail_above in the spec, and start again",
        code,
    )


def held_by_model(warehouse: Tables) -> dict[str, int]:
    """Return the number of held rows by model."""
    if not warehouse.exists(TABLE):
        return {}
    counts = warehouse.group_counts(TABLE, ("model", "status"))
    return {one["model"]: int(one["count"]) for one in counts if one["status"] is None}


def _since(text: str) -> datetime:
    try:
        return datetime.now(UTC) - timedelta(microseconds=duration_us(text))
    except ValueError:
        time = to_datetime(parse_time(text, "--since"))
        assert time is not None
        return time
