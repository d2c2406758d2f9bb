"""Where a stream's progress is written: lines of JSON beside the tables, folded into `progress/<model>` now and then.

A line is an append to a file of the driver's own (on an object store, which cannot append, a small file for the lines
of a minute), so a micro-batch costs no commit and no Spark job. A driver that is killed leaves its lines; at most those
not yet written, of a second (a minute), are lost. Folding is one commit for many files:

1. the files are moved into a folder of this fold;
2. its lines are appended to the table, in a transaction named after the fold;
3. the folder is removed.

Killed in between, the next fold ends it, and a line is in the table once.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import TYPE_CHECKING, Any

from jobs.observability.progress import COLUMNS, SCHEMA
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.files import LocalFiles, hadoop_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PART_BYTES = 4 << 20
"""A driver begins a new file when its file is longer than this."""
FOLD_FILES = 100
"""So many files of drivers that have ended are folded when the next driver starts."""
REMOTE_SECONDS = 60.0
_FOLD = "fold-"


def table_of(model: str) -> str:
    """Return the name of a model's progress table."""
    return f"progress/{model}"


class ProgressLog:
    """The lines of a model's drivers, below `_progress/<model>`."""

    def __init__(self, warehouse: Warehouse, model: str) -> None:
        self.warehouse, self.model = warehouse, model
        self.path = warehouse.path(f"_progress/{model}")
        self.files = hadoop_files(warehouse, f"_progress/{model}")

    def names(self) -> list[str]:
        """Return the names of the files and of unfinished folds, sorted."""
        return [name for name in self.files.names("") if not name.startswith("_")]

    def read(self, name: str) -> list[dict[str, Any]]:
        """Return the records of a file, without a last line that was cut short."""
        text = (self.files.read(name) or b"").decode(errors="replace")
        return [json.loads(line) for line in text.split("\n")[:-1] if line]

    def newest(self, generation: str) -> dict[str, Any] | None:
        """Return the newest record of a generation, None if there is none."""
        for name in reversed([one for one in self.names() if _generation_of(one) == generation]):
            records = self.read(name)
            if records:
                return records[-1]
        return None

    def closed(self) -> list[str]:
        """Return the files that nobody writes to: of each generation all but the last."""
        files = [name for name in self.names() if not name.startswith(_FOLD)]
        last = {_generation_of(name): name for name in files}
        return [name for name in files if last[_generation_of(name)] != name]

    def fold(self) -> int:
        """Move the lines of closed files into the table; return how many files."""
        with self.warehouse.lock(f"fold-progress-{self.model}"):
            for folder in (name for name in self.names() if name.startswith(_FOLD)):
                self._end(folder)
            closed = self.closed()
            if closed:
                folder = f"{_FOLD}{uuid.uuid4().hex}"
                for name in closed:
                    self.files.rename(name, f"{folder}/{name}")
                self._end(folder)
        return len(closed)

    def _end(self, folder: str) -> None:
        self.warehouse.create(table_of(self.model), SCHEMA)
        rows = _typed(self.warehouse, [f"{self.path}/{folder}"]).coalesce(1)
        self.warehouse.append(rows, table_of(self.model), (folder, 1))
        self.files.remove_tree(folder)


class Writer:
    """Write a driver's records: `<generation>.<epoch>.<part>.jsonl`."""

    def __init__(self, spool: ProgressLog, generation: str, epoch: int) -> None:
        self.spool = spool
        self._stem = f"{generation}.{epoch:06d}"
        self._part = 0
        self._waiting: list[str] = []
        self._since = time.monotonic()
        self._begun = False

    def write(self, records: list[dict[str, Any]], last: bool = False) -> None:
        """Write records; on an object store when a minute has passed, or with the `last` ones."""
        self._waiting += [json.dumps(one) for one in records]
        if not self._waiting:
            return
        if not self._begun:
            self._begun = True
            if len(self.spool.closed()) >= FOLD_FILES:
                self.spool.fold()
        files, content = self.spool.files, ("\n".join(self._waiting) + "\n").encode()
        local = isinstance(files, LocalFiles)
        if local:
            full = files.append(self._name(), content) > PART_BYTES
        elif last or time.monotonic() - self._since > REMOTE_SECONDS:
            files.write(self._name(), content)
            self._part += 1
            self._since = time.monotonic()
            full = self._part % FOLD_FILES == 0
        else:
            return
        self._waiting = []
        if full:
            self._part += local
            self.spool.fold()

    def _name(self) -> str:
        return f"{self._stem}.{self._part:06d}.jsonl"


def progress_of(warehouse: Warehouse, model: str) -> DataFrame:
    """Return all progress of a model: what is in its table, and what still waits to be folded."""
    spool = ProgressLog(warehouse, model)
    rows = warehouse.spark.createDataFrame([], SCHEMA)
    if warehouse.exists(table_of(model)):
        rows = rows.unionByName(warehouse.read(table_of(model)))
    files = [f"{spool.path}/{name}" for name in spool.names()]
    return rows.unionByName(_typed(warehouse, files)) if files else rows


def _typed(warehouse: Warehouse, paths: list[str]) -> DataFrame:
    return warehouse.spark.read.schema(SCHEMA).json(paths, mode="DROPMALFORMED").select(*COLUMNS)


def _generation_of(name: str) -> str:
    return name.split(".")[0]
