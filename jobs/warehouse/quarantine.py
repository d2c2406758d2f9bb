"""The quarantine: one table for all rejected rows of any source, with their payload and the reason.

A row's `status` is its fate: null (held), `replaying` (a replay has selected it and fixed, in `landing`, what it lands
as; if that replay is killed, the next one finishes it), `replayed` or `discarded`. Held rows are never removed;
`maintain` removes the others once they are old.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.times import duration_us
from jobs.specs.row_order import QuarantineLimit
from jobs.storage.row_changes import add_columns
from jobs.storage.warehouse import Tables
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.positions import parse_time, to_datetime
from jobs.warehouse.tables import QUARANTINE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

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

    def condition(self) -> Column:
        """Return the condition on rows of the table."""
        result = F.lit(True)
        if self.reason is not None:
            result = result & F.col("reason").startswith(self.reason)
        since = self.earliest()
        if since is not None:
            result = result & (F.col("quarantined_at") >= F.lit(since))
        if self.ids:
            result = result & F.col("id").isin(*self.ids)
        return result


def keep(warehouse: Warehouse, rows: DataFrame, transaction: tuple[str, int]) -> None:
    """Append rejected rows, once per transaction.

    Args:
        warehouse: of the table.
        rows: of `rejected_rows`.
        transaction: application and number, as in `Warehouse.append`.
    """
    warehouse.append(identified(warehouse, rows), TABLE, transaction, more_columns=True)


def keep_for_all(warehouse: Warehouse, rows: DataFrame, transactions: Sequence[tuple[str, int]]) -> None:
    """Append rejected rows of several files in one commit, which ends the transaction of each; columns as in `keep`."""
    found = identified(warehouse, rows)
    add_columns(warehouse, TABLE, QUARANTINE)  # those that a table of an earlier release lacks
    warehouse.append_for_all(found, TABLE, transactions)


def rejected_rows(
    rows: DataFrame,
    model: str,
    source: Column,
    position: Column,
    payload: Column | None = None,
    reason: Column | None = None,
    generation: str | None = None,
    batch_id: int | None = None,
) -> DataFrame:
    """Return rejected rows with the columns of the quarantine.

    Args:
        rows: the rejected ones.
        model: its name.
        source, position: where a row came from, and its place there as JSON.
        payload, reason: the row, and what is wrong with it; by default its columns `_payload` and `_reason`.
        generation, batch_id: of the stream that rejected it, if one did.
    """
    return rows.select(
        F.lit(model).alias("model"),
        (F.col(PAYLOAD) if payload is None else payload).alias("payload"),
        (F.col(REASON) if reason is None else reason).alias("reason"),
        source.alias("source"),
        position.alias("position"),
        F.lit(batch_id).cast("bigint").alias("batch_id"),
        F.lit(generation).cast("string").alias("generation"),
        F.current_timestamp().alias("quarantined_at"),
    )


def identified(warehouse: Warehouse, rows: DataFrame) -> DataFrame:
    """Return rejected rows with ids, and make the quarantine table unless it exists."""
    warehouse.create(TABLE, QUARANTINE)
    return rows.withColumn("id", F.expr("uuid()"))


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


def topic_quarantine(
    rejected: DataFrame, model: str, topic: str, generation: str | None, batch_id: int | None
) -> DataFrame:
    """Return rejected messages (`_reason`, `_payload`, `_position`) with the quarantine's columns."""
    where = json.dumps({"generation": generation, "batch_id": batch_id})[1:-1]
    position = F.col(POSITION)
    if generation is not None:
        position = F.concat(F.expr(f"left({POSITION}, length({POSITION}) - 1)"), F.lit(f", {where}}}"))
    source = F.lit(f"kafka:{topic}")
    return rejected_rows(rejected, model, source, position, generation=generation, batch_id=batch_id)
