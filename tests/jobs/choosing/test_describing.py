"""`describe`: how a file is read, as `init` and `filter` read it, and the setting of each assumption."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from jobs import cli, describe, filter, init
from jobs.core.errors import UserError
from jobs.core.report import Report
from jobs.core.settings import Settings
from tests.corpus.reading import file_of

LIGHT = """
import sys
from jobs import describe
from jobs.core.settings import Settings
describe.run(Settings.load("w", "m", None), sys.argv[1])
print(sorted({"pandas", "pyspark", "scipy", "kalman", "matplotlib", "delta"} & set(sys.modules)))
"""


def settings_of(folder: Path) -> Settings:
    return Settings.load(str(folder / "warehouse"), str(folder / "models"), None)


def described(folder: Path, path: Path, **options: Any) -> Report:
    return describe.run(settings_of(folder), str(path), **options)


def roles_of(report: Report) -> dict[str, str]:
    return {one["name"]: one["role"] for one in report.data["columns"]}


def test_each_column_is_named_with_what_it_is_taken_for_and_its_setting(tmp_path: Path) -> None:
    report = described(tmp_path, file_of("eia_hourly_csv").with_name("pandas_range_index.csv"))
    assert roles_of(report) == {"": "left out", "at": "time", "sensor": "key", "value": "measurement"}
    by_name = {one["name"]: one for one in report.data["columns"]}
    assert (
        by_name["at"]["why"] == "ISO 8601; without an offset in UTC"
        and "time_zone" in by_name["at"]["setting"]
    )
    assert by_name["sensor"]["setting"] == "key; --key, --no-key"
    assert all(one["why"] and one["setting"] for one in report.data["columns"] if one["name"])
    first = report.data["understood"][0]
    assert list(first) == ["sensor", "at", "value"] and first["at"] == "2024-01-08T00:00:00Z"
    assert report.data["written"][0]["at"] == "2024-01-08 00:00:00" and len(report.data["written"]) == 5


def test_the_dialect_and_another_reading_of_the_time_are_said(tmp_path: Path) -> None:
    report = described(tmp_path, file_of("excel_french_csv"))
    assert report.data["dialect"] == ["fields separated by a semicolon", "a comma before fractions"]
    time = report.data["columns"][0]
    assert "%d/%m/%Y" in time["why"] and "%m/%d/%Y" in time["otherwise"]
    assert report.data["understood"][0]["Valeur"] == 11.24


def test_a_file_that_init_refuses_is_shown_as_written_with_the_refusal(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b\nx,1\ny,2\n")
    report = described(tmp_path, path)
    with pytest.raises(UserError) as refusal:
        init.run(settings_of(tmp_path), str(path), name="x", quick=True)
    assert report.errors == [str(refusal.value)]
    assert report.data["written"] == [{"a": "x", "b": "1"}, {"a": "y", "b": "2"}]
    with pytest.raises(UserError, match="no such file"):
        described(tmp_path, tmp_path / "none.csv")


def test_a_spec_is_read_as_filter_reads_it(tmp_path: Path) -> None:
    path = file_of("vienna_clock_change_csv")
    own = settings_of(tmp_path)
    wishes: Any = {"time_zone": "Europe/Vienna", "quick": True, "no_picture": True}
    init.run(own, str(path), name="clocks", **wishes)
    report = described(tmp_path, path, model="clocks")
    assert roles_of(report) == {"at": "time", "meter": "key", "kwh": "measurement"}
    assert report.data["understood"][0]["at"] == "2024-10-26T18:00:00Z"
    rows = tmp_path / "rows.jsonl"
    lines = [{"meter": "m", "at": "2024-01-01 00:00", "kwh": value} for value in (1, "2,5", None, 4)]
    rows.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + "[]\n")
    report = described(tmp_path, rows, model="clocks")
    filtered = filter.run(own, "clocks", str(rows), str(tmp_path / "out.csv"))
    assert (
        report.data["rejected"] == filtered.data["rejected_by_reason"] and len(report.data["rejected"]) == 2
    )
    assert report.data["understood"][1] == {"rejected": "measurement kwh: not a number"}
    assert [line for line in filtered.lines if "2,5" in line] == [
        line for line in report.lines if "2,5" in line
    ]


def test_the_command_shows_tables_and_json(tmp_path: Path) -> None:
    path = str(file_of("psql_copy_csv"))
    shown = CliRunner().invoke(cli.app, ["describe", path])
    assert shown.exit_code == 0 and "as understood, times in UTC" in shown.stdout
    assert "pump-1" in shown.stdout and "--key" in shown.stdout
    data = json.loads(CliRunner().invoke(cli.app, ["--json", "describe", path]).stdout)
    assert data["rows"] == 120 and [one["role"] for one in data["columns"]] == ["time", "key", "measurement"]
    assert CliRunner().invoke(cli.app, ["describe", str(tmp_path / "none.csv")]).exit_code == 2


def test_it_needs_no_heavy_library() -> None:
    done = run(
        [sys.executable, "-c", LIGHT, str(file_of("psql_copy_csv"))],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "[]", done.stderr


NAMES = st.sampled_from(["temp", "flow", "level_m", "power"])
TIMES = st.sampled_from(["%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%d %H:%M", "%d.%m.%Y %H:%M"])


@st.composite
def tables(draw: st.DrawFn) -> str:
    """Draw a CSV file of a few series with one reading, in some dialect."""
    from datetime import datetime, timedelta

    separator, keys = draw(st.sampled_from([",", ";", "\t"])), draw(st.sampled_from([["a"], ["a", "b", "c"]]))
    form, name, count = draw(TIMES), draw(NAMES), draw(st.integers(20, 40))
    start = datetime(2024, 1, 28, draw(st.integers(0, 23)))
    lines = [separator.join(["sensor", "at", name])]
    for i in range(count):
        at = (start + timedelta(hours=i)).strftime(form)
        lines += [separator.join([key, at, f"{20 + (i * 7 + len(key)) % 11 / 10:.1f}"]) for key in keys]
    return "\n".join(lines) + "\n"


@settings(max_examples=8, deadline=None)
@given(text=tables())
def test_it_says_what_init_takes(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.mktemp("drawn")
    path = folder / "rows.csv"
    path.write_text(text)
    found = init.run(settings_of(folder), str(path), name="x", quick=True, no_picture=True).data
    roles = roles_of(described(folder, path))
    assert roles[found["time"]] == "time"
    assert [name for name, role in roles.items() if role == "measurement"] == found["measurement"]
    assert [name for name, role in roles.items() if role == "key"] == (found["key"] or ["(no key)"])


def test_members_of_json_are_columns_and_a_member_that_rows_lack_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    objects = [
        {"at": 1704067200 + 3600 * i, "device": "a", "value": 20 + i / 8, "inner": {"x": i * i}}
        for i in range(40)
    ]
    del objects[3]["value"]
    path.write_text("".join(f"{json.dumps(one)}\n" for one in objects))
    report = described(tmp_path, path)
    names = ["at", "device", "value", "inner.x"]
    assert [one["name"] for one in report.data["columns"]][:4] == names and report.data["rows"] == 40
    assert report.data["understood"][3]["value"] is None and not report.data["rejected"]
    path.write_text("7\n")
    with pytest.raises(UserError, match="has no JSON object with members"):
        described(tmp_path, path)
