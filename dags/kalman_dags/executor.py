"""Airflow's executor of local processes, which keeps to its parallelism and can revoke a task that never began.

Airflow 3.3's local executor does not count the tasks that it has handed to its processes. So the scheduler queues every
task that is due, and those that wait for a process longer than `task_queued_timeout` would count as lost.

A task is queued until its process reports that it runs. If the process is killed before this report, Airflow does not
notice, because a task that does not run has no heartbeat to miss. After `task_queued_timeout` the scheduler asks the
executor to revoke the queued task, and queues it again. Airflow's own local executor cannot revoke tasks, so the task
would stay queued until a restart of the scheduler.

If a process is killed between taking a task and reporting it, the slot of the task stays taken until the scheduler
revokes the task. If a process is killed while it waits for a task, it keeps the lock of Airflow's queue, and no other
process gets a task until a restart of the scheduler.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from typing import Any

from airflow.executors.local_executor import LocalExecutor
from airflow.utils.state import TaskInstanceState


def name_log_host() -> str:
    """Return the host whose server shows the log of a running task (Airflow's `hostname_callable`)."""
    return os.environ.get("KALMAN_LOG_HOST", "localhost")


class _ObservedQueue:
    """The executor's queue of tasks in one of its processes, which reports to the executor which task it takes."""

    def __init__(self, tasks: Any, taken: Any) -> None:
        self._tasks, self._taken = tasks, taken

    def get(self) -> Any:
        # A pipe takes so short a message in one piece, so no lock is needed that a killed process would keep.
        self._taken.send((os.getpid(), None))  # the last task has ended
        task = self._tasks.get()
        self._taken.send((os.getpid(), None if task is None else task.key))
        return task


class Executor(LocalExecutor):
    """A LocalExecutor that counts its tasks and can revoke a queued one."""

    def start(self) -> None:
        self._taken, self._notes = multiprocessing.Pipe(duplex=False)
        self._task_of: dict[int, Any] = {}
        super().start()

    def _spawn_worker(self) -> None:
        tasks = self.activity_queue
        self.activity_queue = _ObservedQueue(tasks, self._notes)  # type: ignore[assignment]
        try:
            super()._spawn_worker()
        finally:
            self.activity_queue = tasks

    def _process_workloads(self, workload_list: Sequence[Any]) -> None:
        # Before: the executor looks for killed processes, which may have taken one of these tasks, in the same call.
        self.running.update(one.key for one in workload_list)
        super()._process_workloads(workload_list)

    def change_state(self, key: Any, state: Any, info: Any = None, remove_running: bool = True) -> None:
        super().change_state(key, state, info, remove_running and state != TaskInstanceState.RUNNING)

    def _check_workers(self) -> None:
        before = set(self.workers)
        super()._check_workers()
        while self._taken.poll():
            process, task = self._taken.recv()
            self._task_of[process] = task
        for process in before - set(self.workers):
            self.running.discard(self._task_of.pop(process, None))  # a killed process reports no result

    def revoke_task(self, *, ti: Any) -> None:
        """Forget a queued task that has not begun.

        If a process begins this task later, Airflow lets only one of the two attempts begin.
        """
        self.queued_tasks.pop(ti.key, None)
        self.running.discard(ti.key)
