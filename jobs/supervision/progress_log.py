"""The log of a stream's progress: files of JSON lines, which are compacted into the table `progress/<model>`.

Each driver appends to a separate file, so that a micro-batch needs no commit and no Spark job. An object store cannot
append, so there a driver writes a small file per minute. A crash loses at most the lines of the last second (on an
object store, of the last minute). A compaction is one commit for many files:

1. the files are moved into a folder of the compaction;
2. their lines are appended to the table, in a transaction named after the folder;
3. the folder is removed.

If a compaction is interrupted, the next compaction completes its steps, so that each line is in the table once.
"""

from __future__ import annotations

import json
import time
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from jobs.storage.files import LocalFiles, SmallFiles
from jobs.storage.table_rows import read_table, to_rows
from jobs.storage.warehouse import Tables
from jobs.supervision.progress import COLUMNS, SCHEMA, parse_start_time

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.spark.warehouse import Warehouse

PART_BYTES = 4 << 20
"""Size in bytes at which a driver starts a new file."""
COMPACT_FILES = 100
"""Number of closed files from which the next driver compacts the files."""
REMOTE_SECONDS = 60.0
_COMPACTION = "fold-"


def format_table_name(model: str) -> str:
    """Return the name of a model's progress table."""
    return f"progress/{model}"


class ProgressLog:
    """The progress lines of a model's drivers, in files below `_progress/<model>`."""

    def __init__(self, warehouse: Warehouse, model: str) -> None:
        self.warehouse, self.model = warehouse, model
        self.path = warehouse.path(f"_progress/{model}")
        self.files = warehouse.files(f"_progress/{model}")

    def names(self) -> list[str]:
        """Return the sorted names of the files and of the folders of unfinished compactions."""
        return [name for name in self.files.names("") if not name.startswith("_")]

    def list_closed_files(self) -> list[str]:
        """Return the files to which no driver writes, which are all files but the last of each generation."""
        files = [name for name in self.names() if not name.startswith(_COMPACTION)]
        last = {_parse_generation(name): name for name in files}
        return [name for name in files if last[_parse_generation(name)] != name]

    def compact(self) -> int:
        """Move the lines of closed files into the table; return the number of these files."""
        with self.warehouse.lock(f"fold-progress-{self.model}"):
            for folder in (name for name in self.names() if name.startswith(_COMPACTION)):
                self._complete(folder)
            closed = self.list_closed_files()
            if closed:
                folder = f"{_COMPACTION}{uuid.uuid4().hex}"
                for name in closed:
                    self.files.rename(name, f"{folder}/{name}")
                self._complete(folder)
        return len(closed)

    def _complete(self, folder: str) -> None:
        self.warehouse.create(format_table_name(self.model), SCHEMA)
        rows = _read_typed(self.warehouse, [f"{self.path}/{folder}"]).coalesce(1)
        self.warehouse.append(rows, format_table_name(self.model), (folder, 1))
        self.files.remove_tree(folder)


def read_newest_record(warehouse: Tables, model: str, generation: str) -> dict[str, Any] | None:
    """Return the newest record of a generation; None if there are no records."""
    files = warehouse.files(f"_progress/{model}")
    for name in reversed([one for one in files.names("") if _parse_generation(one) == generation]):
        records = _read_records(files, name)
        if records:
            return records[-1]
    return None


def read_all_records(warehouse: Tables, model: str) -> list[dict[str, Any]]:
    """Return the records of a model's micro-batches from the table and the files, ordered by start time."""
    table = read_table(warehouse.root, format_table_name(model), list(COLUMNS))
    found = [] if table is None else to_rows(table)
    files = warehouse.files(f"_progress/{model}")
    for name in files.names(""):
        if name.endswith(".jsonl"):
            found += [{**one, "started_at": parse_start_time(one)} for one in _read_records(files, name)]
    return sorted(found, key=lambda one: one["started_at"])


def _read_records(files: SmallFiles, name: str) -> list[dict[str, Any]]:
    """Return the records in a file, without a last line that a killed driver left incomplete."""
    found = []
    for line in (files.read(name) or b"").decode(errors="replace").split("\n"):
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


class Writer:
    """Writes the records of a driver to files `<generation>.<epoch>.<part>.jsonl`."""

    def __init__(self, log: ProgressLog, generation: str, epoch: int) -> None:
        self.log = log
        self._stem = f"{generation}.{epoch:06d}"
        self._part = 0
        self._waiting: list[str] = []
        self._since = time.monotonic()
        self._started = False

    def write(self, records: list[dict[str, Any]], last: bool = False) -> None:
        """Write records; an object store gets them only once per minute, or if they are the `last` records."""
        self._waiting += [json.dumps(one) for one in records]
        if not self._waiting:
            return
        if not self._started:
            self._started = True
            if len(self.log.list_closed_files()) >= COMPACT_FILES:
                self.log.compact()
        files, content = self.log.files, ("\n".join(self._waiting) + "\n").encode()
        local = isinstance(files, LocalFiles)
        if local:
            full = files.append(self._name(), content) > PART_BYTES
        elif last or time.monotonic() - self._since > REMOTE_SECONDS:
            files.write(self._name(), content)
            self._part += 1
            self._since = time.monotonic()
            full = self._part % COMPACT_FILES == 0
        else:
            return
        self._waiting = []
        if full:
            self._part += local
            self.log.compact()

    def _name(self) -> str:
        return f"{self._stem}.{self._part:06d}.jsonl"


def progress_of(warehouse: Warehouse, model: str) -> DataFrame:
    """Return all progress records of a model, from the table and from files that are not compacted yet."""
    log = ProgressLog(warehouse, model)
    rows = warehouse.spark.createDataFrame([], SCHEMA)
    if warehouse.exists(format_table_name(model)):
        rows = rows.unionByName(warehouse.read(format_table_name(model)))
    files = [f"{log.path}/{name}" for name in log.names()]
    return rows.unionByName(_read_typed(warehouse, files)) if files else rows


def _read_typed(warehouse: Warehouse, paths: list[str]) -> DataFrame:
    return warehouse.spark.read.schema(SCHEMA).json(paths, mode="DROPMALFORMED").select(*COLUMNS)


def _parse_generation(name: str) -> str:
    return name.split(".")[0]
