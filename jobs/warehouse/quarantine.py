"""The quarantine: one table for every row that was rejected, wherever that was, with its payload and the reason.

A row's `status` says what has become of it since: null (held), `replaying` (a replay has chosen it and fixed, in
`landing`, what it lands as; killed there, the next replay ends it), `replayed`, `discarded`. What is
held is never removed; what is not, `maintain` removes when it is old.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from delta.tables import DeltaTable
from pyspark.sql import functions as F

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.times import duration_us
from jobs.specs.row_order import QuarantineLimit
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.positions import parse_time, to_datetime
from jobs.warehouse.tables import QUARANTINE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

REASON, PAYLOAD = "_reason", "_payload"

POSITION, PARTITION, OFFSET = "_position", "_partition", "_offset"

TABLE = "quarantine"
HELD, REPLAYING, REPLAYED, DISCARDED = "held", "replaying", "replayed", "discarded"


@dataclass(frozen=True, slots=True)
class Choice:
    """Which held rows are meant: all conditions that are given hold together.

    Attributes:
        reason: how the reason begins.
        since: quarantined at or after this time (ISO 8601), or within this duration (2d) from now.
        ids: these rows.
    """

    reason: str | None = None
    since: str | None = None
    ids: tuple[str, ...] = ()

    @property
    def all(self) -> bool:
        """Tell if no condition is given."""
        return self.reason is None and self.since is None and not self.ids

    def condition(self) -> Column:
        """Return the condition on rows of the table."""
        result = F.lit(True)
        if self.reason is not None:
            result = result & F.col("reason").startswith(self.reason)
        if self.since is not None:
            result = result & (F.col("quarantined_at") >= F.lit(_since(self.since)))
        if self.ids:
            result = result & F.col("id").isin(*self.ids)
        return result


OPTIONS = {"mergeSchema": "true"}
"""Of an append: tables from before rows had an id get the column with the first row that has one."""


def keep(warehouse: Warehouse, rows: DataFrame, transaction: tuple[str, int]) -> None:
    """Append rejected rows, once for a transaction however often it is tried.

    Args:
        warehouse: where.
        rows: model, payload, reason, source, position, batch_id, generation, quarantined_at.
        transaction: application and number, as of `Warehouse.append`.
    """
    warehouse.append(identified(warehouse, rows), TABLE, transaction, OPTIONS)


def identified(warehouse: Warehouse, rows: DataFrame) -> DataFrame:
    """Give rejected rows their ids, and make the table that they go to, if it is not there."""
    warehouse.create(TABLE, QUARANTINE)
    return rows.withColumn("id", F.expr("uuid()"))


class TooMany(UserError):
    """More was rejected than the spec allows."""


def too_many(limit: QuarantineLimit | None, reasons: Mapping[str, int], accepted: int) -> bool:
    """Tell if so many rows were rejected, by reason, beside those accepted, that the spec wants a failure instead."""
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
    """Return the error of a micro-batch or file of which too many rows were rejected, before any of it is written.

    Args:
        limit: of the spec.
        reasons: rejected rows by reason.
        accepted: the other rows.
        where: what they are of, such as "micro-batch 7".
        code: the command's exit code.
    """
    rejected = sum(reasons.values())
    first = max(reasons, key=lambda reason: reasons[reason])
    allowed = "" if limit is None else f" ({limit.fail_above:g})"
    return TooMany(
        f"{where}: {rejected:,} of {rejected + accepted:,} rows would go to quarantine, most for '{first}', and "
        f"quarantine.fail_above{allowed} allows less: nothing of it was written; mend the rows at their source, or "
        f"raise quarantine.fail_above in the spec, and start again",
        code,
    )


def holds(warehouse: Warehouse, model: str, digest: str) -> bool:
    """Tell if rows of a file with this digest are in the table: then it has been landed before."""
    if not warehouse.exists(TABLE):
        return False
    mine = (F.col("model") == model) & F.col("position").contains(digest)
    return not warehouse.read(TABLE).filter(mine).isEmpty()


def ready(warehouse: Warehouse) -> bool:
    """Bring a table from before rows had an id up to date; False if there is no quarantine at all."""
    if not warehouse.exists(TABLE):
        return False
    have = set(warehouse.read(TABLE).columns)
    path = f"delta.`{warehouse.path(TABLE)}`"
    wanted = [field.strip().split(" ") for field in QUARANTINE.split(",")]
    absent = [f"`{name}` {kind}" for name, kind in wanted if name not in have]
    if absent:
        with warehouse.lock(TABLE):
            warehouse.spark.sql(f"ALTER TABLE {path} ADD COLUMNS ({', '.join(absent)})")
    if not warehouse.read(TABLE).filter("id IS NULL").isEmpty():
        parts = ("model", "payload", "reason", "source", "position", "quarantined_at")
        # Rows that are the same in all of these get one id, and are replayed or discarded together.
        update(warehouse, "id IS NULL", {"id": f"left(sha2(concat_ws('|', {', '.join(parts)}), 256), 32)"})
    return True


def update(warehouse: Warehouse, condition: str | Column, values: dict[str, Any]) -> None:
    """Set columns of the rows that meet a condition, in one commit."""
    with warehouse.lock(TABLE):
        DeltaTable.forPath(warehouse.spark, warehouse.path(TABLE)).update(condition, values)


def held_by_model(warehouse: Warehouse) -> dict[str, int]:
    """Return how many rows of each model are held."""
    if not warehouse.exists(TABLE):
        return {}
    rows = warehouse.read(TABLE)
    if "status" in rows.columns:
        rows = rows.filter(F.col("status").isNull())
    return {row["model"]: int(row["count"]) for row in rows.groupBy("model").count().collect()}


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
    """Give rejected messages (`_reason`, `_payload`, `_position`) the quarantine's columns."""
    where = json.dumps({"generation": generation, "batch_id": batch_id})[1:-1]
    position = F.col(POSITION)
    if generation is not None:
        position = F.concat(F.expr(f"left({POSITION}, length({POSITION}) - 1)"), F.lit(f", {where}}}"))
    return rejected.select(
        F.lit(model).alias("model"),
        F.col(PAYLOAD).alias("payload"),
        F.col(REASON).alias("reason"),
        F.lit(f"kafka:{topic}").alias("source"),
        position.alias("position"),
        F.lit(batch_id).cast("bigint").alias("batch_id"),
        F.lit(generation).cast("string").alias("generation"),
        F.current_timestamp().alias("quarantined_at"),
    )
