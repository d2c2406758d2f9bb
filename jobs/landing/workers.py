"""Write pieces of files in worker processes on this machine.

The processes start when a command first has several tasks. Each process reads tasks from a pipe until the pipe is
closed, so that it ends with the command, even if the command is killed. The files that an unfinished task has written
never become part of a table.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.faults import find_fault
from jobs.core.settings import count_cores
from jobs.landing.written_pieces import WritingTask, WrittenPiece, write_pieces

_COMMAND = "from jobs.landing.workers import serve; serve"


class WorkerEnded(UserError):
    """Error for a process that ended during a task; no row of the task has landed."""


class Workers:
    """Runs tasks in this process and in other processes; by default there is one process for each core.

    Args:
        master: Spark's master URL. A number of local threads in this URL limits the number of processes.
    """

    def __init__(self, master: str = "") -> None:
        self.count = count_cores(master)
        self._others: list[_Worker] = []

    def start(self) -> None:
        """Start the other processes, unless they are already running."""
        while len(self._others) < self.count - 1:
            self._others.append(_Worker())

    def close(self) -> None:
        """End the other processes, even during a task."""
        others, self._others = self._others, []
        for one in others:
            one.end()

    def run(self, tasks: Sequence[WritingTask], on_read: Callable[[int], None]) -> list[WrittenPiece]:
        """Run tasks and return their results in the order of the tasks.

        Args:
            tasks: tasks of one group of files.
            on_read: called with the number of bytes read; the call may come from any thread.

        Raises:
            WorkerEnded: a process was killed.
            OSError: a file cannot be written.
        """
        left = deque(enumerate(tasks))
        found: dict[int, WrittenPiece] = {}
        errors: list[BaseException] = []

        def work(write: Callable[[WritingTask, Callable[[int], None]], WrittenPiece]) -> None:
            while not errors:
                try:
                    place, task = left.popleft()
                except IndexError:
                    return
                try:
                    found[place] = write(task, on_read)
                except BaseException as error:  # the first error is raised below
                    errors.append(error)

        if len(tasks) > 1:
            self.start()
        threads = [threading.Thread(target=work, args=(one.write,)) for one in self._others[: len(tasks) - 1]]
        for thread in threads:
            thread.start()
        work(write_pieces)
        if errors:
            self.close()  # stop the other tasks
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [found[place] for place in range(len(tasks))]


class _Worker:
    """Another process, and the pipe to this process."""

    def __init__(self) -> None:
        path = os.pathsep.join(one or os.getcwd() for one in sys.path)
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{_COMMAND}({theirs.fileno()})"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # output of libraries must not mix with the output of the command
                env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            )

    def write(self, task: WritingTask, on_read: Callable[[int], None]) -> WrittenPiece:
        """Run a task in the other process, and return the result.

        Raises:
            WorkerEnded: the process was killed.
        """
        try:
            self._pipe.send(task)
            while isinstance(answer := self._pipe.recv(), int):
                on_read(answer)
        except (EOFError, ConnectionError) as error:
            code = self._process.wait()
            how = f"was killed (signal {-code})" if code < 0 else f"ended with exit code {code}"
            raise WorkerEnded(
                f"a process that read {task.files[0].file.path} {how}, and nothing of the file has landed: see that "
                "the machine has memory enough, and run the command again",
                RUN_FAILED,
            ) from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._pipe.close()


def serve(handle: int) -> None:
    """Run tasks from a pipe until the pipe is closed; send back the bytes read, and then the result or an error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command itself ends its processes
    with Connection(handle) as pipe:
        while True:
            try:
                task = pipe.recv()
            except (EOFError, ConnectionError):
                return
            try:
                pipe.send(write_pieces(task, pipe.send))
            except Exception as error:
                fault = find_fault(error)  # the pipe loses the causes of an error
                with suppress(ConnectionError):
                    pipe.send(error if fault is None else UserError(fault, RUN_FAILED))
