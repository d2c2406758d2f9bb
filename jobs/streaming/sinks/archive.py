"""Last states of ended keys, in the table `archive/<model>`: one row each time that a key ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import functions as F

from jobs.snapshots.state_rows import StateRows, build_state_rows
from jobs.state.encoding.keys import KeyKind, build_key_columns
from jobs.state.encoding.packets import Layout
from kalman.types import Filter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def build_ended_states(kernel: Filter, layout: Layout, kind: KeyKind) -> Callable[[DataFrame], DataFrame]:
    """Return the function from packets (column `payload`) of ended keys to rows: key, key columns, last state."""

    def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for payload in batch.column("payload").to_pylist():
                yield from build_state_rows(kernel, layout.decode(payload))

    def rows(packets: DataFrame) -> DataFrame:
        states = StateRows(packets.select("payload"), unpack, kind.integer).frame
        named = [] if kind.is_plain_key else build_key_columns(kind, F.col("key"))
        return states.select("key", *named, *(name for name in states.columns if name != "key"))

    return rows
