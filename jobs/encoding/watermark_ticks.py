"""Tell every bucket of a micro-batch's newest event time: it crosses the shuffle beside the packed rows.

A watermark that Spark keeps would move one micro-batch later, and only the rows' own bucket would see it in this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from jobs.encoding.packet_kinds import NEVER, ROWS, TICK
from jobs.encoding.routing import Routing
from jobs.encoding.rows import Packer, RowFormat, row_packer, times_of


def timed_packer(fmt: RowFormat, routing: Routing) -> Packer:
    """Return the function that packs batches with the columns of `packed_rows.select_columns`, with ticks."""
    packer = row_packer(fmt, routing)
    labels = pa.array(np.asarray(routing.labels, np.int32))

    def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows == 0:
                continue
            newest = int(times_of(batch).max())
            ticks = pa.array([tick(newest)] * len(labels), pa.binary())
            yield of_kind(labels, TICK, ticks)
            for packed in packer(iter([batch])):
                yield of_kind(packed.column("bucket"), ROWS, packed.column("payload"))

    return pack


def tick(newest: int) -> bytes:
    """Return the payload that tells of a time."""
    return np.int64(newest).tobytes()


def newest_of(ticks: Iterable[bytes]) -> int:
    """Return the newest time that payloads tell of, `NEVER` if there is none."""
    return max((int(np.frombuffer(payload, "<i8")[0]) for payload in ticks), default=NEVER)


def of_kind(bucket: pa.Array, kind: int, payload: pa.Array) -> pa.RecordBatch:
    """Return packets of one kind, with the columns of `TIMED`."""
    kinds = pa.array(np.full(len(bucket), kind, np.int32))
    return pa.RecordBatch.from_arrays([bucket, kinds, payload], ["bucket", "kind", "payload"])
