"""Run a verb as `kalman-pipeline` does, and strike its own processes at a commit point or after some seconds.

    KALMAN_AIM='{...}' python -m tests.jobs.soak.aimed stream --model walk

Production code is not changed for it: the functions of delta-rs, of Delta in Java and of the warehouse's small files
through which every verb commits are wrapped, each call is a *commit point* with a name, as `append estimates/walk`, and
every point that was passed is written to a file. Python stands exactly before or after a commit when the signal is
sent, so a kill of Java alone is aimed, too.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import psutil
from delta.tables import DeltaMergeBuilder, DeltaOptimizeBuilder, DeltaTable
from deltalake import DeltaTable as DeltaLog
from deltalake.table import TableAlterer, TableMerger
from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from jobs.cli import main
from jobs.spark import session as spark_sessions
from jobs.storage.files import LocalFiles
from jobs.storage.object_files import ObjectFiles
from jobs.storage.table_log import FileTable
from jobs.streaming.micro_batch import MicroBatchWriter

VARIABLE = "KALMAN_AIM"
STATE_FORMAT = "KALMAN_STATE_FORMAT"
PATIENCE_SECONDS = 3.0
"""How long a commit waits for the lock of another process; the lock of a frozen one is then taken for gone."""


@dataclass(frozen=True)
class Aim:
    """Where and how the processes of a verb are struck.

    victim: python, java or both; how: kill or freeze; point, nth and edge (before or after): a commit point; without
    one, when a file appears: `folders` is a pattern of folders, `file` a regular expression of names, whose first group
    is a number of at least `least`; without both, `seconds` after Spark's start. notes: the folder for what was seen.
    far: as if on a machine of its own, whose locks others do not see.
    """

    victim: str
    how: str
    notes: str
    point: str | None = None
    nth: int = 1
    edge: str = "after"
    folders: str | None = None
    file: str = ""
    least: int = 0
    seconds: float = 0.0
    far: bool = False

    def text(self) -> str:
        return json.dumps(asdict(self))


class Striker:
    """Counts the commit points that are passed, and sends the signal at the one that is aimed at."""

    def __init__(self, aim: Aim, root: str) -> None:
        self.aim, self.root = aim, root.rstrip("/")
        self.seen: Counter[str] = Counter()
        self.trace = Path(aim.notes, "trace")
        self.lock = threading.Lock()
        self.struck = False

    def name(self, what: str, path: object) -> str | None:
        """Return a commit point's name; None for a path outside the warehouse."""
        text = re.sub(r"^file:/+", "/", str(path))
        if not text.startswith(self.root + "/"):
            return None
        place = text[len(self.root) + 1 :]
        place = re.sub(r"-g\d+", "", place)
        place = re.sub(r"[0-9a-f]{8,}|\d+", "N", place)
        return f"{what} {place}"

    def around(self, name: str | None, call: Callable[[], Any]) -> Any:
        """Make a call that is a commit point; the signs of life that a thread gives are none."""
        if name is None or threading.current_thread().name == "heartbeat":
            return call()
        with self.lock:
            self.seen[name] += 1
            count = self.seen[name]
        self.pass_by(name, count, "before")
        done = call()
        self.pass_by(name, count, "after")
        return done

    def note(self, line: str) -> None:
        with self.lock, self.trace.open("a") as trace:
            trace.write(f"{line}\n")

    def pass_by(self, name: str, count: int, edge: str) -> None:
        self.note(f"{edge} {count} {name}")
        if (name, count, edge) == (self.aim.point, self.aim.nth, self.aim.edge):
            self.strike()

    def later(self) -> None:
        def wait() -> None:
            if self.aim.folders is None:
                time.sleep(self.aim.seconds)
            else:
                self.await_file(self.aim.folders)
            self.strike()

        if self.aim.point is None:
            threading.Thread(target=wait, name="striker", daemon=True).start()

    def await_file(self, folders: str) -> None:
        """Wait until the file is there, looking some thousand times a second: some files have a name for so long."""
        pattern, place = re.compile(self.aim.file), 0
        found: list[str] = []
        while True:
            if place % 1000 == 0:
                found = glob.glob(folders)
            place += 1
            for folder in found:
                for name in os.listdir(folder):
                    match = pattern.fullmatch(name)
                    if match is not None and int(match[1]) >= self.aim.least:
                        self.note(f"seen {name}")
                        return
            time.sleep(0.0003)

    def strike(self) -> None:
        with self.lock:
            if self.struck:
                return
            self.struck = True
            java = [one.pid for one in psutil.Process().children(recursive=True) if one.name() == "java"]
            noted = Path(self.aim.notes, "struck")
            noted.with_suffix(".new").write_text(json.dumps({"at": time.time(), "java": java}))
            noted.with_suffix(".new").rename(noted)
        which = signal.SIGKILL if self.aim.how == "kill" else signal.SIGSTOP
        if self.aim.victim == "both":
            os.killpg(os.getpgrp(), which)
        elif self.aim.victim == "java":
            for pid in java:
                os.kill(pid, which)
        else:
            os.kill(os.getpid(), which)


def wrapped(owner: Any, attribute: str, striker: Striker, name: Callable[..., str | None]) -> None:
    """Make every call of a method a commit point; name: from the method's arguments."""
    before = getattr(owner, attribute)

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        point = name(self, *arguments, **options)
        return striker.around(point, lambda: before(self, *arguments, **options))

    setattr(owner, attribute, call)


def watch(striker: Striker) -> None:
    """Wrap what every verb commits through."""
    last = threading.local()  # a table's location, which what changes it does not tell
    for_path, change, overwrite = DeltaTable.forPath, FileTable.change, FileTable.overwrite

    def remembered(spark: Any, path: str, *rest: Any) -> Any:
        last.path = path
        return for_path(spark, path, *rest)

    def changed(table: FileTable, *arguments: Any) -> None:
        last.path = table.path
        change(table, *arguments)

    def replaced(table: FileTable, *arguments: Any, **options: Any) -> int:
        point = striker.name("replace in", table.path)
        return striker.around(point, lambda: overwrite(table, *arguments, **options))

    setattr(DeltaTable, "forPath", staticmethod(remembered))  # noqa: B010
    setattr(FileTable, "change", changed)  # noqa: B010
    setattr(FileTable, "overwrite", replaced)  # noqa: B010
    for owner, attribute, what in (
        (DeltaLog, "update", "update"),
        (TableMerger, "execute", "merge into"),
        (TableAlterer, "add_columns", "alter"),
        (DeltaTable, "delete", "delete from"),
        (DeltaMergeBuilder, "execute", "merge into"),
        (DeltaOptimizeBuilder, "executeCompaction", "compact"),
    ):
        wrapped(owner, attribute, striker, lambda *_, what=what, **__: striker.name(what, last.path))
    wrapped(FileTable, "_write", striker, lambda table, *_: striker.name("append", table.path))
    wrapped(SparkSession, "sql", striker, lambda _, text, *__, **___: vacuum(striker, text))
    write = MicroBatchWriter.__call__

    def written(self: Any, *arguments: Any) -> None:
        striker.around("micro-batch planned", lambda: None)  # Spark has written its offsets
        write(self, *arguments)
        striker.around("micro-batch written", lambda: None)  # Spark has not noted that yet

    setattr(MicroBatchWriter, "__call__", written)  # noqa: B010
    for owner, (attribute, what) in product(
        (LocalFiles, ObjectFiles),
        (
            ("write", "write"),
            ("create", "write"),
            ("remove", "remove"),
            ("remove_tree", "remove"),
            ("rename", "rename"),
        ),
    ):
        wrapped(
            owner,
            attribute,
            striker,
            lambda files, name, *_, what=what: striker.name(what, f"{files.root}/{name}"),
        )


def vacuum(striker: Striker, text: str) -> str | None:
    found = re.match(r"VACUUM delta\.`(.*?)`", text)
    return None if found is None else striker.name("vacuum", found[1])


def set_state_format() -> None:
    """Let streams write the state store's format that KALMAN_STATE_FORMAT names, to see the soak find what 1 does."""
    wanted, start = os.environ.get(STATE_FORMAT), DataStreamWriter.start
    if not wanted:
        return

    def started(self: Any, *arguments: Any, **options: Any) -> Any:
        self._spark.conf.set("spark.sql.streaming.stateStore.checkpointFormatVersion", wanted)
        return start(self, *arguments, **options)

    setattr(DataStreamWriter, "start", started)  # noqa: B010


def alone_on_its_machine() -> None:
    """Let this process share no lock of the file system with one that is frozen, as on another machine.

    Two processes that run still commit one after the other, as an object store would have it.
    """
    lock = fcntl.flock

    def patient(handle: Any, operation: int) -> None:
        if operation & fcntl.LOCK_NB:
            return
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            try:
                return lock(handle, operation | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.05)

    fcntl.flock = patient


def run() -> None:
    aim = Aim(**json.loads(os.environ.pop(VARIABLE)))
    striker = Striker(aim, os.environ["KALMAN_WAREHOUSE"])
    watch(striker)
    set_state_format()
    if aim.far:
        alone_on_its_machine()
    make = spark_sessions.spark_session

    def made(*arguments: Any, **options: Any) -> Any:
        session = make(*arguments, **options)
        striker.later()
        return session

    spark_sessions.spark_session = made
    main()


if __name__ == "__main__":
    sys.exit(run())
