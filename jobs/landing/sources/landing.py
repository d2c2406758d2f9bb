"""Land the micro-batches of a source (a table, one or several topics) in the measurements table.

Spark sets the end of a micro-batch before the micro-batch runs. Spark tasks read rows and write them at the same time,
as worker processes do for files (`jobs.landing.written_pieces`). Each micro-batch is committed first to the quarantine
and then to the measurements table, both times in the Delta transaction (query, micro-batch). After a crash, even before
Spark has recorded the end of a micro-batch, the next run repeats the micro-batch. The repetition is idempotent, because
a transaction is committed only once. Each commit to the measurements table records the landed position in the source.
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
from jobs.core.processes import stop_signal
from jobs.core.progress import Progress
from jobs.core.report import Report
from jobs.core.settings import Settings
from jobs.landing.remarks import build_source_report
from jobs.landing.target_table import LandingTables
from jobs.landing.written_pieces import RowCounts, WrittenRows, write_rows
from jobs.lineage.leases import stream_lock
from jobs.spark.conf import build_interpreted_conf
from jobs.spark.job_labels import label_batches
from jobs.spark.queries import await_end, find_cause, set_trigger
from jobs.spark.session import spark_session
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.part_files import name_attempt
from jobs.storage.quarantine import build_refusal, is_over_limit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_TRIES = 3
"""Maximum number of starts of a query that fails before it has landed a micro-batch, if its error allows a restart."""


class Reader(ABC):
    """Reader of a source that can land.

    unit: word for a row of the source in reports.
    restarts: names of errors after which a new query can continue.
    checkpoint: checkpoint of the query.
    """

    unit: str = "row"
    restarts: tuple[str, ...] = ()
    checkpoint: Checkpoint

    def is_empty(self) -> bool:
        """Return whether no query can begin yet, because the source has no data after the landed position."""
        return False

    @abstractmethod
    def rows(self) -> DataFrame:
        """Return the stream of checked rows, with `_reason`, `_payload` and the columns that `add_origin` needs.

        Raises:
            UserError: the source does not continue at its landed position.
        """

    @abstractmethod
    def reached(self, batch: int) -> dict[str, Any]:
        """Return the position at the end of a micro-batch; called before the rows of the micro-batch are read."""

    @abstractmethod
    def check(self) -> None:
        """Check that the source is still the same; called after the rows of a micro-batch were read.

        Raises:
            UserError: the source was recreated or deleted.
        """

    @abstractmethod
    def add_origin(self, rows: DataFrame) -> DataFrame:
        """Return checked rows with their origin in the columns `_origin`, `_source` and `_position`."""

    def explain_error(self, error: PySparkException) -> str:
        """Return the reason why the query failed."""
        return find_cause(error)

    def place(self) -> tuple[str, dict[str, Any]]:
        """Return the landed position for the report, in words and as data."""
        return "", {}


@dataclass
class SourceLanding:
    """Function for `foreachBatch` that lands checked rows, and counts the landed rows."""

    warehouse: Warehouse
    spec: ModelSpec
    reader: Reader
    on_progress: Callable[[SourceLanding], None]
    batches: int = 0
    counts: RowCounts = field(default_factory=RowCounts)

    def __call__(self, rows: DataFrame, batch_id: int) -> None:
        """Land a micro-batch; a second call for the same micro-batch lands no row again."""
        spec, reader = self.spec, self.reader
        assert spec.source is not None
        transaction = f"ingest-{spec.name}-{reader.checkpoint.read_query_id()}", batch_id
        reached, counts = reader.reached(batch_id), RowCounts()
        messages = spec.source.kind == "kafka"
        with LandingTables.of(self.warehouse, spec, messages) as tables:
            written = _write(reader.add_origin(rows), tables)
            for one in written:
                counts.add(one.counts)
            reader.check()
            if is_over_limit(spec.quarantine, counts.reasons, counts.rows):
                where = f"micro-batch {batch_id} of {spec.source.title}"
                raise build_refusal(spec.quarantine, counts.reasons, counts.rows, where)
            tables.commit(written, transaction, reached)
        self.batches += 1
        self.counts.add(counts)
        self.on_progress(self)


def _write(rows: DataFrame, tables: LandingTables) -> list[WrittenRows]:
    """Write checked rows in Spark tasks into uncommitted files of both tables, and return counts and files."""
    task, attempt = tables.task(), tables.attempt

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        name = name_attempt(context.partitionId(), attempt, context.stageId(), context.taskAttemptId())
        written = write_rows(task._replace(name=name), batches)
        yield pa.RecordBatch.from_pydict({"written": [pickle.dumps(written)]})

    # Without `coalesce`, each partition of a small micro-batch would become a separate file.
    few = rows.coalesce(rows.sparkSession.sparkContext.defaultParallelism)
    return [pickle.loads(row["written"]) for row in few.mapInArrow(write, "written binary").collect()]


def run(landing: SourceLanding, seconds: float | None, stop: threading.Event) -> None:
    """Land the available rows of a source; if `seconds` is given, repeat this at that interval until `stop` is set.

    Raises:
        UserError: the source does not continue at its landed position, or the query failed.
    """
    spec, reader = landing.spec, landing.reader
    name = f"ingest {spec.name}"
    while reader.is_empty():
        if seconds is None or stop.wait(seconds):
            return
    tries = 0
    while True:
        before, tries = landing.batches, tries + 1
        writer = reader.rows().writeStream.queryName(name).foreachBatch(label_batches(landing, name))
        writer = writer.option("checkpointLocation", reader.checkpoint.path)
        try:
            return await_end(set_trigger(writer, seconds).start(), stop)
        except PySparkException as error:
            tries = tries if landing.batches == before else 0
            if tries < _TRIES and any(one in str(error) for one in reader.restarts):
                continue
            assert spec.source is not None
            raise UserError(
                f"landing {spec.source.title} failed: {reader.explain_error(error)}", RUN_FAILED
            ) from error


def land(
    settings: Settings,
    spec: ModelSpec,
    seconds: float | None,
    lossy: bool,
    opened: Callable[[Warehouse, ModelSpec, bool], tuple[Reader, str | None]],
) -> Report:
    """Run a command that lands a source.

    Args:
        settings: settings of the command.
        spec: spec of the model.
        seconds: interval in seconds at which landing is repeated until SIGTERM. None means that landing runs once.
        lossy: whether to accept lost data, and to continue with the present data of the source.
        opened: function that returns the reader of the source, and a text on skipped data, or None.

    Raises:
        UserError: another process lands the model, or `run` fails.
    """
    assert spec.source is not None
    began, title = time.monotonic(), f"ingest {spec.name}"
    with stream_lock(settings.warehouse, title.replace(" ", "-")), stop_signal() as stop:
        spark = spark_session(settings, title, build_interpreted_conf(), kafka=spec.source.kind == "kafka")
        warehouse = Warehouse(spark, settings.warehouse)
        reader, note = opened(warehouse, spec, lossy)
        with Progress(title, None, settings.quiet, "micro-batch", "es") as progress:
            landing = SourceLanding(
                warehouse, spec, reader, lambda now: progress.advance(1, f"{now.counts.rows:,} rows")
            )
            run(landing, seconds, stop)
        upto, place = reader.place()
    place |= {"batches": landing.batches}
    return build_source_report(warehouse, spec, landing.counts, began, (note, upto, place), reader.unit)
