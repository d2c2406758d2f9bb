"""How many tasks of the stages that run now are done: what a command shows as progress of one long step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def running_tasks(spark: SparkSession) -> Callable[[], tuple[int, int]]:
    """Return a function that counts the finished tasks, and all tasks, of the stages that run now."""
    tracker = spark.sparkContext.statusTracker()

    def count() -> tuple[int, int]:
        stages = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
        known = [one for one in stages if one is not None]
        return sum(one.numCompletedTasks for one in known), sum(one.numTasks for one in known)

    return count
