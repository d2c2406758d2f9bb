"""Profiles of a micro-batch and of a verb, in which the wall time is divided into steps and a rest.

The times of jobs, stages and tasks come from Spark's status store. The web UI uses the same store, which also exists
without the UI and keeps the last thousand jobs and stages. No public API of a Python driver returns these times, so
this module reads `AppStatusStore`, the store behind the UI's REST API.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from py4j.protocol import Py4JJavaError
from pyspark import SparkContext
from rich.table import Table

from jobs.core.stopwatch import (
    KALMAN,
    PACK,
    PACK_ESTIMATES,
    STATE_READ,
    STATE_WRITE,
    UNPACK,
    UNPACK_ESTIMATES,
    WRITE,
    Seconds,
    add_seconds,
)

if TYPE_CHECKING:
    from jobs.core.report import Report


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


FILTER, TO_DELTA = "filter", "estimates to Delta"
"""Steps of the sink that are divided further: the Spark action that runs the filter, and the write of the estimates."""

OPERATOR = (UNPACK, STATE_READ, KALMAN, STATE_WRITE, PACK_ESTIMATES, UNPACK_ESTIMATES, WRITE)
"""The steps inside the tasks of the operator."""

PLANNING, WAL, READ, SHUFFLE, LOAD_STATE, COMMIT_STATE, HAND_OVER, SCHEDULING, COMMIT, COMMIT_LOG, REST = (
    "planning", "WAL", "read", "shuffle", "state load", "state commit", "hand-over", "scheduling", "commit",
    "commit log", "rest",
)  # fmt: skip
MEANING = {
    PLANNING: "finding new rows in the source, and Spark's query plan",
    WAL: "the micro-batch's offsets to the checkpoint",
    READ: "the source's files or messages, and their rows to Python",
    PACK: "rows into packets",
    SHUFFLE: "packets to their buckets",
    UNPACK: "packets into rows, by key and time",
    LOAD_STATE: "opening RocksDB at the last micro-batch",
    STATE_READ: "blocks of keys read from RocksDB and decoded",
    KALMAN: "the filter itself",
    STATE_WRITE: "blocks of keys encoded and written to RocksDB",
    PACK_ESTIMATES: "estimates into packets",
    COMMIT_STATE: "RocksDB's changes to the checkpoint",
    HAND_OVER: "transfer between Java and Python, and the start of Python workers",
    UNPACK_ESTIMATES: "packets into rows of the table",
    WRITE: "Parquet files",
    COMMIT: "Delta's commit",
    SCHEDULING: "Spark's driver around and between the jobs",
    COMMIT_LOG: "the micro-batch's commit to the checkpoint",
    REST: "time that no clock has measured",
}
"""Steps in display order, with descriptions. Other steps of the sink come after `COMMIT`."""

_PHASES = {
    "latestOffset": PLANNING,
    "getBatch": PLANNING,
    "queryPlanning": PLANNING,
    "walCommit": WAL,
    "commitOffsets": COMMIT_LOG,
    "commitBatch": COMMIT_LOG,
}
_WHOLE, _SINK = "triggerExecution", "addBatch"
DELTA = "Delta:"
"""Prefix of the descriptions of Delta's internal jobs on its log; the description of the step follows the prefix."""


class Lap(NamedTuple):
    """A step of the sink: its time span, and the seconds that the marks in Python workers recorded in this span."""

    step: str
    span: Span
    marks: Seconds


class Profile(NamedTuple):
    """The wall time of a micro-batch, and the seconds of each step; the steps and the rest add up to the wall time."""

    batch_id: int
    rows: int
    seconds: float
    steps: Seconds

    @property
    def rest(self) -> float:
        """Return the seconds that belong to no step."""
        return self.seconds - sum(self.steps.values())


class Profiled(NamedTuple):
    """The profile of a run: number of micro-batches, their mean profile, and the profiles of the last micro-batches."""

    count: int
    mean: Profile
    last: tuple[Profile, ...]

    def data(self) -> dict[str, Any]:
        """Return the profile as JSON data; times are seconds of wall time."""
        return {
            "count": self.count,
            "mean": _convert_to_plain(self.mean),
            "micro_batches": [_convert_to_plain(one) for one in self.last],
        }


def compute_profile(
    progress: Mapping[str, Any], rows: int, laps: Sequence[Lap], jobs: Sequence[Job]
) -> Profile:
    """Return the profile of a micro-batch.

    Args:
        progress: Spark's `StreamingQueryProgress` as JSON.
        rows: number of rows of the micro-batch.
        laps: steps of the sink, in order.
        jobs: Spark jobs of the micro-batch.
    """
    durations = {str(name): int(value) / 1e3 for name, value in (progress.get("durationMs") or {}).items()}
    wall = durations.pop(_WHOLE, 0.0)
    sink = durations.pop(_SINK, 0.0)
    steps: Seconds = {}
    for phase, seconds in durations.items():
        steps = add_seconds(steps, {_PHASES.get(phase, phase): seconds})
    operators = progress.get("stateOperators") or []
    loads = ((one.get("customMetrics") or {}).get("rocksdbLoadLatencyMs") for one in operators)
    state = {
        LOAD_STATE: sum(int(one or 0) for one in loads) / 1e3,
        COMMIT_STATE: sum(int(one.get("commitTimeMs") or 0) for one in operators) / 1e3,
    }
    for lap in laps:
        # Jobs that began during the step; Spark's times are whole milliseconds.
        mine = [job for job in jobs if lap.span[0] - 0.001 <= job.span[0] < lap.span[1]]
        whole = {COMMIT if lap.step == TO_DELTA else lap.step: lap.span[1] - lap.span[0]}
        steps = add_seconds(steps, _filter(mine, lap, state) if lap.step == FILTER else whole)
    if laps:
        # Spark prepares the sink's call and closes it; this takes tens of milliseconds, much of a small micro-batch.
        steps = add_seconds(steps, {SCHEDULING: max(0.0, sink - (laps[-1].span[1] - laps[0].span[0]))})
    return Profile(int(progress["batchId"]), rows, wall, steps)


def average_profiles(parts: Sequence[tuple[Profile, int]]) -> Profile:
    """Return the mean of (profile, number of micro-batches) pairs, with the id of the last micro-batch."""
    count = sum(number for _, number in parts)
    steps: Seconds = {}
    for one, number in parts:
        steps = add_seconds(steps, {name: took * number / count for name, took in one.steps.items()})
    rows = round(sum(one.rows * number for one, number in parts) / count)
    seconds = sum(one.seconds * number for one, number in parts) / count
    return Profile(parts[-1][0].batch_id, rows, seconds, steps)


def sort_steps(steps: Iterable[str]) -> list[str]:
    """Return the names of steps in display order; steps of other sinks come after the commit of the estimates."""
    known = list(MEANING)
    place = {name: float(number) for number, name in enumerate(known)}
    return sorted(steps, key=lambda name: (place.get(name, place[COMMIT] + 0.5), name))


def _convert_to_plain(profile: Profile) -> dict[str, Any]:
    steps = {name: profile.steps[name] for name in sort_steps(profile.steps)}
    return {**profile._asdict(), "steps": steps, "rest": profile.rest}


def _filter(jobs: Sequence[Job], lap: Lap, state: Seconds) -> Seconds:
    """Divide the time of the action that runs the filter: the stages before the shuffle, the operator after it."""
    steps: Seconds = {}
    last = {job.stages[-1].number for job in jobs if job.stages}
    before = [stage for job in jobs for stage in job.stages[:-1]]
    packing = max(before, key=lambda stage: stage.task, default=None)  # another stage may read a snapshot
    busy = 0.0
    for stage, seconds in share_seconds(stage for job in jobs for stage in job.stages):
        busy += seconds
        shuffle = {SHUFFLE: stage.shuffle_read + stage.shuffle_write}
        if stage.number in last:
            known = {name: lap.marks.get(name, 0.0) for name in OPERATOR}
            parts, other = {**shuffle, **known, **state}, HAND_OVER
        else:
            packed = lap.marks.get(PACK, 0.0) if stage is packing else 0.0
            parts, other = {**shuffle, PACK: packed}, READ
        steps = add_seconds(steps, _share_stage(seconds, stage, parts, other))
    return add_seconds(steps, {SCHEDULING: lap.span[1] - lap.span[0] - busy})


def _share_stage(seconds: float, stage: Stage, parts: Seconds, other: str) -> Seconds:
    """Divide the wall time of a stage in proportion to the seconds of its tasks; `other` gets the remainder.

    Java and Python run in parallel within a task, so the parts may exceed the time of the task. Then the remainder is
    zero.
    """
    whole = max(stage.task, sum(parts.values()))
    if whole == 0:
        return {other: seconds}
    shared = {name: seconds * part / whole for name, part in parts.items() if part}
    shared[other] = shared.get(other, 0.0) + seconds - sum(shared.values())
    return shared


def build_profile_table(found: Profiled, model: str) -> Table:
    """Return the mean times of the steps of a run as a rich table."""
    mean = found.mean
    title = (
        f"{model}: where the time of a micro-batch went, mean of {found.count} "
        f"({mean.seconds:.3f} s, {mean.rows:,} rows)"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("step")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    table.add_column("meaning", style="dim")
    seconds = {name: mean.steps[name] for name in sort_steps(mean.steps)} | {REST: mean.rest}
    for name, took in seconds.items():
        share = 100 * took / mean.seconds if mean.seconds else 0.0
        table.add_row(name, f"{took:.3f}", f"{share:.1f} %", MEANING.get(name, "a further step of the sink"))
    table.add_section()
    table.add_row("micro-batch", f"{mean.seconds:.3f}", "100.0 %", "Spark's triggerExecution")
    return table


BEFORE, BETWEEN = "before the first job", "between the jobs"
DELTAS, OTHERS = "Delta's log", "jobs without a label"


class VerbStep(NamedTuple):
    """The jobs with one label: their number, their wall time, and the sum of their tasks' seconds.

    task_seconds includes shuffle_seconds, which is spent on writing shuffles and waiting for them, and gc_seconds,
    which is spent on Java's garbage collection.
    """

    name: str
    jobs: int
    seconds: float
    task_seconds: float = 0.0
    shuffle_seconds: float = 0.0
    gc_seconds: float = 0.0


class VerbProfiler:
    """The profile of a verb since the profiler was constructed; without `wanted` it measures nothing."""

    def __init__(self, wanted: bool) -> None:
        self._wanted, self._began = wanted, time.time()
        running = SparkContext._active_spark_context if wanted else None
        # If Spark does not run yet, the verb starts Spark, and all of Spark's jobs belong to the verb.
        self._times = None if running is None else JobTimes(running)

    def added_to(self, report: Report) -> Report:
        """Return the verb's report, with the profile until now if a profile is wanted."""
        if not self._wanted:
            return report
        span = (self._began, time.time())
        if self._times is None:
            started = SparkContext._active_spark_context
            self._times = None if started is None else JobTimes(started, all_of_them=True)
        steps = list_steps([] if self._times is None else self._times.fresh(), span)
        report.data["profile"] = {"seconds": span[1] - span[0], "steps": [one._asdict() for one in steps]}
        report.tables.append(build_step_table(steps, span[1] - span[0]))
        return report


def list_steps(jobs: Sequence[Job], span: Span) -> list[VerbStep]:
    """Return the steps of a verb during `span`, ordered by start; the seconds of the steps add up to the span."""
    named: dict[str, list[Job]] = {}
    for job in sorted(jobs, key=lambda one: one.span):
        named.setdefault(_find_step_name(job), []).append(job)
    steps, spans = [], list[Span]()
    for name, some in named.items():
        before = compute_covered_seconds(spans)
        spans += [job.span for job in some]
        stages = [stage for job in some for stage in job.stages]
        steps.append(
            VerbStep(
                name,
                len(some),
                compute_covered_seconds(spans) - before,
                sum(stage.task for stage in stages),
                sum(stage.shuffle_read + stage.shuffle_write for stage in stages),
                sum(stage.gc for stage in stages),
            )
        )
    first = min((begin for begin, _ in spans), default=span[1])
    started = VerbStep(BEFORE, 0, first - span[0])
    return [started, *steps, VerbStep(BETWEEN, 0, span[1] - first - compute_covered_seconds(spans))]


def build_step_table(steps: Sequence[VerbStep], seconds: float) -> Table:
    """Return the steps as a rich table."""
    table = Table(title=f"where {seconds:.1f} s went", title_justify="left", box=None, pad_edge=False)
    table.add_column("step")
    for name in ("seconds", "share", "jobs", "task seconds", "of them shuffle", "of them GC"):
        table.add_column(name, justify="right")
    for one in steps:
        share = f"{100 * one.seconds / seconds:.1f} %" if seconds else ""
        tasks = (f"{value:.2f}" for value in (one.task_seconds, one.shuffle_seconds, one.gc_seconds))
        ran = (str(one.jobs), *tasks) if one.jobs else ()
        table.add_row(one.name, f"{one.seconds:.2f}", share, *ran)
    return table


def _find_step_name(job: Job) -> str:
    if job.description.startswith(DELTA):
        return DELTAS
    return job.description.partition(": ")[2] or job.description or OTHERS
