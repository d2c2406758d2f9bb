"""Land a Kafka topic in the measurements table, and read it as a stream from the exact position of a snapshot.

Landing is a streaming query with its own checkpoint. Spark fixes the offsets of a micro-batch before it runs, and the
micro-batch commits first to quarantine, then to the measurements, each in the Delta transaction (query, micro-batch).
After a crash at any point the next run repeats the micro-batch, which is idempotent. Each commit to the measurements
records the offsets up to which the topic has landed.
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
from jobs.core.progress import Progress
from jobs.core.report import Report, plural
from jobs.core.settings import Settings
from jobs.core.signals import stop_signal
from jobs.ingestion.checking import ROWS_A_FILE, measurement_columns
from jobs.ingestion.messages import checked_messages, key_types
from jobs.ingestion.reading import count_rows
from jobs.lineage.leases import stream_lock
from jobs.spark.conf import interpreted_conf
from jobs.spark.job_labels import batches_labelled
from jobs.spark.kafka import Offsets, bounds, refuse_lost, spark_options, starting
from jobs.spark.queries import await_end, cause_of, with_trigger
from jobs.spark.session import spark_session
from jobs.specs.model_spec import ModelSpec
from jobs.specs.source import Source
from jobs.warehouse.checkpoints import Checkpoint
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.measurements_table import MEASUREMENT_PROPERTIES, KeyTypes, key_types_in
from jobs.warehouse.positions import describe, landed_offsets, offsets_of
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
"""Columns of a topic's measurements: the origin of each."""


def source_of(spec: ModelSpec) -> Source:
    """Return the spec's source.

    Raises:
        UserError: the spec has no source, though a generation of the model reads a topic.
    """
    if spec.source is None:
        raise UserError(
            f"the stream of {spec.name} reads a topic, but its spec no longer has a `source`: restore it, or pretrain "
            f"the changed spec and start with `stream --model {spec.name} --adopt SNAPSHOT`"
        )
    return spec.source


def messages_after(
    warehouse: Warehouse,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    start: Offsets,
    types: KeyTypes,
    reader: str,
) -> DataFrame:
    """Return a topic's messages after a position as a stream of checked rows (`messages.checked_messages`).

    Args:
        warehouse: of the model.
        spec: of the model.
        checkpoint: of the query; its position counts, or `start` before its first micro-batch.
        start: offset of the next message, by partition; a partition that is absent is read from its beginning.
        types: of the key columns.
        reader: name of the query, for errors.

    Raises:
        UserError: messages after the position are no longer in the topic, or the brokers do not answer.
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
                f"{reader} has reached {describe(reached)}, but the spec now reads topic {source.topic}. Restore the "
                f"topic, or give the model of the new topic another name"
            )
        needed = offsets_of(reached)
    refuse_lost(source.topic, needed, have, reader)
    stream = spark.readStream.format("kafka").option("subscribe", source.topic)
    stream = stream.option("startingOffsets", starting(source.topic, start, have))
    stream = stream.option("failOnDataLoss", "true")
    # Waits a minute for a broker that restarts.
    stream = stream.option("fetchOffset.numRetries", 30).option("fetchOffset.retryIntervalMs", 2000)
    if source.max_offsets_per_batch is not None:
        stream = stream.option("maxOffsetsPerTrigger", source.max_offsets_per_batch)
    for name, value in spark_options().items():
        stream = stream.option(name, value)
    return checked_messages(stream.load(), spec, source, types)


def stream_of(warehouse: Warehouse, spec: ModelSpec, generation: Generation, types: KeyTypes) -> DataFrame:
    """Return the messages after a generation's snapshot as a stream of checked rows."""
    checkpoint = Checkpoint(warehouse, generation.checkpoint)
    start = offsets_of(generation.start_position)
    return messages_after(warehouse, spec, checkpoint, start, types, f"the stream of {spec.name}")


@dataclass
class Landing:
    """The `foreachBatch` function that lands messages, and counts of what it has landed."""

    warehouse: Warehouse
    spec: ModelSpec
    checkpoint: Checkpoint
    on_progress: Callable[[Landing], None]
    batches: int = 0
    rows: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    version: int | None = None

    def __call__(self, messages: DataFrame, batch_id: int) -> None:
        """Land a micro-batch. Idempotent."""
        spec, source = self.spec, source_of(self.spec)
        app = f"ingest-{spec.name}-{self.checkpoint.query_id()}"
        messages = messages.persist()
        try:
            count, span, reasons = count_rows(messages, spec.time)
            if too_many(spec.quarantine, reasons, count):
                where = f"micro-batch {batch_id} of topic {source.topic}"
                raise refusal(spec.quarantine, reasons, count, where)
            if reasons:
                rejected = messages.filter(F.col(REASON).isNotNull()).coalesce(1)
                rows = topic_quarantine(rejected, spec.name, source.topic, None, None)
                keep(self.warehouse, rows, (app, batch_id))
            fits = messages.filter(F.col(REASON).isNull()).drop(REASON, PAYLOAD, POSITION)
            place = F.concat_ws("/", F.lit(f"kafka:{source.topic}"), PARTITION, OFFSET)
            fits = fits.withColumn("_origin", place).withColumn("_landed_at", F.current_timestamp())
            fits = fits.withColumn("_topic", F.lit(source.topic)).coalesce(max(1, count // ROWS_A_FILE))
            offsets = offsets_of(self.checkpoint.position(batch_id, {}))
            detail = landing_detail(source.topic, offsets, count, span)
            options = {"userMetadata": json.dumps(detail), "mergeSchema": "true"}
            self.warehouse.append(fits, measurements(spec.name), (app, batch_id), options)
        finally:
            messages.unpersist()
        self.batches += 1
        self.rows += count
        self.reasons.update(reasons)
        self.version = self.warehouse.latest_version(measurements(spec.name))
        self.on_progress(self)


def landing_detail(
    topic: str, offsets: Offsets, rows: int, span: tuple[int | None, int | None]
) -> dict[str, Any]:
    """Return a commit's metadata: its rows, their first and last time, and the offsets up to which the topic landed."""
    named = {str(number): offset for number, offset in sorted(offsets.items())}
    return {"topic": topic, "offsets": named, "rows": rows, "min_time": span[0], "max_time": span[1]}


def land(
    warehouse: Warehouse,
    spec: ModelSpec,
    seconds: float | None = None,
    stop: threading.Event | None = None,
    on_progress: Callable[[Landing], None] = lambda landing: None,
) -> Landing:
    """Land a topic's new messages; with `seconds`, repeat at that interval until `stop` is set.

    Raises:
        UserError: messages that have not landed are no longer in the topic, or the brokers do not answer.
    """
    source = source_of(spec)
    types = prepare(warehouse, spec)
    checkpoint = Checkpoint(warehouse, f"checkpoints/ingest-{spec.name}")
    start = _start(warehouse, spec)
    landing = Landing(warehouse, spec, checkpoint, on_progress)
    rows = messages_after(warehouse, spec, checkpoint, start, types, f"`ingest --model {spec.name}`")
    name = f"ingest {spec.name}"
    writer = rows.writeStream.queryName(name).foreachBatch(batches_labelled(landing, name))
    writer = writer.option("checkpointLocation", checkpoint.path)
    try:
        await_end(with_trigger(writer, seconds).start(), stop or threading.Event())
    except PySparkException as error:
        raise UserError(f"landing topic {source.topic} failed: {cause_of(error)}", RUN_FAILED) from error
    return landing


def land_topic(settings: Settings, spec: ModelSpec, seconds: float | None) -> Report:
    """Run `land` as a command of its own, until SIGTERM if `seconds` is given.

    Raises:
        UserError: the spec names no topic, another process lands it, or as of `land`.
    """
    if spec.source is None:
        raise UserError(
            f"nothing to land for {spec.name}: give --input FILE, or name a topic in its spec: "
            f"source: {{kind: kafka, topic: ...}}"
        )
    began = time.monotonic()
    title = f"ingest {spec.name}"
    with stream_lock(settings.warehouse, title.replace(" ", "-")), stop_signal() as stop:
        warehouse = Warehouse(
            spark_session(settings, title, interpreted_conf(), kafka=True), settings.warehouse
        )
        with Progress(title, None, quiet=settings.quiet) as progress:
            landing = land(
                warehouse, spec, seconds, stop, lambda now: progress.advance(1, f"{now.rows:,} rows")
            )
        table = measurements(spec.name)
        version = warehouse.latest_version(table)
        offsets = sorted((landed_offsets(warehouse, table, spec.source.topic) or {}).items())
    reasons = dict(sorted(landing.reasons.items()))
    quarantined = sum(reasons.values())
    lines = [
        f"landed {plural(landing.rows, 'message')} of topic {spec.source.topic} for {spec.name}, up to "
        + ", ".join(f"{number}:{offset}" for number, offset in offsets)
    ]
    if quarantined:
        counts = "; ".join(f"{count:,} {reason}" for reason, count in reasons.items())
        lines.append(f"quarantined {plural(quarantined, 'message')}: {counts}")
    lines.append(f"the measurements table is at version {version}")
    data = {
        "model": spec.name,
        "topic": spec.source.topic,
        "rows": landing.rows,
        "quarantined": quarantined,
        "reasons": reasons,
        "batches": landing.batches,
        "offsets": {str(number): offset for number, offset in offsets},
        "version": version,
        "seconds": time.monotonic() - began,
    }
    return Report(lines, data)


def prepare(warehouse: Warehouse, spec: ModelSpec) -> KeyTypes:
    """Create the measurements table of a topic if it does not exist, and return the types of its key columns."""
    table = measurements(spec.name)
    if warehouse.exists(table):
        return key_types_in(warehouse, spec)
    types = key_types(source_of(spec), spec.naming_columns)
    columns = f"{measurement_columns(spec, types)}, {PLACES}"
    warehouse.create(table, columns, properties=MEASUREMENT_PROPERTIES)
    return types


def _start(warehouse: Warehouse, spec: ModelSpec) -> Offsets:
    """Return the offsets up to which the topic has landed; the first run starts at `source.start` and records it."""
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
