"""Profile a stream while it runs: gather what `jobs.observability.batch_profile` puts together, micro-batch by micro-batch.

The sink takes the time of its steps; Python workers add theirs up in an accumulator of Spark's, which has them when the
action has ended; Spark's own times are read by the thread that records progress. Nothing of it is there without
`--profile` but the marks in our functions, which do nothing then.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pyspark.accumulators import AccumulatorParam

from jobs.core.stopwatch import KALMAN, PACK, STATE_WRITE, UNPACK_ESTIMATES, Into, Seconds, added, watched
from jobs.encoding.rows import Packer
from jobs.observability.batch_profile import Lap, Profile, Profiled, mean_of, profile_of
from jobs.observability.job_times import Job, JobTimes
from jobs.streaming.operators.wrappers import DelegatingProcessor

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.stateful_processor import TimerValues

KEPT = 200
"""Micro-batches that are told one by one; all are in the mean."""


class Sum(AccumulatorParam[Seconds]):
    """Adds up seconds by step."""

    def zero(self, value: Seconds) -> Seconds:
        """Return no seconds."""
        return {}

    def addInPlace(self, value1: Seconds, value2: Seconds) -> Seconds:  # noqa: N802
        """Return the sum, as a new value: the driver may be reading the old one."""
        return added(value1, value2)


class Watched(DelegatingProcessor):
    """Take the time of the model's operator, step by step; what it waits for its rows is not its."""

    def __init__(self, inner: Any, into: Into) -> None:
        super().__init__(inner)
        self._into = into

    def handleInitialState(self, key: Any, initialState: pd.DataFrame, timerValues: TimerValues) -> None:  # noqa: N802
        """Let the operator take over the snapshot: what is no step of its own is of writing the state."""

        def take_over(_: Iterator[None]) -> Iterator[None]:
            self.inner.handleInitialState(key, initialState, timerValues)
            yield

        for _ in watched(take_over, STATE_WRITE, self._into)(iter(())):
            pass

    def handleInputRows(  # noqa: N802
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: TimerValues
    ) -> Iterator[Any]:
        """Let the operator take its rows."""

        def take(frames: Iterator[Any]) -> Iterator[Any]:
            return self.inner.handleInputRows(key, frames, timerValues)

        return watched(take, KALMAN, self._into)(rows)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:  # noqa: N802
        """Let the operator see to its timers."""

        def wake(_: Iterator[Any]) -> Iterator[Any]:
            return self.inner.handleExpiredTimer(key, timerValues, expiredTimerInfo)

        return watched(wake, KALMAN, self._into)(iter(()))


class Profiler:
    """The profile of one run of a stream.

    group: the job group of its query, which Spark names after the run; None: all jobs are its.
    """

    def __init__(self, spark: SparkSession, group: str | None = None) -> None:
        self.group = group
        self._marks = spark.sparkContext.accumulator({}, Sum())
        self._times = JobTimes(spark.sparkContext)
        self._laps: dict[int, list[Lap]] = {}
        self._jobs: list[Job] = []
        self._kept: deque[Profile] = deque(maxlen=KEPT)
        self._mean: Profile | None = None
        self._count = 0

    def operator(self, processor: Any) -> Watched:
        """Return the stream's operator under a watch."""
        return Watched(processor, self._marks)

    def packing(self, pack: Packer) -> Packer:
        """Return the function that packs rows under a watch."""
        return watched(pack, PACK, self._marks)

    def unpacking(self, unpack: Packer) -> Packer:
        """Return the function that unpacks estimates under a watch."""
        return watched(unpack, UNPACK_ESTIMATES, self._marks)

    @contextmanager
    def step(self, batch_id: int, name: str) -> Iterator[None]:
        """Take the time of a step of the sink."""
        before, began = self._marks.value, time.time()
        try:
            yield
        finally:
            ended, after = time.time(), self._marks.value
            marks = {mark: after[mark] - before.get(mark, 0.0) for mark in after}
            self._laps.setdefault(batch_id, []).append(Lap(name, (began, ended), marks))

    def take(self, progress: Sequence[dict[str, Any]], rows: Sequence[int]) -> None:
        """Take what Spark says of micro-batches that have ended, oldest first, and how many rows each had."""
        self._jobs += self._times.fresh(self.group)
        for one, count in zip(progress, rows, strict=True):
            laps = self._laps.pop(int(one["batchId"]), [])
            profile = profile_of(one, count, laps, self._jobs)
            self._kept.append(profile)
            self._mean = profile if self._mean is None else mean_of([(self._mean, self._count), (profile, 1)])
            self._count += 1
            if laps:
                self._jobs = [job for job in self._jobs if job.span[0] >= laps[-1].span[1]]

    @property
    def found(self) -> Profiled | None:
        """Return what has been found; None if no micro-batch has ended."""
        return None if self._mean is None else Profiled(self._count, self._mean, tuple(self._kept))
