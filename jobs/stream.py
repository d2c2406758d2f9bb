"""Start or resume a model's stream: by itself the right one of the two, and never two drivers at once.

No live generation: one begins from the newest good snapshot, positioned exactly behind it. A live one: its checkpoint
goes on. `--adopt` begins a new generation from a snapshot and retires the old one. Killed at any moment, the next
start goes on from the last committed micro-batch; rows that were half written are not seen, none is lost or doubled.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from jobs.errors import RUN_FAILED, UserError, first_line
from jobs.progress import Progress
from jobs.report import Report
from jobs.settings import Settings
from jobs.spec import ModelSpec, load_spec
from jobs.tables import Warehouse, measurements, need_measurements

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from jobs.generations import Generation
    from jobs.sink import Totals
    from jobs.snapshots import Manifest

AVAILABLE_NOW = "available-now"
POLL_SECONDS = 0.2
FINISH_SECONDS = 120.0
"""How long a stop waits for the running micro-batch before it interrupts it (which loses nothing)."""


def run(settings: Settings, model: str, trigger: str = AVAILABLE_NOW, adopt: str | None = None) -> Report:
    """Start or resume the stream of a model and return when it ends.

    Args:
        settings: of the command.
        model: name or path of its spec.
        trigger: `available-now` (take in what is there, then end), or seconds between micro-batches (until SIGTERM).
        adopt: id of a snapshot from which a new generation is to begin.

    Raises:
        UserError: no snapshot to start from, another driver, a state that means something else, a failed query.
    """
    from jobs.generations import stream_lock
    from jobs.session import spark_session
    from jobs.spark_conf import interpreted_conf

    spec = load_spec(model, settings.models, deep=True)
    seconds = _trigger_seconds(trigger)
    with stream_lock(settings.warehouse, spec.name), _stop_signal() as stop:
        spark = spark_session(settings, f"stream {spec.name}", interpreted_conf())
        warehouse = Warehouse(spark, settings.warehouse)
        need_measurements(warehouse, spec.name)
        driver = _Driver(settings, warehouse, spec, seconds, stop)
        return driver.drive(adopt)


@dataclass
class _Driver:
    """One run of a stream: it holds the generation's lease from start to end."""

    settings: Settings
    warehouse: Warehouse
    spec: ModelSpec
    seconds: float | None
    stop: threading.Event

    def drive(self, adopt: str | None) -> Report:
        from jobs import generations
        from jobs.owners import Owner

        spark = self.warehouse.spark
        jvm: Any = spark._jvm
        owner = Owner.this_process(int(jvm.java.lang.ProcessHandle.current().pid()))
        generation, manifest, began = _choose(self.warehouse, self.spec, adopt)
        generation = generations.acquire(self.warehouse, generation, owner)
        error: str | None = None
        try:
            with _heartbeat(self.warehouse, generation, self.stop) as lost, self._progress() as progress:
                totals = self._run(generation, manifest, progress)
            if lost.is_set():
                raise UserError(
                    f"generation {generation.generation} was taken over by another driver", RUN_FAILED
                )
            return self._report(generation, began, totals)
        except BaseException as problem:
            error = first_line(problem, 500)
            raise
        finally:
            generations.release(self.warehouse, generation, error)

    def _progress(self) -> Progress:
        return Progress(f"stream {self.spec.name}", None, quiet=self.settings.quiet)

    def _run(self, generation: Generation, manifest: Manifest, progress: Progress) -> Totals | None:
        from pyspark.errors import PySparkException

        if not self._wait_for_rows(generation, progress):
            return None

        def told(totals: Totals) -> None:
            rate = totals.estimated / totals.seconds
            progress.advance(1, f"micro-batches · {totals.estimated:,} rows · {rate:,.0f} rows/s")

        try:
            query, totals = _start(self.warehouse, self.spec, generation, manifest, self.seconds, told)
            _await(query, self.stop)
        except PySparkException as error:
            raise UserError(f"the stream of {self.spec.name} failed: {_cause(error)}", RUN_FAILED) from error
        return totals

    def _wait_for_rows(self, generation: Generation, progress: Progress) -> bool:
        """Wait until the source has something behind the snapshot; False if the run ends before.

        A stream cannot be positioned at a version that does not exist yet, and to position it lower would count
        rows twice. A generation that waits has no checkpoint and is still its own snapshot.
        """
        from jobs.checkpoints import Checkpoint

        if Checkpoint(self.warehouse.spark, generation.checkpoint).last_planned() is not None:
            return True
        table = measurements(self.spec.name)
        while self.warehouse.latest_version(table) <= generation.start_version:
            if self.seconds is None:
                return False
            progress.note(f"waiting for measurements behind version {generation.start_version}")
            if self.stop.wait(max(self.seconds, 1.0)):
                return False
        return True

    def _report(self, generation: Generation, began: bool, totals: Totals | None) -> Report:
        from jobs.checkpoints import Checkpoint

        done = Checkpoint(self.warehouse.spark, generation.checkpoint).progressed()
        version = generation.start_version if done is None else done.version
        how = f"began from snapshot {generation.snapshot_id}" if began else "went on"
        lines = [f"generation {generation.generation} {how}"]
        rows, late, batches, seconds = 0, 0, 0, 0.0
        if totals is not None:
            rows, late, batches, seconds = totals.estimated, totals.late, totals.batches, totals.seconds
        if batches == 0:
            lines.append(f"nothing new behind version {version} of its measurements")
        else:
            rate = rows / seconds if seconds else 0.0
            lines.append(
                f"estimated {rows:,} rows in {batches} micro-batches, {seconds:.1f} s ({rate:,.0f} rows/s), "
                f"up to version {version}"
            )
        if late:
            lines.append(f"quarantined {late:,} rows that were older than their key's state")
        return Report(
            lines,
            {
                "model": self.spec.name,
                "generation": generation.generation,
                "began": began,
                "snapshot": generation.snapshot_id,
                "rows": rows,
                "late": late,
                "batches": batches,
                "version": version,
                "seconds": seconds,
            },
        )


def _choose(warehouse: Warehouse, spec: ModelSpec, adopt: str | None) -> tuple[Generation, Manifest, bool]:
    """Return the generation to drive, its snapshot, and if it begins now."""
    from jobs import generations, snapshots

    live = generations.live(warehouse, spec.name)
    if adopt is not None and (live is None or live.snapshot_id != adopt):
        manifest = _adoptable(warehouse, spec, adopt)
        if live is not None:
            generations.refuse_if_driven(live)
        return _begin(warehouse, spec, manifest), manifest, True
    if live is None:
        manifest = snapshots.newest_startable(warehouse, spec.name, spec.fingerprint())
        if manifest is None:
            raise UserError(_no_snapshot(warehouse, spec))
        return _begin(warehouse, spec, manifest), manifest, True
    generations.check_unchanged(live, spec.fingerprint(), spec.version)
    manifest = snapshots.find(warehouse, live.snapshot_id)
    if manifest is None:
        raise UserError(
            f"the manifest of snapshot {live.snapshot_id}, from which {live.generation} began, is missing",
            RUN_FAILED,
        )
    return live, manifest, False


def _adoptable(warehouse: Warehouse, spec: ModelSpec, snapshot_id: str) -> Manifest:
    from jobs import snapshots

    manifest = snapshots.find(warehouse, snapshot_id)
    if manifest is None or manifest.model != spec.name:
        known = [one.snapshot_id for one in snapshots.all_of(warehouse, spec.name)]
        have = f"it has {', '.join(known[-5:])}" if known else "it has none"
        raise UserError(f"--adopt {snapshot_id}: model {spec.name} has no such snapshot ({have})")
    if manifest.fingerprint != spec.fingerprint():
        raise UserError(
            f"--adopt {snapshot_id}: it is of version {manifest.model_version} of {spec.name} and the spec, version "
            f"{spec.version}, gives the state another meaning: pretrain the spec as it is now"
        )
    if manifest.cut is not None:
        raise UserError(
            f"--adopt {snapshot_id}: it is history before {manifest.cut:%Y-%m-%d %H:%M} UTC only; rows after that, "
            f"up to version {manifest.version}, would be lost. Pretrain up to a version instead"
        )
    return manifest


def _no_snapshot(warehouse: Warehouse, spec: ModelSpec) -> str:
    from jobs import snapshots

    known = snapshots.all_of(warehouse, spec.name)
    text = f"model {spec.name} has no snapshot that a stream can start from"
    if known:
        text += f" ({len(known)} of other versions, or of history only)"
    return f"{text}: make one with `kalman-pipeline pretrain --model {spec.name}`"


def _begin(warehouse: Warehouse, spec: ModelSpec, manifest: Manifest) -> Generation:
    from jobs import generations

    partitions = spec.stream.partitions or warehouse.spark.sparkContext.defaultParallelism
    keys = max(manifest.key_count, spec.stream.expected_keys or 0, 1)
    blocks = max(1, -(-keys // (partitions * spec.stream.keys_per_block)))
    return generations.begin(warehouse, manifest, partitions, blocks)


def _start(
    warehouse: Warehouse,
    spec: ModelSpec,
    generation: Generation,
    manifest: Manifest,
    seconds: float | None,
    told: Any,
) -> tuple[StreamingQuery, Totals]:
    """Start the query of a generation from its checkpoint, or from its snapshot if it has committed nothing yet."""
    import kalman
    from jobs import snapshots
    from jobs.checkpoints import Checkpoint
    from jobs.estimates import EstimateFormat
    from jobs.keys import key_kind
    from jobs.packed_rows import RowFormat, pack_rows
    from jobs.processor import OUTPUT, FilterProcessor, Plan
    from jobs.routing import make_routing
    from jobs.sink import Sink
    from jobs.state_blocks import state_format

    spark = warehouse.spark
    table = measurements(spec.name)
    kernel = kalman.build(spec.definition(), manifest.parameters)
    kind = key_kind(spec.key, warehouse.read(table).schema)
    rows = RowFormat(kind, spec.time, tuple(spec.measurement), tuple(spec.control))
    state = state_format(spec.name, spec.version, spec.states, kernel.fields, kind, kernel.size)
    diagonal = spec.outputs.covariance == "diagonal"
    out = EstimateFormat(kind, len(spec.states), diagonal, tuple(kernel.outputs.items()))
    routing = make_routing(generation.partitions, generation.blocks)
    plan = Plan(kernel, spec.unit_us, rows, state, out, generation.blocks, spec.late == "apply")
    spark.conf.set("spark.sql.shuffle.partitions", generation.partitions)

    seeds = None
    if Checkpoint(spark, generation.checkpoint).last_commit() is None:
        # The state begins in micro-batch 0, which may be tried many times: the snapshot is pinned, never "the newest".
        pinned = snapshots.verify(warehouse, manifest)
        seeds = snapshots.seed_packets(pinned, kernel, kind, state.layout, routing).groupBy("bucket")
    source = _source(spark, warehouse, spec, generation)
    operator = pack_rows(source.select(*spec.columns), rows, routing).groupBy("bucket")
    packets = operator.transformWithStateInPandas(FilterProcessor(plan), OUTPUT, "Append", "None", seeds)
    sink = Sink(warehouse, generation, rows, out, told)
    writer = packets.writeStream.queryName(f"{spec.name} {generation.generation}").foreachBatch(sink)
    writer = writer.option("checkpointLocation", generation.checkpoint)
    writer = (
        writer.trigger(availableNow=True)
        if seconds is None
        else writer.trigger(processingTime=f"{seconds} seconds")
    )
    return writer.start(), sink.totals


def _source(spark: SparkSession, warehouse: Warehouse, spec: ModelSpec, generation: Generation) -> DataFrame:
    """Return the measurements behind the generation's snapshot as a stream."""
    reader = spark.readStream.format("delta").option("startingVersion", generation.start_version + 1)
    if spec.stream.max_files_per_batch is not None:
        reader = reader.option("maxFilesPerTrigger", spec.stream.max_files_per_batch)
    if spec.stream.max_bytes_per_batch is not None:
        reader = reader.option("maxBytesPerTrigger", spec.stream.max_bytes_per_batch)
    return reader.load(warehouse.path(measurements(spec.name)))


def _await(query: StreamingQuery, stop: threading.Event) -> None:
    """Wait for the query's end; on a stop signal let the running micro-batch finish first."""
    while query.isActive and not stop.wait(POLL_SECONDS):
        pass
    if query.isActive:
        running = query.status["isTriggerActive"]
        before = _last_batch(query)
        waited = 0.0
        while running and query.isActive and _last_batch(query) == before and waited < FINISH_SECONDS:
            time.sleep(POLL_SECONDS)
            waited += POLL_SECONDS
            running = query.status["isTriggerActive"]
        query.stop()
    problem = query.exception()
    if problem is not None:
        raise problem


def _last_batch(query: StreamingQuery) -> int:
    progress = query.lastProgress
    return -1 if progress is None else int(progress["batchId"])


@contextmanager
def _stop_signal() -> Iterator[threading.Event]:
    """Turn SIGTERM and Ctrl-C into an event, so that the stream can finish its micro-batch."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _heartbeat(
    warehouse: Warehouse, generation: Generation, stop: threading.Event
) -> Iterator[threading.Event]:
    """Renew the lease from a thread of its own; a lease that was lost stops the stream."""
    from jobs import generations
    from jobs.owners import HEARTBEAT_SECONDS

    done, lost = threading.Event(), threading.Event()

    def renew() -> None:
        while not done.wait(HEARTBEAT_SECONDS):
            try:
                held = generations.beat(warehouse, generation)
            except Exception:  # one that fails must not end the stream; the next one tells
                continue
            if not held:
                lost.set()
                stop.set()
                return

    thread = threading.Thread(target=renew, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield lost
    finally:
        done.set()
        thread.join()


def _trigger_seconds(trigger: str) -> float | None:
    if trigger == AVAILABLE_NOW:
        return None
    try:
        seconds = float(trigger)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise UserError(f"--trigger {trigger}: give {AVAILABLE_NOW}, or a number of seconds")
    return seconds


def _cause(error: BaseException) -> str:
    """Return the line of an error that says most: the innermost exception raised in Python, else the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    raised = [line for line in lines if line.startswith(("jobs.", "kalman.", "ValueError", "StateMismatch"))]
    return (raised[-1] if raised else lines[0] if lines else type(error).__name__)[:600]


if __name__ == "__main__":
    from jobs.cli import main

    main("stream")
