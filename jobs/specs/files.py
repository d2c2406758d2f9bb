"""The section `files` of a model spec: how CSV files and lines of text are written."""

from __future__ import annotations

import codecs
import re
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, field_validator, model_validator

from jobs.specs.column_names import FileColumns
from jobs.specs.problems import invalid
from jobs.specs.sections import Number, SpecSection

SEPARATORS = (",", ";", "\t", "|")
"""Separators that are tried, in this order, before runs of blanks are tried as a separator."""
BLANKS = "blanks"


class Wide(SpecSection):
    """Files with a column for each series: each cell of these columns becomes a row, unless it is empty."""

    key: str | None = None
    """the key column that takes the names of the columns, such as station"""
    time: str | None = None
    """instead of a key: the time column that takes the names, such as year, or month where time is [year, month]"""
    measurement: str
    """the measurement that takes the values of the cells"""
    columns: list[str] = []
    """the columns that become rows; empty: with a key all that the spec does not name, with a time all whose names
    begin with a digit
    """

    @property
    def names(self) -> str:
        """Return the column that receives the names of the wide columns."""
        return self.key or self.time or ""

    def check_names(self, key: list[str], time: list[str], measurement: list[str]) -> None:
        """Check that the spec has the columns that receive the names and the values.

        Raises:
            SpecError: a column is missing.
        """
        for field, name, known in (
            ("key", self.key, key),
            ("time", self.time, time),
            ("measurement", self.measurement, measurement),
        ):
            if name is not None and name not in known:
                remedy = f"name one of {', '.join(known)}" if known else f"name one in the spec's {field}"
                raise invalid(f"'{name}' is not in the spec's {field}", remedy, f"files.wide.{field}")

    @model_validator(mode="after")
    def _key_or_time(self) -> Self:
        if (self.key is None) == (self.time is None):
            raise invalid("takes the names of columns as key or as time", "give one of the two, key or time")
        return self


class Files(SpecSection):
    """How CSV files and lines of text are written.

    The options may change at any time. A change applies to files that are landed afterwards.
    """

    separator: Literal[",", ";", "\t", "|", "blanks"] | None = None
    r"""what separates the fields of a CSV file: a comma, ; | or a tab, written "\t", or blanks (one or more); null: the
    one with which a file's header has the columns of the spec
    """
    decimal: Literal[".", ","] = "."
    """what precedes the fraction of a number in CSV and text: a point, or a comma as in 3,14"""
    thousands: Literal[",", ".", " ", "'"] | None = None
    """what stands between the thousands of a number that is text: a comma, a point, a blank (of any width) or an
    apostrophe, as in 1,234.5; null: nothing
    """
    negative: Literal["minus", "trailing", "parentheses"] = "minus"
    """how text writes a negative number besides -5: trailing for 5-, parentheses for (5)"""
    units: dict[str, str] = {}
    """the unit that may stand before or after the numbers of a column that is text, which is left out, such as {price:
    $, temperature: °C}; a number with another unit is rejected
    """
    memory_mb: int = Field(default=512, ge=16, le=1 << 20)
    """megabytes of memory that reading one piece of a file may take, such as a stripe of ORC or a JSON array; all rows
    of a file may take as much, or 100 times the size of the file, if that is more
    """
    words: dict[str, Number] = {}
    """the numbers that words of a measurement or control stand for, such as {"on": 1, "off": 0}; in any case; with
    {"true": 1, "false": 0} stored truth values are numbers too
    """
    columns: list[str] = []
    """names of the columns of CSV files without a header, in order, such as [at, volume, river]; a file whose first
    line has the spec's columns is read by that header all the same
    """
    skip_lines: Annotated[int, Field(ge=0, le=1000)] | None = None
    """lines above the header of a CSV file, which are left out; null: the header is the first line that has the columns
    of the spec
    """
    units_rows: Annotated[int, Field(ge=0, le=20)] | None = None
    """rows of units or kinds below the header of a CSV file, which are left out; null: they are found"""
    comment: Annotated[str, Field(min_length=1, max_length=8)] | None = None
    """what a line of comment begins with, such as #; such lines of a CSV file are left out; null: # where such lines
    stand above the header
    """
    encoding: str | None = None
    """the encoding of CSV files, such as windows-1252, latin-1 or utf-16; null: UTF-8, or UTF-16 where a file begins so
    """
    wide: Wide | None = None
    """files with a column for each series, such as {key: station, measurement: level}"""

    names: dict[str, FileColumns] = {}
    """columns of files, messages and tables that have another name in the spec, by the name in the spec, such as {wind:
    "Wind speed (m/s)"}; `measurement: ["Wind speed (m/s)"]` adds Wind_speed_m_s here
    """

    @field_validator("names", mode="before")
    @classmethod
    def _named(cls, names: Any) -> Any:
        for name, columns in cast(dict[Any, Any], names).items() if isinstance(names, dict) else ():
            several = list(columns.values()) if isinstance(columns, dict) else columns
            one = several if isinstance(several, list) else [several]
            if not isinstance(name, str) or not all(isinstance(text, str) for text in one):
                raise invalid(f"'{name}' must have the name of a column", "put the name in quotes", str(name))
        return names

    def drop_header_options(self) -> Files:
        """Return the options that also apply to a file with another header, such as a file of inputs."""
        return Files(separator=self.separator, decimal=self.decimal, encoding=self.encoding)

    @field_validator("columns")
    @classmethod
    def _each_once(cls, columns: list[str]) -> list[str]:
        for name in columns:
            if columns.count(name) > 1:
                raise invalid(f"'{name}' appears twice", "give each column a name of its own")
        return columns

    @field_validator("encoding")
    @classmethod
    def _known(cls, encoding: str | None) -> str | None:
        try:
            is_text = encoding is None or isinstance("".encode(encoding), bytes)
        except (LookupError, UnicodeError, ValueError):
            is_text = False
        if not is_text:
            raise invalid(f"'{encoding}' is no encoding of text", "name one, such as windows-1252 or latin-1")
        return None if encoding is None else codecs.lookup(encoding).name

    @field_validator("units")
    @classmethod
    def _are_units(cls, units: dict[str, str]) -> dict[str, str]:
        for name, unit in units.items():
            if re.match(r"[^\s0-9.,+-]", unit) is None:
                raise invalid(
                    f"'{unit}' is no unit of {name}", "write what stands beside its numbers, such as °C"
                )
        return units

    @model_validator(mode="after")
    def _differ(self) -> Self:
        if self.thousands == self.decimal:
            raise invalid(
                f"'{self.thousands}' is also what precedes the fraction",
                "name another mark, or set decimal too",
                "thousands",
            )
        return self
