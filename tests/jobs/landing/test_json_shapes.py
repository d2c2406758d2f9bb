"""JSON files whose rows are not one object a line give the rows that a person reads, or say what was seen. No Spark."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.core.errors import UserError
from jobs.landing import json_values
from jobs.landing.checking import check_rows
from jobs.landing.json_rows import (
    infer_json_schema,
    list_json_parts,
    parse_documents,
    read_json_documents,
    read_part,
    spans_lines,
)
from jobs.specs.model_spec import ModelSpec
from jobs.storage.quarantine import REASON
from tests.jobs.support.pipeline import random_walk_spec

ROWS: list[dict[str, Any]] = [
    {"id": "a", "at": f"2024-01-0{n}T00:00:00Z", "a": n + 0.5, "b": n} for n in range(1, 4)
]
NAMES = list(ROWS[0])
CELLS = [list(row.values()) for row in ROWS]
COLUMNS = {name: [row[name] for row in ROWS] for name in NAMES}
DEEP = [{"id": row["id"], "at": row["at"], "main": {"a": row["a"]}, "b": row["b"]} for row in ROWS]


def text(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent)


# name: content, and whether it can be cut where lines end
SHAPES = {
    "lines": ("\n".join(map(text, ROWS)), False),
    "lines with blanks": ("\r\n\n".join(map(text, ROWS)) + "\n\n", False),
    "pretty objects": ("\n".join(text(row, 2) for row in ROWS), True),
    "pretty objects with a mark": ("\ufeff" + "\n\n".join(text(row, 2) for row in ROWS), True),
    "glued": ("".join(map(text, ROWS)), True),
    "glued with blanks": (" ".join(map(text, ROWS)), True),
    "glued pretty": ("".join(text(row, 1) for row in ROWS), True),
    "with commas": (",\n".join(text(row, 1) for row in ROWS), True),
    "lines that end with commas": (",\n".join(map(text, ROWS)), True),
    "an array": (text(ROWS), True),
    "a pretty array": (text(ROWS, 4) + "\n", True),
    "an array a row a line": ("[\n" + ",\n".join(map(text, ROWS)) + "\n]\n", True),
    "an envelope": (text({"data": ROWS}), True),
    "a pretty envelope": (text({"status": "ok", "count": 3, "results": ROWS}, 2), True),
    "an envelope in another": (
        text({"meta": {"code": 200, "tags": ["x"]}, "body": {"items": ROWS}}, 2),
        True,
    ),
    "split of pandas": (text({"columns": NAMES, "index": [0, 1, 2], "data": CELLS}), True),
    "series of InfluxDB": (
        text(
            {"results": [{"statement_id": 0, "series": [{"name": "m", "columns": NAMES, "values": CELLS}]}]}
        ),
        True,
    ),
    "arrays below their names": (text([NAMES, *CELLS], 1), True),
    "parallel arrays": (text(COLUMNS), True),
    "parallel arrays of Open-Meteo": (
        text({"latitude": 48.2, "hourly_units": {"at": "iso8601", "a": "C"}, "hourly": COLUMNS}, 2),
        True,
    ),
}


def spec(**changes: Any) -> ModelSpec:
    return ModelSpec.model_validate(random_walk_spec(**changes))


def written(path: Path, content: str) -> Path:
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())
    return path


def rows_of(path: Path, wanted: ModelSpec) -> list[tuple[Any, ...]]:
    """Return key, time and numbers as `ingest` reads them."""
    found: list[tuple[Any, ...]] = []
    for part in list_json_parts(path):
        for some in read_part(part, wanted.file_columns):
            batch = check_rows(wanted, parse_documents(wanted, some, str(path)), {"id": "string"}, str(path))
            assert batch.column(REASON).null_count == batch.num_rows
            found += zip(*(batch.column(name).to_pylist() for name in ("id", "a", "b")), strict=True)
    return found


@pytest.mark.parametrize("ending", ["json", "json.gz"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_file_of_any_shape_gives_its_rows(tmp_path: Path, name: str, ending: str) -> None:
    content, spans = SHAPES[name]
    path = written(tmp_path / f"rows.{ending}", content)
    assert spans_lines(path) is spans
    expected = [(row["id"], row["a"], row["b"]) for row in ROWS]
    assert rows_of(path, spec()) == expected
    assert set(spec().columns) <= set(infer_json_schema(path, spec()).names)
    assert [json.loads(one) for one in read_json_documents(path)] == ROWS
    assert [json.loads(one) for one in read_json_documents(path, 2)] == ROWS[:2]


AT = [row["at"] for row in ROWS]
COUNTS = [1704067200 + 86400 * n for n in range(3)]
SERIES = [
    ({at: n + 0.5 for n, at in enumerate(AT)}, [{"time": at, "value": n + 0.5} for n, at in enumerate(AT)]),
    (
        {
            "Meta Data": {"symbol": "IBM"},
            "Daily": {at: {"open": n, "close": n + 1} for n, at in enumerate(AT)},
        },
        [{"time": at, "open": n, "close": n + 1} for n, at in enumerate(AT)],
    ),
    (
        {"a": {f"{n}000": n for n in COUNTS}, "b": {f"{n}000": 2 * n for n in COUNTS}},
        [{"time": f"{n}000", "a": n, "b": 2 * n} for n in COUNTS],
    ),
    (
        {"at": {str(n): at for n, at in enumerate(AT)}, "a": {str(n): n / 4 for n in range(3)}},
        [{"at": at, "a": n / 4} for n, at in enumerate(AT)],
    ),
    ({str(n): row for n, row in enumerate(ROWS)}, ROWS),
    (
        {
            "data": {
                "result": [{"metric": {"job": one}, "values": [[n, "1.5"] for n in COUNTS]} for one in "xy"]
            }
        },
        [{"metric": {"job": one}, "time": n, "value": "1.5"} for one in "xy" for n in COUNTS],
    ),
    (
        [{"target": one, "datapoints": [[n / 7, n] for n in COUNTS]} for one in "xy"],
        [{"target": one, "value": n / 7, "time": n} for one in "xy" for n in COUNTS],
    ),
]
"""Tables and series as pandas, Alpha Vantage, Prometheus and Graphite write them, and their rows."""


@pytest.mark.parametrize(("content", "rows"), SERIES)
@pytest.mark.parametrize("indent", [None, 2])
def test_members_named_after_times_and_pairs_of_time_and_value_are_rows(
    tmp_path: Path, content: Any, rows: list[dict[str, Any]], indent: int | None
) -> None:
    path = written(tmp_path / "a.json", text(content, indent))
    assert spans_lines(path)
    assert [json.loads(one) for one in read_json_documents(path)] == rows


@pytest.mark.parametrize(
    "content",
    [
        {"2024-01-01": 1, "2024-01-02": 2},  # two members are a row of a wide table
        {"meta": {"a": 1}, "x": {at: 1 for at in AT}, "y": {at: 2 for at in AT}},  # which of the two?
        {"x": {at: 1 for at in AT}, "y": {at: 2 for at in AT[:2]}},  # times of their own
    ],
)
def test_members_that_do_not_tell_rows_stay_one(tmp_path: Path, content: Any) -> None:
    path = written(tmp_path / "a.json", text(content, 1))
    assert [json.loads(one) for one in read_json_documents(path)] == [content]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"id": st.text(max_size=6), "a": st.floats(allow_nan=False), "t": st.lists(st.none())}
        ),
        min_size=2,
        max_size=6,
    ),
    st.sampled_from([None, 1, 4]),
    st.sampled_from(["", "\n", " ", "\r\n\r\n"]),
    st.sampled_from(["{}", "[{}]"]),
    st.integers(1, 50),
)
def test_values_over_blocks_of_any_size_are_those_of_the_file(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Any],
    indent: int | None,
    between: str,
    form: str,
    size: int,
) -> None:
    joint = between if form == "{}" else f",{between}"
    content = form.replace(
        "{}", joint.join(json.dumps(row, indent=indent, ensure_ascii=False) for row in rows)
    )
    path = written(tmp_path_factory.mktemp("json") / "rows.json", content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_values, "BLOCK", size)
        assert [json.loads(one) for one in read_json_documents(path)] == rows


def test_numbers_keep_their_spelling(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.json", '[{"id": 1.10, "a": 9007199254740993}, {"id": 2, "a": 1e2}]')
    assert read_json_documents(path) == [b'{"id": 1.10, "a": 9007199254740993}', b'{"id": 2, "a": 1e2}']


@pytest.mark.parametrize("names", [("main.a", "b"), ("main.a", "main.c")])
def test_a_member_of_a_member_is_named_with_a_dot(tmp_path: Path, names: tuple[str, str]) -> None:
    rows = [{**row, "main": {**row["main"], "c": row["b"]}} for row in DEEP]
    path = written(tmp_path / "rows.jsonl", "\n".join(map(text, rows)))
    wanted = spec().model_copy(update={"measurement": list(names)})
    assert set(names) <= set(infer_json_schema(path, wanted).names)
    for part in list_json_parts(path):
        for some in read_part(part):
            batch = check_rows(wanted, parse_documents(wanted, some, str(path)), {"id": "string"}, str(path))
            assert batch.column(names[0]).to_pylist() == [row["a"] for row in ROWS]
            assert batch.column(names[1]).to_pylist() == [row["b"] for row in ROWS]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"status": "error", "message": "no such station", "code": 404, "x": []}, "no rows were found"),
        (
            {"first": ROWS, "second": ROWS},
            "is one object with the members first .an array., second .an array.",
        ),
        ({"a1": {"0": 1.0, "1": 2.0}, "b1": {"0": 1, "1": 2}}, "a1 .an object., b1 .an object."),
        ([[1, 2], [3, 4]], "its rows are arrays without names"),
        ([NAMES, CELLS[0], [1]], "a row is no array of 4 values"),
    ],
)
def test_rows_that_are_not_found_are_refused_by_what_was_seen(
    tmp_path: Path, content: Any, said: str
) -> None:
    path = written(tmp_path / "rows.json", text(content, 1))
    with pytest.raises(UserError, match=said):
        infer_json_schema(path, spec())


@pytest.mark.parametrize(
    "content", ["[{}", '[{"a":1} {"a":2}]', '[{"a":1}]x', '{\n"a":1}\n}', '{"a":1}{"a"', "[1,]"]
)
def test_a_file_that_is_not_json_says_so(tmp_path: Path, content: str) -> None:
    with pytest.raises(UserError, match="is not JSON"):
        read_json_documents(written(tmp_path / "rows.json", content))


def test_a_damaged_line_stays_one_line(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", "{oops\n" + "\n".join(map(text, ROWS)))
    assert not spans_lines(path) and len(read_json_documents(path)) == 4


def test_a_value_that_does_not_end_is_told_before_all_of_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_values, "LONGEST_VALUE", 10_000)
    monkeypatch.setattr(json_values, "BLOCK", 1_000)
    path = written(tmp_path / "rows.json.gz", '[{"a": "' + "x" * 20_000_000)
    with pytest.raises(UserError, match="has a value of more than 10,000 characters"):
        read_json_documents(path)
    with pytest.raises(UserError, match="nested too deeply"):
        read_json_documents(written(tmp_path / "deep.json", "[" * 100_000))


ROW = '{"at": "2025-03-03T00:00:00Z", "temp": 20.5, "note": "ä"}'
CUT = "the file was cut off while it was written: copy it again"
MEND = "mend it at that place"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (f"[\n{ROW},\n{ROW},\n]\n", f"line 4, character 1: a comma stands after the last element; {MEND}$"),
        (f"[{ROW}, {ROW} ,]", f"line 1, character {2 * len(ROW) + 6}: a comma stands after the last element"),
        (f"[{ROW},\n,{ROW}]", "line 2, character 1: two commas follow each other"),
        (f"{ROW}{ROW},\n", "line 2, character 1: a comma stands after the last value"),
        (f"[{ROW}\n{ROW}]", f"line 2, character 1: a comma is missing before element 2; {MEND}$"),
        (f"[{ROW}]\n{ROW}", "line 2, character 1: there is more after the end of the array; write one"),
        (
            f'[\n{ROW},\n{{"at": 1,\n "temp" 2}}\n]',
            f"line 4, character 9: in element 2: expecting ':' delimiter; {MEND}$",
        ),
        ('{\n "at": 1,\n "temp": 2,\n}\n', "line [34], character [0-9]+: in value 1: "),
        ('{\n "at": 1,\n "temp": 2\n}\n{\n "at', f"line 6, character 5: the file ends within value 2; {CUT}"),
        ("[", f"line 1, character 2: the array is empty and has no \\]; {CUT}"),
        ("[\n", f"line 2, character 1: the array is empty and has no \\]; {CUT}"),
        (f"[{ROW},\n{ROW}\n", f"line 3, character 1: the array ends after element 2, without a \\]; {CUT}"),
        (f'[{ROW},\n{{"at": "2025', f"line 2, character 13: the array ends within element 2; {CUT}"),
    ],
)
def test_a_fault_in_json_is_named_with_its_line_and_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, said: str
) -> None:
    path = written(tmp_path / "rows.json", content)
    for size in (1 << 20, 7):
        monkeypatch.setattr(json_values, "BLOCK", size)
        with pytest.raises(UserError, match=f"is not JSON: {said}"):
            read_json_documents(path)


def test_a_json_file_that_is_not_utf8_is_refused_with_its_conversion(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(f"[{ROW},\n{ROW}]".encode("cp1252"))
    with pytest.raises(
        UserError, match="the text is not UTF-8; .*`iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW`$"
    ):
        read_json_documents(path)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "at": st.text(max_size=4),
                "v": st.floats() | st.integers() | st.booleans() | st.none() | st.just([]),
            }
        ),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([None, 1]),
    st.booleans(),
    st.integers(1, 50),
    st.integers(0, 1 << 16),
)
def test_an_array_cut_at_any_byte_is_said_to_be_cut_within_or_after_its_last_element(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Any],
    indent: int | None,
    is_ascii: bool,
    size: int,
    place: int,
) -> None:
    texts = [json.dumps(row, indent=indent, ensure_ascii=is_ascii).encode() for row in rows]
    whole = b"[" + b", ".join(texts) + b"]"
    ends = [1 + sum(map(len, texts[: n + 1])) + 2 * n for n in range(len(texts))]
    stop = 1 + place % (len(whole) - 1)
    after = sum(end <= stop for end in ends)
    is_within = after < len(texts) and stop > ends[after] - len(texts[after])
    path = tmp_path_factory.mktemp("cut") / "rows.json"
    path.write_bytes(whole[:stop])
    ending = f"ends after element {after}, without" if after else "is empty and has no"
    said = f"ends within element {after + 1};" if is_within else ending
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_values, "BLOCK", size)
        with pytest.raises(UserError, match=f"the array {said}.* {CUT}"):
            read_json_documents(path)
