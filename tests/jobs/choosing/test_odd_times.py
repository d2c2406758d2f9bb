"""A time in an unusual notation is refused with a setting, or a notation, that reads the column. No Spark."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.choosing.columns import Wishes
from jobs.choosing.finding import find_columns
from jobs.choosing.table import read_table
from jobs.core.errors import UserError
from jobs.core.stopwatch import Stopwatch
from jobs.core.time_counts import compute_wall_us
from jobs.landing.values import time_forms
from jobs.landing.values.rejected import explain_reason
from jobs.landing.values.time_forms import explain_texts
from jobs.specs.model_spec import ModelSpec
from tests.jobs.support.pipeline import random_walk_spec

START = datetime(2025, 3, 3)
HOUR, DAY, WEEK = timedelta(hours=1), timedelta(days=1), timedelta(weeks=1)
Write = Callable[[datetime], str]
MONTHS = "janvier février mars avril mai juin juillet août septembre octobre novembre décembre".split()
MONATE = "Jan Feb Mär Apr Mai Jun Jul Aug Sep Okt Nov Dez".split()


def read(folder: Path, texts: list[str], **wishes: Any) -> list[int]:
    """Return the times that `init` reads in a file with these texts."""
    rng = np.random.default_rng(3)
    lines = [
        f'"{text}",{value:.3f}\n' for text, value in zip(texts, rng.normal(size=len(texts)), strict=True)
    ]
    (folder / "a.csv").write_text("at,v\n" + "".join(lines))
    columns = find_columns(str(folder), read_table([folder / "a.csv"]), Wishes(**wishes), Stopwatch())
    return columns.parsed.time.tolist()


def find_ways(message: str) -> list[dict[str, str]]:
    """Return the options of each command in a refusal."""
    found = []
    for way in re.split(r" or (?=--time )", message[message.index("--time at") :]):
        words = shlex.split(re.split(r" \([0-9]", way)[0])
        found.append(
            {name[2:].replace("-", "_"): text for name, text in zip(words[::2], words[1::2], strict=True)}
        )
    return found


def refuse(folder: Path, texts: list[str]) -> str:
    with pytest.raises(UserError, match="holds text that is no time") as caught:
        read(folder, texts)
    return caught.value.message


def step(write: Write, by: timedelta = HOUR, count: int = 60) -> tuple[list[str], list[int]]:
    moments = [START + place * by for place in range(count)]
    return [write(at) for at in moments], [compute_wall_us(at) for at in moments]


@pytest.mark.parametrize(
    ("write", "by", "formats"),
    [
        (lambda at: f"{at:%d/%m/%Y %Hh%M}", HOUR, ["%d/%m/%Y %Hh%M"]),
        (lambda at: f"{at:%d.%m.%Y um %H:%M Uhr}", 7 * HOUR, ["%d.%m.%Y um %H:%M Uhr"]),
        (lambda at: f"{at:%B %d, %Y at %I:%M %p}", HOUR, ["%b %d, %Y at %I:%M %p"]),
        (lambda at: f"{at.day}. {at.month}. {at.year} {at:%H:%M:%S}", 9 * HOUR, ["%d. %m. %Y %H:%M:%S"]),
        (lambda at: f"KW {at:%V/%G}", WEEK, ["KW %V/%G"]),
        (lambda at: f"{at:%G Woche %V}", WEEK, ["%G Woche %V"]),
        (lambda at: f"{at:%Hh%M %d/%m/%Y}", 7 * HOUR, ["%Hh%M %d/%m/%Y"]),
        (lambda at: f"{at:%m/%d/%Y @ %I:%M%p}", 7 * HOUR, ["%m/%d/%Y @ %I:%M%p"]),
        (lambda at: f"{at:%d/%m/%y %Hh%M}", 13 * HOUR, ["%d/%m/%y %Hh%M"]),
    ],
)
def test_the_format_that_reads_a_column_is_named_and_reads_it(
    tmp_path: Path, write: Write, by: timedelta, formats: list[str]
) -> None:
    texts, times = step(write, by)
    ways = find_ways(refuse(tmp_path, texts))
    assert [way["time_format"] for way in ways if way["time_format"] in formats] == formats
    readings = [read(tmp_path, texts, **way) for way in ways]
    assert times in readings


def test_day_and_month_that_cannot_be_told_apart_are_both_named(tmp_path: Path) -> None:
    texts, times = step(lambda at: f"{at:%d/%m/%Y %Hh%M}", HOUR, 24)
    message = refuse(tmp_path, texts)
    assert "reads it; only its source can say which is right" in message
    ways = find_ways(message)
    assert [way["time_format"] for way in ways] == ["%d/%m/%Y %Hh%M", "%m/%d/%Y %Hh%M"]
    assert [read(tmp_path, texts, **way) for way in ways] == [times, times]


@pytest.mark.parametrize(
    ("name", "zone", "ahead"),
    [
        ("CET", "Europe/Berlin", 1),
        ("EST", "America/New_York", -5),
        ("JST", "Asia/Tokyo", 9),
        ("CST", None, -6),
    ],
)
def test_a_zone_that_knows_the_abbreviation_is_named(
    tmp_path: Path, name: str, zone: str | None, ahead: int
) -> None:
    texts, times = step(lambda at: f"{at - 30 * DAY:%Y-%m-%d %H:%M} {name}")
    ways = find_ways(refuse(tmp_path, texts))
    assert all("time_format" not in way for way in ways)
    assert [way["time_zone"] for way in ways] == ([zone] if zone else ["America/Chicago", "Asia/Shanghai"])
    shift = compute_wall_us(START - 30 * DAY) - compute_wall_us(START) - ahead * 3_600_000_000
    assert read(tmp_path, texts, **ways[0]) == [time + shift for time in times]


def ordinal(day: int) -> str:
    return "th" if 10 < day < 14 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")


def milliseconds(at: datetime) -> int:
    return compute_wall_us(at) // 1000


NOTATIONS: list[tuple[Write, Write, timedelta]] = [
    (lambda at: f"/Date({milliseconds(at)})/", lambda at: f"{milliseconds(at)}", HOUR),
    (lambda at: f"/Date({milliseconds(at)}+0100)/", lambda at: f"{milliseconds(at)}", HOUR),
    (
        lambda at: f"{at:%B} {at.day}{ordinal(at.day)}, {at.year}",
        lambda at: f"{at:%B} {at.day}, {at.year}",
        DAY,
    ),
    (
        lambda at: f"{at:%d/%m/%Y %I:%M} {at:%p}".replace("AM", "a. m.").replace("PM", "p.\u00a0m."),
        lambda at: f"{at:%d/%m/%Y %I:%M} {at:%p}".replace("AM", "am").replace("PM", "pm"),
        7 * HOUR,
    ),
    (
        lambda at: f"{at:%m/%d/%Y, %I:%M:%S}\u202f{at:%p}",
        lambda at: f"{at:%m/%d/%Y, %I:%M:%S} {at:%p}",
        7 * HOUR,
    ),
    (lambda at: f"{at.year}-{at.month:2}-{at.day:2}", lambda at: f"{at:%Y-%m-%d}", DAY),
    (
        lambda at: f"{at.month:2}/{at.day:2}/{at.year} {at.hour:2}:{at.minute:2}",
        lambda at: f"{at:%m/%d/%Y} {at.hour:2}:{at:%M}",
        7 * HOUR,
    ),
    (lambda at: f"{at.day} {MONTHS[at.month - 1]} {at.year}", lambda at: f"{at:%-d %b %Y}", DAY),
    (lambda at: f"{at.day}. {MONATE[at.month - 1]} {at:%Y %H:%M}", lambda at: f"{at:%-d. %b %Y %H:%M}", DAY),
    (lambda at: f"{at:%Y-%m-%d %H:%M} MEZ", lambda at: f"{at:%Y-%m-%d %H:%M} CET", HOUR / 2),
]


@pytest.mark.parametrize("place", range(len(NOTATIONS)))
def test_a_notation_that_no_format_reads_is_refused_with_one_that_is_read(tmp_path: Path, place: int) -> None:
    write, rewrite, by = NOTATIONS[place]
    (texts, times), (written, _) = step(write, by), step(rewrite, by)
    message = refuse(tmp_path, texts)
    assert f"no format reads this notation; if it is written as '{written[0]}', " in message
    shift = 3_600_000_000 if "CET" in written[0] else 0
    readings = [read(tmp_path, written, **way) for way in find_ways(message)]
    assert [time - shift for time in times] in readings


@pytest.mark.parametrize(
    "text", ["set-12", "meter 4", "A-12 B-7", "fine", "v1.2.3", "room 12, 3rd floor", "10.0.0.7"]
)
def test_texts_that_are_no_times_get_no_advice(tmp_path: Path, text: str) -> None:
    assert "--time at" not in refuse(tmp_path, [f"{text}{'x' * (n % 2)}" for n in range(40)])


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["%d/%m/%Y", "%d.%m.%Y", "%Y/%m/%d", "%d %b %Y", "%b %d, %Y", "%a, %d %b %Y"]),
    st.sampled_from([" ", " um ", " at ", " @ "]),
    st.sampled_from(["%H:%M", "%Hh%M", "%H.%M.%S", "%I:%M %p", "%H:%M Uhr"]),
    st.sampled_from(["", " +0000"]),
    st.datetimes(datetime(2000, 1, 1), datetime(2030, 1, 1)),
)
def test_a_format_named_for_a_rejected_row_reads_it_as_it_was_written(
    date: str, between: str, clock: str, end: str, moment: datetime
) -> None:
    text = moment.strftime(f"{date}{between}{clock}{end}")
    spec = ModelSpec.model_validate(random_walk_spec())
    said = explain_reason(spec, "time at: not a time", f'{{"at": "{text}"}}')
    named = re.findall(r'time_format: "((?:[^"\\]|\\.)*)"', said)
    assert named, (text, said)
    assert any(moment.strftime(one.replace("%z", "+0000")) == text for one in named), (text, said)


NO_FORM = """
2025-03-03 00:00 GMT+1|2025-03-03 00:00 UTC+3|03.03.2025 00:00:00 +1h|03/03/2025 00:00 (UTC+1)|03/03/2025 00:00 UTC+3
[03/Mar/2025:00:00:00 +0100]|03.03.2025 00:00 - 01:00|03/03/2025 00h-01h|03.03.2025 00-1|03.03.2025 10-11 Uhr
03/03/2025 10:00-11:00|03/03/2025 10:00 AM-11:00|03/03/2025 10:00 -11
2025-03-03 10:00- 1:00|2025-03-03 10:00-11|03.03.2025 10.00-11|03.03.2025, 04.03
03.03.2025; 04.03.25|03/03/2025 00:00 PT|03/03/2025 00:00 Eastern|03/03/2025 00:00 (CET)|03/03/2025 00:00 cet
CET 03/03/2025 00:00|03/03/2025 00:00 Central European Time|03/03/2025 00:00 [Europe/Berlin]
2025-03-03T00:00[Europe/Berlin]|Di 04.03.2025 10:00|Dienstag, 4. März 2025|3 març 2025|noon 03/03/2025
mar. 4 mars 2025 10:00|03/03/2025 0.5h|03/03/2025 0.5|03/03/2025 1.5|03/03/2025 0.25|2025-03-03 12: 30|3° mars 2025
"""


@pytest.mark.parametrize("text", NO_FORM.strip().replace("\n", "|").split("|"))
def test_a_text_that_a_format_would_read_wrongly_gets_none(text: str) -> None:
    assert explain_texts([text], UTC, name_setting) is None


@pytest.mark.parametrize(
    ("text", "form", "moment"),
    [
        ("03.03.2025 00:00 +01", "%d.%m.%Y %H:%M %z", START - HOUR),
        ("03/03/2025 00:00 UTC+02:00", "%d/%m/%Y %H:%M %z", START - 2 * HOUR),
        ("03/03/2025 00:00Z", "%d/%m/%Y %H:%M%z", START),
        ("03.03.2025 10h00 -0500", "%d.%m.%Y %Hh%M %z", START + 15 * HOUR),
        ("3 mars 2025 10h00", "%d %b %Y %Hh%M", START + 10 * HOUR),
        ("3mai2025", "%d%b%Y", START + 61 * DAY),
    ],
)
def test_a_named_format_reads_the_offset_that_a_text_has(text: str, form: str, moment: datetime) -> None:
    said = explain_texts([text], UTC, name_setting)
    at = moment.date() if moment.hour == 0 else moment
    assert said is not None and f"{form} None ({at})" in said


def name_setting(form: str | None, zone: str | None) -> str:
    return f"{form} {zone}"


def test_the_example_of_a_notation_is_a_text_that_has_it() -> None:
    said = explain_texts(["Jan 2000", "Mär 2000", "Apr 2000"], UTC, name_setting)
    assert said is not None and "if it is written as 'Mar 2000', %b %Y None (2000-03-01) reads it" in said
    secret = ["Jan 2000", f"Mär 2000 password=hunter2 {'x' * 80}"]
    assert explain_texts(secret, UTC, name_setting) is None


def test_more_readings_than_are_named_are_said_to_be() -> None:
    said = explain_texts(["03/02/2025 10h00 CST"], UTC, name_setting)
    assert said is not None and said.endswith(") or others reads it; only its source can say which is right")


def test_a_notation_of_the_format_of_the_spec_needs_no_setting() -> None:
    spec = ModelSpec.model_validate(random_walk_spec())
    said = explain_reason(spec, "time at: not a time", '{"at": "2025- 3- 3"}')
    assert said.endswith("if it is written as '2025-03-03', the spec as it is (2025-03-03) reads it")
    assert "with  in" not in said


@pytest.mark.parametrize(
    ("text", "most"),
    [("2025-03-03 10:00 MESZ", 2 * 31), ("2025-03-03 10:00 UTC+3", 0), ("3. März 2025 noon", 0)],
)
def test_zones_are_loaded_once_and_only_for_an_abbreviation(
    monkeypatch: pytest.MonkeyPatch, text: str, most: int
) -> None:
    load = Mock(side_effect=time_forms.load_zone)
    monkeypatch.setattr(time_forms, "load_zone", load)
    assert explain_texts([text], UTC, name_setting) is None
    assert load.call_count <= most


def test_a_text_that_may_hold_a_secret_gets_no_advice() -> None:
    spec = ModelSpec.model_validate(random_walk_spec())
    for text in ("password=hunter2 03/03/2025 00h00", f"{'x' * 80} 03/03/2025 00h00"):
        assert "hunter2" not in (said := explain_reason(spec, "time at: not a time", f'{{"at": "{text}"}}'))
        assert "time_format:" not in said and len(said) < 400
