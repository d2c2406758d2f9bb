"""Hand a live generation's estimates on, to a Kafka topic, files, and functions of the user's: each at least once.

Everything in the live estimates (`jobs.lineage.live`) is handed on by the generation that they are of. One that runs in shadow
hands on nothing, and once it is live it first hands on what it had estimated until then. A small file for each sink
says up to which micro-batch it has everything; it is written behind the sink, so that a driver killed between the two
hands one micro-batch on twice, and none never.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pyspark.sql import functions as F

from jobs.core.errors import RUN_FAILED, UserError
from jobs.lineage.generations import LIVE
from jobs.lineage.leases import Lease
from jobs.spark.kafka import bounds, spark_options
from jobs.spark.queries import cause_of
from jobs.spark.user_functions import files_of
from jobs.specs.sinks import Sinks
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.files import Files, hadoop_files
from jobs.warehouse.tables import estimates
from kalman.models.named import find

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

FOLDER = "_published"
JSON_TIME = "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"


class Sink(Protocol):
    """One sink: its name, and what writes rows of the estimates table to it."""

    @property
    def name(self) -> str: ...

    def write(self, rows: DataFrame, generation: str, batch_id: int) -> None:
        """Write a micro-batch's rows."""
        ...


@dataclass(frozen=True)
class KafkaSink:
    """A Kafka topic: a message's key is the key as text, its value the row as JSON without what is null."""

    topic: str

    @property
    def name(self) -> str:
        """Return what errors and files call it."""
        return f"kafka:{self.topic}"

    def write(self, rows: DataFrame, generation: str, batch_id: int) -> None:
        """Send a message for each row, those of a key in their order."""

        value = F.to_json(F.struct("*"), {"timestampFormat": JSON_TIME})
        messages = rows.select(F.col("key").alias("key"), value.alias("value"))
        writer = messages.write.format("kafka").option("topic", self.topic)
        for name, option in spark_options().items():
            writer = writer.option(name, option)
        writer.save()


@dataclass(frozen=True)
class FileSink:
    """Files in folders the Hive way: `generation=.../batch_id=...` for each micro-batch, which replaces itself."""

    path: str
    format: str

    @property
    def name(self) -> str:
        """Return what errors and files call it."""
        return f"files:{self.path}"

    def write(self, rows: DataFrame, generation: str, batch_id: int) -> None:
        """Write a micro-batch's files. Killed half way they are without `_SUCCESS`, and the next try begins anew."""
        place = f"{self.path.rstrip('/')}/generation={generation}/batch_id={batch_id}"
        writer = rows.drop("generation", "batch_id").write.mode("overwrite").format(self.format)
        if self.format == "json":
            writer = writer.option("timestampFormat", JSON_TIME)
        writer.save(place)


@dataclass(frozen=True)
class FunctionSink:
    """A function of the user's, called as function(rows, generation, batch_id)."""

    called: str
    function: Callable[..., Any]

    @property
    def name(self) -> str:
        """Return what errors and files call it."""
        return self.called

    def write(self, rows: DataFrame, generation: str, batch_id: int) -> None:
        """Call it."""
        self.function(rows, generation, batch_id)


def sinks_of(warehouse: Warehouse, sinks: Sinks, folder: str | None) -> list[Sink]:
    """Return the sinks of a spec that lies in `folder`, once all of them are there.

    Raises:
        UserError: a topic is missing, or the brokers do not answer.
        ModelError: a function is missing.
    """
    targets: list[Sink] = []
    if sinks.kafka is not None:
        bounds(warehouse.spark, sinks.kafka.topic)
        targets.append(KafkaSink(sinks.kafka.topic))
    if sinks.files is not None:
        given = sinks.files.folder
        absolute = given.startswith("/") or "://" in given
        targets.append(FileSink(given if absolute else warehouse.path(given), sinks.files.format))
    for name in sinks.functions:
        targets.append(FunctionSink(name, find(name, folder, "sinks.functions")))
    for file in files_of(sinks.functions, folder):
        warehouse.spark.sparkContext.addPyFile(str(file))
    return targets


@dataclass
class Publisher:
    """What hands a generation's micro-batches on to its sinks."""

    warehouse: Warehouse
    lease: Lease
    targets: Sequence[Sink]
    _reached: dict[str, int] = field(default_factory=dict)

    @property
    def _files(self) -> Files:
        return hadoop_files(self.warehouse, f"{FOLDER}/{self.lease.generation.generation}")

    def begin(self, committed: int | None) -> None:
        """Begin, or go on, behind the last committed micro-batch; a sink that is new gets what comes from now on.

        Raises:
            UserError: a sink does not take what has waited for it.
        """
        files, last = self._files, -1 if committed is None else committed
        mine = {_file(target): target for target in self.targets}
        for name in files.names(""):
            if name not in mine:  # named again later, it is new
                files.remove(name)
        for name, target in mine.items():
            kept = files.read(name)
            if kept is None:
                self._note(target, last)
            else:
                self._reached[target.name] = int(json.loads(kept)["batch_id"])
            if self._live:
                self._catch_up(target, last)

    def __call__(self, rows: DataFrame | None, batch_id: int) -> None:
        """Hand on a micro-batch's rows, and before them what has waited; None: it has none.

        Raises:
            UserError: a sink failed.
        """
        if not self._live:
            return
        for target in self.targets:
            self._catch_up(target, batch_id - 1)
            if self._reached[target.name] >= batch_id:
                continue
            if rows is None:
                self._reached[target.name] = batch_id
            else:
                naming_the_sink(target.name, batch_id, lambda t=target: self._write(t, rows, batch_id))
                self._note(target, batch_id)

    @property
    def _live(self) -> bool:
        return self.lease.record.status == LIVE

    def _write(self, target: Sink, rows: DataFrame, batch_id: int) -> None:
        target.write(rows, self.lease.generation.generation, batch_id)

    def _catch_up(self, target: Sink, to: int) -> None:
        """Hand on the estimates of committed micro-batches that a sink has not had, those of the time in shadow."""
        behind = self._reached[target.name]
        table = estimates(self.lease.generation.model)
        if behind >= to or not self.warehouse.exists(table):
            return
        mine = F.col("generation") == self.lease.generation.generation
        rows = self.warehouse.read(table).filter(
            mine & (F.col("batch_id") > behind) & (F.col("batch_id") <= to)
        )
        for batch in sorted(row["batch_id"] for row in rows.select("batch_id").distinct().collect()):
            part = rows.filter(F.col("batch_id") == batch)
            # The table's files are in no order, and a key's rows are handed on in theirs.
            part = part.repartition("key").sortWithinPartitions("key", "event_time")
            naming_the_sink(target.name, batch, lambda p=part, b=batch: self._write(target, p, b))
            self._note(target, batch)
        self._reached[target.name] = to

    def _note(self, target: Sink, batch_id: int) -> None:
        self._reached[target.name] = batch_id
        self._files.write(_file(target), json.dumps({"sink": target.name, "batch_id": batch_id}).encode())


def naming_the_sink(name: str, batch_id: int, write: Callable[[], object]) -> None:
    """Write to a sink and say clearly which one failed, and what that means.

    Raises:
        UserError: it failed.
    """
    try:
        write()
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"micro-batch {batch_id} could not be handed on to {name} ({cause_of(error)}); its estimates are safe: "
            f"mend {name} and start the stream again, which hands the micro-batch on once more",
            RUN_FAILED,
        ) from error


def _file(target: Sink) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", target.name) + ".json"
