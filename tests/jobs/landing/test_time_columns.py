"""Several columns make the time: what a careful person expects of each form. No Spark."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.landing.checking import check_rows
from jobs.landing.raw_rows import RawRows
from jobs.landing.rejected.replay import recheck_payloads
from jobs.landing.values.rejected import explain_reason
from jobs.specs.loading import load_spec
from jobs.specs.model_spec import ModelSpec
from jobs.specs.problems import SpecError
from jobs.storage.quarantine import PAYLOAD, REASON
from tests.jobs.support.pipeline import random_walk_spec

Columns = dict[str, list[Any]]


def spec(**changes: Any) -> ModelSpec:
    return ModelSpec.model_validate(random_walk_spec(**changes))


def checked(columns: Columns, types: dict[str, pa.DataType] | None = None, **changes: Any) -> pa.RecordBatch:
    count = len(next(iter(columns.values())))
    rows: Columns = {"id": ["x"] * count, "a": ["1"] * count, "b": ["2"] * count, **columns}
    arrays = {name: pa.array(values, (types or {}).get(name)) for name, values in rows.items()}
    source = RawRows(arrays, count)
    return check_rows(spec(**changes), source, {"id": "string"}, "file")


def times(columns: Columns, types: dict[str, pa.DataType] | None = None, **changes: Any) -> list[str | None]:
    """Return the times of rows as text without seconds of 0; None of a row that is rejected."""
    rows = checked(columns, types, **changes)
    reasons = rows.column(REASON).to_pylist()
    found = rows.column("time").to_pylist()
    return [
        None
        if reason is not None
        else f"{one:%Y-%m-%d %H:%M:%S.%f}".removesuffix(".000000").removesuffix(":00")
        for one, reason in zip(found, reasons, strict=True)
    ]


FORMS: list[tuple[str, Any, Columns, dict[str, Any], list[str | None]]] = [
    (
        "date and time of day",
        ["DATE", "TIME"],
        {"DATE": ["2025-01-02", "2025-01-02"], "TIME": ["00:00:00", "13:05"]},
        {},
        ["2025-01-02 00:00", "2025-01-02 13:05"],
    ),
    (
        "24:00 is the next day's 0:00",
        ["DATE", "TIME"],
        {"DATE": ["2024-02-28", "2024-02-29", "2024-12-31"], "TIME": ["24:00", "24:00:00", "24:01"]},
        {},
        ["2024-02-29 00:00", "2024-03-01 00:00", None],
    ),
    (
        "12 hours, fractions",
        ["Date", "Time"],
        {"Date": ["2024-05-06"] * 4, "Time": ["12:00 AM", "12:30 pm", "1:02:03.5 PM", "13:00 PM"]},
        {},
        ["2024-05-06 00:00", "2024-05-06 12:30", "2024-05-06 13:02:03.500000", None],
    ),
    (
        "a date with an empty time of day, a time with spreadsheet's first day",
        ["Date", "Time"],
        {"Date": ["2024-05-06 00:00:00", "2024-05-06T00:00:00"], "Time": ["1899-12-30 05:30:00", "05:45:00"]},
        {},
        ["2024-05-06 05:30", "2024-05-06 05:45"],
    ),
    (
        "an offset beside the time",
        ["date", "time"],
        {"date": ["2024-05-06", "2024-05-06"], "time": ["05:30+02:00", "00:30Z"]},
        {"time_zone": "America/New_York"},
        ["2024-05-06 03:30", "2024-05-06 00:30"],
    ),
    (
        "the zone of the spec",
        ["date", "time"],
        {"date": ["2024-07-06", "2024-01-06"], "time": ["05:30", "05:30"]},
        {"time_zone": "Europe/Vienna"},
        ["2024-07-06 03:30", "2024-01-06 04:30"],
    ),
    (
        "the format of both",
        ["Datum", "Uhrzeit"],
        {"Datum": ["31.12.2024", "2024-12-31"], "Uhrzeit": ["23:15", "23:15"]},
        {"time_format": "%d.%m.%Y %H:%M"},
        ["2024-12-31 23:15", None],
    ),
    (
        "the format of the date alone",
        {"date": "day", "hour": "HE"},
        {"day": ["12/31/2024", "12/31/2024", "12/31/2024"], "HE": ["1", "24", "25"]},
        {"time_format": "%m/%d/%Y"},
        ["2024-12-31 01:00", "2025-01-01 00:00", None],
    ),
    (
        "a format over columns that are not side by side",
        ["date", "time"],
        {"date": ["20241231", "20241231"], "time": ["2315", "2515"]},
        {"time_format": "%Y%m%d%H%M"},
        ["2024-12-31 23:15", None],
    ),
    (
        "year, month, day, hour",
        ["year", "month", "day", "hour"],
        {
            "year": ["2024"] * 4,
            "month": ["2", "2", "2", "13"],
            "day": ["29", "28", "30", "1"],
            "hour": ["0", "24", "1", "1"],
        },
        {},
        ["2024-02-29 00:00", "2024-02-29 00:00", None, None],
    ),
    (
        "year, month and day",
        ["Year", "Month", "Day"],
        {"Year": ["2023", "24"], "Month": ["02", "Feb"], "Day": ["28", "29"]},
        {},
        ["2023-02-28 00:00", "2024-02-29 00:00"],
    ),
    (
        "year and month",
        ["Year", "Mon"],
        {"Year": ["1949", "1949"], "Mon": ["1", "12"]},
        {},
        ["1949-01-01 00:00", "1949-12-01 00:00"],
    ),
    (
        "year and quarter",
        ["year", "quarter"],
        {"year": ["1959.0", "1959.0", "1960", "1960"], "quarter": ["1.0", "4.0", "Q2", "5"]},
        {},
        ["1959-01-01 00:00", "1959-10-01 00:00", "1960-04-01 00:00", None],
    ),
    (
        "buoys: YY MM DD hh mm",
        ["#YY", "MM", "DD", "hh", "mm"],
        {"#YY": ["2024"], "MM": ["12"], "DD": ["31"], "hh": ["23"], "mm": ["50"]},
        {},
        ["2024-12-31 23:50"],
    ),
    (
        "loggers: year, day of the year, HHMM",
        ["Year", "DOY", "HHMM"],
        {
            "Year": ["2024"] * 5,
            "DOY": ["60", "366", "366", "367", "1"],
            "HHMM": ["15", "100", "2400", "0", "1260"],
        },
        {},
        ["2024-02-29 00:15", "2024-12-31 01:00", "2025-01-01 00:00", None, None],
    ),
    (
        "hours ending in hundreds",
        ["Date", "Hour Ending"],
        {"Date": ["2024-01-01"] * 3, "Hour Ending": ["100", "2400", "130"]},
        {},
        ["2024-01-01 01:00", "2024-01-02 00:00", None],
    ),
    (
        "hours as times of day",
        ["Date", "HE"],
        {"Date": ["2024-01-01"] * 3, "HE": ["01:00", "24:00", "7"]},
        {},
        ["2024-01-01 01:00", "2024-01-02 00:00", "2024-01-01 07:00"],
    ),
    (
        "a number that may be hours or minutes",
        ["date", "time"],
        {"date": ["2024-01-01"] * 4, "time": ["5", "0", "0005", "1700"]},
        {},
        [None, "2024-01-01 00:00", "2024-01-01 00:05", "2024-01-01 17:00"],
    ),
    (
        "a date of eight digits, seconds with a fraction",
        {"date": "d", "hour": "h", "minute": "m", "second": "s"},
        {"d": ["20240229"] * 3, "h": ["5", "24", "24"], "m": ["6", "0", "1"], "s": ["7.25", "0", "0"]},
        {},
        ["2024-02-29 05:06:07.250000", "2024-03-01 00:00", None],
    ),
    (
        "a spreadsheet's numbers",
        ["Date", "Time"],
        {"Date": ["45292", "45292.0", "45293"], "Time": ["0.5", "0", ".25"]},
        {"time_format": "spreadsheet_days"},
        ["2024-01-01 12:00", "2024-01-01 00:00", "2024-01-02 06:00"],
    ),
    (
        "points in the time of day",
        ["Date", "Time"],
        {"Date": ["10/03/2004", "10/03/2004"], "Time": ["18.00.00", "7.30"]},
        {"time_format": "%d/%m/%Y"},
        ["2004-03-10 18:00", "2004-03-10 07:30"],
    ),
    (
        "times of day as text has them",
        ["Date", "Time"],
        {"Date": ["2024-05-06"] * 4, "Time": ["5 PM", "17h05", "05:30+02", "05:30 CET"]},
        {},
        ["2024-05-06 17:00", "2024-05-06 17:05", "2024-05-06 03:30", None],
    ),
    (
        "a part is missing",
        ["date", "time"],
        {"date": ["2024-01-01", None, "", "2024-01-01"], "time": ["", "05:00", " ", "05:00"]},
        {},
        [None, None, None, "2024-01-01 05:00"],
    ),
]


@pytest.mark.parametrize(
    ("named", "columns", "changes", "wanted"), [f[1:] for f in FORMS], ids=[f[0] for f in FORMS]
)
def test_columns_make_the_time_that_a_person_reads(
    named: Any, columns: Columns, changes: dict[str, Any], wanted: list[str | None]
) -> None:
    assert times(columns, time=named, **changes) == wanted


STORED: list[tuple[str, Any, Columns, dict[str, pa.DataType], list[str | None]]] = [
    (
        "date32 and time64",
        ["d", "t"],
        {"d": [date(2024, 2, 29), None], "t": [time(23, 59, 59, 5), time(1)]},
        {"d": pa.date32(), "t": pa.time64("us")},
        ["2024-02-29 23:59:59.000005", None],
    ),
    (
        "time32",
        ["d", "t"],
        {"d": [date(2024, 2, 29)], "t": [time(23, 59)]},
        {"t": pa.time32("s")},
        ["2024-02-29 23:59"],
    ),
    (
        "durations",
        ["d", "t"],
        {"d": [datetime(2024, 2, 29)] * 2, "t": [timedelta(hours=5), timedelta(hours=25)]},
        {"t": pa.duration("ms")},
        ["2024-02-29 05:00", None],
    ),
    (
        "numbers",
        ["year", "month", "day", "hour"],
        {"year": [2024, 2024], "month": [2, 2], "day": [29.0, None], "hour": [24, 1]},
        {"month": pa.int8(), "hour": pa.int16()},
        ["2024-03-01 00:00", None],
    ),
    ("a date as a number", ["date", "hour"], {"date": [20240229], "hour": [7]}, {}, ["2024-02-29 07:00"]),
    (
        "a spreadsheet's numbers",
        ["date", "time"],
        {"date": [45292.0, 45292.0], "time": [0.75, 1.5]},
        {},
        [None, None],
    ),
    ("half an hour", ["date", "hour"], {"date": [20240229], "hour": [7.5]}, {}, [None]),
]


@pytest.mark.parametrize(
    ("named", "columns", "types", "wanted"), [f[1:] for f in STORED], ids=[f[0] for f in STORED]
)
def test_stored_columns_make_the_time(
    named: Any, columns: Columns, types: dict[str, pa.DataType], wanted: list[str | None]
) -> None:
    assert times(columns, types, time=named) == wanted


MOMENTS = st.datetimes(datetime(1950, 1, 1), datetime(2024, 12, 31)).map(
    lambda one: one.replace(second=0, microsecond=0)
)


@settings(max_examples=40, deadline=None)
@given(st.lists(MOMENTS, min_size=1, max_size=20), st.sampled_from(["%Y-%m-%d", "%Y%m%d"]), st.booleans())
def test_any_date_and_time_are_read_as_they_are_written(
    moments: list[datetime], form: str, spoilt: bool
) -> None:
    columns: Columns = {
        "D": [one.strftime(form) for one in moments],
        "T": [f"{one.hour}:{one.minute:02d}" for one in moments],
    }
    wanted: list[str | None] = [f"{one:%Y-%m-%d %H:%M}" for one in moments]
    if spoilt:
        columns["T"][0], wanted[0] = "25:00", None
    assert times(columns, time=["D", "T"]) == wanted


@settings(max_examples=40, deadline=None)
@given(st.lists(MOMENTS, min_size=1, max_size=20), st.sampled_from(["int", "text", "padded"]), st.booleans())
def test_any_parts_are_read_as_they_are_written(moments: list[datetime], kind: str, by_day: bool) -> None:
    def written(number: int, width: int) -> Any:
        return number if kind == "int" else f"{number:0{width if kind == 'padded' else 1}d}"

    columns: Columns = {"yr": [written(one.year, 4) for one in moments]}
    if by_day:
        columns["doy"] = [written(one.timetuple().tm_yday, 3) for one in moments]
    else:
        columns["mo"] = [written(one.month, 2) for one in moments]
        columns["dy"] = [written(one.day, 2) for one in moments]
    columns["hhmm"] = [written(100 * one.hour + one.minute, 4) for one in moments]
    assert times(columns, time=[*columns]) == [f"{one:%Y-%m-%d %H:%M}" for one in moments]


def test_a_row_without_a_time_keeps_the_columns_of_the_file() -> None:
    rows = checked({"DATE": ["2024-01-01", "2024-01-01"], "TIME": ["99:00", ""]}, time=["DATE", "TIME"])
    reasons = rows.column(REASON).to_pylist()
    assert reasons[0].startswith("time time: ") and reasons[1] == "time time: missing"
    payload = json.loads(rows.column(PAYLOAD)[0].as_py())
    assert payload == {"id": "x", "a": "1", "b": "2", "DATE": "2024-01-01", "TIME": "99:00"}


def test_a_rejected_row_is_taken_back_with_the_names_of_the_file_or_of_the_table() -> None:
    model = spec(time=["DATE", "TIME"], time_format="%d.%m.%Y")
    micros = int(datetime(2024, 1, 2, 5, tzinfo=UTC).timestamp() * 1e6)
    of_file = {"id": "x", "a": 1, "b": 2, "DATE": "02.01.2024", "TIME": "05:00"}
    of_table = {"id": "x", "a": 1, "b": 2, "time": "2024-01-02T05:00:00Z"}
    found = recheck_payloads(
        model, {"id": "string"}, [json.dumps(of_file), json.dumps(of_table), json.dumps({"id": "x"})]
    )
    assert found.reasons == [None, None, "time time: missing"]
    assert [json.loads(one or "{}").get("time") for one in found.landings] == [micros, micros, None]


@pytest.mark.parametrize(
    ("time", "said"),
    [
        (
            ["alpha", "beta", "gamma"],
            "time: the part of the time that 'alpha' has is not known; name the parts",
        ),
        (["hour", "minute"], "time: hour, minute do not make a time; give a date, or year, month and day"),
        ({"date": "d", "hours": "h"}, "time: 'hours' is no part of a time; did you mean 'hour'?"),
        (["d", 3], "time: must be names of columns; put each in quotes"),
        ([], "time: must be text, not a list"),
    ],
)
def test_columns_that_make_no_time_are_refused(time: Any, said: str, tmp_path: Any) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(json.dumps(random_walk_spec(name="m", time=time)))
    with pytest.raises(SpecError) as error:
        load_spec(path)
    assert said in str(error.value)


def test_the_time_has_the_first_free_name() -> None:
    assert spec(time=["DATE", "TIME"]).time == "time"
    assert spec(time=["DATE", "TIME"], key=["time"]).time == "time_2"
    assert spec(time="at").time == "at"


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (
            ["DATE", "TIME"],
            "such as '2024-01-01 5': DATE and TIME make no time; if \"TIME\" has hours, or hours and minutes",
        ),
        (
            {"date": "DATE", "hour": "TIME"},
            "DATE and TIME make no time; if the date is not ISO 8601, set its time_format",
        ),
        (
            {"year": "DATE", "day_of_year": "TIME"},
            "DATE and TIME make no time; correct the rows at their source",
        ),
    ],
)
def test_what_makes_no_time_is_told_with_the_values_of_the_file(columns: Any, said: str) -> None:
    payload = json.dumps({"id": "x", "DATE": "2024-01-01", "TIME": 5})
    assert said in explain_reason(spec(time=columns), "time time: not a time", payload)


def test_what_is_no_number_is_told_with_the_value_of_the_file() -> None:
    model = spec(measurement=["Temp (°C)", "b"])
    told = explain_reason(
        model, "measurement Temp_C: not a number", json.dumps({"Temp (°C)": "1,5", "b": "1"})
    )
    assert told.startswith("measurement Temp_C: not a number, such as '1,5'")
