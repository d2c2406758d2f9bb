"""Read lines of text with the regular expression `line_pattern` of a spec; each named group is a column.

If the expression does not match a whole line, the line is rejected, and its payload contains the line. Empty lines are
skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from jobs.core.errors import UserError
from jobs.core.input_files import open_input
from jobs.landing.file_parts import BLANK_BYTES, FilePart, read_lines, report_unreadable
from jobs.landing.raw_rows import BYTES, LINE, NOT_UTF8, RawRows, encode_base64
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding import arrow

FORMATS = (".txt", ".log", ".txt.gz", ".log.gz")
_UNMATCHED = "line: does not match line_pattern"


def is_text(path: str | Path) -> bool:
    """Return whether a file's ending is that of a file with lines of text."""
    return str(path).lower().endswith(FORMATS)


def get_line_pattern(spec: ModelSpec, path: str | Path) -> str:
    """Return the `line_pattern` of a spec.

    Raises:
        UserError: the spec has no `line_pattern`.
    """
    if spec.line_pattern is None:
        groups = [rf"(?P<{name}>\w+)" for name in spec.key[:1]] + [rf"(?P<{spec.time}>\S+)"]
        raise UserError(
            f"{path}: the spec of {spec.name} does not say how to read lines of text; add line_pattern, a regular "
            f"expression with a named group for each column, such as '{' '.join(groups)} ...'"
        )
    return spec.line_pattern


def build_text_schema(spec: ModelSpec, path: Path) -> pa.Schema:
    """Return the schema of a file of lines, with a column for each named group of the spec's `line_pattern`.

    Raises:
        UserError: the spec has no `line_pattern`, or the file cannot be read.
    """
    groups = re.compile(get_line_pattern(spec, path)).groupindex
    with report_unreadable(path), open_input(path):
        return pa.schema([(name, pa.string()) for name in groups])


def read_part(pattern: str, part: FilePart, columns: Sequence[str] | None = None) -> Iterator[RawRows]:
    """Yield the rows of a part of a file in batches, with the named columns, or with all columns and the whole line.

    Raises:
        UserError: the file cannot be read.
    """
    wanted = re.compile(pattern)
    for lines in read_lines(part):
        whole = [bare for line in lines if (bare := line.rstrip(b"\r\n")).strip(BLANK_BYTES)]
        yield _match_lines(wanted, whole, columns)


def match_again(pattern: str, row: Mapping[str, object]) -> tuple[dict[str, object], str | None]:
    """Match the line of a rejected row again; return the row with the named groups added, and the problem, or None.

    An empty group becomes null. A row without a line stays unchanged.
    """
    line = row.get(LINE)
    if not isinstance(line, str):
        return dict(row), None
    match = re.compile(pattern).fullmatch(line)
    if match is None:
        return dict(row), _UNMATCHED
    return {**row, **{name: text or None for name, text in match.groupdict().items()}}, None


def _match_lines(wanted: re.Pattern[str], lines: list[bytes], columns: Sequence[str] | None) -> RawRows:
    """Return the named groups of lines as columns; an empty group becomes null."""
    texts = [line.decode("utf-8", "backslashreplace") for line in lines]
    invalid = np.array([text.encode() != line for text, line in zip(texts, lines, strict=True)], bool)
    matches = [wanted.fullmatch(text) for text in texts]
    names = list(wanted.groupindex) if columns is None else list(columns)
    found: dict[str, pa.Array] = {
        name: arrow.build_texts([None if match is None else match[name] or None for match in matches])
        for name in names
    }
    if columns is None:
        found[LINE] = arrow.build_texts(texts)
        if invalid.any():
            found[BYTES] = encode_base64(
                [line if bad else None for line, bad in zip(lines, invalid.tolist(), strict=True)]
            )
    problems = np.array([_UNMATCHED if match is None else None for match in matches], object)
    problems[invalid] = NOT_UTF8
    return RawRows(found, len(lines), problems)
