"""Publish the estimates of a live generation to a Kafka topic, files and user functions, at least once."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pyspark.sql import functions as F

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.settings import find_local_path
from jobs.lineage.generations import LIVE
from jobs.lineage.leases import Lease
from jobs.snapshots.model_runtime import list_function_files
from jobs.spark.hadoop_files import HadoopFiles
from jobs.spark.kafka import build_spark_options, read_topic
from jobs.spark.queries import find_cause
from jobs.spark.warehouse import Warehouse
from jobs.specs.source import Sinks
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.files import SmallFiles, open_files
from jobs.storage.object_files import is_in_s3
from jobs.storage.tables import SOURCE_RANGE, estimates
from kalman.models.named import find

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


JSON_TIME = "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"


class MicroBatch(NamedTuple):
    """A micro-batch to publish, and the driver that publishes it.

    plan: function that returns a text for the rows and their partitions. The text is equal in all attempts to publish
    the same rows, and differs for other rows. epoch: epoch of the driver.
    """

    generation: str
    batch_id: int
    plan: Callable[[], str]
    epoch: int


def add_ordinals(rows: DataFrame) -> DataFrame:
    """Add a column `ordinal`, the position of a row in its micro-batch, which is equal in all attempts to publish it.

    A micro-batch that runs again has the same rows in the same partitions and order, because the rows of a bucket are
    sorted before they are filtered. The numbers increase with gaps, so that no rows need to be counted or moved.
    """
    return rows.withColumn("ordinal", F.monotonically_increasing_id())


_DONE = "_SUCCESS"
_ATTEMPT = re.compile(r"_attempt-(\d+)")
_WRITTEN = re.compile(r"(part-\d+)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(.*)")
"""Spark's name of a file: the number of the part, a random id of the write, and the rest."""


def _open_files(spark: SparkSession, path: str) -> SmallFiles | HadoopFiles:
    """Return the files of a folder in any store that Spark can access."""
    return (
        open_files(path) if find_local_path(path) is not None or is_in_s3(path) else HadoopFiles(spark, path)
    )


@dataclass(frozen=True)
class FolderSink:
    """A folder with a subfolder for each micro-batch; a subfolder with a file `_SUCCESS` is complete."""

    spark: SparkSession
    path: str
    format: str

    @property
    def name(self) -> str:
        return f"files:{self.path}"

    def write(self, rows: DataFrame, batch: MicroBatch) -> None:
        """Write the files of a micro-batch, unless another attempt has written them.

        Raises:
            UserError: a file cannot be moved to its final place.
        """
        files = _open_files(self.spark, self.path.rstrip("/"))
        place = f"generation={batch.generation}/batch_id={batch.batch_id}"
        attempt = f"{place}/_attempt-{batch.epoch}"
        # The files of a task may appear in this folder immediately, but nobody reads the folder.
        writer = rows.drop("generation", "batch_id").write.mode("overwrite").format(self.format)
        writer = writer.option("mapreduce.fileoutputcommitter.algorithm.version", "2")
        if self.format == "json":
            writer = writer.option("timestampFormat", JSON_TIME)
        writer.save(f"{self.path.rstrip('/')}/{attempt}")
        plan = batch.plan()
        _remove_others(files, place, plan)
        for written in files.names(attempt):
            found = _WRITTEN.fullmatch(written)
            if found is not None:
                self._move(files, f"{attempt}/{written}", f"{place}/{found[1]}-{plan}{found[2]}")
        files.write(f"{place}/{_DONE}", b"")
        _remove_attempts(files, place, batch.epoch)

    def _move(self, files: SmallFiles | HadoopFiles, name: str, to: str) -> None:
        """Move a file to its final place, unless another attempt has put a file with the same rows there.

        Raises:
            UserError: the file cannot be moved.
        """
        if not files.exists(to) and not files.rename(name, to) and not files.exists(to):
            raise UserError(f"{self.path}/{name} cannot be renamed to {self.path}/{to}", RUN_FAILED)


def _remove_others(files: SmallFiles | HadoopFiles, place: str, plan: str) -> None:
    """Remove files with other rows, which no running driver writes.

    Such files come from a micro-batch with the same number before a restore of the warehouse, or from a killed driver
    of an earlier release, which wrote files directly in their final place.
    """
    names = files.names(place)
    # The random id in Spark's file name may begin with the same characters.
    of_plan = re.compile(rf"part-\d+-{plan}(?![0-9a-f]).*")
    others = [name for name in names if name.startswith("part-") and not of_plan.fullmatch(name)]
    if others:
        files.remove(f"{place}/{_DONE}")
    for name in others:
        files.remove(f"{place}/{name}")
    if "_temporary" in names:
        files.remove_tree(f"{place}/_temporary")


def _remove_attempts(files: SmallFiles | HadoopFiles, place: str, epoch: int) -> None:
    """Remove the folders in which this driver and earlier drivers wrote a micro-batch that is now complete."""
    for name in files.names(place):
        attempt = _ATTEMPT.fullmatch(name)
        if attempt is not None and int(attempt[1]) <= epoch:
            files.remove_tree(f"{place}/{name}")


FOLDER = "_published"


class Sink(Protocol):
    """A sink for rows of the estimates table with an added column `ordinal`, their position in the micro-batch."""

    @property
    def name(self) -> str:
        """Return the name of the sink, for errors and for the file with the sink's progress."""
        ...

    def write(self, rows: DataFrame, batch: MicroBatch) -> None:
        """Write the rows of a micro-batch."""
        ...


@dataclass(frozen=True)
class TopicSink:
    """A Kafka topic; the key of a message is the key as text, its value is the row as JSON without nulls."""

    topic: str

    @property
    def name(self) -> str:
        return f"kafka:{self.topic}"

    def write(self, rows: DataFrame, batch: MicroBatch) -> None:
        """Send a message for each row; the rows of each key keep their order."""
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
    """Return the sinks of a spec in `folder`, after a check that all sinks exist.

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
    """Publishes the micro-batches of a generation to its sinks."""

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
            UserError: a sink refuses the micro-batches that it has missed.
        """
        files, last = self._files, -1 if committed is None else committed
        mine = {_format_file_name(sink): sink for sink in self.sinks}
        for name in files.names(""):
            if name not in mine:  # a sink that was removed from the spec and added again counts as new
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
        """First publish the rows that a sink has missed, then the rows of the micro-batch (None if it has no rows).

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
        """Publish the committed micro-batches that a sink lacks, which the generation estimated as a shadow."""
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
            # The files of the table have no order, but the rows of a key are published in order. The number of
            # partitions and the order by all columns never change, so each row always gets the same ordinal.
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
    """Write to a sink; an error message names the sink and the remedy.

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
