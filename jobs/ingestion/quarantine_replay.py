"""Land rejected rows after a fix, each at most once, also after a crash at any moment.

Three commits, in this order:
1. the rows that are accepted now are marked `replaying`, each with the row to land: this fixes the outcome;
2. they are appended to the measurements, in a transaction named after the replay, so that a retry is idempotent;
3. they are marked `replayed`.
A crash before 1 changes nothing. After a later crash, the next replay of the model first repeats 2 and 3.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from delta.tables import DeltaTable
from pyspark.sql import functions as F

from jobs.core.errors import UserError
from jobs.ingestion.checking import ROWS_A_FILE
from jobs.ingestion.rechecking import recheck
from jobs.lineage import replayed_late_rows
from jobs.specs.model_spec import ModelSpec
from jobs.warehouse import quarantine
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.measurements_table import KeyTypes
from jobs.warehouse.quarantine import REPLAYED, REPLAYING, TABLE
from jobs.warehouse.tables import need_measurements

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

STALE = (
    "rejected by a generation whose state is no longer used; the current generations check the row themselves"
)
"""Why a row is not replayed that an abandoned generation rejected."""


@dataclass
class Outcome:
    """Counts of a replay: rows landed, late ones among them, rows of an interrupted replay, rows still rejected."""

    landed: int = 0
    late: int = 0
    completed: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    version: int | None = None


def replay(warehouse: Warehouse, spec: ModelSpec, rows: DataFrame) -> Outcome:
    """Land the held rows (id, payload, source, generation, batch_id) that the current spec accepts.

    Raises:
        UserError: the model has no measurements table, or the table lacks a column of the spec.
    """
    table = need_measurements(warehouse, spec.name)
    key_types = _key_types(warehouse, spec, table)
    with warehouse.lock(f"replay-{spec.name}"):
        outcome = Outcome(completed=_complete_interrupted(warehouse, spec, key_types))
        identity = uuid.uuid4().hex
        checked = _rechecked(warehouse, spec, key_types, rows).persist()
        try:
            for row in checked.groupBy("reason").count().collect():
                if row["reason"] is not None:
                    outcome.reasons[row["reason"]] = int(row["count"])
            accepted = checked.filter("reason IS NULL").select("id", "landing").dropDuplicates(["id"])
            if not accepted.isEmpty():
                _mark_replaying(warehouse, accepted, identity)
        finally:
            checked.unpersist()
        outcome.landed, outcome.late = _complete(warehouse, spec, key_types, identity)
    outcome.version = warehouse.latest_version(table) if outcome.landed or outcome.completed else None
    return outcome


def interrupted(warehouse: Warehouse, model: str) -> list[str]:
    """Return the ids of the model's replays that crashed between their commits."""
    rows = warehouse.read(TABLE).filter((F.col("model") == model) & (F.col("status") == REPLAYING))
    return sorted(row["replay"] for row in rows.select("replay").distinct().collect())


def _complete_interrupted(warehouse: Warehouse, spec: ModelSpec, key_types: KeyTypes) -> int:
    return sum(_complete(warehouse, spec, key_types, one)[0] for one in interrupted(warehouse, spec.name))


def _rechecked(warehouse: Warehouse, spec: ModelSpec, key_types: KeyTypes, rows: DataFrame) -> DataFrame:
    """Return id, the row to land, and the reason why it cannot be replayed, null if it can."""
    chains = replayed_late_rows.lineages(warehouse, spec.name)
    current = replayed_late_rows.refused_by_all(chains, F.col("generation"), F.col("batch_id"))
    stale = _is_measurement() & ~current
    checked = rows.select("id", "payload", stale.alias("stale")).mapInArrow(
        _checker(spec, key_types), "id string, stale boolean, reason string, landing string"
    )
    return checked.select(
        "id", "landing", F.when(F.col("stale"), F.lit(STALE)).otherwise(F.col("reason")).alias("reason")
    )


def _is_measurement() -> Column:
    """Return whether a row was rejected by the stream: then the measurements already have it."""
    return F.col("generation").isNotNull() & F.col("source").startswith("measurements/")


def _checker(
    spec: ModelSpec, key_types: KeyTypes
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def check(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            found = recheck(spec, key_types, batch.column("payload").to_pylist())
            yield pa.RecordBatch.from_arrays(
                [
                    batch.column("id"),
                    batch.column("stale"),
                    pa.array(found.reasons, pa.string()),
                    pa.array(found.landings, pa.string()),
                ],
                ["id", "stale", "reason", "landing"],
            )

    return check


def _mark_replaying(warehouse: Warehouse, accepted: DataFrame, identity: str) -> None:
    """Mark the accepted rows that are still held as `replaying`, in one commit."""
    target = DeltaTable.forPath(warehouse.spark, warehouse.path(TABLE)).alias("t")
    merge = target.merge(accepted.alias("s"), "t.id = s.id").whenMatchedUpdate(
        "t.status IS NULL",
        {"status": F.lit(REPLAYING), "replay": F.lit(identity), "landing": F.col("s.landing")},
    )
    with warehouse.lock(TABLE):
        merge.execute()


def _complete(warehouse: Warehouse, spec: ModelSpec, key_types: KeyTypes, identity: str) -> tuple[int, int]:
    """Do the second and third commit of a replay; return how many rows landed, and how many of them were late."""
    chosen = (F.col("replay") == identity) & (F.col("status") == REPLAYING)
    rows = warehouse.read(TABLE).filter(chosen)
    late = _is_measurement()
    landed = _land(warehouse, spec, key_types, rows.filter(~late), identity, copies=False)
    copied = _land(warehouse, spec, key_types, rows.filter(late), identity, copies=True)
    if landed + copied:
        _mark_replayed(warehouse, identity)
    return landed + copied, copied


def _mark_replayed(warehouse: Warehouse, identity: str) -> None:
    quarantine.update(
        warehouse,
        (F.col("replay") == identity) & (F.col("status") == REPLAYING),
        {"status": F.lit(REPLAYED), "resolved_at": F.current_timestamp()},
    )


def _land(
    warehouse: Warehouse, spec: ModelSpec, key_types: KeyTypes, rows: DataFrame, identity: str, copies: bool
) -> int:
    """Append a replay's rows to the measurements, once; return how many. copies: the rows are late ones."""
    columns = {name: "double" for name in spec.columns} | key_types | {spec.time: "bigint"}
    schema = ", ".join(f"`{name}` {kind}" for name, kind in columns.items())
    origin = replayed_late_rows.origin(identity) if copies else F.lit(f"quarantine:{identity}")
    parsed = rows.select(F.from_json("landing", schema).alias("row"), origin.alias("_origin"))
    time = F.col(f"row.`{spec.time}`")
    count, first, last = parsed.agg(F.count("*"), F.min(time), F.max(time)).collect()[0]
    if not count:
        return 0
    if copies:
        replayed_late_rows.announce(warehouse, identity, spec.name, count)
    frame = parsed.select(
        *(
            (F.timestamp_micros(time) if name == spec.time else F.col(f"row.`{name}`")).alias(name)
            for name in spec.columns
        ),
        "_origin",
        F.current_timestamp().alias("_landed_at"),
    )
    # A batch pass already has the originals, so the commit of copies records no time span (`positions.Commit`).
    span: dict[str, Any] = (
        {"min_time": None, "max_time": None} if copies else {"min_time": first, "max_time": last}
    )
    detail = {"replay": identity, "late": copies, "rows": count, **span}
    warehouse.append(
        frame.coalesce(max(1, count // ROWS_A_FILE)),
        need_measurements(warehouse, spec.name),
        (f"replay-{identity}{'-late' if copies else ''}", 1),
        {"userMetadata": json.dumps(detail)},
    )
    return int(count)


def _key_types(warehouse: Warehouse, spec: ModelSpec, table: str) -> KeyTypes:
    have = {one.name: one.dataType.simpleString() for one in warehouse.read(table).schema.fields}
    absent = [name for name in spec.columns if name not in have]
    if absent:
        raise UserError(
            f"the measurements table of {spec.name} has no column {', '.join(absent)}, which its spec uses: "
            f"rejected rows cannot be replayed into it"
        )
    return {name: have[name] for name in spec.naming_columns}
