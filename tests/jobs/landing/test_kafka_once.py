"""Each message of a topic counts once: replayed, aborted, compacted, or in a topic that was deleted and made anew."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import functions as F

from jobs import ingest, quarantine
from jobs.core.errors import UserError
from jobs.core.progress import Progress
from jobs.landing.rejected import replay
from jobs.landing.sources import topics
from jobs.lineage import generations, start_point
from jobs.lineage.generations import SHADOW, DeployedModel
from jobs.lineage.live import live_estimates
from jobs.snapshots import manifests
from jobs.spark.kafka import read_topic_id
from jobs.storage.positions import find_landed_position
from jobs.streaming.driver import Driver
from tests.jobs.landing.test_kafka import keyed, topic_spec
from tests.jobs.support.feeds import Feed, Message, as_json
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, random_rows, since

pytestmark = pytest.mark.spark

MENDED = {"missing_values": ["n/a"]}


def of_one_partition(rows: pd.DataFrame) -> list[Message]:
    return as_json(rows, [0] * len(rows))


def poison(rows: pd.DataFrame) -> Message:
    """Return a message with the last row's key and time that only a spec with `MENDED` accepts."""
    last = {"id": str(rows["id"].iloc[-1]), "at": rows["at"].iloc[-1].isoformat(), "a": "n/a", "b": 1.0}
    return Message(json.dumps(last).encode())


def replayed(pipeline: Pipeline) -> dict[str, Any]:
    return quarantine.act(pipeline.settings, "replay", pipeline.name).data


def landed(pipeline: Pipeline) -> pd.DataFrame:
    return pipeline.warehouse.read(f"measurements/{pipeline.name}").toPandas()


def fails(*args: Any, **options: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_a_message_that_several_readers_refused_lands_once_in_its_place(
    feed: Feed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = topic_spec("poison")
    pipeline = Pipeline(tmp_path, spec)
    feed.make("poison", 1)
    days = random_rows(2, rows=60, text=True)
    feed.send("poison", of_one_partition(days[0]))
    ingest.run(pipeline.settings, "poison")
    pipeline.pretrain()
    (manifest,) = manifests.read_manifests(pipeline.warehouse, "poison")
    live = start_point.begin(DeployedModel(pipeline.spec, pipeline.warehouse), manifest, None, None)
    parent = live.generation, -1
    shadow = start_point.begin(
        DeployedModel(pipeline.spec, pipeline.warehouse), manifest, parent, live, SHADOW
    )
    feed.send("poison", [poison(days[0])])
    assert pipeline.stream().data["rejected"] == 1
    assert pipeline.stream(generation=shadow.generation).data["rejected"] == 1

    # `ingest` has not read it, and will land it by itself: a replay would land it a second time.
    pipeline.write_spec({**spec, **MENDED})
    ahead = replayed(pipeline)
    assert (ahead["landed"], ahead["copies"], ahead["reasons"]) == (0, 0, {replay.AHEAD: 2})
    pipeline.write_spec(spec)
    assert ingest.run(pipeline.settings, "poison").data["quarantined"] == 1

    pipeline.write_spec({**spec, **MENDED})
    with monkeypatch.context() as patch:
        patch.setattr(replay, "mark_replayed", fails)
        with pytest.raises(KeyboardInterrupt):
            replayed(pipeline)
    done = replayed(pipeline)
    assert (done["landed"], done["landed_of_interrupted"], done["stay"]) == (0, 1, 0)
    rows = landed(pipeline)
    assert len(rows) == 61 and not rows.duplicated(["_topic", "_topic_id", "_partition", "_offset"]).any()
    place = rows.loc[rows["_offset"] == 60, ["_topic", "_topic_id", "_partition"]].values.tolist()
    assert place == [["poison", read_topic_id(feed.spark, "poison"), 0]]

    # A message that has landed by another way is marked, and does not land.
    refused = pipeline.warehouse.read("quarantine").filter("generation IS NULL")
    held = refused.withColumns({"id": F.lit("again"), "status": F.lit(None).cast("string")})
    pipeline.warehouse.append(held, "quarantine")
    again = replayed(pipeline)
    assert (again["landed"], again["copies"], len(landed(pipeline))) == (0, 1, 61)
    assert {row["status"] for row in pipeline.warehouse.read("quarantine").collect()} == {"replayed"}


class Hooked(Progress):
    """A display of progress that calls a function after the first micro-batch."""

    def __init__(self, after: Callable[[], None]) -> None:
        super().__init__("stream", None, quiet=True)
        self._after = [after]

    def advance(self, *args: Any) -> None:
        if self._after:
            self._after.pop()()


@pytest.mark.slow
def test_a_topic_that_was_made_anew_is_refused_at_each_start_and_while_it_is_read(
    feed: Feed, tmp_path: Path
) -> None:
    spec = topic_spec("anew", source={"max_offsets_per_batch": 60})
    pipeline = Pipeline(tmp_path, spec)
    warehouse, days = pipeline.warehouse, random_rows(4, rows=60, text=True)
    later = [*of_one_partition(days[1]), *of_one_partition(days[2])]

    def make_anew(times: int = 2) -> None:
        """Delete the topic and make it anew, with more messages than any position says."""
        feed.remove("anew")
        wait_until(lambda: read_topic_id(feed.spark, "anew") is None)
        feed.make("anew", 1)
        feed.send("anew", later * times)

    feed.make("anew", 1)
    feed.send("anew", of_one_partition(days[0]))
    ingest.run(pipeline.settings, "anew")
    first = read_topic_id(feed.spark, "anew")
    landing = find_landed_position(warehouse, "measurements/anew", "anew")
    assert first is not None and landing is not None and landing["topic_id"] == first
    pipeline.pretrain()
    (manifest,) = manifests.read_manifests(warehouse, "anew")
    assert manifest.position["topic_id"] == first
    # A generation of an earlier release does not know the id: its next driver adopts the present one.
    made = start_point.begin(DeployedModel(pipeline.spec, warehouse), manifest, None, None)
    unknown = {name: value for name, value in manifest.position.items() if name != "topic_id"}
    generations.update(warehouse, {"model": "anew"}, {"start_position": json.dumps(unknown)})
    feed.send("anew", later)
    stream = Driver(pipeline.settings, DeployedModel(pipeline.spec, warehouse), None, threading.Event())
    stream.display = lambda _: Hooked(make_anew)
    with pytest.raises(UserError, match=f"topic anew was deleted and made anew .* and was {first}"):
        stream.drive()
    assert generations.read_named(warehouse, "anew", made.generation).start_position["topic_id"] == first
    assert len(pipeline.estimates()) == 60

    with pytest.raises(UserError, match=r"made anew since .*--accept-loss"):
        pipeline.stream()
    with pytest.raises(UserError, match=r"made anew .*--accept-loss"):
        ingest.run(pipeline.settings, "anew")
    assert len(landed(pipeline)) == 60
    pipeline.write_spec(topic_spec("anew"))
    report = ingest.run(pipeline.settings, "anew", accept_loss=True)
    assert report.data["rows"] == 240 and "made anew" in report.lines[0]

    # `ingest` notices it while it lands, too.
    feed.send("anew", later)
    after = [make_anew]
    pipeline.write_spec(spec)
    with pytest.raises(UserError, match="made anew"):
        topics.land_present(warehouse, pipeline.spec, on_progress=lambda _: after.pop()(4) if after else None)
    assert len(landed(pipeline)) == 60 + 240 + 60
    pipeline.write_spec(topic_spec("anew"))
    assert ingest.run(pipeline.settings, "anew", accept_loss=True).data["rows"] == 480
    assert ingest.run(pipeline.settings, "anew", accept_loss=True).data["rows"] == 0
    assert not landed(pipeline).duplicated(["_topic_id", "_offset"]).any()

    snapshot = pipeline.pretrain().data["snapshot"]
    with pytest.raises(UserError, match="made anew since"):
        pipeline.stream(adopt=manifest.snapshot_id)
    feed.send("anew", of_one_partition(days[3]))
    with pytest.raises(
        UserError, match="reads another table or topic, or one that was made anew.*--allow-missing"
    ):
        pipeline.stream(adopt=snapshot)
    adopted = pipeline.stream(adopt=snapshot, allow_missing_estimates=True).data
    assert (adopted["rows"], adopted["position"]["offsets"]) == (60, {"0": 540})
    assert live_estimates(warehouse, "anew").count() == 60 + 60  # of the first topic, and of the last
    ingest.run(pipeline.settings, "anew")
    assert len(landed(pipeline)) == 60 + 240 + 60 + 480 + 60


@pytest.mark.slow
def test_aborted_messages_and_the_gaps_of_markers_are_not_read(feed: Feed, tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, topic_spec("sure", source={"max_offsets_per_batch": 50}))
    feed.make("sure", 1)
    days = random_rows(3, rows=60, text=True)
    with feed.transaction("sure", of_one_partition(days[0])):
        pass
    first = ingest.run(pipeline.settings, "sure").data
    assert (first["rows"], first["offsets"]) == (60, {"0": 61})  # a transaction ends with a marker
    pipeline.pretrain()
    for end in ("abort", "commit"):
        with feed.transaction("sure", of_one_partition(days[1]), end):
            pass
    with feed.transaction("sure", of_one_partition(days[2])):
        streamed = pipeline.stream().data
        assert (streamed["rows"], streamed["position"]["offsets"]) == (60, {"0": 183})
    with feed.transaction("sure", of_one_partition(days[1]), "abort"):
        pass
    streamed = pipeline.stream().data  # the last messages were aborted
    assert (streamed["rows"], streamed["late"], streamed["position"]["offsets"]) == (60, 0, {"0": 305})
    assert ingest.run(pipeline.settings, "sure").data["rows"] == 120
    assert_bit_equal(pipeline.estimates(), since(pipeline.batch(), days[1]))


@pytest.mark.slow
def test_the_gaps_of_a_compacted_topic_lose_and_count_nothing(feed: Feed, tmp_path: Path) -> None:
    source = {"message_key": "id", "max_offsets_per_batch": 50}
    pipeline = Pipeline(tmp_path, topic_spec("compact", source=source))
    settings = {"cleanup_policy": "compact", "segment_ms": "100", "min_cleanable_dirty_ratio": "0.01"}
    feed.make("compact", 1, **settings, max_compaction_lag_ms="200")
    ingest.run(pipeline.settings, "compact")
    pipeline.pretrain()
    for day in random_rows(3, rows=60, text=True):
        feed.send("compact", keyed(day, 0))
        time.sleep(0.3)  # a segment that is written to is not compacted
    wait_until(lambda: len(feed.read("compact")) < 120)
    time.sleep(2)
    left = feed.read("compact")
    streamed = pipeline.stream().data
    assert (streamed["rows"], streamed["rejected"]) == (len(left), 0)
    assert streamed["position"]["offsets"] == {"0": 180}
    assert ingest.run(pipeline.settings, "compact").data["rows"] == len(left)
    assert sorted(landed(pipeline)["_offset"]) == sorted(left["offset"])


def wait_until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)
