"""Read and check the rows of files and tables in Spark tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema

from jobs.core.errors import UserError
from jobs.core.input_files import get_known_inputs, know_inputs
from jobs.landing.checking import build_columns_ddl, check_rows, refuse_types
from jobs.landing.raw_rows import RawRows, build_spec_schema
from jobs.landing.reading import select_reader
from jobs.specs.model_spec import ModelSpec
from jobs.specs.problems import suggest_word
from jobs.state.encoding import arrow
from jobs.storage.measurements_table import KeyTypes
from jobs.storage.quarantine import PAYLOAD, REASON

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

MOST_TASKS = 1_024
_BEGAN = "_began"


def read_checked_files(
    spark: SparkSession, spec: ModelSpec, files: Sequence[str], key_types: KeyTypes
) -> DataFrame:
    """Return a frame of the checked rows of files, with the spec's columns, `_reason` and `_payload`.

    `_reason` and `_payload` are null in accepted rows.

    Raises:
        UserError: a file cannot be read. This error may also occur later, when the frame is computed.
    """
    pieces = [(path, part) for path in files for part in select_reader(spec, path).pieces()]
    inputs = get_known_inputs()

    def check(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        know_inputs(inputs)
        for batch in batches:
            for number in batch.column(0).to_pylist():
                path, part = pieces[number]
                yield from select_reader(spec, path).read(part, key_types)

    tasks = min(max(len(pieces), 1), MOST_TASKS)
    return spark.range(0, len(pieces), 1, tasks).mapInArrow(check, _build_ddl(spec, key_types))


def read_checked_table(rows: DataFrame, spec: ModelSpec, key_types: KeyTypes, table: str) -> DataFrame:
    """Return the checked rows of a table, with the same columns as the result of `read_checked_files`.

    Args:
        rows: rows of the table.
        spec: spec of the model.
        key_types: types of the key and id columns.
        table: name of the table, used in errors.
    """
    names = spec.list_file_columns(spec.columns)

    def check(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            columns = dict(zip(names, batch.columns[:-1], strict=True))
            began = arrow.to_numpy(batch.column(_BEGAN).cast(pa.int64()))
            source = RawRows(columns, batch.num_rows, decimal=spec.files.decimal, landed=began)
            yield check_rows(spec, source, key_types, table)

    # Columns are renamed because `mapInArrow` interprets a dot in a name as access to a struct field.
    numbered = [column.alias(f"c{place}") for place, column in enumerate(_select_columns(spec))]
    # In a stream, `current_timestamp` returns the same time when a micro-batch is repeated.
    return rows.select(*numbered, F.current_timestamp().alias(_BEGAN)).mapInArrow(
        check, _build_ddl(spec, key_types)
    )


def read_table_schema(spec: ModelSpec, rows: DataFrame, table: str, remedy: str = "") -> pa.Schema:
    """Return the types of the spec's columns in a table.

    Args:
        spec: spec of the model.
        rows: rows of the table.
        table: name of the table, used in errors.
        remedy: advice that is added to the error for a missing column.

    Raises:
        UserError: a column is missing, or its type is not suitable for the values that the spec expects.
    """
    for name in spec.list_file_columns(spec.columns):
        if name not in rows.columns:
            others = [one for one in rows.columns if one not in spec.file_columns]
            hint = suggest_word(name, others) or f"columns are {', '.join(rows.columns[:20])}"
            raise UserError(f"{table}: there is no column '{name}'; {hint}{remedy}")
    schema = to_arrow_schema(rows.select(*_select_columns(spec)).schema, timezone="UTC")
    refuse_types(spec, schema, table)
    return build_spec_schema(spec, schema)


def _select_columns(spec: ModelSpec) -> list[Column]:
    """Return those columns of a table that the spec uses."""
    return [F.col("`" + name.replace("`", "``") + "`") for name in spec.list_file_columns(spec.columns)]


def _build_ddl(spec: ModelSpec, key_types: KeyTypes) -> str:
    return f"{REASON} string, {PAYLOAD} string, {build_columns_ddl(spec, key_types)}"
