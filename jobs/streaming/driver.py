"""Drive a generation's streaming query until it has caught up or is asked to stop."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.errors import PySparkException

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.faults import find_fault
from jobs.core.progress import Progress
from jobs.core.report import Report, format_count, format_rate
from jobs.core.settings import Settings
from jobs.landing.topics import watch_topic, with_topic_id
from jobs.lineage import generations, leases, live_rows
from jobs.lineage.compatibility import collect_row_rules
from jobs.lineage.generation_checkpoint import describe_recovery
from jobs.lineage.generations import LIVE, DeployedModel, read_position
from jobs.lineage.start_point import StartPoint, resolve
from jobs.snapshots.manifests import Manifest
from jobs.spark.failures import STATE_LOST, find_failure
from jobs.spark.job_labels import set_label
from jobs.spark.queries import LOG_TAKEN, await_end, find_cause
from jobs.spark.warehouse import Warehouse
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.dictionary import estimate_comments
from jobs.storage.positions import describe, rank
from jobs.storage.row_changes import describe_columns
from jobs.storage.tables import estimates, measurements
from jobs.streaming.exporting import export, find_last_whole_batch
from jobs.streaming.micro_batch import BatchWatch, StreamTotals
from jobs.streaming.planned_rows import UnplannedCommit, forget_planner
from jobs.streaming.profiler import profiler
from jobs.streaming.query import start_query
from jobs.streaming.recorder import build_recorder
from jobs.supervision.batch_profile import build_profile_table
from jobs.supervision.driver_log import STOPPED, DriverIdentity
from jobs.supervision.metrics import LOOPBACK, Metrics
from jobs.supervision.registered_driver import identify_driver
from kalman import NUMERICS

if TYPE_CHECKING:
    from jobs.lineage.generations import Generation
    from jobs.lineage.leases import Lease
    from jobs.streaming.recorder import Outlet


def continue_former_states(
    model: DeployedModel[Warehouse],
    start: StartPoint,
    owner: DriverIdentity,
    stop: threading.Event,
    note: Callable[[str], None],
    allow_missing_rows: bool,
) -> StartPoint:
    """Return the start of a new generation that continues the live generation's states of format 1.

    Args:
        model: the deployed model.
        start: the start point that names the live generation.
        owner: this driver; it holds the lease of the former generation during the export.
        stop: set if another driver takes the lease over.
        note: called with progress messages.
        allow_missing_rows: also hand over states that lack rows.

    Raises:
        UserError: the generation is a shadow, a driver holds it, or its states lack rows.
    """
    warehouse, former = model.warehouse, start.generation
    if former.status != LIVE:
        raise UserError(
            f"the states of the shadow {former.generation} are of an earlier release's format, which this one only "
            f"reads: `kalman-pipeline upgrade --model {former.model}` makes the shadow anew"
        )
    lease = leases.acquire_lease(warehouse, former, owner)
    with leases.holding(warehouse, lease, stop, done=STOPPED):
        note(f"{former.generation} hands its states over to a new generation")
        manifest, batch = _export_states(model, start, note, allow_missing_rows)
        lease.check()
        place = former.partitions, former.blocks, lease.generation
        made = generations.begin(
            warehouse, manifest, *place, parent=(former.generation, batch), numerics=NUMERICS
        )
    said = (
        f"{former.generation} kept its states in the format of an earlier release; {made.generation} continues them "
        f"from snapshot {manifest.snapshot_id}"
    )
    return StartPoint(made, manifest, start.spec, True, (*start.notes, said))


def _export_states(
    model: DeployedModel[Warehouse], start: StartPoint, note: Callable[[str], None], allow_missing_rows: bool
) -> tuple[Manifest, int]:
    """Return a generation's export and its micro-batch, or its start if no micro-batch completes a version."""
    if find_last_whole_batch(Checkpoint(model.warehouse, start.generation.checkpoint)) is None:
        return start.manifest, -1
    manifest, _ = export(model, start.generation, None, note, allow_missing_rows)
    assert manifest.batch_id is not None
    return manifest, manifest.batch_id


RESTARTS = 3
"""Maximum restarts of the query after it finds micro-batches that an earlier driver has committed."""


class CommittedElsewhere(UserError):
    """Error: an earlier driver, awake again, has committed or planned the running micro-batch."""


@dataclass
class Driver:
    """One run of a stream, which holds the lease of the generation from start to end."""

    settings: Settings
    model: DeployedModel[Warehouse]
    seconds: float | None
    stop: threading.Event
    metrics_port: int | None = None
    metrics_file: str | None = None
    display: Callable[[str], Progress] | None = None
    """Creates the progress display for a model's name; the default is a bar, or lines."""
    metrics_host: str = LOOPBACK

    def __post_init__(self) -> None:
        self.spec = self.model.spec  # `drive` replaces it if the generation has an earlier version

    def drive(
        self,
        adopt: str | None = None,
        name: str | None = None,
        allow_missing: bool = False,
        allow_missing_rows: bool = False,
    ) -> Report:
        """Run the live generation, the generation `name`, or a new generation that adopts a snapshot.

        allow_missing: adopt the snapshot even if some rows would have no live estimate. allow_missing_rows: continue
        states of an earlier release even if they lack rows.

        Raises:
            UserError: another driver runs the generation or took it over, there is no snapshot to start from, the state
                belongs to another model, or the query failed.
        """
        for _ in range(RESTARTS):
            try:
                return self._drive(adopt, name, allow_missing, allow_missing_rows)
            except CommittedElsewhere:
                if self.stop.is_set():
                    raise
                adopt = None  # the generation that adopted the snapshot continues
        return self._drive(adopt, name, allow_missing, allow_missing_rows)

    def _drive(
        self, adopt: str | None, name: str | None, allow_missing: bool, allow_missing_rows: bool
    ) -> Report:
        """Acquire the lease of a generation and run its query to the end."""
        doing = f"stream {self.model.name}"
        start = resolve(self.model, adopt, name, allow_missing)
        spark = self.model.warehouse.spark
        owner = identify_driver(spark)
        if Checkpoint(self.model.warehouse, start.generation.checkpoint).has_states_of_format_1():
            with self._progress() as progress:
                start = continue_former_states(
                    self.model, start, owner, self.stop, progress.note, allow_missing_rows
                )
        chosen, manifest, self.spec, is_new, notes = start
        set_label(spark, doing, "acquire the lease")
        lease = leases.acquire_lease(self.model.warehouse, chosen, owner, collect_row_rules(self.spec))
        generation = lease.generation
        with leases.holding(self.model.warehouse, lease, self.stop):
            set_label(spark, doing, "tell readers what is live")
            self._tell_readers()
            set_label(spark, doing, "start the query")
            with self._progress() as progress:
                totals = self._run(lease, manifest, progress)
                if totals.batches and not lease.lost.is_set():
                    self._comment_estimates()  # a first run creates the table
            if lease.lost.is_set():
                raise UserError(
                    f"this driver lost the lease of generation {generation.generation}: the generation was retired, or "
                    f"another driver took it over",
                    RUN_FAILED,
                )
            return self._report(generation, is_new, notes, totals)

    def _tell_readers(self) -> None:
        """Update the views of live rows and the table comments that other tools read."""
        live_rows.refresh_live_table(self.model.warehouse, self.model.name)
        self._comment_estimates()

    def _comment_estimates(self) -> None:
        """Update the column comments of the estimates table before this driver writes to it.

        Only where writers wait for each other: elsewhere this commit could conflict with an append of another
        generation's driver, and Delta would refuse the append.
        """
        table = estimates(self.model.name)
        if self.model.warehouse.local and self.model.warehouse.exists(table):
            named = estimate_comments(self.model.spec.states, self.model.spec.key, self.model.spec.version)
            describe_columns(self.model.warehouse, table, named)

    @contextmanager
    def _serve_metrics(self, generation: Generation) -> Iterator[list[Outlet]]:
        """Serve or write metrics while the query runs, if the command's options ask for them."""
        if self.metrics_port is None and self.metrics_file is None:
            yield []
            return

        metrics = Metrics(
            generation.model, generation.generation, self.metrics_port, self.metrics_file, self.metrics_host
        )
        try:
            yield [metrics.take]
        finally:
            metrics.close()

    def _progress(self) -> Progress:
        if self.display is not None:
            return self.display(self.model.name)
        return Progress(f"stream {self.model.name}", None, self.settings.quiet, "micro-batch", "es")

    def _run(self, lease: Lease, manifest: Manifest, progress: Progress) -> StreamTotals:
        lease.generation = with_topic_id(self.model.warehouse, lease.generation)
        generation = lease.generation
        if not self._wait_for_rows(generation, progress):
            return StreamTotals()

        def advance(totals: StreamTotals) -> None:
            rows = totals.counts["rows"]
            progress.advance(
                1, f"{format_count(rows, 'row')} · {format_rate(rows, totals.seconds)}" if rows else "no rows"
            )

        try:
            with (
                self._serve_metrics(generation) as outlets,
                watch_topic(self.model.warehouse, self.spec, generation) as check_source,
            ):
                watch = BatchWatch(advance, check_source)
                why = self._run_query(lease, manifest, watch, outlets, by_tasks=True)
                if why is not None and not self.stop.is_set():
                    progress.note(f"Spark reads the measurements from here on, because {why}")
                    self._run_query(lease, manifest, watch, outlets, by_tasks=False)
        except PySparkException as error:
            fault = find_failure(error) or find_fault(error)
            if STATE_LOST in str(error) and fault is None:
                # Spark takes a file that it may not read for a missing one.
                fault = Checkpoint(self.model.warehouse, generation.checkpoint).find_fault()
            problem = f"the stream of {self.model.name} failed: {fault or find_cause(error)}"
            if LOG_TAKEN in str(error):
                lease.check()
                raise CommittedElsewhere(problem, RUN_FAILED) from error
            if STATE_LOST in str(error) and fault is None:
                hint = describe_recovery(self.model.warehouse, generation)
                problem = f"{problem.rstrip('. ')}. Restore it from a copy; or {hint}"
            raise UserError(problem, RUN_FAILED) from error
        return watch.totals

    def _run_query(
        self, lease: Lease, manifest: Manifest, watch: BatchWatch, outlets: list[Outlet], by_tasks: bool
    ) -> str | None:
        """Run the query to its end; return why Spark must read the rows that are left, or None.

        by_tasks: whether tasks read the rows where they can; a failure that this causes is the reason returned.
        """
        query, planner = start_query(self.model, self.spec, lease, manifest, self.seconds, watch, by_tasks)
        try:
            with build_recorder(
                self.model.warehouse, query, watch.totals, lease.generation, outlets
            ) as recorder:
                await_end(query, self.stop, lambda: planner is not None and planner.refusal is not None)
        except PySparkException as error:
            if UnplannedCommit.__name__ not in str(error):
                raise
        finally:
            if planner is not None:
                forget_planner(self.model.warehouse.spark, planner)
        if recorder.problem is not None:
            print(f"warning: progress could not be recorded: {recorder.problem}", file=sys.stderr)
        return None if planner is None else planner.refusal

    def _wait_for_rows(self, generation: Generation, progress: Progress) -> bool:
        """Wait until the source has rows after the snapshot; return False if the run ends first.

        A stream cannot start at a version that does not exist yet, and starting at an earlier one would count rows
        twice. A generation that waits has no checkpoint: its state is still its snapshot.
        """
        if generation.topic is not None:
            return True
        if Checkpoint(self.model.warehouse, generation.checkpoint).find_last_planned() is not None:
            return True
        table = measurements(self.model.name)
        while self.model.warehouse.latest_version(table) <= generation.start_version:
            if self.seconds is None:
                return False
            progress.note(f"waiting for measurements after version {generation.start_version}")
            if self.stop.wait(max(self.seconds, 1.0)):
                return False
        return True

    def _report(
        self, generation: Generation, is_new: bool, notes: Sequence[str], totals: StreamTotals
    ) -> Report:
        position = read_position(self.model.warehouse, generation)
        start = f"began from snapshot {generation.snapshot_id}" if is_new else "resumed from its checkpoint"
        lines = [f"generation {generation.generation} {start}", self._work_line(totals, describe(position))]
        for name, verb, noun, rest in self._list_sentences():
            if totals.counts[name]:
                lines.append(f"{verb} {format_count(totals.counts[name], noun)}{rest}")
        lines += [f"note: {note}" for note in notes]
        data = {
            "model": self.model.name,
            "generation": generation.generation,
            "began": is_new,
            "snapshot": generation.snapshot_id,
            **totals.counts,
            "batches": totals.batches,
            "version": rank(position),
            "position": position,
            "seconds": totals.seconds,
            "notes": list(notes),
        }
        profile = profiler().found
        if profile is None:
            return Report(lines, data)
        return Report(
            lines, {**data, "profile": profile.data()}, tables=[build_profile_table(profile, self.model.name)]
        )

    def _work_line(self, totals: StreamTotals, where: str) -> str:
        if totals.batches == 0:
            # A stopped driver may not have read all available rows.
            start = "stopped before the first micro-batch, at" if self.stop.is_set() else "no new rows after"
            return f"{start} {where}"
        rows, seconds = totals.counts["rows"], totals.seconds
        return (
            f"estimated {format_count(rows, 'row')} in {format_count(totals.batches, 'micro-batch', 'es')}, "
            f"{seconds:.1f} s{f' ({format_rate(rows, seconds)})' if rows else ''}, up to {where}"
        )

    def _list_sentences(self) -> list[tuple[str, str, str, str]]:
        """Return a sentence for each optional count: the count's name, verb, noun, and the rest."""
        spec = self.spec
        late_by = {"strict": "older than the watermark", "replay": "older than the rows kept for replay"}.get(
            spec.order.kind, "older than the key's state"
        )
        drops = spec.duplicates is not None and spec.duplicates.action == "drop"
        return [
            ("late", "quarantined", "late row", f": {late_by}"),
            ("duplicates", "dropped" if drops else "quarantined", "row", " for repeating another"),
            ("corrected", "corrected", "estimate", ""),
            ("expired", "ended", "silent key", f": the last states are in archive/{spec.name}"),
            ("keys_taken", "imported", "newly pretrained key", ""),
            ("keys_held", "skipped", "newly pretrained key", " that had a state already"),
            ("waiting", "waiting for the watermark:", "row", ""),
            ("bad_state", "quarantined", "row", " of keys whose state is not a number"),
            ("rejected", "quarantined", "message", " that did not fit"),
            ("without_inputs", "quarantined", "row", f" whose key is not in {spec.inputs_table}"),
        ]
