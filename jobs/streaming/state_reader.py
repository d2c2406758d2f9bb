"""Read a generation's state from its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from jobs.core.errors import RUN_FAILED, UserError, extract_first_line
from jobs.lineage.model import DeployedModel
from jobs.snapshots.row_ids import extract_from_blocks
from jobs.snapshots.runtime import ModelRuntime
from jobs.snapshots.state_rows import StateRows, build_state_rows
from jobs.snapshots.waiting_rows import Held, extract_from_parts
from jobs.spark.read_files import ENCODED, convert_path
from jobs.spark.warehouse import Warehouse
from jobs.state.bucket_clock import Clock
from jobs.state.changes import Entries
from jobs.state.encoding.packet_kinds import NEVER, StateVariable
from jobs.state.text_codec import decode_stored
from jobs.storage.checkpoints import Checkpoint

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.lineage.generations import Generation
    from jobs.snapshots.manifests import Manifest
    from jobs.state.block_format import StateFormat
    from kalman.types import Filter


def read_states(
    model: DeployedModel[Warehouse], generation: Generation, origin: Manifest, batch: int
) -> StateRows:
    """Return a generation's states at the end of a committed micro-batch, as the rows of a snapshot.

    Raises:
        UserError: the state cannot be read, or belongs to another model.
    """
    runtime = _build_runtime(model, origin)
    runtime.ship(model.warehouse.spark)
    integer = runtime.kind.integer
    unpack = _build_unpacker(runtime.kernel, runtime.state)

    def values(name: StateVariable) -> DataFrame:
        return _read_state(model, generation, name, batch).select(
            F.struct("key").cast("string").alias("bucket"),
            F.col("user_map_key.block").alias("number"),
            F.col("user_map_value.states").alias("states"),
        )

    found = values(StateVariable.STATES)
    expiry = runtime.spec.expiry
    if expiry is not None and expiry.returns == "archive":
        found = found.unionByName(values(StateVariable.ENDED))  # partition by partition, never in one task
    return StateRows(found, unpack, integer)


def read_waiting(
    model: DeployedModel[Warehouse], generation: Generation, origin: Manifest, batch: int
) -> Held:
    """Return the waiting rows in a generation's state at the end of a committed micro-batch, and its watermark.

    Raises:
        UserError: the state cannot be read, or belongs to another model.
    """
    runtime = _build_runtime(model, origin)
    stored = _read_state(model, generation, StateVariable.CLOCK, batch).select("value.clock").collect()
    clocks = [Clock.decode(bytes(row["clock"])) for row in stored]
    watermark = max((clock.watermark for clock in clocks), default=NEVER)
    newest = max((clock.max_event_time for clock in clocks), default=NEVER)
    parts = _read_state(model, generation, StateVariable.WAITING_ROWS, batch).select("user_map_value.rows")
    held = Held(extract_from_parts(parts, runtime.waiting, runtime.rows), watermark, newest)
    if runtime.ids is None:
        return held
    blocks = _read_state(model, generation, StateVariable.ROW_IDS, batch).select("user_map_value.ids")
    floor = runtime.build_event_time_policy().late_before(watermark)
    return held._replace(ids=extract_from_blocks(blocks, runtime.ids, runtime.rows, floor))


def _build_runtime(model: DeployedModel[Warehouse], origin: Manifest) -> ModelRuntime:
    return ModelRuntime.of(model.warehouse, origin.model_spec(model.spec.folder), origin.parameters)


def _read_state(model: DeployedModel[Warehouse], generation: Generation, name: str, batch: int) -> DataFrame:
    return read_state_variable(model.warehouse, generation.generation, generation.checkpoint, name, batch)


def read_state_variable(
    warehouse: Warehouse, query: str, checkpoint: str, name: str, batch: int
) -> DataFrame:
    """Return one state variable of a query's checkpoint at the end of a committed micro-batch.

    Raises:
        UserError: the state cannot be read.
    """
    Checkpoint(warehouse, checkpoint).refuse_moved()
    spark = warehouse.spark
    _ = spark.streams.active  # starts the stream manager, which the state reader needs
    root = convert_path(spark, warehouse.root)
    if ENCODED.search(root):
        raise UserError(
            f"states cannot be read at {root}: Spark's reader of states finds no folder with a blank or one of "
            f'#?[]{{}}|^<>%"` in its path, unless the master is local; rename the folder'
        )
    reader = spark.read.format("statestore").option("path", f"{root}/{checkpoint}")
    try:
        return reader.option("stateVarName", name).option("batchId", batch).load()
    except PySparkException as error:
        raise UserError(
            f"the state of {query} at micro-batch {batch} cannot be read: {extract_first_line(error)}",
            RUN_FAILED,
        ) from error


def _build_unpacker(
    kernel: Filter, state: StateFormat
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function from the values of whole buckets to the rows of their keys' states.

    All values of a bucket are in one partition of the state, and so in one task. Changes may come before or after the
    blocks that they change.
    """

    def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        buckets: dict[str, list[tuple[int, bytes]]] = {}
        for batch in batches:
            columns = (batch.column(name).to_pylist() for name in ("bucket", "number", "states"))
            for bucket, number, value in zip(*columns, strict=True):
                buckets.setdefault(bucket, []).append((number, decode_stored(value)))
        for bucket in list(buckets):
            yield from build_state_rows(kernel, Entries.of(buckets.pop(bucket)).states(state))

    return unpack
