"""Each way to run the same micro-batches: ours, the limit, Spark's floor, and state by the key."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from benchmarks.contenders.per_key import FLAT, OUTPUT, RowProcessor, filterpy_rows
from benchmarks.workloads.data import CORES
from benchmarks.workloads.work import Work

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from jobs.state.encoding.estimates import EstimateFormat
    from jobs.streaming.estimate_files import EstimateRows

PARTITIONS = CORES
KEYS_A_BLOCK = 256

Build = Callable[["DataFrame", Work], "DataFrame"]


class Contender(NamedTuple):
    """A way to run a work.

    build: rows -> estimates, as streaming frames; rows_a_second: approximate speed on two cores, from which the number
    of rounds follows.
    """

    name: str
    build: Build
    rows_a_second: float
    into: Callable[[SparkSession, Work, Path, str], Callable[[DataFrame, int], None]] | None = None
    """Makes the function for each micro-batch, from a folder of rows and a table; None: use Spark's sink."""


def ours(frame: DataFrame, work: Work) -> DataFrame:
    """Return the pipeline's own operator and its estimates as rows."""
    from jobs.state.encoding.estimates import estimate_batch, estimate_schema
    from jobs.state.encoding.packets import OutputPacket

    packets, out = _packets(frame, work, None)

    def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for payload in batch.column("payload"):
                yield estimate_batch(out, out.layout.decode(payload.as_py()))  # `as_py` makes an aligned copy

    estimates = packets.filter(packets["kind"] == OutputPacket.ESTIMATES).select("payload")
    return estimates.mapInArrow(unpack, estimate_schema(out, batch_id=False))


def ours_in_files(frame: DataFrame, work: Work) -> DataFrame:
    """Return the pipeline's own operator, whose tasks write the estimates' files: a row for each file."""
    packets, _ = _packets(frame, work, "files")
    return packets


def _packets(frame: DataFrame, work: Work, writer: str | None) -> tuple[DataFrame, EstimateFormat]:
    """Return the operator's packets and its estimate format; `writer`: None, or `files`."""
    import kalman
    from jobs.snapshots.model_runtime import ship
    from jobs.state.block_format import build_state_format
    from jobs.state.encoding.estimates import estimate_format
    from jobs.state.encoding.keys import build_key_kind
    from jobs.state.encoding.packets import OUTPUT_PACKETS
    from jobs.state.encoding.routing import make_routing
    from jobs.state.encoding.rows import build_row_format, pack_rows
    from jobs.state.plan import Plan
    from jobs.streaming.estimate_files import EstimateWriter
    from jobs.streaming.processors import FilterProcessor

    spec = work.spec
    kernel = kalman.build(spec.definition(), {})
    ship(frame.sparkSession, spec.definition())
    kind = build_key_kind(spec.key, frame.schema)
    rows = build_row_format(spec, kind)
    state = build_state_format(spec.name, spec.version, spec.states, kernel.fields, kind, kernel.size)
    out = estimate_format(kind, spec, kernel)
    blocks = max(1, -(-work.keys // (PARTITIONS * KEYS_A_BLOCK)))
    plan = Plan(kernel, spec.unit_us, rows, state, out, blocks)
    routing = make_routing(PARTITIONS, blocks)
    operator = pack_rows(frame.select(*spec.columns), rows, routing).groupBy("bucket")
    processor = FilterProcessor(plan)
    if writer is not None:
        processor = EstimateWriter(processor, _rows_of(frame.sparkSession, out))
    return operator.transformWithStateInPandas(processor, OUTPUT_PACKETS, "Append", "None", None), out


def _rows_of(spark: SparkSession, out: EstimateFormat) -> EstimateRows:
    """Return the function from estimates to rows of the stream's table, with all its columns."""
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    from jobs.state.encoding.estimates import estimate_schema
    from jobs.streaming.estimate_files import EstimateRows

    columns = f"{estimate_schema(out, True)}, model_version int, generation string, source_range string"
    schema = StructType.fromDDL(columns)
    assert isinstance(schema, StructType)
    return EstimateRows(out, to_arrow_schema(schema, timezone="UTC"))


def committed_files(
    spark: SparkSession, work: Work, rows_from: Path, into: str
) -> Callable[[DataFrame, int], None]:
    """Return the function that commits the files of a micro-batch to a table, as the stream's own sink does.

    Args:
        spark: session.
        work: the work to filter.
        rows_from: folder of its rows.
        into: path or URI of the table, which is made.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    import kalman
    from jobs.spark.warehouse import Warehouse
    from jobs.state.encoding.estimates import estimate_format
    from jobs.state.encoding.keys import build_key_kind
    from jobs.storage.table_log import FileTable
    from jobs.streaming.estimate_files import PROPERTY, EstimateTarget
    from jobs.streaming.written_files import list_written_parts

    spec = work.spec
    kernel = kalman.build(spec.definition(), {})
    source = spark.read.parquet(str(rows_from)).schema
    rows = _rows_of(spark, estimate_format(build_key_kind(spec.key, source), spec, kernel))
    root, _, name = into.rpartition("/")
    warehouse = Warehouse(spark, root)
    if not warehouse.exists(name):
        warehouse.append(spark.createDataFrame([], from_arrow_schema(rows.schema)), name)
    table = FileTable(warehouse, name)

    def take(packets: DataFrame, batch_id: int) -> None:
        table.ready(rows.schema)
        constants = {
            "batch_id": batch_id,
            "model_version": 1,
            "generation": "bench-g0001",
            "source_range": "{}",
        }
        target = EstimateTarget(table.path, uuid.uuid4().hex, table.file_bytes, constants)
        spark.sparkContext.setLocalProperty(PROPERTY, target.encode())
        packets = packets.persist()
        try:
            found = packets.select("kind", "rows", "payload").collect()
        finally:
            packets.unpersist()
        table.commit([one.file for one in list_written_parts(found)], ("bench", batch_id))

    return take


def limit(frame: DataFrame, work: Work) -> DataFrame:
    """Shuffle by key and pass the rows through Python unchanged: no keyed operator in Python can be faster."""

    def identity(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches

    return frame.repartition(PARTITIONS, "id").mapInArrow(identity, frame.schema)


def floor(frame: DataFrame, work: Work) -> DataFrame:
    """Return Spark's own stateful operator with almost no work: one count in one state."""
    from pyspark.sql import functions as F

    return frame.groupBy(F.lit(0).alias("all")).count()


def _timed(frame: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    return frame.withColumn("time", F.unix_micros("at"))


def row_api(frame: DataFrame, work: Work) -> DataFrame:
    """Return `transformWithState` with one state a key (Row API)."""
    schema = OUTPUT.format(key="string" if work.text else "bigint")
    return _timed(frame).groupBy("id").transformWithState(RowProcessor(), schema, "Append", "None")


def filterpy(frame: DataFrame, work: Work) -> DataFrame:
    """Return `applyInPandasWithState` with one filterpy filter a key."""
    schema = OUTPUT.format(key="string" if work.text else "bigint")
    grouped = _timed(frame).groupBy("id")
    return grouped.applyInPandasWithState(filterpy_rows, schema, FLAT, "append", "NoTimeout")


OURS = Contender("ours", ours, 400_000)
OURS_FILES = Contender("ours", ours_in_files, 600_000, committed_files)
"""Our operator with a table as the sink, whose files our tasks write."""
LIMIT = Contender("limit", limit, 800_000)
FLOOR = Contender("floor", floor, 2_000)
ROW_API = Contender("per_key_row", row_api, 15_000)
FILTERPY = Contender("per_key_filterpy", filterpy, 3_000)
