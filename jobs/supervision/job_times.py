"""Read the times of jobs, stages and tasks from Spark's status store.

The web UI uses the same store, which also exists without the UI and keeps the last thousand jobs and stages. No public
API of a Python driver returns these times, so this module reads `AppStatusStore`, the store behind the UI's REST API.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from py4j.protocol import Py4JJavaError

if TYPE_CHECKING:
    from pyspark import SparkContext

Span = tuple[float, float]
"""Begin and end of a time span, in seconds since 1970."""


class Stage(NamedTuple):
    """A stage that ran: its time span, and the summed seconds of its tasks.

    task: total seconds of the tasks, including the next three. shuffle_read: waiting for the shuffle. shuffle_write:
    writing the shuffle. gc: Java's garbage collection.
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
    """A job that has ended: its labels, its time span, and its stages in order."""

    number: int
    name: str
    description: str
    group: str | None
    span: Span
    stages: tuple[Stage, ...]


class JobTimes:
    """The jobs of a Spark application from now on, or all jobs in its store; each is returned once, after its end."""

    def __init__(self, context: SparkContext, all_of_them: bool = False) -> None:
        java: Any = context._jsc
        self._store: Any = java.sc().statusStore()
        jobs = self._store.jobsList(None)  # newest first
        self._next = 0 if all_of_them or jobs.isEmpty() else int(jobs.apply(0).jobId()) + 1
        self._returned: set[int] = set()

    def fresh(self, group: str | None = None) -> list[Job]:
        """Return the jobs of a group, or of all groups, that have ended since the last call, oldest first."""
        found: list[Job] = []
        known: set[int] = set()
        running: set[int] = set()
        for job in _iterate_sequence(self._store.jobsList(None)):
            number = int(job.jobId())
            if number < self._next:
                break
            if job.completionTime().isEmpty() or job.submissionTime().isEmpty():
                running.add(number)
                continue
            known.add(number)
            belongs = None if job.jobGroup().isEmpty() else str(job.jobGroup().get())
            if number not in self._returned and group in (None, belongs):
                found.append(self._read_job(job, belongs))
        self._next = min(running, default=max(known, default=self._next - 1) + 1)
        self._returned = {number for number in known if number >= self._next}
        return sorted(found)

    def _read_job(self, job: Any, group: str | None) -> Job:
        description = "" if job.description().isEmpty() else str(job.description().get())
        stages = [self._read_stage(int(number)) for number in _iterate_sequence(job.stageIds())]
        return Job(
            int(job.jobId()),
            str(job.name()),
            description,
            group,
            (_parse_seconds(job.submissionTime()), _parse_seconds(job.completionTime())),
            tuple(sorted(stage for stage in stages if stage is not None)),
        )

    def _read_stage(self, number: int) -> Stage | None:
        try:
            stage = self._store.lastStageAttempt(number)
        except Py4JJavaError:  # Spark no longer has the stage
            return None
        if stage.submissionTime().isEmpty() or stage.completionTime().isEmpty():
            return None  # the stage was skipped, because its result already existed
        return Stage(
            number,
            str(stage.name()),
            (_parse_seconds(stage.submissionTime()), _parse_seconds(stage.completionTime())),
            int(stage.numTasks()),
            (int(stage.executorRunTime()) + int(stage.executorDeserializeTime())) / 1e3,
            int(stage.shuffleFetchWaitTime()) / 1e3,
            int(stage.shuffleWriteTime()) / 1e9,
            int(stage.jvmGcTime()) / 1e3,
        )


def compute_covered_seconds(spans: Iterable[Span]) -> float:
    """Return the seconds that at least one of the spans covers."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def share_seconds(stages: Iterable[Stage]) -> list[tuple[Stage, float]]:
    """Return each stage with the part of its seconds that no earlier stage covers; they add up to the covered time."""
    found, spans = [], list[Span]()
    for stage in sorted(stages, key=lambda one: one.span):
        before = compute_covered_seconds(spans)
        spans.append(stage.span)
        found.append((stage, compute_covered_seconds(spans) - before))
    return found


def _iterate_sequence(sequence: Any) -> Iterator[Any]:
    for place in range(sequence.size()):
        yield sequence.apply(place)


def _parse_seconds(date: Any) -> float:
    return int(date.get().getTime()) / 1e3
