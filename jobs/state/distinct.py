"""Remove duplicates from the rows of a bucket (`jobs.state.encoding.row_order`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from jobs.state.encoding.row_order import Ints, Marks, find_repeated, find_resent
from jobs.state.encoding.rows import KeyedRows, RowFormat, group_by_bucket, unpack_rows


def build_marks(keyed: KeyedRows) -> tuple[Marks, Ints]:
    """Return the marks of the rows that have an id, and the positions of these rows among all rows."""
    assert keyed.ids is not None
    named = np.flatnonzero(keyed.ids.arrays["named"])
    return Marks(keyed.rows.key, keyed.ids.arrays["id"], keyed.rows.time).take(named), named


def remove_duplicates(keyed: KeyedRows, fmt: RowFormat) -> KeyedRows:
    """Return the rows without duplicates, if the format of the rows defines duplicates."""
    if fmt.row_id is not None:
        marks, named = build_marks(keyed)
        repeats = np.zeros(len(keyed.rows.key), bool)
        repeats[named] = find_resent(marks, fmt.row_id.within)
    elif fmt.distinct:
        repeats = find_repeated(keyed.rows)
    else:
        return keyed
    return select_rows(keyed, np.flatnonzero(~repeats)) if repeats.any() else keyed


def select_rows(keyed: KeyedRows, which: Ints) -> KeyedRows:
    """Return the rows at positions `which`, in this order, and the keys that have any of these rows."""
    rows = keyed.rows
    present, code = np.unique(rows.key[which], return_inverse=True)
    keys = keyed.keys if len(present) == keyed.keys.size else keyed.keys.take(present)
    ids = None if keyed.ids is None else keyed.ids.take(which)
    return KeyedRows(keys, rows.take(which)._replace(key=code.astype(np.int64)), ids)


def build_bucket_worker(
    fmt: RowFormat, work: Callable[[KeyedRows], Iterator[pa.RecordBatch]]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function over the packets of a partition that calls `work` with the rows of each bucket."""

    def over(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for payloads in group_by_bucket(batches):
            keyed = remove_duplicates(unpack_rows(payloads, fmt), fmt)
            if len(keyed.rows.key):
                yield from work(keyed)

    return over
