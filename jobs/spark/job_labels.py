"""Say in Spark's UI what a job is for: its description, and the name of its stages.

Spark keeps both by thread, and a thread that Spark starts for a query gets what the thread had that started it. A
stream's own thread, in which its sink runs, is told by Spark which stream and which micro-batch it is at; the sink says
what it does with it. Without a label a stage is named after the place in Spark's own code that Python calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DESCRIPTION, NAME = "spark.job.description", "callSite.short"


def label(spark: SparkSession, subject: str, step: str | None = None, between: str = ": ") -> None:
    """Label the jobs that this thread starts from now on: `walk-g0001: micro-batch 12, estimates to Delta`.

    Args:
        spark: the session.
        subject: whose jobs, such as a generation, or a verb and its model.
        step: what they do.
        between: what stands between the two.
    """
    said = subject if step is None else f"{subject}{between}{step}"
    for name, value in ((DESCRIPTION, said), (NAME, said)):
        spark.sparkContext.setLocalProperty(name, value)


@contextmanager
def labelled(spark: SparkSession, subject: str, step: str | None = None) -> Iterator[None]:
    """Label the jobs that this thread starts meanwhile."""
    context = spark.sparkContext
    before = {name: context.getLocalProperty(name) for name in (DESCRIPTION, NAME)}
    label(spark, subject, step)
    try:
        yield
    finally:
        for name, value in before.items():
            # None takes a property away, which its type does not tell
            context.setLocalProperty(name, value)  # pyright: ignore[reportArgumentType]


def batches_labelled(
    function: Callable[[DataFrame, int], None], subject: str
) -> Callable[[DataFrame, int], None]:
    """Return what a query calls with each micro-batch, so that its jobs say which one they are of."""

    def labelling(rows: DataFrame, batch_id: int) -> None:
        label(rows.sparkSession, subject, f"micro-batch {batch_id}")
        function(rows, batch_id)

    return labelling
