"""Columns of bytes in Parquet, which some writers use for text: read as text, and bytes that are none reject a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.core.errors import UserError
from jobs.landing.checking import check_rows
from jobs.landing.csv_parquet import read, read_schema
from jobs.landing.values.keys import derive_key_types
from jobs.specs.model_spec import ModelSpec
from jobs.storage.quarantine import PAYLOAD, REASON
from tests.jobs.support.pipeline import random_walk_spec

NOT_TEXT = "row: not UTF-8 text"
BYTES = [pa.binary(), pa.large_binary(), pa.binary_view()]


def checked(path: Path, **columns: pa.Array) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the reasons, keys and payloads of three rows in a file with these columns."""
    sound = {
        "id": pa.array(["k", "l", "m"]),
        "at": pa.array(["2024-03-01T00:00:00Z"] * 3),
        "a": pa.array([1.0, 2.0, 3.0]),
        "b": pa.array([1.0, 2.0, 3.0]),
    }
    pq.write_table(pa.table({**sound, **columns}), path)
    spec = ModelSpec.model_validate(random_walk_spec())
    types = derive_key_types(spec.key, read_schema(path, list(spec.columns)))
    assert types == {"id": "string"}
    rows = check_rows(spec, read(path), types, "rows")
    payloads = [None if one is None else json.loads(one) for one in rows.column(PAYLOAD).to_pylist()]
    return rows.column(REASON).to_pylist(), rows.column("id").to_pylist(), payloads


@pytest.mark.parametrize("kind", BYTES, ids=str)
def test_keys_of_bytes_are_texts_and_bytes_that_are_none_reject_their_row_alone(
    tmp_path: Path, kind: pa.DataType
) -> None:
    keys = pa.array([b"a", b"\xff\xfe", "Zürich".encode()], kind)
    reasons, found, payloads = checked(tmp_path / "t.parquet", id=keys)
    assert reasons == [None, NOT_TEXT, None]
    assert (found[0], found[2]) == ("a", "Zürich")
    assert payloads[1]["id"] == "\\xff\\xfe"  # kept, so that it can be mended


@pytest.mark.parametrize("kind", BYTES, ids=str)
def test_an_empty_or_missing_key_of_bytes_is_a_missing_key(tmp_path: Path, kind: pa.DataType) -> None:
    reasons, found, _ = checked(tmp_path / "t.parquet", id=pa.array([b"", None, b"m"], kind))
    assert reasons == ["key id: missing", "key id: missing", None] and found[2] == "m"


def test_times_and_numbers_of_bytes_are_read_as_those_of_text(tmp_path: Path) -> None:
    times = pa.array([b"2024-03-01T00:00:00Z", b"never", b"2024-03-01T00:00:02Z"], pa.binary())
    numbers = pa.array([b"1.5", b"2", b"\x00\xff"], pa.binary())
    reasons, _, _ = checked(tmp_path / "t.parquet", at=times, a=numbers)
    assert reasons == [None, "time at: not a time", NOT_TEXT]


IDENTIFIERS = pa.array([b"0" * 16] * 3, pa.binary(16))


@pytest.mark.parametrize(
    "keys",
    [IDENTIFIERS, pa.ExtensionArray.from_storage(pa.uuid(), IDENTIFIERS)],
    ids=["16 bytes", "uuid"],
)
def test_keys_of_fixed_bytes_are_refused_in_a_sentence(tmp_path: Path, keys: pa.Array) -> None:
    """They are identifiers in binary: what text they have is the writer's to say."""
    with pytest.raises(UserError, match=r"rows: key column 'id' holds .*; a key is text, a number or a date"):
        checked(tmp_path / "t.parquet", id=keys)
