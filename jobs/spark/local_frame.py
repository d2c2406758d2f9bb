"""Rows of this process, with the methods of Spark's DataFrames that take functions over Arrow batches.

Starting Spark takes longer than the work for few rows. With a `LocalFrame` as their source, the functions that Spark's
tasks would call run in this process (`Warehouse.in_process`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import Row

Make = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


class LocalFrame:
    """Batches that are computed at each use, in one partition; after `persist` they are computed once."""

    def __init__(self, compute: Callable[[], Iterable[pa.RecordBatch]]) -> None:
        self._compute = compute
        self._keeps = False
        self._kept: list[pa.RecordBatch] | None = None

    @property
    def batches(self) -> Iterator[pa.RecordBatch]:
        """Return the batches."""
        if not self._keeps:
            return iter(self._compute())
        if self._kept is None:
            self._kept = list(self._compute())
        return iter(self._kept)

    def mapInArrow(self, make: Make, schema: str) -> LocalFrame:
        """Return the batches that a function makes of these batches; `schema` is the function's promise."""
        return LocalFrame(lambda: make(self.batches))

    def select(self, *names: str) -> LocalFrame:
        """Return the columns of these names."""
        return LocalFrame(lambda: (one.select(list(names)) for one in self.batches))

    def union(self, other: LocalFrame) -> LocalFrame:
        """Return the batches of both frames."""
        return LocalFrame(lambda: (one for frame in (self, other) for one in frame.batches))

    def repartition(self, count: int, column: str) -> LocalFrame:
        """Return this frame: all rows are in one partition, so rows with an equal value are together."""
        return self

    def coalesce(self, count: int) -> LocalFrame:
        """Return this frame, which has one partition."""
        return self

    def persist(self) -> LocalFrame:
        """Keep the batches from their first use."""
        self._keeps = True
        return self

    def unpersist(self) -> None:
        """Release the batches."""
        self._keeps, self._kept = False, None

    def collect(self) -> list[Any]:
        """Return the rows as Spark does."""
        return [Row(**row) for batch in self.batches for row in batch.to_pylist()]
