"""The quarantine: one table for all rejected rows of any source, with the payload of each row and the reason.

The `status` of a row is null (held), `replaying`, `replayed` or `discarded`. While a row is `replaying`, a replay has
selected it and stored its replacement in `landing`; if that replay is killed, the next replay finishes the row. Held
rows are never removed. `maintain` removes rows with another status once they are old.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.times import parse_duration_us
from jobs.specs.row_order import QuarantineLimit
from jobs.storage.positions import parse_time, to_datetime
from jobs.storage.warehouse import Tables

REASON, PAYLOAD, POSITION = "_reason", "_payload", "_position"
REJECTED = f"{REASON} string, {PAYLOAD} string, {POSITION} string"
"""Columns of a rejected row."""

TABLE = "quarantine"
HELD, REPLAYING, REPLAYED, DISCARDED = "held", "replaying", "replayed", "discarded"


@dataclass(frozen=True, slots=True)
class RowSelection:
    """Selection of the held rows that meet every given condition.

    Attributes:
        reason: prefix of the reason.
        since: earliest time at which the row was quarantined: an ISO 8601 time, or a duration before now (2d).
        ids: ids of rows.
    """

    reason: str | None = None
    since: str | None = None
    ids: tuple[str, ...] = ()

    @property
    def all(self) -> bool:
        """Return whether no condition is given, so that all held rows are selected."""
        return self.reason is None and self.since is None and not self.ids

    def earliest(self) -> datetime | None:
        """Return the earliest time at which selected rows were quarantined; None means no limit."""
        return None if self.since is None else _parse_since(self.since)


class TooMany(UserError):
    """Error for more rejected rows than the spec allows."""


def is_over_limit(limit: QuarantineLimit | None, reasons: Mapping[str, int], accepted: int) -> bool:
    """Return whether the number of rejected rows, given by reason, exceeds the spec's limit."""
    rejected = sum(reasons.values())
    return (
        limit is not None
        and rejected >= limit.fail_from
        and rejected > limit.fail_above * (rejected + accepted)
    )


def build_refusal(
    limit: QuarantineLimit | None,
    reasons: Mapping[str, int],
    accepted: int,
    where: str,
    code: int = RUN_FAILED,
) -> TooMany:
    """Return the error for a micro-batch or file with too many rejected rows, of which no row is written.

    Args:
        limit: limit in the spec.
        reasons: number of rejected rows by reason.
        accepted: number of accepted rows.
        where: source of the rows, such as "micro-batch 7".
        code: exit code of the command.
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


def count_rows_by_model(warehouse: Tables) -> dict[str, int]:
    """Return the number of held rows of each model."""
    if not warehouse.exists(TABLE):
        return {}
    counts = warehouse.group_counts(TABLE, ("model", "status"))
    return {one["model"]: int(one["count"]) for one in counts if one["status"] is None}


def _parse_since(text: str) -> datetime:
    try:
        return datetime.now(UTC) - timedelta(microseconds=parse_duration_us(text))
    except ValueError:
        time = to_datetime(parse_time(text, "--since"))
        assert time is not None
        return time
