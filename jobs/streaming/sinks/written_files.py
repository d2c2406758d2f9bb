"""The files in which the operator's tasks have written a micro-batch's estimates: where, whether, and as rows again.

The driver of a micro-batch decides before its job runs if the tasks write files, which they do where Arrow and
delta-rs can do what Java would (`EstimateFiles.ask`). Otherwise they put out packets, and Java writes the table. The
rows are the same.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructField, StructType

from jobs.core.errors import UserError
from jobs.encoding.key_texts import has_columns
from jobs.encoding.packet_kinds import OUTPUT_PACKETS, OutputPacket
from jobs.lineage.source_ranges import RangeWriter
from jobs.storage.part_files import PartFile, partition_of, remove_of
from jobs.storage.table_log import FileTable, takes_files
from jobs.streaming.operators.estimate_files import (
    FILES,
    PROPERTY,
    Along,
    EstimateRows,
    Target,
    file_reader,
    last_of_runs,
    unchanged,
)
from jobs.streaming.sinks.estimated import PacketEstimates
from jobs.warehouse.tables import SOURCE_RANGE, estimates

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

    from jobs.encoding.estimates import EstimateFormat
    from jobs.lineage.generations import Generation
    from jobs.warehouse.delta import Warehouse

_OF_BATCH = ("batch_id", "correction", "model_version", "generation", SOURCE_RANGE)
"""Columns of the micro-batch, not of the estimate."""


class WrittenPart(NamedTuple):
    """A file, the kind of the estimates in it, and the partition of the task that wrote it."""

    kind: OutputPacket
    partition: int
    file: PartFile


@dataclass
class EstimateFiles:
    """The files of a generation's estimates, for its driver.

    schema: of the table's rows, as Java would append them; attempt: to write a micro-batch, the last that was begun.
    """

    table: FileTable
    generation: Generation
    ranges: RangeWriter
    schema: StructType
    rows: EstimateRows
    attempt: str = ""

    @classmethod
    def of(
        cls, warehouse: Warehouse, generation: Generation, fmt: EstimateFormat, corrects: bool
    ) -> EstimateFiles | None:
        """Return the files of a generation's estimates, or None if Java is to write them in any case."""
        if not takes_files(warehouse) or not has_columns(fmt.kind):
            return None
        none = warehouse.spark.createDataFrame([], OUTPUT_PACKETS)
        rows = PacketEstimates(none, fmt, generation, corrects, 0).rows().withColumn(SOURCE_RANGE, F.lit(""))
        schema = StructType([StructField(field.name, field.dataType) for field in rows.schema])
        table = FileTable(warehouse, estimates(generation.model))
        return cls(
            table,
            generation,
            RangeWriter(warehouse, generation),
            schema,
            EstimateRows(fmt, to_arrow_schema(schema, timezone="UTC")),
        )

    def ask(self, spark: SparkSession, batch_id: int) -> bool:
        """Tell the tasks of a micro-batch's jobs in this thread to write files, if the table takes them as they are."""
        takes = self._takes()
        self.attempt, self.table.tried = uuid.uuid4().hex, False
        told = self._target(batch_id).encode() if takes else None
        # None removes the property, although the annotation does not allow it
        spark.sparkContext.setLocalProperty(PROPERTY, told)  # pyright: ignore[reportArgumentType]
        return takes

    def _takes(self) -> bool:
        try:
            return self.table.takes(self.rows.schema)
        except UserError:
            return False  # Java may read what delta-rs cannot

    def _target(self, batch_id: int) -> Target:
        generation = self.generation
        constants = {
            "batch_id": batch_id,
            "model_version": generation.model_version,
            "generation": generation.generation,
            SOURCE_RANGE: self.ranges.of(batch_id),
        }
        return Target(self.table.path, self.attempt, self.table.file_bytes, constants)

    def remove_unnamed(self) -> None:
        """Remove the files of this attempt to write a micro-batch, unless a commit of them was tried.

        A stream that fails at a row, as the disk is full, or at a sink after its estimates, is started again and again.
        """
        if self.attempt and not self.table.tried:
            with suppress(OSError):  # what is left is VACUUM's
                remove_of(self.table.path, self.attempt)

    def reading(self, spark: SparkSession, parts: Sequence[WrittenPart]) -> FileEstimates:
        """Return the rows of files as the other sinks take them."""
        return FileEstimates(spark, self, parts)


@dataclass
class FileEstimates:
    """The estimates of a micro-batch, read from the files that the operator's tasks have written."""

    spark: SparkSession
    files: EstimateFiles
    parts: Sequence[WrittenPart]

    def rows(self) -> DataFrame:
        """Return all rows but without their source range, in the partitions and the order of the packets."""
        columns = [name for name in self.files.schema.names if name != SOURCE_RANGE]
        rows = self._read(OutputPacket.ESTIMATES_FILE, columns, unchanged)
        if "correction" in columns:
            rows = rows.unionByName(self._read(OutputPacket.CORRECTION_FILE, columns, unchanged))
        return rows

    def last_rows(self, corrections: bool) -> DataFrame:
        """Return the last row of each run of rows of a key, without the columns of the micro-batch."""
        kind = OutputPacket.CORRECTION_FILE if corrections else OutputPacket.ESTIMATES_FILE
        columns = [name for name in self.files.schema.names if name not in _OF_BATCH]
        return self._read(kind, columns, last_of_runs)

    def _read(self, kind: OutputPacket, columns: Sequence[str], along: Along) -> DataFrame:
        paths: dict[int, list[str]] = {}
        for one in self.parts:
            if one.kind == kind:
                paths.setdefault(one.partition, []).append(f"{self.files.table.path}/{one.file.path}")
        schema = StructType([field for field in self.files.schema if field.name in columns])
        number = self.files.generation.partitions
        # The partition of a row is that of the packet in whose place it is: its ordinal comes from there.
        return self.spark.range(0, number, 1, number).mapInArrow(
            file_reader(paths, to_arrow_schema(schema, timezone="UTC"), along), schema
        )


def written_parts(found: Sequence[Row]) -> list[WrittenPart]:
    """Return the files that rows of the operator name, in the order of these."""
    kinds = set(FILES.values())
    return [_part(row) for row in found if row["kind"] in kinds]


def _part(row: Row) -> WrittenPart:
    file = PartFile.decode(bytes(row["payload"]))
    return WrittenPart(OutputPacket(row["kind"]), partition_of(file.path), file)
