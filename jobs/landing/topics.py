"""Read a Kafka topic as a stream of checked rows, from the exact position of a snapshot or a landing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jobs.core.errors import UserError
from jobs.landing.messages import read_checked_messages
from jobs.landing.topic_start import (
    read_source_topic,
    require_source,
    suggest_topic_restart,
)
from jobs.lineage import generations
from jobs.spark.kafka import (
    Offsets,
    Topic,
    TopicWatch,
    read_topic,
    refuse_lost,
    refuse_recreated,
    stream_reader,
)
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.specs.source import Source
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.measurements_table import (
    KeyTypes,
)
from jobs.storage.positions import describe, parse_offsets

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from jobs.lineage.generations import Generation


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
        spec: the model.
        checkpoint: checkpoint of the query; its position counts, or `start` before the first micro-batch.
        start: position in the topic; a partition without an offset is read from its beginning.
        types: types of the key columns.
        reader: name of the query, for errors.

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
        spark: the session.
        source: source with the names of the topics, or a pattern of names.
        offsets: start offsets by topic; a topic or partition without an offset is read from its beginning.
        have: the topics as they are now.
    """
    stream = stream_reader(spark, source.max_offsets_per_batch)
    if source.partitions:
        stream = stream.option("assign", json.dumps({source.topic: sorted(source.partitions)}))
    elif source.pattern:
        # Spark matches the pattern anywhere in a name.
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
    """Refuse a topic that does not continue at the position of a query."""
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
    """Return the messages after a generation's snapshot as a stream of checked rows."""
    checkpoint, start = Checkpoint(warehouse, generation.checkpoint), generation.start_position
    return read_messages(warehouse, spec, checkpoint, start, types, f"the stream of {spec.name}")


def with_topic_id(warehouse: Warehouse, generation: Generation) -> Generation:
    """Return a generation with its topic's id; a generation of an earlier release adopts the topic's present id.

    Spark's checkpoint has no id, so the id is kept in the generation's row. A topic is not adopted if its offsets show
    that it was recreated.
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
    """Yield a function that raises if a generation's topic was recreated; for a table it does nothing."""
    if generation.topic is None:
        yield lambda: None
        return
    known = generation.start_position.get("topic_id")
    with TopicWatch(warehouse.spark, generation.topic, known, suggest_topic_restart(spec)) as watch:
        yield watch.check
