"""Bound the memory for reading a file: a small file may expand to any number of rows, of any width.

The operating system limits the process's memory while it reads a piece. So a stripe, a page or an array of any size
ends with an error message, whatever size the file declares. The content of a file must be in proportion to its size: a
file that expands far more was made to fill memory or disks.
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
from jobs.landing.raw_rows import RawRows, cut_rows
from jobs.specs.files import Files

RATIO = 100
"""Maximum memory of a file's content as a multiple of its size; files of measurements take 5 to 30 times."""
MOST = Files().memory_mb << 20
"""Bytes of memory that a piece may take, unless the spec sets another number."""
MOST_ROWS = 250_000
"""Rows that are checked at once: a rejected row takes a kilobyte of memory while it is written."""
BATCH_BYTES = 64 << 20
"""Bytes of a Parquet file's rows in memory at once, by the row width that its metadata declares."""
_NEAR = 8 << 20
_lock = Lock()
_within = 0
"""Number of pieces being read under the limit; the first sets the limit, the last lifts it."""
_before = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
_End = object()
Step = TypeVar("Step")


@contextmanager
def limit_memory(path: str | Path, most: int = MOST) -> Iterator[None]:
    """Limit the process to `most` additional bytes of memory, if the system supports it (Linux).

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
    """Tell if an error comes from the memory limit; decompressing libraries may report it as damage."""
    return isinstance(error, MemoryError) or "std::bad_alloc" in str(error) or _is_full()


def limit_steps(steps: Iterable[Step], path: str | Path, most: int = MOST) -> Iterator[Step]:
    """Yield the pieces of a file, each read under `limit_memory`."""
    each = iter(steps)
    while True:
        with limit_memory(path, most):
            step = next(each, _End)
        if step is _End:
            return
        yield step  # type: ignore[misc]


def limit_sources(sources: Iterable[RawRows], path: str | Path, most: int = MOST) -> Iterator[RawRows]:
    """Yield the rows of a file under `limit_memory`, as long as they are in proportion to the file's size.

    Raises:
        UserError: the rows take far more memory than the file has bytes.
    """
    each, held = iter(sources), 0
    while True:
        # Rows already read count: all rows of a small file together may take no more than a piece.
        left = max(most, RATIO * os.path.getsize(path)) - held
        with limit_memory(path, min(most, left + (most >> 3))):
            source = next(each, None)
        if source is None:
            return
        held += sum(column.nbytes for column in source.columns.values())
        refuse_expansion(path, held, most)
        for start in range(0, max(source.rows, 1), MOST_ROWS):
            yield cut_rows(source, start, start + MOST_ROWS)


def refuse_expansion(path: str | Path, held: int, most: int = MOST) -> None:
    """Check that a file's content in memory is in proportion to its size.

    Args:
        path: the file.
        held: bytes of memory that its content takes.
        most: bytes that are always allowed.

    Raises:
        UserError: the content is too large.
    """
    size = os.path.getsize(path)
    if held > max(most, RATIO * size):
        raise UserError(
            f"{path}: has {size:,} bytes, and its content takes at least {held >> 20:,} MB, over {RATIO} times as "
            "much: if its rows are right, write fewer of them into a file, or raise files.memory_mb in the spec (now "
            f"{most >> 20:,})"
        )


def compute_stored_bytes(schema: pa.Schema, columns: Sequence[str], rows: int) -> int:
    """Return the minimum bytes of memory for columns of a Parquet or ORC file."""
    kinds = (schema.field(name).type for name in columns)
    return rows * sum(_compute_width(kind) for kind in kinds)


def compute_batch_rows(metadata: pq.FileMetaData, groups: Sequence[int]) -> int:
    """Return the number of rows of a Parquet file to read at once: `MOST_ROWS`, or fewer if they are wide."""
    sizes = [(metadata.row_group(one).total_byte_size, metadata.row_group(one).num_rows) for one in groups]
    width = max((size // max(rows, 1) for size, rows in sizes), default=0)
    return max(1, min(MOST_ROWS, BATCH_BYTES // max(width, 1)))


def open_bytes(path: Path, most: int = MOST) -> BufferedIOBase:
    """Open a file for reading uncompressed bytes; reading far more than a compressed file's size is an error."""
    stream = open_input(path)
    if not path.name.lower().endswith(".gz"):
        return stream
    found = _BoundedGzip(fileobj=stream)
    found.myfileobj = stream  # type: ignore[assignment] # closed with it
    found.path, found.most = path, most
    return found


class _BoundedGzip(gzip.GzipFile):
    """Gzip file that checks the amount of uncompressed data while it is read."""

    path: Path
    most: int

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        refuse_expansion(self.path, self.tell(), self.most)
        return data


def _compute_width(kind: pa.DataType) -> int:
    """Return the minimum bytes of a value; for a text, the bytes of its offset."""
    try:
        return max(1, kind.bit_width // 8)
    except ValueError:
        return 4


def _set_limit(most: int) -> None:
    global _within, _before
    with _lock:
        _within += 1
        taken = _read_memory_taken()
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
        if not _within and _read_memory_taken() is not None:
            resource.setrlimit(resource.RLIMIT_DATA, _before)


def _is_full() -> bool:
    """Tell if the process is near its memory limit."""
    limit, taken = resource.getrlimit(resource.RLIMIT_DATA)[0], _read_memory_taken()
    return _within > 0 and taken is not None and limit != resource.RLIM_INFINITY and limit - taken < _NEAR


def _read_memory_taken() -> int | None:
    """Return the bytes of memory that count for the limit; None if the system does not report them."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[5]) * resource.getpagesize()
    except OSError:
        return None
