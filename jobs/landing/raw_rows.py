"""The unchecked rows of a file or of messages, as columns."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from jobs.encoding import arrow

CORRUPT = "_corrupt"
"""The column with the text of a row that has not as many fields as the header."""
FIELDS = "_fields"
"""The column with the number of fields of such a row, and that of the header."""
BYTES = "_bytes"
"""The column with the bytes, in base64, of a row that is not UTF-8 text."""
LINE = "_line"
"""The column with a whole line of text (`jobs.landing.text_lines`)."""


MISSHAPEN = "row: not as many fields as the header"
NOT_UTF8 = "row: not UTF-8 text"


class Source(NamedTuple):
    """The content of a file: `columns` by name, each of N `rows`.

    `problems` (N,): why a row is invalid, whatever its columns hold, None where it is valid; None: all are. The texts
    of a row that is not UTF-8 have `\\xff` and the like in place of its invalid bytes.
    `decimal`: what precedes the fraction of a number that is text. `left_out`: comments and repeated headers that stood
    between the rows.
    `landed`: when the rows landed, in microseconds since 1970, of all or of each (N,); None: now.
    `before`: returns the parts of the same file before this one, the nearest first; None: there are none.
    `payload`: returns what the quarantine keeps of a row, by its place; None: its columns.
    """

    columns: dict[str, pa.Array]
    rows: int
    problems: NDArray[np.object_] | None = None
    decimal: str = "."
    left_out: int = 0
    landed: int | NDArray[np.int64] | None = None
    before: Callable[[], Iterator[Source]] | None = None
    payload: Callable[[int], str] | None = None

    def reasons(self) -> NDArray[np.object_]:
        """Return why each row is invalid, None where it is valid, to add other reasons to."""
        return np.full(self.rows, None, object) if self.problems is None else self.problems.copy()


def shape_problem(row: Mapping[str, object]) -> str | None:
    """Return why a rejected row is no row of the file's columns, by the members of its payload; None if it is one."""
    if row.get(CORRUPT) is not None:
        return MISSHAPEN
    return None if row.get(BYTES) is None else NOT_UTF8


def base64_texts(lines: Sequence[bytes | None]) -> pa.Array:
    """Return bytes in base64, for the column `BYTES`; null where there are none."""
    return arrow.texts([None if line is None else base64.b64encode(line).decode() for line in lines])


def cut_rows(source: Source, start: int, stop: int) -> Source:
    """Return the rows of a source, which names no payloads, from `start` to `stop`."""
    return source._replace(
        columns={name: column.slice(start, stop - start) for name, column in source.columns.items()},
        rows=max(min(stop, source.rows) - start, 0),
        problems=None if source.problems is None else source.problems[start:stop],
        left_out=source.left_out if start == 0 else 0,
    )


def valid_texts(columns: dict[str, pa.Array]) -> tuple[dict[str, pa.Array], NDArray[np.bool_] | None]:
    """Return columns whose texts are UTF-8, and (N,) which rows had others; None where none had.

    Arrow takes the bytes of a text as they are, also those that another reader has not looked at.
    """
    found, marks = dict(columns), None
    for name, column in columns.items():
        if not pa.types.is_string(column.type):
            continue
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            given = column.cast(pa.binary()).to_pylist()
            shown = [None if value is None else value.decode("utf-8", "backslashreplace") for value in given]
            written = pa.array(shown, pa.string())
            found[name] = written
            differ = pc.not_equal(  # pyright: ignore[reportAttributeAccessIssue]
                written.cast(pa.binary()), column.cast(pa.binary())
            )
            bad = arrow.to_numpy(differ, False)
            marks = bad if marks is None else marks | bad
    return found, marks


def joined(parts: Sequence[Source], names: Sequence[str]) -> Source:
    """Return the rows of several parts, in order; columns that only some parts have follow the named ones.

    Columns of several types become texts: in JSON these are numbers and texts that write some.
    """
    columns: dict[str, pa.Array] = {}
    for name in dict.fromkeys([*names, *(name for part in parts for name in part.columns)]):
        pieces = [part.columns.get(name, pa.nulls(part.rows, pa.string())) for part in parts]
        if len({piece.type for piece in pieces}) > 1:
            pieces = [piece.cast(pa.string()) for piece in pieces]
        columns[name] = pa.concat_arrays(pieces) if pieces else pa.array([], pa.string())
    are_valid = all(part.problems is None for part in parts)
    return Source(
        columns,
        sum(part.rows for part in parts),
        None if are_valid else np.concatenate([part.reasons() for part in parts]),
        parts[0].decimal if parts else ".",
        sum(part.left_out for part in parts),
    )


def reject(reason: NDArray[np.object_], bad: NDArray[np.bool_], text: str) -> None:
    """Reject the bad rows (N,) that have no reason yet with `text`."""
    if bad.any():
        bad = bad & (reason == None)  # noqa: E711 - elementwise
        reason[bad] = text
