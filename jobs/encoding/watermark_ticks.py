"""Watermark ticks: every bucket gets the maximum event time of a micro-batch, across the shuffle beside the rows.

A watermark that Spark keeps would move one micro-batch later, and within this one only the rows' own bucket would see
the new maximum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from jobs.encoding.packet_kinds import NEVER, RowPacket, packet_batch
from jobs.encoding.routing import Routing
from jobs.encoding.rows import Packer, RowFormat, row_packer, times_of


def event_time_packer(fmt: RowFormat, routing: Routing) -> Packer:
    """Return the function that packs batches with the columns of `rows.select_columns`, and adds ticks."""
    packer = row_packer(fmt, routing, typed=True)
    labels = pa.array(np.asarray(routing.labels, np.int32))

    def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows == 0:
                continue
            payload = tick(int(times_of(batch).max()))
            ticks = pa.array([payload] * len(labels), pa.binary())
            yield packet_batch(labels, ticks, RowPacket.MAX_EVENT_TIME)
            yield from packer(iter([batch]))

    return pack


def tick(max_event_time: int) -> bytes:
    """Return the payload of a tick; the time is in microseconds."""
    return np.int64(max_event_time).tobytes()


def max_event_time(ticks: Iterable[bytes]) -> int:
    """Return the maximum event time of ticks, `NEVER` if there is none."""
    return max((int(np.frombuffer(payload, "<i8")[0]) for payload in ticks), default=NEVER)
