"""The unchecked rows of a file or of messages, as columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


class Source(NamedTuple):
    """The content of a file: `columns` by name, each of N rows, and (N,) which rows are `misshapen` or `not_utf8`.

    The texts of a row that is not UTF-8 have `\\xff` and the like in place of its invalid bytes. `not_utf8` is None
    where the format does not tell. `unmatched` (N,): lines of text that the spec's expression does not match; None of
    another format. `decimal`: what precedes the fraction of a number that is text. `left_out`: comments and repeated
    headers that stood between the rows. `problems` (N,): why a JSON document is invalid, None where it is valid; None
    of another format.
    `landed`: when the rows landed, in microseconds since 1970, of all or of each (N,); None: now.
    `before`: returns the parts of the same file before this one, the nearest first; None: there are none.
    """

    columns: dict[str, pa.Array]
    misshapen: NDArray[np.bool_]
    rows: int
    not_utf8: NDArray[np.bool_] | None = None
    unmatched: NDArray[np.bool_] | None = None
    decimal: str = "."
    left_out: int = 0
    problems: NDArray[np.object_] | None = None
    landed: int | NDArray[np.int64] | None = None
    before: Callable[[], Iterator[Source]] | None = None


def cut_rows(source: Source, start: int, stop: int) -> Source:
    """Return the rows of a source from `start` to `stop`."""
    marks = (source.not_utf8, source.unmatched, source.problems)
    not_utf8, unmatched, problems = (None if mark is None else mark[start:stop] for mark in marks)
    misshapen = source.misshapen[start:stop]
    return source._replace(
        columns={name: column.slice(start, stop - start) for name, column in source.columns.items()},
        misshapen=misshapen,
        rows=len(misshapen),
        not_utf8=not_utf8,
        unmatched=unmatched,
        left_out=source.left_out if start == 0 else 0,
        problems=problems,
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
            written = pa.array(
                [_as_text(value) for value in column.cast(pa.binary()).to_pylist()], pa.string()
            )
            found[name] = written
            differ = pc.not_equal(  # pyright: ignore[reportAttributeAccessIssue]
                written.cast(pa.binary()), column.cast(pa.binary())
            )
            bad = arrow.to_numpy(differ, False)
            marks = bad if marks is None else marks | bad
    return found, marks


def _as_text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "backslashreplace")


def joined(parts: list[Source], names: list[str]) -> Source:
    """Return the rows of several parts, in order; columns that only some parts have follow the named ones."""
    known = set(names)
    more = [name for part in parts for name in part.columns if name not in known]
    columns = {
        name: pa.concat_arrays([part.columns.get(name, pa.nulls(part.rows, pa.string())) for part in parts])
        if parts
        else pa.array([], pa.string())
        for name in (*names, *dict.fromkeys(more))
    }
    return Source(
        columns,
        np.concatenate([np.zeros(0, bool), *(part.misshapen for part in parts)]),
        sum(part.rows for part in parts),
        _joined_marks(parts, [part.not_utf8 for part in parts]),
        _joined_marks(parts, [part.unmatched for part in parts]),
        parts[0].decimal if parts else ".",
        sum(part.left_out for part in parts),
        None
        if all(part.problems is None for part in parts)
        else np.concatenate(
            [np.full(part.rows, None, object) if part.problems is None else part.problems for part in parts]
        ),
    )


def _joined_marks(parts: list[Source], marks: list[NDArray[np.bool_] | None]) -> NDArray[np.bool_]:
    each = (
        np.zeros(part.rows, bool) if mark is None else mark for part, mark in zip(parts, marks, strict=True)
    )
    return np.concatenate([np.zeros(0, bool), *each])


def reject(reason: NDArray[np.object_], bad: NDArray[np.bool_], text: str) -> None:
    """Reject the bad rows (N,) that have no reason yet with `text`."""
    if bad.any():
        bad = bad & (reason == None)  # noqa: E711 - elementwise
        reason[bad] = text
