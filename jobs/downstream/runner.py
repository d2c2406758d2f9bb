"""Run streaming queries over a model's live estimates to their end, and again when another generation becomes live."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.errors import PySparkException

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.progress import Progress
from jobs.core.settings import Settings
from jobs.core.signals import stop_signal
from jobs.downstream.driver import held
from jobs.downstream.queries import Query
from jobs.lineage.generations import live as live_now
from jobs.lineage.leases import stream_lock
from jobs.lineage.live import is_live, live_lineage
from jobs.spark.conf import interpreted_conf
from jobs.spark.job_labels import batches_labelled
from jobs.spark.queries import await_end, cause_of, with_trigger
from jobs.spark.session import spark_session
from jobs.specs.model_spec import ModelSpec
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.tables import estimates

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

GENERATIONS = "generations"
POLL_SECONDS = 0.2
SWITCH_SECONDS = 1.0
"""How often queries that run on look if the table of generations has changed, and another may be the live one.

What that one has written before is passed over by what still runs on the estimates of the one before.
"""


@contextmanager
def following(
    settings: Settings, spec: ModelSpec, verb: str, kafka: bool = False
) -> Iterator[tuple[Warehouse, threading.Event, Progress]]:
    """Be the one monitor, or judge of forecasts, of a model; yield where, what tells to end, and where to tell of it.

    Raises:
        UserError: another one runs.
    """
    title = f"{verb} {spec.name}"
    with stream_lock(settings.warehouse, spec.name, what=verb), stop_signal() as stop:
        warehouse = Warehouse(spark_session(settings, title, interpreted_conf(), kafka), settings.warehouse)
        with (
            held(warehouse, spec, verb, stop),
            Progress(title, None, quiet=settings.quiet) as progress,
        ):
            yield warehouse, stop, progress


@dataclass
class LiveQueries:
    """One run of what follows the live estimates. What it is, its subclass says."""

    warehouse: Warehouse
    spec: ModelSpec
    seconds: float | None
    stop: threading.Event

    what = "the queries"
    """What a failure is said to be of."""

    def start(self) -> list[StreamingQuery]:
        """Start the queries over the estimates that are live now."""
        raise NotImplementedError

    def told(self) -> str:
        """Return what has been done so far, in a few words."""
        raise NotImplementedError

    def run(self, progress: Progress) -> None:
        """Run the queries to their end; begin them again when another generation has become the live one."""
        while not self.stop.is_set():
            # Before the generations are read, so that no later change is overlooked.
            seen = self.warehouse.latest_version(GENERATIONS) if self.warehouse.exists(GENERATIONS) else -1
            links = live_lineage(self.warehouse, self.spec.name)
            if not links or not self.warehouse.exists(estimates(self.spec.name)):
                raise UserError(
                    f"model {self.spec.name} has no live estimates: start its stream with `kalman-pipeline stream "
                    f"--model {self.spec.name}`"
                )
            queries = self.start()
            try:
                if self._await(queries, links[0].generation, seen, progress):
                    return
            finally:
                self._end(queries)

    def source(self) -> DataFrame:
        """Return the live estimates as a stream: first the table as it is, then what is added.

        Not its versions from the first one on: `maintain` compacts it, and the files of old versions go. It also
        deletes estimates that are no part of the live ones, a commit to pass over, as it adds nothing.
        """
        reader = self.warehouse.spark.readStream.format("delta").option("skipChangeCommits", "true")
        rows = reader.load(self.warehouse.path(estimates(self.spec.name)))
        return rows.filter(is_live(self.warehouse, self.spec.name))

    def started(
        self, rows: DataFrame, query: Query, sink: Callable[[DataFrame, int], None]
    ) -> StreamingQuery:
        """Start a query that hands each micro-batch to a sink."""
        writer = rows.writeStream.queryName(query.name).foreachBatch(batches_labelled(sink, query.name))
        writer = writer.option("checkpointLocation", self.warehouse.path(query.checkpoint))
        return with_trigger(writer, self.seconds).start()

    def _await(self, queries: list[StreamingQuery], live: str, seen: int, progress: Progress) -> bool:
        """Wait for the queries' end; False if they are to begin again with another live generation.

        seen: version of the table of generations in which `live` was the live one.
        """
        due = time.monotonic() + SWITCH_SECONDS
        while any(query.isActive for query in queries):
            if self.stop.wait(POLL_SECONDS):
                return True
            if any(not query.isActive and query.exception() is not None for query in queries):
                return True
            progress.note(self.told())
            if self.seconds is not None and time.monotonic() >= due:
                due = time.monotonic() + SWITCH_SECONDS
                version = self.warehouse.latest_version(GENERATIONS)
                if version == seen:
                    continue
                seen, now = version, live_now(self.warehouse, self.spec.name)
                if now is not None and now.generation != live:
                    print(
                        f"{self.spec.name}: {now.generation} is live, {self.what} goes over to it",
                        file=sys.stderr,
                    )
                    return False
        return True

    def _end(self, queries: list[StreamingQuery]) -> None:
        """Let the running micro-batches finish, and raise what went wrong in one."""

        stop = threading.Event()
        stop.set()
        problems = []
        for query in queries:
            try:
                await_end(query, stop)
            except PySparkException as error:
                problems.append(cause_of(error))
        if problems:
            raise UserError(f"{self.what} of {self.spec.name} failed: {problems[0]}", RUN_FAILED)
