"""Cut files into parts that can be read independently, read lines, and report files that cannot be read."""

from __future__ import annotations

import gzip
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from jobs.core.errors import UserError, extract_first_line
from jobs.core.input_files import open_input
from jobs.core.redaction import show_name, show_names
from jobs.landing.bounds import MOST, MOST_ROWS, is_out_of_memory, limit_steps, open_bytes
from jobs.landing.csv_records import BOM, LONGEST, PIECE_BYTES, PLAIN, Dialect
from jobs.landing.shapes.wide_files import WideColumns
from jobs.specs.problems import suggest_word

BLANK_BYTES = b" \t\r\n"
"""Bytes that a blank line may contain."""
_MANY_BLANK = re.compile(rb"\n\n{2,}")
"""Pattern of a run of line breaks: empty lines are not rows."""
CSV_FORMATS = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
_KINDS = {**dict.fromkeys(CSV_FORMATS, "a CSV"), ".parquet": "a Parquet", ".orc": "an ORC"}


class FilePart(NamedTuple):
    """Part of a file that can be read independently, also by a Spark worker.

    start, stop: range of bytes with whole lines or records, of Parquet row groups, or of ORC stripes; stop None: to the
    end of the file. most: bytes of memory for reading a piece of the part. dialect, names: dialect and column names of
    a CSV file. wide: columns that become rows.
    """

    path: str
    start: int
    stop: int | None
    most: int = MOST
    dialect: Dialect = PLAIN
    names: tuple[str, ...] = ()
    wide: WideColumns | None = None


def is_csv(path: str | Path) -> bool:
    """Tell by a file's ending if it is CSV."""
    return str(path).lower().endswith(CSV_FORMATS)


@contextmanager
def report_unreadable(path: Path) -> Iterator[None]:
    """Turn the errors of a file that cannot be read into a UserError."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    except PermissionError as error:
        raise UserError(f"{path}: may not be read; give this user the right to ({error.strerror})") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(
            f"{path}: is cut off or damaged: it is no whole gzip file ({error}); copy it again, or write it anew"
        ) from error
    except (pa.ArrowException, OSError) as error:
        if is_out_of_memory(error):  # `limit_memory` reports it
            raise
        kind = next((kind for ending, kind in _KINDS.items() if path.name.lower().endswith(ending)), "a text")
        raise UserError(
            f"{path}: cannot be read: it is not {kind} file, or is damaged ({extract_first_line(error)}); copy it again, or "
            "write it anew"
        ) from error


def check_columns(path: Path, have: Sequence[str], wanted: Sequence[str]) -> None:
    """Check that a file has each of the wanted columns once.

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
    """Return the parts of a file, in order: its bytes from `start` to `stop`, cut at line ends.

    A compressed file cannot be read from its middle, so it is one part.

    most: bytes of memory for reading a part.

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
    """Yield the lines of a part of a file in batches, without a byte order mark at the file's beginning.

    Raises:
        UserError: the file cannot be read, a line is too long, or the content is far larger than the file's size.
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
