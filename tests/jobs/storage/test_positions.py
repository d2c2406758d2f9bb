"""Which of two positions has reached the other: a total order in a table, a partial one in a topic. No Spark."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.storage.positions import build_delta_position, build_topic_position, is_reached, rank

TABLE = "measurements/walk"


def at(*offsets: int, topic: str = "t", topic_id: str | None = None) -> dict[str, Any]:
    return build_topic_position(topic, dict(enumerate(offsets)), topic_id=topic_id)


@pytest.mark.parametrize(
    ("position", "wanted", "expected"),
    [
        (at(30, 10), at(30, 10), True),
        (at(31, 10), at(30, 10), True),
        (at(10, 30), at(30, 10), False),  # the same sum, another cut
        (at(99, 9), at(30, 10), False),  # a higher sum, and one partition lags
        (at(30), at(30, 0), True),  # nothing of the new partition is read on either side
        (at(30), at(30, 1), False),
        (at(30, 5), at(30), True),
        (at(30, topic="u"), at(30), False),
        (at(30, topic_id="A"), at(30, topic_id="A"), True),
        (at(99, topic_id="B"), at(30, topic_id="A"), False),  # the topic was made anew
        (at(30, topic_id="B"), at(30), True),  # an earlier release did not record the id
        (build_delta_position(TABLE, 7), build_delta_position(TABLE, 7, "t1"), True),
        (build_delta_position(TABLE, 6), build_delta_position(TABLE, 7), False),
        (build_delta_position(TABLE, 9, "t2"), build_delta_position(TABLE, 7, "t1"), False),
        (build_delta_position(TABLE, 9), at(7), False),
    ],
)
def test_reached(position: dict[str, Any], wanted: dict[str, Any], expected: bool) -> None:
    assert is_reached(position, wanted) is expected
    if expected and position["source"] == wanted["source"]:
        assert rank(position) >= rank(wanted)


def test_each_partition_counts_in_the_rank() -> None:
    assert rank(at(30, 10)) == 40 and rank(at()) == 0 and rank(build_delta_position(TABLE, 7)) == 7
    for further in (at(31, 10), at(30, 11), at(30, 10, 1)):
        assert is_reached(further, at(30, 10)) and rank(further) > rank(at(30, 10))
