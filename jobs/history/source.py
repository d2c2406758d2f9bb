"""The rows that a run estimates: the measurements at a version, or any table with the model's columns."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from pyspark.sql.types import DateType, NumericType, TimestampNTZType, TimestampType

from jobs.core.errors import UserError, first_line
from jobs.core.redaction import show_names
from jobs.key_inputs.table import home_of
from jobs.lineage import replayed_late_rows
from jobs.spark.read_files import files_of
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.storage.positions import check_version
from jobs.storage.tables import need_columns, need_measurements
from jobs.training.table_source import Source

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_FILE = ("path", "length", "modificationTime")
"""What tells a file from what it was before, or will be, as Spark's format for files of any kind names it."""


class Interval(NamedTuple):
    """Event times in microseconds, from the first up to and without the last; None: without an end on that side."""

    first: int | None
    last: int | None

    def before_end(self, time: Column) -> Column:
        """Return the condition that a time in microseconds is before the end."""
        return F.lit(True) if self.last is None else time < self.last

    @property
    def data(self) -> list[int | None]:
        """Return it for a digest or a program."""
        return [self.first, self.last]


class Rows(NamedTuple):
    """What a run reads.

    frame: with the columns of the spec, one of them the time as a timestamp; name: of the table; version: of a Delta
    table, None for files; identity: what tells this content from every other; measurements: it is the model's own table
    of measurements; fits: the condition of rows that `ingest` would have accepted, None where it has checked them;
    files: the paths of the files, None for a Delta table or where Spark does not tell them
    """

    frame: DataFrame
    name: str
    version: int | None
    identity: list[Any]
    measurements: bool
    fits: Column | None = None
    files: list[str] | None = None


def rows_of(warehouse: Warehouse, spec: ModelSpec, given: str | None, version: int | None) -> Rows:
    """Return the rows of the measurements, or of the table or folder of files that was `given`.

    Raises:
        UserError: there is no such table, version or column, or a column has a type that cannot be used.
    """
    if given is not None:
        return _given(warehouse, spec, given, version)
    table = need_measurements(warehouse, spec.name)
    need_columns(warehouse, spec.name, spec.columns)
    number = check_version(warehouse, table, version)
    rows = replayed_late_rows.without(warehouse, warehouse.read(table, number)).select(*spec.columns)
    return Rows(rows, table, number, [table, number, *Source.of(warehouse, table, number).ids], True)


def _given(warehouse: Warehouse, spec: ModelSpec, given: str, version: int | None) -> Rows:
    home, table = home_of(warehouse, given)
    files: list[str] | None = None
    if home.exists(table):
        number = check_version(home, table, version)
        rows = home.read(table, number)
        identity: list[Any] = [given, number, *Source.of(home, table, number).ids]
    else:
        if version is not None:
            raise UserError(f"--to-version is for Delta tables, and {given} is none: leave it out")
        number, rows = None, _files(warehouse, home.path(table), given)
        listed = files_of(rows)
        files = None if listed is None else [one.path for one in listed]
        found = listed_by_job(warehouse, home.path(table)) if listed is None else listed
        texts = sorted("|".join(map(str, one)) for one in found)
        identity = [given, hashlib.sha256("\n".join(texts).encode()).hexdigest()]
    return Rows(_typed(rows, spec, given), given, number, identity, False, _fits(spec), files)


def listed_by_job(warehouse: Warehouse, path: str) -> Sequence[tuple[Any, ...]]:
    """Return what `files_of` does, by a job."""
    # This format lists the files; their content is not read.
    files = warehouse.spark.read.format("binaryFile").option("recursiveFileLookup", "true")
    return files.load(path).select(*(F.col(name).cast("string") for name in _FILE)).collect()


def _files(warehouse: Warehouse, path: str, given: str) -> DataFrame:
    try:
        return warehouse.spark.read.parquet(path)
    except (PySparkException, Py4JJavaError) as error:
        where = path if re.match(r"/|[A-Za-z][A-Za-z0-9+.-]*:", given) else f"{warehouse.root} ({given})"
        raise UserError(
            f"--input {given}: there is no Delta table and no Parquet file at {where}: {first_line(error)}"
        ) from error


def _typed(rows: DataFrame, spec: ModelSpec, given: str) -> DataFrame:
    """Return the spec's columns of any table, its times as timestamps.

    Raises:
        UserError: a column is missing, or its type cannot be used.
    """
    types = {field.name: field.dataType for field in rows.schema.fields}
    absent = [name for name in spec.columns if name not in types]
    if absent:
        raise UserError(
            f"--input {given}: there is no column {', '.join(absent)} (it has {show_names(list(types))}): rename them "
            f"in the table, or name the right ones in {spec.source_path or spec.name}"
        )
    if not isinstance(types[spec.time], TimestampType | TimestampNTZType | DateType):
        raise UserError(
            f"--input {given}: the time {spec.time} is {types[spec.time].simpleString()}, not a timestamp: convert it, "
            f"or land the rows with `kalman-pipeline ingest`, which reads times as the spec says"
        )
    texts = [name for name in (*spec.measurement, *spec.control) if not isinstance(types[name], NumericType)]
    if texts:
        raise UserError(f"--input {given}: {', '.join(texts)} must be numbers: convert them in the table")
    time = F.col(f"`{spec.time}`").cast("timestamp")
    return rows.select(*spec.columns).withColumn(spec.time, time)


def _fits(spec: ModelSpec) -> Column:
    """Return the condition of rows that `ingest` would have accepted."""
    fits = F.lit(True)
    for name in (*spec.key, spec.time):
        fits = fits & F.col(f"`{name}`").isNotNull()
    infinite = F.lit(float("inf"))
    for name in (*spec.measurement, *spec.control):
        value = F.abs(F.coalesce(F.col(f"`{name}`").cast("double"), F.lit(float("nan"))))
        # In Spark NaN, which means missing, is above infinity; a control must not be missing.
        fits = fits & (value != infinite if name in spec.measurement else value < infinite)
    return fits
