"""What some rows lack is a missing measurement: counted, and said once with the cause where a file shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs import filter, ingest
from jobs.core.settings import Settings
from jobs.landing.remarks import format_absent_notes
from tests.jobs.landing.test_values import spec

SPEC = """name: m
version: 1
key: [k]
time: at
measurement: [value]
states: [level]
process: {kind: random_walk, variance: 0.5}
observation: {R: [[1.0]]}
initial: {diffuse: true}
"""


def settings_in(folder: Path) -> Settings:
    (folder / "models").mkdir(exist_ok=True)
    (folder / "models" / "m.yaml").write_text(SPEC)
    return Settings.load(str(folder / "warehouse"), str(folder / "models"), None, quiet=True)


def documents(path: Path, members: list[dict[str, Any]]) -> Path:
    rows = [
        {"k": "a", "at": f"2024-01-01T{n // 60:02}:{n % 60:02}:00Z", **one} for n, one in enumerate(members)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("members", "said"),
    [
        (
            [{"value": 1.0}] * 150 + [{"Value": 2.0}] * 50,
            "value is missing in 50 of 200 rows: member 'value' is absent in 50 of the first 200 rows of r.jsonl; 50 "
            "of these have 'Value': give both one name",
        ),
        (
            [{"value": 1.0}, {}, {"value": 3.0}],
            "value is missing in 1 of 3 rows: member 'value' is absent in 1 of the first 3 rows of r.jsonl",
        ),
        ([{"value": 1.0}, {"va_lue": 3.0}], "1 of these have 'va_lue': give both one name"),
        ([{"value": 1.0}, {"value": None}], "value is missing in 1 of 2 rows"),
        ([{"value": 1.0}, {"value": "NA"}, {"value": ""}], "value is missing in 2 of 3 rows"),
    ],
)
def test_ingest_says_what_json_rows_lack(tmp_path: Path, members: list[dict[str, Any]], said: str) -> None:
    path = documents(tmp_path / "r.jsonl", members)
    done = ingest.run(settings_in(tmp_path), "m", [str(path)])
    (note,) = (line for line in done.lines if " is missing in " in line)
    assert said in note and ("absent" in said or "absent" not in note or "va_lue" in said)
    assert done.data["absent"] == {"value": sum(not isinstance(one.get("value"), float) for one in members)}
    assert done.data["rows"] == len(members)


@pytest.mark.parametrize("lacking", [{}, {"data": None}, {"data": {}}, {"data": {"hum": 4.0}}])
def test_a_member_of_a_member_is_absent_only_where_it_is(tmp_path: Path, lacking: dict[str, Any]) -> None:
    path = documents(
        tmp_path / "r.jsonl", [{"data": {"temp": 1.0}}] * 9 + [lacking] + [{"data": {"temp": None}}]
    )
    model = spec(key=["k"], measurement=["data.temp"])
    (note,) = format_absent_notes(model, {model.measurement[0]: 2}, 11, [path])
    assert note.endswith("member 'data.temp' is absent in 1 of the first 11 rows of r.jsonl")


def test_nothing_is_said_where_nothing_is_missing(tmp_path: Path) -> None:
    path = documents(tmp_path / "r.jsonl", [{"value": 1.0}, {"value": 2.0}])
    done = ingest.run(settings_in(tmp_path), "m", [str(path)])
    assert done.data["absent"] == {} and not any("missing" in line for line in done.lines)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_filter_says_what_rows_lack_and_a_column_of_nearly_its_name(tmp_path: Path, ending: str) -> None:
    at = pd.date_range("2024-01-01", periods=4, freq="1h")
    frame = pd.DataFrame(
        {"k": "a", "at": at, "value": [1.0, None, 2.0, None], "Value": [None, 1.5, None, 2.5]}
    )
    path = tmp_path / f"rows.{ending}"
    frame.to_csv(path, index=False) if ending == "csv" else frame.to_parquet(path)
    done = filter.run(settings_in(tmp_path), "m", str(path), str(tmp_path / "out.csv"))
    (note,) = (line for line in done.lines if " is missing in " in line)
    assert note == (
        f"note: value is missing in 2 of 4 rows: {path.name} has the column 'Value' too; give both one name"
    )


@given(st.lists(st.sampled_from(["v", "V", "none"]), min_size=1, max_size=40))
@settings(max_examples=25, deadline=None)
def test_the_counts_are_those_of_the_rows(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> None:
    members = [{} if name == "none" else {name: 1.0} for name in names]
    path = documents(tmp_path_factory.mktemp("absent") / "r.jsonl", members)
    lacking = sum(name != "v" for name in names)
    notes = format_absent_notes(spec(), {"v": lacking}, len(names), [path])
    assert len(notes) == (lacking > 0)
    if lacking:
        assert f"v is missing in {lacking:,} of " in notes[0]
        assert f"absent in {lacking} of the first {len(names)} rows" in notes[0]
        assert ("'V'" in notes[0]) == ("V" in names)
