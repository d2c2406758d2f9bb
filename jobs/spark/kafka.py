"""Speak to Kafka's brokers: how to reach them, what a topic holds now, and whether what is needed is still there.

Where the brokers are is a setting of the machine, not of a model: KALMAN_KAFKA has their addresses, and
KALMAN_KAFKA_PROPERTIES may name a file of Kafka's own client properties, such as those for TLS and SASL.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from py4j.protocol import Py4JJavaError

from jobs.core.errors import RUN_FAILED, UserError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SERVERS, PROPERTIES = "KALMAN_KAFKA", "KALMAN_KAFKA_PROPERTIES"
PATIENCE_MS = 20_000
"""How long a question to the brokers may take."""

Offsets = dict[int, int]
"""By partition, the offset of the first message that is not reflected yet."""


class Bounds(NamedTuple):
    """What a partition holds: the offset of its first message, and the one that its next will have."""

    first: int
    end: int


def client_properties() -> dict[str, str]:
    """Return the properties with which clients reach the brokers.

    Raises:
        UserError: no address is set, or the file of properties cannot be read.
    """
    servers = os.environ.get(SERVERS, "")
    if not servers:
        raise UserError(
            f"where Kafka is, is not known: set {SERVERS}, such as {SERVERS}=kafka1:9092,kafka2:9092"
        )
    return {**_file_of_properties(), "bootstrap.servers": servers}


def _file_of_properties() -> dict[str, str]:
    name = os.environ.get(PROPERTIES)
    if not name:
        return {}
    try:
        lines = [line.strip() for line in Path(name).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{PROPERTIES}: {name} cannot be read ({error})") from error
    pairs = [line.partition("=") for line in lines if line and line[0] not in "#!"]
    return {key.strip(): value.strip() for key, _, value in pairs}


def spark_options() -> dict[str, str]:
    """Return Spark's options for reading and writing topics."""
    return {f"kafka.{name}": value for name, value in client_properties().items()}


def bounds(spark: SparkSession, topic: str) -> dict[int, Bounds]:
    """Return what each partition of a topic holds now.

    Raises:
        UserError: there is no such topic, or the brokers do not answer.
    """
    jvm: Any = spark._jvm
    with admin(spark) as client:
        names = jvm.java.util.ArrayList()
        names.add(topic)
        described = _answer(client.describeTopics(names).allTopicNames(), topic).get(topic)
        partitions = [int(one.partition()) for one in described.partitions()]
        found: list[dict[int, int]] = []
        for which in (jvm.org.apache.kafka.clients.admin.OffsetSpec.earliest, None):
            spec = jvm.org.apache.kafka.clients.admin.OffsetSpec.latest if which is None else which
            asked = jvm.java.util.HashMap()
            for number in partitions:
                asked.put(jvm.org.apache.kafka.common.TopicPartition(topic, number), spec())
            answer = _answer(client.listOffsets(asked).all(), topic)
            found.append({int(e.getKey().partition()): int(e.getValue().offset()) for e in answer.entrySet()})
    first, end = found
    return {number: Bounds(first[number], end[number]) for number in sorted(partitions)}


@contextmanager
def admin(spark: SparkSession) -> Iterator[Any]:
    """Lend Kafka's admin client."""
    jvm: Any = spark._jvm
    properties = jvm.java.util.Properties()
    limits = {"request.timeout.ms": f"{PATIENCE_MS // 2}", "default.api.timeout.ms": f"{PATIENCE_MS}"}
    for name, value in {**limits, **client_properties()}.items():
        properties.put(name, value)
    client = jvm.org.apache.kafka.clients.admin.AdminClient.create(properties)
    try:
        yield client
    finally:
        client.close()


def _answer(future: Any, topic: str) -> Any:
    try:
        return future.get()
    except Py4JJavaError as error:
        said = str(error.java_exception)
        if "UnknownTopicOrPartition" in said:
            raise UserError(f"Kafka has no topic {topic}") from error
        where = client_properties()["bootstrap.servers"]
        raise UserError(f"Kafka at {where} does not answer: {said.splitlines()[0]}", RUN_FAILED) from error


def refuse_lost(topic: str, needed: Mapping[int, int], have: Mapping[int, Bounds], what: str) -> None:
    """Refuse to go on where a topic no longer has the messages behind a position.

    Args:
        topic: its name.
        needed: the offset of the next message, by partition.
        have: what the topic holds.
        what: needs them, such as "the stream of walk".

    Raises:
        UserError: it says of each partition which messages are gone.
    """
    problems = []
    for number, offset in sorted(needed.items()):
        held = have.get(number)
        if held is None:
            problems.append(f"partition {number} is gone, which was read up to offset {offset}")
        elif held.end < offset:
            problems.append(
                f"partition {number} ends at offset {held.end}, before {offset}: it was made anew"
            )
        elif held.first > offset:
            lost = held.first - offset
            problems.append(
                f"partition {number} begins at offset {held.first} now, so {lost:,} messages from {offset} on are lost"
            )
    if problems:
        raise UserError(
            f"{what} cannot go on from where it was in topic {topic}: {'; '.join(problems)}. Nothing was skipped. Keep "
            f"messages longer (retention.ms), and begin anew from what has landed: `ingest`, `pretrain`, `stream "
            f"--adopt`",
            RUN_FAILED,
        )


def starting(topic: str, offsets: Mapping[int, int], have: Mapping[int, Bounds]) -> str:
    """Return Spark's `startingOffsets`: a partition that is not in `offsets` is read from its beginning."""
    wanted = {str(number): offsets.get(number, held.first) for number, held in sorted(have.items())}
    return json.dumps({topic: wanted})
