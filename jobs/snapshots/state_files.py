"""A snapshot's state rows as files of their table, written and hashed by the tasks that make them (decision 0045)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema

from jobs.snapshots.row_sums import Measured, Sums, hashed_columns, total_of
from jobs.snapshots.state_rows import StateRows
from jobs.snapshots.verified_rows import PARTITION, STATES
from jobs.spark.warehouse import Warehouse, struct_of
from jobs.spark.written_rows import keep_rows, write_files
from jobs.storage.replaced_files import ReplacingTable
from jobs.storage.tables import SNAPSHOTS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.snapshots.manifests import Manifest

NO_STATISTICS = {"delta.dataSkippingNumIndexedCols": "0"}
"""A snapshot is always read as a whole, so per-file minima and maxima of columns would be no use."""


class Written(NamedTuple):
    """State rows that were committed: the version of their table, and their sums."""

    version: int
    measured: Measured


def write_states(warehouse: Warehouse, manifest: Manifest, states: StateRows | DataFrame) -> Written:
    """Let tasks write a snapshot's state rows, and put the files in the place of its former ones, in one commit.

    Killed before the commit, the files are no part of the table, and VACUUM removes them.

    Args:
        warehouse: of the snapshot.
        manifest: of the snapshot.
        states: its rows, with the columns of their table behind `model_version`.

    Raises:
        UserError: the table cannot take the files, or the commit failed.
    """
    warehouse.create(STATES, SNAPSHOTS, PARTITION, NO_STATISTICS)
    table = ReplacingTable(warehouse, STATES)
    schema = to_arrow_schema(struct_of(SNAPSHOTS), timezone="UTC")
    table.ready(schema, by_partition=True)
    made = states if isinstance(states, StateRows) else StateRows.of(states)
    make = made.make  # tasks get no DataFrame
    values = {"model": manifest.model, "snapshot_id": manifest.snapshot_id}
    constants = {**values, "model_version": manifest.model_version}

    def typed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in make(batches):
            columns = hashed_columns(batch)
            arrays = [
                columns[field.name].cast(field.type)
                if field.name in columns
                else pa.repeat(pa.scalar(constants[field.name], field.type), batch.num_rows)
                for field in schema
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    written = write_files(made.source, typed, table, Sums)
    mine = [[(name, "=", value) for name, value in values.items()]]
    version = table.replace_rows(written.parts, mine, keep_rows(warehouse.spark, table, mine))
    assert version is not None
    return Written(version, total_of(written.sums))
