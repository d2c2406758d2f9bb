"""Where the landing of a topic begins: after what has landed, at the topic's start, or after a loss that was accepted.

Each commit of a landing records the topic's id, the offsets up to which the topic has landed, and the checkpoint of the
query that lands it. So one commit begins the landing, adopts an id that an earlier release did not record, or moves on
to another topic of the same name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from jobs.core.errors import UserError
from jobs.landing.target_table import record_start
from jobs.spark.kafka import Offsets, Topic, read_topic, same_if_known
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.specs.source import Source
from jobs.storage.positions import newest_landing, offsets_of, topic_position
from jobs.storage.tables import measurements

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CHECKPOINTS = "checkpoints"


class TopicStart(NamedTuple):
    """The position up to which a topic has landed, and the name of the checkpoint of the query that lands it."""

    position: dict[str, Any]
    checkpoint: str

    @property
    def offsets(self) -> Offsets:
        """Return the offset of the next message to land, by partition."""
        return offsets_of(self.position)

    @property
    def topic_id(self) -> str | None:
        """Return the id of the topic that is landed, None if it is unknown."""
        return self.position.get("topic_id")


def source_of(spec: ModelSpec) -> Source:
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


def topic_of(spark: SparkSession, source: Source) -> Topic:
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


def start_of(warehouse: Warehouse, spec: ModelSpec) -> TopicStart:
    """Return where the landing continues; the first one begins at `source.start`, and records it.

    The id of the topic is recorded, too, where the last landing did not know it, unless its offsets show that the topic
    was made anew since.
    """
    source = source_of(spec)
    found = newest_landing(warehouse, measurements(spec.name), source.topic)
    if found is not None and found.get("topic_id") is not None:
        return _start(spec, found)
    topic = topic_of(warehouse.spark, source)
    if found is None:
        return _record(warehouse, spec, topic.id, _first_offsets(source, topic), _first_checkpoint(spec))
    known = _start(spec, found)
    if topic.id is None or not topic.reaches(known.offsets):
        return known
    return _record(warehouse, spec, topic.id, known.offsets, known.checkpoint)


def accept_loss(warehouse: Warehouse, spec: ModelSpec) -> str | None:
    """Begin the landing anew with what the topic has now, if messages after the position are gone.

    Returns:
        A sentence that says what is lost; None if nothing is, so that the landing continues.
    """
    source = source_of(spec)
    table = measurements(spec.name)
    found = newest_landing(warehouse, table, source.topic) if warehouse.exists(table) else None
    if found is None:
        return None
    landed, topic = _start(spec, found), topic_of(warehouse.spark, source)
    lost, anew = 0, not same_if_known(landed.topic_id, topic.id)
    begin: Offsets = {}
    for number, offset in landed.offsets.items():
        held = topic.bounds.get(number)
        anew = anew or held is None or held.written < offset
        if held is not None and held.first > offset:
            lost += held.first - offset
            begin[number] = held.first
    if not lost and not anew:
        return None
    begin = _first_offsets(source, topic) if anew else {**landed.offsets, **begin}
    version = warehouse.latest_version(table) + 1
    _record(warehouse, spec, topic.id, begin, f"{_first_checkpoint(spec)}-{version}")
    where = ", ".join(f"{number}:{offset}" for number, offset in sorted(begin.items()))
    if anew:
        return f"topic {topic.name} was made anew: it is landed from {where}; what the former one had left is lost"
    return f"up to {lost:,} messages of topic {topic.name} are lost: it is landed from {where}"


def way_out(spec: ModelSpec) -> str:
    """Return the sentence that says how to continue with what a topic has now."""
    return (
        f"To continue with what the topic has now: `kalman-pipeline ingest --model {spec.name} --accept-loss`, "
        f"`pretrain`, and `stream --model {spec.name} --adopt` the new snapshot"
    )


def landing_detail(start: TopicStart, offsets: Offsets) -> dict[str, Any]:
    """Return a commit's metadata: up to where which topic has landed."""
    position = topic_position(start.position["topic"], offsets, topic_id=start.topic_id)
    del position["source"]
    return {**position, "checkpoint": start.checkpoint}


def _start(spec: ModelSpec, landing: dict[str, Any]) -> TopicStart:
    position = topic_position(landing["topic"], offsets_of(landing), topic_id=landing.get("topic_id"))
    return TopicStart(position, landing.get("checkpoint", _first_checkpoint(spec)))


def _first_checkpoint(spec: ModelSpec) -> str:
    return f"{CHECKPOINTS}/ingest-{spec.name}"


def _first_offsets(source: Source, topic: Topic) -> Offsets:
    latest = source.start == "latest"
    return {number: held.end if latest else held.first for number, held in topic.bounds.items()}


def _record(
    warehouse: Warehouse, spec: ModelSpec, topic_id: str | None, offsets: Offsets, checkpoint: str
) -> TopicStart:
    """Commit where the landing begins, without rows."""
    topic = source_of(spec).topic
    start = TopicStart(topic_position(topic, offsets, topic_id=topic_id), checkpoint)
    record_start(warehouse, spec, topic, landing_detail(start, offsets))
    return start
