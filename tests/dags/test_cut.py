"""What decides a pretraining: the run's data interval, or its form."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest

from kalman_dags.cut import as_of, first, last, learn_from, to_version

DAY_US = 86_400_000_000
EMPTY: dict[str, Any] = {"as_of": None, "to_version": None, "learn_from": None, "learn_to": None}


def run_of(end: datetime | None) -> SimpleNamespace:
    """Make what a template sees of a run."""
    return SimpleNamespace(data_interval_end=end, run_after=datetime(2020, 1, 1, 3, tzinfo=UTC))


INTERVAL = run_of(datetime(2013, 10, 2, tzinfo=UTC))


def test_the_end_of_the_interval_is_the_cut() -> None:
    assert as_of(EMPTY, INTERVAL) == "2013-10-02T00:00:00+00:00"


def test_a_run_without_an_interval_is_cut_when_it_was_to_start() -> None:
    assert as_of(EMPTY, run_of(None)) == "2020-01-01T03:00:00+00:00"


def test_the_cut_is_in_utc() -> None:
    end = datetime(2013, 10, 2, tzinfo=timezone(timedelta(hours=-4)))
    assert as_of(EMPTY, run_of(end)) == "2013-10-02T04:00:00+00:00"


def test_the_form_wins() -> None:
    assert as_of({**EMPTY, "as_of": "2013-05-01T00:00:00Z"}, INTERVAL) == "2013-05-01T00:00:00Z"


@pytest.mark.parametrize("version", [0, 7])
def test_a_version_is_a_cut_of_its_own(version: int) -> None:
    params = {**EMPTY, "to_version": version}
    assert as_of(params, INTERVAL) == ""
    assert learn_from(params, INTERVAL, 90 * DAY_US) == ""


def test_a_landing_is_a_cut_that_a_cleared_run_finds_again() -> None:
    landings = {"asset": [SimpleNamespace(extra={"version": 4}), SimpleNamespace(extra={"version": 5})]}
    assert to_version(EMPTY, landings) == "5" and as_of(EMPTY, INTERVAL, landings) == ""
    assert to_version({**EMPTY, "to_version": 2}, landings) == "2"
    instant = {**EMPTY, "as_of": "2013-05-01T00:00:00Z"}
    assert to_version(instant, landings) == "" and as_of(instant, INTERVAL, landings) == instant["as_of"]
    # An event of another installation, or of a driver in a cluster, names none.
    assert to_version(EMPTY, {"asset": [SimpleNamespace(extra={})]}) == to_version(EMPTY, None) == ""


def test_learning_begins_a_window_before_the_cut() -> None:
    assert learn_from(EMPTY, INTERVAL, 30 * DAY_US) == "2013-09-02T00:00:00+00:00"
    assert (
        learn_from({**EMPTY, "as_of": "2013-05-01T00:00:00Z"}, INTERVAL, DAY_US)
        == "2013-04-30T00:00:00+00:00"
    )


def test_without_a_window_all_history_is_learned_from() -> None:
    assert learn_from(EMPTY, INTERVAL, None) == ""


def test_the_form_sets_the_start_of_learning() -> None:
    assert (
        learn_from({**EMPTY, "learn_from": "2013-01-01T00:00:00Z"}, INTERVAL, DAY_US)
        == "2013-01-01T00:00:00Z"
    )


def test_the_interval_is_what_is_estimated() -> None:
    start, end = datetime(2013, 10, 1, tzinfo=UTC), datetime(2013, 10, 2, tzinfo=UTC)
    run = SimpleNamespace(data_interval_start=start, data_interval_end=end)
    empty: dict[str, Any] = {"from": None, "to": None}
    assert (first(empty, run), last(empty, run)) == ("2013-10-01T00:00:00+00:00", "2013-10-02T00:00:00+00:00")
    assert last({**empty, "to": "2013-10-05T00:00:00Z"}, run) == "2013-10-05T00:00:00Z"


def test_a_run_by_hand_has_no_interval_and_estimates_everything() -> None:
    now = datetime(2020, 1, 1, tzinfo=UTC)
    for at in (now, None):
        run = SimpleNamespace(data_interval_start=at, data_interval_end=at)
        assert (first({"from": None}, run), last({"to": None}, run)) == ("", "")
