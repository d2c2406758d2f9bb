"""Record the progress of a stream in a separate thread, so that no failure in it stops or delays the query.

Once per second, the thread checks whether the sink has written micro-batches that are not recorded yet, and only then
reads their progress from Spark. No listener runs between one micro-batch of the query and the next.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from jobs.core.errors import extract_first_line
from jobs.spark.job_labels import set_label
from jobs.spark.warehouse import Warehouse
from jobs.streaming.profiler import profiler
from jobs.supervision.progress import Lag, ProgressLog, Writer, build_lag_meter, has_executed, record

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

    from jobs.lineage.generations import Generation
    from jobs.streaming.micro_batch import StreamTotals

PERIOD = 1.0
FINISH_SECONDS = 10.0
"""Maximum time that the end of a run waits for its last records."""

Outlet = Callable[[list[dict[str, Any]]], None]


class Recorder:
    """Context manager around a query that writes the record of each micro-batch to outlets."""

    def __init__(
        self,
        query: StreamingQuery,
        totals: StreamTotals,
        generation: Generation,
        lag: Callable[[dict[str, Any]], Lag],
        outlets: list[Outlet],
        first: Callable[[], None] = lambda: None,
        last: Callable[[], None] = lambda: None,
    ) -> None:
        """Record the progress of `query`, whose writer adds its counts to `totals`.

        The recording thread calls `first` before it begins, and `last` after all outlets have all records.
        """
        self._query, self._totals, self._generation = query, totals, generation
        self._lag, self._outlets = lag, outlets
        self._first, self._last = first, last
        self._profiler = profiler()
        self._run = str(generation.epoch)
        self._taken = 0
        self._seen = -1
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._work, name="progress", daemon=True)
        self.problem: str | None = None
        """The last failure, or None."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join(FINISH_SECONDS)
        if self._thread.is_alive():
            self.problem = f"the last progress was not recorded within {FINISH_SECONDS:.0f} s"

    def _work(self) -> None:
        self._try(self._first)
        while not self._done.wait(PERIOD):
            self._try(self.take)
        self._try(self.take)
        self._try(self._last)

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as problem:
            self.problem = extract_first_line(problem)

    def take(self) -> None:
        """Record the micro-batches that have finished since the last call."""
        if self._taken >= self._totals.batches:
            return
        fresh = self._fresh()
        if not fresh:
            return
        try:
            lag = self._lag((fresh[-1].get("sources") or [{}])[0])
        except Exception as problem:  # a record without a lag is better than no record
            lag, self.problem = Lag(), extract_first_line(problem)
        names = (self._generation.model, self._generation.generation, self._run)
        records = [
            record(one, self._totals.of_batch.pop(int(one["batchId"]), {}), lag, *names) for one in fresh
        ]
        self._taken += len(records)
        self._seen = records[-1]["batch_id"]
        for outlet in self._outlets:
            self._try(lambda outlet=outlet: outlet(records))
        self._try(lambda: self._profiler.take(fresh, [one["rows"] for one in records]))

    def _fresh(self) -> list[dict[str, Any]]:
        """Return Spark's progress of the micro-batches that are not recorded yet, oldest first."""
        query: Any = self._query
        recent = query._jsq.recentProgress()
        fresh: list[dict[str, Any]] = []
        for place in range(len(recent) - 1, -1, -1):
            if int(recent[place].batchId()) <= self._seen:
                break
            progress = json.loads(recent[place].json())
            if has_executed(progress):
                fresh.append(progress)
        return fresh[::-1]


def build_recorder(
    warehouse: Warehouse,
    query: StreamingQuery,
    totals: StreamTotals,
    generation: Generation,
    outlets: list[Outlet],
) -> Recorder:
    """Return the recorder of a generation's query, which writes to the `outlets`, and then to the warehouse."""
    waiting: list[Writer] = []

    def write(records: list[dict[str, Any]], last: bool = False) -> None:
        if not waiting:
            waiting.append(
                Writer(ProgressLog(warehouse, generation.model), generation.generation, generation.epoch)
            )
        waiting[0].write(records, last)

    lag = build_lag_meter(warehouse, generation.model)
    last = partial(write, [], last=True)
    first = partial(set_label, warehouse.spark, f"{generation.generation}: record progress")
    return Recorder(query, totals, generation, lag, [*outlets, write], first, last)
