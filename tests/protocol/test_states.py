"""Attempts at one micro-batch overwrite the files of its state in format 1. In format 2 they do not."""

from __future__ import annotations

from unittest import mock

import pytest

from tests.protocol import actors
from tests.protocol.explorer import Found, Turn, follow
from tests.protocol.scenarios import STATES, TAKEN_UP
from tests.protocol.scheduler import Deviation

pytestmark = pytest.mark.usefixtures("simulation")

BEFORE_THE_COMMIT = ("A/query", "create .*/commits/1")
"""Driver A, which has a local copy, has written the state of its second micro-batch."""

HISTORIES = {
    "a driver is killed after it uploaded a snapshot": [
        Turn(*BEFORE_THE_COMMIT, Deviation("run", "A/maintenance")),
        Turn(*BEFORE_THE_COMMIT, Deviation("crash", "A")),
    ],
    "a frozen driver wakes and uploads a snapshot": [
        Turn(*BEFORE_THE_COMMIT, Deviation("freeze", "A")),
        Turn(*BEFORE_THE_COMMIT, Deviation("run", "A/maintenance")),
    ],
    "a frozen driver wakes and writes its changelog": [
        Turn("A/query", r"write .*/state/0/0/2(_\w+)?\.changelog", Deviation("freeze", "A")),
    ],
}

histories = pytest.mark.parametrize(
    "turns", HISTORIES.values(), ids=[name.replace(" ", "-") for name in HISTORIES]
)


@histories
def test_with_format_1_rows_go_from_the_state(turns: list[Turn]) -> None:
    with mock.patch.object(actors, "stream", actors.former_stream), pytest.raises(Found) as found:
        follow(STATES, turns)
    print(f"\n{found.value}")
    assert "each row once in snapshot + state" in str(found.value.violation)


@histories
def test_with_format_2_no_row_goes(turns: list[Turn]) -> None:
    follow(STATES, turns)


@histories
def test_if_the_next_release_goes_on_with_format_1_rows_go_from_the_state(turns: list[Turn]) -> None:
    with mock.patch.object(actors, "stream", actors.former_stream), pytest.raises(Found) as found:
        follow(TAKEN_UP, turns)
    assert "each row once in snapshot + state" in str(found.value.violation)


@histories
def test_if_the_next_release_hands_the_state_over_no_row_goes(turns: list[Turn]) -> None:
    follow(TAKEN_UP, turns)
