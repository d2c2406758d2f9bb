"""Publish a live generation's estimates to a Kafka topic, files and user functions, at least once.

Each generation publishes its live estimates (`jobs.lineage.live`). A shadow publishes nothing; once live, it first
publishes its estimates from its time as a shadow. A small file per sink records the last published micro-batch. The
file is written after the sink, so a driver killed between the two publishes a micro-batch twice, and never skips one.
The file sink still has each row once (`file_folders`). Readers of the other sinks detect repeated rows by `generation`,
`batch_id` and `ordinal`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pyspark.sql import functions as F

from jobs.core.errors import RUN_FAILED, UserError
from jobs.lineage.generations import LIVE
from jobs.lineage.leases import Lease
from jobs.spark.kafka import build_spark_options, read_topic
from jobs.spark.queries import find_cause
from jobs.spark.user_functions import list_function_files
from jobs.spark.warehouse import Warehouse
from jobs.specs.sinks import Sinks
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.files import SmallFiles
from jobs.storage.tables import SOURCE_RANGE, estimates
from jobs.streaming.sinks.file_folders import FolderSink
from jobs.streaming.sinks.published_batch import JSON_TIME, MicroBatch, add_ordinals
from kalman.models.named import find

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

FOLDER = "_published"


class Sink(Protocol):
    """Sink for rows of the estimates table with an added column `ordinal`: their place in the micro-batch."""

    @property
    def name(self) -> str:
        """Return the name of the sink in errors, and in the file of its progress."""
        ...

    def write(self, rows: DataFrame, batch: MicroBatch) -> None:
        """Write a micro-batch's rows."""
        ...


@dataclass(frozen=True)
class TopicSink:
    """Kafka topic; a message's key is the key as text, its value the row as JSON without nulls."""

    topic: str

    @property
    def name(self) -> str:
        return f"kafka:{self.topic}"

    def write(self, rows: DataFrame, batch: MicroBatch) -> None:
        """Send a message for each row; the rows of a key keep their order."""
        self.send(rows)

    def send(self, rows: DataFrame) -> None:
        """Send a message for each row of a frame with a column `key`."""
        value = F.to_json(F.struct("*"), {"timestampFormat": JSON_TIME})
        messages = rows.select(F.col("key").alias("key"), value.alias("value"))
        writer = messages.write.format("kafka").option("topic", self.topic)
        for name, option in build_spark_options().items():
            writer = writer.option(name, option)
        writer.save()


@dataclass(frozen=True)
class FunctionSink:
    """A user function, called as function(rows, generation, batch_id)."""

    called: str
    function: Callable[..., Any]

    @property
    def name(self) -> str:
        return self.called

    def write(self, rows: DataFrame, batch: MicroBatch) -> None:
        """Call the function."""
        self.function(rows, batch.generation, batch.batch_id)


def open_sinks(warehouse: Warehouse, sinks: Sinks, folder: str | None) -> list[Sink]:
    """Return the sinks of a spec in `folder`, after checking that all of them exist.

    Raises:
        UserError: a topic is missing, or the brokers do not answer.
        ModelError: a function is missing.
    """
    found: list[Sink] = []
    if sinks.kafka is not None:
        read_topic(warehouse.spark, sinks.kafka.topic)
        found.append(TopicSink(sinks.kafka.topic))
    if sinks.files is not None:
        given = sinks.files.folder
        absolute = given.startswith("/") or "://" in given
        found.append(
            FolderSink(warehouse.spark, given if absolute else warehouse.path(given), sinks.files.format)
        )
    for name in sinks.functions:
        found.append(FunctionSink(name, find(name, folder, "sinks.functions")))
    for file in list_function_files(sinks.functions, folder):
        warehouse.spark.sparkContext.addPyFile(str(file))
    return found


@dataclass
class Publisher:
    """Publisher of a generation's micro-batches to its sinks."""

    warehouse: Warehouse
    lease: Lease
    sinks: Sequence[Sink]
    _published: dict[str, int] = field(default_factory=dict)

    @property
    def _files(self) -> SmallFiles:
        return self.warehouse.files(f"{FOLDER}/{self.lease.generation.generation}")

    def begin(self, committed: int | None) -> None:
        """Resume after the last committed micro-batch; a new sink gets only later micro-batches.

        Raises:
            UserError: a sink refuses the micro-batches that it missed.
        """
        files, last = self._files, -1 if committed is None else committed
        mine = {_format_file_name(sink): sink for sink in self.sinks}
        for name in files.names(""):
            if name not in mine:  # a sink that the spec names again later counts as new
                self.lease.check()
                files.remove(name)
        for name, sink in mine.items():
            kept = files.read(name)
            if kept is None:
                self._note(sink, last)
            else:
                self._published[sink.name] = int(json.loads(kept)["batch_id"])
            if self._live:
                self._catch_up(sink, last)

    def __call__(self, rows: DataFrame | None, batch_id: int) -> None:
        """Publish a micro-batch's rows (None: it has none), and first the rows that a sink has missed.

        Raises:
            UserError: a sink failed.
        """
        if not self._live:
            return
        for sink in self.sinks:
            self._catch_up(sink, batch_id - 1)
            if self._published[sink.name] >= batch_id:
                continue
            if rows is None:
                self._published[sink.name] = batch_id
            else:
                write_to_sink(sink.name, batch_id, lambda s=sink: self._write(s, rows, batch_id))
                self._note(sink, batch_id)

    @property
    def _live(self) -> bool:
        return self.lease.record.status == LIVE

    def _write(self, sink: Sink, rows: DataFrame, batch_id: int, how: str = "as estimated") -> None:
        generation = self.lease.generation

        def plan() -> str:
            planned = Checkpoint(self.warehouse, generation.checkpoint).plan(batch_id)
            return hashlib.sha256(f"{how} {planned}".encode()).hexdigest()[:12]

        sink.write(add_ordinals(rows), MicroBatch(generation.generation, batch_id, plan, generation.epoch))

    def _catch_up(self, sink: Sink, to: int) -> None:
        """Publish the committed micro-batches that a sink lacks, from the generation's time as a shadow."""
        done = self._published[sink.name]
        generation = self.lease.generation
        table = estimates(generation.model)
        if done >= to or not self.warehouse.exists(table):
            return
        mine = F.col("generation") == generation.generation
        rows = self.warehouse.read(table).drop(SOURCE_RANGE)
        rows = rows.filter(mine & (F.col("batch_id") > done) & (F.col("batch_id") <= to))
        for batch in sorted(row["batch_id"] for row in rows.select("batch_id").distinct().collect()):
            part = rows.filter(F.col("batch_id") == batch)
            # The table's files have no order, but a key's rows are published in order. The number of partitions and the
            # order by all columns are always the same, so each row gets the same ordinal.
            part = part.repartition(generation.partitions, "key")
            others = (name for name in part.columns if name not in ("key", "event_time"))
            part = part.sortWithinPartitions("key", "event_time", *others)
            write_to_sink(sink.name, batch, lambda p=part, b=batch: self._write(sink, p, b, "from the table"))
            self._note(sink, batch)
        self._published[sink.name] = to

    def _note(self, sink: Sink, batch_id: int) -> None:
        self.lease.check()  # a frozen driver that woke up would reset a later driver's progress
        self._published[sink.name] = batch_id
        self._files.write(
            _format_file_name(sink), json.dumps({"sink": sink.name, "batch_id": batch_id}).encode()
        )


def write_to_sink(name: str, batch_id: int, write: Callable[[], object]) -> None:
    """Write to a sink; an error names the sink and the remedy.

    Raises:
        UserError: the sink failed.
    """
    try:
        write()
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"micro-batch {batch_id} could not be written to {name} ({find_cause(error)}); its estimates are safe: "
            f"repair {name} and restart the stream, which writes the micro-batch again",
            RUN_FAILED,
        ) from error


def _format_file_name(sink: Sink) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", sink.name) + ".json"
