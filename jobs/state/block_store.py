"""Blocks of records by number in a byte store: Spark's state, or a dictionary in a test."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from jobs.core.stopwatch import STATE_READ, STATE_WRITE, step
from jobs.state.block_format import StateFormat
from jobs.state.encoding.keys import match
from jobs.state.encoding.packets import Layout, Records, join_records, merge_records
from jobs.state.encoding.routing import compute_blocks
from jobs.state.encoding.row_order import find_starts
from jobs.state.spark_values import decode_stored, get_all, put_all, to_text

if TYPE_CHECKING:
    from pyspark.sql.streaming.stateful_processor import MapState, StatefulProcessorHandle

ALL_FROM = 2
"""Read all blocks if more than 1/`ALL_FROM` are wanted: calls for single blocks cost more than unused blocks."""


class Store(Protocol):
    """A store of byte strings by number."""

    def get(self, number: int) -> bytes | None:
        """Return a value, or None."""
        ...

    def put(self, number: int, value: bytes) -> None:
        """Set a value."""
        ...

    def get_all(self, numbers: Sequence[int]) -> Iterable[bytes | None]:
        """Return values in the order of their numbers, None for a missing value."""
        ...

    def put_all(self, values: Iterable[tuple[int, bytes]]) -> None:
        """Set values by number."""
        ...

    def remove(self, number: int) -> None:
        """Remove an existing value."""
        ...

    def items(self) -> Iterator[tuple[int, bytes]]:
        """Yield all numbers and their values, in any order."""
        ...


class MapStore:
    """A store in a map of Spark's state: from `long` to text, or to `binary` in a checkpoint of the first release."""

    def __init__(self, state: MapState, text: bool) -> None:
        self.state, self.text = state, text

    def get(self, number: int) -> bytes | None:
        """Return a value, or None."""
        value = self.state.getValue((number,))
        return None if value is None else decode_stored(value[0])

    def put(self, number: int, value: bytes) -> None:
        """Set a value."""
        self.state.updateValue((number,), (self._stored(value),))

    def get_all(self, numbers: Sequence[int]) -> Iterator[bytes | None]:
        """Yield values in the order of their numbers, None for a missing value."""
        for value in get_all(self.state, numbers):
            yield None if value is None else decode_stored(value)

    def put_all(self, values: Iterable[tuple[int, bytes]]) -> None:
        """Set values by number."""
        put_all(self.state, ((number, self._stored(value)) for number, value in values))

    def remove(self, number: int) -> None:
        """Remove an existing value."""
        self.state.removeKey((number,))

    def items(self) -> Iterator[tuple[int, bytes]]:
        """Yield all numbers and their values, in any order; Spark sends many at a time."""
        for key, value in self.state.iterator():
            yield key[0], decode_stored(value[0])

    def _stored(self, value: bytes) -> str | bytes:
        return to_text(value) if self.text else value


def map_store(handle: StatefulProcessorHandle, name: str, columns: tuple[str, str], text: bool) -> MapStore:
    """Declare a map of Spark's state; `columns` are the names of its number and its value."""
    number, value = columns
    kind = "string" if text else "binary"
    return MapStore(handle.getMapState(name, f"{number} long", f"{value} {kind}"), text)


class Blocks:
    """The records of a bucket's keys in blocks, each of which is read and written whole."""

    def __init__(self, store: Store, state: StateFormat, blocks: int) -> None:
        """Open the blocks in a store; `state` is the format of a block, `blocks` their number in the bucket."""
        self.store, self.state, self.blocks = store, state, blocks

    def load(self, route: NDArray[np.uint64]) -> tuple[NDArray[np.int64], Records]:
        """Read the blocks of ordered routes; return their numbers, and their records ordered by route.

        A caller that does not save calls `close`.
        """
        present = np.unique(compute_blocks(route, self.blocks))
        return present, self.read(present)

    @step(STATE_READ)
    def read(self, numbers: NDArray[np.int64]) -> Records:
        """Read blocks by their ordered numbers; return their records ordered by route."""
        wanted = numbers.tolist()
        if ALL_FROM * len(wanted) > self.blocks and len(wanted) > 1:
            known = dict(self.store.items())
            values = (known.get(number) for number in wanted)
        else:
            values = self.store.get_all(wanted)
        return self.state.decode_all(value for value in values if value is not None)

    @step(STATE_WRITE)
    def save(self, present: NDArray[np.int64], records: Records) -> None:
        """Write the blocks `present`, whose only records are the ordered `records`; remove blocks without records."""
        block = compute_blocks(records.arrays["route"], self.blocks)
        starts, stops = np.searchsorted(block, present), np.searchsorted(block, present, "right")
        some = stops > starts
        ranges = zip(starts[some].tolist(), stops[some].tolist(), strict=True)
        values = self.state.encode_each(records, ranges)
        self.store.put_all(zip(present[some].tolist(), values, strict=True))
        for number in present[~some].tolist():
            if self.store.get(number) is not None:
                self.store.remove(number)

    def close(self) -> None:
        """Release what `load` has taken."""

    def add(self, new: Records) -> tuple[NDArray[np.int64], Records]:
        """Add records of new keys, in any order; return the numbers of their blocks and the saved records.

        A block may come in several calls, so new records are merged with stored ones.
        """
        ordered = merge_records(new)
        del new  # a snapshot may have millions of records
        present, known = self.load(ordered.arrays["route"])
        if known.size:
            ordered = merge_records(known, ordered)
        self.save(present, ordered)
        return present, ordered

    def absent(self, offered: Records) -> Records:
        """Return the records, ordered by route, whose keys have no record here."""
        known = self.load(offered.arrays["route"])[1]
        self.close()
        return offered.take(np.flatnonzero(match(known, offered) < 0))


def decode_offered(layout: Layout, packets: Iterable[bytes]) -> Records:
    """Return one state record per key, ordered by route: the record with most rows, or the newest of several."""
    offered = join_records([layout.decode(bytes(packet)) for packet in packets])
    arrays = offered.arrays
    check = arrays.get("check", np.zeros(offered.size, np.int64))
    order = np.lexsort((-arrays["event_time"], -arrays["count"], check, arrays["route"]))
    return offered.take(order[find_starts(arrays["route"][order], check[order])])
