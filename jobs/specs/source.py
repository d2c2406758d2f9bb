"""The section `source` of a model spec: the topic that measurements come from, besides files."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from jobs.specs.problems import invalid, remedy_of_key
from jobs.specs.sections import Section


class Source(Section):
    """A Kafka topic with one measurement in each message. KALMAN_KAFKA has the addresses of its brokers."""

    kind: Literal["kafka"] = Field(description="kafka")
    topic: str = Field(pattern=r"^[A-Za-z0-9._-]{1,249}$", description="name of the topic")
    format: Literal["json", "avro"] = Field(
        default="json", description="format of a message's value: a JSON object, or an Avro record"
    )
    avro_schema: dict[str, Any] | None = Field(
        default=None, description="with format: avro, the schema of the record, {type: record, name, fields}"
    )
    framing: Literal["none", "confluent"] = Field(
        default="none",
        description="with format: avro, bytes before the record: none, or a schema registry's five",
    )
    whole_keys: list[str] = Field(
        default=[],
        description="with format: json, key columns, or the column of duplicates.id, that are whole numbers; the "
        "others are text",
    )
    message_key: str | None = Field(
        default=None,
        description="key column that is the message's key, as text, instead of a field of its value",
    )
    start: Literal["earliest", "latest"] = Field(
        default="earliest", description="offset at which the first `ingest` begins"
    )
    tombstones: Literal["quarantine", "skip"] = Field(
        default="quarantine", description="quarantine or skip messages without a value"
    )
    max_offsets_per_batch: int | None = Field(
        default=None, ge=1, description="most messages in a micro-batch, of all partitions together"
    )

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
        """Refuse names that are neither key columns nor, in `whole_keys`, columns of ids.

        Raises:
            ValueError: in the form of the spec's own checks.
        """
        for field, names, known in (
            ("whole_keys", self.whole_keys, [*key, *ids]),
            ("message_key", [] if self.message_key is None else [self.message_key], key),
        ):
            for name in names:
                if name not in known:
                    raise invalid(
                        f"'{name}' is not a key column",
                        remedy_of_key(known, "name one of"),
                        f"source.{field}",
                    )
