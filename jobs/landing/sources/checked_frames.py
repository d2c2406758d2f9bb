"""Check rows of files and tables in Spark's tasks, for the verbs that do not land them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema

from jobs.core.errors import UserError
from jobs.core.input_files import know_inputs, known_inputs
from jobs.encoding import arrow
from jobs.landing.checking import check_rows, refuse_types, typed_columns
from jobs.landing.raw_rows import Source
from jobs.landing.reading import reader_of
from jobs.landing.values.spec_columns import spec_schema
from jobs.specs.model_spec import ModelSpec
from jobs.specs.problems import closest
from jobs.storage.measurements_table import KeyTypes
from jobs.storage.quarantine import PAYLOAD, REASON

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

MOST_TASKS = 1_024
_BEGAN = "_began"


def checked_files(
    spark: SparkSession, spec: ModelSpec, files: Sequence[str], key_types: KeyTypes
) -> DataFrame:
    """Return the rows of files: `_reason` and `_payload`, null where a row is accepted, and the spec's columns.

    Raises:
        UserError: a file cannot be read; also where the frame is computed.
    """
    pieces = [(path, part) for path in files for part in reader_of(spec, path).pieces()]
    inputs = known_inputs()

    def check(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        know_inputs(inputs)
        for batch in batches:
            for number in batch.column(0).to_pylist():
                path, part = pieces[number]
                yield from reader_of(spec, path).read(part, key_types)

    tasks = min(max(len(pieces), 1), MOST_TASKS)
    return spark.range(0, len(pieces), 1, tasks).mapInArrow(check, _ddl(spec, key_types))


def checked_table(rows: DataFrame, spec: ModelSpec, key_types: KeyTypes, table: str) -> DataFrame:
    """Return the rows of a table as `checked_files` does.

    Args:
        rows: of the table.
        spec: the model.
        key_types: of the key and id columns.
        table: its name, for errors.
    """
    names = spec.file_names(spec.columns)

    def check(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            columns = dict(zip(names, batch.columns[:-1], strict=True))
            began = arrow.to_numpy(batch.column(_BEGAN).cast(pa.int64()))
            source = Source(columns, batch.num_rows, landed=began)
            yield check_rows(spec, source, key_types, table)

    # `mapInArrow` takes a point in a name for a field of a structure.
    numbered = [column.alias(f"c{place}") for place, column in enumerate(_columns(spec))]
    # The time of a micro-batch stays when it is repeated.
    return rows.select(*numbered, F.current_timestamp().alias(_BEGAN)).mapInArrow(
        check, _ddl(spec, key_types)
    )


def table_schema(spec: ModelSpec, rows: DataFrame, table: str, remedy: str = "") -> pa.Schema:
    """Return the types of the spec's columns in a table.

    Args:
        spec: the model.
        rows: of the table.
        table: its name, for errors.
        remedy: what to do where a column is missing.

    Raises:
        UserError: a column is missing, or its type cannot hold the values that the spec expects.
    """
    for name in spec.file_names(spec.columns):
        if name not in rows.columns:
            others = [one for one in rows.columns if one not in spec.file_columns]
            hint = closest(name, others) or f"columns are {', '.join(rows.columns[:20])}"
            raise UserError(f"{table}: there is no column '{name}'; {hint}{remedy}")
    schema = to_arrow_schema(rows.select(*_columns(spec)).schema, timezone="UTC")
    refuse_types(spec, schema, table)
    return spec_schema(spec, schema)


def _columns(spec: ModelSpec) -> list[Column]:
    """Return the columns of a table that the spec is read from."""
    return [F.col("`" + name.replace("`", "``") + "`") for name in spec.file_names(spec.columns)]


def _ddl(spec: ModelSpec, key_types: KeyTypes) -> str:
    return f"{REASON} string, {PAYLOAD} string, {typed_columns(spec, key_types)}"
