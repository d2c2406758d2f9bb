"""Airflow's executor of local processes, with a way to revoke a task whose process was killed before it began.

A task is queued until its process reports that it runs. If the process is killed before this report, Airflow does not
notice, because a task that does not run has no heartbeat to miss. After `task_queued_timeout` the scheduler asks the
executor to revoke the queued task, and queues it again. Airflow's own local executor cannot revoke tasks, so the task
would stay queued until a restart of the scheduler.
"""

from __future__ import annotations

import os
from typing import Any

from airflow.executors.local_executor import LocalExecutor


def name_log_host() -> str:
    """Return the host whose server shows the log of a running task (Airflow's `hostname_callable`)."""
    return os.environ.get("KALMAN_LOG_HOST", "localhost")


class Executor(LocalExecutor):
    """A LocalExecutor that can revoke a queued task."""

    def revoke_task(self, *, ti: Any) -> None:
        """Forget a queued task that has not begun.

        If a process begins this task later, Airflow lets only one of the two attempts begin.
        """
        self.queued_tasks.pop(ti.key, None)
        self.running.discard(ti.key)
