"""Rows whose time lies after their landing, and local times where clocks change."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.core.time_counts import compute_wall_us
from jobs.core.times import now
from jobs.landing.checking import ParsedRows, parse
from jobs.landing.raw_rows import RawRows
from jobs.landing.reading import select_reader
from jobs.landing.rejected.replay import recheck_payloads
from jobs.landing.values.rejected import describe_clock_changes, describe_repeats, explain_reason
from jobs.offline.ahead import read_future
from jobs.specs.model_spec import ModelSpec
from tests.jobs.support.pipeline import random_walk_spec

AHEAD, EARLY = "time at: after its landing", "time at: before time_range.earliest"
HOUR = 3_600_000_000


def spec_of(**changes: Any) -> ModelSpec:
    return ModelSpec.model_validate(random_walk_spec(**changes))


def source_of(times: list[str], keys: list[str] | None = None, landed: Any = None) -> RawRows:
    rows = len(times)
    one = pa.array([1.0] * rows)
    columns = {"id": pa.array(keys or ["k"] * rows), "at": pa.array(times), "a": one, "b": one}
    return RawRows(columns, rows, landed=landed)


def reasons(spec: ModelSpec, *times: str, landed: Any = None) -> list[Any]:
    return parse(spec, source_of(list(times), landed=landed), "rows").reason.tolist()


# A plausible range


def test_a_time_more_than_a_day_after_now_is_rejected() -> None:
    soon, later = (f"{now() + timedelta(hours=hours):%Y-%m-%d %H:%M}" for hours in (23, 25))
    assert reasons(spec_of(), "2099-01-01", soon, later, "1871-01-01") == [AHEAD, None, AHEAD, None]


@pytest.mark.parametrize(
    ("time_range", "expected"),
    [
        ({}, [None, AHEAD, AHEAD, None]),
        ({"latest": "30d"}, [None, None, AHEAD, None]),
        ({"latest": "1h"}, [AHEAD, AHEAD, AHEAD, None]),
        ({"latest": None}, [None, None, None, None]),
        ({"latest": "none"}, [None, None, None, None]),
        ({"earliest": "1990-01-01"}, [None, AHEAD, AHEAD, EARLY]),
        ({"latest": None, "earliest": "2024-02-01 12:00Z"}, [EARLY, None, None, EARLY]),
    ],
)
def test_the_range_is_the_specs_and_counts_from_the_landing(time_range: Any, expected: list[Any]) -> None:
    landed = compute_wall_us(datetime(2024, 1, 31))
    spec = spec_of(time_range=time_range)
    times = ["2024-01-31 18:00", "2024-02-15", "2099-01-01", "1985-01-01"]
    assert reasons(spec, *times, landed=landed) == expected
    assert reasons(spec, *times, landed=np.full(4, landed)) == expected


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-72, 72), min_size=1, max_size=9), st.integers(1, 48))
def test_each_row_is_judged_by_its_own_landing(ahead: list[int], hours: int) -> None:
    landed = np.array([compute_wall_us(datetime(2024, 1, 1 + at)) for at in range(len(ahead))])
    times = [f"{datetime(2024, 1, 1 + at) + timedelta(hours=one)}" for at, one in enumerate(ahead)]
    found = reasons(spec_of(time_range={"latest": f"{hours}h"}), *times, landed=landed)
    assert found == [AHEAD if one > hours else None for one in ahead]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.dates(date(1990, 1, 1), date(2150, 1, 1)), min_size=1, max_size=5))
def test_a_replay_judges_by_the_time_of_quarantine(days: list[date]) -> None:
    landed = np.array([compute_wall_us(datetime(2030, 1, 1))] * len(days))
    payloads = [f'{{"id": "k", "at": "{day}", "a": 1, "b": 2}}' for day in days]
    found = recheck_payloads(spec_of(), {"id": "string"}, payloads, landed).reasons
    assert found == [AHEAD if day > date(2030, 1, 2) else None for day in days]
    freed = recheck_payloads(spec_of(time_range={"latest": None}), {"id": "string"}, payloads, landed)
    assert not any(freed.reasons) and all(freed.landings)


@pytest.mark.parametrize(
    ("time_range", "problem"),
    [
        ({"latest": "soon"}, "'soon' is not a duration"),
        ({"earliest": "long ago"}, "'long ago' is not a time; write one such as 1990-01-01"),
        ({"newest": "1d"}, "time_range.newest"),
    ],
)
def test_a_range_that_is_none_is_refused(time_range: Any, problem: str) -> None:
    with pytest.raises(Exception, match=problem):
        spec_of(time_range=time_range)


def test_the_reason_says_when_and_how_far_ahead() -> None:
    newest = compute_wall_us(datetime(2025, 1, 1, 1, 39))
    said = explain_reason(spec_of(), AHEAD, '{"at": "2099-01-01 00:00"}', newest)
    assert "'2099-01-01 00:00': at 2099-01-01, 74 years after the newest row" in said
    assert "set time_range: {latest: null}" in said
    assert "3 days after the newest row" in explain_reason(
        spec_of(), AHEAD, '{"at": "2025-01-04 01:39"}', newest
    )
    early = explain_reason(
        spec_of(time_range={"earliest": "1990-01-01"}), EARLY, '{"at": "1970-01-01"}', newest
    )
    assert "55 years before the newest row; the first time is 1990-01-01" in early
    assert "after now" in explain_reason(spec_of(time_format="%Y%m%d"), AHEAD, '{"at": 20990101}')


# Changes of the clocks


def walls_of(zone: str, start: datetime, count: int, minutes: int) -> tuple[list[str], list[int]]:
    """Return local times as an honest clock shows them, and the moments in microseconds."""
    moments = [start + k * timedelta(minutes=minutes) for k in range(count)]
    shown = [one.replace(tzinfo=UTC).astimezone(ZoneInfo(zone)).strftime("%Y-%m-%d %H:%M") for one in moments]
    return shown, [compute_wall_us(one) for one in moments]


def parsed(zone: str, times: list[str], keys: list[str] | None = None, **changes: Any) -> ParsedRows:
    return parse(spec_of(time_zone=zone, **changes), source_of(times, keys), "rows")


@pytest.mark.parametrize(
    ("zone", "start"),
    [
        ("Europe/Vienna", datetime(2022, 10, 29, 23)),
        ("America/New_York", datetime(2023, 11, 5, 4)),
        ("Australia/Lord_Howe", datetime(2024, 4, 6, 13)),
        ("America/Sao_Paulo", datetime(2018, 2, 17, 23)),
        ("Europe/London", datetime(2024, 10, 26, 23)),
    ],
)
@pytest.mark.parametrize("minutes", [5, 15, 30])
def test_a_step_back_in_a_repeated_hour_begins_its_second_pass(
    zone: str, start: datetime, minutes: int
) -> None:
    times, expected = walls_of(zone, start, 24 * 60 // minutes // 3, minutes)
    rows = parsed(zone, times)
    assert rows.time.tolist() == expected
    assert rows.clocks.second >= 1 and not rows.clocks.unclear and not rows.clocks.skipped
    newest_first = parsed(zone, times[::-1])
    assert newest_first.time.tolist() == expected[::-1]


def test_rows_by_the_hour_show_the_same_clock_twice_and_copies_do_not() -> None:
    times, expected = walls_of("Europe/Vienna", datetime(2022, 10, 29, 20), 9, 60)
    assert times[4] == times[5]
    assert parsed("Europe/Vienna", times).time.tolist() == expected
    quarter = [
        f"2022-10-30 {clock}" for clock in ("01:45", "02:00", "02:15", "02:15", "02:30", "02:45", "03:00")
    ]
    rows = parsed("Europe/Vienna", quarter)
    assert rows.clocks.second == 0 and rows.time[2] == rows.time[3]


def test_one_pass_alone_and_rows_without_an_order_are_the_first_pass() -> None:
    once = [f"2022-10-30 {clock}" for clock in ("01:45", "02:00", "02:15", "02:30", "02:45", "03:00")]
    rows = parsed("Europe/Vienna", once)
    assert rows.clocks.second == 0 and (np.diff(rows.time)[:4] == HOUR // 4).all()
    mixed = [f"2022-10-30 {clock}" for clock in ("01:45", "02:30", "02:00", "02:45", "02:15", "03:00")]
    rows = parsed("Europe/Vienna", mixed)
    assert rows.clocks.second == 0 and rows.clocks.unclear == 4
    (note,) = describe_clock_changes(spec_of(time_zone="Europe/Vienna"), rows.clocks)
    assert "4 rows in an hour that the clocks of Europe/Vienna repeat, in no order" in note


def test_times_with_an_offset_are_what_they_say() -> None:
    times = [f"2022-10-30 {clock}" for clock in ("02:30+02:00", "02:00+01:00", "02:30+01:00", "02:00+02:00")]
    rows = parsed("Europe/Vienna", times)
    assert rows.time.tolist() == [
        compute_wall_us(datetime(2022, 10, 30, *at)) for at in ((0, 30), (1, 0), (1, 30), (0, 0))
    ]
    assert rows.clocks.second == 0
    named = parsed("Europe/Vienna", ["2022-10-30 02:30 CEST", "2022-10-30 02:00 CET"])
    assert named.time.tolist() == [compute_wall_us(datetime(2022, 10, 30, *at)) for at in ((0, 30), (1, 0))]


def test_skipped_times_move_on_by_the_gap_with_a_note() -> None:
    times = [f"2022-03-27 {clock}" for clock in ("01:30", "02:00", "02:30", "03:00", "03:30")]
    rows = parsed("Europe/Vienna", times)
    assert rows.time.tolist() == [
        compute_wall_us(datetime(2022, 3, 27, *at)) for at in ((0, 30), (1, 0), (1, 30), (1, 0), (1, 30))
    ]
    assert rows.clocks.skipped == 2
    assert (
        "2 rows at times that the clocks of Europe/Vienna skip"
        in describe_clock_changes(spec_of(time_zone="Europe/Vienna"), rows.clocks)[0]
    )


def test_stored_times_and_counts_of_the_local_clock_are_told_apart_too() -> None:
    times, expected = walls_of("Europe/Vienna", datetime(2022, 10, 29, 23), 20, 15)
    naive = [datetime.strptime(one, "%Y-%m-%d %H:%M") for one in times]
    days = pa.array([(one - datetime(1899, 12, 30)) / timedelta(days=1) for one in naive])
    for column, time_format in ((pa.array(naive, pa.timestamp("us")), None), (days, "spreadsheet_days")):
        source = source_of(times)
        source.columns["at"] = column
        rows = parse(spec_of(time_zone="Europe/Vienna", time_format=time_format), source, "rows")
        assert rows.time.tolist() == expected
    digits = [int(one.strftime("%Y%m%d%H%M")) for one in naive]
    source = source_of(times)
    source.columns["at"] = pa.array(digits)
    rows = parse(spec_of(time_zone="Europe/Vienna", time_format="%Y%m%d%H%M"), source, "rows")
    assert rows.time.tolist() == expected


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(
        [("Europe/Vienna", datetime(2022, 10, 29, 22)), ("America/New_York", datetime(2023, 11, 5, 3))]
    ),
    st.lists(st.sampled_from([5, 10, 15, 30]), min_size=1, max_size=4),
    st.integers(0, 55),
    st.randoms(use_true_random=False),
)
def test_keys_that_come_mixed_have_passes_of_their_own(
    place: tuple[str, datetime], steps: list[int], begin: int, chance: Any
) -> None:
    rows: list[tuple[str, str, int]] = []
    for number, minutes in enumerate(steps):
        times, moments = walls_of(place[0], place[1] + timedelta(minutes=begin), 300 // minutes, minutes)
        rows.append((f"k{number}", "", 0))
        rows[-1:] = [(f"k{number}", *one) for one in zip(times, moments, strict=True)]
    order = sorted(range(len(rows)), key=lambda at: (rows[at][2] + chance.randrange(HOUR * 2), at))
    position = {key: iter([row for row in rows if row[0] == key]) for key, _, _ in rows}
    mixed = [next(position[rows[at][0]]) for at in order]  # each key's rows in their order, the keys in any
    found = parsed(place[0], [row[1] for row in mixed], [row[0] for row in mixed])
    assert found.time.tolist() == [row[2] for row in mixed]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 39), max_size=4, unique=True))
def test_the_passes_do_not_depend_on_where_a_file_is_cut(cuts: list[int]) -> None:
    times, expected = walls_of("Europe/Vienna", datetime(2022, 10, 29, 22), 40, 10)
    single = [
        one for at, one in enumerate(times) if one not in times[:at]
    ]  # a clock that shows one pass alone
    spec = spec_of(time_zone="Europe/Vienna")
    for shown, wanted in ((times, expected), (single, parsed("Europe/Vienna", single).time.tolist())):
        ends = [0, *sorted(one for one in cuts if one < len(shown)), len(shown)]
        pieces = [source_of(shown[a:b]) for a, b in pairwise(ends)]
        found: list[int] = []
        for number, piece in enumerate(pieces):

            def before(some: list[RawRows] = pieces[:number]) -> Iterator[RawRows]:
                return reversed(some)

            found += parse(spec, piece._replace(before=before), "rows").time.tolist()
        assert found == wanted


@pytest.mark.parametrize(
    ("name", "header", "line"),
    [
        ("rows.csv", "id,at,a,b\n", "k,{},1,2\n"),
        ("rows.jsonl", "", '{{"id": "k", "at": "{}", "a": 1, "b": 2}}\n'),
    ],
)
def test_a_file_is_cut_by_reading_too(tmp_path: Path, name: str, header: str, line: str) -> None:
    times, expected = walls_of("Europe/Vienna", datetime(2022, 10, 29, 22), 40, 10)
    path = tmp_path / name
    path.write_text(header + "".join(map(line.format, times)))
    reader = select_reader(spec_of(time_zone="Europe/Vienna"), str(path))
    (whole,) = reader.pieces()
    ends = [whole.start + len(line.format(times[0])) * rows for rows in (0, 9, 14, 18, 20, 22, 30, 40)]
    pieces = [whole._replace(start=a, stop=b) for a, b in pairwise(ends)]
    batches = [batch for piece in pieces for batch in reader.read(piece, {"id": "string"})]
    assert [one for batch in batches for one in batch["at"].cast(pa.int64()).to_pylist()] == expected


def test_a_note_on_repeats_names_the_change_of_clocks() -> None:
    spec = spec_of(time_zone="Europe/Vienna")
    span = compute_wall_us(datetime(2022, 10, 29)), compute_wall_us(datetime(2022, 10, 31))
    assert (
        "the clocks of Europe/Vienna repeat, the last on 2022-10-30, write times with an offset"
        in describe_repeats(spec, 4, span)
    )
    assert "clocks" not in describe_repeats(spec_of(), 4, span)
    assert "clocks" not in describe_repeats(spec, 4, (span[1], span[1] + 30 * 24 * HOUR))


def test_rows_to_forecast_through_are_not_judged(tmp_path: Path) -> None:
    path = tmp_path / "future.csv"
    path.write_text("id,at,u\nk,2099-01-01,1\nk,2099-01-02,1\n")
    future = read_future(spec_of(control=["u"]), str(path))
    assert future.time.tolist() == [compute_wall_us(datetime(2099, 1, day)) for day in (1, 2)]
