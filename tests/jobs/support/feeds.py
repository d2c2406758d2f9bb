"""Create topics of a real broker, and write and read their messages, through the Kafka client in Spark's JVM."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from jobs.spark import kafka

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Message(NamedTuple):
    """A message for a partition; a value or key of None is absent."""

    value: bytes | None
    partition: int = 0
    key: bytes | None = None


def spread(rows: pd.DataFrame) -> list[int]:
    """Return a partition, 0 or 1, for each row by its key, with similar numbers of rows at any time."""
    return [int("".join(filter(str.isdigit, str(key)))) % 2 for key in rows["id"]]


class Feed:
    """The topics of one broker; KALMAN_KAFKA must be set to its address."""

    def __init__(self, spark: SparkSession) -> None:
        self.spark = spark
        self.jvm: Any = spark._jvm

    def make(self, topic: str, partitions: int = 2, **settings: str) -> None:
        """Make a topic."""
        new = self.jvm.org.apache.kafka.clients.admin.NewTopic(topic, partitions, 1)
        configuration = self.jvm.java.util.HashMap()
        for name, value in settings.items():
            configuration.put(name.replace("_", "."), value)
        self._ask(lambda client, one: client.createTopics(one), new.configs(configuration))

    def remove(self, topic: str) -> None:
        """Remove a topic."""
        self._ask(lambda client, one: client.deleteTopics(one), topic)

    def grow(self, topic: str, partitions: int) -> None:
        """Give a topic more partitions."""
        wanted = self.jvm.java.util.HashMap()
        wanted.put(topic, self.jvm.org.apache.kafka.clients.admin.NewPartitions.increaseTo(partitions))
        with kafka.open_admin(self.spark) as client:
            client.createPartitions(wanted).all().get()

    def lose(self, topic: str, partition: int, before: int) -> None:
        """Delete the messages of a partition before an offset, as retention does."""
        wanted = self.jvm.java.util.HashMap()
        place = self.jvm.org.apache.kafka.common.TopicPartition(topic, partition)
        wanted.put(place, self._before(before))
        with kafka.open_admin(self.spark) as client:
            client.deleteRecords(wanted).all().get()

    def send(self, topic: str, messages: Iterable[Message]) -> None:
        """Send messages, and return once the broker has acknowledged them."""
        with self._producer() as producer:
            record = self.jvm.org.apache.kafka.clients.producer.ProducerRecord
            last = [producer.send(record(topic, one.partition, one.key, one.value)) for one in messages]
            producer.flush()
            for future in last[-1:]:
                future.get()

    @contextmanager
    def transaction(self, topic: str, messages: Iterable[Message], ends: str = "commit") -> Iterator[None]:
        """Send messages in a transaction that is open during the `with`, and then ends by `commit` or `abort`."""
        with self._producer({"transactional.id": f"tests-{topic}"}) as producer:
            producer.initTransactions()
            producer.beginTransaction()
            record = self.jvm.org.apache.kafka.clients.producer.ProducerRecord
            for one in messages:
                producer.send(record(topic, one.partition, one.key, one.value))
            producer.flush()
            yield
            producer.commitTransaction() if ends == "commit" else producer.abortTransaction()

    def read(self, topic: str) -> pd.DataFrame:
        """Return a topic's messages: key and value as text, partition, offset."""
        reader = self.spark.read.format("kafka").option("subscribe", topic)
        for name, value in kafka.build_spark_options().items():
            reader = reader.option(name, value)
        return (
            reader.load()
            .selectExpr("string(key) key", "string(value) value", "partition", "offset")
            .orderBy("partition", "offset")
            .toPandas()
        )

    def _before(self, offset: int) -> Any:
        # Py4J cannot distinguish this static method from the instance method of the same name.
        loader = self.jvm.java.lang.Thread.currentThread().getContextClassLoader()
        kind = loader.loadClass("org.apache.kafka.clients.admin.RecordsToDelete")
        gateway: Any = self.spark.sparkContext._gateway
        types = gateway.new_array(self.jvm.java.lang.Class, 1)
        types[0] = self.jvm.java.lang.Long.TYPE
        values = gateway.new_array(self.jvm.java.lang.Object, 1)
        values[0] = self.jvm.java.lang.Long.valueOf(offset)
        return kind.getMethod("beforeOffset", types).invoke(None, values)

    def _ask(self, what: Any, one: Any) -> None:
        some = self.jvm.java.util.ArrayList()
        some.add(one)
        with kafka.open_admin(self.spark) as client:
            what(client, some).all().get()

    @contextmanager
    def _producer(self, further: Mapping[str, str] = {}) -> Iterator[Any]:
        properties = self.jvm.java.util.Properties()
        coder = "org.apache.kafka.common.serialization.ByteArraySerializer"
        wanted = {"key.serializer": coder, "value.serializer": coder, "linger.ms": "5", "acks": "all"}
        for name, value in {**wanted, **further, **kafka.read_client_properties()}.items():
            properties.put(name, value)
        producer = self.jvm.org.apache.kafka.clients.producer.KafkaProducer(properties)
        try:
            yield producer
        finally:
            producer.close()


def as_json(rows: pd.DataFrame, partitions: Sequence[int]) -> list[Message]:
    """Return rows of a model as JSON messages for the given partitions."""
    messages = []
    for row, partition in zip(rows.to_dict("records"), partitions, strict=True):
        shown = {
            name: value.isoformat() if isinstance(value, pd.Timestamp) else None if value != value else value
            for name, value in row.items()
        }
        messages.append(Message(json.dumps(shown).encode(), int(partition)))
    return messages
