"""Land rejected rows after a fix, each at most once, whatever is killed and whenever.

Three commits, in this order:
1. the chosen rows that fit now are marked `replaying`, each with what it lands as: from here on the outcome is fixed;
2. the measurements get them, in a transaction named after the replay, so that trying again adds nothing;
3. they are marked `replayed`.
Killed before 1, nothing has changed. Killed later, the next replay of the model first does 2 and 3 again.
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
from jobs.ingestion.requalify import judge
from jobs.lineage import replayed_late_rows
from jobs.specs.model_spec import ModelSpec
from jobs.warehouse import quarantine
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.measurements_table import KeyTypes
from jobs.warehouse.quarantine import REPLAYED, REPLAYING, TABLE
from jobs.warehouse.tables import need_measurements

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

STALE = "refused by a generation that nothing goes on from; those of now judge the row themselves"
"""Why a row is not replayed that a stream refused whose state is no longer used."""
ROWS_A_FILE = 2_000_000


@dataclass
class Outcome:
    """What a replay did: rows landed, late ones among them, rows of an earlier replay ended now, and what stays why."""

    landed: int = 0
    late: int = 0
    ended: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    version: int | None = None


def replay(warehouse: Warehouse, spec: ModelSpec, rows: DataFrame) -> Outcome:
    """Land those of the held rows (id, payload, source, generation, batch_id) that fit by the spec as it is now.

    Raises:
        UserError: the model has no measurements table, or one with other columns.
    """
    table = need_measurements(warehouse, spec.name)
    key_types = _key_types(warehouse, spec, table)
    with warehouse.lock(f"replay-{spec.name}"):
        outcome = Outcome(ended=_end_interrupted(warehouse, spec, key_types))
        identity = uuid.uuid4().hex
        judged = _judged(warehouse, spec, key_types, rows).persist()
        try:
            for row in judged.groupBy("reason").count().collect():
                if row["reason"] is not None:
                    outcome.reasons[row["reason"]] = int(row["count"])
            fits = judged.filter("reason IS NULL").select("id", "landing").dropDuplicates(["id"])
            if not fits.isEmpty():
                _choose(warehouse, fits, identity)
        finally:
            judged.unpersist()
        outcome.landed, outcome.late = _end(warehouse, spec, key_types, identity)
    outcome.version = warehouse.latest_version(table) if outcome.landed or outcome.ended else None
    return outcome


def interrupted(warehouse: Warehouse, model: str) -> list[str]:
    """Return the model's replays that were killed between their commits."""
    rows = warehouse.read(TABLE).filter((F.col("model") == model) & (F.col("status") == REPLAYING))
    return sorted(row["replay"] for row in rows.select("replay").distinct().collect())


def _end_interrupted(warehouse: Warehouse, spec: ModelSpec, key_types: KeyTypes) -> int:
    return sum(_end(warehouse, spec, key_types, one)[0] for one in interrupted(warehouse, spec.name))


def _judged(warehouse: Warehouse, spec: ModelSpec, key_types: KeyTypes, rows: DataFrame) -> DataFrame:
    """Return id, landing and the reason why a row cannot be replayed, null if it can."""
    chains = replayed_late_rows.lineages(warehouse, spec.name)
    ours = replayed_late_rows.refused_by_all(chains, F.col("generation"), F.col("batch_id"))
    stale = _measured() & ~ours
    judged = rows.select("id", "payload", stale.alias("stale")).mapInArrow(
        _judge(spec, key_types), "id string, stale boolean, reason string, landing string"
    )
    return judged.select(
        "id", "landing", F.when(F.col("stale"), F.lit(STALE)).otherwise(F.col("reason")).alias("reason")
    )


def _measured() -> Column:
    """Tell of rows that the stream refused: they are among the measurements."""
    return F.col("generation").isNotNull() & F.col("source").startswith("measurements/")


def _judge(
    spec: ModelSpec, key_types: KeyTypes
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def judge_all(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            found = judge(spec, key_types, batch.column("payload").to_pylist())
            yield pa.RecordBatch.from_arrays(
                [
                    batch.column("id"),
                    batch.column("stale"),
                    pa.array(found.reasons, pa.string()),
                    pa.array(found.landings, pa.string()),
                ],
                ["id", "stale", "reason", "landing"],
            )

    return judge_all


def _choose(warehouse: Warehouse, fits: DataFrame, identity: str) -> None:
    """Mark the rows as being replayed, in one commit; one that is no longer held is left out."""
    target = DeltaTable.forPath(warehouse.spark, warehouse.path(TABLE)).alias("t")
    merge = target.merge(fits.alias("s"), "t.id = s.id").whenMatchedUpdate(
        "t.status IS NULL",
        {"status": F.lit(REPLAYING), "replay": F.lit(identity), "landing": F.col("s.landing")},
    )
    with warehouse.lock(TABLE):
        merge.execute()


def _end(warehouse: Warehouse, spec: ModelSpec, key_types: KeyTypes, identity: str) -> tuple[int, int]:
    """Land what a replay has chosen, unless it is there, and mark it; return how many rows, and how many were late."""
    chosen = (F.col("replay") == identity) & (F.col("status") == REPLAYING)
    rows = warehouse.read(TABLE).filter(chosen)
    late = _measured()
    landed = _land(warehouse, spec, key_types, rows.filter(~late), identity, copies=False)
    copied = _land(warehouse, spec, key_types, rows.filter(late), identity, copies=True)
    if landed + copied:
        _mark(warehouse, identity)
    return landed + copied, copied


def _mark(warehouse: Warehouse, identity: str) -> None:
    quarantine.update(
        warehouse,
        (F.col("replay") == identity) & (F.col("status") == REPLAYING),
        {"status": F.lit(REPLAYED), "resolved_at": F.current_timestamp()},
    )


def _land(
    warehouse: Warehouse, spec: ModelSpec, key_types: KeyTypes, rows: DataFrame, identity: str, copies: bool
) -> int:
    """Append rows to the measurements, once for a replay; return how many they are."""
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
    # Copies are no news for a batch pass, so of their commit no time is told (`positions.Commit`).
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
            f"the measurements table of {spec.name} has no column {', '.join(absent)}, which its spec names: "
            f"a rejected row cannot be replayed into it"
        )
    return {name: have[name] for name in spec.naming_columns}
