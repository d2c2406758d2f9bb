"""The sections `source` and `sinks` of a model spec: where measurements come from, and where estimates go."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from jobs.specs.problems import invalid, suggest_key
from jobs.specs.sections import CLONES, Duration, SpecSection

_TOPIC = r"^[A-Za-z0-9._-]{0,249}$"
_OF_KAFKA = ("topic", "topics", "pattern", "partitions", "max_offsets_per_batch", "message_key", "whole_keys")
_FIELDS = {"kafka": _OF_KAFKA, "delta": ("table", "clones"), "rate": ("rate",)}
"""The fields that only sources of one kind have, by kind."""


class Rate(SpecSection):
    """Made-up rows to try out a model; the same seed always gives the same rows."""

    rows_per_second: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """rows that come each second"""
    first_rows: int = Field(default=1000, ge=0)
    """rows that are there at the first `ingest`"""
    keys: int = Field(default=10, ge=1)
    """number of keys, which have a row each in turn"""
    every: Duration = "1min"
    """time between two rows of a key, such as 1min"""
    begin: str = "2024-01-01"
    """time of the first row, in ISO 8601"""
    seed: int = Field(default=0, ge=0)
    """another seed gives other rows"""
    missing: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    """share of measurements that are missing"""


class Source(SpecSection):
    """Kafka topics with one measurement in each message (brokers in KALMAN_KAFKA), a Delta table, or made-up rows."""

    kind: Literal["kafka", "delta", "rate"]
    """kafka: a topic, or several; delta: a Delta table of your own; rate: made-up rows"""
    topic: str = Field(default="", pattern=_TOPIC)
    """name of the topic that the stream reads"""
    topics: list[str] = []
    """names of several topics, which `ingest` lands and the stream reads from the table"""
    pattern: str = ""
    """instead of names, a regular expression (of Java) for the whole names of topics"""
    partitions: list[int] = []
    """partitions of the topic that are read; empty: all"""
    table: str = ""
    """with kind: delta, the table: a path or URI, or one below the warehouse's root"""
    clones: bool = Field(default=False, description=f"with kind: delta, {CLONES}")
    rate: Rate = Field(default_factory=Rate)
    """with kind: rate, the rows that are made up"""
    format: Literal["json", "avro"] = "json"
    """format of a message's value: a JSON object, or an Avro record"""
    avro_schema: dict[str, Any] | None = None
    """with format: avro, the schema of the record, {type: record, name, fields}"""
    framing: Literal["none", "confluent"] = "none"
    """with format: avro, bytes before the record: none, or a schema registry's five"""
    whole_keys: list[str] = []
    """with format: json, key columns, or the column of duplicates.id, that are whole numbers; the others are text"""
    message_key: str | None = None
    """key column that is the message's key, as text, instead of a field of its value"""
    start: Literal["earliest", "latest"] = "earliest"
    """offset, or version of the table, at which the first `ingest` begins"""
    tombstones: Literal["quarantine", "skip"] = "quarantine"
    """quarantine or skip messages without a value"""
    max_offsets_per_batch: int | None = Field(default=None, ge=1)
    """most messages in a micro-batch, of all partitions together"""

    @property
    def streamed(self) -> bool:
        """Return whether the source is a single topic, which the stream reads directly."""
        return self.kind == "kafka" and bool(self.topic)

    @property
    def title(self) -> str:
        """Return a description of the source in words."""
        if self.kind == "delta":
            return f"table {self.table}"
        if self.kind == "rate":
            return "made-up rows"
        if self.pattern:
            return f"topics {self.pattern}"
        return f"topic {self.topic}" if self.topic else f"topics {', '.join(self.topics)}"

    @model_validator(mode="after")
    def _of_its_kind(self) -> Self:
        for kind, fields in _FIELDS.items():
            for field in fields if kind != self.kind else ():
                if not self.list_defaults([field]):
                    raise invalid(f"is for kind: {kind}", f"remove it, or write kind: {kind}", field)
        if self.kind == "delta" and not self.table:
            raise invalid("is missing", "write the path of the table", "table")
        if self.kind == "kafka":
            self._check_topics()
        return self

    def _check_topics(self) -> None:
        if sum(map(bool, (self.topic, self.topics, self.pattern))) != 1:
            raise invalid("is missing" if not self.topic else "is not alone", "name one of topic, topics or pattern",
                          "topic")  # fmt: skip
        for name in self.topics:
            if not name or not re.fullmatch(_TOPIC, name):
                raise invalid(f"'{name}' cannot be a topic", "use letters, digits, ., _ and -", "topics")
        if len(set(self.topics)) < len(self.topics):
            raise invalid("names a topic twice", "name each once", "topics")
        if self.partitions and not self.topic:
            raise invalid("is for a single topic", "remove it, or name one topic", "partitions")
        if any(number < 0 for number in self.partitions) or len(set(self.partitions)) < len(self.partitions):
            raise invalid("are not numbers of partitions", "name each once, from 0", "partitions")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.format == "avro" and self.avro_schema is None:
            raise invalid(
                "is missing",
                "add the record's schema: {type: record, name: ..., fields: [...]}",
                "avro_schema",
            )
        for field, given, kind in (
            ("avro_schema", self.avro_schema is not None, "avro"),
            ("framing", self.framing != "none", "avro"),
            ("whole_keys", bool(self.whole_keys), "json"),
        ):
            if given and self.format != kind:
                raise invalid(f"is for format: {kind}", f"remove it, or write format: {kind}", field)
        return self

    def check_keys(self, key: list[str], ids: list[str]) -> None:
        """Check that `message_key` names a key column, and `whole_keys` names key columns or id columns.

        Raises:
            ValueError: the error of `problems.invalid`.
        """
        for field, names, known in (
            ("whole_keys", self.whole_keys, [*key, *ids]),
            ("message_key", [] if self.message_key is None else [self.message_key], key),
        ):
            for name in names:
                if name not in known:
                    raise invalid(
                        f"'{name}' is not a key column",
                        suggest_key(known, "name one of"),
                        f"source.{field}",
                    )


class KafkaSink(SpecSection):
    """A Kafka topic that receives each live estimate as a message; KALMAN_KAFKA has the addresses of its brokers."""

    topic: str = Field(pattern=r"^[A-Za-z0-9._-]{1,249}$")
    """name of an existing topic"""


class FileSink(SpecSection):
    """A folder that receives the live estimates as files, in one subfolder for each micro-batch."""

    folder: str = Field(min_length=1)
    """a path or URI that all machines reach; a relative path is in the warehouse"""
    format: Literal["parquet", "json"] = "parquet"
    """parquet, or json with one row on each line"""


class Sinks(SpecSection):
    """Where a stream's estimates go besides their table. The sinks may change whenever the stream starts."""

    latest: bool = False
    """true: also keep the latest state of each key in latest/<model>"""
    kafka: KafkaSink | None = None
    """a topic for the live estimates, {topic: ...}: at least once, keyed"""
    files: FileSink | None = None
    """a folder for the live estimates, {folder: ...}: exactly once"""
    functions: list[str] = []
    """your own sinks, each module:function, called with a micro-batch's frame, generation and batch id"""

    @field_validator("functions")
    @classmethod
    def _names(cls, names: list[str]) -> list[str]:
        for name in names:
            module, colon, function = name.partition(":")
            if not colon or not all(part.isidentifier() for part in (*module.split("."), function)):
                raise invalid(f"{name!r} does not name a function", "write module:function")
            if names.count(name) > 1:
                raise invalid(f"{name} is given twice", "give it once")
        return names
