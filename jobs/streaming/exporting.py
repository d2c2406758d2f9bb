"""Read a generation's state from its checkpoint, and export the state as a snapshot unless it lacks rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from jobs.core.errors import RUN_FAILED, UserError, extract_first_line
from jobs.core.report import format_count, suggest_new_start
from jobs.lineage.catalog import Catalog, export_id
from jobs.lineage.compatibility import add_commit_to_position, refuse_other_measurements
from jobs.lineage.generation_checkpoint import refuse_damaged
from jobs.lineage.generations import REMOVED, DeployedModel, Generation, walk_ancestors
from jobs.lineage.generations import read_origin_manifest as origin_of
from jobs.lineage.inputs_table import read_pinned_version
from jobs.snapshots.manifests import GOOD, Manifest
from jobs.snapshots.model_runtime import ModelRuntime
from jobs.snapshots.row_ids import extract_from_blocks
from jobs.snapshots.state_rows import StateRows, build_state_rows
from jobs.snapshots.store import find_whole, write
from jobs.snapshots.verified_rows import read_rows
from jobs.snapshots.waiting_rows import Held, extract_from_parts
from jobs.spark.hadoop_files import ENCODED, convert_path
from jobs.spark.job_labels import label_jobs
from jobs.spark.warehouse import Warehouse
from jobs.state.encoding.packets import NEVER, StateVariable
from jobs.state.key_states import Entries
from jobs.state.reorder_buffer import Clock
from jobs.state.spark_values import decode_stored
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.tables import estimates

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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
    """Return the waiting rows in a generation's state at the end of a committed micro-batch, and the watermark.

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
    states = Checkpoint(warehouse, checkpoint)
    states.refuse_moved()
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
        why = states.find_fault() or extract_first_line(error)
        raise UserError(
            f"the state of {query} at micro-batch {batch} cannot be read: {why}",
            RUN_FAILED,
        ) from error


def _build_unpacker(
    kernel: Filter, state: StateFormat
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function from the values of whole buckets to the state rows of the buckets' keys.

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


ALLOW = "--allow-missing-rows"


class MissingRows(NamedTuple):
    """The number of rows that a generation's state lacks at the end of a micro-batch, and the number of their keys."""

    generation: Generation
    batch: int
    rows: int
    keys: int


def refuse_missing_rows(warehouse: Warehouse, generation: Generation, end: Manifest) -> None:
    """Refuse a generation if its state, written as snapshot `end`, or the state of an ancestor lacks rows.

    Raises:
        UserError: rows are missing; the message has the command that computes the state again.
    """
    found = find_missing_rows(warehouse, generation, end)
    if found is None:
        return
    raise UserError(
        f"the state of {found.generation.generation} at micro-batch {found.batch} lacks "
        f"{format_count(found.rows, 'row')} of "
        f"{format_count(found.keys, 'key')} that it has estimated: a release before 0.3.0 combined the states of two "
        f"attempts of a micro-batch (CHANGELOG.md). {_suggest_remedy(generation, found.generation)}",
        RUN_FAILED,
    )


def find_missing_rows(warehouse: Warehouse, generation: Generation, end: Manifest) -> MissingRows | None:
    """Return the rows that a generation's state lacks, or else the rows that an ancestor's handed-over state lacked.

    end: snapshot of the generation's state at the end of a micro-batch. Models whose rows wait for a watermark are not
    compared, because all attempts of their micro-batches wrote the same files.
    """
    catalog = Catalog(warehouse)
    manifest: Manifest | None = end
    for at in walk_ancestors(catalog.generations(generation.model), generation):
        if manifest is None or manifest.generation != at.generation or manifest.model_spec().timed:
            return None
        found = _compare_missing_rows(warehouse, at, catalog.manifest(at.snapshot_id), manifest)
        if found is not None:
            return found
        manifest = catalog.export_behind(at.snapshot_id)
    return None


def _compare_missing_rows(
    warehouse: Warehouse, generation: Generation, origin: Manifest | None, end: Manifest
) -> MissingRows | None:
    """Compare the number of rows that entered a state since its start with the generation's estimates."""
    table, batch = estimates(generation.model), end.batch_id
    if (
        batch is None
        or origin is None
        or {origin.status, end.status} != {GOOD}
        or not warehouse.exists(table)
    ):
        return None
    mine = (F.col("generation") == generation.generation) & (F.col("batch_id") <= batch)
    # A flagged row does not change the state of its key.
    estimated = warehouse.read(table).filter(mine & F.col("flags").isNull())
    # Newly pretrained keys bring rows that this generation has not estimated, so each key is compared.
    if (
        Checkpoint(warehouse, generation.checkpoint).sources() == 1
        and end.rows - origin.rows >= estimated.count()
    ):
        return None
    began, ended = (
        read_rows(warehouse, one.snapshot_id, one.model, one.snapshots_version).select(
            F.col("key").cast("string"), F.col("state_index").alias(name)
        )
        for one, name in ((origin, "began"), (end, "ended"))
    )
    counted = estimated.groupBy(F.col("key").cast("string")).agg(F.count("*").alias("estimated"))
    joined = counted.join(ended, on="key", how="left").join(began, on="key", how="left")
    reflected = F.coalesce("ended", F.lit(0)) - F.coalesce("began", F.lit(0))
    lacking = joined.select((F.col("estimated") - reflected).alias("rows")).filter("rows > 0")
    found = lacking.agg(F.sum("rows").alias("rows"), F.count("*").alias("keys")).first()
    assert found is not None
    return MissingRows(generation, batch, found["rows"], found["keys"]) if found["keys"] else None


def _suggest_remedy(live: Generation, hurt: Generation) -> str:
    """Return the command that computes a state again from a snapshot and the rows after it."""
    if live.fingerprint == hurt.fingerprint:
        how = f"`kalman-pipeline stream --model {live.model} --adopt {hurt.snapshot_id}` computes"
    else:
        how = f"{suggest_new_start(live.model)}, compute"
    return f"{how} the state anew from its rows. Where these are gone, `stream {ALLOW}` goes on with the state as it is"


def export(
    model: DeployedModel[Warehouse],
    generation: Generation,
    batch: int | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
    allow_missing_rows: bool = False,
) -> tuple[Manifest, bool]:
    """Return the snapshot of a generation's state at the end of a micro-batch, and whether this call made it.

    A generation that has committed nothing has the state of its starting snapshot. By default, the micro-batch is the
    last that completes a version of the measurements. With `allow_missing_rows`, the export does not compare a state
    of format 1 with the estimates.

    Raises:
        UserError: the generation is removed or damaged, its measurements have changed, the micro-batch does not exist,
            or the state lacks rows that were estimated.
    """
    warehouse = model.warehouse
    if generation.status == REMOVED:  # the checkpoint may be partly deleted
        raise UserError(f"generation {generation.generation} is removed, and its state with it")
    origin = origin_of(warehouse, generation)
    refuse_damaged(warehouse, generation)
    refuse_other_measurements(warehouse, generation, origin)
    checkpoint = Checkpoint(warehouse, generation.checkpoint)
    if checkpoint.find_last_commit() is None:
        if batch is not None:
            raise UserError(f"{generation.generation} has no micro-batch {batch}: it has committed none")
        return origin, False
    batch, version = _end(checkpoint, generation, batch)
    check: Callable[[Manifest], None] | None = None
    if checkpoint.has_states_of_format_1() and not allow_missing_rows:
        check = partial(refuse_missing_rows, warehouse, generation)
    identity = export_id(generation, batch, version)
    found = find_whole(warehouse, identity)
    if found is not None:
        if check is not None:
            check(found)
        return found, False
    on_progress(f"reading the state of micro-batch {batch}")
    made = replace(
        origin,
        snapshot_id=identity,
        position=add_commit_to_position(
            warehouse, generation, checkpoint.position(batch, generation.start_position)
        ),
        generation=generation.generation,
        batch_id=batch,
        parent=None,
        cut=None,
        committed_at=None,
        numerics=generation.numerics,
        inputs=None if origin.inputs is None else read_pinned_version(warehouse, generation, batch),
    )
    states = read_states(model, generation, origin, batch)
    held = None
    if origin.model_spec().timed:
        held = read_waiting(model, generation, origin, batch)
    with label_jobs(warehouse.spark, f"export {generation.model}", "read the state, write the snapshot"):
        return write(warehouse, replace(made, waiting=None), states, held, check=check), True


def _end(checkpoint: Checkpoint, generation: Generation, batch: int | None) -> tuple[int, int]:
    """Return a committed micro-batch and the version of the measurements that it completes."""
    last = checkpoint.find_last_commit()
    assert last is not None
    if batch is not None and not 0 <= batch <= last:
        raise UserError(
            f"{generation.generation} has no micro-batch {batch}: its last committed one is {last}"
        )
    if batch is not None:
        version = checkpoint.ends_with(batch)
        if version is not None:
            return batch, version
        raise UserError(
            f"micro-batch {batch} of {generation.generation} ends within a version of the measurements, so no "
            f"stream could start exactly after it: export another"
        )
    whole = find_last_whole_batch(checkpoint)
    if whole is not None:
        return whole
    raise UserError(
        f"no micro-batch of {generation.generation} whose state is kept completes a version of the measurements: "
        f"let the stream catch up, or raise stream.max_files_per_batch in the spec",
        RUN_FAILED,
    )


def find_last_whole_batch(checkpoint: Checkpoint) -> tuple[int, int] | None:
    """Return the last committed micro-batch that completes a version, and this version; None if there is none.

    A version with many files may be divided into several micro-batches.
    """
    for batch in reversed(checkpoint.commits()):
        if not checkpoint.has(batch):
            break
        version = checkpoint.ends_with(batch)
        if version is not None:
            return batch, version
    return None
