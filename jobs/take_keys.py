"""Take states of newly pretrained keys into a running operator: of keys that it has none of, and of no others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pandas as pd
import pyarrow as pa

from jobs.around import Around
from jobs.keys import match
from jobs.packed_rows import Packer
from jobs.packets import Layout, Records, concat
from jobs.ticks import KEYS, ROWS, of_kind

if TYPE_CHECKING:
    from pyspark.sql.streaming.stateful_processor import TimerValues

    from jobs.block_store import Blocks

TAKEN, HELD = 14, 15
"""Kinds of output packets: how many offered keys were taken; how many the operator had already."""


class TakesOver(Protocol):
    """An operator that takes states over."""

    def take_over(self, packets: Iterable[bytes], timers: TimerValues) -> tuple[int, int]:
        """Take over packets of states; return how many keys were new, and how many were not."""
        ...


def best_of(offered: Records) -> Records:
    """Return one record a key, ordered by route: the one that reflects most rows, then the newest."""
    arrays = offered.arrays
    check = arrays.get("check", np.zeros(offered.size, np.int64))
    order = np.lexsort((-arrays["event_time"], -arrays["count"], check, arrays["route"]))
    route, check = arrays["route"][order], check[order]
    first = np.ones(len(order), bool)
    first[1:] = (route[1:] != route[:-1]) | (check[1:] != check[:-1])
    return offered.take(order[first])


def unknown(blocks: Blocks, offered: Records) -> Records:
    """Return the records, ordered by route, whose keys have no state in the blocks."""
    return offered.take(np.flatnonzero(match(blocks.load(offered.arrays["route"])[1], offered) < 0))


def decoded(layout: Layout, packets: Iterable[bytes]) -> Records:
    """Return one record a key of packets of states."""
    return best_of(concat([layout.decode(bytes(packet)) for packet in packets]))


def with_kind(packer: Packer) -> Packer:
    """Say of a packer's packets that they hold rows, so that others can come beside them."""

    def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for packed in packer(batches):
            yield of_kind(packed.column("bucket"), ROWS, packed.column("payload"))

    return pack


class TakesKeys(Around):
    """Let the model's own operator take over what is offered, and then its rows of the micro-batch."""

    def handleInputRows(  # noqa: N802
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: TimerValues
    ) -> Iterator[Any]:
        """Take over new keys before any row is filtered, wherever in the micro-batch they come."""
        frame = pd.concat(list(rows), ignore_index=True)
        states = frame["kind"] == KEYS
        if states.any():
            taken, held = self.inner.take_over(frame["payload"][states], timerValues)
            yield pd.DataFrame({"kind": [TAKEN, HELD], "rows": [taken, held], "payload": [b"", b""]})
        rest = frame[~states]
        if len(rest):
            yield from self.inner.handleInputRows(key, iter([rest]), timerValues)
