"""The feed of the Kafka demo: readings of devices and poison messages, sent to a topic chunk by chunk.

`python -m demo.kafka_feed TOPIC` sends each line of standard input as a message, to try a topic.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from jobs.core.errors import show
from jobs.spark import kafka

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEVICES = 400
START = datetime(2024, 6, 1, tzinfo=UTC)
POISON = ("nope", '{"device": "device 1"', '{"device": "device 1", "at": "soon", "value": 1}', "[1, 2]", None)


class Chunk(NamedTuple):
    """Messages to send: their partitions, values (JSON, or invalid JSON), and the number of poison messages."""

    frame: pd.DataFrame
    poison: int


def make_topic(spark: SparkSession, topic: str, partitions: int = 2) -> None:
    """Make a topic."""
    jvm: Any = spark._jvm
    wanted = jvm.java.util.ArrayList()
    wanted.add(jvm.org.apache.kafka.clients.admin.NewTopic(topic, partitions, 1))
    with kafka.open_admin(spark) as client:
        client.createTopics(wanted).all().get()


def chunks(history: int, streamed: int, minutes: int, seed: int) -> list[Chunk]:
    """Return chunks of the devices' readings, a reading of each device a minute, with one in 200 messages poison.

    After the history the devices of partition 1 are a chunk ahead of those of partition 0, as if one of two gateways
    had been cut off for a while: there is one more chunk than readings of both partitions.
    """
    count = history + streamed
    rng = np.random.default_rng(seed)
    total = count * minutes
    level = np.cumsum(rng.normal(0.0, 0.5, (DEVICES, total)), axis=1) + rng.normal(20.0, 5.0, (DEVICES, 1))
    value = level + rng.normal(0.0, 1.0, level.shape)
    made = []
    for number in range(count + 1):
        behind = number - 1 if number > history else number if number < history else None
        parts = [_messages(value, partition, at, minutes) for partition, at in enumerate((behind, number))]
        frame = pd.concat([part for part in parts if part is not None], ignore_index=True)
        bad = max(1, len(frame) // 200)
        poison = [POISON[i % len(POISON)] for i in range(bad)]
        extra = pd.DataFrame({"value": poison, "partition": np.arange(bad, dtype=np.int32) % 2})
        places = np.sort(rng.choice(len(frame), bad, replace=False)) + 0.5
        frame = pd.concat([frame, extra.set_index(places)]).sort_index(kind="stable", ignore_index=True)
        made.append(Chunk(frame.astype({"partition": np.int32}), bad))
    return made


def _messages(value: np.ndarray, partition: int, chunk: int | None, minutes: int) -> pd.DataFrame | None:
    """Return the readings of one partition's devices in one chunk; None if the chunk does not exist."""
    if chunk is None or not 0 <= chunk < value.shape[1] // minutes:
        return None
    devices = np.arange(partition, len(value), 2)
    texts = [
        json.dumps({"device": f"device {device}", "at": at, "value": round(float(value[device, minute]), 4)})
        for minute in range(chunk * minutes, (chunk + 1) * minutes)
        for at in [(START + timedelta(minutes=minute)).isoformat()]
        for device in devices.tolist()
    ]
    return pd.DataFrame({"value": texts, "partition": np.int32(partition)})


def send(spark: SparkSession, topic: str, chunk: Chunk) -> int:
    """Send a chunk, each partition's messages in order, and return their number."""
    frame = spark.createDataFrame(chunk.frame, "value string, partition int").coalesce(1)
    writer = frame.write.format("kafka").option("topic", topic)
    for name, value in kafka.build_spark_options().items():
        writer = writer.option(name, value)
    writer.save()
    return len(chunk.frame)


def read(spark: SparkSession, topic: str) -> pd.DataFrame:
    """Return the key and the value, as text, of each message of a topic."""
    reader = spark.read.format("kafka").option("subscribe", topic)
    for name, value in kafka.build_spark_options().items():
        reader = reader.option(name, value)
    return reader.load().selectExpr("string(key) key", "string(value) value").toPandas()


def send_lines(spark: SparkSession, topic: str, lines: list[str]) -> int:
    """Send lines to the first partition of a topic, in order, and return their number. A missing topic is created with
    one partition.
    """
    with kafka.open_admin(spark) as client:
        there = client.listTopics().names().get().contains(topic)
    if not there:
        make_topic(spark, topic, partitions=1)
    return send(spark, topic, Chunk(pd.DataFrame({"value": lines, "partition": np.int32(0)}), 0))


def main() -> int:
    """Send standard input from the command line and return the exit code."""
    from jobs.core.settings import Settings
    from jobs.spark.session import spark_session

    parser = argparse.ArgumentParser(
        "python -m demo.kafka_feed", description="Send each line of standard input as a message."
    )
    parser.add_argument("topic", help="made with one partition if it is not there")
    topic = parser.parse_args().topic
    try:
        kafka.read_client_properties()  # before Spark, which takes seconds
        lines = sys.stdin.read().splitlines()
        spark = spark_session(Settings.load(quiet=True), "feed", kafka=True)
        print(f"sent {send_lines(spark, topic, lines):,} messages to {topic}")
    except (Exception, KeyboardInterrupt) as error:
        return show(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
