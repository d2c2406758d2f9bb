"""Run streaming queries over a model's live estimates, and restart them when another generation becomes live."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.processes import stop_signal
from jobs.core.progress import Progress
from jobs.core.settings import Settings
from jobs.downstream.queries import Query, list_queries, open_driver_log
from jobs.downstream.views import Begin, update_view
from jobs.lineage.generations import (
    LineageSegment,
    no_live_estimates_error,
    read_live_lineage,
    stream_taken_error,
)
from jobs.lineage.generations import find_live as live_now
from jobs.lineage.leases import stream_lock
from jobs.spark.conf import STATE_FORMAT, build_interpreted_conf
from jobs.spark.job_labels import label_batches
from jobs.spark.queries import await_queries, find_cause, start_micro_batches
from jobs.spark.session import spark_session
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.tables import estimates
from jobs.storage.warehouse import Tables
from jobs.supervision.driver_log import QUERIES
from jobs.supervision.driver_status import LIVE
from jobs.supervision.registered_driver import RegisteredDriver, driving, identify_driver, register

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

GENERATIONS = "generations"
_OTHER_SCHEMA = "DELTA_SCHEMA_CHANGED"
"""Prefix of the names of Delta's errors about a table whose columns changed after a query started."""
SWITCH_SECONDS = 1.0
"""Interval at which a running query checks whether another generation has become live.

Until it switches over, it ignores rows of the new generation.
"""


@contextmanager
def start_exclusive_run(
    settings: Settings, spec: ModelSpec, verb: str, columns: Collection[str], kafka: bool = False
) -> Iterator[tuple[Warehouse, threading.Event, Progress]]:
    """Start Spark as the only monitor or skill driver of a model; yield the warehouse, the stop event and the progress.

    columns: the columns of the estimates that the queries need.

    Raises:
        UserError: another driver runs, or the model has no live estimates with these columns.
    """
    title = f"{verb} {spec.name}"
    with stream_lock(settings.warehouse, spec.name, what=verb), stop_signal() as stop:
        _need_columns(Tables(settings.warehouse), spec.name, verb, columns)
        warehouse = Warehouse(
            spark_session(settings, title, build_interpreted_conf(), kafka), settings.warehouse
        )
        with (
            driving(register_queries(warehouse, spec, verb), stop),
            Progress(title, None, quiet=settings.quiet) as progress,
        ):
            yield warehouse, stop, progress


def register_queries(warehouse: Warehouse, spec: ModelSpec, verb: str) -> RegisteredDriver:
    """Register this process as the model's only monitor or skill driver; its log has the verb for a generation.

    Raises:
        UserError: another driver runs.
    """
    log = open_driver_log(warehouse, verb, spec.name)
    last = log.last(verb)
    if last is not None and last.runs_after_waiting():
        raise stream_taken_error(spec.name, f"process {last.owner.pid} on {last.owner.host} runs it", verb)
    rules = {QUERIES: [query.name for query in list_queries(spec, verb)]}
    epoch = 1 if last is None else last.epoch + 1
    return RegisteredDriver(log, register(log, verb, epoch, LIVE, identify_driver(warehouse.spark), rules))


def need_live_estimates(warehouse: Tables, model: str) -> list[LineageSegment]:
    """Return the lineage of a model's live estimates, which must exist.

    Raises:
        UserError: no generation is live, or none has written estimates.
    """
    segments = read_live_lineage(warehouse, model)
    if not segments or not warehouse.exists(estimates(model)):
        raise no_live_estimates_error(warehouse, model)
    return segments


def _need_columns(warehouse: Tables, model: str, verb: str, columns: Collection[str]) -> None:
    """Refuse to read columns that the live estimates do not have yet.

    Raises:
        UserError: there are no live estimates, or the stream has not run since the spec's `outputs` name the columns.
    """
    need_live_estimates(warehouse, model)
    missing = sorted(set(columns) - set(warehouse.column_names(estimates(model))))
    if missing:
        raise UserError(
            f"the estimates of {model} have no column {' and no column '.join(missing)} yet: its stream writes it "
            f"beside the rows that it reads from now on (land newer rows and run `kalman-pipeline stream --model "
            f"{model}`). For the rows before, run `kalman-pipeline estimate --model {model}`, then `kalman-pipeline "
            f"{verb} --model {model} --history`"
        )


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
    version: int = field(default=-1, init=False)
    """Version of the table of generations in which the first of `segments` is live."""
    is_outdated: bool = field(default=False, init=False)
    """Whether another generation has become live."""
    due: float = field(default=0.0, init=False)
    """Time of the next look at the table of generations."""

    label = "the queries"
    """Name of the queries in messages."""

    def start(self) -> list[StreamingQuery]:
        """Start the queries over the current live estimates."""
        raise NotImplementedError

    def format_progress(self) -> str:
        """Return the counts of the run so far as a short text."""
        raise NotImplementedError

    def run(self, progress: Progress) -> None:
        """Run the queries to their end; restart them when another generation becomes live, or the columns change."""
        while not self.stop.is_set():
            # Read before the generations, so that no later change is missed.
            self.version = self.warehouse.latest_version(GENERATIONS)
            self.segments, self.generations = need_live_estimates(self.warehouse, self.spec.name), []
            self.is_outdated, self.due = False, time.monotonic() + SWITCH_SECONDS
            columns = self._columns()
            failures = await_queries(self.start(), self.stop, lambda: self._check(progress))
            if not self._raise_failures(failures, columns) and not self.is_outdated:
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
        conf = self.warehouse.spark.conf
        checkpoint = Checkpoint(self.warehouse, query.checkpoint)
        checkpoint.refuse_moved()
        former = checkpoint.has_states_of_format_1()
        before = conf.get(STATE_FORMAT) or "2"
        conf.set(STATE_FORMAT, "1" if former else "2")
        try:  # the query copies the session's settings
            labelled = label_batches(sink, query.name)
            return start_micro_batches(rows, query.name, checkpoint.path, labelled, self.seconds)
        finally:
            conf.set(STATE_FORMAT, before)

    def _check(self, progress: Progress) -> bool:
        """Show the progress; return whether the queries must restart because another generation is live."""
        progress.note(self.format_progress())
        if self.seconds is None or time.monotonic() < self.due:
            return False
        self.due = time.monotonic() + SWITCH_SECONDS
        version = self.warehouse.latest_version(GENERATIONS)
        if version != self.version:
            self.version, now = version, live_now(self.warehouse, self.spec.name)
            if now is not None and now.generation != self.segments[0].generation:
                self.is_outdated = True
                self._tell(f"{now.generation} is live, {self.label} switches over to it")
        return self.is_outdated

    def _raise_failures(self, failures: list[BaseException], columns: list[str]) -> bool:
        """Raise the first failure; return True if a query ended only because the estimates have new columns.

        columns: columns of the estimates when the queries started. Delta ends a query when the table gets another
        column, from another release or the spec's outputs. A restarted query continues at its position.
        """
        if not failures:
            return False
        now = self._columns()
        causes = [one for one in failures if now == columns or _OTHER_SCHEMA not in str(one)]
        if causes:
            raise UserError(f"{self.label} of {self.spec.name} failed: {find_cause(causes[0])}", RUN_FAILED)
        new = ", ".join(name for name in now if name not in columns)
        self._tell(f"the estimates have new columns ({new}): {self.label} restarts")
        return True

    def _tell(self, news: str) -> None:
        print(f"{self.spec.name}: {news}", file=sys.stderr)

    def _columns(self) -> list[str]:
        return self.warehouse.read(estimates(self.spec.name)).columns
