"""Read when Spark's jobs and their stages ran, and what their tasks did, from what Spark keeps of them.

It is what the web UI shows, and is kept whether or not there is one: the last thousand jobs and stages. In a Python
driver nothing public gives the times, so this asks the store behind the UI's REST API (`AppStatusStore`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from py4j.protocol import Py4JJavaError

if TYPE_CHECKING:
    from pyspark import SparkContext

Span = tuple[float, float]
"""Begin and end, in seconds since 1970."""


class Stage(NamedTuple):
    """A stage that ran: when, and seconds of all its tasks together.

    task: of the tasks as a whole; shuffle_read, shuffle_write: of those waiting for the shuffle, and writing it; gc: in
    the garbage collector of Java.
    """

    number: int
    name: str
    span: Span
    tasks: int
    task: float
    shuffle_read: float = 0.0
    shuffle_write: float = 0.0
    gc: float = 0.0


class Job(NamedTuple):
    """A job that has ended: when, for what, and the stages that ran for it, in their order."""

    number: int
    name: str
    description: str
    group: str | None
    span: Span
    stages: tuple[Stage, ...]


class JobTimes:
    """The jobs of a Spark application from now on (or all that are kept), each handed out once it has ended."""

    def __init__(self, context: SparkContext, all_of_them: bool = False) -> None:
        java: Any = context._jsc
        self._store: Any = java.sc().statusStore()
        jobs = self._store.jobsList(None)  # the newest come first
        self._next = 0 if all_of_them or jobs.isEmpty() else int(jobs.apply(0).jobId()) + 1
        self._told: set[int] = set()

    def fresh(self, group: str | None = None) -> list[Job]:
        """Return the jobs that have ended since the last time, of a job group or all; oldest first."""
        found: list[Job] = []
        known: set[int] = set()
        running: set[int] = set()
        for job in _each(self._store.jobsList(None)):
            number = int(job.jobId())
            if number < self._next:
                break
            if job.completionTime().isEmpty() or job.submissionTime().isEmpty():
                running.add(number)
                continue
            known.add(number)
            belongs = None if job.jobGroup().isEmpty() else str(job.jobGroup().get())
            if number not in self._told and group in (None, belongs):
                found.append(self._job(job, belongs))
        self._next = min(running, default=max(known, default=self._next - 1) + 1)
        self._told = {number for number in known if number >= self._next}
        return sorted(found)

    def _job(self, job: Any, group: str | None) -> Job:
        description = "" if job.description().isEmpty() else str(job.description().get())
        stages = [self._stage(int(number)) for number in _each(job.stageIds())]
        return Job(
            int(job.jobId()),
            str(job.name()),
            description,
            group,
            (_seconds(job.submissionTime()), _seconds(job.completionTime())),
            tuple(sorted(stage for stage in stages if stage is not None)),
        )

    def _stage(self, number: int) -> Stage | None:
        try:
            stage = self._store.lastStageAttempt(number)
        except Py4JJavaError:  # no longer kept
            return None
        if stage.submissionTime().isEmpty() or stage.completionTime().isEmpty():
            return None  # skipped: what it would have made was there
        return Stage(
            number,
            str(stage.name()),
            (_seconds(stage.submissionTime()), _seconds(stage.completionTime())),
            int(stage.numTasks()),
            (int(stage.executorRunTime()) + int(stage.executorDeserializeTime())) / 1e3,
            int(stage.shuffleFetchWaitTime()) / 1e3,
            int(stage.shuffleWriteTime()) / 1e9,
            int(stage.jvmGcTime()) / 1e3,
        )


def covered(spans: Iterable[Span]) -> float:
    """Return how many seconds lie in at least one of the spans."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def shares(stages: Iterable[Stage]) -> list[tuple[Stage, float]]:
    """Return each stage with the seconds that it took beside those before it: they add up to what all cover."""
    found, spans = [], list[Span]()
    for stage in sorted(stages, key=lambda one: one.span):
        before = covered(spans)
        spans.append(stage.span)
        found.append((stage, covered(spans) - before))
    return found


def _each(sequence: Any) -> Iterator[Any]:
    for place in range(sequence.size()):
        yield sequence.apply(place)


def _seconds(date: Any) -> float:
    return int(date.get().getTime()) / 1e3
