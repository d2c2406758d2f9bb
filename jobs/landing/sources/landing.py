"""Land the micro-batches of a source in the measurements table: of a table, of several topics, or of one.

Spark fixes the end of a micro-batch before it runs. The micro-batch commits first to quarantine, then to the
measurements, each in the Delta transaction (query, micro-batch); so after a crash at any point, also between a commit
and Spark's note of it, the next run repeats the micro-batch, which is idempotent. Each commit to the measurements
records the place in the source up to which it has landed.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.progress import Progress
from jobs.core.report import Report, plural
from jobs.core.settings import Settings
from jobs.core.signals import stop_signal
from jobs.landing.checking import ROWS_A_FILE
from jobs.lineage.leases import stream_lock
from jobs.spark.conf import interpreted_conf
from jobs.spark.job_labels import batches_labelled
from jobs.spark.quarantine import keep
from jobs.spark.queries import await_end, with_trigger
from jobs.spark.session import spark_session
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.quarantine import PAYLOAD, POSITION, REASON, refusal, too_many
from jobs.storage.tables import measurements

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_TRIES = 3
"""How often a query is started that ends before it has landed anything, if a new one may go on."""


class Reader(Protocol):
    """A source as the landing needs it.

    unit: what one of its rows is called in reports; restarts: names of errors after which a new query goes on.
    """

    unit: str
    restarts: tuple[str, ...]

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint of the query."""
        ...

    def is_empty(self) -> bool:
        """Tell if there is nothing after the position, and no query can begin there yet."""
        ...

    def rows(self) -> DataFrame:
        """Return the stream of checked rows (`_reason`, `_payload`, and what the other functions need).

        Raises:
            UserError: the source does not continue where it has landed up to.
        """
        ...

    def reached(self, batch: int) -> dict[str, Any]:
        """Return the place at the end of a micro-batch, once its rows are read and before anything is written.

        Raises:
            UserError: the source is not the one that was read before.
        """
        ...

    def placed(self, fits: DataFrame) -> DataFrame:
        """Return accepted rows with the columns that tell where they came from."""
        ...

    def rejected(self, bad: DataFrame, reached: dict[str, Any]) -> DataFrame:
        """Return rejected rows (`_reason`, `_payload`, ...) with the columns of the quarantine."""
        ...

    def explained(self, error: PySparkException) -> str:
        """Return why the query failed."""
        ...

    def place(self) -> tuple[str, dict[str, Any]]:
        """Return up to where the source has landed, for the report: words to add, and data."""
        ...


@dataclass
class SourceLanding:
    """The `foreachBatch` function that lands checked rows, and counts of what it has landed."""

    warehouse: Warehouse
    spec: ModelSpec
    reader: Reader
    on_progress: Callable[[SourceLanding], None]
    batches: int = 0
    rows: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def __call__(self, rows: DataFrame, batch_id: int) -> None:
        """Land a micro-batch. Idempotent."""
        spec, reader = self.spec, self.reader
        transaction = f"ingest-{spec.name}-{reader.checkpoint.query_id()}", batch_id
        rows = rows.persist()
        try:
            count, span, reasons = _count_rows(rows, spec.time)
            reached = reader.reached(batch_id)
            if too_many(spec.quarantine, reasons, count):
                assert spec.source is not None
                where = f"micro-batch {batch_id} of {spec.source.title}"
                raise refusal(spec.quarantine, reasons, count, where)
            if reasons:
                bad = rows.filter(F.col(REASON).isNotNull()).coalesce(1)
                keep(self.warehouse, reader.rejected(bad, reached), transaction)
            fits = rows.filter(F.col(REASON).isNull()).drop(REASON, PAYLOAD, POSITION)
            fits = reader.placed(fits).withColumn("_landed_at", F.current_timestamp())
            fits = fits.coalesce(max(1, count // ROWS_A_FILE))
            detail = {**reached, "rows": count, "min_time": span[0], "max_time": span[1]}
            table = measurements(spec.name)
            self.warehouse.append(fits, table, transaction, json.dumps(detail), more_columns=True)
        finally:
            rows.unpersist()
        self.batches += 1
        self.rows += count
        self.reasons.update(reasons)
        self.on_progress(self)


def _count_rows(checked: DataFrame, time: str) -> tuple[int, tuple[int | None, int | None], dict[str, int]]:
    """Count checked rows (`_reason`, the column `time`) in one Spark job.

    Returns:
        The accepted rows, their first and last time in microseconds, the rejected rows by reason.
    """
    micros = F.unix_micros(F.col(f"`{time}`"))
    counts = checked.groupBy(REASON).agg(
        F.count("*").alias("rows"), F.min(micros).alias("first"), F.max(micros).alias("last")
    )
    found = {row[REASON]: row for row in counts.collect()}
    good = found.pop(None, None)
    reasons = {reason: int(row["rows"]) for reason, row in found.items()}
    if good is None:
        return 0, (None, None), reasons
    return int(good["rows"]), (good["first"], good["last"]), reasons


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
    opened: Callable[[Warehouse], tuple[Reader, str | None]],
    kafka: bool = False,
) -> Report:
    """Run the landing of a source as a command of its own, until SIGTERM if `seconds` is given.

    opened: returns the reader of the source, and a sentence on what was given up before it, if anything was.

    Raises:
        UserError: another process lands the model, or as of `run`.
    """
    assert spec.source is not None
    began, title = time.monotonic(), f"ingest {spec.name}"
    with stream_lock(settings.warehouse, title.replace(" ", "-")), stop_signal() as stop:
        spark = spark_session(settings, title, interpreted_conf(), kafka=kafka)
        warehouse = Warehouse(spark, settings.warehouse)
        reader, note = opened(warehouse)
        with Progress(title, None, settings.quiet, "micro-batch", "es") as progress:
            landing = SourceLanding(
                warehouse, spec, reader, lambda now: progress.advance(1, f"{now.rows:,} rows")
            )
            run(landing, seconds, stop)
        upto, place = reader.place()
        version = warehouse.latest_version(measurements(spec.name))
    reasons = dict(sorted(landing.reasons.items()))
    lines = [] if note is None else [note]
    lines.append(landed_line(spec, landing.rows, reader.unit) + upto)
    if reasons:
        counts = "; ".join(f"{count:,} {reason}" for reason, count in reasons.items())
        lines.append(f"quarantined {plural(sum(reasons.values()), reader.unit)}: {counts}")
    lines.append(f"the measurements table is at version {version}")
    counted = {"rows": landing.rows, "quarantined": sum(reasons.values()), "reasons": reasons}
    further = {"batches": landing.batches, "version": version, "seconds": time.monotonic() - began}
    data = {"model": spec.name, "source": spec.source.title, **place, **counted, **further}
    return Report(lines, data)


def landed_line(spec: ModelSpec, rows: int, unit: str = "row") -> str:
    """Return the sentence that says how many rows of a source have landed."""
    assert spec.source is not None
    return f"landed {plural(rows, unit)} of {spec.source.title} for {spec.name}"
