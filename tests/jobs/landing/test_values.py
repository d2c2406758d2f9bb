"""What a careful person reads from numbers, keys and missing values, however they are written."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.core.errors import UserError
from jobs.landing.checking import check_rows, parse
from jobs.landing.json_rows import parse_documents
from jobs.landing.raw_rows import RawRows
from jobs.landing.rejected.replay import recheck_payloads
from jobs.landing.values.number_reading import find_writing
from jobs.landing.values.rejected import explain_reason
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


def rows_of(k: pa.Array, v: pa.Array | None = None) -> RawRows:
    at = pa.array([0] * len(k), pa.timestamp("us", "UTC"))
    v = pa.array([1.0] * len(k)) if v is None else v
    return RawRows({"k": k, "at": at, "v": v}, len(k))


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
    told = explain_reason(spec(), batch.column(REASON)[0].as_py(), batch.column(PAYLOAD)[0].as_py())
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


def number(v: pa.Array | str, **changes: Any) -> tuple[float | None, str | None]:
    """Return the number that is read from a value (None: missing), and the reason if none is."""
    column = pa.array([v]) if isinstance(v, str) else v
    source = rows_of(pa.array(["a"] * len(column)), column)
    model = spec(**changes)
    parsed = parse(model, source._replace(decimal=model.files.decimal), "rows")
    value = float(parsed.y[0, 0])
    return (None if math.isnan(value) else value), parsed.reason[0]


MISSING = {"missing_values": ["", "NA", "-999", "9.99e2", "1e20", "-99.9", "Off Line"]}


@pytest.mark.parametrize(
    "value",
    [
        *("-999", "-999.0", " -999 ", "-9.99e2", "-0999", "-999.", "999", "999.000", "+999", "1e20", "1E+20"),
        *("100000000000000000000", "-99.9", "-99.90", "-9.99e1", "off line", " OFF LINE ", "na", "\u2212999"),
        *(
            pa.array([-999], kind)
            for kind in (pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64())
        ),
        pa.array([999], pa.uint16()),
        pa.array([-99.9], pa.float32()),
        pa.array([-99.9], pa.float64()),
        pa.array([1e20], pa.float32()),
        pa.array([Decimal("-999.00")], pa.decimal128(9, 2)),
        pa.array([Decimal("-99.9")], pa.decimal128(5, 1)),
        pa.array([None], pa.float64()),
        pa.array(["-999.0"], pa.string()),
    ],
)
def test_a_number_that_means_missing_does_so_in_every_form(value: Any) -> None:
    assert number(value, **MISSING) == (None, None)


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("-999.1", -999.1),
        ("-99", -99.0),
        ("-9990", -9990.0),
        ("0.999", 0.999),
        (pa.array([-998]), -998.0),
        (pa.array([-99.8], pa.float32()), float(np.float32(-99.8))),
        (pa.array([Decimal("-999.01")], pa.decimal128(9, 2)), -999.01),
    ],
)
def test_other_numbers_are_measured(value: Any, read: float) -> None:
    assert number(value, **MISSING) == (read, None)


@given(
    st.decimals(-10_000, 10_000, places=2).map(lambda one: one.quantize(Decimal("0.01"))), st.integers(0, 4)
)
@settings(max_examples=60, deadline=None)
def test_a_mark_is_one_number_however_it_is_written(mark: Decimal, zeros: int) -> None:
    marked = {"missing_values": [str(mark)]}
    for text in (f"{mark}{'0' * zeros}", f"  {mark} ", f"{mark:E}", f"{float(mark):.17g}", repr(float(mark))):
        assert number(text, **marked) == (None, None), text
    assert number(pa.array([float(mark)]), **marked) == (None, None)
    assert number(pa.array([float(mark)], pa.float32()), **marked) == (None, None)
    assert number(pa.array([mark], pa.decimal128(9, 2)), **marked) == (None, None)
    assert number(pa.array([float(mark) + 0.01]), **marked)[0] is not None


@given(
    st.lists(st.sampled_from(["-999", "-999.0", " -999", "7", "7.5", "NA", "", "many", "1e400"]), min_size=1)
)
@settings(max_examples=30, deadline=None)
def test_long_columns_are_read_as_short_ones(texts: list[str]) -> None:
    many = 6_000 // len(texts) + 1
    model = spec(missing_values=["", "NA", "-999"])
    short = parse(model, rows_of(pa.array(["a"] * len(texts)), pa.array(texts)), "rows")
    long = parse(model, rows_of(pa.array(["a"] * many * len(texts)), pa.array(texts * many)), "rows")
    assert long.reason.tolist() == short.reason.tolist() * many
    good = np.array([one is None for one in long.reason])
    np.testing.assert_array_equal(long.y[0][good], np.tile(short.y[0], many)[good])


# How a column is written, the number that its first cell is, and the settings that read it.
WRITTEN: list[tuple[list[str], float, dict[str, Any]]] = [
    (["21.5", "22", "-3.25"], 21.5, {}),
    (["1120,5", "980", "-3,25"], 1120.5, {"decimal": ","}),
    (["0,123", "0,456"], 0.123, {"decimal": ","}),
    (["1,234.5", "12", "1,000,000"], 1234.5, {"thousands": ","}),
    (["1.234,5", "12,25", "1.000.000"], 1234.5, {"decimal": ",", "thousands": "."}),
    (["1 234,5", "12,25"], 1234.5, {"decimal": ",", "thousands": " "}),
    (["1\u00a0234,5", "12,25"], 1234.5, {"decimal": ",", "thousands": " "}),
    (["1\u202f234.5", "12"], 1234.5, {"thousands": " "}),
    (["1'234.5", "12.25"], 1234.5, {"thousands": "'"}),
    (["1\u2019234.5", "12.25"], 1234.5, {"thousands": "'"}),
    (["12,34,567.5", "1,23,456.25"], 1234567.5, {"thousands": ","}),
    (["21.5 \u00b0C", "-3 \u00b0C"], 21.5, {"units": {"v": "\u00b0C"}}),
    (["$5", "$1,200.50", "-$3"], 5.0, {"thousands": ",", "units": {"v": "$"}}),
    (["5 kWh", "12.5 kWh"], 5.0, {"units": {"v": "kWh"}}),
    (["5kWh", "12.5kWh"], 5.0, {"units": {"v": "kWh"}}),
    (
        ["1.234,50 \u20ac", "12,00 \u20ac"],
        1234.5,
        {"decimal": ",", "thousands": ".", "units": {"v": "\u20ac"}},
    ),
    (["CHF 1'200.50", "CHF 3"], 1200.5, {"thousands": "'", "units": {"v": "CHF"}}),
    (["45 %", "3.5 %", "100 %"], 45.0, {"units": {"v": "%"}}),
    (["45%", "3.5%"], 45.0, {"units": {"v": "%"}}),
    (["12 people", "3 people"], 12.0, {"units": {"v": "people"}}),
    (["7 W/m\u00b2", "12.5 W/m\u00b2"], 7.0, {"units": {"v": "W/m\u00b2"}}),
    (["1.5 m3/h", "2 m3/h"], 1.5, {"units": {"v": "m3/h"}}),
    (["(5.00)", "12.50"], -5.0, {"negative": "parentheses"}),
    (["($1,250.00)", "$12.50"], -1250.0, {"thousands": ",", "negative": "parentheses", "units": {"v": "$"}}),
    (["5.00-", "12.50"], -5.0, {"negative": "trailing"}),
    (["\u22125.5", "3"], -5.5, {}),
    (["true", "false"], 1.0, {"words": {"true": 1.0, "false": 0.0}}),
    (["ON", "off", "off"], 1.0, {"words": {"on": 1.0, "off": 0.0}}),
    (["yes", "no"], 1.0, {"words": {"yes": 1.0, "no": 0.0}}),
]


@pytest.mark.parametrize(("texts", "value", "settings_of_files"), WRITTEN)
def test_a_column_has_one_convention_that_is_found(
    texts: list[str], value: float, settings_of_files: dict[str, Any]
) -> None:
    found = find_writing({"v": pa.array([*texts, "", "n/a"])}, ["", "NA"])
    assert found.files.model_dump(exclude_defaults=True) == settings_of_files
    assert not found.refused and not found.notes
    files = found.files.model_dump()
    for text in texts:
        assert number(text, files=files)[1] is None, text
    assert number(texts[0], files=files) == (value, None)


@pytest.mark.parametrize(("texts", "value", "settings_of_files"), WRITTEN)
def test_a_spec_without_the_setting_names_it(
    texts: list[str], value: float, settings_of_files: dict[str, Any]
) -> None:
    said = ""
    for text in texts:
        reason = number(text)[1]
        said += (
            ""
            if reason is None
            else explain_reason(spec(), reason, json.dumps({"v": text}, ensure_ascii=False))
        )
    assert ("set files: {" in said) == (settings_of_files != {})
    for name in settings_of_files:
        assert f"{name}:" in said


@pytest.mark.parametrize(
    "texts",
    [
        ["h0", "h1", "h2"],
        ["12a", "12b", "13a"],
        ["ABC123", "ABC124"],
        ["01.02.2024", "02.02.2024"],
        ["2024-01-01", "2024-01-02"],
        ["12:30", "12:45"],
        ["10.0.0.1", "10.0.0.2"],
        ["5,-", "7,-"],
        ["1,2,3", "4,5,6"],
        ["48.2, 16.4", "48.3, 16.5"],
    ],
)
def test_other_texts_are_no_numbers(texts: list[str]) -> None:
    found = find_writing({"v": pa.array(texts)}, [""])
    assert found.files.model_dump(exclude_defaults=True) == {}


@pytest.mark.parametrize(
    ("texts", "separator", "said"),
    [
        (["1,234", "2,345"], ",", 'read as 1234; if it is 1.234, set files: {decimal: ","}'),
        (["1,234", "2,345"], ";", 'read as 1.234; if it is 1234, set files: {decimal: ".", thousands: ","}'),
        (["1.234", "2.345"], ";", 'read as 1.234; if it is 1234, set files: {decimal: ",", thousands: "."}'),
        (["5,678", "950", "17,001"], "\t", 'read as 5678; if it is 5.678, set files: {decimal: ","}'),
    ],
)
def test_of_two_readings_the_taken_one_and_the_other_are_said(
    texts: list[str], separator: str, said: str
) -> None:
    found = find_writing({"v": pa.array(texts)}, [""], separator)
    assert said in found.notes["v"]


def test_another_column_tells_which_reading_is_right() -> None:
    found = find_writing({"a": pa.array(["1,234", "2,345"]), "b": pa.array(["0,5", "12,25"])}, [""])
    assert (found.files.decimal, found.files.thousands, found.notes) == (",", None, {})
    found = find_writing({"a": pa.array(["1,234", "2,345"]), "b": pa.array(["0.5", "12.25"])}, [""])
    assert (found.files.decimal, found.files.thousands, found.notes) == (".", ",", {})


@pytest.mark.parametrize("texts", [["5 kWh", "6 MWh"], ["$5", "\u20ac6"], ["3 m", "4 ft", "5 m"]])
def test_several_units_in_a_column_are_refused(texts: list[str]) -> None:
    found = find_writing({"v": pa.array(texts)}, [""])
    assert "several units" in found.refused["v"] and not found.files.units
    told = explain_reason(
        spec(files={"units": {"v": "K"}}), "measurement v: not a number", json.dumps({"v": "5 F"})
    )
    assert "another unit" in told


def written_as(value: int, fraction: int, decimal: str, thousands: str, unit: str) -> str:
    whole = f"{value:,}".replace(",", thousands)
    return f"{whole}{decimal}{fraction:02}{unit}"


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 99)), min_size=3, max_size=30),
    st.sampled_from(
        [(".", ","), (",", "."), (",", " "), (".", " "), (".", "'"), (",", "\u00a0"), (",", "\u202f")]
    ),
    st.sampled_from(["", " \u00b0C", "%", " kW", " \u20ac", "hPa", " km/h"]),
)
@settings(max_examples=80, deadline=None)
def test_whatever_a_program_writes_is_read_back(
    numbers: list[tuple[int, int]], marks: tuple[str, str], unit: str
) -> None:
    texts = [written_as(value, fraction, *marks, unit) for value, fraction in numbers]
    found = find_writing({"v": pa.array(texts)}, [""])
    for text, (value, fraction) in zip(texts, numbers, strict=True):
        assert number(text, files=found.files.model_dump()) == (float(f"{value}.{fraction:02}"), None)


def test_stored_truth_values_are_numbers_where_the_spec_says_so() -> None:
    stored = pa.array([True, False, None])
    with pytest.raises(UserError, match='set files: {words: {"true": 1, "false": 0}} in the spec'):
        number(stored)
    assert number(stored, files={"words": {"true": 1, "false": 0}}) == (1.0, None)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"thousands": "."}, "also what precedes the fraction"),
        ({"units": {"v": "5"}}, "is no unit of v"),
        ({"units": {"v": " "}}, "is no unit of v"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(files: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        spec(files=files)


@pytest.mark.parametrize(
    ("files", "member", "value"),
    [
        ({"units": {"v": "\u00b0C"}}, "21.5 \u00b0C", 21.5),
        ({"thousands": ","}, "1,234.5", 1234.5),
        ({"decimal": ",", "thousands": "."}, 1234.5, 1234.5),
        ({"words": {"on": 1, "off": 0}}, "OFF", 0.0),
        ({"words": {"true": 1, "false": 0}}, True, 1.0),
        ({"negative": "parentheses"}, "(3)", -3.0),
    ],
)
def test_json_and_replayed_rows_are_read_by_the_same_rules(
    files: dict[str, Any], member: Any, value: float
) -> None:
    model = spec(files=files)
    document = json.dumps({"k": "a", "at": "2024-01-01T00:00:00Z", "v": member})
    checked = check_rows(
        model, parse_documents(model, pa.array([document.encode()]), "rows"), {"k": "string"}, "rows"
    )
    assert (checked.column(REASON)[0].as_py(), checked.column("v")[0].as_py()) == (None, value)
    again = recheck_payloads(model, {"k": "string"}, [document])
    assert again.reasons == [None] and json.loads(again.landings[0] or "")["v"] == value


@pytest.mark.parametrize("member", [-999, -999.0, "-999", "-9.99E2", " -999.00 "])
def test_json_and_replayed_rows_may_be_missing(member: Any) -> None:
    model = spec(**MISSING)
    document = json.dumps({"k": "a", "at": "2024-01-01T00:00:00Z", "v": member})
    checked = check_rows(
        model, parse_documents(model, pa.array([document.encode()]), "rows"), {"k": "string"}, "rows"
    )
    assert (checked.column(REASON)[0].as_py(), checked.column("v")[0].as_py()) == (None, None)
    again = recheck_payloads(model, {"k": "string"}, [document])
    assert again.reasons == [None] and "v" not in json.loads(again.landings[0] or "")
