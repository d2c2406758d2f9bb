"""One micro-batch of one bucket under a watermark: which rows are due, which too late, what the filter says. No Spark.

The watermark is the newest event time of all rows that the stream has taken in, less the delay. Every bucket hears of
the newest time of every micro-batch (`jobs.ticks`), so it is the same in all of them, moves within the micro-batch that
brings the newer row, and is part of the state: a micro-batch that is run again finds the same one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jobs.advance import advance
from jobs.block_store import Blocks, Store
from jobs.packed_rows import KeyedRows, keyed_rows
from jobs.packets import Records, concat
from jobs.processor import put_out
from jobs.state_blocks import StateFormat
from jobs.waiting_rows import NEVER, PARTS, Clock, WaitingRows

if TYPE_CHECKING:
    from jobs.processor import Plan

BEHIND, WAITING = 3, 4
"""Kinds of output packets beside those of `jobs.processor`: rows behind the watermark; how many rows wait, with the
watermark."""


class Timing(NamedTuple):
    """What a timed operator knows of time.

    delay: of the watermark in microseconds; rows: how waiting rows are stored; watermark: where a bucket's begins, as
    the snapshot left it.
    """

    delay: int
    rows: StateFormat
    watermark: int = NEVER


class TimedBucket:
    """A bucket's states, rows and clock, over stores of bytes."""

    def __init__(self, plan: Plan, blocks: Store, parts: Store, clock: bytes | None) -> None:
        """Take up a bucket; `clock` is None before its first micro-batch."""
        assert plan.timing is not None
        self.plan, self.timing = plan, plan.timing
        self.blocks = Blocks(blocks, plan.state, plan.blocks)
        held = Clock(plan.timing.watermark, PARTS.empty()) if clock is None else Clock.decode(clock)
        self.watermark = held.watermark
        self.waiting = WaitingRows(parts, plan.timing.rows, plan.timing.delay, held.parts)

    @property
    def clock(self) -> Clock:
        """Return the clock as it is to be kept."""
        return Clock(self.watermark, self.waiting.parts)

    def seed(self, states: Iterable[bytes], rows: Iterable[bytes]) -> None:
        """Take over packets of states and of waiting rows from a snapshot."""
        decoded = [self.plan.state.layout.decode(packet) for packet in states]
        if decoded:
            self.blocks.add(concat(decoded))
        decoded = [self.plan.rows.layout.decode(packet) for packet in rows]
        if decoded:
            self.waiting.add(concat(decoded))

    def take(self, packets: Iterable[bytes], newest: int) -> Iterator[tuple[int, int, bytes]]:
        """Yield what a micro-batch puts out: kind, number of rows, payload.

        Args:
            packets: of this bucket's rows.
            newest: event time among the micro-batch's rows, of all buckets.
        """
        plan, layout = self.plan, self.plan.rows.layout
        parts = [layout.decode(packet) for packet in packets]
        rows = concat(parts) if parts else layout.empty()
        behind = rows.arrays["time"] < self.watermark
        if newest != NEVER:
            self.watermark = max(self.watermark, newest - self.timing.delay)
        if behind.any():
            refused = rows.take(np.flatnonzero(behind))
            yield BEHIND, refused.size, layout.encode(refused)
            rows = rows.take(np.flatnonzero(~behind))
        keyed = keyed_rows(self._due(rows), plan.rows)
        if len(keyed.rows.key):
            yield from self._filter(keyed)
        yield WAITING, self.waiting.count, np.int64(self.watermark).tobytes()

    def _due(self, rows: Records) -> Records:
        """Return the rows that the watermark has passed, and let the others wait."""
        passed = rows.arrays["time"] < self.watermark
        due = [self.waiting.release(self.watermark), rows.take(np.flatnonzero(passed))]
        self.waiting.add(rows.take(np.flatnonzero(~passed)))
        return concat(due)

    def _filter(self, keyed: KeyedRows) -> Iterator[tuple[int, int, bytes]]:
        plan = self.plan
        present, known = self.blocks.load(keyed.keys.arrays["route"])
        begin = None if plan.begin is None else plan.begin(keyed)
        advanced = advance(plan.kernel, plan.state.layout, known, keyed, plan.unit, plan.apply_late, begin)
        self.blocks.save(present, advanced.records)
        yield from put_out(plan, keyed, advanced.outputs)
