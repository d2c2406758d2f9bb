"""Airflow's executor of local processes, for the case that one of them is killed before its task has begun.

A task is queued until the process that took it says that it runs. Killed before, nobody says anything: a task that does
not run gives no heartbeat that could be missed. The scheduler then asks the executor to forget a task that is queued
for too long (`task_queued_timeout`), and queues it again. Airflow's own local executor cannot forget, and the task
would stay queued until the scheduler is started again.
"""

from __future__ import annotations

from typing import Any

from airflow.executors.local_executor import LocalExecutor


class Executor(LocalExecutor):
    """LocalExecutor that forgets a task when it is asked to."""

    def revoke_task(self, *, ti: Any) -> None:
        """Forget a task that was queued and has not begun.

        Should its process still begin it after that, Airflow lets only one of two begin.
        """
        self.queued_tasks.pop(ti.key, None)
        self.running.discard(ti.key)
