"""Several topics, named or by a pattern, land once each; chosen partitions of one topic are streamed; real broker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.errors import PySparkException

from jobs import ingest, quarantine
from jobs.core.errors import UserError
from jobs.core.report import Report
from jobs.landing.sources import topics
from jobs.landing.sources.topics import TopicsReader
from jobs.landing.topics import TopicsStart
from jobs.spark import kafka
from jobs.spark.kafka import read_topic_id
from jobs.storage.tables import measurements
from tests.jobs.support.feeds import Feed, Message, as_json, spread
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, random_rows, random_walk_spec, since

pytestmark = pytest.mark.spark


def pipeline_of(folder: Path, **changes: Any) -> Pipeline:
    source = {"kind": "kafka", **changes.pop("source")}
    return Pipeline(folder, random_walk_spec(source=source, **changes))


def land(pipeline: Pipeline, **options: Any) -> Report:
    return ingest.run(pipeline.settings, "walk", **options)


def sent(feed: Feed, topic: str, rows: pd.DataFrame) -> None:
    feed.send(topic, as_json(rows, spread(rows)))


def places(pipeline: Pipeline) -> pd.DataFrame:
    columns = ["_topic", "_topic_id", "_partition", "_offset", "_origin"]
    return pipeline.warehouse.read(measurements("walk")).select(*columns).toPandas()


@pytest.mark.slow
def test_topics_that_match_a_pattern_land_once_and_those_that_come_and_go_are_told(
    feed: Feed, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pipeline = pipeline_of(tmp_path, source={"pattern": "plant-[a-z]+"})
    with pytest.raises(UserError, match=r"no topic that matches plant-\[a-z\]\+"):
        land(pipeline)
    days = random_rows(5, rows=60, text=True)
    for topic in ("plant-x", "plant-y", "plant-7", "my-plant-x"):
        feed.make(topic)
    sent(feed, "plant-x", days[0].iloc[::2])
    sent(feed, "plant-y", days[0].iloc[1::2])
    sent(feed, "plant-7", days[4])
    feed.send("plant-y", [Message(b"nope", 1)])
    first = land(pipeline)
    assert (first.data["rows"], first.data["quarantined"]) == (60, 1)
    assert land(pipeline).data["rows"] == 0
    pipeline.pretrain()

    # killed between the commit and Spark's note of it, with one more topic that has appeared meanwhile
    feed.make("plant-z")
    sent(feed, "plant-z", days[1])
    assert land(pipeline).data["rows"] == 60
    assert "note: topic plant-z is new: it lands from its beginning" in capfd.readouterr().err
    (checkpoint,) = (tmp_path / "warehouse" / "checkpoints").glob("ingest-walk-*")
    notes = sorted((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    notes[-1].unlink()
    notes[-1].with_name(f".{notes[-1].name}.crc").unlink(missing_ok=True)
    land(pipeline)
    found = places(pipeline)
    assert len(found) == 120 and not found.duplicated(["_topic", "_partition", "_offset"]).any()
    spark = pipeline.warehouse.spark
    ids = {name: read_topic_id(spark, name) for name in ("plant-x", "plant-y", "plant-z")}
    assert dict(zip(found["_topic"], found["_topic_id"], strict=True)) == ids
    assert set(found["_origin"].str.split("/").str[0]) == {f"kafka:{name}" for name in ids}

    # one disappears: told, and accepted
    feed.remove("plant-z")
    for _ in range(2):
        with pytest.raises(
            UserError, match="topic plant-z, which has landed up to 0:.* is gone.*--accept-loss"
        ):
            land(pipeline)
    assert land(pipeline, accept_loss=True).lines[0] == "topic plant-z is no longer read"
    # made anew, longer than before: its messages are other ones
    feed.remove("plant-y")
    feed.make("plant-y")
    sent(feed, "plant-y", pd.concat([days[2], days[3]]))
    with pytest.raises(UserError, match="topic plant-y was deleted and made anew"):
        land(pipeline)
    assert land(pipeline, accept_loss=True).data["rows"] == 120

    # the message that was refused came from the former topic; its place is no landed message's
    mended = random_walk_spec(source={"kind": "kafka", "pattern": "plant-[a-z]+"})
    pipeline.write_spec(mended)
    held = pipeline.warehouse.read("quarantine").collect()
    (position,) = (json.loads(row["position"]) for row in held)
    assert (position["topic"], position["topic_id"]) == ("plant-y", ids["plant-y"])
    row = {"id": "key 1", "at": "2024-04-01T00:00:00Z", "a": 1.0, "b": 2.0}
    edited = tmp_path / "edited.jsonl"
    quarantine.act(pipeline.settings, "show", "walk", output=str(edited))
    shown = json.loads(edited.read_text())
    edited.write_text(json.dumps({**shown, "payload": json.dumps(row)}))
    assert quarantine.act(pipeline.settings, "replay", "walk", edited=str(edited)).data["landed"] == 1

    pipeline.stream()
    assert_bit_equal(pipeline.estimates(), since(pipeline.batch(), days[1]))


def test_named_topics_begin_where_the_spec_says_and_a_new_name_is_read_from_its_beginning(
    feed: Feed, tmp_path: Path
) -> None:
    days = random_rows(3, rows=40, text=True)
    for topic in ("north", "south"):
        feed.make(topic)
        sent(feed, topic, days[0])
    pipeline = pipeline_of(
        tmp_path, source={"topics": ["north"], "start": "latest", "max_offsets_per_batch": 15}
    )
    assert land(pipeline).data["rows"] == 0
    sent(feed, "north", days[1])
    assert land(pipeline).data["rows"] == 40
    pipeline.write_spec(random_walk_spec(source={"kind": "kafka", "topics": ["north", "south"]}))
    assert land(pipeline).data["rows"] == 40
    pipeline.write_spec(random_walk_spec(source={"kind": "kafka", "topics": ["south"]}))
    with pytest.raises(UserError, match="topic north, which has landed up to .* is gone or no longer named"):
        land(pipeline)
    assert land(pipeline, accept_loss=True).lines[0] == "topic north is no longer read"
    feed.lose("south", 0, 5)
    assert land(pipeline).data["rows"] == 0  # what is gone has landed
    pipeline.write_spec(random_walk_spec(source={"kind": "kafka", "topics": ["south", "nowhere"]}))
    with pytest.raises(UserError, match="Kafka has no topic nowhere"):
        land(pipeline)


@pytest.mark.slow
def test_topics_of_brokers_without_ids_land_and_all_are_asked_for_in_one_request(
    feed: Feed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    days = random_rows(3, rows=40, text=True)
    for topic in ("no-id-a", "no-id-b"):
        feed.make(topic)
        sent(feed, topic, days[0])
    pipeline = pipeline_of(tmp_path, source={"topics": ["no-id-a", "no-id-b"]})
    pipeline_of_pattern = random_walk_spec(source={"kind": "kafka", "pattern": "no-id-[a-c]"})
    with monkeypatch.context() as patched:  # a broker of before topics had ids
        patched.setattr(kafka, "_parse_id", lambda jvm, described: None)
        assert land(pipeline).data["rows"] == 80
        feed.make("no-id-c")
        sent(feed, "no-id-c", days[1])
        pipeline.write_spec(pipeline_of_pattern)
        assert land(pipeline).data["rows"] == 40
        assert land(pipeline).data["rows"] == 0
    assert int(places(pipeline)["_topic_id"].notna().sum()) == 0
    # brokers that have ids now: what had none goes on, with them
    for topic in ("no-id-a", "no-id-c"):
        sent(feed, topic, days[2])
    opened: list[str] = []
    asked = kafka.read_topic_ids
    monkeypatch.setattr(
        topics, "read_topic_ids", lambda spark, names: opened.extend(names) or asked(spark, names)
    )
    clients: list[int] = []
    admin = kafka.open_admin
    monkeypatch.setattr(kafka, "open_admin", lambda spark: clients.append(len(opened)) or admin(spark))
    assert land(pipeline).data["rows"] == 80
    assert sorted(opened) == ["no-id-a", "no-id-b", "no-id-c"]
    assert clients.count(3) == 1  # of the micro-batch; those before are of the start
    ids = places(pipeline).groupby("_topic")["_topic_id"].nunique()
    assert ids.to_dict() == {"no-id-a": 1, "no-id-b": 0, "no-id-c": 1}


def test_brokers_that_do_not_answer_do_not_hide_why_a_landing_failed(
    feed: Feed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing listens at the address, or it is no host."""
    alone = pipeline_of(tmp_path, source={"topics": ["lost-a", "lost-b"]})
    start = TopicsStart({}, "checkpoints/ingest-walk-topics")
    reader = TopicsReader(alone.warehouse, alone.spec, start, {}, {"id": "string"})
    monkeypatch.setattr(kafka, "PATIENCE_MS", 1_000)
    for address, told in (
        ("localhost:1", "Kafka at localhost:1 does not answer"),
        ("no-such-host.invalid:9092", "no client can be made for Kafka at no-such-host.invalid:9092"),
    ):
        monkeypatch.setenv(kafka.SERVERS, address)
        said = reader.explain_error(PySparkException("the fetch failed"))
        assert "the fetch failed" in said and told in said


@pytest.mark.slow
def test_chosen_partitions_are_landed_and_streamed_and_one_that_was_read_stays(
    feed: Feed, tmp_path: Path
) -> None:
    feed.make("parts", 3)
    days = random_rows(3, rows=60, text=True)
    here = [as_json(day, [number % 3 for number in range(len(day))]) for day in days]
    source = {"kind": "kafka", "topic": "parts", "partitions": [0, 2]}
    pipeline = Pipeline(tmp_path, random_walk_spec(source=source))
    feed.send("parts", here[0])
    assert land(pipeline).data["offsets"] == {"0": 20, "2": 20}
    pipeline.pretrain()
    feed.send("parts", here[1])
    streamed = pipeline.stream().data
    assert (streamed["rows"], streamed["position"]["offsets"]) == (40, {"0": 40, "2": 40})
    pipeline.write_spec(random_walk_spec(source={**source, "partitions": [0]}))
    with pytest.raises(UserError, match="reads only partitions 0 now: put back partition 2"):
        pipeline.stream()
    pipeline.write_spec(random_walk_spec(source={**source, "partitions": [0, 2, 5]}))
    with pytest.raises(UserError, match="topic parts has no partition 5"):
        land(pipeline)
    # all: the one that was left out is read from its beginning
    pipeline.write_spec(random_walk_spec(source={"kind": "kafka", "topic": "parts"}, late="apply"))
    assert pipeline.stream().data["position"]["offsets"] == {"0": 40, "1": 40, "2": 40}
    assert land(pipeline).data["offsets"] == {"0": 40, "1": 40, "2": 40}
    assert not places(pipeline).duplicated(["_partition", "_offset"]).any() and len(places(pipeline)) == 120
