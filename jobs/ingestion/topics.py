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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
from jobs.ingestion.topic_start import (
    TopicStart,
    accept_loss,
    landing_detail,
    source_of,
    start_of,
    topic_of,
    way_out,
)
from jobs.lineage import generations
from jobs.lineage.leases import stream_lock
from jobs.spark.conf import interpreted_conf
from jobs.spark.job_labels import batches_labelled
from jobs.spark.kafka import (
    Topic,
    TopicWatch,
    read_topic,
    reading_options,
    refuse_lost,
    refuse_recreated,
    starting,
)
from jobs.spark.queries import await_end, cause_of, with_trigger
from jobs.spark.session import spark_session
from jobs.specs.model_spec import ModelSpec
from jobs.warehouse.checkpoints import Checkpoint
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.measurements_table import (
    MEASUREMENT_PROPERTIES,
    OFFSET,
    PARTITION,
    PLACES,
    TOPIC,
    TOPIC_ID,
    KeyTypes,
    key_types_in,
)
from jobs.warehouse.positions import describe, offsets_of
from jobs.warehouse.quarantine import (
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


def messages_after(
    warehouse: Warehouse,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    start: Mapping[str, Any],
    types: KeyTypes,
    reader: str,
) -> DataFrame:
    """Return a topic's messages after a position as a stream of checked rows (`messages.checked_messages`).

    Args:
        warehouse: of the model.
        spec: of the model.
        checkpoint: of the query; its position counts, or `start` before its first micro-batch.
        start: a position in the topic; a partition that it does not name is read from its beginning.
        types: of the key columns.
        reader: name of the query, for errors.

    Raises:
        UserError: messages after the position are no longer in the topic, the topic was made anew, or the brokers do
            not answer.
    """
    source = source_of(spec)
    have = topic_of(warehouse.spark, source)
    _refuse_gap(spec, checkpoint, start, have, reader)
    stream = warehouse.spark.readStream.format("kafka")
    if source.partitions:
        stream = stream.option("assign", json.dumps({source.topic: sorted(source.partitions)}))
    else:
        stream = stream.option("subscribe", source.topic)
    stream = stream.option("startingOffsets", starting(source.topic, offsets_of(start), have.bounds))
    stream = stream.option("failOnDataLoss", "true")
    # Waits a minute for a broker that restarts.
    stream = stream.option("fetchOffset.numRetries", 30).option("fetchOffset.retryIntervalMs", 2000)
    if source.max_offsets_per_batch is not None:
        stream = stream.option("maxOffsetsPerTrigger", source.max_offsets_per_batch)
    for name, value in reading_options().items():
        stream = stream.option(name, value)
    return checked_messages(stream.load(), spec, source, types, start.get("topic_id"))


def _refuse_gap(
    spec: ModelSpec, checkpoint: Checkpoint, start: Mapping[str, Any], have: Topic, reader: str
) -> None:
    """Refuse a topic that does not continue at the position of a query."""
    batch = checkpoint.last_commit()
    needed = start if batch is None else checkpoint.position(batch, start)
    if needed["topic"] != have.name:
        raise UserError(
            f"{reader} has reached {describe(needed)}, but the spec now reads topic {have.name}. Restore the "
            f"topic, or give the model of the new topic another name"
        )
    refuse_recreated(have.name, needed.get("topic_id"), have.id, way_out(spec))
    refuse_lost(have, offsets_of(needed), reader, way_out(spec))


def stream_of(warehouse: Warehouse, spec: ModelSpec, generation: Generation, types: KeyTypes) -> DataFrame:
    """Return the messages after a generation's snapshot as a stream of checked rows."""
    checkpoint, start = Checkpoint(warehouse, generation.checkpoint), generation.start_position
    return messages_after(warehouse, spec, checkpoint, start, types, f"the stream of {spec.name}")


def with_topic_id(warehouse: Warehouse, generation: Generation) -> Generation:
    """Return a generation whose position has its topic's id; one that an earlier release began adopts the present id.

    Spark's checkpoint has no id, so it is kept in the generation's row. A topic is not adopted if its offsets show that
    it was made anew.
    """
    if generation.topic is None or generation.start_position.get("topic_id") is not None:
        return generation
    topic = read_topic(warehouse.spark, generation.topic)
    if topic.id is None or not topic.reaches(offsets_of(generations.position_of(warehouse, generation))):
        return generation
    return generations.adopt_topic_id(warehouse, generation, topic.id)


@contextmanager
def watched_topic(
    warehouse: Warehouse, spec: ModelSpec, generation: Generation
) -> Iterator[Callable[[], None]]:
    """Lend a function that raises if a generation's topic has been made anew; for a table it does nothing."""
    if generation.topic is None:
        yield lambda: None
        return
    known = generation.start_position.get("topic_id")
    with TopicWatch(warehouse.spark, generation.topic, known, way_out(spec)) as watch:
        yield watch.check


@dataclass
class Landing:
    """The `foreachBatch` function that lands messages, and counts of what it has landed."""

    warehouse: Warehouse
    spec: ModelSpec
    start: TopicStart
    watch: TopicWatch
    on_progress: Callable[[Landing], None]
    batches: int = 0
    rows: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    version: int | None = None

    def __call__(self, messages: DataFrame, batch_id: int) -> None:
        """Land a micro-batch. Idempotent."""
        spec, source = self.spec, source_of(self.spec)
        checkpoint = Checkpoint(self.warehouse, self.start.checkpoint)
        app = f"ingest-{spec.name}-{checkpoint.query_id()}"
        messages = messages.persist()
        try:
            count, span, reasons = count_rows(messages, spec.time)
            self.watch.check()  # now that all messages are read, and before anything is written
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
            fits = fits.withColumn(TOPIC, F.lit(source.topic))
            fits = fits.withColumn(TOPIC_ID, F.lit(self.start.topic_id).cast("string"))
            fits = fits.coalesce(max(1, count // ROWS_A_FILE))
            offsets = offsets_of(checkpoint.position(batch_id, self.start.position))
            detail = landing_detail(self.start, offsets, count, span)
            options = {"userMetadata": json.dumps(detail), "mergeSchema": "true"}
            self.warehouse.append(fits, measurements(spec.name), (app, batch_id), options)
        finally:
            messages.unpersist()
        self.batches += 1
        self.rows += count
        self.reasons.update(reasons)
        self.version = self.warehouse.latest_version(measurements(spec.name))
        self.on_progress(self)


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
    start = start_of(warehouse, spec)
    checkpoint = Checkpoint(warehouse, start.checkpoint)
    reader, name = f"`ingest --model {spec.name}`", f"ingest {spec.name}"
    rows = messages_after(warehouse, spec, checkpoint, start.position, types, reader)
    with TopicWatch(warehouse.spark, source.topic, start.topic_id, way_out(spec)) as watch:
        landing = Landing(warehouse, spec, start, watch, on_progress)
        writer = rows.writeStream.queryName(name).foreachBatch(batches_labelled(landing, name))
        writer = writer.option("checkpointLocation", checkpoint.path)
        try:
            await_end(with_trigger(writer, seconds).start(), stop or threading.Event())
        except PySparkException as error:
            raise UserError(f"landing topic {source.topic} failed: {cause_of(error)}", RUN_FAILED) from error
    return landing


def land_topic(settings: Settings, spec: ModelSpec, seconds: float | None, lossy: bool = False) -> Report:
    """Run `land` as a command of its own, until SIGTERM if `seconds` is given.

    lossy: continue with what the topic has now, if messages were lost (`topic_start.accept_loss`).

    Raises:
        UserError: another process lands it, or as of `land`.
    """
    topic = source_of(spec).topic
    began = time.monotonic()
    title = f"ingest {spec.name}"
    with stream_lock(settings.warehouse, title.replace(" ", "-")), stop_signal() as stop:
        warehouse = Warehouse(
            spark_session(settings, title, interpreted_conf(), kafka=True), settings.warehouse
        )
        loss = accept_loss(warehouse, spec) if lossy else None
        with Progress(title, None, settings.quiet, "micro-batch", "es") as progress:
            landing = land(
                warehouse, spec, seconds, stop, lambda now: progress.advance(1, f"{now.rows:,} rows")
            )
        table = measurements(spec.name)
        version = warehouse.latest_version(table)
        offsets = sorted(start_of(warehouse, spec).offsets.items())
    reasons = dict(sorted(landing.reasons.items()))
    quarantined = sum(reasons.values())
    lines = [
        f"landed {plural(landing.rows, 'message')} of topic {topic} for {spec.name}, up to "
        + ", ".join(f"{number}:{offset}" for number, offset in offsets)
    ]
    if loss is not None:
        lines.insert(0, loss)
    if quarantined:
        counts = "; ".join(f"{count:,} {reason}" for reason, count in reasons.items())
        lines.append(f"quarantined {plural(quarantined, 'message')}: {counts}")
    lines.append(f"the measurements table is at version {version}")
    data = {
        "model": spec.name,
        "topic": topic,
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
