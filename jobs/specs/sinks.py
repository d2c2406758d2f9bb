"""The section `sinks` of a model spec: where estimates go besides the table `estimates/<model>`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from jobs.specs.problems import invalid
from jobs.specs.sections import SpecSection


class KafkaSink(SpecSection):
    """A Kafka topic that gets each live estimate as a message. KALMAN_KAFKA has the addresses of its brokers."""

    topic: str = Field(pattern=r"^[A-Za-z0-9._-]{1,249}$", description="name of an existing topic")


class FileSink(SpecSection):
    """A folder that gets the live estimates as files, in a subfolder for each micro-batch."""

    folder: str = Field(
        min_length=1, description="a path or URI that all machines reach; a relative path is in the warehouse"
    )
    format: Literal["parquet", "json"] = Field(
        default="parquet", description="parquet, or json with one row on each line"
    )


class Sinks(SpecSection):
    """Where a stream's estimates go besides their table; may change at any start of a stream."""

    latest: bool = Field(
        default=False, description="true: also keep the latest state of each key in latest/<model>"
    )
    kafka: KafkaSink | None = Field(
        default=None, description="a topic for the live estimates, {topic: ...}: at least once, keyed"
    )
    files: FileSink | None = Field(
        default=None, description="a folder for the live estimates, {folder: ...}: exactly once"
    )
    functions: list[str] = Field(
        default=[],
        description="your own sinks, each module:function, called with a micro-batch's frame, generation and batch id",
    )

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
