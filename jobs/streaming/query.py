"""The streaming query of a generation: source, stateful operator, sinks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from jobs.landing.topics import stream_of
from jobs.lineage import replayed_late_rows
from jobs.lineage.fencing import Fence
from jobs.lineage.generation_checkpoint import ReachedCommits
from jobs.lineage.generations import DeployedModel, Generation
from jobs.lineage.inputs_table import InputPins, join_inputs, join_of
from jobs.snapshots import store
from jobs.snapshots.model_runtime import (
    ModelRuntime,
    build_initial_state,
    is_importing_new_keys,
    read_offered_states,
)
from jobs.snapshots.state_rows import StateRows
from jobs.spark.queries import plan_once, start_micro_batches
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding.packets import OUTPUT_PACKETS, ROW_PACKETS, TYPED_ROW_PACKETS
from jobs.state.encoding.routing import Routing, make_routing
from jobs.state.encoding.rows import Packer, build_event_time_packer, build_row_packer, select_columns
from jobs.state.plan import Plan
from jobs.storage import measurements_table
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.tables import latest, measurements, refuse_absent
from jobs.streaming.estimate_files import EstimateWriter
from jobs.streaming.exporting import read_states
from jobs.streaming.latest_states import Latest, build_ended_states
from jobs.streaming.micro_batch import BatchWatch, MicroBatchWriter
from jobs.streaming.planned_rows import RowPlanner, choose_planner, forget_planner, read_planned_rows
from jobs.streaming.processors import (
    EventTimeProcessor,
    FilterProcessor,
    KeyImporter,
    PassThroughRejects,
    pack_messages,
)
from jobs.streaming.profiler import profiler
from jobs.streaming.publishing import Publisher, open_sinks
from jobs.streaming.written_files import EstimateFiles

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    from jobs.lineage.leases import Lease
    from jobs.snapshots.manifests import Manifest
    from jobs.specs.source import Sinks
    from jobs.state.plan import EventTimePolicy


def start_query(
    model: DeployedModel[Warehouse],
    spec: ModelSpec,
    lease: Lease,
    manifest: Manifest,
    seconds: float | None,
    watch: BatchWatch,
    by_tasks: bool,
) -> tuple[StreamingQuery, RowPlanner | None]:
    """Start a generation's query from its checkpoint, or from its snapshot if it has committed nothing.

    `spec` defines the generation's states; the deployed model defines the sinks. If `seconds` is None, the query
    processes the available rows, then ends. If `by_tasks`, tasks read the rows where they can; the planner of these
    rows is returned, too.
    """
    to_run, spark = model.with_spec(spec), model.warehouse.spark
    runtime = ModelRuntime.of(model.warehouse, spec, manifest.parameters)
    runtime.ship(spark)
    spark.conf.set("spark.sql.shuffle.partitions", lease.generation.partitions)
    context = QueryContext(to_run, runtime, lease, manifest)
    pins = None if spec.inputs is None else InputPins(to_run, runtime.kind, lease.generation)
    planner = choose_planner(to_run, lease.generation, context.imports_keys) if by_tasks else None
    processor, writer = build_operator(context), build_sinks(context, model.spec, pins, watch)
    try:
        return start(context, open_source(context, planner), processor, writer, seconds), planner
    except BaseException:
        if planner is not None:
            forget_planner(spark, planner)
        raise


@dataclass(frozen=True)
class QueryContext:
    """Values shared by source, operator and sinks of one query; each is read once."""

    model: DeployedModel[Warehouse]
    runtime: ModelRuntime
    lease: Lease
    manifest: Manifest

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def generation(self) -> Generation:
        return self.lease.generation

    @cached_property
    def routing(self) -> Routing:
        return make_routing(self.generation.partitions, self.generation.blocks)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint(self.model.warehouse, self.generation.checkpoint)

    @cached_property
    def committed(self) -> int | None:
        """Return the last committed micro-batch."""
        return self.checkpoint.find_last_commit()

    @cached_property
    def states(self) -> StateRows | None:
        """Return the verified states of the snapshot, or None if the checkpoint has newer ones.

        Micro-batch 0 initialises the state and may run many times, so the snapshot is pinned, never "the newest".
        """
        return (
            store.read_whole_states(self.model.warehouse, self.manifest) if self.committed is None else None
        )

    @cached_property
    def event_time(self) -> EventTimePolicy | None:
        return self.runtime.build_event_time_policy(self.manifest) if self.spec.timed else None

    @cached_property
    def imports_keys(self) -> bool:
        return is_importing_new_keys(self.model.warehouse, self.checkpoint, self.spec)

    @cached_property
    def corrects(self) -> bool:
        """Return whether estimates may be corrected."""
        return self.spec.order.kind == "replay"

    @cached_property
    def files(self) -> EstimateFiles:
        """Return the files of estimates that the operator's tasks write."""
        return EstimateFiles.of(self.model.warehouse, self.generation, self.runtime.estimates, self.corrects)

    @property
    def typed(self) -> bool:
        """Return whether packets have a kind."""
        return self.imports_keys or self.event_time is not None


def open_source(context: QueryContext, planner: RowPlanner | None) -> DataFrame:
    """Return the rows after the generation's snapshot as a stream of packets, with the states of new keys.

    planner: planner of the rows, which tasks then read; None if Spark reads the rows.
    """
    warehouse, spec, runtime = context.model.warehouse, context.spec, context.runtime
    generation, rows = context.generation, runtime.rows
    packer = _build_packer(context)
    if planner is not None:
        return read_planned_rows(warehouse.spark, planner, rows, packer, context.typed)
    if generation.topic is None:
        source = _read_measurements(context.model, generation)
        # A table that another tool wrote may lack the column.
        if context.imports_keys and "_origin" in source.columns:
            source = source.filter(f"NOT {measurements_table.IS_HISTORY}")
        refuse_absent(source.columns, spec.name, spec.columns)
        packed = select_columns(source.select(*spec.columns), rows).mapInArrow(
            packer, TYPED_ROW_PACKETS if context.typed else ROW_PACKETS
        )
    else:
        types = {name: runtime.schema[name].dataType.simpleString() for name in spec.naming_columns}
        messages = stream_of(warehouse, spec, generation, types)
        packed = pack_messages(messages, rows, packer, context.typed)
    if context.imports_keys:
        # After the measurements: the checkpoint's offset of the first source is the position of the stream.
        packed = packed.unionByName(read_offered_states(warehouse, runtime, context.routing))
    return packed


def _build_packer(context: QueryContext) -> Packer:
    spec, rows, routing = context.spec, context.runtime.rows, context.routing
    packer = build_row_packer(rows, routing, context.typed)
    if context.event_time is not None:
        packer = build_event_time_packer(rows, routing)
    if spec.inputs is not None:
        packer = join_inputs(packer, join_of(spec, rows), context.typed)
    return profiler().time_packing(packer)


def build_operator(context: QueryContext) -> StatefulProcessor:
    """Return the wrapped processor that filters packets of rows."""
    spec, runtime, generation = context.spec, context.runtime, context.generation
    plan = Plan(
        kernel=runtime.kernel,
        unit=spec.unit_us,
        rows=runtime.rows,
        state=runtime.state,
        estimates=runtime.estimates,
        blocks=generation.blocks,
        apply_late=spec.late == "apply",
        begin=runtime.begin,
        event_time=context.event_time,
        text=context.checkpoint.has_text_values(),
    )
    processor = FilterProcessor(plan) if plan.event_time is None else EventTimeProcessor(plan)
    wrappers: list[Callable[[StatefulProcessor], StatefulProcessor]] = []
    if context.imports_keys:
        wrappers.append(KeyImporter)
    if generation.topic is not None or spec.inputs is not None:
        wrappers.append(PassThroughRejects)
    for wrap in wrappers:
        processor = wrap(processor)
    return profiler().operator(EstimateWriter(processor, context.files.rows))


def build_sinks(
    context: QueryContext,
    deployed: ModelSpec,
    pins: InputPins | None,
    watch: BatchWatch,
) -> MicroBatchWriter:
    """Prepare each sink of the deployed spec, and return the writer of micro-batches to them."""
    warehouse, spec, runtime, lease = context.model.warehouse, context.spec, context.runtime, context.lease
    planned = context.checkpoint.find_last_planned()
    fence = Fence(warehouse, lease, None if planned == context.committed else planned)
    newest = _begin_latest(context, fence, deployed.sinks)
    publisher = Publisher(warehouse, lease, open_sinks(warehouse, deployed.sinks, deployed.functions_folder))
    publisher.begin(context.committed)
    reached = None
    if context.generation.topic is None:
        reached = ReachedCommits(warehouse, context.generation.checkpoint, measurements(spec.name))
    ended = (
        None
        if spec.expiry is None
        else build_ended_states(runtime.kernel, runtime.state.layout, runtime.kind)
    )
    return MicroBatchWriter(
        generation=context.generation,
        rows=runtime.rows,
        files=context.files,
        fence=fence,
        watch=watch,
        limit=spec.quarantine,
        latest=newest,
        publisher=publisher if publisher.sinks else None,
        pins=pins,
        ended=ended,
        reached=reached,
    )


def start(
    context: QueryContext,
    packed: DataFrame,
    processor: StatefulProcessor,
    writer: MicroBatchWriter,
    seconds: float | None,
) -> StreamingQuery:
    """Start the query that applies the processor to packets and passes its output to the writer."""
    warehouse, generation, states = context.model.warehouse, context.generation, context.states
    clock = "None"
    if context.event_time is not None and context.event_time.needs_timers:
        clock = "ProcessingTime"
        # With this clock a timer is always pending. A run that must end therefore skips micro-batches without rows.
        warehouse.spark.conf.set(
            "spark.sql.streaming.noDataMicroBatches.enabled", str(seconds is not None).lower()
        )
    seeds = None
    if states is not None:
        seeds = build_initial_state(warehouse, context.runtime, context.manifest, states, context.routing)
        seeds = plan_once(warehouse.spark, seeds).groupBy("bucket")
    operator = packed.groupBy("bucket")
    packets = operator.transformWithStateInPandas(processor, OUTPUT_PACKETS, "Append", clock, seeds)
    name, checkpoint = f"{context.spec.name} {generation.generation}", warehouse.path(generation.checkpoint)
    query = start_micro_batches(packets, name, checkpoint, writer, seconds)
    profiler().started(query)
    return query


def _begin_latest(context: QueryContext, fence: Fence, sinks: Sinks) -> Latest | None:
    """Return the table of latest states with a row for each key, or None if the spec has no such sink."""
    generation = context.generation

    def states() -> DataFrame:
        if context.states is not None:
            return context.states.frame
        assert context.committed is not None
        return read_states(context.model, generation, context.manifest, context.committed).frame

    if not sinks.latest:
        fence.forget(latest(generation.model))  # no driver would update its rows
        return None
    sink = Latest(fence, context.runtime.estimates, scattered=context.event_time is not None)
    sink.begin(states)
    return sink


def _read_measurements(model: DeployedModel[Warehouse], generation: Generation) -> DataFrame:
    """Return the measurements after the generation's snapshot as a stream."""
    spec = model.spec
    reader = model.warehouse.spark.readStream.format("delta").option(
        "startingVersion", generation.start_version + 1
    )
    if spec.stream.max_files_per_batch is not None:
        reader = reader.option("maxFilesPerTrigger", spec.stream.max_files_per_batch)
    if spec.stream.max_bytes_per_batch is not None:
        reader = reader.option("maxBytesPerTrigger", spec.stream.max_bytes_per_batch)
    rows = reader.load(model.warehouse.path(measurements(spec.name)))
    if spec.migrate is not None and spec.migrate.keys is not None:
        rows = rows.filter(_has_keys(spec))
    return replayed_late_rows.drop_foreign_copies(model.warehouse, rows, generation)


def _has_keys(spec: ModelSpec) -> Column:
    """Return a condition that fails the query at a row without a key, landed with former key columns.

    Landed rows always have their keys; only a spec version with other key columns leaves them empty.
    """
    missing = F.lit(False)
    for name in spec.key:
        missing = missing | F.col(f"`{name}`").isNull()
    problem = (
        f"a row of {measurements(spec.name)} has no {' or '.join(spec.key)}: a version with other key columns "
        f"landed it after the migration. Roll back, let that version process it, and upgrade again"
    )
    return F.when(missing, F.raise_error(F.lit(problem)).cast("boolean")).otherwise(F.lit(True))
