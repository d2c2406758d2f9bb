"""Read and check pieces of input files, write their rows into files of tables, and count the rows.

Any process can run a task. The result of a task names the written files; these files become part of a table when the
driver commits them (`jobs.landing.file_landing`).
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from jobs.core.errors import UserError
from jobs.core.input_files import KnownInputs, know_inputs
from jobs.landing.checking import ROWS_A_FILE
from jobs.landing.landed_files import FileState, Known
from jobs.landing.reading import FilePiece, select_reader
from jobs.landing.values.keys import assign_codes, join_codes
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding import arrow
from jobs.storage.measurements_table import HISTORY_PREFIX, KeyTypes
from jobs.storage.part_files import PartFile, PartWriter, remove
from jobs.storage.quarantine import PAYLOAD, POSITION, REASON

ORIGIN, LANDED_AT = "_origin", "_landed_at"
SOURCE = "_source"
"""Column with the source of a row, for the column `source` of the quarantine."""
_TEXTS = ("model", "payload", "reason", "source", "position", "generation", "id")
REJECTED = pa.schema(
    [(name, pa.string()) for name in _TEXTS]
    + [("batch_id", pa.int64()), ("quarantined_at", pa.timestamp("us", "UTC"))]
)
"""Columns of the quarantine that are written for rejected rows of files."""


class FilePieces(NamedTuple):
    """Pieces of a file that must be landed, in order; `known` describes the rows that are already committed."""

    file: FileState
    known: Known
    pieces: list[FilePiece]


class WriteTarget(NamedTuple):
    """Folder for the files of a table, columns of these files, and settings for `PartWriter`."""

    folder: str
    schema: pa.Schema
    full: int
    indexed: int


class WritingTask(NamedTuple):
    """Input files whose pieces are written into files of the measurements table and of the quarantine.

    history: whether the input files contain the history of new keys.
    accepted, rejected: targets of the accepted rows and of the rejected rows.
    name: prefix for the names of the written files.
    landed_at: start of the landing in microseconds since 1970. A time counts as in the future relative to it.
    inputs: known inputs of the driver process, with which each worker process checks the files that it opens.
    """

    spec: ModelSpec
    key_types: KeyTypes
    files: Sequence[FilePieces]
    history: bool
    accepted: WriteTarget
    rejected: WriteTarget
    name: str
    landed_at: int
    inputs: KnownInputs


@dataclass
class RowCounts:
    """Counts of a file's checked rows.

    rows: number of accepted rows.
    span: first and last time of the accepted rows, in microseconds since 1970.
    reasons: number of rejected rows, by reason.
    examples: payload of one rejected row, by reason.
    repeats: number of accepted rows that have the same key and time as an earlier row of the same run of rows.
    parts: number of runs of rows in which repeated rows were counted.
    absent: number of accepted rows whose measurement is missing, by column of the measurement.
    """

    rows: int = 0
    span: tuple[int, int] | tuple[None, None] = (None, None)
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    repeats: int = 0
    parts: int = 0
    absent: Counter[str] = field(default_factory=Counter)

    def add(self, other: RowCounts) -> None:
        """Add the counts of a later piece of the file."""
        self.rows += other.rows
        spans = [one for one in (self.span, other.span) if one[0] is not None and one[1] is not None]
        if spans:
            self.span = min(first for first, _ in spans), max(last for _, last in spans)
        self.reasons.update(other.reasons)
        self.examples = {**other.examples, **self.examples}
        self.repeats += other.repeats
        self.parts += other.parts
        self.absent.update(other.absent)


class WrittenPiece(NamedTuple):
    """Result of a task: for each input file its counts or the error from reading it, and the written files."""

    counts: Sequence[RowCounts | UserError]
    accepted: Sequence[PartFile]
    rejected: Sequence[PartFile]


class WrittenRows(NamedTuple):
    """Counts of rows from a source other than files, and the written files."""

    counts: RowCounts
    accepted: Sequence[PartFile]
    rejected: Sequence[PartFile]


def write_pieces(task: WritingTask, on_read: Callable[[int], None]) -> WrittenPiece:
    """Write and count the rows of pieces; if a piece cannot be read, remove all written files.

    Args:
        task: pieces and targets.
        on_read: called with the number of bytes read, after each piece.
    """
    know_inputs(task.inputs)
    tables = _Table(task.accepted, task.name), _Table(task.rejected, task.name)
    counts: list[RowCounts | UserError] = []
    with ExitStack() as undo:
        for table in tables:
            undo.callback(table.abandon)
        for file in task.files:
            try:
                counts.append(_write_file(task, file, tables, on_read))
            except UserError as error:
                counts.append(error)
        if any(isinstance(one, UserError) for one in counts):
            return WrittenPiece(counts, [], [])
        written = WrittenPiece(counts, *(table.end() for table in tables))
        undo.pop_all()
        return written


class _Table:
    """Writes the rows of a table into files of about `ROWS_A_FILE` rows."""

    def __init__(self, target: WriteTarget, name: str) -> None:
        self._folder = target.folder
        self._writer = PartWriter(target.folder, name, target.full, target.indexed)
        self._rows, self._done = 0, list[PartFile]()

    def add(self, rows: pa.RecordBatch) -> None:
        self._rows += rows.num_rows
        self._done += self._writer.add(rows)
        if self._rows >= ROWS_A_FILE:
            self.end()

    def end(self) -> list[PartFile]:
        """Complete the current file, and return all written files."""
        self._rows = 0
        self._done += self._writer.end()
        return self._done

    def abandon(self) -> None:
        self._writer.abandon()
        remove(self._folder, self._done)


def write_rows(task: WritingTask, batches: Iterable[pa.RecordBatch]) -> WrittenRows:
    """Write checked rows that have their origin and position as columns; return their counts and the written files.

    Args:
        task: task with targets and without input files.
        batches: rows with the columns of `check_rows`, the columns `_origin`, `_source` and `_position`, and all other
            columns of the task's target for accepted rows.
    """
    tables = _Table(task.accepted, task.name), _Table(task.rejected, task.name)
    rows = _Rows(task, tables)
    with ExitStack() as undo:
        for table in tables:
            undo.callback(table.abandon)
        for batch in batches:
            rows.write(batch)
        written = WrittenRows(rows.counts(), *(table.end() for table in tables))
        undo.pop_all()
        return written


def _write_file(
    task: WritingTask, file: FilePieces, tables: tuple[_Table, _Table], on_read: Callable[[int], None]
) -> RowCounts:
    """Write the rows of the pieces of one file.

    Raises:
        UserError: the file cannot be read.
    """
    rows, path = _Rows(task, tables), file.file.path
    place = {ORIGIN: path, SOURCE: path, POSITION: file.file.position}
    if task.history:
        place[ORIGIN] = HISTORY_PREFIX + path
    reader = select_reader(task.spec, path)
    for piece in file.pieces:
        for batch in reader.read(piece.part, task.key_types, task.landed_at):
            rows.write(batch, place, piece.rejected and not file.known.kept)
        on_read(piece.size)
    return rows.counts()


class _Rows:
    """Writes and counts the checked rows of one file or task."""

    def __init__(self, task: WritingTask, tables: tuple[_Table, _Table]) -> None:
        self._task, (self._accepted, self._rejected) = task, tables
        self._total, self._places = RowCounts(), _Places(task.spec)

    def write(
        self, batch: pa.RecordBatch, place: Mapping[str, str] | None = None, rejected: bool = True
    ) -> None:
        """Write and count checked rows.

        Args:
            batch: checked rows.
            place: `_origin`, `_source` and `_position` of all rows. None means that the rows have these columns.
            rejected: whether to count and write the rejected rows; False if they are already in the quarantine.
        """
        task = self._task
        good, bad = _split_accepted(batch)
        if bad is not None and rejected:
            self._total.add(_count_rejected(bad))
            where = [_select_column(bad, name, place) for name in (SOURCE, POSITION)]
            texts = bad.column(REASON), bad.column(PAYLOAD)
            self._rejected.add(
                build_rejected_rows(task.rejected.schema, task.spec.name, *texts, where, task.landed_at)
            )
        if good.num_rows:
            times = arrow.to_numpy(good.column(task.spec.time).cast(pa.int64()))
            absent = Counter({name: good.column(name).null_count for name in task.spec.measurement})
            self._total.add(RowCounts(len(times), (int(times.min()), int(times.max())), absent=absent))
            self._places.add(good)
            # As in Spark, the names in the spec and in the table may differ in upper and lower case.
            have = {name.casefold(): good.column(name) for name in good.schema.names}
            have[ORIGIN] = _select_column(good, ORIGIN, place)
            have[LANDED_AT] = arrow.build_times(
                np.full(len(times), task.landed_at), np.ones(len(times), bool)
            )
            self._accepted.add(build_rows(task.accepted.schema, have))

    def counts(self) -> RowCounts:
        """Return the counts of all rows."""
        self._total.repeats, self._total.parts = self._places.repeats(), self._places.parts
        return self._total


def _select_column(rows: pa.RecordBatch, name: str, place: Mapping[str, str] | None) -> pa.Array:
    return rows.column(name) if place is None else arrow.repeat_text(place[name], rows.num_rows)


def _split_accepted(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch | None]:
    """Return the accepted rows of a batch, and the rejected rows, or None if no row is rejected."""
    reason = batch.column(REASON)
    if reason.null_count == len(reason):
        return batch, None
    return batch.filter(reason.is_null()), batch.filter(reason.is_valid())


def _count_rejected(bad: pa.RecordBatch) -> RowCounts:
    reasons, payloads = (bad.column(name).to_pylist() for name in (REASON, PAYLOAD))
    examples = dict(zip(reversed(reasons), reversed(payloads), strict=True))
    return RowCounts(reasons=Counter(reasons), examples=examples)


def build_rejected_rows(
    schema: pa.Schema,
    model: str,
    reasons: pa.Array,
    payloads: pa.Array,
    place: Sequence[pa.Array],
    landed_at: int,
) -> pa.RecordBatch:
    """Return N rejected rows with the columns of the quarantine; each row gets a new id.

    Args:
        schema: columns of the result.
        model: name of the model.
        reasons: (N,) reason why each row is rejected.
        payloads: (N,) payloads of the rows.
        place: (N,) sources of the rows, and (N,) positions of the rows in their source, as JSON.
        landed_at: time of the landing, in microseconds since 1970.
    """
    count = len(reasons)
    have = {
        "model": arrow.repeat_text(model, count),
        "payload": payloads,
        "reason": reasons,
        "source": place[0],
        "position": place[1],
        "quarantined_at": arrow.build_times(np.full(count, landed_at), np.ones(count, bool)),
        "id": arrow.build_texts(list(_draw_ids(count))),
        "generation": pa.nulls(count, pa.string()),
        "batch_id": pa.nulls(count, pa.int64()),
    }
    return build_rows(schema, have)


def build_rows(schema: pa.Schema, have: dict[str, pa.Array]) -> pa.RecordBatch:
    """Return rows with the columns of a schema; `have` contains the arrays by lower-case column name."""
    columns = [have[one.name.casefold()].cast(one.type) for one in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _draw_ids(count: int) -> Iterator[str]:
    """Yield random ids (UUID, version 4)."""
    digits = secrets.token_hex(16 * count)
    for at in range(0, 32 * count, 32):
        some = digits[at : at + 32]
        yield f"{some[:8]}-{some[8:12]}-4{some[13:16]}-a{some[17:20]}-{some[20:]}"


class _Places:
    """Counter of rows that repeat the key and time of another row, within runs of about `ROWS_A_FILE` rows."""

    def __init__(self, spec: ModelSpec) -> None:
        self._keys, self._time = list(spec.key), spec.time
        self._held: list[pa.RecordBatch] = []
        self._rows = self._repeats = self.parts = 0

    def add(self, rows: pa.RecordBatch) -> None:
        self._held.append(rows.select([*self._keys, self._time]))
        self._rows += rows.num_rows
        if self._rows >= ROWS_A_FILE:
            self.repeats()

    def repeats(self) -> int:
        if self._held:
            rows, self._held, self._rows = pa.Table.from_batches(self._held), [], 0
            self._repeats += count_repeats(rows, self._keys, self._time)
            self.parts += 1
        return self._repeats


def count_repeats(rows: pa.Table, keys: Sequence[str], time: str) -> int:
    """Return the number of rows with the same key and time as an earlier row."""
    times = arrow.to_numpy(rows.column(time).combine_chunks().cast(pa.int64()))
    zeros = np.zeros(len(times), np.int64)
    *columns, last = [zeros, *(assign_codes(rows.column(name).combine_chunks()) for name in keys)]
    codes = join_codes(columns or [zeros]) * (int(last.max(initial=0)) + 1) + last
    if not (_is_in_order(times, codes) or _is_in_order(codes, times)):
        order = np.lexsort((times, codes))
        times, codes = times[order], codes[order]
    return int(((times[1:] == times[:-1]) & (codes[1:] == codes[:-1])).sum())


def _is_in_order(first: np.ndarray, second: np.ndarray) -> bool:
    """Return whether pairs are in ascending order, so that equal pairs are adjacent."""
    step = first[1:] - first[:-1]
    return bool(((step > 0) | (step == 0) & (second[1:] >= second[:-1])).all())
