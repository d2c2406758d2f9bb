"""Cut a file of lines into parts that can be read by themselves, and read the lines of a part."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jobs.core.errors import UserError
from jobs.core.input_files import open_input
from jobs.landing.bounds import MOST_ROWS, limit_steps, open_bytes
from jobs.landing.csv_parquet import Part, damaged
from jobs.landing.csv_records import BOM, LONGEST, PIECE_BYTES

_MANY_BLANK = re.compile(rb"\n\n{2,}")
"""Line breaks after which no line follows for a while: empty lines are no rows."""


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
    with open_input(path) as file:
        while start < size:
            file.seek(min(start + PIECE_BYTES, size))
            while (line := file.readline(PIECE_BYTES)) and not line.endswith(b"\n"):
                if file.tell() - start > PIECE_BYTES + LONGEST:
                    raise _too_long(path)
            end = min(file.tell(), size)
            found.append(Part(str(path), start, end))
            start = end
    return found


def lines_of(part: Part) -> Iterator[list[bytes]]:
    """Return the lines of a part of a file in some batches, without a byte order mark at the file's beginning.

    Raises:
        UserError: a line is too long, or the file holds far more than its size.
    """
    for lines in limit_steps(_lines_of(part), part.path, part.most):
        for start in range(0, len(lines), MOST_ROWS):
            yield lines[start : start + MOST_ROWS]


def _lines_of(part: Part) -> Iterator[list[bytes]]:
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
                raise _too_long(part.path)
        if rest:
            yield [rest]


def _too_long(path: str | Path) -> UserError:
    return UserError(f"{path}: has a line of more than {LONGEST:,} bytes; write a row on each line")
