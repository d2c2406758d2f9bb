"""Where the time of a micro-batch went: its wall time, in steps that add up to it and a rest. Pure.

Three clocks are put together. Spark tells how long the phases of a micro-batch took, one after the other, on the
driver; the sink takes the time of its own steps within the longest of them (`addBatch`); and Spark's jobs and stages
lie within these. What a stage's tasks did, side by side on many cores, is told in seconds of tasks: from the marks in
our functions (`jobs.core.stopwatch`), the state store and the shuffle. A stage's wall time is shared out in proportion to
them, so that all steps are seconds of wall time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from jobs.core.stopwatch import (
    KALMAN,
    PACK,
    PACK_ESTIMATES,
    STATE_READ,
    STATE_WRITE,
    UNPACK,
    UNPACK_ESTIMATES,
    Seconds,
)
from jobs.observability.job_times import Job, Span, Stage, shares

FILTER, TO_DELTA = "filter", "estimates to Delta"
"""Steps of the sink that are looked into: the one action that runs the filter; the write of the estimates."""

OPERATOR = (UNPACK, STATE_READ, KALMAN, STATE_WRITE, PACK_ESTIMATES)

PLANNING, WAL, READ, SHUFFLE, LOAD_STATE, COMMIT_STATE, HAND_OVER, SCHEDULING, WRITE, COMMIT, COMMIT_LOG, REST = (
    "planning", "WAL", "read", "shuffle", "state load", "state commit", "hand-over", "scheduling", "write", "commit",
    "commit log", "rest",
)  # fmt: skip
MEANING = {
    PLANNING: "what is new in the source, and Spark's plan for it",
    WAL: "the micro-batch's offsets into the checkpoint",
    READ: "the source's files or messages, and their rows to Python",
    PACK: "rows into packets",
    SHUFFLE: "packets to their buckets",
    UNPACK: "packets into rows, by key and time",
    LOAD_STATE: "RocksDB opened as the last micro-batch left it",
    STATE_READ: "blocks of keys from RocksDB, decoded",
    KALMAN: "the filter itself",
    STATE_WRITE: "blocks of keys encoded, into RocksDB",
    PACK_ESTIMATES: "estimates into packets",
    COMMIT_STATE: "RocksDB's changes into the checkpoint",
    HAND_OVER: "between Java and Python, and Python workers that start",
    UNPACK_ESTIMATES: "packets into rows of the table",
    WRITE: "Parquet files",
    COMMIT: "Delta's commit",
    SCHEDULING: "Spark's driver around and between the jobs",
    COMMIT_LOG: "the micro-batch's end into the checkpoint",
    REST: "what none of these clocks has seen",
}
"""Steps in the order in which they are shown, and what they are. Other steps of the sink stand behind `COMMIT`."""

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
"""What the descriptions of Delta's own jobs, on its log, begin with; ours follows."""


class Lap(NamedTuple):
    """A step of the sink: when it was, and what the marks in Python workers added up to meanwhile."""

    step: str
    span: Span
    marks: Seconds


class Profile(NamedTuple):
    """A micro-batch: its wall time, and the seconds of each step; with the rest they are the wall time."""

    batch_id: int
    rows: int
    seconds: float
    steps: Seconds

    @property
    def rest(self) -> float:
        """Return what no step accounts for."""
        return self.seconds - sum(self.steps.values())


class Profiled(NamedTuple):
    """The profile of a run: how many micro-batches, their mean, and the last of them one by one."""

    count: int
    mean: Profile
    last: tuple[Profile, ...]

    def data(self) -> dict[str, Any]:
        """Return it for a program: seconds of wall time."""
        return {
            "count": self.count,
            "mean": _plain(self.mean),
            "micro_batches": [_plain(one) for one in self.last],
        }


def profile_of(progress: Mapping[str, Any], rows: int, laps: Sequence[Lap], jobs: Sequence[Job]) -> Profile:
    """Return where the time of a micro-batch went.

    Args:
        progress: as Spark's `StreamingQueryProgress` is in JSON.
        rows: that it took.
        laps: the sink's steps, in their order.
        jobs: that ran for it.
    """
    durations = {str(name): int(value) / 1e3 for name, value in (progress.get("durationMs") or {}).items()}
    wall = durations.pop(_WHOLE, 0.0)
    durations.pop(_SINK, None)
    steps: Seconds = {}
    for phase, seconds in durations.items():
        _add(steps, _PHASES.get(phase, phase), seconds)
    operators = progress.get("stateOperators") or []
    loads = ((one.get("customMetrics") or {}).get("rocksdbLoadLatencyMs") for one in operators)
    state = {
        LOAD_STATE: sum(int(one or 0) for one in loads) / 1e3,
        COMMIT_STATE: sum(int(one.get("commitTimeMs") or 0) for one in operators) / 1e3,
    }
    for lap in laps:
        mine = [job for job in jobs if _within(job.span, lap.span)]
        if lap.step == FILTER:
            found = _filter(mine, lap, state)
        elif lap.step == TO_DELTA:
            found = _estimates(mine, lap)
        else:
            found = {lap.step: lap.span[1] - lap.span[0]}
        for name, seconds in found.items():
            _add(steps, name, seconds)
    return Profile(int(progress["batchId"]), rows, wall, steps)


def mean_of(parts: Sequence[tuple[Profile, int]]) -> Profile:
    """Return the mean of profiles, each of so many micro-batches, as one; its number is that of the last."""
    count = sum(number for _, number in parts)
    steps: Seconds = {}
    for one, number in parts:
        for name, seconds in one.steps.items():
            _add(steps, name, seconds * number / count)
    rows = round(sum(one.rows * number for one, number in parts) / count)
    seconds = sum(one.seconds * number for one, number in parts) / count
    return Profile(parts[-1][0].batch_id, rows, seconds, steps)


def in_order(steps: Iterable[str]) -> list[str]:
    """Return names of steps as they are shown; those of further sinks behind the estimates' commit."""
    known = list(MEANING)
    place = {name: float(number) for number, name in enumerate(known)}
    return sorted(steps, key=lambda name: (place.get(name, place[COMMIT] + 0.5), name))


def _plain(profile: Profile) -> dict[str, Any]:
    steps = {name: profile.steps[name] for name in in_order(profile.steps)}
    return {
        "batch_id": profile.batch_id,
        "rows": profile.rows,
        "seconds": profile.seconds,
        "steps": steps,
        "rest": profile.rest,
    }


def _filter(jobs: Sequence[Job], lap: Lap, state: Seconds) -> Seconds:
    """Share out the action that runs the filter: what is before the shuffle, and the operator behind it."""
    steps: Seconds = {}
    last = {job.stages[-1].number for job in jobs if job.stages}
    before = [stage for job in jobs for stage in job.stages[:-1]]
    packing = max(before, key=lambda stage: stage.task, default=None)  # the other one reads a snapshot
    busy = 0.0
    for stage, seconds in shares(stage for job in jobs for stage in job.stages):
        busy += seconds
        shuffle = {SHUFFLE: stage.shuffle_read + stage.shuffle_write}
        if stage.number in last:
            known = {name: lap.marks.get(name, 0.0) for name in OPERATOR}
            parts, other = {**shuffle, **known, **state}, HAND_OVER
        else:
            packed = lap.marks.get(PACK, 0.0) if stage is packing else 0.0
            parts, other = {**shuffle, PACK: packed}, READ
        for name, part in _shared(seconds, stage, parts, other).items():
            _add(steps, name, part)
    _add(steps, SCHEDULING, lap.span[1] - lap.span[0] - busy)
    return steps


def _estimates(jobs: Sequence[Job], lap: Lap) -> Seconds:
    """Share out the write of the estimates: the job that writes the files, and what Delta does around it."""
    steps: Seconds = {}
    busy = 0.0
    stages = [stage for job in jobs if not job.description.startswith(DELTA) for stage in job.stages]
    for stage, seconds in shares(stages):
        busy += seconds
        unpacked = {UNPACK_ESTIMATES: lap.marks.get(UNPACK_ESTIMATES, 0.0)}
        for name, part in _shared(seconds, stage, unpacked, WRITE).items():
            _add(steps, name, part)
    _add(steps, COMMIT, lap.span[1] - lap.span[0] - busy)
    return steps


def _shared(seconds: float, stage: Stage, parts: Seconds, other: str) -> Seconds:
    """Share out a stage's wall time in proportion to seconds of its tasks; what is left of these is `other`'s.

    Java and Python work side by side within a task, so the parts may come to more than the task: then nothing is left.
    """
    whole = max(stage.task, sum(parts.values()))
    if whole == 0:
        return {other: seconds}
    shared = {name: seconds * part / whole for name, part in parts.items() if part}
    shared[other] = shared.get(other, 0.0) + seconds - sum(shared.values())
    return shared


def _add(steps: Seconds, name: str, seconds: float) -> None:
    steps[name] = steps.get(name, 0.0) + seconds


def _within(span: Span, lap: Span) -> bool:
    """Tell if a job began during a step; Spark's times are whole milliseconds."""
    return lap[0] - 0.001 <= span[0] < lap[1]


def table_of(found: Profiled, model: str) -> Table:
    """Return the mean of a run's micro-batches, step by step, as a rich table."""
    mean = found.mean
    title = (
        f"{model}: where the time of a micro-batch went, mean of {found.count} "
        f"({mean.seconds:.3f} s, {mean.rows:,} rows)"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("step")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    table.add_column("what it is", style="dim")
    seconds = {name: mean.steps[name] for name in in_order(mean.steps)} | {REST: mean.rest}
    for name, took in seconds.items():
        share = 100 * took / mean.seconds if mean.seconds else 0.0
        table.add_row(name, f"{took:.3f}", f"{share:.1f} %", MEANING.get(name, "a further step of the sink"))
    table.add_section()
    table.add_row("micro-batch", f"{mean.seconds:.3f}", "100.0 %", "Spark's triggerExecution")
    return table
