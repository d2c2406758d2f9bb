"""Read ORC files, whose stripes are to them what row groups are to Parquet.

Arrow reads a time without a zone as it was written on the wall; the spec's `time_zone` says where that was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from pyarrow import orc

from jobs.core.input_files import open_input

ROWS_A_PART = 1_000_000
"""Rows of the stripes that one task of Spark reads."""


def orc_columns(path: Path) -> tuple[pa.Schema, int]:
    """Return a file's columns, and how many rows it has."""
    with open_input(path) as stream:
        file = orc.ORCFile(stream)
        return file.schema, file.nrows


def stripe_ranges(path: Path) -> list[tuple[int, int]]:
    """Return the ranges (start, stop) of stripes that are read together, in order."""
    with open_input(path) as stream:
        file = orc.ORCFile(stream)
        stripes, rows = file.nstripes, file.nrows
    if not stripes:
        return []
    each = max(1, round(ROWS_A_PART * stripes / max(rows, 1)))
    return [(start, min(start + each, stripes)) for start in range(0, stripes, each)]


def read_stripes(
    path: Path, start: int, stop: int | None, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Read the named columns of the stripes from `start` to `stop` (None: the last).

    One column after the other, as the reader of ORC takes several times the memory of what it reads.
    """
    with open_input(path) as stream:
        file = orc.ORCFile(stream)
        for number in range(start, file.nstripes if stop is None else stop):
            found = [file.read_stripe(number, columns=[name]) for name in columns]
            yield pa.RecordBatch.from_arrays([one.column(0) for one in found], list(columns))
