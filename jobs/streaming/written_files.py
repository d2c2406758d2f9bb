"""Create, commit and read the files of estimates that the operator's tasks write for a micro-batch.

The driver creates the table with all columns before the job of a micro-batch runs, so that tasks always write to an
existing table.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from jobs.core.errors import UserError
from jobs.lineage.source_ranges import RangeWriter
from jobs.spark.warehouse import Warehouse, parse_struct
from jobs.state.encoding.estimates import estimate_schema
from jobs.state.encoding.packets import OutputPacket
from jobs.storage.part_files import PartFile, parse_partition, remove_of
from jobs.storage.table_log import FileTable
from jobs.storage.tables import SOURCE_RANGE, estimates
from jobs.streaming.estimate_files import (
    FILES,
    PROPERTY,
    Along,
    EstimateRows,
    EstimateTarget,
    build_file_reader,
    pass_unchanged,
    select_last_of_runs,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

    from jobs.lineage.generations import Generation
    from jobs.state.encoding.estimates import EstimateFormat


_OF_BATCH = ("batch_id", "correction", "model_version", "generation", SOURCE_RANGE)
"""Columns that describe the micro-batch, and not an estimate."""


class WrittenPart(NamedTuple):
    """A file, the kind of its estimates, and the partition of the task that wrote it."""

    kind: OutputPacket
    partition: int
    file: PartFile


@dataclass
class EstimateFiles:
    """The files of a generation's estimates, as the generation's driver handles them.

    columns: columns of the table, as DDL. attempt: the last attempt to write that has begun.
    """

    warehouse: Warehouse
    generation: Generation
    ranges: RangeWriter
    table: FileTable
    columns: str
    rows: EstimateRows
    attempt: str = ""

    @classmethod
    def of(
        cls, warehouse: Warehouse, generation: Generation, fmt: EstimateFormat, corrects: bool
    ) -> EstimateFiles:
        """Return the files of a generation's estimates.

        Raises:
            UserError: tasks cannot write files for the table.
        """
        correction = ", correction boolean" if corrects else ""
        columns = (
            f"{estimate_schema(fmt, batch_id=True)}{correction}, model_version int, generation string, "
            f"{SOURCE_RANGE} string"
        )
        rows = EstimateRows(fmt, to_arrow_schema(parse_struct(columns), timezone="UTC"))
        table = FileTable(warehouse, estimates(generation.model))
        found = cls(warehouse, generation, RangeWriter(warehouse, generation), table, columns, rows)
        if warehouse.exists(table.name):
            table.ready(rows.schema)
        return found

    @property
    def schema(self) -> StructType:
        """Return the columns of the table's rows."""
        return parse_struct(self.columns)

    def begin(self, spark: SparkSession, batch_id: int) -> None:
        """Prepare the table, and set the target folder of the files for the jobs that this thread starts.

        Raises:
            UserError: tasks cannot write files for the table.
        """
        self.warehouse.create(self.table.name, self.columns)
        # Another version of the model may have more output columns.
        self.table.ready(self.rows.schema)
        self.attempt, self.table.tried = uuid.uuid4().hex, False
        spark.sparkContext.setLocalProperty(PROPERTY, self._build_target(batch_id).encode())

    def _build_target(self, batch_id: int) -> EstimateTarget:
        generation = self.generation
        constants = {
            "batch_id": batch_id,
            "model_version": generation.model_version,
            "generation": generation.generation,
            SOURCE_RANGE: self.ranges.of(batch_id),
        }
        return EstimateTarget(self.table.path, self.attempt, self.table.file_bytes, constants)

    def remove_unnamed(self) -> None:
        """Remove the files of this attempt to write, unless the driver has tried to commit them.

        Without this, files would pile up if a stream restarts again and again, because it fails at a row (full disk) or
        at a sink after its estimates.
        """
        if self.attempt and not self.table.tried:
            with suppress(OSError, UserError):  # VACUUM removes the remaining files
                remove_of(self.table.path, self.attempt)

    def reading(self, spark: SparkSession, parts: Sequence[WrittenPart]) -> FileEstimates:
        """Return the rows of files in the form from which the other sinks read."""
        return FileEstimates(spark, self, parts)


@dataclass
class FileEstimates:
    """Estimates of a micro-batch, which sinks read from the files that the operator's tasks wrote."""

    spark: SparkSession
    files: EstimateFiles
    parts: Sequence[WrittenPart]

    def rows(self) -> DataFrame:
        """Return all rows without their source range; partitions and order are the same in every call."""
        columns = [name for name in self.files.schema.names if name != SOURCE_RANGE]
        rows = self._read(OutputPacket.ESTIMATES_FILE, columns, pass_unchanged)
        if "correction" in columns:
            rows = rows.unionByName(self._read(OutputPacket.CORRECTION_FILE, columns, pass_unchanged))
        return rows

    def read_last_rows(self, corrections: bool) -> DataFrame:
        """Return the last estimate, or last correction, in each run of rows of one key, without `_OF_BATCH`."""
        kind = OutputPacket.CORRECTION_FILE if corrections else OutputPacket.ESTIMATES_FILE
        columns = [name for name in self.files.schema.names if name not in _OF_BATCH]
        return self._read(kind, columns, select_last_of_runs)

    def _read(self, kind: OutputPacket, columns: Sequence[str], along: Along) -> DataFrame:
        names: dict[int, list[str]] = {}
        for one in self.parts:
            if one.kind == kind:
                names.setdefault(one.partition, []).append(one.file.path)
        schema = StructType([field for field in self.files.schema if field.name in columns])
        number = self.files.generation.partitions
        # A row gets the partition of the packet that its file replaces, because its ordinal depends on the partition.
        return self.spark.range(0, number, 1, number).mapInArrow(
            build_file_reader(self.files.table.path, names, to_arrow_schema(schema, timezone="UTC"), along),
            schema,
        )


def list_written_parts(found: Sequence[Row]) -> list[WrittenPart]:
    """Return the files named in the operator's rows, in the order of these rows."""
    kinds = set(FILES.values())
    return [_parse_part(row) for row in found if row["kind"] in kinds]


def _parse_part(row: Row) -> WrittenPart:
    file = PartFile.decode(bytes(row["payload"]))
    return WrittenPart(OutputPacket(row["kind"]), parse_partition(file.path), file)
