"""Find the start of the landing of topics: the landed position, the topics' start, or after an accepted loss.

Each commit of a landing records each topic's id, its landed offsets, and the checkpoint of the landing query. So one
commit can begin the landing, switch to a recreated topic of the same name, or adopt a topic id: earlier releases and
some brokers did not provide it. A single topic, which a stream also reads, is recorded as a stream's position
(`jobs.storage.positions`); several topics are recorded together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from jobs.core.errors import RUN_FAILED, UserError
from jobs.landing.target_table import record_start
from jobs.spark.kafka import (
    Offsets,
    Topic,
    is_same_if_known,
    list_topics,
    read_topic,
    refuse_lost,
    refuse_recreated,
)
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.specs.source import Source
from jobs.storage.positions import build_topic_position, find_newest_landing, parse_offsets
from jobs.storage.tables import measurements

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class LandedTopic(NamedTuple):
    """Landed position of one topic: its id (None if unknown) and the next offset of each partition."""

    id: str | None
    offsets: Offsets

    def __str__(self) -> str:
        return ", ".join(f"{number}:{offset}" for number, offset in sorted(self.offsets.items()))


class TopicsStart(NamedTuple):
    """Landed positions of topics by name, and the name of the landing query's checkpoint."""

    topics: dict[str, LandedTopic]
    checkpoint: str

    def position(self, topic: str) -> dict[str, Any]:
        """Return a topic's landed position in the form of a stream's position."""
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
    """Return the spec's source.

    Raises:
        UserError: the spec has no source, though a generation of the model reads a topic.
    """
    if spec.streamed_source is None:
        raise UserError(
            f"the stream of {spec.name} reads a topic, but its spec no longer has a `source`: restore it, or pretrain "
            f"the changed spec and start with `stream --model {spec.name} --adopt SNAPSHOT`"
        )
    return spec.streamed_source


def read_source_topic(spark: SparkSession, source: Source) -> Topic:
    """Return the topic of a source, with the partitions that are read.

    Raises:
        UserError: there is no such topic or partition, or the brokers do not answer.
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
    """Return the position where the landing continues; the first landing begins at `source.start` and records it.

    A topic id that the last landing did not know is recorded, too, unless the offsets show that the topic was
    recreated.
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
    """Refuse topics that do not continue at their landed position.

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
        A sentence that names these topics; None if all topics continue.
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
    """Return the sentence on how to continue with the topics' present messages."""
    anew = ", `pretrain`, and `stream --model {0} --adopt` the new snapshot" if spec.streamed_source else ""
    command = f"`kalman-pipeline ingest --model {spec.name} --accept-loss`"
    return f"To continue with what Kafka has now: {command}{anew.format(spec.name)}"


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
    """Return the position of the last landing; None before the first landing."""
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
    """Commit the start position of the landing, without rows."""
    assert spec.source is not None
    start = TopicsStart(topics, checkpoint)
    record_start(warehouse, spec, spec.source.topic or "topics", start.detail(spec.source))
    return start
