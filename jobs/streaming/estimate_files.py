"""Write estimates as Parquet files in the operator's tasks, instead of returning them to Spark as packets.

Moving rows out of a Python worker (to Java, to a cache, back to Python, to Java's rows) costs more than the filter.
So the tasks write Parquet files, and return one small row for each file. A file joins the table only when the driver
commits it, after its row has arrived. The files of a task that failed or ran twice are not part of any commit.

The driver sends the target folder to the tasks of each micro-batch in a job property.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark import TaskContext

from jobs.core.stopwatch import UNPACK_ESTIMATES, WRITE, step
from jobs.state.encoding.estimates import ROWS_A_PACKET, EstimateFormat, build_table_batch, estimate_batch
from jobs.state.encoding.packets import OutputPacket
from jobs.storage.part_files import PartFile, PartWriter, name_attempt, remove
from jobs.storage.table_rows import open_parquet
from jobs.streaming.processors import DelegatingProcessor

PROPERTY = "kalman.estimates"
"""Name of the job property with the target folder for a micro-batch's estimates."""

FILES = {
    OutputPacket.ESTIMATES: OutputPacket.ESTIMATES_FILE,
    OutputPacket.CORRECTION: OutputPacket.CORRECTION_FILE,
}
"""For each kind of packets in a file, the kind of the row that represents the file."""


class EstimateTarget(NamedTuple):
    """Target of a micro-batch's estimates, and the columns that have one value for the whole micro-batch.

    folder: folder of the table. attempt: unique text for this attempt to write, part of the names of its files.
    file_bytes: size of a full file. constants: values of the columns by name.
    """

    folder: str
    attempt: str
    file_bytes: int
    constants: dict[str, Any]

    def encode(self) -> str:
        """Return the target as text."""
        return json.dumps(self._asdict())

    @classmethod
    def decode(cls, text: str) -> EstimateTarget:
        """Decode the text that `encode` returned."""
        return cls(**json.loads(text))


class EstimateRows(NamedTuple):
    """Converter from packets of estimates to rows of the table.

    estimates: format of the packets. schema: columns of the rows in the table, including `correction` if estimates may
    be corrected.
    """

    estimates: EstimateFormat
    schema: pa.Schema

    def batch(self, packet: bytes, target: EstimateTarget, kind: OutputPacket) -> pa.RecordBatch:
        """Return the rows of a packet."""
        found = estimate_batch(self.estimates, self.estimates.layout.decode(packet))
        constants = {**target.constants, "correction": kind == OutputPacket.CORRECTION}
        return build_table_batch(found, self.schema, constants)


class EstimateWriter(DelegatingProcessor):
    """Wrapper that writes the processor's packets of estimates to files, and yields a row for each file."""

    def __init__(self, inner: Any, rows: EstimateRows) -> None:
        super().__init__(inner)
        self._rows = rows

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[Any]:  # noqa: N802
        """Let the processor apply the rows."""
        return self._written(self.inner.handleInputRows(key, rows, timerValues))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:  # noqa: N802
        """Let the processor handle its timers."""
        return self._written(self.inner.handleExpiredTimer(key, timerValues, expiredTimerInfo))

    def _written(self, frames: Iterable[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        context = TaskContext.get()
        assert context is not None
        told = context.getLocalProperty(PROPERTY)
        assert told is not None, "the driver tells where estimates go"
        target = EstimateTarget.decode(told)
        task = name_attempt(context.partitionId(), target.attempt, context.stageId(), context.taskAttemptId())
        yield from self._write_files(frames, target, task)

    def _write_files(
        self, frames: Iterable[pd.DataFrame], target: EstimateTarget, name: str
    ) -> Iterator[pd.DataFrame]:
        """Write packets of estimates as they arrive; yield the other packets, and a row for each file."""
        folder = target.folder
        writers = {kind: PartWriter(folder, name, target.file_bytes) for kind in FILES}
        complete: list[PartFile] = []
        try:
            for frame in frames:
                mine = frame["kind"].isin(list(FILES)).to_numpy()
                for number, payload in zip(frame["kind"][mine], frame["payload"][mine], strict=True):
                    kind = OutputPacket(number)
                    with step(UNPACK_ESTIMATES):
                        rows = self._rows.batch(bytes(payload), target, kind)
                    with step(WRITE):
                        done = writers[kind].add(rows)
                    complete += done
                    yield from _build_rows(done, kind)
                if not mine.all():
                    yield frame.loc[~mine]
            for kind, writer in writers.items():
                with step(WRITE):
                    done = writer.end()
                complete += done
                yield from _build_rows(done, kind)
        except BaseException as problem:
            for writer in writers.values():
                writer.abandon()
            if isinstance(problem, Exception):
                # The attempt has failed, and after a full disk the next attempt needs the space.
                remove(folder, complete)
            raise


def _build_rows(parts: list[PartFile], kind: OutputPacket) -> Iterator[pd.DataFrame]:
    for part in parts:
        yield pd.DataFrame({"kind": [FILES[kind]], "rows": [part.rows], "payload": [part.encode()]})


Along = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def build_file_reader(folder: str, names: dict[int, list[str]], schema: pa.Schema, along: Along) -> Along:
    """Return a function that reads the rows of given partitions from their files, in order, and applies `along`.

    Args:
        folder: path or URI of the table of the files.
        names: names of the files of each partition; partitions without files are left out.
        schema: schema of the columns to read.
        along: function from the batches of rows of a partition to the result.
    """

    def batches(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                for name in names.get(number, []):
                    with open_parquet(folder, name) as file:
                        for rows in file.iter_batches(batch_size=ROWS_A_PACKET, columns=schema.names):
                            yield rows.select(schema.names).cast(schema)

    return lambda numbers: along(batches(numbers))


def pass_unchanged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield all rows unchanged."""
    yield from batches


def select_last_of_runs(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the last row of each run of rows with the same key."""
    held: pa.RecordBatch | None = None  # the next batch may have more rows of its key
    for batch in batches:
        if batch.num_rows == 0:
            continue
        key = batch.column("key")
        if held is not None and held.column("key")[0] != key[0]:
            yield held
        codes = key.dictionary_encode().indices.to_numpy(zero_copy_only=False)
        last = batch.take(pa.array(np.flatnonzero(np.append(codes[1:] != codes[:-1], True))))
        if last.num_rows > 1:
            yield last.slice(0, last.num_rows - 1)
        held = last.slice(last.num_rows - 1)
    if held is not None:
        yield held
