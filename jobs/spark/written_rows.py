"""Rows of a DataFrame as files of a Delta table: tasks write them, and one commit by delta-rs names them.

Killed before the commit, the files are no part of the table, and VACUUM removes them.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema

from jobs.core.errors import UserError
from jobs.storage.part_files import PartFile, PartWriter, attempt_name, remove, remove_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.storage.table_log import FileTable

_OUTPUT = "file binary"
_PLAIN = re.compile(r"[A-Za-z0-9_.-]+")
"""Texts that name a folder as they are."""

Values = tuple[tuple[str, str | None], ...]
"""Values of partition columns, as (name, text) pairs."""


class _Target(NamedTuple):
    """What tasks write: below which folder, into files up to which size, named after which attempt, which columns.

    indexed: columns that have statistics, the first ones; partition_by: columns that are in no file.
    """

    folder: str
    file_bytes: int
    indexed: int
    attempt: str
    schema: pa.Schema
    partition_by: list[str]


def write_rows(rows: DataFrame, table: FileTable, more_columns: bool) -> list[PartFile]:
    """Let tasks write rows as files of a table, which exists; return the files, which no commit names yet.

    Args:
        rows: with columns of the table; it may lack some.
        table: that takes the files.
        more_columns: the table gets the columns that it lacks; otherwise they are refused.

    Raises:
        UserError: the table does not take such rows.
    """
    schema = _columns(rows, table, more_columns)
    table.ready(schema, by_partition=True)
    target = _Target(
        table.path, table.file_bytes, table.indexed, uuid.uuid4().hex, schema, table.partition_by
    )
    chosen = rows.select(*(F.col(f"`{name.replace('`', '``')}`") for name in schema.names))
    try:
        found = chosen.mapInArrow(_writer(target), _OUTPUT).collect()
    except BaseException:
        remove_of(table.path, target.attempt)
        raise
    return [PartFile.decode(bytes(row["file"])) for row in found]


def _columns(rows: DataFrame, table: FileTable, more_columns: bool) -> pa.Schema:
    """Return the columns of rows with the table's names and types, in the table's order; further ones follow.

    Raises:
        UserError: the table lacks a column.
    """
    given = {one.name.casefold(): one for one in to_arrow_schema(rows.schema, timezone="UTC")}
    found = []
    for field in table.columns():
        one = given.pop(field.name.casefold(), None)
        if one is not None:
            kind = field.type if _widens(one.type, field.type) else one.type
            found.append(pa.field(field.name, kind))
    if given and not more_columns:
        raise UserError(f"{table.path} has no column {', '.join(one.name for one in given.values())}")
    return pa.schema([*found, *(pa.field(one.name, one.type) for one in given.values())])


def _widens(kind: pa.DataType, to: pa.DataType) -> bool:
    """Tell if values of a type are values of another one, too."""
    if pa.types.is_null(kind) or pa.types.is_integer(kind) and pa.types.is_floating(to):
        return True
    for same in (pa.types.is_integer, pa.types.is_floating):
        if same(kind) and same(to):
            return kind.bit_width <= to.bit_width
    return False


def _writer(target: _Target) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    kept = pa.schema([field for field in target.schema if field.name not in target.partition_by])

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        assert task is not None
        name = attempt_name(task.partitionId(), target.attempt, task.stageId(), task.taskAttemptId())
        writers: dict[Values, PartWriter] = {}
        done: list[PartFile] = []
        try:
            for batch in batches:
                for values, rows in _by_partition(batch, target.partition_by):
                    if values not in writers:
                        writers[values] = PartWriter(
                            _folder(target.folder, values), name, target.file_bytes, target.indexed
                        )
                    done += [_placed(one, values) for one in writers[values].add(_typed(rows, kept))]
            for values, writer in writers.items():
                done += [_placed(one, values) for one in writer.end()]
        except BaseException:
            for writer in writers.values():
                writer.abandon()
            remove(target.folder, done)  # on a full disk the next attempt needs their space
            raise
        if done:
            yield pa.RecordBatch.from_arrays(
                [pa.array([one.encode() for one in done], pa.binary())], ["file"]
            )

    return write


def _typed(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    arrays = [rows.column(field.name).cast(field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _by_partition(batch: pa.RecordBatch, names: Sequence[str]) -> Iterator[tuple[Values, pa.RecordBatch]]:
    """Yield the rows of a batch for each combination of values of its partition columns."""
    if not names:
        yield (), batch
        return
    compute: Any = pc
    distinct = pa.Table.from_batches([batch]).select(names).group_by(names).aggregate([])
    for row in distinct.to_pylist():
        chosen: Any = None
        for name, value in row.items():
            column = batch.column(name)
            one = (
                column.is_null() if value is None else compute.fill_null(compute.equal(column, value), False)
            )
            chosen = one if chosen is None else compute.and_(chosen, one)
        yield (
            tuple((name, None if row[name] is None else str(row[name])) for name in names),
            batch.filter(chosen),
        )


def _folder(folder: str, values: Values) -> str:
    """Return where the files of a partition are: as Delta's own writer has it, if the values name folders."""
    if values and all(value is not None and _PLAIN.fullmatch(value) for _, value in values):
        return "/".join([folder, *(f"{name}={value}" for name, value in values)])
    return folder


def _placed(part: PartFile, values: Values) -> PartFile:
    """Return a file of a partition as one of the table."""
    return part._replace(path=f"{_folder('', values)}/{part.path}".lstrip("/"), values=values)
