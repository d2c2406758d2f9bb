"""Read ORC files, whose stripes are to them what row groups are to Parquet.

Arrow reads a time without a zone as it was written on the wall; the spec's `time_zone` says where that was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from pyarrow import orc

ROWS_A_PART = 1_000_000
"""Rows of the stripes that one task of Spark reads."""


def orc_schema(path: Path) -> pa.Schema:
    """Return a file's columns."""
    return orc.ORCFile(path).schema


def stripe_ranges(path: Path) -> list[tuple[int, int]]:
    """Return the ranges (start, stop) of stripes that are read together, in order."""
    file = orc.ORCFile(path)
    if not file.nstripes:
        return []
    each = max(1, round(ROWS_A_PART * file.nstripes / max(file.nrows, 1)))
    return [(start, min(start + each, file.nstripes)) for start in range(0, file.nstripes, each)]


def read_stripes(
    path: Path, start: int, stop: int | None, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Read the named columns of the stripes from `start` to `stop` (None: the last)."""
    file = orc.ORCFile(path)
    for number in range(start, file.nstripes if stop is None else stop):
        yield file.read_stripe(number, columns=list(columns))
