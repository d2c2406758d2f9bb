"""The streaming query of a generation: from its measurements through the filter's state into the sink."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

import kalman
from jobs.encoding.estimates import estimate_format
from jobs.encoding.keys import key_kind
from jobs.encoding.packet_kinds import OUTPUT_PACKETS, ROW_PACKETS, TYPED_ROW_PACKETS
from jobs.encoding.routing import make_routing
from jobs.encoding.rows import row_format, row_packer, select_columns
from jobs.encoding.watermark_ticks import event_time_packer
from jobs.ingestion.topics import stream_of
from jobs.key_inputs.join import with_inputs
from jobs.key_inputs.pins import InputPins, join_of
from jobs.lineage import replayed_late_rows
from jobs.lineage.fencing import Fence
from jobs.lineage.generations import Generation
from jobs.snapshots import state_rows, store
from jobs.snapshots.seeds import event_time_policy, event_time_seeds, offered, taken_by
from jobs.spark.user_functions import ship
from jobs.specs.model_spec import ModelSpec
from jobs.state.block_format import state_format
from jobs.state.key_groups import group_begin
from jobs.state.plan import Plan
from jobs.streaming.operators.event_time_processor import EventTimeProcessor
from jobs.streaming.operators.processor import FilterProcessor
from jobs.streaming.operators.wrappers import KeyImporter, PassThroughRejects, pack_messages
from jobs.streaming.sinks import latest_states
from jobs.streaming.sinks.archive import ended_states
from jobs.streaming.sinks.micro_batch import MicroBatchWriter, Totals
from jobs.streaming.sinks.publishing import Publisher, sinks_of
from jobs.streaming.state_reader import states_at
from jobs.warehouse import measurements_table
from jobs.warehouse.checkpoints import Checkpoint
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.tables import measurements
from kalman.filters.rounded import stored_as

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    from jobs.encoding.estimates import EstimateFormat
    from jobs.lineage.leases import Lease
    from jobs.snapshots.manifests import Manifest
    from jobs.specs.sinks import Sinks
    from jobs.streaming.profiler import Profiler
    from jobs.streaming.sinks.latest_states import Latest


def start_query(
    warehouse: Warehouse,
    spec: ModelSpec,
    lease: Lease,
    manifest: Manifest,
    seconds: float | None,
    told: Callable[[Totals], None],
    deployed: ModelSpec,
    profiler: Profiler | None = None,
) -> tuple[StreamingQuery, Totals]:
    """Start the query of a generation from its checkpoint, or from its snapshot if it has committed nothing yet.

    `deployed` is the spec as it is now, whose sinks count, whichever version's states the generation has. A `profiler`
    takes the time of what the query does.
    """
    spark, generation = warehouse.spark, lease.generation
    table = measurements(spec.name)
    kernel = kalman.build(spec.definition(), manifest.parameters)
    ship(spark, spec.definition())
    schema = warehouse.read(table).schema
    kind = key_kind(spec.key, schema)
    rows = row_format(spec, kind, schema)
    state = state_format(
        spec.name, spec.version, spec.states, kernel.fields, kind, kernel.size, stored_as(kernel)
    )
    out = estimate_format(kind, spec, kernel)
    routing = make_routing(generation.partitions, generation.blocks)
    begin = group_begin(kind, spec.definition(), manifest.parameters)
    timing = None
    if spec.timed:
        timing = event_time_policy(spec, rows, manifest)
    checkpoint = Checkpoint(warehouse, generation.checkpoint)
    plan = Plan(
        kernel,
        spec.unit_us,
        rows,
        state,
        out,
        generation.blocks,
        spec.late == "apply",
        begin,
        timing,
        text=checkpoint.keeps_text(),
    )
    spark.conf.set("spark.sql.shuffle.partitions", generation.partitions)

    seeds = pinned = None
    committed, planned = checkpoint.last_commit(), checkpoint.last_planned()
    if committed is None:
        # The state begins in micro-batch 0, which may be tried many times: the snapshot is pinned, never "the newest".
        pinned = store.verify(warehouse, manifest)
        seeds = state_rows.seed_packets(pinned, kernel, kind, state.layout, routing)
        if timing is not None:
            seeds = event_time_seeds(warehouse, manifest, seeds, rows, routing)
        seeds = seeds.groupBy("bucket")
    processor: StatefulProcessor = FilterProcessor(plan) if timing is None else EventTimeProcessor(plan)
    takes_keys = taken_by(warehouse, checkpoint, spec)
    typed = takes_keys or timing is not None
    packer = row_packer(rows, routing, typed) if timing is None else event_time_packer(rows, routing)
    pins = None
    if spec.inputs is not None:
        pins = InputPins(warehouse, spec, kind, generation)
        packer = with_inputs(packer, join_of(spec, rows), typed)
    if profiler is not None:
        packer = profiler.packing(packer)
    if generation.topic is None:
        source = _source(spark, warehouse, spec, generation)
        if takes_keys and "_origin" in source.columns:  # another tool's table may have none
            source = source.filter(~measurements_table.is_history())
        packed = select_columns(source.select(*spec.columns), rows).mapInArrow(
            packer, TYPED_ROW_PACKETS if typed else ROW_PACKETS
        )
    else:
        types = {name: schema[name].dataType.simpleString() for name in spec.naming_columns}
        messages = stream_of(warehouse, spec, generation, types)
        packed = pack_messages(messages, rows, packer, typed)
    if takes_keys:
        # Behind the measurements: what a checkpoint says of its first source is the stream's position.
        packed = packed.unionByName(
            offered(warehouse, spec, manifest.parameters, kernel, kind, state.layout, routing)
        )
        processor = KeyImporter(processor)
    if generation.topic is not None or spec.inputs is not None:
        processor = PassThroughRejects(processor)
    if profiler is not None:
        processor = profiler.operator(processor)
    operator = packed.groupBy("bucket")
    clock = "None"
    if timing is not None and timing.needs_timers:
        clock = "ProcessingTime"
        # By this clock there is always something to wait for: a run that is to end takes micro-batches with rows alone.
        spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", str(seconds is not None).lower())
    packets = operator.transformWithStateInPandas(processor, OUTPUT_PACKETS, "Append", clock, seeds)
    fence = Fence(warehouse, lease, None if planned == committed else planned)
    ended = None if spec.expiry is None else ended_states(kernel, state.layout, kind)
    sink = MicroBatchWriter(generation, rows, out, fence, told, spec.quarantine)
    sink.ended, sink.corrects = ended, spec.order.kind == "replay"
    sink.pins, sink.profiler = pins, profiler
    sink.latest = _latest(
        fence, out, deployed.sinks, manifest, pinned, committed, timing is not None, spec.folder
    )
    sink.publisher = _publisher(warehouse, lease, deployed, committed)
    writer = packets.writeStream.queryName(f"{spec.name} {generation.generation}").foreachBatch(sink)
    writer = writer.option("checkpointLocation", warehouse.path(generation.checkpoint))
    writer = (
        writer.trigger(availableNow=True)
        if seconds is None
        else writer.trigger(processingTime=f"{seconds} seconds")
    )
    query = writer.start()
    if profiler is not None:
        profiler.group = str(query.runId)  # the job group that Spark gives the jobs of a query
    return query, sink.totals


def _latest(
    fence: Fence,
    out: EstimateFormat,
    sinks: Sinks,
    manifest: Manifest,
    pinned: DataFrame | None,
    committed: int | None,
    scattered: bool,
    folder: str | None,
) -> Latest | None:
    """Return what keeps the latest states, with those that there are already; None where the spec wants none."""
    warehouse, generation = fence.warehouse, fence.lease.generation

    def states() -> DataFrame:
        if pinned is not None:
            return pinned
        assert committed is not None
        return states_at(warehouse, generation, manifest, committed, folder)

    if not sinks.latest:
        latest_states.forget(warehouse, generation.model, generation.generation)
        return None
    keeper = latest_states.Latest(fence, out, scattered)
    keeper.begin(states)
    return keeper


def _publisher(
    warehouse: Warehouse, lease: Lease, deployed: ModelSpec, committed: int | None
) -> Publisher | None:
    """Return what hands estimates on, at the place where it was; None where the spec names nothing to hand them to."""
    targets = sinks_of(warehouse, deployed.sinks, deployed.folder)
    publisher = Publisher(warehouse, lease, targets)
    publisher.begin(committed)
    return publisher if publisher.targets else None


def _source(spark: SparkSession, warehouse: Warehouse, spec: ModelSpec, generation: Generation) -> DataFrame:
    """Return the measurements behind the generation's snapshot as a stream."""
    reader = spark.readStream.format("delta").option("startingVersion", generation.start_version + 1)
    if spec.stream.max_files_per_batch is not None:
        reader = reader.option("maxFilesPerTrigger", spec.stream.max_files_per_batch)
    if spec.stream.max_bytes_per_batch is not None:
        reader = reader.option("maxBytesPerTrigger", spec.stream.max_bytes_per_batch)
    rows = reader.load(warehouse.path(measurements(spec.name)))
    if spec.migrate is not None and spec.migrate.keys is not None:
        rows = rows.filter(_has_keys(spec))
    return replayed_late_rows.for_generation(warehouse, rows, generation)


def _has_keys(spec: ModelSpec) -> Column:
    """Return a condition that fails the query at a row without a key: one that was landed with the old keys.

    What is landed has its keys; only another version's spec, with other key columns, leaves them empty.
    """
    missing = F.lit(False)
    for name in spec.key:
        missing = missing | F.col(f"`{name}`").isNull()
    said = (
        f"a row of {measurements(spec.name)} has no {' or '.join(spec.key)}: it was landed by a version "
        f"with other key columns, behind the migration. Roll back, let that version take it in, and upgrade again"
    )
    return F.when(missing, F.raise_error(F.lit(said)).cast("boolean")).otherwise(F.lit(True))
