"""Read files of JSON objects for `ingest`: one object a line, or one array of objects.

What a cell may hold are the rules of messages (`jobs.json_rows`) and of files (`jobs.rows`).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from jobs import arrays
from jobs.checked_rows import PAYLOAD, REASON, KeyTypes, check_rows, typed_columns
from jobs.errors import UserError
from jobs.json_rows import is_whole, object_of, read_objects
from jobs.row_files import Source, check_columns
from jobs.spec import ModelSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FORMATS = (".json", ".jsonl", ".ndjson", ".json.gz", ".jsonl.gz", ".ndjson.gz")
LOOK = 1000
"""Documents at a file's beginning of which one must have each of the spec's columns."""
_BLANK = b" \t\r\n"


def is_json(path: str | Path) -> bool:
    """Tell by its ending if a file is one of JSON objects."""
    return str(path).lower().endswith(FORMATS)


def is_array(path: Path) -> bool:
    """Tell if a file is one array, which cannot be cut into lines."""
    with _open(path) as file:
        while one := file.read(1):
            if one not in _BLANK + b"\xef\xbb\xbf":
                return one == b"["
    return False


def documents(path: Path, most: int | None = None) -> list[bytes]:
    """Return the documents of a file, or the first of them.

    Raises:
        UserError: the file cannot be read, or is an array and no JSON.
    """
    try:
        if is_array(path):
            with _open(path) as file:
                items = json.loads(file.read().decode("utf-8-sig"))
            return [json.dumps(item, ensure_ascii=False).encode() for item in items[:most]]
        found: list[bytes] = []
        with _open(path) as file:
            for line in file:
                document = line.strip(_BLANK) if found else line.removeprefix(b"\xef\xbb\xbf").strip(_BLANK)
                if document:
                    found.append(document)
                if most is not None and len(found) == most:
                    break
        return found
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    except (OSError, EOFError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error})") from error


def json_schema(path: Path, spec: ModelSpec) -> pa.Schema:
    """Return the spec's columns with the types that a file's first documents have.

    Raises:
        UserError: the file cannot be read, is empty, or none of its first documents has one of the columns.
    """
    rows = [object_of(document)[0] for document in documents(path, LOOK)]
    if not rows:
        raise UserError(f"{path}: is empty")
    check_columns(path, list({name: None for row in rows for name in row}), spec.columns)
    kinds = {}
    for name in spec.columns:
        values = [row[name] for row in rows if row.get(name) is not None]
        whole = bool(values) and all(map(is_whole, values))
        number = whole and name in (*spec.naming_columns, spec.time)
        kinds[name] = pa.int64() if number else pa.string()
    return pa.schema(list(kinds.items()))


def check_documents(spec: ModelSpec, values: pa.Array, key_types: KeyTypes, file: str) -> pa.RecordBatch:
    """Return of N documents (binary) what `check_rows` returns; the payload of a rejected one is its text."""
    columns, problems = read_objects(values, spec.columns, spec.key, [spec.time, *spec.id_columns])
    rows = check_rows(spec, Source(columns, np.zeros(len(values), bool), len(values)), key_types, file)
    reasons = rows.column(REASON).to_pylist()
    told = [problem or reason for problem, reason in zip(problems, reasons, strict=True)]
    if not any(told):
        return rows
    texts = [
        None if reason is None else values[at].as_py().decode("utf-8", "backslashreplace")
        for at, reason in enumerate(told)
    ]
    changed = {REASON: pa.array(told, pa.string()), PAYLOAD: pa.array(texts, pa.string())}
    names = rows.schema.names
    return pa.RecordBatch.from_arrays([changed.get(name, rows.column(name)) for name in names], names)


def read_checked(spec: ModelSpec, path: str, key_types: KeyTypes) -> pa.RecordBatch:
    """Read a file in this process and return its checked rows."""
    return check_documents(spec, pa.array(documents(Path(path)), pa.binary()), key_types, path)


def json_frame(spark: SparkSession, spec: ModelSpec, path: str, key_types: KeyTypes) -> DataFrame:
    """Let Spark's workers read a file of one object a line, and return its checked rows."""
    schema = f"{REASON} string, {PAYLOAD} string, {typed_columns(spec, key_types)}"
    return spark.read.text(path).mapInArrow(_checker(spec, key_types, path), schema)


def _checker(
    spec: ModelSpec, key_types: KeyTypes, file: str
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def check(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        pc = arrays.compute()
        for batch in batches:
            lines = pc.utf8_trim(batch.column("value").cast(pa.string()), " \t\r\ufeff")
            lines = lines.filter(pc.greater(pc.binary_length(lines), 0))
            if len(lines):
                yield check_documents(spec, lines.cast(pa.binary()), key_types, file)

    return check


def _open(path: Path) -> gzip.GzipFile:
    return gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb")  # type: ignore[return-value]
