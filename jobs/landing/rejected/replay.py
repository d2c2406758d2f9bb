"""Land rejected rows after a fix, each at most once, also after a crash at any moment.

Three commits, in this order:
1. the rows that are accepted now are marked `replaying`, each with the row to land: this fixes the outcome;
2. they are appended to the measurements, in a transaction named after the replay, so that a retry is idempotent;
3. they are marked `replayed`.
A crash before 1 changes nothing. After a later crash, the next replay of the model first repeats 2 and 3.

A message of a topic has a row in quarantine for each reader that rejected it. One of them lands, and the others are
marked with it; all are marked, and none lands, if the message has landed already.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
from pyspark.sql import functions as F

from jobs.core.errors import UserError
from jobs.encoding import arrow
from jobs.landing.checking import ROWS_A_FILE
from jobs.landing.message_places import (
    MESSAGE,
    Landing,
    identity,
    is_message,
    landed_among,
    rejected_place,
)
from jobs.landing.rejected.held import mark_replayed, mark_replaying
from jobs.landing.rejected.rechecking import recheck
from jobs.landing.values.times import now_us
from jobs.lineage import replayed_late_rows
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.storage.measurements_table import OFFSET, KeyTypes
from jobs.storage.quarantine import REPLAYING, TABLE
from jobs.storage.tables import need_measurements

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

STALE = (
    "rejected by a generation whose state is no longer used; the current generations check the row themselves"
)
"""Why a row is not replayed that an abandoned generation rejected."""
AHEAD = "not landed yet: `ingest` will read this message, and check it with the current spec"
"""Why a message is not replayed that a stream has rejected, and `ingest` has not read."""


@dataclass
class Outcome:
    """Counts of a replay: rows landed, late ones among them, rows of an interrupted replay, rows still rejected.

    copies: rows marked as replayed without landing, since their message has landed, or lands from another row.
    """

    landed: int = 0
    late: int = 0
    copies: int = 0
    completed: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    version: int | None = None


class Done(NamedTuple):
    """Counts of a completed replay: rows landed, late ones among them, rows marked with another that landed."""

    landed: int
    late: int
    copies: int


def replay(warehouse: Warehouse, spec: ModelSpec, rows: DataFrame) -> Outcome:
    """Land the held rows (id, payload, source, position, generation, batch_id) that the current spec accepts.

    Raises:
        UserError: the model has no measurements table, or the table lacks a column of the spec.
    """
    table = need_measurements(warehouse, spec.name)
    key_types = _key_types(warehouse, spec, table)
    with warehouse.lock(f"replay-{spec.name}"):
        outcome = Outcome(completed=_complete_interrupted(warehouse, spec, key_types))
        replay_id = uuid.uuid4().hex
        landing = Landing.of(warehouse, spec)
        checked = _rechecked(warehouse, spec, key_types, rows, landing).persist()
        try:
            claims = _claims(warehouse, spec, checked, landing).persist()
            left = checked.join(claims.select(MESSAGE), MESSAGE, "left_anti")
            for row in left.groupBy("reason").count().collect():
                outcome.reasons[row["reason"]] = int(row["count"])
            if not claims.isEmpty():
                _mark_replaying(warehouse, spec, claims, landing, replay_id)
            claims.unpersist()
        finally:
            checked.unpersist()
        done = _complete(warehouse, spec, key_types, replay_id)
        outcome.landed, outcome.late, outcome.copies = done
    outcome.version = warehouse.latest_version(table) if outcome.landed or outcome.completed else None
    return outcome


def interrupted(warehouse: Warehouse, model: str) -> list[str]:
    """Return the ids of the model's replays that crashed between their commits."""
    rows = warehouse.read(TABLE).filter((F.col("model") == model) & (F.col("status") == REPLAYING))
    return sorted(row["replay"] for row in rows.select("replay").distinct().collect())


def _complete_interrupted(warehouse: Warehouse, spec: ModelSpec, key_types: KeyTypes) -> int:
    return sum(_complete(warehouse, spec, key_types, one).landed for one in interrupted(warehouse, spec.name))


def _rechecked(
    warehouse: Warehouse, spec: ModelSpec, key_types: KeyTypes, rows: DataFrame, landing: Landing
) -> DataFrame:
    """Return `MESSAGE`, source, position, id, the row to land, and the reason why it cannot be replayed, or null."""
    chains = replayed_late_rows.lineages(warehouse, spec.name)
    current = replayed_late_rows.refused_by_all(chains, F.col("generation"), F.col("batch_id"))
    stale = _is_measurement() & ~current
    ahead = is_message() & ~landing.reached()
    kept = "id string, source string, position string, message string, stale boolean, ahead boolean"
    checked = rows.select(
        *("id", "source", "position", "payload", "quarantined_at"),
        identity(landing).alias("message"),
        F.coalesce(stale, F.lit(False)).alias("stale"),
        F.coalesce(ahead, F.lit(False)).alias("ahead"),
    ).mapInArrow(_checker(spec, key_types), f"{kept}, reason string, landing string")
    reason = F.when(F.col("stale"), F.lit(STALE)).when(F.col("ahead"), F.lit(AHEAD))
    return checked.select(
        *("id", "source", "position", "landing"),
        F.col("message").alias(MESSAGE),
        reason.otherwise(F.col("reason")).alias("reason"),
    )


def _claims(warehouse: Warehouse, spec: ModelSpec, checked: DataFrame, landing: Landing) -> DataFrame:
    """Return what a replay marks: each `MESSAGE`, and the row that lands it, null if it has landed already."""
    accepted = checked.filter("reason IS NULL").select(MESSAGE, "id", "landing")
    # Rows of an earlier release that agree in everything share an id; of a message, any accepted row will do.
    chosen = accepted.groupBy(MESSAGE).agg(F.min(F.struct("id", "landing")).alias("row"))
    landed = landed_among(warehouse, spec, landing, checked).withColumn("known", F.lit(True))
    row = F.when(F.col("known").isNull(), F.col("row")).alias("row")
    return chosen.join(landed, MESSAGE, "full_outer").select(MESSAGE, row).select(MESSAGE, "row.*")


def _is_measurement() -> Column:
    """Return whether a row was rejected by the stream: then the measurements already have it."""
    return F.col("generation").isNotNull() & F.col("source").startswith("measurements/")


def _checker(
    spec: ModelSpec, key_types: KeyTypes
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    kept = ("id", "source", "position", "message", "stale", "ahead")

    def check(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            landed = arrow.to_numpy(batch.column("quarantined_at").cast(pa.int64()), now_us())
            found = recheck(spec, key_types, batch.column("payload").to_pylist(), landed)
            yield pa.RecordBatch.from_arrays(
                [
                    *(batch.column(name) for name in kept),
                    pa.array(found.reasons, pa.string()),
                    pa.array(found.landings, pa.string()),
                ],
                [*kept, "reason", "landing"],
            )

    return check


def _mark_replaying(
    warehouse: Warehouse, spec: ModelSpec, claims: DataFrame, landing: Landing, replay_id: str
) -> None:
    """Mark the held rows of the claimed messages as `replaying`, in one commit, and fix the row that each lands as."""
    rows = warehouse.read(TABLE).filter(F.col("model") == spec.name)
    held = rows.filter(F.col("status").isNull()).select("id", identity(landing).alias(MESSAGE))
    wanted = held.join(claims.withColumnRenamed("id", "lands"), MESSAGE).select(
        "id", F.when(F.col("id") == F.col("lands"), F.col("landing")).alias("landing")
    )
    mark_replaying(warehouse, wanted.dropDuplicates(["id"]).toArrow(), replay_id)


def _complete(warehouse: Warehouse, spec: ModelSpec, key_types: KeyTypes, replay_id: str) -> Done:
    """Do the second and third commit of a replay."""
    chosen = (F.col("replay") == replay_id) & (F.col("status") == REPLAYING)
    marked = warehouse.read(TABLE).filter(chosen)
    lands = F.col("landing").isNotNull()
    copies = marked.filter(~lands).count()
    rows, late = marked.filter(lands), _is_measurement()
    copied = _land(warehouse, spec, key_types, rows.filter(late), replay_id, copies=True)
    rows = _each_message_once(rows.filter(~late), Landing.of(warehouse, spec))
    landed = _land(warehouse, spec, key_types, rows, replay_id, copies=False)
    if landed + copied + copies:
        mark_replayed(warehouse, replay_id)
    return Done(landed + copied, copied, copies)


def _each_message_once(rows: DataFrame, landing: Landing) -> DataFrame:
    """Keep one row of each message: a replay of an earlier release, which was interrupted, has marked all of them."""
    messages = rows.filter(is_message()).withColumn(MESSAGE, identity(landing)).dropDuplicates([MESSAGE])
    return rows.filter(~is_message()).unionByName(messages.drop(MESSAGE))


def _land(
    warehouse: Warehouse, spec: ModelSpec, key_types: KeyTypes, rows: DataFrame, replay_id: str, copies: bool
) -> int:
    """Append a replay's rows to the measurements, once; return how many. copies: the rows are late ones."""
    columns = {name: "double" for name in spec.columns} | key_types | {spec.time: "bigint"}
    schema = ", ".join(f"`{name}` {kind}" for name, kind in columns.items())
    origin = replayed_late_rows.origin(replay_id) if copies else F.lit(f"quarantine:{replay_id}")
    table = need_measurements(warehouse, spec.name)
    of_topic = spec.source_kind == "kafka" or OFFSET in warehouse.read(table).columns
    place = rejected_place() if of_topic and not copies else {}
    parsed = rows.select(
        F.from_json("landing", schema).alias("row"),
        origin.alias("_origin"),
        *(F.when(is_message(), part).alias(name) for name, part in place.items()),
    )
    time = F.col(f"row.`{spec.time}`")
    count, first, last = parsed.agg(F.count("*"), F.min(time), F.max(time)).collect()[0]
    if not count:
        return 0
    if copies:
        replayed_late_rows.announce(warehouse, replay_id, spec.name, count)
    frame = parsed.select(
        *(
            (F.timestamp_micros(time) if name == spec.time else F.col(f"row.`{name}`")).alias(name)
            for name in spec.columns
        ),
        *("_origin", *place),
        F.current_timestamp().alias("_landed_at"),
    )
    # A batch pass already has the originals, so the commit of copies records no time span (`positions.Commit`).
    span: dict[str, Any] = (
        {"min_time": None, "max_time": None} if copies else {"min_time": first, "max_time": last}
    )
    detail = {"replay": replay_id, "late": copies, "rows": count, **span}
    warehouse.append(
        frame.coalesce(max(1, count // ROWS_A_FILE)),
        table,
        (f"replay-{replay_id}{'-late' if copies else ''}", 1),
        json.dumps(detail),
        more_columns=True,
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
