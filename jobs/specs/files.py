"""The section `files` of a model spec: how CSV files and lines of text are written."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from jobs.specs.problems import invalid
from jobs.specs.sections import Section

SEPARATORS = (",", ";", "\t", "|")
"""The separators that are looked for, in this order."""


class Files(Section):
    """How CSV files and lines of text are written; may change at any time, for files that are landed from then on."""

    separator: Literal[",", ";", "\t", "|"] | None = Field(
        default=None,
        description='what separates the fields of a CSV file: a comma, ; | or a tab, written "\\t"; null: the one with '
        "which a file's header has the columns of the spec",
    )
    decimal: Literal[".", ","] = Field(
        default=".",
        description="what precedes the fraction of a number in CSV and text: a point, or a comma as in 3,14",
    )
    memory_mb: int = Field(
        default=512,
        ge=16,
        le=1 << 20,
        description="megabytes of memory that reading one piece of a file may take, such as a stripe of ORC or a JSON "
        "array; all rows of a file may take as much, or 100 times the size of the file, if that is more",
    )
    columns: list[str] = Field(
        default=[],
        description="names of the columns of CSV files without a header, in order, such as [at, volume, river]; a file "
        "whose first line has the spec's columns is read by that header all the same",
    )

    @field_validator("columns")
    @classmethod
    def _each_once(cls, columns: list[str]) -> list[str]:
        for name in columns:
            if columns.count(name) > 1:
                raise invalid(f"'{name}' appears twice", "give each column a name of its own")
        return columns
