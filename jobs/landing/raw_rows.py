"""Unchecked rows of files, messages or tables as columns, and their map to the columns of a spec."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from jobs.core.errors import UserError
from jobs.landing.values.times import combine_times
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding import arrow

CORRUPT = "_corrupt"
"""Column with the text of a misshapen row, which has another number of fields than the header."""
FIELDS = "_fields"
"""Column with the number of fields of a misshapen row and of the header."""
BYTES = "_bytes"
"""Column with the bytes (base64) of a row that is not UTF-8 text."""
LINE = "_line"
"""Column with a whole line of text (`jobs.landing.text_lines`)."""


MISSHAPEN = "row: not as many fields as the header"
NOT_UTF8 = "row: not UTF-8 text"


class RawRows(NamedTuple):
    """Unchecked rows as columns. In texts that are not UTF-8, escapes such as `\\xff` replace the invalid bytes.

    columns: columns by name, with N values each.
    rows: number N of rows.
    problems: (N,) reason why each row is invalid regardless of its values, None for valid rows. None in place of the
        array means that all rows are valid.
    decimal: decimal mark of numbers in texts.
    left_out: number of skipped comments and repeated headers.
    landed: landing time in microseconds since 1970, of all rows or (N,) of each row. None means the present time.
    before: function that returns the earlier parts of the same file, the nearest part first. None means that there are
        no earlier parts.
    payload: function that returns the quarantine payload of the row with an index. None means that the payload consists
        of the columns of the row.
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
        """Return a copy of `problems` (N,) to which other reasons can be added; None for each valid row."""
        return np.full(self.rows, None, object) if self.problems is None else self.problems.copy()


def find_shape_problem(row: Mapping[str, object]) -> str | None:
    """Return the reason why the payload of a rejected row is misshapen or not UTF-8; None if it is neither."""
    if row.get(CORRUPT) is not None:
        return MISSHAPEN
    return None if row.get(BYTES) is None else NOT_UTF8


def parse_payload(payload: str | None) -> dict[str, Any] | None:
    """Return the JSON object in a text; None for any other text."""
    try:
        row = json.loads(payload or "")
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def encode_base64(lines: Sequence[bytes | None]) -> pa.Array:
    """Return lines of bytes as base64 texts for the column `BYTES`; a line of None becomes null."""
    return arrow.build_texts([None if line is None else base64.b64encode(line).decode() for line in lines])


def cut_rows(source: RawRows, start: int, stop: int) -> RawRows:
    """Return the rows from `start` up to, but not including, `stop` of a source without a `payload` function."""
    return source._replace(
        columns={name: column.slice(start, stop - start) for name, column in source.columns.items()},
        rows=max(min(stop, source.rows) - start, 0),
        problems=None if source.problems is None else source.problems[start:stop],
        left_out=source.left_out if start == 0 else 0,
    )


def repair_texts(columns: dict[str, pa.Array]) -> tuple[dict[str, pa.Array], NDArray[np.bool_] | None]:
    """Return columns with valid UTF-8 texts, and a mask (N,) of the rows with invalid texts; None if all are valid.

    This check is necessary because Arrow does not check the bytes of texts, and the reader may not have checked them.
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
    """Return the rows of several parts in order; the named columns are first, all other columns of the parts follow.

    A column that has several types becomes a column of texts. Such columns occur in JSON, if a member is a number in
    one part and a text in another part.
    """
    decimal = parts[0].decimal if parts else "."
    columns: dict[str, pa.Array] = {}
    for name in dict.fromkeys([*names, *(name for part in parts for name in part.columns)]):
        pieces = [part.columns.get(name, pa.nulls(part.rows, pa.string())) for part in parts]
        if len({piece.type for piece in pieces}) > 1:
            pieces = [write_as_texts(piece, decimal) for piece in pieces]
        columns[name] = pa.concat_arrays(pieces) if pieces else pa.array([], pa.string())
    are_valid = all(part.problems is None for part in parts)
    return RawRows(
        columns,
        sum(part.rows for part in parts),
        None if are_valid else np.concatenate([part.reasons() for part in parts]),
        decimal,
        sum(part.left_out for part in parts),
    )


def write_as_texts(column: pa.Array, decimal: str) -> pa.Array:
    """Return a column as texts; a fraction gets the decimal mark."""
    texts = column.cast(pa.string())
    if decimal == "." or not pa.types.is_floating(column.type):
        return texts
    return arrow.load_compute().replace_substring(texts, ".", decimal)


def reject(reason: NDArray[np.object_], bad: NDArray[np.bool_], text: str) -> None:
    """Set the reason `text` for those rows of the mask `bad` (N,) that have no reason yet; update `reason` in place."""
    if bad.any():
        bad = bad & (reason == None)  # noqa: E711 - elementwise
        reason[bad] = text


def take_columns(spec: ModelSpec, source: RawRows, names: Sequence[str] | None = None) -> RawRows:
    """Return unparsed rows with only the columns of the spec, under the names in the spec.

    A column of the spec that the rows lack is omitted. The key from the file's name already has the name in the spec.

    Args:
        spec: spec of the model.
        source: N rows with the column names of the files.
        names: names of the spec's columns to return. None means all columns of the spec.
    """
    if not spec.files.names:
        return source
    columns: dict[str, pa.Array] = {}
    for name in spec.columns if names is None else names:
        given = name if name == spec.key_from_name else spec.files.names.get(name, name)
        if isinstance(given, str):
            if given in source.columns:
                columns[name] = source.columns[given]
            continue
        parts = spec.time_parts
        if all(column in source.columns for column in parts.values()):
            found = {part: source.columns[column] for part, column in parts.items()}
            columns[name] = combine_times(found, parts, spec.time_format)
    before = source.before
    if before is None:
        return source._replace(columns=columns)
    earlier = lambda: (take_columns(spec, part, names) for part in before())  # noqa: E731
    return source._replace(columns=columns, before=earlier)


def build_spec_schema(spec: ModelSpec, schema: pa.Schema) -> pa.Schema:
    """Return the types of a file's columns under the names in the spec, without a time that has several columns."""
    if not spec.files.names:
        return schema
    names = {name: spec.list_file_columns([name])[0] for name in spec.columns if name != spec.key_from_name}
    if spec.time_parts:
        del names[spec.time]
    if spec.key_from_name is not None:
        names[spec.key_from_name] = spec.key_from_name
    return pa.schema([(name, schema.field(column).type) for name, column in names.items()])


def parse_name(path: str | Path) -> str:
    """Return a file's name without its folder and its ending; a double ending such as `.csv.gz` is also removed.

    Raises:
        UserError: the file has no name before its ending.
    """
    name = Path(path).name
    bare = Path(name[:-3] if name.lower().endswith(".gz") else name).stem
    if not bare or bare.startswith("."):
        raise UserError(f"{path}: has no name before its ending, so that it names no key; rename it")
    return bare


def add_key(spec: ModelSpec, source: RawRows, path: str | Path) -> RawRows:
    """Return the rows of a file with the key column from the file's name, if the spec has `key_from_name`."""
    name = spec.key_from_name
    if name is None:
        return source
    return source._replace(
        columns={**source.columns, name: arrow.build_texts([parse_name(path)] * source.rows)}
    )


def add_key_to_document(spec: ModelSpec, document: str, path: str | Path) -> str:
    """Return the text of a JSON object with the key from the file's name added; return any other text unchanged."""
    name = spec.key_from_name
    row = None if name is None else parse_payload(document)
    return document if row is None else json.dumps({**row, name: parse_name(path)}, ensure_ascii=False)


def add_key_to_schema(spec: ModelSpec, schema: pa.Schema, path: str | Path) -> pa.Schema:
    """Return the schema of a file with the key column from the file's name, if the spec has `key_from_name`.

    Raises:
        UserError: the file already has a column with the name of the key column.
    """
    name = spec.key_from_name
    if name is None:
        return schema
    if name in schema.names:
        raise UserError(
            f"{path}: has a column '{name}' itself, and the spec of {spec.name} says key_from_name: {name}; remove "
            "that line, or rename the column"
        )
    parse_name(path)  # an invalid name raises an error here, before any row is read
    return schema.append(pa.field(name, pa.string()))


def build_salt(spec: ModelSpec, path: str | Path) -> bytes:
    """Return the bytes that are hashed before the content of a file.

    If the file's name is the key, the bytes are the name, because files of two keys may have the same content.
    """
    return b"" if spec.key_from_name is None else f"{parse_name(path)}\0".encode()
