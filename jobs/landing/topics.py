"""Read Kafka topics as streams of checked rows, from the landed position or from the start of the topics."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.report import suggest_new_start
from jobs.landing.messages import read_checked_messages
from jobs.landing.target_table import record_start
from jobs.lineage import generations
from jobs.spark.kafka import (
    Offsets,
    Topic,
    TopicWatch,
    is_same_if_known,
    list_topics,
    read_topic,
    refuse_lost,
    refuse_recreated,
    stream_reader,
)
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.specs.source import Source
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.measurements_table import KeyTypes
from jobs.storage.positions import build_topic_position, describe, find_newest_landing, parse_offsets
from jobs.storage.tables import measurements

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from jobs.lineage.generations import Generation


class LandedTopic(NamedTuple):
    """Landed position of one topic: the topic's id, or None if unknown, and the next offset of each partition."""

    id: str | None
    offsets: Offsets

    def __str__(self) -> str:
        return ", ".join(f"{number}:{offset}" for number, offset in sorted(self.offsets.items()))


class TopicsStart(NamedTuple):
    """Landed positions of topics, by name, and the name of the checkpoint of the query that lands them."""

    topics: dict[str, LandedTopic]
    checkpoint: str

    def position(self, topic: str) -> dict[str, Any]:
        """Return the landed position of a topic in the same form as the position of a stream."""
        return build_topic_position(topic, self.topics[topic].offsets, topic_id=self.topics[topic].id)

    def detail(self, source: Source) -> dict[str, Any]:
        """Return the commit metadata that record these positions."""
        if source.streamed:
            position = self.position(source.topic)
            del position["source"]
            return {**position, "checkpoint": self.checkpoint}
        places = {
            name: {"id": one.id, "offsets": {str(number): at for number, at in sorted(one.offsets.items())}}
            for name, one in sorted(self.topics.items())
        }
        return {"topics": places, "checkpoint": self.checkpoint}


def require_source(spec: ModelSpec) -> Source:
    """Return the streamed source of a spec.

    Raises:
        UserError: the spec has no streamed source, although a generation of the model reads a topic.
    """
    if spec.streamed_source is None:
        raise UserError(
            f"the stream of {spec.name} reads a topic, but its spec no longer has a `source`: restore it, or "
            f"start anew: {suggest_new_start(spec.name)}"
        )
    return spec.streamed_source


def read_source_topic(spark: SparkSession, source: Source) -> Topic:
    """Return the topic of a source, with only the partitions that the source names, or with all partitions.

    Raises:
        UserError: the topic or a named partition does not exist, or the brokers do not answer.
    """
    topic = read_topic(spark, source.topic)
    absent = [number for number in source.partitions if number not in topic.bounds]
    if absent:
        raise UserError(
            f"topic {topic.name} has no partition {', '.join(map(str, absent))}, which source.partitions names: it has "
            f"{', '.join(map(str, topic.bounds))}"
        )
    chosen = source.partitions or topic.bounds
    return topic._replace(bounds={number: held for number, held in topic.bounds.items() if number in chosen})


def read_source_topics(spark: SparkSession, source: Source) -> dict[str, Topic]:
    """Return the existing topics of a source, by name.

    Raises:
        UserError: a listed topic or partition does not exist, or the brokers do not answer.
    """
    if source.streamed:
        return {source.topic: read_source_topic(spark, source)}
    names = list_topics(spark, source.pattern) if source.pattern else source.topics
    return {name: read_topic(spark, name) for name in sorted(names)}


def start_of(warehouse: Warehouse, spec: ModelSpec, have: Mapping[str, Topic]) -> TopicsStart:
    """Return the position where the landing continues.

    The first landing begins at `source.start`, and this position is committed. If the last landing recorded no id for
    a topic, the present id of the topic is also committed, unless the offsets show that the topic was recreated.
    """
    found = _find_newest(warehouse, spec)
    if found is None:
        return _record(warehouse, spec, _find_first_offsets(spec, have), _name_checkpoint(spec))
    topics = {
        name: one._replace(id=have[name].id)
        if one.id is None and name in have and have[name].reaches(one.offsets)
        else one
        for name, one in found.topics.items()
    }
    return found if topics == found.topics else _record(warehouse, spec, topics, found.checkpoint)


def refuse_gaps(spec: ModelSpec, start: TopicsStart, have: Mapping[str, Topic]) -> None:
    """Check that each topic continues at its landed position.

    Raises:
        UserError: a topic was deleted, was recreated, or has lost messages.
    """
    for name, known in start.topics.items():
        if name not in have:
            raise UserError(
                f"topic {name}, which has landed up to {known}, is gone or no longer named by source; messages after "
                f"that will not land. Nothing was skipped. {suggest_topic_restart(spec)}",
                RUN_FAILED,
            )
        refuse_recreated(name, known.id, have[name].id, suggest_topic_restart(spec))
        refuse_lost(have[name], known.offsets, f"`ingest --model {spec.name}`", suggest_topic_restart(spec))


def accept_loss(warehouse: Warehouse, spec: ModelSpec, have: Mapping[str, Topic]) -> str | None:
    """Restart the landing at the topics' present messages if a topic was deleted or recreated, or has lost messages.

    Returns:
        A text that names the topics that were deleted, recreated or have lost messages; None if there are none.
    """
    found = _find_newest(warehouse, spec)
    if found is None:
        return None
    said: list[str] = []
    begin: dict[str, LandedTopic] = {}
    first = _find_first_offsets(spec, have)
    for name, known in found.topics.items():
        if name not in have:
            said.append(f"topic {name} is no longer read")
            continue
        topic = have[name]
        if not is_same_if_known(known.id, topic.id) or not topic.reaches(known.offsets):
            begin[name] = first[name]
            said.append(
                f"topic {name} was made anew: it is landed from {begin[name]}; what the former one had left is lost"
            )
            continue
        offsets = {number: max(at, topic.bounds[number].first) for number, at in known.offsets.items()}
        begin[name] = LandedTopic(known.id or topic.id, offsets)
        lost = sum(offsets.values()) - sum(known.offsets.values())
        if lost:
            said.append(f"up to {lost:,} messages of topic {name} are lost: it is landed from {begin[name]}")
    if not said:
        return None
    version = warehouse.latest_version(measurements(spec.name)) + 1
    _record(warehouse, spec, begin, f"{_name_checkpoint(spec)}-{version}")
    return "; ".join(said)


def suggest_topic_restart(spec: ModelSpec) -> str:
    """Return the sentence that explains how to continue with the present messages of the topics."""
    anew = f", {suggest_new_start(spec.name)}" if spec.streamed_source else ""
    command = f"`kalman-pipeline ingest --model {spec.name} --accept-loss`"
    return f"To continue with what Kafka has now: {command}{anew}"


def _find_first_offsets(spec: ModelSpec, have: Mapping[str, Topic]) -> dict[str, LandedTopic]:
    assert spec.source is not None
    latest = spec.source.start == "latest"
    return {
        name: LandedTopic(
            topic.id, {number: held.end if latest else held.first for number, held in topic.bounds.items()}
        )
        for name, topic in have.items()
    }


def _name_checkpoint(spec: ModelSpec) -> str:
    return f"checkpoints/ingest-{spec.name}" + ("" if spec.streamed_source else "-topics")


def _find_newest(warehouse: Warehouse, spec: ModelSpec) -> TopicsStart | None:
    """Return the position that the last landing has reached; None before the first landing."""
    source, table = spec.streamed_source, measurements(spec.name)
    if source is not None:
        found = find_newest_landing(warehouse, table, source.topic)
        if found is None:
            return None
        known = {source.topic: LandedTopic(found.get("topic_id"), parse_offsets(found))}
        return TopicsStart(known, found.get("checkpoint", _name_checkpoint(spec)))
    found = next((one.detail for one in warehouse.read_log_entries(table) if "topics" in one.detail), None)
    if found is None:
        return None
    known = {name: LandedTopic(one["id"], parse_offsets(one)) for name, one in found["topics"].items()}
    return TopicsStart(known, found["checkpoint"])


def _record(
    warehouse: Warehouse, spec: ModelSpec, topics: dict[str, LandedTopic], checkpoint: str
) -> TopicsStart:
    """Commit the start position of the landing, in a commit without rows."""
    assert spec.source is not None
    start = TopicsStart(topics, checkpoint)
    record_start(warehouse, spec, spec.source.topic or "topics", start.detail(spec.source))
    return start


def read_messages(
    warehouse: Warehouse,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    start: Mapping[str, Any],
    types: KeyTypes,
    reader: str,
) -> DataFrame:
    """Return a topic's messages after a position as a stream of checked rows (`messages.read_checked_messages`).

    Args:
        warehouse: warehouse of the model.
        spec: spec of the model.
        checkpoint: checkpoint of the query. The query continues at the checkpoint's position if a micro-batch has been
            committed, else at `start`.
        start: position in the topic; a partition without an offset is read from the beginning of the partition.
        types: types of the key columns.
        reader: name of the query, used in errors.

    Raises:
        UserError: messages after the position have been deleted, the topic was recreated, or the brokers do not
            answer.
    """
    source = require_source(spec)
    have = read_source_topic(warehouse.spark, source)
    _refuse_gap(spec, checkpoint, start, have, reader)
    messages = read_topics(
        warehouse.spark, source, {source.topic: parse_offsets(start)}, {source.topic: have}
    )
    return read_checked_messages(messages, spec, source, types, start.get("topic_id"))


def read_topics(
    spark: SparkSession, source: Source, offsets: Mapping[str, Offsets], have: Mapping[str, Topic]
) -> DataFrame:
    """Return the messages of a source's topics as a stream.

    Args:
        spark: Spark session.
        source: source with the names of the topics, or a pattern for the names.
        offsets: start offsets, by topic; a topic or partition without an offset is read from its beginning.
        have: present topics, by name.
    """
    stream = stream_reader(spark, source.max_offsets_per_batch)
    if source.partitions:
        stream = stream.option("assign", json.dumps({source.topic: sorted(source.partitions)}))
    elif source.pattern:
        # Without the anchors, Spark would match the pattern anywhere in a name.
        stream = stream.option("subscribePattern", f"^(?:{source.pattern})$")
    else:
        stream = stream.option("subscribe", ",".join(have))
    begin = {
        name: {
            str(number): offsets.get(name, {}).get(number, held.first)
            for number, held in sorted(topic.bounds.items())
        }
        for name, topic in have.items()
    }
    return stream.option("startingOffsets", json.dumps(begin)).load()


def _refuse_gap(
    spec: ModelSpec, checkpoint: Checkpoint, start: Mapping[str, Any], have: Topic, reader: str
) -> None:
    """Raise an error if a topic does not continue at the position of a query."""
    batch = checkpoint.find_last_commit()
    needed = start if batch is None else checkpoint.position(batch, start)
    if needed["topic"] != have.name:
        raise UserError(
            f"{reader} has reached {describe(needed)}, but the spec now reads topic {have.name}. Restore the "
            f"topic, or give the model of the new topic another name"
        )
    refuse_recreated(have.name, needed.get("topic_id"), have.id, suggest_topic_restart(spec))
    refuse_lost(have, parse_offsets(needed), reader, suggest_topic_restart(spec))


def stream_of(warehouse: Warehouse, spec: ModelSpec, generation: Generation, types: KeyTypes) -> DataFrame:
    """Return the messages after the snapshot of a generation as a stream of checked rows."""
    checkpoint, start = Checkpoint(warehouse, generation.checkpoint), generation.start_position
    return read_messages(warehouse, spec, checkpoint, start, types, f"the stream of {spec.name}")


def with_topic_id(warehouse: Warehouse, generation: Generation) -> Generation:
    """Return a generation with the id of its topic; a generation of an earlier release gets the topic's present id.

    Spark's checkpoint does not contain the id, so the row of the generation stores the id. The present id is not stored
    if the offsets show that the topic was recreated.
    """
    if generation.topic is None or generation.start_position.get("topic_id") is not None:
        return generation
    topic = read_topic(warehouse.spark, generation.topic)
    if topic.id is None or not topic.reaches(parse_offsets(generations.read_position(warehouse, generation))):
        return generation
    return generations.adopt_topic_id(warehouse, generation, topic.id)


@contextmanager
def watch_topic(
    warehouse: Warehouse, spec: ModelSpec, generation: Generation
) -> Iterator[Callable[[], None]]:
    """Yield a function that raises an error if a generation's topic was recreated.

    For a generation that reads a table, the function does nothing.
    """
    if generation.topic is None:
        yield lambda: None
        return
    known = generation.start_position.get("topic_id")
    with TopicWatch(warehouse.spark, generation.topic, known, suggest_topic_restart(spec)) as watch:
        yield watch.check
