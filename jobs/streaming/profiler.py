"""Profile a running stream by measuring the times of each micro-batch, which `jobs.supervision.batch_profile` combines.

The sink times its steps. Python workers add their seconds to a Spark accumulator, whose value is complete when the
action ends. The thread that records progress reads Spark's times. Without `--profile`, only the step marks in the
project's functions remain, and they do nothing.

`profile_stream` sets the profiler for the driver's thread. The parts of the query may run in other threads; each part
keeps the `profiler()` that was current when the part was constructed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from pyspark.accumulators import AccumulatorParam

from jobs.core.stopwatch import KALMAN, PACK, STATE_WRITE, Into, Seconds, add_seconds, time_batches
from jobs.state.encoding.rows import Packer
from jobs.streaming.processors import DelegatingProcessor
from jobs.supervision.batch_profile import (
    Job,
    JobTimes,
    Lap,
    Profile,
    Profiled,
    average_profiles,
    compute_profile,
)

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor, TimerValues

    from jobs.spark.warehouse import Warehouse

KEPT = 200
"""Number of micro-batches that are reported individually; the mean covers all micro-batches."""


class StepSeconds(AccumulatorParam[Seconds]):
    """Accumulator of seconds by step."""

    def zero(self, value: Seconds) -> Seconds:
        """Return an empty sum."""
        return {}

    def addInPlace(self, value1: Seconds, value2: Seconds) -> Seconds:  # noqa: N802
        """Return the sum as a new value, because the driver may be reading the old value."""
        return add_seconds(value1, value2)


class TimedProcessor(DelegatingProcessor):
    """Wrapper that times the steps of the model's processor, without the time spent waiting for rows."""

    def __init__(self, inner: Any, into: Into) -> None:
        super().__init__(inner)
        self._into = into

    def handleInitialState(self, key: Any, initialState: pd.DataFrame, timerValues: TimerValues) -> None:  # noqa: N802
        """Let the processor import the snapshot; time outside of all steps counts as writing state."""

        def take_over(_: Iterator[None]) -> Iterator[None]:
            self.inner.handleInitialState(key, initialState, timerValues)
            yield

        for _ in time_batches(take_over, STATE_WRITE, self._into)(iter(())):
            pass

    def handleInputRows(  # noqa: N802
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: TimerValues
    ) -> Iterator[Any]:
        """Let the processor take its rows."""

        def take(frames: Iterator[Any]) -> Iterator[Any]:
            return self.inner.handleInputRows(key, frames, timerValues)

        return time_batches(take, KALMAN, self._into)(rows)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:  # noqa: N802
        """Let the processor handle its timers."""

        def wake(_: Iterator[Any]) -> Iterator[Any]:
            return self.inner.handleExpiredTimer(key, timerValues, expiredTimerInfo)

        return time_batches(wake, KALMAN, self._into)(iter(()))


class NoProfiler:
    """Profiler that does nothing, for a stream without a profile."""

    def operator(self, processor: StatefulProcessor) -> StatefulProcessor:
        """Return the stateful processor, wrapped to be timed if there is a profile."""
        return processor

    def time_packing(self, pack: Packer) -> Packer:
        """Return the function that packs rows, wrapped to be timed if there is a profile."""
        return pack

    def step(self, batch_id: int, name: str) -> AbstractContextManager[None]:
        """Time a step of the sink."""
        return nullcontext()

    def started(self, query: StreamingQuery) -> None:
        """Restrict the profile to the jobs of the query."""

    def take(self, progress: Sequence[dict[str, Any]], rows: Sequence[int]) -> None:
        """Add finished micro-batches, oldest first, each with Spark's progress and its number of rows."""

    @property
    def found(self) -> Profiled | None:
        """Return the profile so far; None if no micro-batch has finished."""
        return None


class Profiler(NoProfiler):
    """The profile of one run of a stream."""

    def __init__(self, spark: SparkSession) -> None:
        self._group: str | None = None
        self._marks = spark.sparkContext.accumulator({}, StepSeconds())
        self._times = JobTimes(spark.sparkContext)
        self._laps: dict[int, list[Lap]] = {}
        self._jobs: list[Job] = []
        self._kept: deque[Profile] = deque(maxlen=KEPT)
        self._mean: Profile | None = None
        self._count = 0

    def operator(self, processor: StatefulProcessor) -> StatefulProcessor:
        return TimedProcessor(processor, self._marks)

    def time_packing(self, pack: Packer) -> Packer:
        return time_batches(pack, PACK, self._marks)

    @contextmanager
    def step(self, batch_id: int, name: str) -> Iterator[None]:
        before, began = self._marks.value, time.time()
        try:
            yield
        finally:
            ended, after = time.time(), self._marks.value
            marks = {mark: after[mark] - before.get(mark, 0.0) for mark in after}
            self._laps.setdefault(batch_id, []).append(Lap(name, (began, ended), marks))

    def started(self, query: StreamingQuery) -> None:
        self._group = str(query.runId)  # the job group that Spark gives to the jobs of a query

    def take(self, progress: Sequence[dict[str, Any]], rows: Sequence[int]) -> None:
        self._jobs += self._times.fresh(self._group)
        for one, count in zip(progress, rows, strict=True):
            laps = self._laps.pop(int(one["batchId"]), [])
            profile = compute_profile(one, count, laps, self._jobs)
            self._kept.append(profile)
            self._mean = (
                profile if self._mean is None else average_profiles([(self._mean, self._count), (profile, 1)])
            )
            self._count += 1
            if laps:
                self._jobs = [job for job in self._jobs if job.span[0] >= laps[-1].span[1]]

    @property
    def found(self) -> Profiled | None:
        return None if self._mean is None else Profiled(self._count, self._mean, tuple(self._kept))


_NOTHING = NoProfiler()
_profiler: ContextVar[NoProfiler] = ContextVar("profiler", default=_NOTHING)


def profiler() -> NoProfiler:
    """Return the profiler of the stream that this thread drives."""
    return _profiler.get()


@contextmanager
def profile_stream(warehouse: Warehouse, wanted: bool) -> Iterator[None]:
    """Profile the stream that this thread drives in the `with` block, if `wanted`."""
    token = _profiler.set(Profiler(warehouse.spark) if wanted else _NOTHING)
    try:
        yield
    finally:
        _profiler.reset(token)
