"""Read JSON objects, one object for each row, into unchecked columns, and read the rows of JSON files.

Arrow's reader reads a whole block of documents at once. Arrow allows one type per column, and its error does not name
the invalid document. Therefore a pattern first finds the documents that Arrow would misread, and the types are inferred
from the first documents. A block that Arrow refuses is halved until few documents remain. Python's reader reads these
remaining documents and the documents that Arrow would misread, each separately.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import json as arrow_json

from jobs.core.errors import UserError
from jobs.landing.csv_records import BOM, PIECE_BYTES
from jobs.landing.file_parts import (
    BLANK_BYTES,
    MOST,
    MOST_ROWS,
    FilePart,
    check_columns,
    cut_line_parts,
    limit_steps,
    open_bytes,
    read_lines,
    report_unreadable,
)
from jobs.landing.json_values import BEGINNING, describe_members, read_row_texts
from jobs.landing.json_values import spans_lines as values_span_lines
from jobs.landing.raw_rows import RawRows, add_key_to_document, join_parts
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding import arrow
from jobs.state.encoding.arrow import load_compute

FORMATS = (".json", ".jsonl", ".ndjson", ".json.gz", ".jsonl.gz", ".ndjson.gz")

SCHEMA_DOCUMENTS = 1000
"""Number of documents at the beginning of a file from which columns and types are inferred."""

NOT_UTF8 = "value: not UTF-8 text"
NOT_AN_OBJECT = "value: not a JSON object"
FEW = 32
"""Maximum number of documents of a block that is not halved again."""
# An ordinary document is one object from the first character to the last. It has no NaN or infinity, no second object
# and no escape that may be half of a surrogate pair. It also has no -0, because Arrow reads a key of -0 as 0.
_ORDINARY = r"(?s)\A[ \t\r]*\{.*\}[ \t\r]*\z"
_ODD = r"\n|\}\s*\{|\\u[dD]|[:,\[]\s*-?(?:NaN|Inf)|:\s*-0\s*[,}]"


class _Wanted(NamedTuple):
    """Names of the columns to read, of the key columns, and of the columns whose numbers must stay exact."""

    columns: tuple[str, ...]
    keys: tuple[str, ...]
    exact: tuple[str, ...]
    decimal: str = "."


class _Number(str):
    """Text of a number, unchanged from the document."""


def read_objects(
    documents: pa.Array,
    columns: Sequence[str],
    keys: Sequence[str],
    exact: Sequence[str] = (),
    decimal: str = ".",
) -> RawRows:
    """Read N JSON objects (binary, UTF-8) into the named columns, null where a member is absent.

    A column has numbers if this member is a number in all documents; otherwise the column has texts. Other members are
    ignored.

    Args:
        documents: N documents, not null, with one object each.
        columns: names of the members to read.
        keys: names of the key columns. A key must be a text, a whole number or a boolean, because only these values
            have a unique notation.
        exact: names of other columns whose numbers must keep their notation.
        decimal: decimal mark of texts; a number in a column of texts gets it too.
    """
    parts = _read_parts(documents, _Wanted(tuple(columns), tuple(keys), (*keys, *exact), decimal))
    return join_parts(parts, columns)


def _read_parts(documents: pa.Array, wanted: _Wanted) -> list[RawRows]:
    """Read each run of ordinary documents with Arrow's reader, and each other run with Python's reader."""
    if len(documents) == 0:
        return []
    ordinary = _find_ordinary(documents)
    ends = np.flatnonzero(np.diff(ordinary)) + 1
    if len(ends) > len(documents) // FEW:  # most runs are short
        return [_read_singly(documents, wanted)]
    parts: list[RawRows] = []
    for start, stop in zip([0, *ends], [*ends, len(documents)], strict=True):
        some = documents.slice(start, stop - start)
        if ordinary[start]:
            schema = _infer_schema(some.slice(0, FEW), wanted)
            parts += _read_halves(some, schema, wanted)
        else:
            parts.append(_read_singly(some, wanted))
    return parts


def _find_ordinary(documents: pa.Array) -> NDArray[np.bool_]:
    try:
        text = documents.cast(pa.string())
    except pa.ArrowInvalid:
        return np.zeros(len(documents), bool)  # Python's reader identifies the documents that are not UTF-8
    pc = load_compute()
    good = pc.match_substring_regex(text, _ORDINARY)
    odd = pc.match_substring_regex(text, _ODD)
    return arrow.to_numpy(pc.and_(good, pc.invert(odd)))


def _infer_schema(documents: pa.Array, wanted: _Wanted) -> pa.Schema | None:
    """Return the types of the columns, inferred from documents; None if Arrow has no suitable type for a column."""
    rows = [parse_object(document)[0] for document in documents.to_pylist()]
    kinds: dict[str, pa.DataType] = {}
    for name in wanted.columns:
        if "." in name and not any(name in row for row in rows):
            return None  # the name is that of a nested member
        value = next((row[name] for row in rows if row.get(name) is not None), None)
        number, exact = isinstance(value, _Number), name in wanted.exact
        if (number or value is None) and not exact:
            kinds[name] = pa.float64()
        elif value is None or type(value) is str:
            kinds[name] = pa.string()
        elif number and value.lstrip("-").isdigit():
            kinds[name] = pa.int64()
        else:
            return None
    return pa.schema(list(kinds.items()))


def _read_halves(documents: pa.Array, schema: pa.Schema | None, wanted: _Wanted) -> list[RawRows]:
    if schema is not None:
        read = _read_by_arrow(documents, schema)
        if read is not None:
            return [read._replace(decimal=wanted.decimal)]
    if len(documents) <= FEW or schema is None:
        return [_read_singly(documents, wanted)]
    middle = len(documents) // 2
    first, second = documents.slice(0, middle), documents.slice(middle)
    return _read_halves(first, schema, wanted) + _read_halves(second, schema, wanted)


def _read_by_arrow(documents: pa.Array, schema: pa.Schema) -> RawRows | None:
    """Return the rows of ordinary documents; None if a document does not match the schema."""
    pc = load_compute()
    lines = pc.binary_join_element_wise(
        documents.cast(pa.large_binary()), *(pa.scalar(one, pa.large_binary()) for one in (b"", b"\n"))
    )
    data = pa.py_buffer(lines.buffers()[2])
    data = data.slice(0, int(np.frombuffer(lines.buffers()[1], np.int64)[lines.offset + len(lines)]))
    try:
        table = arrow_json.read_json(
            pa.BufferReader(data),
            read_options=arrow_json.ReadOptions(use_threads=False, block_size=max(data.size, 1 << 16)),
            parse_options=arrow_json.ParseOptions(
                explicit_schema=schema, newlines_in_values=False, unexpected_field_behavior="ignore"
            ),
        )
    except pa.ArrowException:
        return None
    if table.num_rows != len(documents):
        return None
    found = table.combine_chunks()
    columns = {name: found.column(name).combine_chunks() for name in schema.names}
    return RawRows(columns, len(documents))


def _read_singly(documents: pa.Array, wanted: _Wanted) -> RawRows:
    rows: list[Mapping[str, Any]] = []
    problems = np.full(len(documents), None, object)
    for place, document in enumerate(documents.to_pylist()):
        row, problem = parse_object(document)
        problems[place] = problem or _find_key_problem(row, wanted.keys)
        rows.append(row)
    columns = {
        name: arrow.build_texts(
            [
                _format_text(find_member(row, name), "." if name in wanted.exact else wanted.decimal)
                for row in rows
            ]
        )
        for name in wanted.columns
    }
    return RawRows(columns, len(rows), problems, wanted.decimal)


def parse_object(document: bytes) -> tuple[dict[str, Any], str | None]:
    """Return the members of a document, and the reason why the document is invalid, or None.

    Numbers keep their notation.
    """
    try:
        text = document.decode("utf-8-sig")
    except UnicodeDecodeError:
        return {}, NOT_UTF8
    try:
        value = json.loads(text, parse_float=_Number, parse_int=_Number, parse_constant=_Number)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # an error for half a surrogate pair
    except (ValueError, RecursionError):
        return {}, NOT_AN_OBJECT
    return (value, None) if isinstance(value, dict) else ({}, NOT_AN_OBJECT)


def find_member(row: Mapping[str, Any], name: str) -> Any:
    """Return a member of an object, or None.

    If the object has no member with a dotted name such as `main.temp`, the nested member is returned.
    """
    if name in row or "." not in name:
        return row.get(name)
    value: Any = row
    for one in name.split("."):
        value = value.get(one) if isinstance(value, dict) else None
    return value


def has_member(row: Mapping[str, Any], name: str) -> bool:
    """Return whether an object has a member, which may be null; `name` may be dotted, as for `find_member`."""
    above, _, last = name.rpartition(".")
    if name in row or not above:
        return name in row
    inner = find_member(row, above)
    return isinstance(inner, dict) and last in inner


def is_whole(value: Any) -> bool:
    """Return whether a member returned by `parse_object` is a whole number."""
    return isinstance(value, _Number) and value.lstrip("-").isdigit()


def is_number(value: Any) -> bool:
    """Return whether a member returned by `parse_object` is a number."""
    return isinstance(value, _Number)


def _find_key_problem(row: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    for name in keys:
        value = find_member(row, name)
        fraction = isinstance(value, _Number) and not value.lstrip("-").isdigit()
        if fraction or isinstance(value, dict | list):
            return f"key {name}: not text or a whole number"
    return None


def _format_text(value: Any, decimal: str) -> str | None:
    if isinstance(value, _Number):
        return value.replace(".", decimal)
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def is_json(path: str | Path) -> bool:
    """Return whether a file's ending is that of a JSON file."""
    return str(path).lower().endswith(FORMATS)


def spans_lines(path: Path) -> bool:
    """Return whether the objects of a file may span lines, so that the file cannot be cut at line ends."""
    with open_bytes(path) as file:
        beginning = file.read(BEGINNING)
        while not beginning.strip(BLANK_BYTES + BOM) and (block := file.read(BEGINNING)):
            beginning = block
    return values_span_lines(beginning)


def read_json_documents(path: Path, most: int | None = None, columns: Sequence[str] = ()) -> list[bytes]:
    """Return the documents of a file.

    Args:
        path: path of the file.
        most: maximum number of documents, from the beginning. None means all documents.
        columns: column names of a row, as for `read_part`.

    Raises:
        UserError: the file cannot be read, or is not JSON.
    """
    found: list[bytes] = []
    for some in read_part(FilePart(str(path), 0, None), columns):
        found += some.to_pylist()
        if most is not None and len(found) >= most:
            return found[:most]
    return found


def list_json_parts(path: Path, start: int = 0, stop: int | None = None, most: int = MOST) -> list[FilePart]:
    """Return the parts of a file's bytes from `start` to `stop`, in order, cut at line ends.

    A file whose objects span lines is one part.

    Args:
        path: path of the file.
        start: byte position of the first part.
        stop: byte position of the end. None means the end of the file.
        most: maximum bytes of memory to read a part.

    Raises:
        UserError: the file cannot be read.
    """
    with _report_unreadable(path):
        return (
            [FilePart(str(path), 0, None, most)]
            if spans_lines(path)
            else cut_line_parts(path, start, stop, most)
        )


def read_part(part: FilePart, columns: Sequence[str] = ()) -> Iterator[pa.Array]:
    """Yield the documents (binary) of a part of a file, in batches.

    Args:
        part: part of a file.
        columns: column names of a row, used to distinguish a single object that is a row from an envelope of rows.

    Raises:
        UserError: the file cannot be read, or is not JSON.
    """
    path = Path(part.path)
    with _report_unreadable(path):
        if not spans_lines(path):
            for lines in read_lines(part):
                yield _collect_documents(lines)
            return
        yield from limit_steps(_read_values(part, columns), path, part.most)


def _read_values(part: FilePart, columns: Sequence[str]) -> Iterator[pa.Array]:
    """Yield the rows of a file whose objects span lines, in batches."""
    some: list[bytes] = []
    size = 0
    with open_bytes(Path(part.path), part.most) as file:
        for text in read_row_texts(file, Path(part.path), columns):
            some.append(text.encode("utf-8", "surrogatepass"))
            size += len(text)
            if size > PIECE_BYTES or len(some) == MOST_ROWS:
                yield _collect_documents(some)
                some, size = [], 0
    yield _collect_documents(some)


def _collect_documents(lines: Iterable[bytes]) -> pa.Array:
    return pa.array([document for line in lines if (document := line.strip(BLANK_BYTES))], pa.binary())


@contextmanager
def _report_unreadable(path: Path) -> Iterator[None]:
    """Raise a UserError in place of an error for a file that cannot be read or is not JSON."""
    try:
        with report_unreadable(path):
            yield
    except RecursionError:
        raise UserError(f"{path}: is nested too deeply; write one flat object for each row") from None
    except ValueError as error:
        raise UserError(
            f"{path}: is not JSON ({error}); write one object on each line, or one array of them"
        ) from error


def infer_json_schema(path: Path, spec: ModelSpec) -> pa.Schema:
    """Return the schema of the spec's columns, inferred from the first documents of a file.

    Raises:
        UserError: the file cannot be read, is empty, or has a column of the spec in none of its first documents.
    """
    if spec.files.wide is not None:
        raise UserError(
            f"{path}: files.wide of the spec is for CSV, Parquet and ORC; write a row for each value, or convert it"
        )
    rows = [
        parse_object(document)[0]
        for document in read_json_documents(path, SCHEMA_DOCUMENTS, spec.file_columns)
    ]
    if not rows:
        raise UserError(f"{path}: is empty; give a file with an object on each line")
    have = {name: None for row in rows for name in row}
    have |= {
        name: None for name in spec.file_columns if any(find_member(row, name) is not None for row in rows)
    }
    if len(rows) == 1 and not set(spec.file_columns) & set(have) and spans_lines(path):
        raise UserError(
            f"{path}: is one object with the members {describe_members(rows[0])}, in which no rows were "
            f"found: write one "
            "object on each line, or one array of them"
        )
    check_columns(path, list(have), spec.file_columns)
    exact, kinds = spec.list_file_columns([*spec.naming_columns, spec.time]), {}
    for name in spec.file_columns:
        values = [value for row in rows if (value := find_member(row, name)) is not None]
        is_number = name in exact and bool(values) and all(map(is_whole, values))
        kinds[name] = pa.int64() if is_number else pa.string()
    return pa.schema(list(kinds.items()))


def parse_documents(spec: ModelSpec, values: pa.Array, path: str) -> RawRows:
    """Return the spec's columns of N documents (binary) of a file, unchecked; each row's payload is its document."""
    keys = spec.list_file_columns(name for name in spec.key if name != spec.key_from_name)
    exact = spec.list_file_columns([spec.time, *spec.id_columns])

    def payload(at: int) -> str:
        return add_key_to_document(spec, values[at].as_py().decode("utf-8", "backslashreplace"), path)

    found = read_objects(values, spec.file_columns, keys, exact, spec.files.decimal)
    return found._replace(payload=payload)
