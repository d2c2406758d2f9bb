"""Bound the memory that reading a file takes: a small file may hold any number of rows, of any width.

The system limits the memory of the process while it reads a piece, so that a stripe, a page or an array of any size
ends with a sentence, whatever the file says of itself. The content of a file must be in proportion to its size: a file
that holds far more was made to fill memory or disks.
"""

from __future__ import annotations

import gzip
import os
import resource
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from threading import Lock
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.core.errors import UserError
from jobs.core.input_files import open_input
from jobs.landing.raw_rows import Source, cut_rows
from jobs.specs.files import Files

RATIO = 100
"""Times its size that the content of a file may take in memory; files of measurements take 5 to 30 times theirs."""
MOST = Files().memory_mb << 20
"""Bytes that a piece may take, where no spec says another number."""
MOST_ROWS = 250_000
"""Rows that are checked at once: a rejected row takes a kilobyte of memory while it is written down."""
BATCH_BYTES = 64 << 20
"""Bytes of the rows of a Parquet file that are in memory at once, by the file's own account of their width."""
_NEAR = 8 << 20
_lock = Lock()
_within = 0
"""How many pieces are being read under the limit; the first sets it, the last lifts it."""
_before = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
_End = object()
Step = TypeVar("Step")


@contextmanager
def memory_limit(path: str | Path, most: int = MOST) -> Iterator[None]:
    """Let the process take `most` more bytes at the most, where the system can limit it (Linux).

    Raises:
        UserError: reading the file takes more.
    """
    _set_limit(most)
    try:
        yield
    except (MemoryError, pa.ArrowException) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"{path}: reading one piece of it (a page, stripe, line or array) takes more than {most >> 20:,} MB of "
            f"memory: write it in smaller pieces, or raise files.memory_mb in the spec"
        ) from None
    finally:
        _lift_limit()


def is_out_of_memory(error: BaseException) -> bool:
    """Tell if an error comes from the limit; libraries that unpack a file may take it for damage."""
    return isinstance(error, MemoryError) or "std::bad_alloc" in str(error) or _is_full()


def limit_steps(steps: Iterable[Step], path: str | Path, most: int = MOST) -> Iterator[Step]:
    """Return the pieces of a file, each of them read under `memory_limit`."""
    each = iter(steps)
    while True:
        with memory_limit(path, most):
            step = next(each, _End)
        if step is _End:
            return
        yield step  # type: ignore[misc]


def limit_sources(sources: Iterable[Source], path: str | Path, most: int = MOST) -> Iterator[Source]:
    """Return the rows of a file piece by piece, as `limit_steps` does, as long as they fit the size of the file.

    Raises:
        UserError: they take far more memory than the file has bytes.
    """
    each, held = iter(sources), 0
    while True:
        # What is held already counts, where the file is so small that all its rows may take no more than a piece.
        left = max(most, RATIO * os.path.getsize(path)) - held
        with memory_limit(path, min(most, left + (most >> 3))):
            source = next(each, None)
        if source is None:
            return
        held += sum(column.nbytes for column in source.columns.values())
        refuse_expansion(path, held, most)
        for start in range(0, max(source.rows, 1), MOST_ROWS):
            yield cut_rows(source, start, start + MOST_ROWS)


def refuse_expansion(path: str | Path, held: int, most: int = MOST) -> None:
    """Check that what a file holds is in proportion to its size.

    Args:
        path: of the file.
        held: bytes that its content takes.
        most: bytes that are never too much.

    Raises:
        UserError: it is not.
    """
    size = os.path.getsize(path)
    if held > max(most, RATIO * size):
        raise UserError(
            f"{path}: has {size:,} bytes, and its content takes at least {held >> 20:,} MB, over {RATIO} times as "
            "much: if its rows are right, write fewer of them into a file, or raise files.memory_mb in the spec (now "
            f"{most >> 20:,})"
        )


def stored_bytes(schema: pa.Schema, columns: Sequence[str], rows: int) -> int:
    """Return the bytes that columns of a Parquet or ORC file take at least."""
    kinds = (schema.field(name).type for name in columns)
    return rows * sum(_width(kind) for kind in kinds)


def rows_a_batch(metadata: pq.FileMetaData, groups: Sequence[int]) -> int:
    """Return how many rows of a Parquet file to read at once: fewer than `MOST_ROWS` where they are wide."""
    sizes = [(metadata.row_group(one).total_byte_size, metadata.row_group(one).num_rows) for one in groups]
    width = max((size // max(rows, 1) for size, rows in sizes), default=0)
    return max(1, min(MOST_ROWS, BATCH_BYTES // max(width, 1)))


def open_bytes(path: Path, most: int = MOST) -> BufferedIOBase:
    """Open a file for reading bytes, uncompressed; reading more than fits the size of a compressed file is an error."""
    stream = open_input(path)
    if not path.name.lower().endswith(".gz"):
        return stream
    found = _BoundedGzip(fileobj=stream)
    found.myfileobj = stream  # type: ignore[assignment] # closed with it
    found.path, found.most = path, most
    return found


class _BoundedGzip(gzip.GzipFile):
    """A compressed file whose reader checks how much it holds."""

    path: Path
    most: int

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        refuse_expansion(self.path, self.tell(), self.most)
        return data


def _width(kind: pa.DataType) -> int:
    """Return the bytes of a value, at least: of a text that of its place."""
    try:
        return max(1, kind.bit_width // 8)
    except ValueError:
        return 4


def _set_limit(most: int) -> None:
    global _within, _before
    with _lock:
        _within += 1
        taken = _memory_taken()
        if _within == 1 and taken is not None:
            _before = resource.getrlimit(resource.RLIMIT_DATA)
            soft, hard = _before
            wanted = taken + most
            limit = wanted if soft == resource.RLIM_INFINITY else min(soft, wanted)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _lift_limit() -> None:
    global _within
    with _lock:
        _within -= 1
        if not _within and _memory_taken() is not None:
            resource.setrlimit(resource.RLIMIT_DATA, _before)


def _is_full() -> bool:
    """Tell if the process has come near to its limit."""
    limit, taken = resource.getrlimit(resource.RLIMIT_DATA)[0], _memory_taken()
    return _within > 0 and taken is not None and limit != resource.RLIM_INFINITY and limit - taken < _NEAR


def _memory_taken() -> int | None:
    """Return the bytes of memory that count for the limit; None where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[5]) * resource.getpagesize()
    except OSError:
        return None
