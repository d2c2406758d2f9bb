"""Models with an order or expiring keys on a topic of a real broker give the batch result."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from jobs import ingest
from jobs.core.errors import UserError
from jobs.lineage.live import latest_corrections
from jobs.storage.positions import find_landed_position
from tests.jobs.batch.test_new_keys import after, of_new_keys
from tests.jobs.landing.test_kafka import topic_spec
from tests.jobs.streaming.test_event_time_stream import between, delayed, newest
from tests.jobs.support.avro import encoded_long, encoded_text
from tests.jobs.support.feeds import Feed, Message, as_json, spread
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, ordered, random_rows, since

pytestmark = [pytest.mark.spark, pytest.mark.slow]

REACH = pd.Timedelta("16h")
"""Twice the rows' lateness, as two partitions are not read at the same pace."""
STRICT = {"order": {"kind": "strict", "delay": "16h"}}


@pytest.mark.parametrize(
    ("topic", "changes"),
    [("inorder", STRICT), ("ending", {**STRICT, "expiry": {"after": "20h"}})],
    ids=["strict", "expiry"],
)
def test_rows_wait_in_the_stream_of_a_topic(
    feed: Feed, tmp_path: Path, topic: str, changes: dict[str, Any]
) -> None:
    pipeline = Pipeline(tmp_path, topic_spec(topic, source={"max_offsets_per_batch": 120}, **changes))
    feed.make(topic)
    parts = delayed(random_rows(5, rows=120, text=True), 4)
    feed.send(topic, as_json(parts[0], spread(parts[0])))
    ingest.run(pipeline.settings, topic)
    pipeline.pretrain()
    for part in parts[1:]:
        feed.send(topic, as_json(part, spread(part)))
    done = pipeline.stream().data
    assert done["batches"] > 3 and done["late"] == 0
    ingest.run(pipeline.settings, topic)
    start, end = newest(parts[0]) - REACH, newest(*parts) - REACH
    assert_bit_equal(pipeline.estimates(), between(pipeline.batch(), start, end))
    if "expiry" in changes:
        archive = pipeline.warehouse.read(f"archive/{topic}")
        assert archive.count() == done["expired"] > 0


def test_late_rows_of_a_topic_are_replayed(feed: Feed, tmp_path: Path) -> None:
    spec = topic_spec("again", source={"max_offsets_per_batch": 120}, order={"kind": "replay", "rows": 12})
    pipeline = Pipeline(tmp_path, spec)
    feed.make("again")
    ingest.run(pipeline.settings, "again")
    pipeline.pretrain()
    parts = delayed(random_rows(4, rows=120, text=True), 3)
    for part in parts:
        feed.send("again", as_json(part, spread(part)))
    done = pipeline.stream().data
    assert (done["rows"], done["late"]) == (sum(map(len, parts)), 0) and done["corrected"] > 0
    ingest.run(pipeline.settings, "again")
    told = latest_corrections(pipeline.warehouse.read("estimates/again")).toPandas()
    assert_bit_equal(ordered(told), pipeline.batch())


def test_new_keys_are_imported_beside_a_topic(feed: Feed, tmp_path: Path) -> None:
    spec = topic_spec("joined")
    pipeline = Pipeline(tmp_path, {**spec, "stream": {**spec["stream"], "new_keys": "pretrained"}})
    feed.make("joined")
    days = random_rows(3, keys=20, rows=60)
    days = [day.assign(id=day["id"].astype(str)) for day in days]
    fresh = [day.assign(id=day["id"].astype(str)) for day in of_new_keys(random_rows(3, keys=20, rows=60))]
    feed.send("joined", as_json(days[0], spread(days[0])))
    ingest.run(pipeline.settings, "joined")
    pipeline.pretrain()
    feed.send("joined", [*as_json(days[1], spread(days[1])), Message(b"nope", 1)])
    assert pipeline.stream().data["rejected"] == 1
    pipeline.land(fresh[0], history=True)
    keys = fresh[0]["id"].nunique()
    assert pipeline.pretrain(history=True).data["keys_offered"] == keys
    feed.send("joined", as_json(days[2], spread(days[2])))
    feed.send("joined", [*as_json(fresh[2], spread(fresh[2])), Message(b"nope", 0)])
    done = pipeline.stream().data
    assert (done["keys_taken"], done["late"], done["rejected"]) == (keys, 0, 1)
    ingest.run(pipeline.settings, "joined")
    assert_bit_equal(pipeline.estimates(), after(pipeline.batch(), days[1], days[2], fresh[2]))

    # The landed offsets of one topic are not those of another.
    assert find_landed_position(pipeline.warehouse, "measurements/joined", "elsewhere") is None
    feed.make("elsewhere")
    pipeline.write_spec({**spec, "source": {**spec["source"], "topic": "elsewhere"}})
    with pytest.raises(
        UserError, match="has reached topic joined at .*, but the spec now reads topic elsewhere"
    ):
        ingest.run(pipeline.settings, "joined")


def test_avro_records_of_a_topic(feed: Feed, tmp_path: Path) -> None:
    number = ["null", "double"]
    fields = [
        {"name": "id", "type": "string"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "a", "type": number},
        {"name": "b", "type": number},
    ]
    schema = {"type": "record", "name": "reading", "fields": fields}
    source = {"format": "avro", "framing": "confluent", "avro_schema": schema}
    pipeline = Pipeline(tmp_path, topic_spec("records", source=source))
    feed.make("records")
    days = random_rows(2, rows=60, text=True)
    poison = [Message(b"\x00\x00\x00\x00\x07\x0chalf", 1), Message(b"", 0), Message(None, 0)]
    feed.send("records", [*as_avro(days[0], spread(days[0])), *poison])
    landed = ingest.run(pipeline.settings, "records").data
    assert (landed["rows"], landed["quarantined"]) == (len(days[0]), len(poison))
    pipeline.pretrain()
    feed.send("records", [*poison, *as_avro(days[1], spread(days[1]))])
    done = pipeline.stream().data
    assert (done["rows"], done["rejected"]) == (len(days[1]), len(poison))
    ingest.run(pipeline.settings, "records")
    # The same rows landed as a file are the oracle.
    plain = Pipeline(tmp_path / "plain", topic_spec("records", source={}) | {"source": None})
    plain.land(*days)
    assert_bit_equal(pipeline.estimates(), since(plain.batch(), days[1]))


def as_avro(rows: pd.DataFrame, partitions: list[int]) -> list[Message]:
    """Return rows as Avro records (specification 1.11, binary) after the five bytes of a schema registry."""

    def number(value: float) -> bytes:
        return encoded_long(0) if value != value else encoded_long(1) + struct.pack("<d", value)

    messages = []
    for row, partition in zip(rows.to_dict("records"), partitions, strict=True):
        at = encoded_long(int(row["at"].value // 1000))
        record = encoded_text(str(row["id"])) + at + number(row["a"]) + number(row["b"])
        messages.append(Message(b"\x00\x00\x00\x00\x07" + record, int(partition)))
    return messages
