"""Run streaming queries over a model's live estimates, and restart them when another generation becomes live."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspark.errors import PySparkException

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.processes import stop_signal
from jobs.core.progress import Progress
from jobs.core.settings import Settings
from jobs.downstream.driver import register_driver
from jobs.downstream.queries import Query
from jobs.downstream.views import Begin, update_view
from jobs.lineage.generations import LineageSegment, read_live_lineage
from jobs.lineage.generations import find_live as live_now
from jobs.lineage.leases import stream_lock
from jobs.spark.conf import STATE_FORMAT, build_interpreted_conf
from jobs.spark.job_labels import label_batches
from jobs.spark.queries import await_end, find_cause, set_trigger
from jobs.spark.session import spark_session
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.tables import estimates
from jobs.storage.warehouse import Tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

GENERATIONS = "generations"
POLL_SECONDS = 0.2
_OTHER_SCHEMA = "DELTA_SCHEMA_CHANGED"
"""Prefix of the names of Delta's errors about a table whose columns changed after a query started."""
SWITCH_SECONDS = 1.0
"""Interval at which a running query checks whether another generation has become live.

Until it switches over, it ignores rows of the new generation.
"""


@contextmanager
def start_exclusive_run(
    settings: Settings, spec: ModelSpec, verb: str, kafka: bool = False
) -> Iterator[tuple[Warehouse, threading.Event, Progress]]:
    """Start Spark as the only monitor or skill driver of a model; yield the warehouse, the stop event and the progress.

    Raises:
        UserError: another driver runs.
    """
    title = f"{verb} {spec.name}"
    with stream_lock(settings.warehouse, spec.name, what=verb), stop_signal() as stop:
        need_live_estimates(Tables(settings.warehouse), spec.name)
        warehouse = Warehouse(
            spark_session(settings, title, build_interpreted_conf(), kafka), settings.warehouse
        )
        with (
            register_driver(warehouse, spec, verb, stop),
            Progress(title, None, quiet=settings.quiet) as progress,
        ):
            yield warehouse, stop, progress


def need_live_estimates(warehouse: Tables, model: str) -> list[LineageSegment]:
    """Return the lineage of a model's live estimates, which must exist.

    Raises:
        UserError: no generation is live, or none has written estimates.
    """
    segments = read_live_lineage(warehouse, model)
    if not segments or not warehouse.exists(estimates(model)):
        raise UserError(
            f"model {model} has no live estimates: start its stream with `kalman-pipeline stream --model {model}`"
        )
    return segments


@dataclass
class LiveQueries:
    """One run of queries over the live estimates; subclasses define the queries."""

    warehouse: Warehouse
    spec: ModelSpec
    seconds: float | None
    stop: threading.Event
    segments: list[LineageSegment] = field(default_factory=list, init=False)
    """Lineage of the live estimates when the queries started."""
    generations: list[str] = field(default_factory=list, init=False)
    """Generations whose estimates the queries count, the live one first."""

    label = "the queries"
    """Name of the queries in messages."""

    def start(self) -> list[StreamingQuery]:
        """Start the queries over the current live estimates."""
        raise NotImplementedError

    def format_progress(self) -> str:
        """Return the counts of the run so far as a short text."""
        raise NotImplementedError

    def run(self, progress: Progress) -> None:
        """Run the queries to their end; restart them when another generation becomes live."""
        while not self.stop.is_set():
            # Read before the generations, so that no later change is missed.
            version = self.warehouse.latest_version(GENERATIONS) if self.warehouse.exists(GENERATIONS) else -1
            segments = need_live_estimates(self.warehouse, self.spec.name)
            self.segments, self.generations = segments, []
            columns = self._columns()
            queries = self.start()
            ended = False
            try:
                ended = self._await(queries, segments[0].generation, version, progress)
            finally:
                grown = self._end(queries, columns)
            if ended and not grown:
                return

    def source(self, query: Query, number: int = 0, begin: Begin | None = None) -> DataFrame:
        """Return the estimates that a query counts, as a stream: first the current table, then appended rows.

        number: number of this source in the query; begin: function that returns the view of a new query
            (`update_view`).

        The stream does not start at the table's first version, whose files `maintain` may have compacted and removed.
        `maintain` also deletes estimates that are not live; these commits add nothing and are skipped.
        """
        reader = self.warehouse.spark.readStream.format("delta").option("skipChangeCommits", "true")
        table = estimates(self.spec.name)
        view = update_view(self.warehouse, query, number, self.segments, begin)
        self.generations = list(dict.fromkeys([*self.generations, *view.generations]))
        return view.of(reader.load(self.warehouse.path(table)), self.warehouse.read(table))

    def start_query(
        self, rows: DataFrame, query: Query, sink: Callable[[DataFrame, int], None]
    ) -> StreamingQuery:
        """Start a query that calls a sink with each micro-batch.

        A checkpoint with states of format 1 keeps this format: all attempts of these queries write the same values.

        Raises:
            UserError: the warehouse was moved after the query last ran.
        """
        writer = rows.writeStream.queryName(query.name).foreachBatch(label_batches(sink, query.name))
        writer = writer.option("checkpointLocation", self.warehouse.path(query.checkpoint))
        conf = self.warehouse.spark.conf
        checkpoint = Checkpoint(self.warehouse, query.checkpoint)
        checkpoint.refuse_moved()
        former = checkpoint.has_states_of_format_1()
        before = conf.get(STATE_FORMAT) or "2"
        conf.set(STATE_FORMAT, "1" if former else "2")
        try:  # the query copies the session's settings
            return set_trigger(writer, self.seconds).start()
        finally:
            conf.set(STATE_FORMAT, before)

    def _await(self, queries: list[StreamingQuery], live: str, known: int, progress: Progress) -> bool:
        """Wait until the queries end; return False if they must restart because another generation is live.

        known: version of the table of generations in which `live` is the live generation.
        """
        due = time.monotonic() + SWITCH_SECONDS
        while any(query.isActive for query in queries):
            if self.stop.wait(POLL_SECONDS):
                return True
            if any(not query.isActive and query.exception() is not None for query in queries):
                return True
            progress.note(self.format_progress())
            if self.seconds is not None and time.monotonic() >= due:
                due = time.monotonic() + SWITCH_SECONDS
                version = self.warehouse.latest_version(GENERATIONS)
                if version == known:
                    continue
                known, now = version, live_now(self.warehouse, self.spec.name)
                if now is not None and now.generation != live:
                    print(
                        f"{self.spec.name}: {now.generation} is live, {self.label} switches over to it",
                        file=sys.stderr,
                    )
                    return False
        return True

    def _end(self, queries: list[StreamingQuery], columns: list[str]) -> bool:
        """Let the running micro-batches finish, and raise the first failure; return True if the queries must restart.

        columns: columns of the estimates when the queries started. Delta ends a query when the table gets another
        column, from another release or the spec's outputs. A restarted query continues at its position.
        """
        stop = threading.Event()
        stop.set()
        causes, grown = [], False
        for query in queries:
            try:
                await_end(query, stop)
            except PySparkException as error:
                if _OTHER_SCHEMA in str(error) and self._columns() != columns:
                    grown = True
                else:
                    causes.append(find_cause(error))
        if causes:
            raise UserError(f"{self.label} of {self.spec.name} failed: {causes[0]}", RUN_FAILED)
        if grown:
            new = ", ".join(name for name in self._columns() if name not in columns)
            print(
                f"{self.spec.name}: the estimates have new columns ({new}): {self.label} restarts",
                file=sys.stderr,
            )
        return grown

    def _columns(self) -> list[str]:
        return self.warehouse.read(estimates(self.spec.name)).columns
