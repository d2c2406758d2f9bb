"""Tell the messages of a topic apart by their place: its name, its id, partition and offset.

Each reader of a topic accounts for the messages that it rejects: `ingest`, and every generation. So one message may
have several rows in quarantine, and may have landed besides. Its place shows that they are one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import functions as F

from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.storage import quarantine
from jobs.storage.measurements_table import OFFSET, PARTITION, TOPIC, TOPIC_ID
from jobs.storage.positions import first_topic_id, landed_position, offsets_of
from jobs.storage.tables import measurements

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

MESSAGE = "_message"
"""Column with the identity of a rejected row: the place of its message, or its own id if it is no message."""


class Landing(NamedTuple):
    """What `ingest` has landed of a model's topic.

    first: the first id that it knew the topic by, which is that of rows without one; None: ids are not known, and not
    compared. now: id of the topic that it lands; offsets: of the next message to land, by partition.
    """

    topic: str
    first: str | None
    now: str | None
    offsets: dict[int, int]

    @classmethod
    def of(cls, warehouse: Warehouse, spec: ModelSpec) -> Landing:
        """Return the landing of a model's topic; without a topic, or before the first landing, an empty one."""
        if spec.source is not None and spec.source.kind == "kafka" and not spec.source.streamed:
            return cls("", "", None, {})  # each topic has its id, and `ingest` alone reads them
        table = measurements(spec.name)
        topic = "" if spec.streamed_source is None else spec.streamed_source.topic
        landed = landed_position(warehouse, table, topic) if topic else None
        if landed is None:
            return cls(topic, None, None, {})
        return cls(topic, first_topic_id(warehouse, table, topic), landed.get("topic_id"), offsets_of(landed))

    def message(self, topic: Column, topic_id: Column, partition: Column, offset: Column) -> Column:
        """Return the identity of a message."""
        known = F.lit("") if self.first is None else F.coalesce(topic_id, F.lit(self.first))
        return F.concat_ws("/", topic, known, partition.cast("string"), offset.cast("string"))

    def reached(self) -> Column:
        """Return the condition that `ingest` has passed a rejected message, so that it never reads it again."""
        place = rejected_place()
        passed = place[TOPIC] != self.topic
        for number, end in self.offsets.items():
            passed = passed | ((place[PARTITION] == number) & (place[OFFSET] < end))
        if self.first is None or self.now is None:
            return passed
        return passed | (F.coalesce(place[TOPIC_ID], F.lit(self.first)) != self.now)


def is_message() -> Column:
    """Return whether a row of the quarantine is a message of a topic, rather than a row of a file or a table."""
    return F.col("source").startswith("kafka:") & rejected_place()[OFFSET].isNotNull()


def rejected_place() -> dict[str, Column]:
    """Return the place of a message in quarantine, by the column of the measurements that has it."""

    def part(name: str) -> Column:
        return F.get_json_object("position", f"$.{name}")

    return {
        TOPIC: part("topic"),
        TOPIC_ID: part("topic_id"),
        PARTITION: part("partition").cast("int"),
        OFFSET: part("offset").cast("bigint"),
    }


def identity(landing: Landing) -> Column:
    """Return `MESSAGE` of a row of the quarantine."""
    place = rejected_place()
    return F.when(is_message(), landing.message(*place.values())).otherwise(F.col("id"))


def landed_among(warehouse: Warehouse, spec: ModelSpec, landing: Landing, rows: DataFrame) -> DataFrame:
    """Return the identities (`MESSAGE`) of those messages, among rows of the quarantine, that have landed.

    A message has landed if the measurements have its place, or if another of its rows in quarantine was replayed: a
    replay of an earlier release landed it without its place.
    """
    place = rejected_place()
    wanted = rows.filter(is_message()).select(MESSAGE, place[OFFSET].alias(OFFSET))
    low, high = wanted.agg(F.min(OFFSET), F.max(OFFSET)).collect()[0]
    keys = wanted.select(MESSAGE).distinct()
    replayed = warehouse.read(quarantine.TABLE).filter(
        (F.col("model") == spec.name)
        & F.col("status").isin(quarantine.REPLAYING, quarantine.REPLAYED)
        & is_message()
    )
    found = replayed.select(identity(landing).alias(MESSAGE))
    table = warehouse.read(measurements(spec.name))
    if low is not None and OFFSET in table.columns:
        topic_id = F.col(TOPIC_ID) if TOPIC_ID in table.columns else F.lit(None).cast("string")
        key = landing.message(F.col(TOPIC), topic_id, F.col(PARTITION), F.col(OFFSET))
        near = table.filter(F.col(OFFSET).between(low, high))
        found = found.unionByName(near.select(key.alias(MESSAGE)))
    return keys.join(found, MESSAGE, "left_semi")
