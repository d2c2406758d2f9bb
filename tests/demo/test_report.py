"""The report is one whole HTML file that needs nothing else, and says so when the check failed."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo.figures import Marks, Nis, Series, Switch, weekly_share
from demo.report import Content, number, write_report
from demo.upgrade import Estimate, Switched

pytest.importorskip("matplotlib")

DAY = 86_400 * 1_000_000
START = 1_380_600_000 * 1_000_000  # 1 October 2013, 04:00 UTC
VOID = {"meta", "img", "br", "wbr", "input", "link", "hr"}


class Page(HTMLParser):
    """Check that tags close in order, and keep what was opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def content(**changes: Any) -> Content:
    random = np.random.default_rng(3)
    time = START + np.arange(-20, 20) * DAY
    measured = 300 + random.normal(size=40)
    measured[[0, 25]] = np.nan
    normalised = np.where(np.isnan(measured), np.nan, random.normal(size=40))
    series = Series("JFK to LAX <busy>", time, measured, np.full(40, 300.0), np.ones(40), normalised)
    result = {
        "max_abs_difference": 0.0,
        "keys": 4_266,
        "rows_sent": 112_314,
        "rows_estimated": 112_159,
        "rows_quarantined": 155,
        "driver_kills": 2,
        "rows_per_second": 1234.5,
        "batch_rows_per_second": 98_765.4,
        "rows_history": 504_968,
        "seconds": 300.0,
        "tolerance": 1e-9,
        "problems": [],
        **changes,
    }
    nis = Nis("air_time", random.chisquare(1, 40), np.ones(40, np.int64), time)
    return Content(
        result,
        [{"compared": "air_time: estimates", "number": "56,157 rows", "mean": "0"}],
        [series, series._replace(measured=np.full(40, np.nan), normalised=np.full(40, np.nan))],
        "minutes",
        [nis],
        Marks(START, START + 5 * DAY),
        ["air_time: 5.1% outside."],
        {"Land": 12.0, "Stream": 60.0},
    )


def page_of(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    assert not page.open
    return page


def test_the_report_is_whole_and_needs_nothing_else(tmp_path: Path) -> None:
    page = page_of(write_report(tmp_path / "new" / "report.html", content()))
    pictures = [attributes["src"] or "" for tag, attributes in page.seen if tag == "img"]
    assert len(pictures) == 3
    assert all(source.startswith("data:image/png;base64,") for source in pictures)
    assert not any("href" in attributes or tag in ("script", "link") for tag, attributes in page.seen)
    for said in ("4,266", "112,314", "155", "56,157 rows", "12.0 s", "air_time: 5.1% outside."):
        assert said in page.text


def test_a_failed_check_is_said_first(tmp_path: Path) -> None:
    failed = content(max_abs_difference=float("inf"), problems=["7 rows & keys are missing"])
    page = page_of(write_report(tmp_path / "report.html", failed))
    assert "The check failed: 7 rows & keys are missing" in page.text
    assert ("p", {"class": "verdict bad"}) in page.seen


def test_an_upgrade_and_its_roll_back_are_shown(tmp_path: Path) -> None:
    time = START + np.arange(12) * DAY
    one = Estimate(time, np.full(12, 300.0), np.ones(12), np.r_[np.nan, np.ones(10), 9.0])
    days = [START + number * DAY for number in (8, 9, 10)]
    likelihood = {"old": -3.31, "new": -3.29}
    numbers = {"rows": 850, "log_likelihood_a_row": likelihood, "keys_better": 130, "keys_worse": 80}
    done = Switched("air_time-g0001", "air_time-g0002", numbers, "r.html", days, [(9, 9), (18, 18)], {})
    assert done.problems() == []
    assert done._replace(rows=[(9, 9), (17, 18)]).problems() == [
        "across the switch of air_time the live estimates have 17 rows, not 18"
    ]
    switch = Switch([("JFK to LAX", one, one)], [(time, np.full(12, 301.0))], days, done.result())
    page = page_of(write_report(tmp_path / "report.html", content()._replace(switch=switch)))
    assert sum(tag == "img" for tag, _ in page.seen) == 4
    for said in ("-3.3100 of version 1", "-3.2900 of version 2", "850 flights", "r.html"):
        assert said in page.text


def test_a_driver_that_was_not_killed_is_not_marked(tmp_path: Path) -> None:
    page_of(write_report(tmp_path / "report.html", content()._replace(marks=Marks(START, None))))


@pytest.mark.parametrize(
    ("value", "said"), [(0.0, "0"), (3.64e-12, "3.6e-12"), (float("inf"), "does not match")]
)
def test_number(value: float, said: str) -> None:
    assert number(value) == said


def test_weekly_share_counts_only_what_is_counted() -> None:
    time = 10 * 7 * DAY + np.array([0, 1, 2, 8]) * DAY
    one = Nis("m", np.zeros(4), np.ones(4, np.int64), time)
    middle, share = weekly_share(
        one, np.array([True, False, True, False]), np.array([True, True, False, True])
    )
    # The third row is outside but not counted; `outside` is a part of `counted` where the report calls it.
    assert len(middle) == len(share) == 2
    assert share[1] == 0.0
