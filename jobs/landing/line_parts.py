"""Cut a file of lines into parts that can be read by themselves, and read the lines of a part."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jobs.core.errors import UserError
from jobs.landing.csv_parquet import Part, damaged
from jobs.landing.csv_records import BOM, LONGEST, PIECE_BYTES

_MANY_BLANK = re.compile(rb"\n\n{2,}")
"""Line breaks after which no line follows for a while: empty lines are no rows."""


def open_lines(path: Path) -> gzip.GzipFile:
    """Open a file for reading bytes, uncompressed."""
    return gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb")  # type: ignore[return-value]


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn the errors of a file that cannot be read into a UserError."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(damaged(path, str(error))) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error})") from error


def line_parts(path: Path, start: int = 0, stop: int | None = None) -> list[Part]:
    """Return the parts of a file, in order: its bytes from `start` to `stop`, cut where lines end.

    A compressed file cannot be read from its middle, so that it is one part.
    """
    if path.name.lower().endswith(".gz"):
        return [Part(str(path), 0, None)]
    size = path.stat().st_size if stop is None else stop
    found: list[Part] = []
    with path.open("rb") as file:
        while start < size:
            file.seek(min(start + PIECE_BYTES, size))
            file.readline()
            end = min(file.tell(), size)
            found.append(Part(str(path), start, end))
            start = end
    return found


def lines_of(part: Part) -> Iterator[list[bytes]]:
    """Return the lines of a part of a file in some batches, without a byte order mark at the file's beginning."""
    with open_lines(Path(part.path)) as file:
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
                raise UserError(
                    f"{part.path}: has a line of more than {LONGEST:,} bytes; write a row on each line"
                )
        if rest:
            yield [rest]
