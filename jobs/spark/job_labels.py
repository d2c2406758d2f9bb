"""Labels of Spark's jobs in the UI, and the number of finished tasks in the running stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from jobs.spark.warehouse import Warehouse


DESCRIPTION, NAME = "spark.job.description", "callSite.short"


def set_label(spark: SparkSession, subject: str, step: str | None = None, between: str = ": ") -> None:
    """Label the next jobs of this thread, for example `walk-g0001: micro-batch 12, estimates to Delta`.

    Args:
        spark: the session.
        subject: owner of the jobs, such as a generation, or a verb and its model.
        step: purpose of the jobs; None adds no step.
        between: text between subject and step.
    """
    text = subject if step is None else f"{subject}{between}{step}"
    for name in (DESCRIPTION, NAME):
        spark.sparkContext.setLocalProperty(name, text)


@contextmanager
def label_jobs(spark: SparkSession, subject: str, step: str | None = None) -> Iterator[None]:
    """Label the jobs that this thread starts in the block."""
    context = spark.sparkContext
    before = {name: context.getLocalProperty(name) for name in (DESCRIPTION, NAME)}
    set_label(spark, subject, step)
    try:
        yield
    finally:
        for name, value in before.items():
            # None removes a property, although the type annotation does not allow None.
            context.setLocalProperty(name, value)  # pyright: ignore[reportArgumentType]


def label_batches(
    function: Callable[[DataFrame, int], None], subject: str
) -> Callable[[DataFrame, int], None]:
    """Wrap the function that a query calls with each micro-batch, so that its jobs are labelled with the number."""

    def labelling(rows: DataFrame, batch_id: int) -> None:
        set_label(rows.sparkSession, subject, f"micro-batch {batch_id}")
        function(rows, batch_id)

    return labelling


def build_task_counter(warehouse: Warehouse) -> Callable[[], tuple[int, int]]:
    """Return a function that returns the numbers of finished tasks and of all tasks in the running stages."""

    def count() -> tuple[int, int]:
        if not warehouse.has_spark:
            return 0, 0
        tracker = warehouse.spark.sparkContext.statusTracker()
        stages = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
        known = [one for one in stages if one is not None]
        return sum(one.numCompletedTasks for one in known), sum(one.numTasks for one in known)

    return count
