"""Number of finished tasks in Spark's running stages, as the progress of one long step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jobs.spark.warehouse import Warehouse


def build_task_counter(warehouse: Warehouse) -> Callable[[], tuple[int, int]]:
    """Return a function that counts the finished tasks, and all tasks, of the running stages."""

    def count() -> tuple[int, int]:
        if not warehouse.has_spark:
            return 0, 0
        tracker = warehouse.spark.sparkContext.statusTracker()
        stages = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
        known = [one for one in stages if one is not None]
        return sum(one.numCompletedTasks for one in known), sum(one.numTasks for one in known)

    return count
