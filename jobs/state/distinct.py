"""Remove duplicates from the rows of a bucket (`jobs.state.duplicates`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from jobs.state.duplicates import Ints, Marks, repeated, resent
from jobs.state.encoding.rows import KeyedRows, RowFormat, by_bucket, unpack_rows


def marks_of(keyed: KeyedRows) -> tuple[Marks, Ints]:
    """Return the marks of the rows with an id, and the positions of these rows among all rows."""
    assert keyed.ids is not None
    named = np.flatnonzero(keyed.ids.arrays["named"])
    return Marks(keyed.rows.key, keyed.ids.arrays["id"], keyed.rows.time).take(named), named


def distinct(keyed: KeyedRows, fmt: RowFormat) -> KeyedRows:
    """Return the rows without duplicates, if the format of the rows defines duplicates."""
    if fmt.row_id is not None:
        marks, named = marks_of(keyed)
        repeats = np.zeros(len(keyed.rows.key), bool)
        repeats[named] = resent(marks, fmt.row_id.within)
    elif fmt.distinct:
        repeats = repeated(keyed.rows)
    else:
        return keyed
    return chosen(keyed, np.flatnonzero(~repeats)) if repeats.any() else keyed


def chosen(keyed: KeyedRows, which: Ints) -> KeyedRows:
    """Return the rows at positions `which`, in their order, and the keys with rows."""
    rows = keyed.rows
    present, code = np.unique(rows.key[which], return_inverse=True)
    keys = keyed.keys if len(present) == keyed.keys.size else keyed.keys.take(present)
    ids = None if keyed.ids is None else keyed.ids.take(which)
    return KeyedRows(keys, rows.take(which)._replace(key=code.astype(np.int64)), ids)


def each_bucket(
    fmt: RowFormat, work: Callable[[KeyedRows], Iterator[pa.RecordBatch]]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function over the packets of a partition that calls `work` with the rows of each bucket."""

    def over(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for payloads in by_bucket(batches):
            keyed = distinct(unpack_rows(payloads, fmt), fmt)
            if len(keyed.rows.key):
                yield from work(keyed)

    return over
