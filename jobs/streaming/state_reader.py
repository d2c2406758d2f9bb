"""Read a generation's state out of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

import kalman
from jobs.core.errors import RUN_FAILED, UserError, first_line
from jobs.encoding.keys import key_kind
from jobs.encoding.packet_kinds import NEVER, StateVariable
from jobs.encoding.rows import row_format
from jobs.snapshots.row_ids import of_blocks
from jobs.snapshots.seeds import event_time_policy
from jobs.snapshots.state_rows import STATE_ROWS, state_rows, typed_states
from jobs.snapshots.waiting_rows import Held, of_parts
from jobs.spark.user_functions import ship
from jobs.state.block_format import state_format
from jobs.state.bucket_clock import Clock
from jobs.state.reorder_buffer import row_format_of
from jobs.state.row_ids import ids_format
from jobs.state.text_codec import stored_bytes
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.tables import measurements
from kalman.filters.rounded import stored_as

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.lineage.generations import Generation
    from jobs.snapshots.manifests import Manifest
    from jobs.state.block_format import StateFormat
    from kalman.types import Filter


def states_at(
    warehouse: Warehouse, generation: Generation, origin: Manifest, batch: int, folder: str | None
) -> DataFrame:
    """Return a generation's states at the end of a committed micro-batch, as the rows of a snapshot.

    folder: of the model's functions (`ModelSpec.folder`).

    Raises:
        UserError: the state cannot be read, or is not that of the generation's model.
    """
    spec = origin.model_spec(folder)
    kernel = kalman.build(spec.definition(), origin.parameters)
    ship(warehouse.spark, spec.definition())
    kind = key_kind(spec.key, warehouse.read(measurements(spec.name)).schema)
    state = state_format(
        spec.name, spec.version, spec.states, kernel.fields, kind, kernel.size, stored_as(kernel)
    )
    blocks = _state(warehouse, generation, StateVariable.STATES, batch)
    if spec.expiry is not None and spec.expiry.returns == "archive":
        blocks = blocks.unionByName(_state(warehouse, generation, StateVariable.ENDED, batch))
    key_type = "bigint" if kind.integer else "string"
    rows = blocks.select(F.col("user_map_value.states").alias("states")).mapInArrow(
        _unpacker(kernel, state, kind.integer), f"key {key_type}, {STATE_ROWS}"
    )
    return typed_states(rows)


def waiting_at(warehouse: Warehouse, generation: Generation, origin: Manifest, batch: int) -> Held:
    """Return the rows that wait in a generation's state at the end of a committed micro-batch, and its watermark.

    Raises:
        UserError: the state cannot be read, or is not that of the generation's model.
    """
    spec = origin.model_spec()
    schema = warehouse.read(measurements(spec.name)).schema
    fmt = row_format(spec, key_kind(spec.key, schema), schema)
    clocks = _state(warehouse, generation, StateVariable.CLOCK, batch).select("value.clock").collect()
    held = [Clock.decode(bytes(row["clock"])) for row in clocks]
    watermark = max((clock.watermark for clock in held), default=NEVER)
    newest = max((clock.max_event_time for clock in held), default=NEVER)
    parts = _state(warehouse, generation, StateVariable.WAITING_ROWS, batch).select("user_map_value.rows")
    held = Held(of_parts(parts, row_format_of(spec, fmt), fmt), watermark, newest)
    stored = ids_format(spec, fmt)
    if stored is None:
        return held
    blocks = _state(warehouse, generation, StateVariable.ROW_IDS, batch).select("user_map_value.ids")
    return held._replace(
        ids=of_blocks(blocks, stored, fmt, event_time_policy(spec, fmt).late_before(watermark))
    )


def _state(warehouse: Warehouse, generation: Generation, name: str, batch: int) -> DataFrame:
    """Return one of the variables of a generation's state at the end of a committed micro-batch."""
    spark = warehouse.spark
    _ = spark.streams.active  # the state reader needs what only the stream manager starts
    reader = spark.read.format("statestore").option("path", warehouse.path(generation.checkpoint))
    try:
        return reader.option("stateVarName", name).option("batchId", batch).load()
    except PySparkException as error:
        raise UserError(
            f"the state of {generation.generation} at micro-batch {batch} cannot be read: {first_line(error)}",
            RUN_FAILED,
        ) from error


def _unpacker(
    kernel: Filter, state: StateFormat, integer: bool
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                blocks = (stored_bytes(value.as_py()) for value in batch.column("states"))
                yield from state_rows(kernel, state.decode_all(blocks), integer)

    return unpack
