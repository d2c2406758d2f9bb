"""Land several topics, named or by a pattern, in the measurements table, which the stream reads.

The position is, for each topic, its id and an offset for each partition; each landing commit records all of them. A
topic that appears later, because it now exists or is named, is read from its beginning. One that disappears, or is no
longer named, may have had messages that have not landed, so it is told, and the landing ends until that is accepted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql import functions as F

from jobs.core.errors import RUN_FAILED, UserError
from jobs.landing.messages import checked_messages, key_types
from jobs.landing.sources.landing import Reader
from jobs.landing.target_table import prepare, record_start
from jobs.landing.written_pieces import ORIGIN, SOURCE
from jobs.spark.kafka import (
    NoAnswer,
    Topic,
    read_topic,
    refuse_lost,
    refuse_recreated,
    stream_reader,
    topic_ids,
    topic_names,
)
from jobs.spark.queries import cause_of
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.specs.source import Source
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.measurements_table import OFFSET, PARTITION, TOPIC, TOPIC_ID, KeyTypes
from jobs.storage.positions import same_if_known
from jobs.storage.quarantine import POSITION
from jobs.storage.tables import measurements

if TYPE_CHECKING:
    from pyspark.errors import PySparkException
    from pyspark.sql import Column, DataFrame


class Landed(NamedTuple):
    """Up to where one topic has landed: its id, None if the brokers report none, and the next offsets."""

    id: str | None
    offsets: dict[int, int]


class TopicsStart(NamedTuple):
    """Up to where the topics have landed, and the name of the checkpoint of the query that lands them."""

    topics: dict[str, Landed]
    checkpoint: str

    def detail(self) -> dict[str, Any]:
        """Return the metadata of a commit that has landed so far."""
        places = {
            name: {"id": one.id, "offsets": {str(number): at for number, at in sorted(one.offsets.items())}}
            for name, one in sorted(self.topics.items())
        }
        return {"topics": places, "checkpoint": self.checkpoint}


class TopicsReader(Reader):
    """Reads several topics from where they have landed up to."""

    def __init__(
        self,
        warehouse: Warehouse,
        spec: ModelSpec,
        start: TopicsStart,
        have: Mapping[str, Topic],
        types: KeyTypes,
    ) -> None:
        """Open topics at a position. have: the topics as they are; types: of the key columns."""
        assert spec.source is not None
        self._warehouse, self._spec, self._source, self._types = warehouse, spec, spec.source, types
        self._start, self._next, self._have = start, start, have
        self.checkpoint = Checkpoint(warehouse, start.checkpoint)

    def rows(self) -> DataFrame:
        """Return the messages after the position as a stream of checked rows."""
        source, known = self._source, self._start.topics
        stream = stream_reader(self._warehouse.spark, source.max_offsets_per_batch)
        if source.pattern:
            # Spark looks for the expression anywhere in a name.
            stream = stream.option("subscribePattern", f"^(?:{source.pattern})$")
        else:
            stream = stream.option("subscribe", ",".join(source.topics))
        offsets = {name: known[name].offsets if name in known else {} for name in self._have}
        starting = {
            name: {
                str(number): offsets[name].get(number, held.first) for number, held in topic.bounds.items()
            }
            for name, topic in self._have.items()
        }
        stream = stream.option("startingOffsets", json.dumps(starting))
        return checked_messages(stream.load(), self._spec, source, self._types, several=True)

    def reached(self, batch: int) -> dict[str, Any]:
        """Return the position at the end of a micro-batch, with the ids of topics that had none before."""
        known = self._start.topics
        reached = self.checkpoint.offset(batch)
        for name in reached.keys() - known.keys():
            print(f"note: topic {name} is new: it lands from its beginning", file=sys.stderr, flush=True)
        ids = {name: one.id for name, one in known.items() if one.id is not None}
        unknown = [name for name in reached if name not in ids]
        if unknown:
            ids |= topic_ids(self._warehouse.spark, unknown)
        topics = {
            name: Landed(ids.get(name), {int(number): int(at) for number, at in offsets.items()})
            for name, offsets in reached.items()
        }
        self._next = self._start._replace(topics=topics)
        return self._next.detail()

    def check(self) -> None:
        """Check that each topic is the one that was read before."""
        ids = topic_ids(self._warehouse.spark, self._next.topics)
        for name, one in self._next.topics.items():
            if name not in ids:
                raise UserError(f"topic {name} has disappeared. {way_out(self._spec)}", RUN_FAILED)
            refuse_recreated(name, one.id, ids[name], way_out(self._spec))
        self._start = self._next

    def placed(self, rows: DataFrame) -> DataFrame:
        """Return rows with the places of their messages."""
        source = F.concat(F.lit("kafka:"), TOPIC)
        known = F.concat(F.lit(', "topic_id": "'), self._ids(), F.lit('"}'))
        position = F.concat(
            F.expr(f"left({POSITION}, length({POSITION}) - 1)"), F.coalesce(known, F.lit("}"))
        )
        return rows.withColumns(
            {
                ORIGIN: F.concat_ws("/", source, PARTITION, OFFSET),
                SOURCE: source,
                POSITION: position,
                TOPIC_ID: self._ids(),
            }
        )

    def explained(self, error: PySparkException) -> str:
        """Return why the query failed: a topic that is gone, or has lost messages, or what Spark says."""
        try:
            _refuse_gaps(self._spec, self._start, found_topics(self._warehouse, self._source))
        except NoAnswer as silence:
            return f"{cause_of(error)}; and {silence.message}"
        except UserError as problem:
            return problem.message
        return cause_of(error)

    def _ids(self) -> Column:
        """Return the id of each row's topic."""
        known = {name: one.id for name, one in self._next.topics.items() if one.id is not None}
        result = F.lit(None).cast("string")
        for name, identity in known.items():
            result = F.when(F.col(TOPIC) == name, F.lit(identity)).otherwise(result)
        return result


def open_topics(warehouse: Warehouse, spec: ModelSpec, lossy: bool) -> tuple[Reader, str | None]:
    """Return the reader of several topics; lossy: continue with what they have now (`accept_loss`).

    Raises:
        UserError: a topic is gone or was made anew, messages that have not landed are gone, there is no topic, or the
            brokers do not answer.
    """
    assert spec.source is not None
    types = prepare(warehouse, spec, key_types(spec.source, spec.naming_columns), messages=True)
    have = found_topics(warehouse, spec.source)
    note = accept_loss(warehouse, spec, have) if lossy else None
    start = start_of(warehouse, spec, have)
    _refuse_gaps(spec, start, have)
    if not have:
        raise UserError(
            f"Kafka has no topic that matches {spec.source.pattern}: make one, or correct the pattern"
        )
    return TopicsReader(warehouse, spec, start, have, types), note


def found_topics(warehouse: Warehouse, source: Source) -> dict[str, Topic]:
    """Return the topics that a source names and that exist, by name.

    Raises:
        UserError: a topic that is named does not exist, or the brokers do not answer.
    """
    names = topic_names(warehouse.spark, source.pattern) if source.pattern else source.topics
    return {name: read_topic(warehouse.spark, name) for name in sorted(names)}


def start_of(warehouse: Warehouse, spec: ModelSpec, have: Mapping[str, Topic]) -> TopicsStart:
    """Return where the landing continues; the first one begins at `source.start`, and records it."""
    found = _newest(warehouse, spec)
    return found or _record(warehouse, spec, _first(spec, have), f"checkpoints/ingest-{spec.name}-topics")


def accept_loss(warehouse: Warehouse, spec: ModelSpec, have: Mapping[str, Topic]) -> str | None:
    """Begin the landing anew with what the topics have now, if one is gone, made anew, or has lost messages.

    Returns:
        A sentence that says which; None if all continue.
    """
    found = _newest(warehouse, spec)
    if found is None:
        return None
    said: list[str] = []
    begin: dict[str, Landed] = {}
    first = _first(spec, have)
    for name, known in found.topics.items():
        if name not in have:
            said.append(f"topic {name} is no longer read")
            continue
        topic = have[name]
        if not same_if_known(known.id, topic.id) or not topic.reaches(known.offsets):
            said.append(f"topic {name} was made anew")
            begin[name] = first[name]
            continue
        offsets = {number: max(at, topic.bounds[number].first) for number, at in known.offsets.items()}
        lost = sum(offsets.values()) - sum(known.offsets.values())
        if lost:
            said.append(f"up to {lost:,} messages of topic {name} are lost")
        begin[name] = Landed(known.id, offsets)
    if not said:
        return None
    version = warehouse.latest_version(measurements(spec.name)) + 1
    _record(warehouse, spec, begin, f"checkpoints/ingest-{spec.name}-topics-{version}")
    return "; ".join(said)


def way_out(spec: ModelSpec) -> str:
    """Return the sentence that says how to continue with what the topics have now."""
    return (
        f"Nothing was skipped. To continue with what Kafka has now: `kalman-pipeline ingest --model {spec.name} "
        f"--accept-loss`"
    )


def _refuse_gaps(spec: ModelSpec, start: TopicsStart, have: Mapping[str, Topic]) -> None:
    """Refuse topics that do not continue where they have landed up to."""
    for name, known in start.topics.items():
        if name not in have:
            at = ", ".join(f"{number}:{offset}" for number, offset in sorted(known.offsets.items()))
            raise UserError(
                f"topic {name}, which has landed up to {at}, is gone or no longer named by source; messages after that "
                f"will not land. {way_out(spec)}",
                RUN_FAILED,
            )
        refuse_recreated(name, known.id, have[name].id, way_out(spec))
        refuse_lost(have[name], known.offsets, f"`ingest --model {spec.name}`", way_out(spec))


def _first(spec: ModelSpec, have: Mapping[str, Topic]) -> dict[str, Landed]:
    assert spec.source is not None
    latest = spec.source.start == "latest"
    return {
        name: Landed(topic.id, {n: held.end if latest else held.first for n, held in topic.bounds.items()})
        for name, topic in have.items()
    }


def _newest(warehouse: Warehouse, spec: ModelSpec) -> TopicsStart | None:
    """Return where the last landing of several topics ended; None before the first."""
    entries = warehouse.log_entries(measurements(spec.name))
    found = next((one.detail for one in entries if "topics" in one.detail), None)
    if found is None:
        return None
    topics = {
        name: Landed(one["id"], {int(number): int(at) for number, at in one["offsets"].items()})
        for name, one in found["topics"].items()
    }
    return TopicsStart(topics, found["checkpoint"])


def _record(warehouse: Warehouse, spec: ModelSpec, topics: dict[str, Landed], checkpoint: str) -> TopicsStart:
    """Commit where the landing begins, without rows."""
    start = TopicsStart(topics, checkpoint)
    record_start(warehouse, spec, "topics", start.detail())
    return start
