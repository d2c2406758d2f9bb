"""What a topic's bounds and id say about a position in it. No broker."""

from __future__ import annotations

import re

import pytest

from jobs.core.errors import RUN_FAILED, UserError
from jobs.spark.kafka import (
    PROPERTIES,
    SERVERS,
    Bounds,
    Topic,
    build_reading_options,
    refuse_lost,
    refuse_recreated,
)

TOPIC = Topic("t", "A", {0: Bounds(10, 50, 60), 1: Bounds(0, 5, 5)})


@pytest.mark.parametrize(
    ("needed", "problem"),
    [
        ({0: 10, 1: 5}, None),
        ({0: 50}, None),
        ({0: 7}, "partition 0 begins at offset 10 now, so up to 3 messages from 7 on are lost.* GO ON"),
        ({1: 6}, "partition 1 ends at offset 5, before 6: the topic was recreated.* GO ON"),
        ({2: 6}, "partition 2, which was read up to offset 6, is gone.* GO ON"),
        # An earlier release has read messages of a transaction that is still open: nothing is lost.
        ({0: 55}, "yet: partition 0 was read up to 55, and is committed up to 50.* still open"),
    ],
)
def test_a_position_that_the_topic_does_not_continue_is_refused(
    needed: dict[int, int], problem: str | None
) -> None:
    if problem is None:
        refuse_lost(TOPIC, needed, "the stream of m", "GO ON")
        return
    with pytest.raises(UserError, match=problem) as error:
        refuse_lost(TOPIC, needed, "the stream of m", "GO ON")
    assert error.value.exit_code == RUN_FAILED


def test_only_a_topic_that_is_long_enough_may_be_the_one_of_a_position_without_an_id() -> None:
    assert TOPIC.reaches({0: 60, 1: 5}) and TOPIC.reaches({0: 1}) and TOPIC.reaches({})
    assert not TOPIC.reaches({0: 61}) and not TOPIC.reaches({2: 0})


def test_another_id_is_refused_and_an_unknown_one_is_not() -> None:
    for known, now in (("A", "A"), (None, "A"), ("A", None), (None, None)):
        refuse_recreated("t", known, now, "GO ON")
    with pytest.raises(UserError, match=re.escape("(its id is B now, and was A)") + ".* GO ON"):
        refuse_recreated("t", "A", "B", "GO ON")


def test_committed_messages_are_read_unless_the_properties_say_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv(SERVERS, "somewhere:9092")
    monkeypatch.delenv(PROPERTIES, raising=False)
    assert build_reading_options()["kafka.isolation.level"] == "read_committed"
    file = tmp_path_factory.mktemp("kafka-properties") / "client.properties"
    file.write_text("isolation.level=read_uncommitted\n")
    monkeypatch.setenv(PROPERTIES, str(file))
    assert build_reading_options()["kafka.isolation.level"] == "read_uncommitted"
