"""Land a Kafka topic in the measurements table, and read it as a stream from exactly where a snapshot is.

Landing is a stream of its own, with its own checkpoint: Spark fixes the offsets of a micro-batch before it runs, and
the commits of one carry (that stream, micro-batch) as their Delta transaction, first those to quarantine, then those to
the measurements. Killed between the two, or anywhere, the next run does the same micro-batch again and changes nothing
that was there. Each commit to the measurements says up to which offsets the topic has landed with it.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from jobs.core.errors import RUN_FAILED, UserError
from jobs.ingestion.checking import measurement_columns
from jobs.ingestion.messages import judged, key_types
from jobs.spark.job_labels import batches_labelled
from jobs.spark.kafka import Offsets, bounds, refuse_lost, spark_options, starting
from jobs.spark.queries import await_end, cause_of, with_trigger
from jobs.specs.model_spec import ModelSpec
from jobs.specs.source import Source
from jobs.warehouse.checkpoints import Checkpoint
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.measurements_table import MEASUREMENT_PROPERTIES, KeyTypes, key_types_in
from jobs.warehouse.positions import landed_offsets, offsets_of, said
from jobs.warehouse.quarantine import (
    OFFSET,
    PARTITION,
    PAYLOAD,
    POSITION,
    REASON,
    keep,
    refusal,
    too_many,
    topic_quarantine,
)
from jobs.warehouse.tables import measurements

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.lineage.generations import Generation

PLACES = "_topic string, _partition int, _offset bigint"
"""Columns of a topic's measurements that say where each came from."""


def source_of(spec: ModelSpec) -> Source:
    """Return the spec's source.

    Raises:
        UserError: it has none, though a generation of its reads a topic.
    """
    if spec.source is None:
        raise UserError(
            f"the stream of {spec.name} reads a topic, and its spec has no `source` any more: put it back, or pretrain "
            f"the spec as it is now and start with `stream --model {spec.name} --adopt SNAPSHOT`"
        )
    return spec.source


def messages_behind(
    warehouse: Warehouse, spec: ModelSpec, checkpoint: Checkpoint, start: Offsets, types: KeyTypes, what: str
) -> DataFrame:
    """Return a topic's messages behind a position as a stream of judged rows (`messages.judged`).

    Args:
        warehouse: where.
        spec: the model's.
        checkpoint: of the stream; where it has come to counts, before its first micro-batch `start` does.
        start: offset of the next message, by partition; one that is not named is read from its beginning.
        types: of the key columns.
        what: reads it, for errors.

    Raises:
        UserError: messages behind the position are gone, or the brokers do not answer.
    """
    source = source_of(spec)
    spark = warehouse.spark
    have = bounds(spark, source.topic)
    batch = checkpoint.last_commit()
    needed = start
    if batch is not None:
        reached = checkpoint.position(batch, {})
        if reached["topic"] != source.topic:
            raise UserError(
                f"{what} has come to {said(reached)}, and the spec reads topic {source.topic} now. Put the "
                f"topic back, or give the model of the other one a name of its own"
            )
        needed = offsets_of(reached)
    refuse_lost(source.topic, needed, have, what)
    reader = spark.readStream.format("kafka").option("subscribe", source.topic)
    reader = reader.option("startingOffsets", starting(source.topic, start, have))
    reader = reader.option("failOnDataLoss", "true")
    # A broker that is started again within a minute is waited for.
    reader = reader.option("fetchOffset.numRetries", 30).option("fetchOffset.retryIntervalMs", 2000)
    if source.max_offsets_per_batch is not None:
        reader = reader.option("maxOffsetsPerTrigger", source.max_offsets_per_batch)
    for name, value in spark_options().items():
        reader = reader.option(name, value)
    return judged(reader.load(), spec, source, types)


def stream_of(warehouse: Warehouse, spec: ModelSpec, generation: Generation, types: KeyTypes) -> DataFrame:
    """Return the messages behind a generation's snapshot as a stream."""
    checkpoint = Checkpoint(warehouse, generation.checkpoint)
    start = offsets_of(generation.start_position)
    return messages_behind(warehouse, spec, checkpoint, start, types, f"the stream of {spec.name}")


@dataclass
class Landing:
    """The function that Spark calls with each micro-batch's messages, and what it has landed."""

    warehouse: Warehouse
    spec: ModelSpec
    checkpoint: Checkpoint
    told: Callable[[Landing], None]
    batches: int = 0
    rows: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    version: int | None = None

    def __call__(self, messages: DataFrame, batch_id: int) -> None:
        """Land a micro-batch. Running it again changes nothing."""

        spec, source = self.spec, source_of(self.spec)
        app = f"ingest-{spec.name}-{self.checkpoint.query_id()}"
        messages = messages.persist()
        try:
            micros = F.unix_micros(F.col(f"`{spec.time}`"))
            counts = messages.groupBy(REASON).agg(
                F.count("*").alias("rows"), F.min(micros).alias("first"), F.max(micros).alias("last")
            )
            found = {row[REASON]: row for row in counts.collect()}
            good = found.pop(None, None)
            count = 0 if good is None else int(good["rows"])
            reasons = {reason: int(row["rows"]) for reason, row in found.items()}
            if too_many(spec.quarantine, reasons, count):
                where = f"micro-batch {batch_id} of topic {source.topic}"
                raise refusal(spec.quarantine, reasons, count, where)
            if found:
                rejected = messages.filter(F.col(REASON).isNotNull()).coalesce(1)
                rows = topic_quarantine(rejected, spec.name, source.topic, None, None)
                keep(self.warehouse, rows, (app, batch_id))
            fits = messages.filter(F.col(REASON).isNull()).drop(REASON, PAYLOAD, POSITION)
            place = F.concat_ws("/", F.lit(f"kafka:{source.topic}"), PARTITION, OFFSET)
            fits = fits.withColumn("_origin", place).withColumn("_landed_at", F.current_timestamp())
            fits = fits.withColumn("_topic", F.lit(source.topic)).coalesce(max(1, count // 2_000_000))
            offsets = offsets_of(self.checkpoint.position(batch_id, {}))
            span = (None, None) if good is None else (good["first"], good["last"])
            detail = landing_detail(source.topic, offsets, count, span)
            options = {"userMetadata": json.dumps(detail), "mergeSchema": "true"}
            self.warehouse.append(fits, measurements(spec.name), (app, batch_id), options)
        finally:
            messages.unpersist()
        self.batches += 1
        self.rows += count
        self.reasons.update(reasons)
        self.version = self.warehouse.latest_version(measurements(spec.name))
        self.told(self)


def landing_detail(
    topic: str, offsets: Offsets, rows: int, span: tuple[int | None, int | None]
) -> dict[str, Any]:
    """Return what a commit to the measurements says of itself: rows, their times, and how far the topic has landed."""
    named = {str(number): offset for number, offset in sorted(offsets.items())}
    return {"topic": topic, "offsets": named, "rows": rows, "min_time": span[0], "max_time": span[1]}


def land(
    warehouse: Warehouse,
    spec: ModelSpec,
    seconds: float | None = None,
    stop: threading.Event | None = None,
    told: Callable[[Landing], None] = lambda landing: None,
) -> Landing:
    """Land what a topic holds behind what has landed; with `seconds`, go on every so many until `stop` is set.

    Raises:
        UserError: messages are gone that have not landed, or the brokers do not answer.
    """

    source = source_of(spec)
    types = prepare(warehouse, spec)
    checkpoint = Checkpoint(warehouse, f"checkpoints/ingest-{spec.name}")
    start = _start(warehouse, spec)
    landing = Landing(warehouse, spec, checkpoint, told)
    what = f"`ingest --model {spec.name}`"
    rows = messages_behind(warehouse, spec, checkpoint, start, types, what)
    name = f"ingest {spec.name}"
    writer = rows.writeStream.queryName(name).foreachBatch(batches_labelled(landing, name))
    writer = writer.option("checkpointLocation", checkpoint.path)
    try:
        await_end(with_trigger(writer, seconds).start(), stop or threading.Event())
    except PySparkException as error:
        raise UserError(f"landing topic {source.topic} failed: {cause_of(error)}", RUN_FAILED) from error
    return landing


def prepare(warehouse: Warehouse, spec: ModelSpec) -> KeyTypes:
    """Make the measurements table of a topic if it is not there, and return the types of its key columns."""
    table = measurements(spec.name)
    if warehouse.exists(table):
        return key_types_in(warehouse, spec)
    types = key_types(source_of(spec), spec.naming_columns)
    columns = f"{measurement_columns(spec, types)}, {PLACES}"
    warehouse.create(table, columns, properties=MEASUREMENT_PROPERTIES)
    return types


def _start(warehouse: Warehouse, spec: ModelSpec) -> Offsets:
    """Return up to where the topic has landed; the first time that is where it begins, and is written down."""
    source, table = source_of(spec), measurements(spec.name)
    landed = landed_offsets(warehouse, table, source.topic)
    if landed is not None:
        return landed
    held = bounds(warehouse.spark, source.topic)
    start = {number: one.end if source.start == "latest" else one.first for number, one in held.items()}
    detail = landing_detail(source.topic, start, 0, (None, None))
    nothing = warehouse.read(table).filter(F.lit(False))
    options = {"userMetadata": json.dumps(detail)}
    warehouse.append(nothing, table, (f"ingest-{spec.name}-{source.topic}", int(time.time())), options)
    landed = landed_offsets(warehouse, table, source.topic)
    assert landed is not None
    return landed
