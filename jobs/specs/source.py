"""The section of a model spec that says where its measurements come from, when not from files alone."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from jobs.specs.problems import invalid
from jobs.specs.sections import Section


class Source(Section):
    """A Kafka topic whose messages are measurements, one each. Where its brokers are is a setting, KALMAN_KAFKA."""

    kind: Literal["kafka"] = Field(description="kafka")
    topic: str = Field(pattern=r"^[A-Za-z0-9._-]{1,249}$", description="name of the topic")
    format: Literal["json", "avro"] = Field(
        default="json", description="what a message's value is: a JSON object, or an Avro record"
    )
    avro_schema: dict[str, Any] | None = Field(
        default=None, description="with format: avro, the schema of the record, {type: record, name, fields}"
    )
    framing: Literal["none", "confluent"] = Field(
        default="none",
        description="with format: avro, what comes before the record: nothing, or a schema registry's five bytes",
    )
    whole_keys: list[str] = Field(
        default=[],
        description="with format: json, columns of the key, or that of duplicates.id, that are whole numbers; the "
        "others are text",
    )
    message_key: str | None = Field(
        default=None, description="key column that is the message's key, as text, not in its value"
    )
    start: Literal["earliest", "latest"] = Field(
        default="earliest", description="where the first `ingest` begins in the topic"
    )
    tombstones: Literal["quarantine", "skip"] = Field(
        default="quarantine", description="what becomes of messages without a value"
    )
    max_offsets_per_batch: int | None = Field(
        default=None, ge=1, description="messages a micro-batch at most, of all partitions together"
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
        """Refuse names that are no key columns, and as whole numbers neither those of ids.

        Raises:
            ValueError: as a spec's own checks do.
        """
        for field, names, known in (
            ("whole_keys", self.whole_keys, [*key, *ids]),
            ("message_key", [self.message_key or key[0]], key),
        ):
            for name in names:
                if name not in known:
                    raise invalid(
                        f"'{name}' is not a key column", f"name one of {', '.join(known)}", f"source.{field}"
                    )
