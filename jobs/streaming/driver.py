"""Drive a generation's streaming query until it has caught up or is asked to stop."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException

from jobs.core.errors import RUN_FAILED, UserError, first_line
from jobs.core.progress import Progress
from jobs.core.report import Report, plural
from jobs.core.settings import Settings
from jobs.lineage import leases
from jobs.lineage.compatibility import row_rules
from jobs.lineage.damage import recovery_hint
from jobs.lineage.generations import position_of
from jobs.lineage.start_point import resolve
from jobs.observability.batch_profile import table_of
from jobs.observability.metrics import Metrics
from jobs.spark.job_labels import label
from jobs.spark.queries import STATE_LOST, await_end, cause_of
from jobs.specs.model_spec import ModelSpec
from jobs.streaming.profiler import Profiler
from jobs.streaming.query import start_query
from jobs.streaming.recorder import recording
from jobs.supervision.driver_identity import DriverIdentity
from jobs.supervision.driver_log import CAUGHT_UP, FAILED, LOST, STOPPED
from jobs.warehouse.checkpoints import Checkpoint
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.positions import describe, rank
from jobs.warehouse.tables import measurements

if TYPE_CHECKING:
    from jobs.lineage.generations import Generation
    from jobs.lineage.leases import Lease
    from jobs.snapshots.manifests import Manifest
    from jobs.streaming.recorder import Outlet
    from jobs.streaming.sinks.micro_batch import Totals


@dataclass
class Driver:
    """One run of a stream: it holds the generation's lease from start to end."""

    settings: Settings
    warehouse: Warehouse
    spec: ModelSpec
    seconds: float | None
    stop: threading.Event
    metrics_port: int | None = None
    metrics_file: str | None = None
    shown: Callable[[str], Progress] | None = None
    """What makes the display of its progress; by default a bar, or lines, of its own."""
    profile: bool = False
    """Report where the time of the micro-batches went."""

    def __post_init__(self) -> None:
        self.deployed = self.spec  # a generation of an earlier version goes on with that version's
        self._profiler: Profiler | None = None

    def drive(self, adopt: str | None = None, name: str | None = None) -> Report:
        spark, doing = self.warehouse.spark, f"stream {self.spec.name}"
        label(spark, doing, "choose the generation")
        jvm: Any = spark._jvm
        owner = DriverIdentity.this_process(int(jvm.java.lang.ProcessHandle.current().pid()))
        chosen, manifest, self.spec, began, notes = resolve(self.warehouse, self.spec, adopt, name)
        label(spark, doing, "take the lease")
        lease = leases.acquire(self.warehouse, chosen, owner, row_rules(self.spec))
        generation = lease.generation
        error: str | None = None
        try:
            label(spark, doing, "begin the query")
            with leases.heartbeat(self.warehouse, lease, self.stop), self._progress() as progress:
                totals = self._run(lease, manifest, progress)
            if lease.lost.is_set():
                raise UserError(
                    f"generation {generation.generation} is no longer this driver's: it was retired, or taken over",
                    RUN_FAILED,
                )
            return self._report(generation, began, notes, totals)
        except BaseException as problem:
            error = first_line(problem, 500)
            raise
        finally:
            try:
                label(spark, doing, "give the lease back")
                leases.release(self.warehouse, lease, self._how(lease, error), error)
            except Exception:
                if error is None:
                    raise  # otherwise the first error is the one to tell: of a disk that is full, say

    def _how(self, lease: Lease, error: str | None) -> str:
        if lease.lost.is_set():
            return LOST
        if error is not None:
            return FAILED
        return STOPPED if self.stop.is_set() else CAUGHT_UP

    @contextmanager
    def _metrics(self, generation: Generation) -> Iterator[list[Outlet]]:
        """Serve or write metrics while the query runs, if they are asked for."""
        if self.metrics_port is None and self.metrics_file is None:
            yield []
            return

        metrics = Metrics(generation.model, generation.generation, self.metrics_port, self.metrics_file)
        try:
            yield [metrics.take]
        finally:
            metrics.close()

    def _progress(self) -> Progress:
        if self.shown is not None:
            return self.shown(self.spec.name)
        return Progress(f"stream {self.spec.name}", None, quiet=self.settings.quiet)

    def _run(self, lease: Lease, manifest: Manifest, progress: Progress) -> Totals | None:

        generation = lease.generation
        if not self._wait_for_rows(generation, progress):
            return None

        def told(totals: Totals) -> None:
            rate = totals.estimated / totals.seconds
            progress.advance(1, f"micro-batches · {totals.estimated:,} rows · {rate:,.0f} rows/s")

        if self.profile:
            self._profiler = Profiler(self.warehouse.spark)
        profiler = self._profiler
        try:
            with self._metrics(generation) as outlets:
                query, totals = start_query(
                    self.warehouse, self.spec, lease, manifest, self.seconds, told, self.deployed, profiler
                )
                with recording(self.warehouse, query, totals, generation, outlets, profiler) as recorder:
                    await_end(query, self.stop)
            if recorder.problem is not None:
                print(f"warning: progress could not be recorded: {recorder.problem}", file=sys.stderr)
        except PySparkException as error:
            said = f"the stream of {self.spec.name} failed: {cause_of(error)}"
            if STATE_LOST in str(error):
                said = f"{said.rstrip('. ')}. {recovery_hint(self.warehouse, generation)}"
            raise UserError(said, RUN_FAILED) from error
        return totals

    def _wait_for_rows(self, generation: Generation, progress: Progress) -> bool:
        """Wait until the source has something behind the snapshot; False if the run ends before.

        A stream cannot be positioned at a version that does not exist yet, and to position it lower would count
        rows twice. A generation that waits has no checkpoint and is still its own snapshot.
        """
        if generation.topic is not None:
            return True
        if Checkpoint(self.warehouse, generation.checkpoint).last_planned() is not None:
            return True
        table = measurements(self.spec.name)
        while self.warehouse.latest_version(table) <= generation.start_version:
            if self.seconds is None:
                return False
            progress.note(f"waiting for measurements behind version {generation.start_version}")
            if self.stop.wait(max(self.seconds, 1.0)):
                return False
        return True

    def _report(
        self, generation: Generation, began: bool, notes: Sequence[str], totals: Totals | None
    ) -> Report:
        position = position_of(self.warehouse, generation)
        where = describe(position)
        how = f"began from snapshot {generation.snapshot_id}" if began else "went on"
        lines = [f"generation {generation.generation} {how}"]
        rows, late, rejected, batches, seconds = 0, 0, 0, 0, 0.0
        if totals is not None:
            rows, late, rejected = totals.estimated, totals.late, totals.rejected
            batches, seconds = totals.batches, totals.seconds
        if batches == 0:
            # What is stopped early has not looked at all there is.
            early = self.stop.is_set()
            lines.append(
                f"stopped with no micro-batch done, at {where}" if early else f"nothing new behind {where}"
            )
        else:
            rate = rows / seconds if seconds else 0.0
            lines.append(
                f"estimated {plural(rows, 'row')} in {plural(batches, 'micro-batch', 'es')}, "
                f"{seconds:.1f} s ({rate:,.0f} rows/s), up to {where}"
            )
        if late:
            what = {"strict": "behind the watermark", "replay": "older than the rows kept for replay"}.get(
                self.spec.order.kind, "older than the key's state"
            )
            lines.append(f"quarantined {plural(late, 'late row')}: {what}")
        repeated = 0 if totals is None else totals.duplicates
        if repeated:
            drop = self.spec.duplicates is not None and self.spec.duplicates.action == "drop"
            done = "dropped" if drop else "quarantined"
            lines.append(f"{done} {plural(repeated, 'row')} for repeating another")
        corrected = 0 if totals is None else totals.corrected
        if corrected:
            lines.append(f"corrected {plural(corrected, 'estimate')}")
        expired = 0 if totals is None else totals.expired
        if expired:
            lines.append(
                f"ended {plural(expired, 'silent key')}: the last states are in archive/{self.spec.name}"
            )
        taken, held = (0, 0) if totals is None else (totals.taken, totals.held)
        if taken:
            lines.append(f"took over {plural(taken, 'newly pretrained key')}")
        if held:
            lines.append(f"passed over {plural(held, 'newly pretrained key')} that had a state already")
        bad = 0 if totals is None else totals.bad
        waiting = 0 if totals is None else totals.waiting
        if waiting:
            lines.append(f"waiting for the watermark: {plural(waiting, 'row')}")
        if bad:
            lines.append(f"quarantined {plural(bad, 'row')} of keys whose state is not a number")
        if rejected:
            lines.append(f"quarantined {plural(rejected, 'message')} that did not fit")
        unknown = 0 if totals is None else totals.without_inputs
        if unknown:
            table = self.spec.inputs_table
            lines.append(f"quarantined {plural(unknown, 'row')} whose key is not in {table}")
        lines += [f"note: {note}" for note in notes]
        profiled = None if self._profiler is None else self._profiler.found
        return Report(
            lines,
            {
                "model": self.spec.name,
                "generation": generation.generation,
                "began": began,
                "snapshot": generation.snapshot_id,
                "rows": rows,
                "late": late,
                "bad_state": bad,
                "waiting": waiting,
                "duplicates": repeated,
                "expired": expired,
                "corrected": corrected,
                "keys_taken": taken,
                "keys_held": held,
                "rejected": rejected,
                "without_inputs": unknown,
                "batches": batches,
                "version": rank(position),
                "position": position,
                "seconds": seconds,
                "notes": list(notes),
                **({} if profiled is None else {"profile": profiled.data()}),
            },
            tables=[] if profiled is None else [table_of(profiled, self.spec.name)],
        )
