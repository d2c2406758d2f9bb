"""Profile a verb that runs once and ends: its wall time by the labels of its Spark jobs (`jobs.spark.job_labels`).

Jobs with the same label are one step. Time in which two jobs overlap counts once, so the steps and the driver's time
between them add up to the verb's wall time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pyspark import SparkContext
from rich.table import Table

from jobs.supervision.batch_profile import DELTA
from jobs.supervision.job_times import Job, JobTimes, Span, compute_covered_seconds

if TYPE_CHECKING:
    from jobs.core.report import Report

BEFORE, BETWEEN = "before the first job", "between the jobs"
DELTAS, OTHERS = "Delta's log", "jobs without a label"


class VerbStep(NamedTuple):
    """Jobs with one label: their number, wall time, and the summed seconds of their tasks.

    task_seconds includes shuffle_seconds, for writing and awaiting shuffles, and gc_seconds, for Java's garbage
    collector.
    """

    name: str
    jobs: int
    seconds: float
    task_seconds: float = 0.0
    shuffle_seconds: float = 0.0
    gc_seconds: float = 0.0


class VerbProfiler:
    """The profile of a verb from the profiler's construction on; without `wanted` it measures nothing."""

    def __init__(self, wanted: bool) -> None:
        self._wanted, self._began = wanted, time.time()
        running = SparkContext._active_spark_context if wanted else None
        # If Spark does not run, the verb starts it, and all of its jobs belong to the verb.
        self._times = None if running is None else JobTimes(running)

    def added_to(self, report: Report) -> Report:
        """Return the verb's report with the profile up to now, if wanted."""
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
    """Return the steps of a verb that ran during `span`, in order of their start; their seconds add up to the span."""
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
