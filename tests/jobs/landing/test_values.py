"""What a careful person reads from numbers, keys and missing values, however they are written."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.landing.checking import check_rows
from jobs.landing.raw_rows import Source
from jobs.landing.rejected import explained
from jobs.specs.model_spec import ModelSpec
from jobs.storage.quarantine import PAYLOAD, REASON


def spec(**changes: Any) -> ModelSpec:
    return ModelSpec.model_validate(
        {
            "name": "m",
            "version": 1,
            "key": ["k"],
            "time": "at",
            "measurement": ["v"],
            "states": ["x"],
            "process": {"kind": "random_walk"},
            "observation": {},
            "initial": {"diffuse": True},
            **changes,
        }
    )


def rows_of(k: pa.Array, v: pa.Array | None = None) -> Source:
    at = pa.array([0] * len(k), pa.timestamp("us", "UTC"))
    v = pa.array([1.0] * len(k)) if v is None else v
    return Source({"k": k, "at": at, "v": v}, np.zeros(len(k), bool), len(k))


def landed(key: Any, kind: pa.DataType | None = None) -> tuple[int | None, str | None]:
    """Return the key that lands in a table of whole numbers, and the reason if none does."""
    batch = check_rows(spec(), rows_of(pa.array([key], kind)), {"k": "bigint"}, "rows")
    reason = batch.column(REASON)[0].as_py()
    return (batch.column("k")[0].as_py() if reason is None else None), reason


@pytest.mark.parametrize(
    ("text", "key"),
    [
        # written as the number is
        ("0", 0),
        ("60", 60),
        ("-12", -12),
        ("9223372036854775807", 2**63 - 1),
        ("-9223372036854775808", -(2**63)),
        # another writing, which may name another system
        ("00060", None),
        ("007", None),
        ("-007", None),
        ("0x3C", None),
        ("+7", None),
        (" 7", None),
        ("7 ", None),
        ("7\t", None),
        ("\u00a07", None),
        ("-0", None),
        ("+0", None),
        ("00", None),
        ("7.0", None),
        ("7.", None),
        ("1e3", None),
        ("1_000", None),
        ("1,000", None),
        ("٧", None),
        ("７", None),
        ("\u22127", None),
        ("A7", None),
        ("9223372036854775808", None),
    ],
)
def test_a_text_is_a_whole_number_if_it_is_written_as_that_number(text: str, key: int | None) -> None:
    found, reason = landed(text)
    assert found == key
    assert reason == (None if key is not None else "key k: not a whole number")


@given(st.integers(-(2**63), 2**63 - 1))
@settings(max_examples=60, deadline=None)
def test_every_whole_number_lands_as_itself(number: int) -> None:
    assert landed(str(number)) == (number, None) == landed(number)


@given(
    st.integers(0, 10**12),
    st.sampled_from(
        ["0{}", "+{}", " {}", "{} ", "{}.0", "{}e0", "\u200b{}", "{}L", "0{}.0", "-0{}", "{:,}.", "#{}"]
    ),
)
@settings(max_examples=80, deadline=None)
def test_no_two_texts_become_one_key(number: int, writing: str) -> None:
    assert landed(writing.format(number))[0] is None


def test_stored_numbers_stay_keys_of_the_table() -> None:
    assert landed(60, pa.int16()) == (60, None)
    assert landed(60.0) == (60, None)
    assert landed(60.5) == (None, "key k: not a whole number")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("00060", "write 60 if"),
        ("+7", "write 7 if"),
        ("7.0", "write 7 if"),
        ("1e3", "write 1000 if"),
        ("A7", "write whole"),
    ],
)
def test_the_reason_shows_the_key_and_what_to_do(text: str, said: str) -> None:
    batch = check_rows(spec(), rows_of(pa.array([text])), {"k": "bigint"}, "rows")
    told = explained(spec(), batch.column(REASON)[0].as_py(), batch.column(PAYLOAD)[0].as_py())
    assert json.loads(batch.column(PAYLOAD)[0].as_py())["k"] == text
    assert f"such as {text!r}" in told and said in told and "give the model another name" in told


@pytest.mark.parametrize(
    ("text", "kept"), [("12", 12), ("0012", None), ("+12", None), (" 12", None), ("12.0", None)]
)
def test_ids_are_whole_numbers_by_the_same_rule(text: str, kept: int | None) -> None:
    with_id = spec(duplicates={"id": "no", "within": "1h"})
    rows = rows_of(pa.array([1]))
    rows.columns["no"] = pa.array([text])
    checked = check_rows(with_id, rows, {"k": "bigint", "no": "bigint"}, "rows")
    assert checked.column(REASON)[0].as_py() == (None if kept else "id no: not a whole number")
