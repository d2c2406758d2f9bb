"""Stand-in for a streaming query: Spark's steps between its checkpoint, a Delta source and `foreachBatch`.

In this order, as Spark takes them: the offsets of a micro-batch are fixed (by put-if-absent: a second query on the same
checkpoint fails there); the filter runs, and its states are written (`memory_state`); the sinks are called; the
micro-batch is committed (by put-if-absent); old offsets and commits are removed. After a restart a micro-batch with
offsets and without a commit runs again, from the states before it. A second thread uploads snapshots of the states.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pyspark.errors import PySparkException

from tests.protocol import world
from tests.protocol.memory_delta import Commit, Session, commit_at, read_latest
from tests.protocol.memory_files import MemoryFiles
from tests.protocol.memory_frame import Frame, parse_schema
from tests.protocol.memory_state import FORMER, QueryState, read_format
from tests.protocol.scheduler import MAINTENANCE

ROWS_A_FILE = 2
"""Rows of one file of a commit, so that a commit may have several."""

PACKETS = parse_schema(
    "kind int, rows bigint, key string, at bigint, y double, payload string, inputs bigint"
)
"""A packet of the operator's output: one row."""

RETAINED = 100
"""Micro-batches that Spark keeps in a checkpoint (`spark.sql.streaming.minBatchesToRetain`)."""


@dataclass(frozen=True)
class Source:
    """A Delta table that is read as a stream, and what is done to its rows."""

    path: str
    start: int
    max_files: int
    schema: Any
    steps: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def first(self) -> tuple[int, int]:
        """Return the offset before the first row."""
        return self.start, -1

    def newest(self) -> tuple[int, int]:
        """Return the offset after the last row of the table."""
        last = read_latest(self.path)
        assert last is not None
        return last.version + 1, -1

    def advance(self, offset: tuple[int, int], newest: tuple[int, int]) -> tuple[int, int]:
        """Return the offset after the next files."""
        left = self.max_files
        version, index = offset
        while version < newest[0]:
            files = _files(commit_at(self.path, version))
            while index + 1 < len(files):
                if not left:
                    return version, index
                index, left = index + 1, left - 1
            version, index = version + 1, -1
        return version, index

    def rows(self, session: Session, after: tuple[int, int], until: tuple[int, int]) -> Frame:
        """Return the rows between two offsets."""
        found: list[dict[str, Any]] = []
        for version in range(after[0], until[0] + 1):
            if version == until[0] and until[1] < 0:
                break
            first = after[1] + 1 if version == after[0] else 0
            last = until[1] + 1 if version == until[0] else None
            for rows in _files(commit_at(self.path, version))[first:last]:
                found += rows
        frame: Any = Frame(session, found, self.schema)
        for name, arguments in self.steps:
            frame = getattr(frame, name)(*arguments)
        return frame


def _files(commit: Commit) -> list[list[dict[str, Any]]]:
    if commit.operation == "OPTIMIZE":
        return []
    rows = list(commit.added)
    return [rows[place : place + ROWS_A_FILE] for place in range(0, len(rows), ROWS_A_FILE)]


@dataclass(frozen=True)
class StreamFrame:
    """A streaming data frame: its sources, each with the steps on its rows."""

    sparkSession: Session
    sources: tuple[Source, ...]
    processor: Any = None
    seeds: Frame | None = None

    @classmethod
    def load(cls, session: Session, path: str, options: Mapping[str, str]) -> StreamFrame:
        """Open a table as a stream."""
        last = read_latest(path)
        assert last is not None
        start, most = int(options.get("startingVersion", 0)), int(options.get("maxFilesPerTrigger", 1000))
        return cls(session, (Source(path, start, most, last.schema),))

    @property
    def columns(self) -> list[str]:
        return list(self.sources[0].schema.names)

    def _then(self, name: str, *arguments: Any) -> StreamFrame:
        return replace(
            self, sources=tuple(replace(s, steps=(*s.steps, (name, arguments))) for s in self.sources)
        )

    def filter(self, condition: Any) -> StreamFrame:
        return self._then("filter", condition)

    def select(self, *columns: Any) -> StreamFrame:
        return self._then("select", *columns)

    def withColumn(self, name: str, column: Any) -> StreamFrame:
        return self._then("withColumn", name, column)

    def mapInArrow(self, function: Any, schema: Any) -> StreamFrame:
        return self._then("mapInArrow", function, schema)

    def unionByName(self, other: StreamFrame) -> StreamFrame:
        return replace(self, sources=(*self.sources, *other.sources))

    def groupBy(self, name: str) -> StreamFrame:
        return self

    def transformWithStateInPandas(
        self, processor: Any, output: Any, mode: str, clock: str, seeds: Frame | None
    ) -> StreamFrame:
        return replace(self, processor=processor, seeds=seeds)

    @property
    def writeStream(self) -> QueryWriter:
        return QueryWriter(self)


@dataclass
class QueryWriter:
    """`DataFrame.writeStream`."""

    stream: StreamFrame
    sink: Callable[[Any, int], None] | None = None
    checkpoint: str = ""
    once: bool = True

    def queryName(self, name: str) -> QueryWriter:
        return self

    def foreachBatch(self, sink: Callable[[Any, int], None]) -> QueryWriter:
        self.sink = sink
        return self

    def option(self, name: str, value: Any) -> QueryWriter:
        if name == "checkpointLocation":
            self.checkpoint = value
        return self

    def trigger(self, availableNow: bool = False, processingTime: str | None = None) -> QueryWriter:
        self.once = availableNow
        return self

    def start(self) -> Query:
        assert self.sink is not None
        query = Query(self.stream, self.sink, self.checkpoint, self.once)
        here = world.current()
        thread = here.thread
        if thread is None:  # outside the simulation there is nobody to take turns with
            query.run()
        else:
            thread.scheduler.thread(thread.process, "query", query.run)
            thread.scheduler.thread(thread.process, MAINTENANCE, query.maintain)
        return query


@dataclass
class Query:
    """A streaming query, which runs in a thread of its own."""

    stream: StreamFrame
    sink: Callable[[Any, int], None]
    checkpoint: str
    once: bool
    isActive: bool = True
    lastProgress: dict[str, Any] | None = None
    status: dict[str, Any] = field(default_factory=lambda: {"isTriggerActive": False})
    _problem: PySparkException | None = None
    _stopped: bool = False

    def __post_init__(self) -> None:
        state_format = read_format(self.stream.sparkSession)
        assert state_format == (1 if FORMER.get() else 2), f"its states would be of format {state_format}"
        self._state = QueryState(self.checkpoint, state_format)

    def exception(self) -> PySparkException | None:
        return self._problem

    def stop(self) -> None:
        self._stopped = True

    def run(self) -> None:
        """Run micro-batches until none is left, or the query is stopped."""
        try:
            self._run()
        except PySparkException as problem:
            self._problem = problem
        except Exception as problem:
            self._problem = PySparkException(f"{type(problem).__name__}: {problem}")
            self._problem.__cause__ = problem
        finally:
            self.isActive = False

    def maintain(self) -> None:
        """Upload snapshots of the states while the query runs."""
        thread = world.current().thread
        assert thread is not None
        while thread.wait(lambda: self._state.due or not self.isActive, None) and self.isActive:
            self._state.upload()

    def _run(self) -> None:
        files = MemoryFiles(self.checkpoint)
        if files.read("metadata") is None:
            files.create("metadata", json.dumps({"id": self.checkpoint}).encode())
        numbers = {name: _numbers(files, name) for name in ("offsets", "commits")}
        batch = max(numbers["offsets"], default=-1)
        done = max(numbers["commits"], default=-1)
        if batch > done and not self._stopped:
            self._micro_batch(files, batch)
        newest = [source.newest() for source in self.stream.sources]
        while not self._stopped:
            if not self._plan(files, batch + 1, newest):
                if self.once:
                    return
                thread = world.current().thread
                assert thread is not None
                thread.wait(lambda: self._stopped, 1.0)
                newest = [source.newest() for source in self.stream.sources]
                continue
            batch += 1
            self._micro_batch(files, batch)

    def _plan(self, files: MemoryFiles, batch: int, newest: list[tuple[int, int]]) -> bool:
        """Fix the offsets of a micro-batch; return False if there are no new rows."""
        before = self._offsets(files, batch - 1)
        pairs = zip(self.stream.sources, before, newest, strict=True)
        after = [source.advance(start, end) for source, start, end in pairs]
        if after == before:
            return False
        lines = ["v1", json.dumps({"batchWatermarkMs": 0, "conf": {}})]
        for source, (version, index) in zip(self.stream.sources, after, strict=True):
            lines.append(
                json.dumps(
                    {
                        "sourceVersion": 1,
                        "reservoirId": commit_at(source.path, 0).table_id,
                        "reservoirVersion": version,
                        "index": index,
                        "isStartingVersion": False,
                    }
                )
            )
        if not files.create(f"offsets/{batch}", "\n".join(lines).encode()):
            raise PySparkException(f"another query has planned micro-batch {batch}")
        return True

    def _offsets(self, files: MemoryFiles, batch: int) -> list[tuple[int, int]]:
        if batch < 0:
            return [source.first() for source in self.stream.sources]
        content = files.read(f"offsets/{batch}")
        if content is None:
            raise PySparkException(f"offsets/{batch} is missing")
        found = [json.loads(line) for line in content.decode().splitlines()[2:]]
        return [(one["reservoirVersion"], one["index"]) for one in found]

    def _micro_batch(self, files: MemoryFiles, batch: int) -> None:
        self.status["isTriggerActive"] = True
        session = self.stream.sparkSession
        before, after = self._offsets(files, batch - 1), self._offsets(files, batch)
        pairs = zip(self.stream.sources, before, after, strict=True)
        rows = [row for source, start, end in pairs for row in source.rows(session, start, end).rows]

        def run_task() -> list[dict[str, Any]]:
            states = self._state.load(batch)
            seeds = self.stream.seeds.rows if batch == 0 and self.stream.seeds is not None else []
            packets = self.stream.processor(states, rows, seeds)
            self._state.save(states)
            return packets

        def evaluate() -> list[dict[str, Any]]:
            try:
                return run_task()
            except OSError:
                return run_task()  # Spark runs a task again that failed

        self.sink(Packets(session, evaluate), batch)
        if not files.create(f"commits/{batch}", self._state.commit()):
            raise PySparkException(f"another query has committed micro-batch {batch}")
        for folder in ("commits", "offsets"):
            old = f"{folder}/{batch - RETAINED}"
            if f"{self.checkpoint}/{old}" in world.current().files:
                files.remove(old)
        self.lastProgress = {"batchId": batch}
        self.status["isTriggerActive"] = False


class Packets:
    """The output of the filter, which runs when it is first asked for, as Spark's does."""

    def __init__(self, session: Session, evaluate: Callable[[], list[dict[str, Any]]]) -> None:
        self.sparkSession, self._evaluate = session, evaluate
        self._kept: Frame | None = None

    def persist(self) -> Packets:
        return self

    def unpersist(self) -> Packets:
        return self

    @property
    def _frame(self) -> Frame:
        if self._kept is None:
            self._kept = Frame(self.sparkSession, self._evaluate(), PACKETS)
        return self._kept

    def select(self, *columns: Any) -> Frame:
        return self._frame.select(*columns)

    def selectExpr(self, *names: str) -> Frame:  # noqa: N802
        return self._frame.select(*(name.rpartition(" AS ")[2] for name in names))

    def filter(self, condition: Any) -> Frame:
        return self._frame.filter(condition)


def _numbers(files: MemoryFiles, folder: str) -> list[int]:
    return sorted(int(name) for name in files.names(folder) if name.isdigit())
