"""Answers about the tables of a local warehouse without Spark: what status and other looks need.

`LocalTables` answers what `Warehouse` answers with Spark (`jobs.warehouse.reading.Tables`), so that the same code looks
at both. The rows themselves are read by `jobs.warehouse.without_spark`, which large tables are read with directly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from jobs.core.roots import local_path
from jobs.warehouse.files import ChecksummedFiles, LocalFiles, WarehouseFiles
from jobs.warehouse.without_spark import UTC_MICROSECONDS, read_table

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class LocalTables:
    """The tables below a root that is a local folder."""

    root: str

    def path(self, table: str) -> str:
        """Return the location of a table or folder such as `measurements/nile`."""
        return f"{self.root}/{table}"

    def exists(self, table: str) -> bool:
        """Tell if a table exists."""
        return bool(self._versions(table))

    def latest_version(self, table: str) -> int:
        """Return the latest version of a table, from its log, which has one file per version."""
        return max(self._versions(table))

    def table_id(self, table: str) -> str:
        """Return the id that Delta gave a table when it was made."""
        return str(DeltaTable(self.path(table)).metadata().id)

    def column_names(self, table: str) -> list[str]:
        """Return the names of a table's columns."""
        return [field.name for field in DeltaTable(self.path(table)).schema().fields]

    def rows(
        self,
        table: str,
        where: Mapping[str, Any] | None = None,
        columns: Sequence[str] | None = None,
        version: int | None = None,
    ) -> list[dict[str, Any]]:
        """Return rows of a small table, with times in UTC.

        Args:
            table: its name.
            where: values that columns of the rows must have.
            columns: of the rows; None: all.
            version: of the table; None: the newest.
        """
        found = self.columns(table, columns, version)
        for name, value in (where or {}).items():
            found = found.filter(pc.field(name) == value)
        # Arrow imports pandas for its times, which takes longer than all else here.
        names = found.column_names
        lists = [_values(column) for column in found.columns]
        return [dict(zip(names, values, strict=True)) for values in zip(*lists, strict=True)]

    def row_count(self, table: str) -> int:
        """Return the number of rows of a table, from its log."""
        actions = _arrow(DeltaTable(self.path(table)).get_add_actions(flatten=True))
        numbers = actions["num_records"] if "num_records" in actions.column_names else None
        if numbers is None or numbers.null_count:  # a file of another tool, without statistics
            return self.columns(table, ()).num_rows
        return sum(numbers.to_pylist())

    def group_counts(self, table: str, by: Sequence[str]) -> list[dict[str, Any]]:
        """Return how many rows (`count`) have each combination of values of some columns; null without a column."""
        found = self.columns(table, by)
        counts = found.group_by(list(by)).aggregate([([], "count_all")])
        return [{**{name: one[name] for name in by}, "count": one["count_all"]} for one in counts.to_pylist()]

    def columns(self, table: str, names: Sequence[str] | None = None, version: int | None = None) -> pa.Table:
        """Return columns of a table, by default all; one that the table lacks is null, times are in UTC."""
        schema: Any = DeltaTable(self.path(table), version=version).schema().to_arrow()
        fields = {field.name: field.type for field in pa.schema(schema)}
        wanted = list(fields if names is None else names)
        found = read_table(self.root, table, wanted or list(fields)[:1], version=version)
        rows = 0 if found is None else found.num_rows
        columns = [
            pa.nulls(rows, fields.get(name, pa.string()))
            if found is None or name not in found.column_names
            else _as_in_delta(found[name], fields[name])
            for name in wanted
        ]
        return pa.Table.from_arrays(columns, wanted) if wanted or found is None else found

    def spark_files(self, folder: str) -> WarehouseFiles:
        """Return the files of a folder that Spark writes, with the checksums that it keeps beside them."""
        return ChecksummedFiles(Path(self.root) / folder)

    def _versions(self, table: str) -> list[int]:
        names = LocalFiles(Path(self.root) / table / "_delta_log").names("")
        return [int(name[:20]) for name in names if name.endswith(".json") and name[:20].isdigit()]


def local_tables(root: str) -> LocalTables | None:
    """Return the tables of a local warehouse, None for a remote one, of which nothing can be told before Spark starts.

    With them a command refuses before it starts Spark what it would refuse afterwards, by the same functions.
    """
    folder = local_path(root)
    return None if folder is None else LocalTables(str(folder))


def _as_in_delta(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Return a column in the type that Delta's schema says; Parquet files differ in how they keep texts and times."""
    return column.cast(UTC_MICROSECONDS if pa.types.is_timestamp(kind) else kind)


def _arrow(batches: Any) -> pa.Table:
    """Return what deltalake returns, in another implementation of Arrow, as a table. (`pa.table` imports pandas.)"""
    return pa.RecordBatchReader.from_stream(batches).read_all()


def _values(column: pa.ChunkedArray) -> list[Any]:
    if not pa.types.is_timestamp(column.type):
        return column.to_pylist()
    micros = column.cast(pa.int64()).to_pylist()
    return [None if one is None else EPOCH + timedelta(microseconds=one) for one in micros]
