"""Inputs of keys with late rows, expiring keys and new keys, from a topic of a real broker."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from jobs import ingest
from jobs.core.errors import UserError
from jobs.lineage.live import latest_corrections
from tests.jobs.lineage.test_inputs import (
    GAUGES,
    KEYS,
    assert_same,
    by_hand,
    forget_the_last_commit,
    put,
    readings,
    since,
    table_of,
)
from tests.jobs.streaming.test_event_time_stream import delayed
from tests.jobs.support.feeds import Feed, Message, as_json
from tests.jobs.support.pipeline import Pipeline
from tests.jobs.support.processes import files

pytestmark = [pytest.mark.spark, pytest.mark.slow]

OLD, NEW = KEYS[:7], KEYS[7:]


def of_topic(topic: str, **changes: Any) -> dict[str, Any]:
    source = {"kind": "kafka", "topic": topic, "whole_keys": ["id"]}
    stream = {"partitions": 2, "keys_per_block": 4, **changes.pop("stream", {})}
    return {**GAUGES, "source": source, "stream": stream, **changes}


def messages(rows: pd.DataFrame) -> list[Message]:
    """Return rows as messages, those of a key in one of two partitions."""
    return as_json(rows, [number % 2 for number in rows["id"]])


def pinned(pipeline: Pipeline) -> dict[int, int]:
    """Return the version of the table that each micro-batch is pinned to."""
    pins = Path(pipeline.settings.warehouse, "checkpoints", "gauge-g0001", "inputs", "pins")
    return {
        int(name.removesuffix(".json")): json.loads((pins / name).read_text())["version"]
        for name in files(pins)
    }


def test_late_rows_are_replayed_with_the_inputs_that_they_arrived_with_and_keys_join(
    feed: Feed, tmp_path: Path
) -> None:
    order = {"kind": "replay", "rows": 40}
    pipeline = Pipeline(tmp_path, of_topic("gauges", order=order, stream={"new_keys": "pretrained"}))
    feed.make("gauges")
    days = [readings(day, OLD) for day in range(3)]
    first, second = table_of(OLD, 1), table_of(KEYS, 2)
    feed.send("gauges", messages(days[0]))
    ingest.run(pipeline.settings, "gauge")
    assert put(pipeline, first) == 0
    assert pipeline.pretrain().data["inputs"]["left_out"] == 0

    # Rows of a key without inputs are rejected; late rows of the first part come with the second one.
    parts = delayed(days[1:], 2)
    stranger = readings(1, NEW[:1], rows=5)
    feed.send("gauges", messages(pd.concat([parts[0], stranger])))
    done = pipeline.stream().data
    assert (done["rows"], done["without_inputs"], done["late"]) == (len(parts[0]), 5, 0)

    # Keys join: with a history, and with rows of the table.
    assert put(pipeline, second) == 1
    history = readings(0, NEW[1:], rows=30)
    pipeline.land(history, history=True)
    keys = len(history[["site", "id"]].drop_duplicates())
    offered = pipeline.pretrain(history=True).data
    assert offered["keys_offered"] == keys == len(NEW) - 1
    joined = readings(3, NEW, rows=30)
    feed.send("gauges", messages(pd.concat([parts[1], joined])))
    done = pipeline.stream().data
    assert (done["rows"], done["keys_taken"], done["without_inputs"]) == (len(parts[1]) + 30, keys, 0)
    assert done["corrected"] > 0 and done["late"] == 0
    assert pinned(pipeline) == {0: 0, 1: 1}
    expected = by_hand(
        [(days[0], first), (parts[0], first), (parts[1], second), (history, second), (joined, second)]
    )
    found = latest_corrections(pipeline.warehouse.read("estimates/gauge")).toPandas()
    assert_same(found, since(expected, days[1]))

    # Repeated, the last micro-batch uses the same version and adds nothing.
    put(pipeline, table_of(KEYS, 3))
    forget_the_last_commit(pipeline)
    pipeline.stream()
    assert pinned(pipeline) == {0: 0, 1: 1}
    assert_same(
        latest_corrections(pipeline.warehouse.read("estimates/gauge")).toPandas(), since(expected, days[1])
    )


def test_a_refused_micro_batch_takes_another_version_and_expired_keys_start_anew(
    feed: Feed, tmp_path: Path
) -> None:
    silence, delay = timedelta(hours=6), timedelta(minutes=30)
    changes = {"order": {"kind": "strict", "delay": "30min"}, "expiry": {"after": "6h"}}
    pipeline = Pipeline(tmp_path, of_topic("limited", **changes, quarantine={"fail_above": 0.5}))
    feed.make("limited")
    days = [readings(day, KEYS) for day in range(3)]
    first, second, third = (table_of(KEYS, seed) for seed in (1, 2, 3))
    feed.send("limited", messages(days[0]))
    ingest.run(pipeline.settings, "gauge")
    put(pipeline, first)
    pipeline.pretrain()

    # Most keys are missing: nothing is written, and the pin is removed, or every retry would be refused.
    few = {key: second[key] for key in KEYS[:2]}
    assert put(pipeline, few) == 1
    feed.send("limited", messages(days[1]))
    for _ in range(2):
        with pytest.raises(UserError, match="quarantine.fail_above"):
            pipeline.stream()
        assert pinned(pipeline) == {}
        assert not pipeline.warehouse.exists("estimates/gauge") or pipeline.estimates().empty
        assert (
            not pipeline.warehouse.exists("quarantine") or not pipeline.warehouse.read("quarantine").count()
        )
    assert put(pipeline, second) == 2
    done = [pipeline.stream().data]
    assert pinned(pipeline) == {0: 2}
    assert put(pipeline, third) == 3
    feed.send("limited", messages(days[2]))
    done.append(pipeline.stream().data)
    assert pinned(pipeline) == {0: 2, 1: 3}
    assert [(one["late"], one["without_inputs"]) for one in done] == [(0, 0), (0, 0)]

    # Waiting rows keep the inputs that they arrived with, over the hand-over and from micro-batch to micro-batch.
    expected = by_hand([(days[0], first), (days[1], second), (days[2], third)], silence)
    start, end = days[0]["at"].max() - delay, days[2]["at"].max() - delay
    inside = (expected["event_time"] >= start) & (expected["event_time"] < end)
    assert_same(pipeline.estimates(), expected.loc[inside])
    ended = pipeline.warehouse.read("archive/gauge").count()
    assert ended == sum(one["expired"] for one in done) > 0

    # Repeated with a table that would be refused, the last micro-batch keeps its version: part of it is written.
    put(pipeline, few)
    forget_the_last_commit(pipeline)
    pipeline.stream()
    assert pinned(pipeline) == {0: 2, 1: 3}
    assert_same(pipeline.estimates(), expected.loc[inside])
    assert pipeline.warehouse.read("archive/gauge").count() == ended
