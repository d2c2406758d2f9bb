"""Prepare the measurements table of a model, and write and commit rows of any source."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from jobs.core.input_files import get_known_inputs
from jobs.landing.checking import build_columns_ddl
from jobs.landing.values.times import read_now_us
from jobs.landing.written_pieces import REJECTED, RowCounts, WriteTarget, WritingTask, WrittenRows
from jobs.specs.model_spec import ModelSpec
from jobs.storage.columns import parse_schema
from jobs.storage.measurements_table import MEASUREMENT_PROPERTIES, PLACES, KeyTypes, read_key_types
from jobs.storage.part_files import INDEXED, TARGET_BYTES, name_attempt, remove_of
from jobs.storage.quarantine import TABLE
from jobs.storage.table_log import FileTable, commit_or_remove
from jobs.storage.tables import QUARANTINE, measurements
from jobs.storage.warehouse import Tables


def prepare(warehouse: Tables, spec: ModelSpec, types: KeyTypes, messages: bool = False) -> KeyTypes:
    """Create a model's measurements table if it does not exist, and return the types of its key and id columns.

    Args:
        warehouse: warehouse of the table.
        spec: spec of the model.
        types: types of the key and id columns of a new table; an existing table keeps its types.
        messages: whether the rows are messages of topics; then a new table also has columns for the places of messages.

    Raises:
        UserError: the table exists and lacks a column of the spec.
    """
    table = measurements(spec.name)
    if warehouse.exists(table):
        return read_key_types(warehouse, spec)
    columns = f"{build_columns_ddl(spec, types)}, _origin string, _landed_at timestamp"
    if messages:
        columns += f", {PLACES}"
    warehouse.create(table, columns, properties=MEASUREMENT_PROPERTIES)
    return types


def build_accepted_schema(table: FileTable, spec: ModelSpec, messages: bool = False) -> pa.Schema:
    """Return the schema of accepted rows, with the columns in the order of the measurements table.

    messages: whether the rows are messages of topics. In this case the schema has the columns for the places of
    messages; columns that the table lacks are at the end.
    """
    more = ["_origin", "_landed_at"]
    places = pa.schema(parse_schema(PLACES).to_arrow() if messages else [])
    wanted = {name.casefold() for name in (*spec.columns, *more, *places.names)}
    found = [one for one in table.columns() if one.name.casefold() in wanted]
    have = {one.name for one in found}
    return pa.schema([*found, *(one for one in places if one.name not in have)])


@dataclass
class LandingTables:
    """Measurements table and quarantine in one attempt to land rows.

    messages: whether the rows are messages of topics.
    attempt: random text that is part of the name of each written file.
    landed_at: start of the attempt, in microseconds since 1970.
    """

    warehouse: Tables
    spec: ModelSpec
    messages: bool
    accepted: FileTable
    rejected: FileTable
    attempt: str
    landed_at: int

    @classmethod
    def of(cls, warehouse: Tables, spec: ModelSpec, messages: bool = False) -> LandingTables:
        """Begin an attempt to land rows of a model."""
        accepted, rejected = FileTable(warehouse, measurements(spec.name)), FileTable(warehouse, TABLE)
        return cls(warehouse, spec, messages, accepted, rejected, uuid.uuid4().hex, read_now_us())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.remove_written()

    def list_targets(self) -> tuple[WriteTarget, WriteTarget]:
        """Return the targets of the accepted rows and of the rejected rows."""
        schema = build_accepted_schema(self.accepted, self.spec, self.messages)
        self.accepted.ready(schema)
        rejected = TARGET_BYTES, INDEXED
        if self.warehouse.exists(TABLE):
            rejected = self.rejected.file_bytes, self.rejected.indexed
        return (
            WriteTarget(self.accepted.path, schema, self.accepted.file_bytes, self.accepted.indexed),
            WriteTarget(self.rejected.path, REJECTED, *rejected),
        )

    def task(self) -> WritingTask:
        """Return a task that writes rows from a source other than files."""
        name = name_attempt(0, self.attempt, 0, 0)
        return WritingTask(
            self.spec, {}, (), False, *self.list_targets(), name, self.landed_at, get_known_inputs()
        )

    def commit(
        self, written: Sequence[WrittenRows], transaction: tuple[str, int], place: dict[str, Any]
    ) -> None:
        """Commit the rejected rows, and then the accepted rows; each table commits a transaction at most once.

        Args:
            written: result of each task.
            transaction: application and number of the Delta transaction.
            place: position in the source after these rows, for the metadata of the commit.
        """
        rejected = [part for one in written for part in one.rejected]
        if rejected:
            table = self.prepare_rejected()
            commit_or_remove(table, rejected, lambda parts: table.commit(parts, transaction))
        counts = RowCounts()
        for one in written:
            counts.add(one.counts)
        detail = {**place, "rows": counts.rows, "min_time": counts.span[0], "max_time": counts.span[1]}
        accepted = [part for one in written for part in one.accepted]
        said = {"userMetadata": json.dumps(detail)}
        commit_or_remove(
            self.accepted, accepted, lambda parts: self.accepted.commit(parts, transaction, said)
        )

    def prepare_rejected(self) -> FileTable:
        """Create the quarantine if it does not exist, and return it prepared for rejected rows."""
        self.warehouse.create(TABLE, QUARANTINE)
        self.rejected.ready(REJECTED)
        return self.rejected

    def remove_written(self) -> None:
        """Remove the files of this attempt, but not from a table whose commit was tried and may have succeeded."""
        for table in (self.accepted, self.rejected):
            if not table.tried:
                remove_of(table.path, self.attempt)


def record_start(warehouse: Tables, spec: ModelSpec, source: str, detail: dict[str, Any]) -> None:
    """Commit the start position for the landing of a source, in a commit without rows.

    Args:
        warehouse: warehouse of the measurements table.
        spec: spec of the model.
        source: name of the source, used in the transaction of the commit.
        detail: position, for the metadata of the commit.
    """
    said = json.dumps({**detail, "rows": 0, "min_time": None, "max_time": None})
    transaction = f"ingest-{spec.name}-{source}", time.time_ns() // 1_000_000
    FileTable(warehouse, measurements(spec.name)).commit([], transaction, {"userMetadata": said})
