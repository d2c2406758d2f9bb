"""The progress record of a micro-batch, the lag of a stream behind its source, and the log of progress.

None of these needs a Spark job. The log is files of JSON lines, which are compacted into the table `progress/<model>`.
Each driver appends to a separate file, so that a micro-batch needs no commit. An object store cannot append, so there a
driver writes a small file per minute. A crash loses at most the lines of the last second (on an object store, of the
last minute). A compaction is one commit for many files:

1. the files are moved into a folder of the compaction;
2. their lines are appended to the table, in a transaction named after the folder;
3. the folder is removed.

If a compaction is interrupted, the next compaction completes its steps, so that each line is in the table once.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from jobs.storage.files import LocalFiles, SmallFiles
from jobs.storage.table_rows import read_table, to_rows
from jobs.storage.tables import measurements
from jobs.storage.warehouse import Tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.spark.warehouse import Warehouse


SCHEMA = """
    model string, generation string, run string, batch_id bigint, started_at timestamp, seconds double,
    rows bigint, estimated bigint, quarantined bigint, late bigint, bad_state bigint, expired bigint,
    rows_per_second double, durations map<string, bigint>, state_rows bigint, state_bytes bigint,
    watermark timestamp, position string, lag_rows bigint, lag_seconds double
"""
"""Columns of the table `progress/<model>`; the fields of a record in JSON have the same names."""
COLUMNS = tuple(part.strip().split(" ")[0] for part in SCHEMA.replace("<string, bigint>", "").split(","))
OUTCOMES = ("late", "bad_state", "expired")
"""Counts of the sink, besides `estimated` and `quarantined`, that have a separate column."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Lag(NamedTuple):
    """The lag of a stream behind its source: number of waiting rows, and waiting time of the first; None if unknown."""

    rows: int | None = None
    seconds: float | None = None


def record(
    progress: dict[str, Any], counts: dict[str, int], lag: Lag, model: str, generation: str, run: str
) -> dict[str, Any]:
    """Return the record of a micro-batch.

    Args:
        progress: Spark's `StreamingQueryProgress` as JSON.
        counts: numbers of rows from the sink: `estimated`, `quarantined`, and any of `OUTCOMES`; empty if unknown. If
            the stream's state has a watermark, also the `watermark` in microseconds.
        lag: lag of the stream.
        model: name of the model.
        generation: name of the stream's generation.
        run: id of the driver's run.
    """
    durations = {name: int(value) for name, value in (progress.get("durationMs") or {}).items()}
    seconds = durations.get("triggerExecution", 0) / 1000
    operators = progress.get("stateOperators") or []
    sources = progress.get("sources") or [{}]
    read = int(progress.get("numInputRows") or 0)
    rows = counts.get("estimated", 0) + counts.get("quarantined", 0) if counts else read
    watermark = (progress.get("eventTime") or {}).get("watermark")
    if "watermark" in counts:
        watermark = (EPOCH + timedelta(microseconds=counts["watermark"])).isoformat()
    return {
        "model": model,
        "generation": generation,
        "run": run,
        "batch_id": int(progress["batchId"]),
        "started_at": progress["timestamp"],
        "seconds": seconds,
        "rows": rows,
        "estimated": counts.get("estimated"),
        "quarantined": counts.get("quarantined"),
        **{name: counts.get(name, 0) if counts else None for name in OUTCOMES},
        "rows_per_second": rows / seconds if seconds else None,
        "durations": durations,
        "state_rows": sum(int(one.get("numRowsTotal") or 0) for one in operators),
        "state_bytes": sum(int(one.get("memoryUsedBytes") or 0) for one in operators),
        # Spark reports the year 1970 before the first watermark.
        "watermark": None if watermark is None or watermark.startswith("1970-01-01T00:00:00") else watermark,
        "position": json.dumps(sources[0].get("endOffset")),
        "lag_rows": lag.rows,
        "lag_seconds": lag.seconds,
    }


def parse_start_time(one: dict[str, Any]) -> datetime:
    """Return the start time of a record's micro-batch, from the record's JSON."""
    return datetime.fromisoformat(one["started_at"]).astimezone(UTC)


def parse_end_time(one: dict[str, Any]) -> datetime:
    """Return the end time of a record's micro-batch, from the record's JSON."""
    return parse_start_time(one) + timedelta(seconds=one["seconds"])


def has_executed(progress: dict[str, Any]) -> bool:
    """Return whether a progress report belongs to a micro-batch that ran; an idle query also reports progress."""
    return "addBatch" in (progress.get("durationMs") or {})


def count_offsets_behind(source: dict[str, Any]) -> int | None:
    """Return the lag in messages over all topics and partitions; None if the source is not Kafka."""
    latest, end = source.get("latestOffset"), source.get("endOffset")
    if not (_is_by_topic(latest) and _is_by_topic(end)):
        return None
    return sum(
        max(0, int(newest) - int(end.get(topic, {}).get(partition, newest)))
        for topic, partitions in latest.items()
        for partition, newest in partitions.items()
    )


def _is_by_topic(offset: Any) -> TypeGuard[dict[str, dict[str, Any]]]:
    return isinstance(offset, dict) and all(isinstance(value, dict) for value in offset.values())


MOST_VERSIONS = 1000
"""Maximum number of versions that one measurement reads; a larger lag is complete after several measurements."""

Reader = Callable[[int], str | None]
"""Function that returns the text of a version's file in the Delta log; None if the version does not exist."""
_WRITER = re.compile(r'"appId":"([^/"]+)/')
"""The generation that made a commit, in the name of its transaction."""


class TableLag:
    """Counts the rows in table versions that a stream has not read yet; the log file of each version is read once."""

    def __init__(self, read: Reader, now: Callable[[], float] = time.time, most: int = MOST_VERSIONS) -> None:
        self._read, self._now, self._most = read, now, most
        self._known: dict[int, tuple[int, float]] = {}

    def measure(self, done: int) -> Lag:
        """Return the lag of a stream that has read all versions up to `done`."""
        for version in [one for one in self._known if one <= done]:
            del self._known[version]
        version = max(self._known, default=done) + 1
        for _ in range(self._most):
            text = self._read(version)
            if text is None:
                break
            self._known[version] = _count_added_rows(text)
            version += 1
        waiting = [(rows, landed) for rows, landed in self._known.values() if rows]
        if not waiting:
            return Lag(0, 0.0)
        return Lag(sum(rows for rows, _ in waiting), max(0.0, self._now() - min(at for _, at in waiting)))


def _count_added_rows(log: str) -> tuple[int, float]:
    """Return the number of rows that a version added, and the commit time of the version (seconds since 1970)."""
    for line in log.splitlines():
        action = json.loads(line) if line.strip() else {}
        commit = action.get("commitInfo")
        if commit is not None:
            rows = (commit.get("operationMetrics") or {}).get("numOutputRows") or 0
            return int(rows) if commit.get("operation") == "WRITE" else 0, float(commit["timestamp"]) / 1000
    return 0, 0.0


def measure_table_lag(warehouse: Tables, table: str, done: int, skip: Collection[str] = ()) -> Lag:
    """Return the lag of a stream that has read all versions of a table up to `done`; `skip`: generations to ignore."""
    return TableLag(_build_reader(warehouse, table, skip), most=1_000_000).measure(done)


def build_lag_meter(warehouse: Tables, model: str) -> Callable[[dict[str, Any]], Lag]:
    """Return a function that computes the lag of a stream behind its table or topic from the progress of the source."""
    table = TableLag(_build_reader(warehouse, measurements(model)))

    def lag(source: dict[str, Any]) -> Lag:
        end = source.get("endOffset")
        if isinstance(end, dict) and "reservoirVersion" in end:
            return table.measure(int(end["reservoirVersion"]) - 1)
        return Lag(count_offsets_behind(source))

    return lag


def _build_reader(warehouse: Tables, table: str, skip: Collection[str] = ()) -> Reader:
    def read(version: int) -> str | None:
        content = warehouse.read_commit(table, version)
        text = None if content is None else content.decode()
        writer = _WRITER.search(text) if text and skip else None
        return "" if writer is not None and writer[1] in skip else text

    return read


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
    mine = [one for one in files.names("") if _parse_generation(one) == generation]
    found = (_read_records(files, name) for name in reversed(mine))
    return next((records[-1] for records in found if records), None)


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
    for line in (files.read(name, 4 * PART_BYTES) or b"").decode(errors="replace").split("\n"):
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
