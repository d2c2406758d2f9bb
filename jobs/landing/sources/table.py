"""Land the rows of a user's Delta table (`source: {kind: delta}`), each once, as it grows.

Rows can only be added: streams cannot undo measurements that they have counted. So a commit that changes or removes
rows of the table is refused.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from jobs.landing.sources.checked_frames import read_checked_table, read_table_schema
from jobs.landing.sources.landing import Reader
from jobs.landing.sources.table_start import (
    NOTHING,
    TableStart,
    UserTable,
    accept_loss,
    open_table,
    refuse_other,
    start_of,
    suggest_table_restart,
)
from jobs.landing.target_table import prepare
from jobs.landing.values.keys import derive_key_types
from jobs.landing.written_pieces import ORIGIN, SOURCE
from jobs.spark.queries import find_cause
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.measurements_table import KeyTypes
from jobs.storage.quarantine import POSITION

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.errors import PySparkException
    from pyspark.sql import DataFrame

_CHANGED_COLUMNS = ("DELTA_SCHEMA_CHANGED", "DELTA_STREAMING_INCOMPATIBLE_SCHEMA_CHANGE")
"""Prefixes of Delta's error names for columns that have changed since a query started."""
_FAILURES = (
    (
        ("DELTA_SOURCE_IGNORE_DELETE", "DELTA_SOURCE_TABLE_IGNORE_CHANGES"),
        "rows of it were changed, removed or overwritten, and measurements are only ever added to",
    ),
    (("DIFFERENT_DELTA_TABLE",), "it was deleted and made anew"),
    (
        _CHANGED_COLUMNS,
        "a column has the name of a former one, and another type than in rows that have not landed: drop that column, "
        "land, and add it again",
    ),
    (
        ("FILE_NOT_EXIST", "FILE_NOT_FOUND", "FileNotFoundException", "DELTA_VERSION_NOT_FOUND")
        + ("DELTA_STREAM_START_VERSION", "VersionNotFoundException"),
        "files of its commits that have not landed are gone, as VACUUM removes them",
    ),
)
"""Delta's error names, with their meaning."""


_ANY_CHANGE = (
    "streaming.unsafeReadOnIncompatibleColumnMappingSchemaChanges",
    "streaming.unsafeReadOnIncompatibleSchemaChangesDuringStreamStart",
    "streaming.unsafeReadOnPartitionColumnChanges",
)
"""Delta settings with which a stream reads a table's present columns, after any renames and drops.

The columns of the spec are checked here at each start; other columns are not read. Rows from before a column was
renamed are read under its present name, as in the table."""


class TableReader(Reader):
    """Reader of a user's table from its landed position."""

    restarts: tuple[str, ...] = _CHANGED_COLUMNS

    def __init__(
        self, warehouse: Warehouse, spec: ModelSpec, table: UserTable, start: TableStart, types: KeyTypes
    ) -> None:
        """Open the table at a position. types: types of the key columns."""
        self._spec, self._table, self._start, self._types = spec, table, start, types
        self.checkpoint = Checkpoint(warehouse, start.checkpoint)

    def is_empty(self) -> bool:
        """Tell if the version after the position does not exist yet: a new query begins at that version."""
        begins = self._start.after != NOTHING and self.checkpoint.find_last_planned() is None
        return begins and self._table.home.latest_version(self._table.name) <= self._start.after

    def rows(self) -> DataFrame:
        """Return the rows after the position as a stream of checked rows."""
        spec, types, path = self._spec, self._types, self._table.path
        _read_schema(spec, self._table)  # columns may have changed since the last query
        session = self._table.home.spark
        for name in _ANY_CHANGE:
            session.conf.set(f"spark.databricks.delta.{name}.enabled", "true")
        reader = session.readStream.format("delta")
        if self._start.after != NOTHING:
            reader = reader.option("startingVersion", self._start.after + 1)
        rows = reader.load(self._table.home.path(self._table.name))
        return read_checked_table(rows, spec, types, path)

    def reached(self, batch: int) -> dict[str, Any]:
        """Return the position at the end of a micro-batch."""
        version = self.checkpoint.find_touched_version(batch)
        if version > self._start.version:
            self._start = self._start._replace(version=version, commit=self._table.commit(version))
        return self._start.detail(self._table.path)

    def check(self) -> None:
        """Check that the table was not replaced since it was read."""
        table = self._table
        refuse_other(self._spec, table._replace(id=table.home.table_id(table.name)), self._start)

    def add_origin(self, rows: DataFrame) -> DataFrame:
        """Return rows with the table's name as origin and the micro-batch's position as position."""
        start, source = self._start, F.lit(f"delta:{self._table.path}")
        place = {"table": self._table.path, "table_id": start.table_id, "version": start.version}
        return rows.withColumns({ORIGIN: source, SOURCE: source, POSITION: F.lit(json.dumps(place))})

    def explain_error(self, error: PySparkException) -> str:
        """Explain a Delta error in words, if it is a known error."""
        text = str(error)
        for names, meaning in _FAILURES:
            if any(name in text for name in names):
                return f"{meaning}. {suggest_table_restart(self._spec)}"
        return find_cause(error)


def open_table_reader(warehouse: Warehouse, spec: ModelSpec, lossy: bool) -> tuple[Reader, str | None]:
    """Return the reader of a table; lossy: begin after its present rows (`table_start.accept_loss`).

    Raises:
        UserError: the table does not exist, a column is missing or unusable, or the table does not continue at its
            landed position.
    """
    table = open_table(warehouse, spec)
    types = prepare(warehouse, spec, derive_key_types(spec.naming_columns, _read_schema(spec, table)))
    note = accept_loss(warehouse, spec, table) if lossy else None
    return TableReader(warehouse, spec, table, start_of(warehouse, spec, table), types), note


def _read_schema(spec: ModelSpec, table: UserTable) -> pa.Schema:
    """Return the types of the spec's columns in the table.

    Raises:
        UserError: a column is missing, or its type cannot hold the values that the spec expects.
    """
    remedy = (
        f". If it was renamed, rename it back, or give the spec of {spec.name} a new version with the new name; "
        "nothing has landed meanwhile"
    )
    return read_table_schema(spec, table.home.read(table.name), f"table {table.path}", remedy)
