"""Land files in the measurements table; rejected rows go to quarantine with the reason.

A file is identified by its SHA-256. Its rejected rows and its accepted rows are one commit each, in the file's own
transaction: landing is idempotent, and a retry after a crash completes the missing commit.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from jobs.core.errors import INPUT_ERROR, UserError, first_line
from jobs.ingestion.checking import (
    ROWS_A_FILE,
    check_rows,
    checked_frame,
    key_types_of,
    measurement_columns,
    refuse_types,
)
from jobs.ingestion.csv_parquet import CORRUPT, read, read_schema
from jobs.ingestion.json_rows import FORMATS as JSON_FORMATS
from jobs.ingestion.json_rows import is_array, is_json, json_frame, json_schema, read_checked
from jobs.specs.model_spec import ModelSpec
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.measurements_table import HISTORY_PREFIX, MEASUREMENT_PROPERTIES, KeyTypes, key_types_in
from jobs.warehouse.quarantine import PAYLOAD, REASON, TABLE, holds, keep, refusal, too_many
from jobs.warehouse.tables import measurements

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

IN_DRIVER_BYTES = 16 << 20
"""A file up to this size is read in the driver, which is faster than the Spark jobs that would read it in workers."""

SMALL_BYTES = 64 << 20
"""Below this total size, landing ends before compiled code would pay for its compilation."""

SUFFIXES = (".csv", ".csv.gz", ".parquet", *JSON_FORMATS)


@dataclass(frozen=True, slots=True)
class Landed:
    """The outcome of one file.

    rows: accepted; reasons: rows quarantined by this run, by reason; version: the measurements table's commit of the
    rows, None if the file had already landed.
    """

    path: str
    rows: int
    reasons: dict[str, int]
    version: int | None


class RowCounts(NamedTuple):
    """Counts of checked rows: accepted ones, their first and last time in microseconds, rejected ones by reason."""

    rows: int
    span: tuple[int, int] | tuple[None, None]
    reasons: dict[str, int]


class _CheckedRows(NamedTuple):
    """The checked rows of a file: functions that make the data frames, and counts."""

    accepted: Callable[[], DataFrame]
    rejected: Callable[[], DataFrame]
    counts: RowCounts


def find_files(inputs: list[str]) -> list[str]:
    """Return the files that `inputs` (files, folders, globs) name, sorted within each input.

    Raises:
        UserError: an input names no file that can be landed.
    """
    found: list[str] = []
    for text in inputs:
        path = Path(text).expanduser()
        if "://" in text:
            raise UserError(f"{text}: only files on a local or mounted file system can be landed")
        if path.is_dir():
            names = sorted(
                str(p) for p in path.iterdir() if p.name.endswith(SUFFIXES) and p.name[0] not in "._"
            )
        elif path.is_file():
            names = [str(path)]
        else:
            names = sorted(glob.glob(str(path)))
        if not names:
            raise UserError(f"{text}: no such file, or no {', '.join(SUFFIXES)} file in that folder")
        for name in names:
            if not name.endswith(SUFFIXES):
                raise UserError(f"{name}: unknown file format; give {', '.join(SUFFIXES)}")
        found += names
    return list(dict.fromkeys(str(Path(name).absolute()) for name in found))


def land(
    warehouse: Warehouse, spec: ModelSpec, path: str, key_types: KeyTypes, history: bool = False
) -> Landed:
    """Land one file, as `history` of new keys if asked: rejected rows first, then accepted ones. Idempotent."""
    digest = file_digest(path)
    small = Path(path).is_file() and file_size(path) <= IN_DRIVER_BYTES
    if small or is_json(path) and is_array(Path(path)):
        return _land_in_driver(warehouse, spec, path, digest, key_types, history)
    return _land_in_workers(warehouse, spec, path, digest, key_types, history)


def _land_in_driver(
    warehouse: Warehouse, spec: ModelSpec, path: str, digest: str, key_types: KeyTypes, history: bool
) -> Landed:
    """Land a file that this process reads and checks."""
    if is_json(path):
        checked = read_checked(spec, path, key_types)
    else:
        checked = check_rows(spec, read(Path(path)), key_types, path)
    rejected = checked.column(REASON).is_valid()
    bad = pa.Table.from_batches([checked.filter(rejected).select([REASON, PAYLOAD])])
    fits = checked.column(REASON).is_null()
    good = pa.Table.from_batches([checked.filter(fits).drop_columns([REASON, PAYLOAD])])
    times = np.asarray(good.column(spec.time).cast(pa.int64()))
    span = (int(times.min()), int(times.max())) if len(times) else (None, None)
    spark = warehouse.spark
    rows = _CheckedRows(
        # One slice: a file is one commit of one file, so that its rows stay together and in order in a micro-batch.
        lambda: spark.createDataFrame(good).coalesce(1),
        lambda: spark.createDataFrame(bad).coalesce(1),
        RowCounts(len(good), span, dict(Counter(bad.column(REASON).to_pylist()))),
    )
    return _commit(warehouse, spec, (path, digest), rows, history)


def _land_in_workers(
    warehouse: Warehouse, spec: ModelSpec, path: str, digest: str, key_types: KeyTypes, history: bool
) -> Landed:
    """Land a file that Spark's workers read and check."""
    if is_json(path):
        rows = json_frame(warehouse.spark, spec, path, key_types).persist()
    else:
        rows = checked_frame(_frame(warehouse, spec, path), spec, key_types, path).persist()
    try:
        counts = count_rows(rows, spec.time)
        parts = max(1, counts.rows // ROWS_A_FILE)
        checked = _CheckedRows(
            lambda: rows.filter(F.col(REASON).isNull()).drop(REASON, PAYLOAD).coalesce(parts),
            lambda: rows.filter(F.col(REASON).isNotNull()).select(REASON, PAYLOAD).coalesce(1),
            counts,
        )
        return _commit(warehouse, spec, (path, digest), checked, history)
    finally:
        rows.unpersist()


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


def _commit(
    warehouse: Warehouse, spec: ModelSpec, file: tuple[str, str], checked: _CheckedRows, history: bool
) -> Landed:
    """Commit the rejected rows, then the accepted ones; each commit is skipped if an earlier run has made it."""
    path, digest = file
    transaction = (f"ingest-{spec.name}-{digest}", 1)
    rows, (first, last), reasons = checked.counts
    if too_many(spec.quarantine, reasons, rows) and not holds(warehouse, spec.name, digest):
        raise refusal(spec.quarantine, reasons, rows, path, INPUT_ERROR)
    if reasons:
        frame = quarantined(checked.rejected(), spec.name, path, digest)
        before = warehouse.latest_version(TABLE) if warehouse.exists(TABLE) else -1
        keep(warehouse, frame, transaction)
        if warehouse.latest_version(TABLE) == before:  # an earlier run has committed them
            reasons = {}
    if not rows:
        return Landed(path, 0, reasons, None)
    origin = F.lit(HISTORY_PREFIX + path if history else path)
    frame = checked.accepted().withColumn("_origin", origin).withColumn("_landed_at", F.current_timestamp())
    detail = {"file": path, "sha256": digest, "rows": rows, "min_time": first, "max_time": last}
    if history:
        detail["history"] = True
    version = _append(
        warehouse, frame, measurements(spec.name), transaction, {"userMetadata": json.dumps(detail)}
    )
    return Landed(path, rows, dict(sorted(reasons.items())), version)


def quarantined(rejected: DataFrame, model: str, path: str, digest: str) -> DataFrame:
    """Return rejected rows of a file (`_reason`, `_payload`) as rows of the quarantine table."""
    return rejected.select(
        F.lit(model).alias("model"),
        F.col(PAYLOAD).alias("payload"),
        F.col(REASON).alias("reason"),
        F.lit(path).alias("source"),
        F.lit(json.dumps({"file": path, "sha256": digest})).alias("position"),
        F.lit(None).cast("bigint").alias("batch_id"),
        F.lit(None).cast("string").alias("generation"),
        F.current_timestamp().alias("quarantined_at"),
    )


def _append(
    warehouse: Warehouse,
    frame: DataFrame,
    table: str,
    transaction: tuple[str, int],
    options: dict[str, str] | None = None,
) -> int | None:
    """Append rows once and return the version of the commit, None if an earlier run has made it."""
    before = warehouse.latest_version(table)
    warehouse.append(frame, table, transaction, options)
    after = warehouse.latest_version(table)
    return after if after > before else None


def prepare(warehouse: Warehouse, spec: ModelSpec, schema: pa.Schema) -> KeyTypes:
    """Create the measurements table if it does not exist, and return the types of its key columns."""
    table = measurements(spec.name)
    if not warehouse.exists(table):
        types = key_types_of(spec.naming_columns, schema)
        warehouse.create(table, measurement_columns(spec, types), properties=MEASUREMENT_PROPERTIES)
        return types
    return key_types_in(warehouse, spec)


def file_schema(spec: ModelSpec, path: str) -> pa.Schema:
    """Return a file's schema after checking it against the spec.

    Raises:
        UserError: a column is missing or has an unusable type, or the file cannot be read.
    """
    schema = json_schema(Path(path), spec) if is_json(path) else read_schema(Path(path), spec.columns)
    refuse_types(spec, schema, path)
    return schema


def _frame(warehouse: Warehouse, spec: ModelSpec, path: str) -> DataFrame:
    """Return a file's raw rows as a data frame."""
    spark = warehouse.spark
    try:
        if path.endswith(".parquet"):
            return spark.read.parquet(path)
        names = read_schema(Path(path), spec.columns).names
        return spark.read.schema(
            StructType([StructField(name, StringType()) for name in (*names, CORRUPT)])
        ).csv(
            path,
            header=True,
            columnNameOfCorruptRecord=CORRUPT,
            mode="PERMISSIVE",
            escape='"',
            ignoreLeadingWhiteSpace=False,
            ignoreTrailingWhiteSpace=False,
        )
    except (PySparkException, Py4JJavaError) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)})") from error


def _files_of(path: str) -> list[Path]:
    """Return a landed file itself, or the part files of a folder that Spark wrote under such a name."""
    return [Path(path)] if Path(path).is_file() else sorted(p for p in Path(path).rglob("*") if p.is_file())


def file_size(path: str) -> int:
    """Return the bytes of a file, or of a folder's part files."""
    return sum(file.stat().st_size for file in _files_of(path))


def file_digest(path: str) -> str:
    """Return the SHA-256 of a file's content."""
    digest = hashlib.sha256()
    for file in _files_of(path):
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
