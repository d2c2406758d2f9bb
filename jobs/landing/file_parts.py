"""Cut files into parts that can be read independently, limit the memory of reading, and report unreadable files."""

from __future__ import annotations

import gzip
import os
import re
import resource
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from threading import Lock
from typing import NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.core.errors import RUN_FAILED, UserError, extract_first_line
from jobs.core.faults import find_fault
from jobs.core.input_files import open_input
from jobs.core.redaction import show_name, show_names
from jobs.landing.csv_records import BOM, LONGEST, PIECE_BYTES, PLAIN, Dialect
from jobs.landing.raw_rows import RawRows, cut_rows
from jobs.landing.wide_files import WideColumns
from jobs.specs.files import Files
from jobs.specs.problems import suggest_word

RATIO = 100
"""Maximum memory of a file's content as a multiple of the file's size; typical files need 5 to 30 times their size."""
MOST = Files().memory_mb << 20
"""Maximum bytes of memory for a piece, unless the spec sets another number."""
MOST_ROWS = 250_000
"""Maximum number of rows that are checked together; each rejected row needs about a kilobyte of memory."""
BATCH_BYTES = 64 << 20
"""Maximum bytes of a batch of Parquet rows, estimated from the row width in the metadata of the file."""
_NEAR = 8 << 20
_lock = Lock()
_within = 0
"""Number of pieces that are being read under the limit. The first piece sets the limit; the last piece removes it."""
_before = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
_End = object()
Step = TypeVar("Step")


@contextmanager
def limit_memory(path: str | Path, most: int = MOST) -> Iterator[None]:
    """Limit the process to `most` additional bytes of memory, if the system supports this limit (Linux).

    Raises:
        UserError: reading the file needs more memory.
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
    """Return whether the memory limit caused an error; decompression libraries may report a damaged file instead."""
    return isinstance(error, MemoryError) or "std::bad_alloc" in str(error) or _is_full()


def limit_steps(steps: Iterable[Step], path: str | Path, most: int = MOST) -> Iterator[Step]:
    """Yield the pieces of a file; each piece is read under `limit_memory`."""
    each = iter(steps)
    while True:
        with limit_memory(path, most):
            step = next(each, _End)
        if step is _End:
            return
        yield step  # type: ignore[misc]


def limit_sources(sources: Iterable[RawRows], path: str | Path, most: int = MOST) -> Iterator[RawRows]:
    """Yield the rows of a file, read under `limit_memory`, in batches of up to `MOST_ROWS` rows.

    Raises:
        UserError: the rows need more memory than `most` and `RATIO` times the file's size.
    """
    each, held = iter(sources), 0
    while True:
        # The limit includes all rows read before: together, the rows of a small file may not need more than `most`.
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
    """Raise an error if a file's content in memory is far larger than the file.

    Args:
        path: path of the file.
        held: bytes of memory that the content needs.
        most: bytes of memory that are always allowed.

    Raises:
        UserError: the content needs more than `most` bytes and more than `RATIO` times the file's size.
    """
    size = os.path.getsize(path)
    if held > max(most, RATIO * size):
        raise UserError(
            f"{path}: has {size:,} bytes, and its content takes at least {held >> 20:,} MB, over {RATIO} times as "
            "much: if its rows are right, write fewer of them into a file, or raise files.memory_mb in the spec (now "
            f"{most >> 20:,})"
        )


def compute_stored_bytes(schema: pa.Schema, columns: Sequence[str], rows: int) -> int:
    """Return the minimum bytes of memory for `rows` rows of columns of a Parquet or ORC file."""
    kinds = (schema.field(name).type for name in columns)
    return rows * sum(_compute_width(kind) for kind in kinds)


def compute_batch_rows(metadata: pq.FileMetaData, groups: Sequence[int]) -> int:
    """Return the number of rows in a batch of a Parquet file: `MOST_ROWS`, or fewer if the rows are wide."""
    sizes = [(metadata.row_group(one).total_byte_size, metadata.row_group(one).num_rows) for one in groups]
    width = max((size // max(rows, 1) for size, rows in sizes), default=0)
    return max(1, min(MOST_ROWS, BATCH_BYTES // max(width, 1)))


def open_bytes(path: Path, most: int = MOST) -> BufferedIOBase:
    """Open a file and return its uncompressed bytes as a stream; too large a content of a gzip file is an error."""
    stream = open_input(path)
    if not path.name.lower().endswith(".gz"):
        return stream
    found = _BoundedGzip(fileobj=stream)
    found.myfileobj = stream  # type: ignore[assignment] # closed with the gzip file
    found.path, found.most = path, most
    return found


class _BoundedGzip(gzip.GzipFile):
    """Gzip file that checks the size of the uncompressed data during reading."""

    path: Path
    most: int

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        refuse_expansion(self.path, self.tell(), self.most)
        return data


def _compute_width(kind: pa.DataType) -> int:
    """Return the minimum bytes of a value of a type; for a text, the bytes of its offset."""
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
    """Return whether the process is near its memory limit."""
    limit, taken = resource.getrlimit(resource.RLIMIT_DATA)[0], _read_memory_taken()
    return _within > 0 and taken is not None and limit != resource.RLIM_INFINITY and limit - taken < _NEAR


def _read_memory_taken() -> int | None:
    """Return the bytes of memory that count for the limit; None if the system does not report this number."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[5]) * resource.getpagesize()
    except OSError:
        return None


BLANK_BYTES = b" \t\r\n"
"""Bytes that a blank line may contain."""
_MANY_BLANK = re.compile(rb"\n\n{2,}")
"""Pattern of several empty lines, which are replaced by one line break because empty lines are not rows."""
CSV_FORMATS = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
_KINDS = {**dict.fromkeys(CSV_FORMATS, "a CSV"), ".parquet": "a Parquet", ".orc": "an ORC"}


class FilePart(NamedTuple):
    """Part of a file that can be read independently, for example by a Spark worker.

    start, stop: range of bytes with whole lines or records, range of Parquet row groups, or range of ORC stripes. A
        stop of None means the end of the file.
    most: maximum bytes of memory to read a piece of the part.
    dialect, names: dialect and column names of a CSV file.
    wide: columns of a wide file that become rows; None for other files.
    """

    path: str
    start: int
    stop: int | None
    most: int = MOST
    dialect: Dialect = PLAIN
    names: tuple[str, ...] = ()
    wide: WideColumns | None = None


def is_csv(path: str | Path) -> bool:
    """Return whether a file's ending is that of a CSV file."""
    return str(path).lower().endswith(CSV_FORMATS)


@contextmanager
def report_unreadable(path: Path) -> Iterator[None]:
    """Raise a UserError in place of an error for a file that cannot be read."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(
            f"{path}: is cut off or damaged: it is no whole gzip file ({error}); copy it again, or write it anew"
        ) from error
    except (pa.ArrowException, OSError) as error:
        if is_out_of_memory(error):  # `limit_memory` reports this error
            raise
        fault = find_fault(error)
        if fault is not None:
            raise UserError(fault, RUN_FAILED) from error
        kind = next((kind for ending, kind in _KINDS.items() if path.name.lower().endswith(ending)), "a text")
        raise UserError(
            f"{path}: cannot be read: it is not {kind} file, or is damaged ({extract_first_line(error)}); "
            f"copy it again, or "
            "write it anew"
        ) from error


def check_columns(path: Path, have: Sequence[str], wanted: Sequence[str]) -> None:
    """Check that a file has each of the wanted columns exactly once.

    Raises:
        UserError: a column is missing or appears twice.
    """
    times = Counter(have)
    for name in wanted:
        if not times[name]:
            hint = suggest_word(name, have)
            listed = f"columns are {show_names(have)}"
            raise UserError(f"{path}: there is no column '{name}'; {hint or listed}")
        if times[name] > 1:
            raise UserError(f"{path}: column '{show_name(name)}' appears twice; rename one of them")


def cut_line_parts(path: Path, start: int = 0, stop: int | None = None, most: int = MOST) -> list[FilePart]:
    """Return the parts of a file's bytes from `start` to `stop`, in order, cut at line ends.

    A compressed file is one part, because it cannot be read from its middle.

    Args:
        path: path of the file.
        start: byte position of the first part.
        stop: byte position of the end. None means the end of the file.
        most: maximum bytes of memory to read a part.

    Raises:
        UserError: the file cannot be read.
    """
    if path.name.lower().endswith(".gz"):
        return [FilePart(str(path), 0, None, most)]
    found: list[FilePart] = []
    with report_unreadable(path), open_input(path) as file:
        size = path.stat().st_size if stop is None else stop
        while start < size:
            file.seek(min(start + PIECE_BYTES, size))
            while (line := file.readline(PIECE_BYTES)) and not line.endswith(b"\n"):
                if file.tell() - start > PIECE_BYTES + LONGEST:
                    raise _build_length_error(path)
            end = min(file.tell(), size)
            found.append(FilePart(str(path), start, end, most))
            start = end
    return found


def read_lines(part: FilePart) -> Iterator[list[bytes]]:
    """Yield the lines of a part of a file in batches; a byte order mark at the beginning of the file is skipped.

    Raises:
        UserError: the file cannot be read, a line is too long, or the content is far larger than the file.
    """
    with report_unreadable(Path(part.path)):
        for lines in limit_steps(_read_lines(part), part.path, part.most):
            for start in range(0, len(lines), MOST_ROWS):
                yield lines[start : start + MOST_ROWS]


def _read_lines(part: FilePart) -> Iterator[list[bytes]]:
    with open_bytes(Path(part.path), part.most) as file:
        file.seek(part.start)
        if part.start == 0 and file.read(len(BOM)) != BOM:
            file.seek(0)
        if part.stop is not None:
            yield file.read(part.stop - file.tell()).split(b"\n")
            return
        rest = b""
        while block := file.read(PIECE_BYTES):
            whole, mark, rest = (rest + block).rpartition(b"\n")
            if mark:
                yield _MANY_BLANK.sub(b"\n", whole).split(b"\n")
            if len(rest) > LONGEST:
                raise _build_length_error(part.path)
        if rest:
            yield [rest]


def _build_length_error(path: str | Path) -> UserError:
    return UserError(f"{path}: has a line of more than {LONGEST:,} bytes; write a row on each line")
