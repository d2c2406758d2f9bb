"""Identify the messages of a topic by their place: the topic's name and id, partition and offset.

Each reader of a topic (`ingest` and every generation) quarantines the messages that it rejects. So one message may have
several rows in quarantine, and may have landed besides. The place shows that they are the same message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jobs.specs.model_spec import ModelSpec
from jobs.storage.measurements_table import OFFSET, PARTITION, TOPIC, TOPIC_ID
from jobs.storage.positions import find_first_topic_id, find_landed_position, parse_offsets
from jobs.storage.quarantine import REPLAYED, REPLAYING, TABLE
from jobs.storage.queries import open_queries
from jobs.storage.table_rows import to_rows
from jobs.storage.tables import measurements
from jobs.storage.warehouse import Tables


class Place(NamedTuple):
    """Place of a message; topic_id: None if it is not known."""

    topic: str
    topic_id: str | None
    partition: int
    offset: int


def find_place(row: Mapping[str, Any]) -> Place | None:
    """Return the place of a rejected message from `source` and `position`; None for a row of a file or a table."""
    if not (row["source"] or "").startswith("kafka:"):
        return None
    found = json.loads(row["position"] or "{}")
    if found.get("offset") is None:
        return None
    return Place(found["topic"], found.get("topic_id"), int(found["partition"]), int(found["offset"]))


class Landing(NamedTuple):
    """Progress of `ingest` in a model's topic.

    first: the first known id of the topic, which also stands for rows without an id; None: ids are unknown and not
    compared. now: id of the topic that lands now; offsets: offset of the next message to land, by partition.
    """

    topic: str
    first: str | None
    now: str | None
    offsets: dict[int, int]

    @classmethod
    def of(cls, warehouse: Tables, spec: ModelSpec) -> Landing:
        """Return the landing of a model's topic; an empty landing without a topic or before the first landing."""
        if spec.source is not None and spec.source.kind == "kafka" and not spec.source.streamed:
            return cls("", "", None, {})  # each topic has its id, and `ingest` alone reads them
        table = measurements(spec.name)
        topic = "" if spec.streamed_source is None else spec.streamed_source.topic
        landed = find_landed_position(warehouse, table, topic) if topic else None
        if landed is None:
            return cls(topic, None, None, {})
        return cls(
            topic, find_first_topic_id(warehouse, table, topic), landed.get("topic_id"), parse_offsets(landed)
        )

    def message(self, place: Place) -> str:
        """Return the identity of a message."""
        known = "" if self.first is None else place.topic_id or self.first
        return f"{place.topic}/{known}/{place.partition}/{place.offset}"

    def identity(self, row: Mapping[str, Any]) -> str:
        """Return the identity of a rejected row: its message's identity, or the row's id if it is not a message."""
        place = find_place(row)
        return row["id"] if place is None else self.message(place)

    def has_passed(self, place: Place) -> bool:
        """Tell if `ingest` has read past a rejected message, so that it never reads it again."""
        if place.topic != self.topic or place.offset < self.offsets.get(place.partition, 0):
            return True
        return None not in (self.first, self.now) and (place.topic_id or self.first) != self.now


def find_landed(tables: Tables, spec: ModelSpec, landing: Landing, wanted: Mapping[str, Place]) -> set[str]:
    """Return the identities of the wanted messages that have landed.

    A message has landed if the measurements have its place, or if another of its rows in quarantine was replayed:
    replays of earlier releases landed messages without their place.
    """
    if not wanted:
        return set()
    rows = to_rows(tables.columns(TABLE, ("model", "status", "id", "source", "position")))
    replayed = (row for row in rows if row["model"] == spec.name and row["status"] in (REPLAYING, REPLAYED))
    found = {landing.identity(row) for row in replayed}
    offsets = [place.offset for place in wanted.values()]
    found |= {landing.message(place) for place in _read_landed(tables, spec, min(offsets), max(offsets))}
    return found & wanted.keys()


def _read_landed(tables: Tables, spec: ModelSpec, first: int, last: int) -> Iterator[Place]:
    """Yield the places of the messages that have landed with offsets from `first` to `last`."""
    with open_queries(tables.root) as queries:
        columns = queries.add("landed", measurements(spec.name))
        if columns is None or OFFSET not in columns.names:
            return
        topic_id = TOPIC_ID if TOPIC_ID in columns.names else f"NULL AS {TOPIC_ID}"
        names = f"{TOPIC}, {topic_id}, {PARTITION}, {OFFSET}"
        for rows in queries.batches(f"SELECT {names} FROM landed WHERE {OFFSET} BETWEEN {first} AND {last}"):
            yield from map(Place, *(column.to_pylist() for column in rows.columns))
