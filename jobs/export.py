"""Export a stream's state to a snapshot, at the end of one of its micro-batches, without disturbing it.

The state of a committed micro-batch is read from the checkpoint by Spark's state reader, so the stream may run on
meanwhile, in this process or another. The snapshot's position is the micro-batch's own end, and its form that of a
pretrained one. The same micro-batch gives the same snapshot; killed half way, nothing is visible.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from jobs.errors import ALREADY_RUNNING, RUN_FAILED, UserError, first_line
from jobs.labels import labelled
from jobs.positions import said
from jobs.progress import Progress
from jobs.report import Report
from jobs.settings import Settings
from jobs.spec import load_spec
from jobs.tables import Warehouse, measurements
from jobs.verb_profile import profiled

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.checkpoints import Checkpoint
    from jobs.generations import Generation
    from jobs.snapshots import Manifest
    from jobs.state_blocks import StateFormat
    from jobs.waiting_table import Held
    from kalman.types import Filter


@profiled
def run(
    settings: Settings,
    model: str,
    generation: str | None = None,
    batch: int | None = None,
    needed: bool = False,
) -> Report:
    """Export the state of a model's stream.

    Args:
        settings: of the command.
        model: name or path of its spec.
        generation: by default the live one.
        batch: a committed micro-batch whose state is still kept; by default the last.
        needed: end with exit code 3 where no generation is live.

    With `profile` the report says where the time went.

    Raises:
        UserError: no such generation or micro-batch, or one that ends within a version of the measurements.
    """
    from jobs.generations import live, named
    from jobs.session import spark_session
    from jobs.spark_conf import glance_conf

    started = time.monotonic()
    name = load_spec(model, settings.models).name
    spark = spark_session(settings, f"export {name}", glance_conf())
    warehouse = Warehouse(spark, settings.warehouse)
    if needed and generation is None and live(warehouse, name) is None:
        raise UserError(f"model {name} has no live generation", ALREADY_RUNNING)
    with Progress(f"export {name}", None, quiet=settings.quiet) as progress:
        manifest, made = export(warehouse, named(warehouse, name, generation), batch, progress.note)
    return _report(manifest, made, time.monotonic() - started)


def export(
    warehouse: Warehouse,
    generation: Generation,
    batch: int | None = None,
    told: Callable[[str], None] = lambda text: None,
) -> tuple[Manifest, bool]:
    """Return the snapshot of a generation's state at the end of a micro-batch, and if it was made now.

    A generation that has committed nothing is still the snapshot that it began from.
    """
    from jobs.checkpoints import Checkpoint
    from jobs.choice import origin as origin_of
    from jobs.damage import refuse_damaged
    from jobs.generations import REMOVED
    from jobs.input_pins import version_of
    from jobs.snapshots import find_whole, write

    if generation.status == REMOVED:  # what is left of its checkpoint may be a part of it
        raise UserError(f"generation {generation.generation} is removed, and its state with it")
    origin = origin_of(warehouse, generation)
    refuse_damaged(warehouse, generation)
    checkpoint = Checkpoint(warehouse, generation.checkpoint)
    if checkpoint.last_commit() is None:
        if batch is not None:
            raise UserError(f"{generation.generation} has committed no micro-batch, so there is no {batch}")
        return origin, False
    batch, version = _end(checkpoint, generation, batch)
    identity = snapshot_id(generation, batch, version)
    found = find_whole(warehouse, identity)
    if found is not None:
        return found, False
    told(f"reading the state of micro-batch {batch}")
    made = replace(
        origin,
        snapshot_id=identity,
        position=checkpoint.position(batch, generation.start_position),
        generation=generation.generation,
        batch_id=batch,
        cut=None,
        committed_at=None,
        inputs=None if origin.inputs is None else version_of(warehouse, generation, batch),
    )
    states = states_at(warehouse, generation, origin, batch)
    held = None
    if origin.model_spec().timed:
        held = waiting_at(warehouse, generation, origin, batch)
    with labelled(warehouse.spark, f"export {generation.model}", "read the state, write the snapshot"):
        return write(warehouse, replace(made, waiting=None), states, held), True


def snapshot_id(generation: Generation, batch: int, version: int) -> str:
    """Return the id of the snapshot of a generation's micro-batch."""
    digest = hashlib.sha256(f"{generation.checkpoint}/{batch}".encode()).hexdigest()
    return f"{generation.model}-v{generation.model_version}-{version}-{digest[:10]}"


def states_at(warehouse: Warehouse, generation: Generation, origin: Manifest, batch: int) -> DataFrame:
    """Return a generation's states at the end of a committed micro-batch, as the rows of a snapshot.

    Raises:
        UserError: the state cannot be read, or is not that of the generation's model.
    """
    from pyspark.sql import functions as F

    import kalman
    from jobs.keys import key_kind
    from jobs.model_functions import ship
    from jobs.processor import STATE
    from jobs.snapshots import STATE_ROWS, typed_states
    from jobs.state_blocks import state_format
    from jobs.timed_processor import ENDED
    from kalman.rounded import stored_as

    spec = origin.model_spec()
    kernel = kalman.build(spec.definition(), origin.parameters)
    ship(warehouse.spark, spec.definition())
    kind = key_kind(spec.key, warehouse.read(measurements(spec.name)).schema)
    state = state_format(
        spec.name, spec.version, spec.states, kernel.fields, kind, kernel.size, stored_as(kernel)
    )
    blocks = _state(warehouse, generation, STATE, batch)
    if spec.expiry is not None and spec.expiry.returns == "archive":
        blocks = blocks.unionByName(_state(warehouse, generation, ENDED, batch))
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
    from jobs.ids_table import of_blocks
    from jobs.keys import key_kind
    from jobs.packed_rows import row_format
    from jobs.remembered_ids import ids_format
    from jobs.timed_processor import CLOCK, REMEMBERED, WAIT
    from jobs.timed_start import timing_of
    from jobs.waiting_rows import NEVER, Clock
    from jobs.waiting_table import Held, of_parts, row_format_of

    spec = origin.model_spec()
    schema = warehouse.read(measurements(spec.name)).schema
    fmt = row_format(spec, key_kind(spec.key, schema), schema)
    clocks = _state(warehouse, generation, CLOCK, batch).select("value.clock").collect()
    held = [Clock.decode(bytes(row["clock"])) for row in clocks]
    watermark = max((clock.watermark for clock in held), default=NEVER)
    newest = max((clock.newest for clock in held), default=NEVER)
    parts = _state(warehouse, generation, WAIT, batch).select("user_map_value.rows")
    held = Held(of_parts(parts, row_format_of(spec, fmt), fmt), watermark, newest)
    stored = ids_format(spec, fmt)
    if stored is None:
        return held
    blocks = _state(warehouse, generation, REMEMBERED, batch).select("user_map_value.ids")
    return held._replace(ids=of_blocks(blocks, stored, fmt, timing_of(spec, fmt).reach(watermark)))


def _state(warehouse: Warehouse, generation: Generation, name: str, batch: int) -> DataFrame:
    """Return one of the variables of a generation's state at the end of a committed micro-batch."""
    from pyspark.errors import PySparkException

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
        from jobs.snapshots import state_rows
        from jobs.state_text import stored_bytes

        for batch in batches:
            if batch.num_rows:
                blocks = (stored_bytes(value.as_py()) for value in batch.column("states"))
                yield from state_rows(kernel, state.decode_all(blocks), integer)

    return unpack


def _end(checkpoint: Checkpoint, generation: Generation, batch: int | None) -> tuple[int, int]:
    """Return a committed micro-batch and the version of the measurements that it ends with."""
    last = checkpoint.last_commit()
    assert last is not None
    if batch is not None and not 0 <= batch <= last:
        raise UserError(
            f"{generation.generation} has no micro-batch {batch}: its last committed one is {last}"
        )
    version = checkpoint.ends_with(last if batch is None else batch)
    if version is not None:
        return last if batch is None else batch, version
    if batch is not None:
        raise UserError(
            f"micro-batch {batch} of {generation.generation} ends within a version of the measurements, so no "
            f"stream could go on exactly behind it: export another"
        )
    # A version of several files may be spread over micro-batches: the last one that ends with a version will do.
    for earlier in range(last - 1, -1, -1):
        if not checkpoint.has(earlier):
            break
        version = checkpoint.ends_with(earlier)
        if version is not None:
            return earlier, version
    raise UserError(
        f"no micro-batch of {generation.generation} whose state is kept ends with a version of the measurements: "
        f"let the stream catch up, or raise stream.max_files_per_batch in the spec",
        RUN_FAILED,
    )


def _report(manifest: Manifest, made: bool, seconds: float) -> Report:
    where = said(manifest.position)
    if manifest.generation is not None:
        where += f", the end of micro-batch {manifest.batch_id} of {manifest.generation}"
    lines = [f"snapshot {manifest.snapshot_id}: {manifest.key_count:,} keys, {manifest.rows:,} rows, {where}"]
    if not made:
        lines.append("it had been committed before")
    lines.append(f"{seconds:.1f} s")
    return Report(
        lines,
        {
            "model": manifest.model,
            "model_version": manifest.model_version,
            "made": made,
            "snapshot": manifest.snapshot_id,
            "generation": manifest.generation,
            "batch": manifest.batch_id,
            "keys": manifest.key_count,
            "rows": manifest.rows,
            "version": manifest.version,
            "position": manifest.position,
            "seconds": seconds,
        },
    )


if __name__ == "__main__":
    from jobs.cli import main

    main("export")
