"""Land the micro-batches of a source in the measurements table: of a table, of several topics, or of one.

Spark fixes the end of a micro-batch before it runs. Its tasks write the rows as they are read, as the processes do that
read files (`jobs.landing.written_pieces`). The micro-batch commits first to quarantine, then to the
measurements, each in the Delta transaction (query, micro-batch); so after a crash at any point, also between a commit
and Spark's note of it, the next run repeats the micro-batch, which is idempotent. Each commit to the measurements
records the place in the source up to which it has landed.
"""

from __future__ import annotations

import pickle
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.errors import PySparkException

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.progress import Progress
from jobs.core.report import Report
from jobs.core.settings import Settings
from jobs.core.signals import stop_signal
from jobs.landing.landed_report import source_report
from jobs.landing.target_table import LandingTables
from jobs.landing.written_pieces import RowCounts, WrittenRows, write_rows
from jobs.lineage.leases import stream_lock
from jobs.spark.conf import interpreted_conf
from jobs.spark.job_labels import batches_labelled
from jobs.spark.queries import await_end, cause_of, with_trigger
from jobs.spark.session import spark_session
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.part_files import attempt_name
from jobs.storage.quarantine import refusal, too_many

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_TRIES = 3
"""How often a query is started that ends before it has landed anything, if a new one may go on."""


class Reader(ABC):
    """A source as the landing needs it.

    unit: what one of its rows is called in reports; restarts: names of errors after which a new query goes on.
    """

    unit: str = "row"
    restarts: tuple[str, ...] = ()
    checkpoint: Checkpoint

    def is_empty(self) -> bool:
        """Tell if there is nothing after the position, and no query can begin there yet."""
        return False

    @abstractmethod
    def rows(self) -> DataFrame:
        """Return the stream of checked rows (`_reason`, `_payload`, and what the other functions need).

        Raises:
            UserError: the source does not continue where it has landed up to.
        """

    @abstractmethod
    def reached(self, batch: int) -> dict[str, Any]:
        """Return the place at the end of a micro-batch, before its rows are read."""

    @abstractmethod
    def check(self) -> None:
        """Check, once the rows of a micro-batch are read, that the source still is the one that it was before.

        Raises:
            UserError: it was made anew, or is gone.
        """

    @abstractmethod
    def placed(self, rows: DataFrame) -> DataFrame:
        """Return checked rows with the columns that tell where they came from: `_origin`, `_source`, `_position`."""

    def explained(self, error: PySparkException) -> str:
        """Return why the query failed."""
        return cause_of(error)

    def place(self) -> tuple[str, dict[str, Any]]:
        """Return up to where the source has landed, for the report: words to add, and data."""
        return "", {}


@dataclass
class SourceLanding:
    """The `foreachBatch` function that lands checked rows, and counts of what it has landed."""

    warehouse: Warehouse
    spec: ModelSpec
    reader: Reader
    on_progress: Callable[[SourceLanding], None]
    batches: int = 0
    counts: RowCounts = field(default_factory=RowCounts)

    def __call__(self, rows: DataFrame, batch_id: int) -> None:
        """Land a micro-batch. Idempotent."""
        spec, reader = self.spec, self.reader
        assert spec.source is not None
        transaction = f"ingest-{spec.name}-{reader.checkpoint.query_id()}", batch_id
        reached, counts = reader.reached(batch_id), RowCounts()
        messages = spec.source.kind == "kafka"
        with LandingTables.of(self.warehouse, spec, messages) as tables:
            written = _write(reader.placed(rows), tables)
            for one in written:
                counts.add(one.counts)
            reader.check()
            if too_many(spec.quarantine, counts.reasons, counts.rows):
                where = f"micro-batch {batch_id} of {spec.source.title}"
                raise refusal(spec.quarantine, counts.reasons, counts.rows, where)
            tables.commit(written, transaction, reached)
        self.batches += 1
        self.counts.add(counts)
        self.on_progress(self)


def _write(rows: DataFrame, tables: LandingTables) -> list[WrittenRows]:
    """Let tasks write checked rows as files of both tables, which no commit names yet, and count them."""
    task, attempt = tables.task(), tables.attempt

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        name = attempt_name(context.partitionId(), attempt, context.stageId(), context.taskAttemptId())
        written = write_rows(task._replace(name=name), batches)
        yield pa.RecordBatch.from_pydict({"written": [pickle.dumps(written)]})

    # Of small micro-batches each partition would be a file.
    few = rows.coalesce(rows.sparkSession.sparkContext.defaultParallelism)
    return [pickle.loads(row["written"]) for row in few.mapInArrow(write, "written binary").collect()]


def run(landing: SourceLanding, seconds: float | None, stop: threading.Event) -> None:
    """Land what a source has; with `seconds`, repeat at that interval until `stop` is set.

    Raises:
        UserError: the source does not continue where it has landed up to, or the query failed.
    """
    spec, reader = landing.spec, landing.reader
    name = f"ingest {spec.name}"
    while reader.is_empty():
        if seconds is None or stop.wait(seconds):
            return
    tries = 0
    while True:
        before, tries = landing.batches, tries + 1
        writer = reader.rows().writeStream.queryName(name).foreachBatch(batches_labelled(landing, name))
        writer = writer.option("checkpointLocation", reader.checkpoint.path)
        try:
            return await_end(with_trigger(writer, seconds).start(), stop)
        except PySparkException as error:
            tries = tries if landing.batches == before else 0
            if tries < _TRIES and any(one in str(error) for one in reader.restarts):
                continue
            assert spec.source is not None
            raise UserError(
                f"landing {spec.source.title} failed: {reader.explained(error)}", RUN_FAILED
            ) from error


def land(
    settings: Settings,
    spec: ModelSpec,
    seconds: float | None,
    lossy: bool,
    opened: Callable[[Warehouse, ModelSpec, bool], tuple[Reader, str | None]],
) -> Report:
    """Run the landing of a source as a command of its own, until SIGTERM if `seconds` is given.

    lossy: continue with what the source has now.
    opened: returns the reader of the source, and a sentence on what was given up before it, if anything was.

    Raises:
        UserError: another process lands the model, or as of `run`.
    """
    assert spec.source is not None
    began, title = time.monotonic(), f"ingest {spec.name}"
    with stream_lock(settings.warehouse, title.replace(" ", "-")), stop_signal() as stop:
        spark = spark_session(settings, title, interpreted_conf(), kafka=spec.source.kind == "kafka")
        warehouse = Warehouse(spark, settings.warehouse)
        reader, note = opened(warehouse, spec, lossy)
        with Progress(title, None, settings.quiet, "micro-batch", "es") as progress:
            landing = SourceLanding(
                warehouse, spec, reader, lambda now: progress.advance(1, f"{now.counts.rows:,} rows")
            )
            run(landing, seconds, stop)
        upto, place = reader.place()
    place |= {"batches": landing.batches}
    return source_report(warehouse, spec, landing.counts, began, (note, upto, place), reader.unit)
