"""Kafka's brokers: their settings, the id and offsets of a topic, and a check that messages after a position exist.

The brokers are a setting of the machine, not of a model. KALMAN_KAFKA has the addresses of the brokers.
KALMAN_KAFKA_PROPERTIES may name a file with properties of Kafka's clients, such as the properties for TLS and SASL.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from py4j.protocol import Py4JJavaError

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.input_files import UnfitFile, read_secret_file
from jobs.core.redaction import register_secret, show_name
from jobs.storage.positions import is_same_if_known

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamReader

SERVERS, PROPERTIES = "KALMAN_KAFKA", "KALMAN_KAFKA_PROPERTIES"
_MOST_PROPERTIES = 64 * 1024
PATIENCE_MS = 20_000
"""Time limit of a request to the brokers."""

Offsets = dict[int, int]
"""Offset of the next message to process, by partition."""


ISOLATION, COMMITTED = "isolation.level", "read_committed"
"""The consumer property that hides messages of open and aborted transactions, and the value used here."""


class Bounds(NamedTuple):
    """Offsets of a partition: first message, end of the readable messages (`end`), and next message (`written`).

    Readers of committed messages cannot pass the first message of an open transaction. So while a transaction is open,
    `end` is before `written`.
    """

    first: int
    end: int
    written: int


class Topic(NamedTuple):
    """A topic: its name, the bounds of its partitions, and its id (None if the brokers do not report ids).

    A topic that was deleted and made anew has the same name, but another id, and offsets that begin at 0.
    """

    name: str
    id: str | None
    bounds: dict[int, Bounds]

    def reaches(self, offsets: Mapping[int, int]) -> bool:
        """Return whether the topic has these partitions up to these offsets; a topic made anew may be too short."""
        return all(
            number in self.bounds and self.bounds[number].written >= at for number, at in offsets.items()
        )


def read_client_properties() -> dict[str, str]:
    """Return the properties of Kafka's clients, from the environment and from the file of properties.

    Raises:
        UserError: no address is set, or the file of properties cannot be read.
    """
    servers = os.environ.get(SERVERS, "")
    if not servers:
        raise UserError(
            f"the addresses of Kafka's brokers are not set: set {SERVERS}, such as {SERVERS}=kafka1:9092,kafka2:9092"
        )
    return {**_read_properties_file(), "bootstrap.servers": servers}


def _read_properties_file() -> dict[str, str]:
    name = os.environ.get(PROPERTIES)
    if not name:
        return {}
    try:
        text = read_secret_file(Path(name), _MOST_PROPERTIES).decode()
    except (UnfitFile, OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or (
            "is not UTF-8 text" if isinstance(error, ValueError) else error
        )
        raise UserError(
            f"{PROPERTIES}: {show_name(name, 120)}: {why}; give the path of a file of Kafka's properties"
        ) from error
    lines = [line.strip() for line in text.splitlines()]
    pairs = [line.partition("=") for line in lines if line and line[0] not in "#!"]
    found = {key.strip(): value.strip() for key, _, value in pairs}
    for key, value in found.items():
        register_secret(key, value)
    return found


def build_spark_options() -> dict[str, str]:
    """Return Spark's options for reading and writing topics."""
    return {f"kafka.{name}": value for name, value in read_client_properties().items()}


def build_reading_options() -> dict[str, str]:
    """Return Spark's options for reading topics: committed messages only, unless the file of properties differs."""
    return {f"kafka.{ISOLATION}": COMMITTED, **build_spark_options()}


def stream_reader(spark: SparkSession, max_offsets: int | None) -> DataStreamReader:
    """Return a stream reader with the options for topics, without the topics and their starting offsets.

    max_offsets: maximum number of messages in a micro-batch; None means no limit.
    """
    stream = spark.readStream.format("kafka").option("failOnDataLoss", "true")
    # With these options, the reader waits a minute for a broker that restarts.
    stream = stream.option("fetchOffset.numRetries", 30).option("fetchOffset.retryIntervalMs", 2000)
    if max_offsets is not None:
        stream = stream.option("maxOffsetsPerTrigger", max_offsets)
    for name, value in build_reading_options().items():
        stream = stream.option(name, value)
    return stream


def read_topic(spark: SparkSession, name: str) -> Topic:
    """Return a topic's id and current bounds.

    Raises:
        UserError: the topic does not exist, or the brokers do not answer.
    """
    jvm: Any = spark._jvm
    spec, level = jvm.org.apache.kafka.clients.admin.OffsetSpec, jvm.org.apache.kafka.common.IsolationLevel
    committed = read_client_properties().get(ISOLATION, COMMITTED) == COMMITTED
    with open_admin(spark) as client:
        described = _answer(_request_descriptions(jvm, client, [name])[name], name)
        partitions = [int(one.partition()) for one in described.partitions()]
        found: list[dict[int, int]] = []
        for which, isolation in (
            (spec.earliest, level.READ_UNCOMMITTED),
            (spec.latest, level.READ_COMMITTED if committed else level.READ_UNCOMMITTED),
            (spec.latest, level.READ_UNCOMMITTED),
        ):
            request = jvm.java.util.HashMap()
            for number in partitions:
                request.put(jvm.org.apache.kafka.common.TopicPartition(name, number), which())
            options = jvm.org.apache.kafka.clients.admin.ListOffsetsOptions(isolation)
            answer = _answer(client.listOffsets(request, options).all(), name)
            found.append({int(e.getKey().partition()): int(e.getValue().offset()) for e in answer.entrySet()})
    bounds = {number: Bounds(*(one[number] for one in found)) for number in sorted(partitions)}
    return Topic(name, _parse_id(jvm, described), bounds)


def read_topic_id(spark: SparkSession, name: str) -> str | None:
    """Return a topic's id; None if the topic does not exist, or the brokers do not report ids.

    Raises:
        UserError: the brokers do not answer.
    """
    return read_topic_ids(spark, [name]).get(name)


def read_topic_ids(spark: SparkSession, names: Iterable[str]) -> dict[str, str | None]:
    """Return the id of each of the topics that exist; an id is None if the brokers do not report ids.

    Raises:
        UserError: the brokers do not answer.
    """
    with open_admin(spark) as client:
        return _read_ids(spark._jvm, client, names)


def list_topics(spark: SparkSession, pattern: str) -> list[str]:
    """Return the sorted names of the topics that a Java regular expression matches as a whole.

    Raises:
        UserError: the regular expression is not valid, or the brokers do not answer.
    """
    jvm: Any = spark._jvm
    try:
        compiled = jvm.java.util.regex.Pattern.compile(pattern)
    except Py4JJavaError as error:
        cause = str(error.java_exception.getMessage()).splitlines()[0]
        raise UserError(f"source.pattern: '{pattern}' is no regular expression of Java: {cause}") from error
    with open_admin(spark) as client:
        names = _answer(client.listTopics().names(), pattern)
    return sorted(str(name) for name in names if compiled.matcher(name).matches())


def _request_descriptions(jvm: Any, client: Any, names: Iterable[str]) -> Mapping[str, Any]:
    """Request the descriptions of all topics at once; return a future for each topic."""
    wanted = jvm.java.util.ArrayList()
    for name in names:
        wanted.add(name)
    return client.describeTopics(wanted).topicNameValues()


def _parse_id(jvm: Any, described: Any) -> str | None:
    found = described.topicId()
    return None if found.equals(jvm.org.apache.kafka.common.Uuid.ZERO_UUID) else str(found.toString())


def _read_ids(jvm: Any, client: Any, names: Iterable[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    wanted = list(names)
    answers = _request_descriptions(jvm, client, wanted)
    for name in wanted:
        try:
            found[name] = _parse_id(jvm, _answer(answers[name], name))
        except NoSuchTopic:
            continue
    return found


class TopicWatch:
    """Repeated check, with one open client, that a topic still has a known id.

    Spark notices a topic that was made anew only if the offsets go backwards. Spark does not notice if the new topic
    has grown past the former offsets by the next micro-batch. An id is never reused. So if the topic still has the
    known id after a micro-batch was read, the whole micro-batch came from the known topic.
    """

    def __init__(self, spark: SparkSession, name: str, known: str | None, way_out: str) -> None:
        self._spark, self._name, self._known, self._way_out = spark, name, known, way_out
        self._open = ExitStack()
        self._client: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def check(self) -> None:
        """Raise an error if the topic was made anew; do nothing if its id is unknown or the brokers do not answer.

        Raises:
            UserError: the topic was made anew.
        """
        if self._known is None:
            return
        if self._client is None:
            self._client = self._open.enter_context(open_admin(self._spark))
        try:
            now = _read_ids(self._spark._jvm, self._client, [self._name]).get(self._name)
        except UserError:  # Spark waits for brokers that do not answer, and the next micro-batch checks again
            return
        refuse_recreated(self._name, self._known, now, self._way_out)


@contextmanager
def open_admin(spark: SparkSession) -> Iterator[Any]:
    """Open Kafka's admin client.

    Raises:
        UserError: the addresses or properties are not valid.
    """
    jvm: Any = spark._jvm
    properties = jvm.java.util.Properties()
    limits = {"request.timeout.ms": f"{PATIENCE_MS // 2}", "default.api.timeout.ms": f"{PATIENCE_MS}"}
    for name, value in {**limits, **read_client_properties()}.items():
        properties.put(name, value)
    try:
        client = jvm.org.apache.kafka.clients.admin.AdminClient.create(properties)
    except Py4JJavaError as error:  # the host is unknown, or a property is not valid
        cause = str(error.java_exception.getCause() or error.java_exception).splitlines()[0]
        where = read_client_properties()["bootstrap.servers"]
        raise NoAnswer(f"no client can be made for Kafka at {where}: {cause}") from error
    try:
        yield client
    finally:
        client.close()


class NoAnswer(UserError):
    """The brokers do not answer, or no broker listens at the address."""


class NoSuchTopic(UserError):
    """The brokers have no topic with this name."""


def _answer(future: Any, topic: str) -> Any:
    try:
        return future.get()
    except Py4JJavaError as error:
        cause = str(error.java_exception)
        if "UnknownTopicOrPartition" in cause:
            raise NoSuchTopic(f"Kafka has no topic {topic}") from error
        where = read_client_properties()["bootstrap.servers"]
        raise NoAnswer(f"Kafka at {where} does not answer: {cause.splitlines()[0]}", RUN_FAILED) from error


def refuse_recreated(name: str, known: str | None, now: str | None, way_out: str) -> None:
    """Refuse a topic that was deleted and made anew, because its offsets belong to other messages.

    Args:
        name: name of the topic.
        known: id of the topic when the position was recorded; None if unknown.
        now: present id of the topic; None if unknown.
        way_out: sentence with the remedy, for the error message.

    Raises:
        UserError: the ids differ.
    """
    if not is_same_if_known(known, now):
        raise UserError(
            f"topic {name} was deleted and made anew (its id is {now} now, and was {known}), so the offsets of its "
            f"former messages mean nothing in it. Nothing was skipped. {way_out}",
        )


def refuse_lost(topic: Topic, needed: Mapping[int, int], what: str, way_out: str) -> None:
    """Refuse to resume from a position if the topic has lost the next messages or does not reach the position.

    Args:
        topic: present state of the topic.
        needed: offset of the next message to process, by partition.
        what: reader of the topic, such as "the stream of walk".
        way_out: sentence with the remedy for lost messages.

    Raises:
        UserError: messages are gone, and the error names them for each partition; or an earlier reader has read
            messages of a transaction that is still open.
    """
    problems, early = [], []
    for number, offset in sorted(needed.items()):
        held = topic.bounds.get(number)
        if held is None:
            problems.append(f"partition {number}, which was read up to offset {offset}, is gone")
        elif held.written < offset:
            problems.append(
                f"partition {number} ends at offset {held.written}, before {offset}: the topic was recreated"
            )
        elif held.first > offset:
            lost = held.first - offset
            problems.append(
                f"partition {number} begins at offset {held.first} now, so up to {lost:,} messages from {offset} on "
                f"are lost"
            )
        elif held.end < offset:
            early.append(f"partition {number} was read up to {offset}, and is committed up to {held.end}")
    if problems:
        raise UserError(
            f"{what} cannot resume from its position in topic {topic.name}: {'; '.join(problems)}. Nothing was "
            f"skipped. Keep messages longer (retention.ms). {way_out}",
            RUN_FAILED,
        )
    if early:
        raise UserError(
            f"{what} cannot resume from its position in topic {topic.name} yet: {'; '.join(early)}. It was read "
            f"without {ISOLATION}={COMMITTED} before, and a producer's transaction is still open. Start again when it "
            f"has ended (transaction.timeout.ms)",
            RUN_FAILED,
        )
