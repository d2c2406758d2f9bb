"""Read and check the rows of a file: a small one in this process, a large one in Spark's workers, part by part.

Both ways use the same functions on the same bytes, so that a file gives the same rows, whatever its size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from jobs.core.errors import UserError, raised_in_python
from jobs.core.input_files import know_inputs, known_inputs
from jobs.landing.checking import ROWS_A_FILE, check_rows, typed_columns
from jobs.landing.csv_parquet import Part, parts, read_part
from jobs.landing.json_rows import check_documents, is_json
from jobs.landing.json_rows import parts as json_parts
from jobs.landing.json_rows import read_part as read_json
from jobs.landing.key_from_name import with_key
from jobs.landing.text_lines import is_text, pattern_of
from jobs.landing.text_lines import parts as text_parts
from jobs.landing.text_lines import read_part as read_text
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.storage.measurements_table import KeyTypes
from jobs.storage.quarantine import PAYLOAD, REASON

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class RowCounts(NamedTuple):
    """Counts of checked rows: accepted ones, their first and last time in microseconds, rejected ones by reason."""

    rows: int
    span: tuple[int, int] | tuple[None, None]
    reasons: dict[str, int]


class Remarks(NamedTuple):
    """What a report tells of checked rows beside their counts.

    examples: the payload of a rejected row for each reason
    repeats: accepted rows beyond the first of each key and time
    span: first and last time of the accepted rows in microseconds
    """

    examples: Mapping[str, str] = MappingProxyType({})
    repeats: int = 0
    span: tuple[int, int] | tuple[None, None] = (None, None)


class Rows(NamedTuple):
    """Rows of a part of a file; rejected: keep the rejected ones in quarantine, as no earlier run has."""

    part: Part
    rejected: bool


class CheckedRows(NamedTuple):
    """The checked rows of a file: functions that make the data frames, and counts."""

    accepted: Callable[[], DataFrame]
    rejected: Callable[[], DataFrame]
    counts: RowCounts
    remarks: Remarks = Remarks()


class CheckedTables(NamedTuple):
    """The checked rows of a small file: the spec's columns of accepted ones, reason and payload of rejected ones."""

    accepted: pa.Table
    rejected: pa.Table
    counts: RowCounts
    remarks: Remarks


def checked_tables(spec: ModelSpec, chosen: list[Rows], key_types: KeyTypes, path: str) -> CheckedTables:
    """Read and check rows in this process.

    Raises:
        UserError: the file cannot be read.
    """
    batches = [one for rows in chosen for one in _checked(spec, rows, key_types, path)]
    checked = pa.Table.from_batches(batches, _schema_of(spec, key_types)).combine_chunks()
    bad = checked.filter(checked.column(REASON).is_valid()).select([REASON, PAYLOAD])
    good = checked.filter(checked.column(REASON).is_null()).drop_columns([REASON, PAYLOAD])
    times = np.asarray(good.column(spec.time).cast(pa.int64()))
    span = (int(times.min()), int(times.max())) if len(times) else (None, None)
    reasons = bad.column(REASON).to_pylist()
    examples = dict(zip(reversed(reasons), reversed(bad.column(PAYLOAD).to_pylist()), strict=True))
    repeats = len(good) - len(good.group_by([*spec.key, spec.time]).aggregate([]))
    return CheckedTables(
        good, bad, RowCounts(len(good), span, dict(Counter(reasons))), Remarks(examples, repeats, span)
    )


def checked_in_driver(
    warehouse: Warehouse, spec: ModelSpec, chosen: list[Rows], key_types: KeyTypes, path: str
) -> CheckedRows:
    """Read and check rows in this process, as frames of Spark."""
    good, bad, counts, remarks = checked_tables(spec, chosen, key_types, path)
    return CheckedRows(lambda: frame_of(warehouse, good), lambda: frame_of(warehouse, bad), counts, remarks)


def frame_of(warehouse: Warehouse, rows: pa.Table) -> DataFrame:
    """Return rows as a frame of Spark, in one slice: they stay together and in order in a commit and a micro-batch."""
    return warehouse.spark.createDataFrame(rows).coalesce(1)


def _schema_of(spec: ModelSpec, key_types: KeyTypes) -> pa.Schema:
    """Return the types of checked rows."""
    types: dict[str, pa.DataType] = {name: pa.float64() for name in spec.columns}
    types |= {name: pa.int64() if kind == "bigint" else pa.string() for name, kind in key_types.items()}
    types |= {REASON: pa.string(), PAYLOAD: pa.string(), spec.time: pa.timestamp("us", "UTC")}
    return pa.schema([(name, types[name]) for name in (REASON, PAYLOAD, *spec.columns)])


def parts_of(spec: ModelSpec, path: Path, start: int = 0, stop: int | None = None) -> list[Part]:
    """Return the parts of a file, or of a folder of files, in order; of lines or records those between two places.

    Raises:
        UserError: the file cannot be read.
    """
    if is_json(path):
        found = json_parts(path, start, stop)
    elif is_text(path):
        found = text_parts(path, start, stop)
    else:
        found = parts(path, start, stop, spec.file_columns, spec.files)
    return [part._replace(most=spec.files.memory_mb << 20) for part in found]


def _checked(spec: ModelSpec, rows: Rows, key_types: KeyTypes, file: str) -> Iterator[pa.RecordBatch]:
    """Read and check a part of a file."""
    if is_json(rows.part.path):
        found = (check_documents(spec, some, key_types, file) for some in read_json(rows.part))
    else:
        of_text = is_text(rows.part.path)
        sources = read_text(pattern_of(spec, file), rows.part) if of_text else read_part(rows.part)
        written = (source._replace(decimal=spec.files.decimal) for source in sources)
        keyed = (with_key(spec, source, file) for source in written)
        found = (check_rows(spec, source, key_types, file) for source in keyed)
    for batch in found:
        yield batch if rows.rejected else batch.filter(batch.column(REASON).is_null())


def _checked_frame(
    warehouse: Warehouse, spec: ModelSpec, chosen: list[Rows], key_types: KeyTypes, path: str
) -> DataFrame:
    """Return rows that Spark's workers read and check, each part of the file in a task."""

    inputs = known_inputs()

    def check(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        know_inputs(inputs)
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from _checked(spec, chosen[number], key_types, path)

    schema = f"{REASON} string, {PAYLOAD} string, {typed_columns(spec, key_types)}"
    count = len(chosen)
    return warehouse.spark.range(0, count, 1, max(count, 1)).mapInArrow(check, schema)


def _counted_in_workers(rows: DataFrame, spec: ModelSpec) -> tuple[RowCounts, Remarks]:
    """Count checked rows, which makes the workers read them.

    Raises:
        UserError: a worker could not read the file.
    """
    try:
        counts = count_rows(rows, spec.time)
        return counts, _remarks(rows, spec, counts)
    except (PySparkException, Py4JJavaError) as error:
        if UserError.__name__ not in str(error):
            raise
        raise UserError(raised_in_python(error)) from error


def _remarks(rows: DataFrame, spec: ModelSpec, counts: RowCounts) -> Remarks:
    """Return the remarks on checked rows that the workers hold."""
    examples: dict[str, str] = {}
    if counts.reasons:
        bad = rows.filter(F.col(REASON).isNotNull()).groupBy(REASON).agg(F.first(PAYLOAD).alias(PAYLOAD))
        examples = {row[REASON]: row[PAYLOAD] for row in bad.collect()}
    # By hash, as whole keys need more memory; of 100 million rows two different ones agree once in 3,000 files.
    place = F.xxhash64(*(F.col(f"`{name}`") for name in (*spec.key, spec.time)))
    row = rows.filter(F.col(REASON).isNull()).agg(F.count_distinct(place).alias("places")).first()
    return Remarks(examples, 0 if row is None else counts.rows - int(row["places"]), counts.span)


def count_rows(checked: DataFrame, time: str) -> RowCounts:
    """Count checked rows (`_reason`, the column `time`) in one Spark job."""
    micros = F.unix_micros(F.col(f"`{time}`"))
    counts = checked.groupBy(REASON).agg(
        F.count("*").alias("rows"), F.min(micros).alias("first"), F.max(micros).alias("last")
    )
    found = {row[REASON]: row for row in counts.collect()}
    good = found.pop(None, None)
    reasons = {reason: int(row["rows"]) for reason, row in found.items()}
    if good is None:
        return RowCounts(0, (None, None), reasons)
    return RowCounts(int(good["rows"]), (good["first"], good["last"]), reasons)


@contextmanager
def checked_in_workers(
    warehouse: Warehouse, spec: ModelSpec, chosen: list[Rows], key_types: KeyTypes, path: str
) -> Iterator[CheckedRows]:
    """Read and check rows in Spark's workers, which hold them until the end of the context.

    Raises:
        UserError: the file cannot be read.
    """
    rows = _checked_frame(warehouse, spec, chosen, key_types, path).persist()
    try:
        counts, remarks = _counted_in_workers(rows, spec)
        some = max(1, counts.rows // ROWS_A_FILE)
        yield CheckedRows(
            lambda: rows.filter(F.col(REASON).isNull()).drop(REASON, PAYLOAD).coalesce(some),
            lambda: rows.filter(F.col(REASON).isNotNull()).select(REASON, PAYLOAD).coalesce(1),
            counts,
            remarks,
        )
    finally:
        rows.unpersist()
