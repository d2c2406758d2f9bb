"""Each way to run the same micro-batches: ours, the limit, Spark's floor, and state by the key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from benchmarks.contenders.per_key import FLAT, OUTPUT, RowProcessor, filterpy_rows
from benchmarks.workloads.data import CORES
from benchmarks.workloads.work import Work

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PARTITIONS = CORES
KEYS_A_BLOCK = 256

Build = Callable[["DataFrame", Work], "DataFrame"]


class Contender(NamedTuple):
    """A way to run a work.

    build: rows -> estimates, as streaming frames; rows_a_second: about what it does on two cores, to know how many
    rounds it can be given.
    """

    name: str
    build: Build
    rows_a_second: float


def ours(frame: DataFrame, work: Work) -> DataFrame:
    """Return the pipeline's own operator and its estimates as rows."""
    import kalman
    from jobs.encoding.estimates import estimate_format, unpack_estimates
    from jobs.encoding.keys import key_kind
    from jobs.encoding.packet_kinds import OUTPUT_PACKETS, OutputPacket
    from jobs.encoding.routing import make_routing
    from jobs.encoding.rows import pack_rows, row_format
    from jobs.spark.user_functions import ship
    from jobs.state.block_format import state_format
    from jobs.state.plan import Plan
    from jobs.streaming.operators.processor import FilterProcessor

    spec = work.spec
    kernel = kalman.build(spec.definition(), {})
    ship(frame.sparkSession, spec.definition())
    kind = key_kind(spec.key, frame.schema)
    rows = row_format(spec, kind)
    state = state_format(spec.name, spec.version, spec.states, kernel.fields, kind, kernel.size)
    out = estimate_format(kind, spec, kernel)
    blocks = max(1, -(-work.keys // (PARTITIONS * KEYS_A_BLOCK)))
    plan = Plan(kernel, spec.unit_us, rows, state, out, blocks)
    routing = make_routing(PARTITIONS, blocks)
    operator = pack_rows(frame.select(*spec.columns), rows, routing).groupBy("bucket")
    packets = operator.transformWithStateInPandas(
        FilterProcessor(plan), OUTPUT_PACKETS, "Append", "None", None
    )
    return unpack_estimates(packets.filter(packets["kind"] == OutputPacket.ESTIMATES), out)


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
LIMIT = Contender("limit", limit, 800_000)
FLOOR = Contender("floor", floor, 2_000)
ROW_API = Contender("per_key_row", row_api, 15_000)
FILTERPY = Contender("per_key_filterpy", filterpy, 3_000)
