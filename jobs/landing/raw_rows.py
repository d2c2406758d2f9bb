"""Unchecked rows of files or messages, as columns."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from jobs.state.encoding import arrow

CORRUPT = "_corrupt"
"""Column with the text of a row whose number of fields differs from the header's."""
FIELDS = "_fields"
"""Column with the number of fields of such a row and of the header."""
BYTES = "_bytes"
"""Column with the bytes (base64) of a row that is not UTF-8 text."""
LINE = "_line"
"""Column with a whole line of text (`jobs.landing.text_lines`)."""


MISSHAPEN = "row: not as many fields as the header"
NOT_UTF8 = "row: not UTF-8 text"


class RawRows(NamedTuple):
    """Unchecked rows: `columns` by name, each with N `rows`.

    `problems` (N,): why a row is invalid regardless of its values, None where it is valid; None: all rows are valid.
    The texts of a row that is not UTF-8 have `\\xff` and the like in place of invalid bytes.
    `decimal`: decimal mark of numbers in texts. `left_out`: number of skipped comments and repeated headers.
    `landed`: landing time in microseconds since 1970, for all rows or for each (N,); None: now.
    `before`: returns the earlier parts of the same file, the nearest first; None: there are no earlier parts.
    `payload`: returns the quarantine payload of a row by its index; None: the payload is the row's columns.
    """

    columns: dict[str, pa.Array]
    rows: int
    problems: NDArray[np.object_] | None = None
    decimal: str = "."
    left_out: int = 0
    landed: int | NDArray[np.int64] | None = None
    before: Callable[[], Iterator[RawRows]] | None = None
    payload: Callable[[int], str] | None = None

    def reasons(self) -> NDArray[np.object_]:
        """Return a copy of the reasons (N,) why rows are invalid, None where valid, to add other reasons."""
        return np.full(self.rows, None, object) if self.problems is None else self.problems.copy()


def find_shape_problem(row: Mapping[str, object]) -> str | None:
    """Return why a rejected row's payload does not fit the file's columns; None if it fits."""
    if row.get(CORRUPT) is not None:
        return MISSHAPEN
    return None if row.get(BYTES) is None else NOT_UTF8


def encode_base64(lines: Sequence[bytes | None]) -> pa.Array:
    """Return bytes as base64 texts for the column `BYTES`; null for None."""
    return arrow.build_texts([None if line is None else base64.b64encode(line).decode() for line in lines])


def cut_rows(source: RawRows, start: int, stop: int) -> RawRows:
    """Return rows `start` to `stop` (excluded) of a source without a `payload` function."""
    return source._replace(
        columns={name: column.slice(start, stop - start) for name, column in source.columns.items()},
        rows=max(min(stop, source.rows) - start, 0),
        problems=None if source.problems is None else source.problems[start:stop],
        left_out=source.left_out if start == 0 else 0,
    )


def repair_texts(columns: dict[str, pa.Array]) -> tuple[dict[str, pa.Array], NDArray[np.bool_] | None]:
    """Return columns with valid UTF-8 texts, and which rows (N,) were invalid; None if all were valid.

    Arrow does not check the bytes of texts, even if another reader has not checked them either.
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


def join_parts(parts: Sequence[RawRows], names: Sequence[str]) -> RawRows:
    """Concatenate the rows of several parts, in order; columns that only some parts have follow the named columns.

    A column of several types becomes text: in JSON such a column mixes numbers with texts of numbers.
    """
    columns: dict[str, pa.Array] = {}
    for name in dict.fromkeys([*names, *(name for part in parts for name in part.columns)]):
        pieces = [part.columns.get(name, pa.nulls(part.rows, pa.string())) for part in parts]
        if len({piece.type for piece in pieces}) > 1:
            pieces = [piece.cast(pa.string()) for piece in pieces]
        columns[name] = pa.concat_arrays(pieces) if pieces else pa.array([], pa.string())
    are_valid = all(part.problems is None for part in parts)
    return RawRows(
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
