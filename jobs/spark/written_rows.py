"""Write the rows of a DataFrame as files of a Delta table; tasks write the files, and one delta-rs commit names them.

After a kill before the commit the table is unchanged, and VACUUM removes the files.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.pandas.types import to_arrow_schema

from jobs.core.errors import UserError
from jobs.spark.local_frame import Make
from jobs.storage.part_files import PartFile, name_attempt, remove_of, write_parts
from jobs.storage.row_changes import KeptRows, find_partitions, read_rows_of
from jobs.storage.table_rows import Filter, Met, drop_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.spark.warehouse import Warehouse
    from jobs.storage.table_log import FileTable

_OUTPUT = "files array<binary>, sums map<string, bigint>"
_COLUMNS = pa.schema([("files", pa.list_(pa.binary())), ("sums", pa.map_(pa.string(), pa.int64()))])


class TaskSums(Protocol):
    """Sums that a task computes over the rows that it writes."""

    def add(self, rows: pa.RecordBatch) -> None:
        """Add rows with the columns of the table."""
        ...

    def numbers(self) -> dict[str, int]:
        """Return the sums by name."""
        ...


class TaskFiles(NamedTuple):
    """Files that tasks have written but that are not committed yet, and the sums of each task."""

    parts: list[PartFile]
    sums: list[dict[str, int]]


def write_files(
    source: DataFrame, make: Make, table: FileTable, sums: Callable[[], TaskSums] | None = None
) -> TaskFiles:
    """Let tasks compute rows from a source and write them as files of a table.

    After an error all files are removed.

    Args:
        source: input rows of the tasks.
        make: function from batches of the source to batches of rows with the columns of the table and of its
            partitions.
        table: the table.
        sums: function that makes the sums of a task; None means no sums.
    """
    folder, attempt, by = table.path, uuid.uuid4().hex, table.partition_by
    options = {"full": table.file_bytes, "indexed": table.indexed}

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()  # None in the process of the command
        of = (0, 0, 0) if task is None else (task.partitionId(), task.stageId(), task.taskAttemptId())
        name = name_attempt(of[0], attempt, *of[1:])
        total = None if sums is None else sums()

        def summed() -> Iterator[pa.RecordBatch]:
            for rows in make(batches):
                if total is not None:
                    total.add(rows)
                yield rows

        done = write_parts(folder, name, summed(), by, **options)
        if done:
            row = {
                "files": [one.encode() for one in done],
                "sums": [] if total is None else list(total.numbers().items()),
            }
            yield pa.RecordBatch.from_pylist([row], _COLUMNS)

    try:
        found = source.mapInArrow(write, _OUTPUT).collect()
    except BaseException:
        remove_of(folder, attempt)
        raise
    parts = [PartFile.decode(bytes(one)) for row in found for one in row["files"]]
    return TaskFiles(parts, [dict(row["sums"]) for row in found])


def write_rows(rows: DataFrame, table: FileTable, more_columns: bool) -> list[PartFile]:
    """Let tasks write rows as files of an existing table; return the files, which are not committed yet.

    Args:
        rows: rows with columns of the table; columns may be missing.
        table: the table.
        more_columns: whether to add the columns that the table lacks; otherwise rows with such columns are refused.

    Raises:
        UserError: the table does not take such rows.
    """
    return write_made_rows(
        rows, iter, to_arrow_schema(rows.schema, timezone="UTC"), table, more_columns
    ).parts


def write_made_rows(
    source: DataFrame,
    make: Make,
    schema: pa.Schema,
    table: FileTable,
    more_columns: bool,
    sums: Callable[[], TaskSums] | None = None,
) -> TaskFiles:
    """Write rows as `write_rows` does; the arguments are those of `write_files`, with the columns that `make` makes."""
    places, columns = _match_columns(schema, table, more_columns)
    table.ready(columns, by_partition=True)

    def typed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in make(batches):
            arrays = [batch.column(i).cast(field.type) for i, field in zip(places, columns, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=columns)

    return write_files(source, typed, table, sums)


def keep_rows(warehouse: Warehouse, table: FileTable, rows: Filter) -> Callable[[pa.Table, Met], KeptRows]:
    """Return a function by which tasks rewrite files without the removed rows (`ReplacingTable.replace_rows`).

    The new files have all columns of the table, while files of earlier versions of a model may lack some.
    """
    folder, schema = table.path, table.columns()

    def others(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for name, values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                yield from read_rows_of(folder, name, json.loads(values), schema, rows, drop_rows)

    def keep(files: pa.Table, met: Met) -> KeptRows:
        if not met.across:
            return KeptRows((), ())
        found = [(name, json.dumps(one)) for name, one in find_partitions(files, met.across).items()]
        source = warehouse.spread(found, "name string, partition string")
        return KeptRows(write_files(source, others, table).parts, met.across)

    return keep


def _match_columns(schema: pa.Schema, table: FileTable, more_columns: bool) -> tuple[list[int], pa.Schema]:
    """Return the places of columns in the table's order, followed by the columns that the table lacks, and the columns.

    The columns have the table's names and types.

    Raises:
        UserError: the table lacks a column, and `more_columns` is false.
    """
    given = {one.name.casefold(): one for one in schema}
    place, found = {one.name.casefold(): i for i, one in enumerate(schema)}, []
    for field in table.columns():
        one = given.pop(field.name.casefold(), None)
        if one is not None:
            kind = field.type if _is_widening(one.type, field.type) else one.type
            found.append(pa.field(field.name, kind))
    if given and not more_columns:
        raise UserError(f"{table.path} has no column {', '.join(one.name for one in given.values())}")
    found += [pa.field(one.name, one.type) for one in given.values()]
    return [place[one.name.casefold()] for one in found], pa.schema(found)


def _is_widening(kind: pa.DataType, to: pa.DataType) -> bool:
    """Return whether values of a type can be stored in another type."""
    if pa.types.is_null(kind) or pa.types.is_integer(kind) and pa.types.is_floating(to):
        return True
    for same in (pa.types.is_integer, pa.types.is_floating):
        if same(kind) and same(to):
            return kind.bit_width <= to.bit_width
    return False
