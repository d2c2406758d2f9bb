"""Kafka's brokers: how to reach them, the offsets of a topic, and whether it still has the messages of a position.

The brokers are a setting of the machine, not of a model: KALMAN_KAFKA has their addresses, and KALMAN_KAFKA_PROPERTIES
may name a file of Kafka's own client properties, such as those for TLS and SASL.
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
"""How long a request to the brokers may take."""

Offsets = dict[int, int]
"""By partition, the offset of the next message to process."""


class Bounds(NamedTuple):
    """The offsets of a partition: of its first message, and of the next one that it will get."""

    first: int
    end: int


def client_properties() -> dict[str, str]:
    """Return the properties of Kafka's clients.

    Raises:
        UserError: no address is set, or the file of properties cannot be read.
    """
    servers = os.environ.get(SERVERS, "")
    if not servers:
        raise UserError(
            f"the addresses of Kafka's brokers are not set: set {SERVERS}, such as {SERVERS}=kafka1:9092,kafka2:9092"
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
    """Return the current bounds of each partition of a topic.

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
            request = jvm.java.util.HashMap()
            for number in partitions:
                request.put(jvm.org.apache.kafka.common.TopicPartition(topic, number), spec())
            answer = _answer(client.listOffsets(request).all(), topic)
            found.append({int(e.getKey().partition()): int(e.getValue().offset()) for e in answer.entrySet()})
    first, end = found
    return {number: Bounds(first[number], end[number]) for number in sorted(partitions)}


@contextmanager
def admin(spark: SparkSession) -> Iterator[Any]:
    """Open Kafka's admin client."""
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
        cause = str(error.java_exception)
        if "UnknownTopicOrPartition" in cause:
            raise UserError(f"Kafka has no topic {topic}") from error
        where = client_properties()["bootstrap.servers"]
        raise UserError(f"Kafka at {where} does not answer: {cause.splitlines()[0]}", RUN_FAILED) from error


def refuse_lost(topic: str, needed: Mapping[int, int], have: Mapping[int, Bounds], what: str) -> None:
    """Refuse to resume from a position if the topic no longer has the messages after it.

    Args:
        topic: its name.
        needed: the offset of the next message, by partition.
        have: the topic's bounds, by partition.
        what: the reader of the topic, such as "the stream of walk".

    Raises:
        UserError: messages are gone; it names them for each partition.
    """
    problems = []
    for number, offset in sorted(needed.items()):
        held = have.get(number)
        if held is None:
            problems.append(f"partition {number}, which was read up to offset {offset}, is gone")
        elif held.end < offset:
            problems.append(
                f"partition {number} ends at offset {held.end}, before {offset}: the topic was recreated"
            )
        elif held.first > offset:
            lost = held.first - offset
            problems.append(
                f"partition {number} begins at offset {held.first} now, so {lost:,} messages from {offset} on are lost"
            )
    if problems:
        raise UserError(
            f"{what} cannot resume from its position in topic {topic}: {'; '.join(problems)}. Nothing was skipped. "
            f"Keep messages longer (retention.ms), and start again from the landed rows: `ingest`, `pretrain`, `stream "
            f"--adopt`",
            RUN_FAILED,
        )


def starting(topic: str, offsets: Mapping[int, int], have: Mapping[int, Bounds]) -> str:
    """Return Spark's `startingOffsets`; a partition without an offset is read from its beginning."""
    wanted = {str(number): offsets.get(number, held.first) for number, held in sorted(have.items())}
    return json.dumps({topic: wanted})
