"""How many state rows there are, their checksum and the measurements behind them, summed up by the tasks.

The checksum is the sum, modulo 2^64, of a 64-bit hash of each row, so the order of rows does not change it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from jobs.snapshots.row_hash import row_hashes
from jobs.snapshots.state_rows import STATE_COLUMNS

SUMS = "keys bigint, hash bigint, rows bigint"
"""Columns of a task's sums."""


def hashed_columns(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    """Return the columns of a state row's hash, in its order."""
    columns = {field.name: batch.column(field.name).cast(field.type) for field in STATE_COLUMNS}
    return {"key": batch.column("key").cast(pa.string()), **columns}


class Sums:
    """The sums of a task's state rows so far."""

    def __init__(self) -> None:
        self.keys = self._hash = self._rows = 0

    def add(self, rows: pa.RecordBatch) -> None:
        """Add rows with the key and `STATE_COLUMNS`, or the same columns as a table has them."""
        columns = hashed_columns(rows)
        self.keys += len(columns["key"])
        self._rows += int(np.sum(columns["state_index"].to_numpy()))
        self._hash += int(np.sum(row_hashes([*columns.values()]), dtype=np.uint64))

    def numbers(self) -> dict[str, int]:
        """Return the columns of `SUMS`, of one row; the sum of the hashes as a signed integer of 64 bits."""
        signed = (self._hash + (1 << 63)) % (1 << 64) - (1 << 63)
        return {"keys": self.keys, "hash": signed, "rows": self._rows}


class Measured(NamedTuple):
    """Of state rows: the number of keys, the checksum, and the number of measurements that they reflect."""

    keys: int
    checksum: str
    rows: int


def total_of(parts: Iterable[Any]) -> Measured:
    """Return what the sums of all tasks, rows with the columns of `SUMS`, say together."""
    found = list(parts)
    keys, hashes, rows = (sum(one[name] for one in found) for name in ("keys", "hash", "rows"))
    return Measured(keys, f"{hashes % (1 << 64):016x}", rows)
