"""Profile a verb that runs once and ends: its wall time by what its Spark jobs are for (`jobs.spark.job_labels`).

Jobs of one label count together, and time that two of them share counts once, so the steps and the driver's own time
between them add up to the wall time of the verb.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

from pyspark import SparkContext
from rich.table import Table

from jobs.observability.batch_profile import DELTA
from jobs.observability.job_times import Job, JobTimes, Span, covered

if TYPE_CHECKING:
    from jobs.core.report import Report

P = ParamSpec("P")
BEFORE, BETWEEN = "before the first job", "between the jobs"
DELTAS, OTHERS = "Delta's log", "jobs without a label"


class Step(NamedTuple):
    """Jobs of one label: how many, their wall time, and seconds of all their tasks together.

    Of the tasks': shuffle_seconds writing and waiting for a shuffle, gc_seconds collecting Java's garbage.
    """

    name: str
    jobs: int
    seconds: float
    task_seconds: float = 0.0
    shuffle_seconds: float = 0.0
    gc_seconds: float = 0.0


def profiled(run: Callable[P, Report]) -> Callable[..., Report]:
    """Give a verb's `run` an option `profile`: its report says where its time went then."""

    @wraps(run)
    def maybe(*args: Any, profile: bool = False, **options: Any) -> Report:
        if not profile:
            return run(*args, **options)

        running = SparkContext._active_spark_context  # as in a test; else a verb starts one of its own
        times = None if running is None else JobTimes(running)
        began = time.time()
        report = run(*args, **options)
        span = (began, time.time())
        if times is None:
            started = SparkContext._active_spark_context
            assert started is not None
            times = JobTimes(started, all_of_them=True)
        steps = steps_of(times.fresh(), span)
        report.data["profile"] = {"seconds": span[1] - span[0], "steps": [one._asdict() for one in steps]}
        report.tables.append(table_of(steps, span[1] - span[0]))
        return report

    return maybe


def steps_of(jobs: Sequence[Job], span: Span) -> list[Step]:
    """Return the steps of a verb that ran during `span`, in the order in which they began; their seconds are its."""
    named: dict[str, list[Job]] = {}
    for job in sorted(jobs, key=lambda one: one.span):
        named.setdefault(_name(job), []).append(job)
    steps, spans = [], list[Span]()
    for name, some in named.items():
        before = covered(spans)
        spans += [job.span for job in some]
        stages = [stage for job in some for stage in job.stages]
        steps.append(
            Step(
                name,
                len(some),
                covered(spans) - before,
                sum(stage.task for stage in stages),
                sum(stage.shuffle_read + stage.shuffle_write for stage in stages),
                sum(stage.gc for stage in stages),
            )
        )
    first = min((begin for begin, _ in spans), default=span[1])
    started = Step(BEFORE, 0, first - span[0])
    return [started, *steps, Step(BETWEEN, 0, span[1] - first - covered(spans))]


def table_of(steps: Sequence[Step], seconds: float) -> Table:
    """Return the steps as a rich table."""
    table = Table(title=f"where {seconds:.1f} s went", title_justify="left", box=None, pad_edge=False)
    table.add_column("step")
    for name in ("seconds", "share", "jobs", "seconds of tasks", "of them shuffle", "garbage"):
        table.add_column(name, justify="right")
    for one in steps:
        share = f"{100 * one.seconds / seconds:.1f} %" if seconds else ""
        tasks = (f"{value:.2f}" for value in (one.task_seconds, one.shuffle_seconds, one.gc_seconds))
        ran = (str(one.jobs), *tasks) if one.jobs else ()
        table.add_row(one.name, f"{one.seconds:.2f}", share, *ran)
    return table


def _name(job: Job) -> str:
    if job.description.startswith(DELTA):
        return DELTAS
    return job.description.partition(": ")[2] or job.description or OTHERS
