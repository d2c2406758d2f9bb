"""Write the packets of a micro-batch exactly once: accepted rows to estimates, refused rows to quarantine.

A micro-batch that runs again after a kill has the same rows, and skips the rows that were committed. Writes of a driver
that has lost its lease are refused (`jobs.lineage.fencing`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import functions as F

from jobs.lineage.fencing import Fence, RowGroup
from jobs.lineage.generation_checkpoint import ReachedCommits, find_half_written_batch
from jobs.lineage.generations import Generation
from jobs.lineage.inputs_table import InputPins
from jobs.spark.conf import set_codegen_for
from jobs.spark.job_labels import set_label
from jobs.specs.row_order import QuarantineLimit
from jobs.state.encoding.packets import OutputPacket
from jobs.state.encoding.rows import RowFormat
from jobs.storage.quarantine import TABLE, build_refusal, is_over_limit
from jobs.storage.tables import archive
from jobs.streaming.estimate_files import FILES
from jobs.streaming.latest_states import Latest, add_marks
from jobs.streaming.processors import unpack_rejected_rows
from jobs.streaming.profiler import NoProfiler, profiler
from jobs.streaming.publishing import Publisher, write_to_sink
from jobs.streaming.refused_rows import REASONS, add_row_ids, build_refused_rows, build_topic_quarantine
from jobs.streaming.written_files import EstimateFiles, FileEstimates, WrittenPart, list_written_parts
from jobs.supervision.batch_profile import FILTER, TO_DELTA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_OF_TOPIC = "source LIKE 'kafka:%'"
"""SQL condition for the quarantine rows that are messages of a topic."""

KEPT_BATCHES = 1000
"""Number of micro-batches whose counts are kept until the counts are recorded."""


COUNTED = {
    OutputPacket.LATE: "late",
    OutputPacket.LATE_BY_WATERMARK: "late",
    OutputPacket.BEYOND_REPLAY_WINDOW: "late",
    OutputPacket.BAD_STATE: "bad_state",
    OutputPacket.DUPLICATE: "duplicates",
    OutputPacket.DUPLICATE_ID: "duplicates",
    OutputPacket.DROPPED: "duplicates",
    OutputPacket.EXPIRED: "expired",
    OutputPacket.ESTIMATES_FILE: "rows",
    OutputPacket.CORRECTION_FILE: "corrected",
    OutputPacket.KEYS_TAKEN: "keys_taken",
    OutputPacket.KEYS_HELD: "keys_held",
    OutputPacket.REJECTED_MESSAGES: "rejected",
    OutputPacket.MISSING_INPUTS: "without_inputs",
}
"""For each packet kind, the count in the report to which the kind adds its rows."""


_COLLECTED = (
    "kind",
    "rows",
    f"CASE WHEN kind IN ({', '.join(str(kind.value) for kind in FILES.values())}) THEN payload END AS payload",
)
"""Columns that are collected from packets, including the names of files, but not the payloads of rows."""


@dataclass
class StreamTotals:
    """Counts of one run of the stream, named as in the report; `of_batch` has the counts of the last micro-batches."""

    batches: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys([*COUNTED.values(), "waiting"], 0))
    of_batch: dict[int, dict[str, int]] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Return the seconds since the run began."""
        return time.monotonic() - self.started

    def add(self, batch_id: int, found: Counts) -> None:
        """Add the counts of a written micro-batch."""
        self.batches += 1
        counts = dict.fromkeys(self.counts, 0)
        for kind, name in COUNTED.items():
            counts[name] += found.of[kind]
        for name, count in counts.items():
            self.counts[name] += count
        watermark = {}
        if found.watermark is not None:
            self.counts["waiting"] = found.of[OutputPacket.WAITING]
            watermark = {"watermark": found.watermark}
        self.of_batch[batch_id] = {
            "estimated": counts["rows"],
            "quarantined": sum(found.refused.values()),
            **{name: counts[name] for name in ("late", "bad_state", "expired")},
            **watermark,
        }
        self.of_batch.pop(batch_id - KEPT_BATCHES, None)


class Counts(NamedTuple):
    """Counts of a micro-batch: rows by packet kind, its watermark if a packet has one, and its files of estimates."""

    of: dict[int, int]
    watermark: int | None
    files: list[WrittenPart]

    @property
    def estimated(self) -> int:
        """Return the number of accepted rows."""
        return self.of[OutputPacket.ESTIMATES_FILE]

    @property
    def corrected(self) -> int:
        """Return the number of corrected estimates."""
        return self.of[OutputPacket.CORRECTION_FILE]

    @property
    def refused(self) -> dict[str, int]:
        """Return the numbers of refused rows and messages by reason."""
        refused = {reason: self.of[kind] for kind, reason in REASONS.items() if self.of[kind]}
        if self.of[OutputPacket.REJECTED_MESSAGES]:
            refused["messages that do not fit"] = self.of[OutputPacket.REJECTED_MESSAGES]
        return refused


@dataclass(frozen=True)
class BatchWatch:
    """What a driver does beside the micro-batches of its queries.

    on_progress: called with the totals after each micro-batch. check_source: called before a micro-batch is written;
    raises an error if the generation's source was replaced, for example if a topic was recreated.
    """

    on_progress: Callable[[StreamTotals], None]
    check_source: Callable[[], None]
    totals: StreamTotals = field(default_factory=StreamTotals)


@dataclass
class MicroBatchWriter:
    """The function that Spark calls with the packets of each micro-batch."""

    generation: Generation
    rows: RowFormat
    files: EstimateFiles
    """Files of estimates that the operator's tasks write."""
    fence: Fence
    watch: BatchWatch
    limit: QuarantineLimit | None
    latest: Latest | None
    publisher: Publisher | None
    pins: InputPins | None
    """Pins of the versions of the inputs table for micro-batches; None if the model has no inputs."""
    ended: Callable[[DataFrame], DataFrame] | None
    """Function that converts packets of ended keys to rows; None if keys do not end."""
    reached: ReachedCommits | None
    """Notes of the commits of the measurements that micro-batches reach; None if the source is a topic."""
    profiler: NoProfiler = field(default_factory=profiler)

    def __call__(self, packets: DataFrame, batch_id: int) -> None:
        """Write a micro-batch. A repeated call changes nothing."""
        if self.reached is not None:
            self.reached.take(batch_id)
        if self.pins is not None:
            self.pins.take(batch_id)
        found = None
        try:
            counts = found = self._count_packets(packets, batch_id)
            self.watch.check_source()  # called after all rows are read, and before anything is committed
            self._check_limit(counts, batch_id)
            self._write(packets, counts, batch_id)
            self.fence.check()
        finally:
            if found is None or found.files:
                self.files.remove_unnamed()
            packets.unpersist()
            # Spark plans the next micro-batch in this thread.
            set_label(packets.sparkSession, self.generation.generation, "between micro-batches")
        self.watch.totals.add(batch_id, counts)
        self.watch.on_progress(self.watch.totals)

    def _count_packets(self, packets: DataFrame, batch_id: int) -> Counts:
        """Run the filter, and return the counts of its packets."""
        of: dict[int, int] = dict.fromkeys(OutputPacket, 0)
        watermark = None
        # This is the only action that runs the filter, because the writes read the packets from the cache.
        with self._step(batch_id, FILTER):
            self.files.begin(packets.sparkSession, batch_id)
            packets.persist()
            found = packets.selectExpr(*_COLLECTED).collect()
        for row in found:
            if row["kind"] == OutputPacket.WATERMARK:
                watermark = row["rows"] if watermark is None else max(watermark, row["rows"])
            else:
                of[row["kind"]] += row["rows"]
        # The choice is for the writes of this micro-batch, and for the next micro-batch, which will have a similar
        # size.
        counts = Counts(of, watermark, list_written_parts(found))
        set_codegen_for(packets.sparkSession, counts.estimated + counts.corrected)
        return counts

    def _check_limit(self, counts: Counts, batch_id: int) -> None:
        """Refuse a micro-batch that would quarantine too many rows, before anything is written.

        Raises:
            UserError: the micro-batch exceeds the limit in the spec.
        """
        refused, estimated = counts.refused, counts.estimated
        if is_over_limit(self.limit, refused, estimated):
            if (
                self.pins is not None
                and find_half_written_batch(self.fence.warehouse, self.generation) is None
            ):
                self.pins.drop(batch_id)
            raise build_refusal(self.limit, refused, estimated, f"micro-batch {batch_id}")

    def _write(self, packets: DataFrame, found: Counts, batch_id: int) -> None:
        """Write a micro-batch to all sinks, first to the exactly-once sinks."""
        counts = found.of
        if counts[OutputPacket.REJECTED_MESSAGES]:
            self._rejected(packets.filter(F.col("kind") == OutputPacket.REJECTED_MESSAGES), batch_id)
        if any(counts[kind] for kind in REASONS):
            self._quarantine(packets.filter(F.col("kind").isin(*REASONS)), batch_id)
        estimated = None
        if found.files:
            estimated = self._add_files(found.files, packets, batch_id)
        if counts[OutputPacket.EXPIRED]:
            self._archive(packets.filter(F.col("kind") == OutputPacket.EXPIRED), batch_id)
        self._others(estimated, batch_id)

    def _add_files(self, parts: list[WrittenPart], packets: DataFrame, batch_id: int) -> FileEstimates:
        """Commit the files with a micro-batch's estimates, and return them."""
        with self._step(batch_id, TO_DELTA):
            self.fence.add([one.file for one in parts], self.files.table, self.files.schema, batch_id)
        return self.files.reading(packets.sparkSession, parts)

    def _others(self, estimated: FileEstimates | None, batch_id: int) -> None:
        """Write the estimates of a micro-batch to the at-least-once sinks, after the exactly-once sinks."""
        latest = self.latest
        if latest is not None and estimated is not None:
            with self._step(batch_id, "latest states"):
                write_to_sink(latest.table, batch_id, lambda: latest.write(estimated, batch_id))
        if self.publisher is not None:
            with self._step(batch_id, "hand estimates on"):
                self.publisher(None if estimated is None else estimated.rows(), batch_id)

    def _archive(self, packets: DataFrame, batch_id: int) -> None:
        assert self.ended is not None
        rows = add_marks(self.ended(packets), self.generation, batch_id)
        with self._step(batch_id, "ended keys to the archive"):
            self.fence.append(rows, archive(self.generation.model), batch_id)

    def _quarantine(self, packets: DataFrame, batch_id: int) -> None:
        generation = self.generation
        rows = build_refused_rows(packets, self.rows, generation.model, generation.generation, batch_id)
        part = RowGroup("rows", f"NOT {_OF_TOPIC}")
        with self._step(batch_id, "refused rows to quarantine"):
            self.fence.append(add_row_ids(self.fence.warehouse, rows), TABLE, batch_id, part)

    def _rejected(self, packets: DataFrame, batch_id: int) -> None:
        generation = self.generation
        assert generation.topic is not None
        rejected = unpack_rejected_rows(packets)
        rows = build_topic_quarantine(
            rejected, generation.model, generation.topic, generation.generation, batch_id
        )
        part = RowGroup("messages", _OF_TOPIC)
        with self._step(batch_id, "messages that do not fit to quarantine"):
            self.fence.append(add_row_ids(self.fence.warehouse, rows), TABLE, batch_id, part)

    @contextmanager
    def _step(self, batch_id: int, step: str) -> Iterator[None]:
        """Label the Spark jobs of a step in the UI, and time the step for a profile."""
        set_label(
            self.fence.warehouse.spark, f"{self.generation.generation}: micro-batch {batch_id}", step, ", "
        )
        with self.profiler.step(batch_id, step):
            yield
