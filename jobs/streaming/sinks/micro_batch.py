"""Write what a micro-batch put out: estimates of accepted rows, quarantine for refused ones, each exactly once.

A micro-batch that is run again after a kill gives the same rows, and what had been committed is passed over. What a
driver writes that has lost its lease is refused (`jobs.lineage.fencing`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from jobs.encoding.estimates import EstimateFormat, unpack_estimates
from jobs.encoding.packet_kinds import OutputPacket
from jobs.encoding.rows import RowFormat
from jobs.key_inputs.pins import InputPins
from jobs.lineage.damage import half_written
from jobs.lineage.fencing import Fence, Part
from jobs.lineage.generations import Generation, marked
from jobs.observability.batch_profile import FILTER, TO_DELTA
from jobs.spark.conf import set_codegen_for
from jobs.spark.job_labels import label
from jobs.specs.row_order import QuarantineLimit
from jobs.streaming.operators.wrappers import rejected_rows
from jobs.streaming.sinks.latest_states import Latest
from jobs.streaming.sinks.publishing import Publisher, naming_the_sink
from jobs.streaming.sinks.refused_rows import REASONS, refused_rows
from jobs.warehouse.quarantine import OPTIONS, TABLE, identified, refusal, too_many, topic_quarantine
from jobs.warehouse.tables import archive, estimates

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.streaming.profiler import Profiler

_OF_TOPIC = "source LIKE 'kafka:%'"
"""Which rows of the quarantine are messages that do not fit."""

KEPT_BATCHES = 1000
"""Micro-batches whose counts are kept until they are recorded."""


@dataclass
class Totals:
    """What one run of the stream has written; `of_batch` is for the last micro-batches alone."""

    batches: int = 0
    estimated: int = 0
    late: int = 0
    bad: int = 0
    rejected: int = 0
    without_inputs: int = 0
    waiting: int = 0
    duplicates: int = 0
    expired: int = 0
    corrected: int = 0
    taken: int = 0
    held: int = 0
    of_batch: dict[int, dict[str, int]] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Return how long the run has taken."""
        return time.monotonic() - self.started


@dataclass
class MicroBatchWriter:
    """The function that Spark calls with each micro-batch's packets."""

    generation: Generation
    rows: RowFormat
    estimates: EstimateFormat
    fence: Fence
    told: Callable[[Totals], None]
    limit: QuarantineLimit | None = None
    latest: Latest | None = None
    publisher: Publisher | None = None
    pins: InputPins | None = None
    """Says which version of the table of inputs a micro-batch uses, where there is one."""
    ended: Callable[[DataFrame], DataFrame] | None = None
    """Turns packets of ended keys into rows, where keys end."""
    corrects: bool = False
    """Estimates say if they correct an earlier one."""
    profiler: Profiler | None = None
    totals: Totals = field(default_factory=Totals)

    def __call__(self, packets: DataFrame, batch_id: int) -> None:
        """Write a micro-batch. Running it again changes nothing."""
        if self.pins is not None:
            self.pins.take(batch_id)
        packets = packets.persist()
        try:
            counts: dict[int, int] = dict.fromkeys(OutputPacket, 0)
            watermark = None
            # The one action that runs the filter; the writes below read what it left in the cache.
            with self._step(batch_id, FILTER):
                found = packets.select("kind", "rows").collect()
            for row in found:
                if row["kind"] == OutputPacket.WATERMARK:
                    watermark = row["rows"] if watermark is None else max(watermark, row["rows"])
                else:
                    counts[row["kind"]] += row["rows"]
            # For what is written now, and for the next micro-batch, which will be about as large.
            set_codegen_for(
                packets.sparkSession, counts[OutputPacket.ESTIMATES] + counts[OutputPacket.CORRECTION]
            )
            refused = {reason: counts[kind] for kind, reason in REASONS.items() if counts[kind]}
            if counts[OutputPacket.REJECTED_MESSAGES]:
                refused["messages that do not fit"] = counts[OutputPacket.REJECTED_MESSAGES]
            if too_many(self.limit, refused, counts[OutputPacket.ESTIMATES]):
                if self.pins is not None and half_written(self.fence.warehouse, self.generation) is None:
                    self.pins.drop(batch_id)
                raise refusal(self.limit, refused, counts[OutputPacket.ESTIMATES], f"micro-batch {batch_id}")
            if counts[OutputPacket.REJECTED_MESSAGES]:
                self._rejected(packets.filter(F.col("kind") == OutputPacket.REJECTED_MESSAGES), batch_id)
            if any(counts[kind] for kind in REASONS):
                self._quarantine(packets.filter(F.col("kind").isin(*REASONS)), batch_id)
            told = (
                packets.filter(F.col("kind").isin(OutputPacket.ESTIMATES, OutputPacket.CORRECTION))
                if counts[OutputPacket.ESTIMATES]
                else None
            )
            if told is not None:
                self._estimates(told, batch_id)
            if counts[OutputPacket.EXPIRED]:
                self._archive(packets.filter(F.col("kind") == OutputPacket.EXPIRED), batch_id)
            self._others(told, batch_id)
            self.fence.check()
        finally:
            packets.unpersist()
            # The thread is Spark's again, which plans the next micro-batch in it.
            label(packets.sparkSession, self.generation.generation, "between micro-batches")
        self.totals.batches += 1
        self.totals.estimated += counts[OutputPacket.ESTIMATES]
        late = (
            counts[OutputPacket.LATE]
            + counts[OutputPacket.LATE_BY_WATERMARK]
            + counts[OutputPacket.BEYOND_REPLAY_WINDOW]
        )
        self.totals.late += late
        if watermark is not None:
            self.totals.waiting = counts[OutputPacket.WAITING]
        repeated = (
            counts[OutputPacket.DUPLICATE] + counts[OutputPacket.DUPLICATE_ID] + counts[OutputPacket.DROPPED]
        )
        self.totals.duplicates += repeated
        self.totals.corrected += counts[OutputPacket.CORRECTION]
        self.totals.expired += counts[OutputPacket.EXPIRED]
        self.totals.taken += counts[OutputPacket.KEYS_TAKEN]
        self.totals.held += counts[OutputPacket.KEYS_HELD]
        self.totals.bad += counts[OutputPacket.BAD_STATE]
        self.totals.rejected += counts[OutputPacket.REJECTED_MESSAGES]
        self.totals.without_inputs += counts[OutputPacket.MISSING_INPUTS]
        self.totals.of_batch[batch_id] = {
            "estimated": counts[OutputPacket.ESTIMATES],
            "quarantined": sum(refused.values()),
            "late": late,
            "bad_state": counts[OutputPacket.BAD_STATE],
            "expired": counts[OutputPacket.EXPIRED],
            **({} if watermark is None else {"watermark": watermark}),
        }
        self.totals.of_batch.pop(batch_id - KEPT_BATCHES, None)
        self.told(self.totals)

    def _estimates(self, packets: DataFrame, batch_id: int) -> None:
        # Another version of the model may put out more columns.
        table = estimates(self.generation.model)
        with self._step(batch_id, TO_DELTA):
            self.fence.append(self._rows(packets, batch_id), table, batch_id, {"mergeSchema": "true"})

    def _rows(self, packets: DataFrame, batch_id: int) -> DataFrame:
        def unpacked(kind: int) -> DataFrame:
            some = packets.filter(F.col("kind") == kind)
            if self.profiler is None:
                return unpack_estimates(some, self.estimates, batch_id)
            return unpack_estimates(some, self.estimates, batch_id, self.profiler.unpacking)

        rows = unpacked(OutputPacket.ESTIMATES)
        if self.corrects:
            again = unpacked(OutputPacket.CORRECTION)
            rows = rows.withColumn("correction", F.lit(False))
            rows = rows.unionByName(again.withColumn("correction", F.lit(True)))
        return marked(rows, self.generation, batch_id)

    def _others(self, packets: DataFrame | None, batch_id: int) -> None:
        """Hand a micro-batch's estimates to the other sinks, behind the one that must have them exactly once."""
        if self.latest is not None and packets is not None:
            keep = self.latest
            with self._step(batch_id, "latest states"):
                naming_the_sink(keep.table, batch_id, lambda: keep.write(packets, batch_id))
        if self.publisher is not None:
            with self._step(batch_id, "hand estimates on"):
                self.publisher(None if packets is None else self._rows(packets, batch_id), batch_id)

    def _archive(self, packets: DataFrame, batch_id: int) -> None:
        assert self.ended is not None
        rows = marked(self.ended(packets), self.generation, batch_id)
        with self._step(batch_id, "ended keys to the archive"):
            self.fence.append(rows, archive(self.generation.model), batch_id, {"mergeSchema": "true"})

    def _quarantine(self, packets: DataFrame, batch_id: int) -> None:
        generation = self.generation
        rows = refused_rows(packets, self.rows, generation.model, generation.generation, batch_id)
        part = Part("rows", f"NOT {_OF_TOPIC}")
        with self._step(batch_id, "refused rows to quarantine"):
            self.fence.append(identified(self.fence.warehouse, rows), TABLE, batch_id, OPTIONS, part)

    def _rejected(self, packets: DataFrame, batch_id: int) -> None:
        generation = self.generation
        assert generation.topic is not None
        rejected = rejected_rows(packets)
        rows = topic_quarantine(rejected, generation.model, generation.topic, generation.generation, batch_id)
        part = Part("messages", _OF_TOPIC)
        with self._step(batch_id, "messages that do not fit to quarantine"):
            self.fence.append(identified(self.fence.warehouse, rows), TABLE, batch_id, OPTIONS, part)

    @contextmanager
    def _step(self, batch_id: int, step: str) -> Iterator[None]:
        """Say in Spark's UI what is done now, and take its time for a profile."""
        label(self.fence.warehouse.spark, f"{self.generation.generation}: micro-batch {batch_id}", step, ", ")
        with nullcontext() if self.profiler is None else self.profiler.step(batch_id, step):
            yield
