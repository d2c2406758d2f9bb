"""What a person sees who is asked to approve an upgrade, and what is missing among the intervals that have landed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dags.kalman_dags.pages.missing import find_missing_intervals
from kalman_dags.approval import format_approval
from kalman_dags.outcome import VerbOutcome
from kalman_dags.places import report_page
from tests.support.hostile import HOSTILE

pytestmark = pytest.mark.airflow

SIDES: dict[str, Any] = {"old": 1.0, "new": 1.5}
SHADOW: dict[str, Any] = {
    "lines": [],
    "data": {
        "generation": "tiny-g0002",
        "live": "tiny-g0001",
        "live_lags": False,
        "good": True,
        "answer": "better",
        "reasons": [],
        "rows_needed": 900,
        "report": "/ware house/reports/tiny/tiny-g0002.html",
        "comparison": {
            "rows": 1200,
            "keys": 3,
            "keys_better": 2,
            "keys_worse": 1,
            "log_likelihood_a_row": SIDES,
            "nis_a_component": SIDES,
            "nis_outside": {"old": 0.05, "new": None},
            "bias": SIDES,
            "bias_outside": SIDES,
            "flagged": {"old": 0, "new": 2},
            "gain": {"mean": 0.5, "low": 0.25, "high": 0.75, "rows": 1200, "keys": 3},
        },
    },
}
PREVIEW: dict[str, Any] = {
    "lines": [],
    "data": {
        "change": {
            "keys": 3,
            "left_out": 0,
            "before": {"level": {}, "slope": {}},
            "after": {"level": {}, "bias": {}},
            "parameters": [
                {"name": "a|b", "before": 1.0, "after": None, "from": "the spec", "to_learn": False}
            ],
        }
    },
}


def test_a_good_verdict_with_all_its_evidence() -> None:
    text = format_approval("tiny", "blue-green", PREVIEW, SHADOW, caught_up=False, root="/air")
    assert text.startswith("**Verdict: good.** Answer: the new version predicts better.")
    assert "[Open the report](/air/kalman/reports/tiny/tiny-g0002.html)" in text
    assert "| rows compared | 1,200 |" in text
    assert "| gain in log-likelihood per row | +0.5 | +0.25 to +0.75 |" in text
    assert "| log-likelihood per row | 1 | 1.5 |" in text and "| rows flagged | 0 | 2 |" in text
    assert "| keys whose NIS is outside its bounds | 5.0% | - |" in text
    assert "| states | slope | bias |" in text and "none; 3 keep their state" in text
    assert "`a\\|b`" in text, "a name cannot end its cell"
    assert "catch up first" not in text and "becomes live" in text and "refused" not in text


@pytest.mark.parametrize(
    "name", [*HOSTILE, "a` [click](http://evil.example) `b", "```\n**Verdict: good.**\n```"]
)
def test_a_key_is_code_and_no_part_of_the_evidence(name: str) -> None:
    moved = {"key": name, "old": 1.0, "new": 2.0, "deviations": 1.0, "quantity": "level"}
    numbers = {**SHADOW["data"]["comparison"], "moved": [moved]}
    change = {**PREVIEW["data"]["change"], "left_out": 1, "left_out_keys": [name]}
    texts = [
        format_approval(
            "tiny",
            "blue-green",
            {"data": {"change": change}},
            {"lines": [f"key {name}"], "data": {**SHADOW["data"], "comparison": found}},
            caught_up=False,
        )
        for found in (numbers, None)
    ]
    for text in texts:
        outside = re.sub("`[^`\n]*`", "", re.sub("^```\n[^`]*?\n```$", "", text, flags=re.M))
        assert "evil.example" not in outside and outside.count("**Verdict") == text.count(
            "**Verdict: good.** Answer"
        )
        assert all(line.isprintable() for line in text.split("\n"))
        assert "`" not in outside or outside.count("`") == outside.count("`kalman-pipeline")
        assert max(map(len, text.split("\n"))) < 2000


def test_numbers_are_rounded_and_nothing_stands_there_twice() -> None:
    moved = {"key": "s|1", "old": 0.581984286, "new": 3.6509244, "deviations": 7.33249, "quantity": "level"}
    lost = {**moved, "key": "s2", "new": None, "deviations": None}  # an estimate that is infinite
    numbers = {
        **SHADOW["data"]["comparison"],
        "log_likelihood_a_row": {"old": -1.318312, "new": -1.039324},
        "bias": {"old": None, "new": None},
        "moved": [moved, lost],
    }
    same = {"name": "R", "before": [[0.2446]], "after": [[0.2446]], "from": "the spec"}
    other = {"name": "Q", "before": [[0.123456789]], "after": [[1.0]], "from": "learned"}
    change = {**PREVIEW["data"]["change"], "parameters": [same, other]}
    shadow = {"lines": [], "data": {**SHADOW["data"], "comparison": numbers}}
    text = format_approval("tiny", "blue-green", {"data": {"change": change}}, shadow, caught_up=False)
    assert "| log-likelihood per row | -1.318 | -1.039 |" in text
    assert "| keys that move most: level | tiny-g0001 (live) | tiny-g0002 (shadow) | apart, in sd |" in text
    assert "| `s\\|1` | 0.582 | 3.651 | 7.33 |" in text and "| `s2` | 0.582 | - | - |" in text
    assert "| `Q` | `[[0.1235]]` | `[[1.0]]` | learned |" in text
    # Parameters that stay, figures that neither version has, and the report's path beside its link say nothing.
    assert "`R`" not in text and "mean innovation (0" not in text and "/ware house" not in text


def test_nothing_to_compare_says_why_and_what_remedies_it() -> None:
    data = {**SHADOW["data"], "good": False, "answer": "not enough to tell", "live_lags": True}
    data["reasons"] = ["there is nothing to compare: no row has been estimated by both"]
    data["comparison"] = {**data["comparison"], "rows": 0, "gain": {"mean": None, "low": None, "high": None}}
    text = format_approval("tiny", "blue-green", None, {"lines": [], "data": data}, caught_up=True)
    assert "**Verdict: not good.**" in text and "- there is nothing to compare" in text
    assert "this run let it catch up first" in text and "**The live stream still lags**" in text
    assert "About 900 rows more would tell." in text
    assert "is **refused**" in text and "tick *Force*" in text


def test_keys_that_are_lost_are_named() -> None:
    change = {"keys": 2, "left_out": 1, "left_out_keys": ["s7"]}
    text = format_approval("tiny", "stop-start", {"data": {"change": change}}, None, caught_up=False)
    assert "1 whose state is not a number (`s7`)" in text and "without a comparison" in text


def test_the_page_of_a_report() -> None:
    assert report_page("s3a://bucket/reports/tiny/tiny-g0002.html") == "/kalman/reports/tiny/tiny-g0002.html"
    assert report_page("/reports/tiny/tiny-g0002.json") is None and report_page("") is None


@pytest.mark.parametrize(
    ("lines", "headline"),
    [
        (["landed 3 rows of 1 file", "the measurements table is at version 1"], "landed 3 rows of 1 file"),
        (["generation g resumed", "estimated 3 rows, 1 s"], "estimated 3 rows, 1 s"),
        (["compared on 3 rows", "verdict: good", "report: x", "promoted g2", "8.1 s"], "promoted g2"),
        (["12.5 s"], None),
        ([], None),
    ],
)  # fmt: skip
def test_the_line_that_matters(lines: list[str], headline: str | None) -> None:
    assert VerbOutcome(lines, {}).headline == headline


def test_the_facts_of_a_promotion() -> None:
    assert VerbOutcome([], SHADOW["data"]).facts == {
        "generation": "tiny-g0002",
        "answer": "better",
        "good": True,
        "report": "/ware house/reports/tiny/tiny-g0002.html",
        "page": "/kalman/reports/tiny/tiny-g0002.html",
        "rows_compared": 1200,
        "gain": 0.5,
        "log_likelihood_a_row": 1.5,
    }


def test_missing_days() -> None:
    landed = {"2013-01-01T00:00:00Z", "2013-01-02T00:00:00Z", "2013-01-05T00:00:00Z"}
    found = find_missing_intervals("@daily", landed)
    assert found is not None
    assert found.missing == ["2013-01-03T00:00:00Z", "2013-01-04T00:00:00Z"]
    assert (found.first, found.last, found.landed) == (min(landed), max(landed), 3)
    assert find_missing_intervals("@daily", set()) is None
    assert find_missing_intervals("@daily", {"2013-01-01T00:00:00Z"}) == ("2013-01-01T00:00:00Z",) * 2 + (
        1,
        [],
    )


def test_of_many_intervals_the_newest_are_looked_at() -> None:
    landed = {"2013-01-01T00:00:00Z", "2014-01-01T00:00:00Z", "2014-01-01T02:00:00Z"}
    found = find_missing_intervals("0 * * * *", landed)
    assert found is not None and len(found.missing) < 365 * 24
    assert found.missing == sorted(found.missing) and found.missing[-1] == "2014-01-01T01:00:00Z"
    assert (found.first, found.last, found.landed) == ("2013-06-06T19:00:00Z", max(landed), 2)
