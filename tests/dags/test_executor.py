"""The executor hands its processes no more tasks than it has processes, also after one of these was killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.executors.base_executor import BaseExecutor
from airflow.models.taskinstancekey import TaskInstanceKey
from airflow.utils.state import TaskInstanceState

from dags.kalman_dags.executor import Executor
from tests.support.airflow_api import wait_for

pytestmark = pytest.mark.airflow


class Work:
    """A task that runs until its file is removed."""

    success_state, failure_state = TaskInstanceState.SUCCESS, TaskInstanceState.FAILED
    running_state = TaskInstanceState.RUNNING  # callbacks and tests of connections report it, tasks do not

    def __init__(self, file: Path, number: int) -> None:
        self.file, self.key = file, TaskInstanceKey("dag", f"task{number}", "run", 1)
        self.display_name, self.ti = file.name, SimpleNamespace(priority_weight=1)
        self.file.write_text("")


def run_workload(workload: Work, **rest: Any) -> int:
    workload.file.with_suffix(".pid").write_text(str(os.getpid()))
    wait_for(lambda: not workload.file.exists(), 60, "the end of a task")
    return 0


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Executor]:
    monkeypatch.setattr(BaseExecutor, "run_workload", staticmethod(run_workload))
    assert multiprocessing.get_start_method() == "fork"
    executor = Executor(parallelism=2)
    executor.start()
    yield executor
    for process in executor.workers.values():
        process.kill()


def queue(executor: Executor, works: list[Work]) -> None:
    """Queue tasks as the scheduler does: as many as there are slots."""
    for work in works[: max(0, executor.slots_available)]:
        executor.queued_tasks[work.key] = work  # type: ignore[assignment]
        works.remove(work)
    executor.heartbeat()


def test_no_more_tasks_are_handed_out_than_processes_there_are(executor: Executor, tmp_path: Path) -> None:
    works = [Work(tmp_path / f"{number}", number) for number in range(5)]
    left = list(works)
    for _ in range(3):
        queue(executor, left)
        executor.sync()
    wait_for(lambda: len(list(tmp_path.glob("*.pid"))) == 2, 30, "two tasks")
    executor.sync()
    assert (len(left), executor.slots_available) == (3, 0)
    works[0].file.unlink()
    wait_for(lambda: executor.sync() or executor.slots_available == 1, 30, "a free slot")
    queue(executor, left)
    wait_for(lambda: works[2].file.with_suffix(".pid").exists(), 30, "the third task")
    assert (len(left), executor.slots_available) == (2, 0)


def test_a_process_without_a_task_has_no_last_one(executor: Executor, tmp_path: Path) -> None:
    work = Work(tmp_path / "0", 0)
    queue(executor, [work])
    pid = work.file.with_suffix(".pid")
    wait_for(lambda: pid.exists() and pid.read_text(), 30, "a task")
    executor.sync()
    assert executor._task_of[int(pid.read_text())] == work.key
    work.file.unlink()
    wait_for(lambda: executor.sync() or not any(executor._task_of.values()), 30, "the end of the task")
    assert not executor.running


def test_a_failed_start_of_a_process_keeps_the_queue(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = executor.activity_queue
    monkeypatch.setattr(multiprocessing.Process, "start", lambda process: os.fsencode(0))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        executor._spawn_worker()
    assert executor.activity_queue is tasks


def test_a_process_killed_at_once_frees_its_slot(executor: Executor, tmp_path: Path) -> None:
    """The executor learns of the death in the call that hands the task out."""
    work = Work(tmp_path / "0", 0)
    pid, check = work.file.with_suffix(".pid"), executor._check_workers

    def kill() -> None:
        wait_for(lambda: pid.exists() and pid.read_text(), 30, "a task")
        os.kill(int(pid.read_text()), signal.SIGKILL)
        executor.workers[int(pid.read_text())].join()
        check()

    executor._check_workers = kill  # type: ignore[method-assign]
    executor.queued_tasks[work.key] = work  # type: ignore[assignment,index]
    executor._process_workloads([work])
    assert not executor.running


def test_a_killed_process_frees_its_slot_and_no_other(executor: Executor, tmp_path: Path) -> None:
    works = [Work(tmp_path / f"{number}", number) for number in range(4)]
    left = list(works)
    queue(executor, left)
    pids = [work.file.with_suffix(".pid") for work in works]
    wait_for(lambda: all(pid.exists() and pid.read_text() for pid in pids[:2]), 30, "two tasks")
    os.kill(int(pids[0].read_text()), signal.SIGKILL)
    wait_for(lambda: executor.sync() or executor.slots_available > 0, 30, "a free slot")
    assert executor.running == {works[1].key}
    queue(executor, left)
    wait_for(lambda: executor.sync() or pids[2].exists(), 30, "the next task")
    assert (left, executor.slots_available) == ([works[3]], 0)
