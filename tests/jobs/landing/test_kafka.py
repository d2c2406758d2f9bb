"""A topic as the source: landed once, pretrained, and streamed from the exact offsets, on a real broker."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from demo.broker import Broker
from demo.ports import free_ports
from jobs import export, ingest
from jobs.core.errors import RUN_FAILED, UserError
from jobs.snapshots.manifests import read_manifests
from jobs.spark.kafka import read_topic_id
from tests.jobs.support.feeds import Feed, Message, as_json, spread
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, random_rows, random_walk_spec, since
from tests.jobs.support.processes import Driver, files

pytestmark = pytest.mark.spark

POISON = [
    (b"nope", "value: not a JSON object"),
    (b'{"id": "key 1", "at": "2024-03-01"} and more', "value: not a JSON object"),
    (b'{"id": "key \xff"}', "value: not UTF-8 text"),
    (None, "value: none (a tombstone)"),
    (b'{"at": "2024-03-01", "a": 1}', "key id: missing"),
    (b'{"id": 1.5, "at": "2024-03-01"}', "key id: not text or a whole number"),
    (b'{"id": "key 1", "at": "yesterday"}', "time at: not a time"),
    (b'{"id": "key 1", "at": "2024-03-01", "a": "many"}', "measurement a: not a number"),
    (b'{"id": "key 1", "at": "2024-03-01", "a": 1e999}', "measurement a: not finite"),
]


def topic_spec(topic: str, **changes: Any) -> dict[str, Any]:
    source = {"kind": "kafka", "topic": topic, **changes.pop("source", {})}
    return random_walk_spec(name=topic, source=source, **changes)


@pytest.mark.core
def test_history_lands_and_the_stream_starts_at_the_exact_offsets(feed: Feed, tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, topic_spec("exact", source={"max_offsets_per_batch": 150}))
    feed.make("exact")
    days = random_rows(4, rows=120, text=True)
    poison = [Message(value, number % 2) for number, (value, _) in enumerate(POISON)]
    first = [*as_json(days[0], spread(days[0])), *poison, *as_json(days[1], spread(days[1]))]
    feed.send("exact", first)

    landed = ingest.run(pipeline.settings, "exact").data
    assert (landed["rows"], landed["quarantined"]) == (240, len(POISON))
    assert landed["reasons"] == dict(pd.Series([reason for _, reason in POISON]).value_counts())
    assert sum(landed["offsets"].values()) == len(first)
    assert ingest.run(pipeline.settings, "exact").data["rows"] == 0
    table = pipeline.warehouse.read("measurements/exact").toPandas()
    assert len(table) == 240 and not table.duplicated(["_partition", "_offset"]).any()
    kept = pipeline.warehouse.read("quarantine").toPandas()
    places = [json.loads(position) for position in kept["position"]]
    assert sorted(kept["reason"]) == sorted(reason for _, reason in POISON)
    assert {place["topic"] for place in places} == {"exact"}
    texts = {b"" if value is None else value for value, _ in POISON}
    assert {("" if text is None else text) for text in kept["payload"]} == {
        text.decode("utf-8", "backslashreplace") for text in texts
    }

    pipeline.pretrain()
    (manifest,) = read_manifests(pipeline.warehouse, "exact")
    assert manifest.position["offsets"] == landed["offsets"]
    # More messages arrive that have not landed, unevenly in the partitions, with invalid ones between.
    later = [*as_json(days[2], spread(days[2])), *poison, *as_json(days[3], spread(days[3]))]
    for partition in (1, 0):
        feed.send("exact", [one for one in later if one.partition == partition])
    streamed = pipeline.stream().data
    assert (streamed["rows"], streamed["late"], streamed["rejected"]) == (240, 0, len(POISON))
    assert sum(streamed["position"]["offsets"].values()) == len(first) + len(later)
    rejected = pipeline.warehouse.read("quarantine").filter("generation is not null")
    by_reason = [row["reason"] for row in rejected.filter("reason not like 'late%'").collect()]
    assert sorted(by_reason) == sorted(reason for _, reason in POISON)

    # An export has the offsets of its micro-batch, and equals the batch result up to them.
    exported = export.run(pipeline.settings, "exact").data
    assert exported["position"]["offsets"] == streamed["position"]["offsets"]
    ingest.run(pipeline.settings, "exact")
    expected = pipeline.batch()
    assert_bit_equal(pipeline.estimates(), since(expected, days[2]))
    states = pipeline.snapshot(exported["snapshot"])
    last = expected.groupby("key").tail(1).sort_values("key", ignore_index=True)
    assert list(states["mean"].map(tuple)) == list(last["mean"])


def test_lost_messages_are_named_and_nothing_is_skipped(feed: Feed, tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, topic_spec("short"))
    feed.make("short")
    day = random_rows(1, text=True)[0]
    feed.send("short", as_json(day, [0] * len(day)))
    ingest.run(pipeline.settings, "short")
    pipeline.pretrain()
    feed.send("short", as_json(day, [0] * len(day)))
    feed.lose("short", 0, len(day) + 20)
    with pytest.raises(
        UserError, match=rf"partition 0 begins at offset {len(day) + 20} now, so up to 20 messages"
    ):
        pipeline.stream()
    with pytest.raises(UserError, match="up to 20 messages from 150 on are lost.*--accept-loss"):
        ingest.run(pipeline.settings, "short")
    left = ingest.run(pipeline.settings, "short", accept_loss=True)
    assert left.data["rows"] == len(day) - 20 and left.lines[0].startswith("up to 20 messages")
    with pytest.raises(UserError, match="Kafka has no topic nowhere"):
        other = Pipeline(tmp_path / "other", topic_spec("nowhere"))
        ingest.run(other.settings, "nowhere")


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0, 65])
def test_a_topic_without_a_leader_for_a_minute_loses_no_message(
    feed: Feed, broker: Broker, tmp_path: Path, seconds: int
) -> None:
    topic = f"crash{seconds}"
    pipeline = Pipeline(tmp_path, topic_spec(topic, source={"max_offsets_per_batch": 60}))
    feed.make(topic)
    days = random_rows(3, rows=120, text=True)
    feed.send(topic, as_json(days[0], spread(days[0])))
    ingest.run(pipeline.settings, topic)
    pipeline.pretrain()
    feed.send(topic, as_json(days[1], spread(days[1])))
    checkpoint = tmp_path / "warehouse" / "checkpoints" / f"{topic}-g0001"
    driver = Driver(pipeline, "stream", "--model", topic, "--trigger", "0.5")
    driver.wait_for(lambda: reached(checkpoint) > 120)
    broker.kill()
    try:
        time.sleep(seconds)
    finally:
        broker.start()
    feed.send(topic, as_json(days[2], spread(days[2])))
    driver.wait_for(lambda: reached(checkpoint) == 360)
    assert driver.terminate() == 0, driver.said()
    ingest.run(pipeline.settings, topic)
    assert_bit_equal(pipeline.estimates(), since(pipeline.batch(), days[1]))


@pytest.mark.slow
def test_a_broker_that_is_down_at_the_start_is_named_within_a_minute(
    feed: Feed, broker: Broker, tmp_path: Path
) -> None:
    pipeline = Pipeline(tmp_path, topic_spec("down"))
    feed.make("down")
    day = random_rows(1, text=True)[0]
    feed.send("down", as_json(day, spread(day)))
    ingest.run(pipeline.settings, "down")
    pipeline.pretrain()
    (port,) = free_ports(1)
    began = time.monotonic()
    for verb in ("stream", "ingest"):
        driver = Driver(pipeline, verb, "--model", "down", KALMAN_KAFKA=f"127.0.0.1:{port}")
        assert driver.finish() == RUN_FAILED, driver.said()
        (said,) = [line for line in driver.said().splitlines() if line.startswith("error: ")]
        assert f"127.0.0.1:{port}" in said and "Traceback" not in driver.said(), driver.said()
    assert time.monotonic() - began < 2 * 60


@pytest.mark.slow
def test_a_new_partition_is_read_from_its_beginning(feed: Feed, tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, topic_spec("grown", source={"message_key": "id", "start": "latest"}))
    feed.make("grown", 1)
    days = random_rows(3, rows=60, text=True)
    feed.send("grown", keyed(days[0], 0))
    assert ingest.run(pipeline.settings, "grown").data["rows"] == 0  # earlier messages are ignored
    feed.send("grown", keyed(days[1], 0))
    assert ingest.run(pipeline.settings, "grown").data["offsets"] == {"0": 120}
    pipeline.pretrain()
    feed.grow("grown", 2)
    known = days[1]["id"]
    new = days[2].loc[~days[2]["id"].isin(known)].reset_index(drop=True)
    feed.send("grown", [*keyed(new, 1), Message(b'{"at": "then"}', 1, b"key 1")])
    done = pipeline.stream().data
    assert (done["rows"], done["rejected"]) == (len(new), 1)
    assert done["position"]["offsets"] == {"0": 120, "1": len(new) + 1}
    (row,) = pipeline.warehouse.read("quarantine").collect()
    assert json.loads(row["payload"]) == {"id": "key 1", "at": "then"}
    place = {"topic": "grown", "partition": 1, "offset": len(new), "key": "key 1"}
    place["topic_id"] = read_topic_id(feed.spark, "grown")
    assert json.loads(row["position"]) == {**place, "generation": "grown-g0001", "batch_id": 0}


@pytest.mark.slow
def test_each_live_estimate_is_published_under_its_key(feed: Feed, tmp_path: Path) -> None:
    frames = random_rows(2, text=True)
    pipeline = Pipeline(tmp_path, random_walk_spec(sinks={"kafka": {"topic": "walked"}}))
    pipeline.land(frames[0])
    pipeline.pretrain()
    pipeline.land(frames[1])
    with pytest.raises(UserError, match="Kafka has no topic walked"):
        pipeline.stream()
    feed.make("walked")
    pipeline.stream()
    messages = feed.read("walked")
    values = pd.DataFrame([json.loads(value) for value in messages["value"]])
    assert list(values["key"]) == list(messages["key"]) and set(messages["partition"]) == {0, 1}
    assert len(messages[["key", "partition"]].drop_duplicates()) == messages["key"].nunique()
    assert all(times.is_monotonic_increasing for _, times in values.groupby("key")["event_time"])
    expected = pipeline.estimates()
    values["event_time"] = pd.to_datetime(values["event_time"]).dt.tz_localize(None).astype("datetime64[ns]")
    values["mean"] = values["mean"].map(tuple)
    found = values.sort_values(["key", "event_time", "log_likelihood", "mean"], ignore_index=True)
    expected["event_time"] = expected["event_time"].astype("datetime64[ns]")
    for name in ("key", "id", "event_time", "mean", "log_likelihood", "generation", "batch_id"):
        assert found[name].to_list() == expected[name].to_list(), name


def keyed(rows: pd.DataFrame, partition: int) -> list[Message]:
    """Return rows as messages with the key column as their key."""
    values = as_json(rows.drop(columns="id"), [partition] * len(rows))
    return [one._replace(key=key.encode()) for one, key in zip(values, rows["id"], strict=True)]


def reached(checkpoint: Path) -> int:
    """Return how many messages a stream's committed micro-batches and its snapshot have read."""
    last = max((int(name) for name in files(checkpoint / "commits")), default=None)
    if last is None:
        return 0
    (offsets,) = json.loads((checkpoint / "offsets" / str(last)).read_text().splitlines()[2]).values()
    return sum(offsets.values())
