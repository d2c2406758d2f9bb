"""Land one or several Kafka topics in the measurements table.

A single topic lands for `pretrain`; the stream reads this topic directly from Kafka. Several topics are listed in the
spec or matched by a pattern; the stream reads their rows from the measurements table. A topic that is new in Kafka or
in the list is read from its beginning. A topic that was deleted, or is no longer listed, may have had messages that
have not landed. In this case the landing stops with an error until the user accepts the loss.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from jobs.core.errors import RUN_FAILED, UserError
from jobs.landing.messages import derive_topic_key_types, read_checked_messages
from jobs.landing.sources.landing import Reader, SourceLanding, run
from jobs.landing.target_table import prepare
from jobs.landing.topics import (
    LandedTopic,
    TopicsStart,
    accept_loss,
    read_messages,
    read_source_topics,
    read_topics,
    refuse_gaps,
    start_of,
    suggest_topic_restart,
)
from jobs.landing.written_pieces import ORIGIN, SOURCE
from jobs.spark.kafka import NoAnswer, Topic, TopicWatch, read_topic_ids, refuse_recreated
from jobs.spark.queries import find_cause
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.measurements_table import OFFSET, PARTITION, TOPIC, TOPIC_ID, KeyTypes
from jobs.storage.quarantine import POSITION

if TYPE_CHECKING:
    from pyspark.errors import PySparkException
    from pyspark.sql import Column, DataFrame


class TopicsReader(Reader):
    """Reader of topics from the landed position."""

    def __init__(
        self,
        warehouse: Warehouse,
        spec: ModelSpec,
        start: TopicsStart,
        have: Mapping[str, Topic],
        types: KeyTypes,
    ) -> None:
        """Open topics at a position; `have` are the present topics, and `types` the types of key and id columns."""
        assert spec.source is not None
        self._warehouse, self._spec, self._source, self._types = warehouse, spec, spec.source, types
        self._start, self._next, self._have = start, start, have
        self.checkpoint = Checkpoint(warehouse, start.checkpoint)
        self.unit = "message" if self._source.streamed else "row"

    def rows(self) -> DataFrame:
        """Return the messages after the landed position as a stream of checked rows."""
        source, known = self._source, self._start.topics
        if source.streamed:
            start, name = self._start.position(source.topic), f"`ingest --model {self._spec.name}`"
            return read_messages(self._warehouse, self._spec, self.checkpoint, start, self._types, name)
        offsets = {name: one.offsets for name, one in known.items()}
        messages = read_topics(self._warehouse.spark, source, offsets, self._have)
        return read_checked_messages(messages, self._spec, source, self._types, several=True)

    def reached(self, batch: int) -> dict[str, Any]:
        """Return the position at the end of a micro-batch, with the ids of new topics."""
        known, reached = self._start.topics, self.checkpoint.offset(batch)
        ids = {name: one.id for name, one in known.items()}
        new = reached.keys() - known.keys()
        if new:
            ids |= read_topic_ids(self._warehouse.spark, new)
        for name in sorted(new):
            print(f"note: topic {name} is new: it lands from its beginning", file=sys.stderr, flush=True)
        topics = {
            name: LandedTopic(ids.get(name), {int(number): int(at) for number, at in offsets.items()})
            for name, offsets in reached.items()
        }
        self._next = self._start._replace(topics=topics)
        return self._next.detail(self._source)

    def check(self) -> None:
        """Check that no topic has been deleted or recreated since its messages were read."""
        spark, topics, remedy = self._warehouse.spark, self._next.topics, suggest_topic_restart(self._spec)
        if self._source.streamed:
            with TopicWatch(spark, self._source.topic, topics[self._source.topic].id, remedy) as watch:
                watch.check()
        else:
            ids = read_topic_ids(spark, topics)
            for name, one in topics.items():
                if name not in ids:
                    raise UserError(
                        f"topic {name} has disappeared. Nothing was skipped. {remedy}", RUN_FAILED
                    )
                refuse_recreated(name, one.id, ids[name], remedy)
        self._start = self._next

    def add_origin(self, rows: DataFrame) -> DataFrame:
        """Return rows with the topic, topic id and origin of their messages."""
        if self._source.streamed:
            rows = rows.withColumn(TOPIC, F.lit(self._source.topic))
        else:
            known = F.concat(F.lit(', "topic_id": "'), self._select_topic_ids(), F.lit('"}'))
            begin = F.expr(f"left({POSITION}, length({POSITION}) - 1)")
            rows = rows.withColumn(POSITION, F.concat(begin, F.coalesce(known, F.lit("}"))))
        source = F.concat(F.lit("kafka:"), TOPIC)
        origin = F.concat_ws("/", source, PARTITION, OFFSET)
        return rows.withColumns({ORIGIN: origin, SOURCE: source, TOPIC_ID: self._select_topic_ids()})

    def explain_error(self, error: PySparkException) -> str:
        """Return the reason why the query failed, such as a deleted topic or lost messages, or else Spark's message."""
        try:
            refuse_gaps(self._spec, self._start, read_source_topics(self._warehouse.spark, self._source))
        except NoAnswer as silence:
            return f"{find_cause(error)}; and {silence.message}"
        except UserError as problem:
            return problem.message
        return find_cause(error)

    def place(self) -> tuple[str, dict[str, Any]]:
        """Return the landed position of a single topic; empty for several topics."""
        if not self._source.streamed:
            return "", {}
        topic = self._source.topic
        offsets = self._start.position(topic)["offsets"]
        return f", up to {self._start.topics[topic]}", {"topic": topic, "offsets": offsets}

    def _select_topic_ids(self) -> Column:
        """Return a column with the id of the topic of each row."""
        known = {name: one.id for name, one in self._next.topics.items() if one.id is not None}
        result = F.lit(None).cast("string")
        for name, identity in known.items():
            result = F.when(F.col(TOPIC) == name, F.lit(identity)).otherwise(result)
        return result


def open_topics(
    warehouse: Warehouse, spec: ModelSpec, lossy: bool = False
) -> tuple[TopicsReader, str | None]:
    """Return the reader of a source's topics, and a text on lost messages, or None.

    Args:
        warehouse: warehouse of the model.
        spec: spec of the model.
        lossy: whether to accept lost messages, and to continue with the present messages (`topics.accept_loss`).

    Raises:
        UserError: a topic was deleted or recreated, messages were deleted before they landed, no topic exists, or the
            brokers do not answer.
    """
    source = spec.source
    assert source is not None
    types = prepare(warehouse, spec, derive_topic_key_types(source, spec.naming_columns), messages=True)
    have = read_source_topics(warehouse.spark, source)
    note = accept_loss(warehouse, spec, have) if lossy else None
    start = start_of(warehouse, spec, have)
    refuse_gaps(spec, start, have)
    if not have:
        raise UserError(f"Kafka has no topic that matches {source.pattern}: make one, or correct the pattern")
    return TopicsReader(warehouse, spec, start, have, types), note


def land_present(
    warehouse: Warehouse, spec: ModelSpec, on_progress: Callable[[SourceLanding], None] = lambda landing: None
) -> None:
    """Land the present messages of the topics, as part of another command.

    Raises:
        UserError: `open_topics` fails, or the query fails.
    """
    reader, _ = open_topics(warehouse, spec)
    run(SourceLanding(warehouse, spec, reader, on_progress), None, threading.Event())
