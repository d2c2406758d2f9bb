"""Land files in the measurements table: rows that fit are appended, all others go to quarantine with the reason.

A file is known by its content. Its rows and its quarantined rows are one commit each, in the file's own transaction:
landing it again, or again after a run that was killed in between, changes nothing and completes what was missing.
"""

from __future__ import annotations

import csv
import glob
import gzip
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.errors import UserError, first_line
from jobs.parse_rows import CORRUPT, REASON, check_types, checked_rows, key_types_of, measurement_columns
from jobs.progress import Progress
from jobs.report import Report
from jobs.settings import Settings
from jobs.spec import ModelSpec, load_spec
from jobs.tables import QUARANTINE, Warehouse, measurements

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

SMALL_BYTES = 64 << 20
"""Files of less than this, together, are landed before compiling anything would have paid for itself."""
SUFFIXES = (".csv", ".csv.gz", ".parquet")
MEASUREMENT_PROPERTIES = {
    # A stream that was stopped for months must still find every version after its position.
    "delta.logRetentionDuration": "interval 400 days",
    "delta.enableExpiredLogCleanup": "true",
}


@dataclass(frozen=True, slots=True)
class Landed:
    """What became of one file.

    rows: that fit; reasons: how many rows were quarantined now for which reason; version: of the measurements
    table, None if the file had been landed before.
    """

    path: str
    rows: int
    reasons: dict[str, int]
    version: int | None


def run(settings: Settings, model: str, inputs: list[str]) -> Report:
    """Land `inputs` (files, folders, globs) for a model.

    Raises:
        UserError: a file cannot be read or lacks a column; nothing has been landed then.
    """
    from jobs.session import spark_session
    from jobs.spark_conf import glance_conf

    spec = load_spec(model, settings.models)
    files = find_files(inputs)
    small = sum(_size(path) for path in files) < SMALL_BYTES
    spark = spark_session(settings, f"ingest {spec.name}", glance_conf() if small else None)
    warehouse = Warehouse(spark, settings.warehouse)
    frames = {path: _read(warehouse, path, spec) for path in files}
    landed: list[Landed] = []
    with Progress(f"ingest {spec.name}", len(files), quiet=settings.quiet) as progress:
        for path, frame in frames.items():
            landed.append(land(warehouse, spec, path, frame))
            progress.advance(1, f"{sum(one.rows for one in landed):,} rows")
    return _report(spec, landed)


def find_files(inputs: list[str]) -> list[str]:
    """Return the files that `inputs` name, in the order of their names.

    Raises:
        UserError: an input names nothing that can be landed.
    """
    found: list[str] = []
    for text in inputs:
        path = Path(text).expanduser()
        if "://" in text:
            raise UserError(f"{text}: only files of this machine or of a mounted file system can be landed")
        if path.is_dir():
            names = sorted(
                str(p) for p in path.iterdir() if p.name.endswith(SUFFIXES) and p.name[0] not in "._"
            )
        elif path.is_file():
            names = [str(path)]
        else:
            names = sorted(glob.glob(str(path)))
        if not names:
            raise UserError(f"{text}: there is no such file, or no {', '.join(SUFFIXES)} file in that folder")
        for name in names:
            if not name.endswith(SUFFIXES):
                raise UserError(f"{name}: unknown kind of file; give {', '.join(SUFFIXES)}")
        found += names
    return list(dict.fromkeys(str(Path(name).absolute()) for name in found))


def land(warehouse: Warehouse, spec: ModelSpec, path: str, raw: DataFrame) -> Landed:
    """Land one file's rows: quarantine first, then measurements, each at most once."""
    from pyspark.sql import functions as F

    table, types = _prepare(warehouse, spec, raw.schema)
    digest = _digest(path)
    application = f"ingest-{spec.name}-{digest}"
    rows = checked_rows(raw, spec, types).persist()
    try:
        counts = rows.groupBy(REASON).agg(
            F.count("*").alias("rows"),
            F.min(F.unix_micros(F.col(f"`{spec.time}`"))).alias("first"),
            F.max(F.unix_micros(F.col(f"`{spec.time}`"))).alias("last"),
        )
        by_reason = {row[REASON]: row for row in counts.collect()}
        good = by_reason.pop(None, None)
        reasons = {reason: int(row["rows"]) for reason, row in sorted(by_reason.items())}
        if reasons and not _quarantine(warehouse, spec, rows, path, digest, application):
            reasons = {}
        if good is None:
            return Landed(path, 0, reasons, None)
        detail = {
            "file": path,
            "sha256": digest,
            "rows": good["rows"],
            "min_time": good["first"],
            "max_time": good["last"],
        }
        accepted = rows.filter(F.col(REASON).isNull()).drop(REASON, "_payload")
        accepted = accepted.withColumn("_origin", F.lit(path)).withColumn("_landed_at", F.current_timestamp())
        before = warehouse.latest_version(table)
        # A file is one commit of few files, so that its rows stay together and in order in a micro-batch.
        accepted = accepted.coalesce(max(1, int(good["rows"]) // 2_000_000))
        warehouse.append(accepted, table, (application, 1), {"userMetadata": json.dumps(detail)})
        after = warehouse.latest_version(table)
        return Landed(path, int(good["rows"]), reasons, after if after > before else None)
    finally:
        rows.unpersist()


def _prepare(warehouse: Warehouse, spec: ModelSpec, schema: StructType) -> tuple[str, dict[str, str]]:
    """Make the measurements table if it is not there, and return it with the types of its key columns."""
    table = measurements(spec.name)
    if warehouse.exists(table):
        have = {field.name: field.dataType.simpleString() for field in warehouse.read(table).schema.fields}
        absent = [name for name in spec.columns if name not in have]
        if absent:
            raise UserError(
                f"the measurements table of {spec.name} has no column {', '.join(absent)}, which its spec names: "
                f"give a model with other columns another name"
            )
        return table, {name: have[name] for name in spec.key}
    types = key_types_of(spec, schema)
    warehouse.create(table, measurement_columns(spec, types), properties=MEASUREMENT_PROPERTIES)
    return table, types


def _quarantine(
    warehouse: Warehouse, spec: ModelSpec, rows: DataFrame, path: str, digest: str, application: str
) -> bool:
    """Write the rows that do not fit; False if they had been written before."""
    from pyspark.sql import functions as F

    warehouse.create("quarantine", QUARANTINE)
    rejected = rows.filter(F.col(REASON).isNotNull()).select(
        F.lit(spec.name).alias("model"),
        F.col("_payload").alias("payload"),
        F.col(REASON).alias("reason"),
        F.lit(path).alias("source"),
        F.lit(json.dumps({"file": path, "sha256": digest})).alias("position"),
        F.lit(None).cast("bigint").alias("batch_id"),
        F.lit(None).cast("string").alias("generation"),
        F.current_timestamp().alias("quarantined_at"),
    )
    before = warehouse.latest_version("quarantine")
    warehouse.append(rejected.coalesce(1), "quarantine", (application, 1))
    return warehouse.latest_version("quarantine") > before


def _read(warehouse: Warehouse, path: str, spec: ModelSpec) -> DataFrame:
    """Open a file and check that it has the spec's columns."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException
    from pyspark.sql.types import StringType, StructField, StructType

    spark = warehouse.spark
    try:
        if path.endswith(".parquet"):
            frame = spark.read.parquet(path)
        else:
            schema = StructType([StructField(name, StringType()) for name in (*_header(path), CORRUPT)])
            frame = spark.read.schema(schema).csv(
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
    columns = [name for name in frame.columns if name != CORRUPT]
    absent = [name for name in spec.columns if name not in columns]
    if absent:
        raise UserError(
            f"{path}: there is no column {', '.join(absent)}, which model {spec.name} needs "
            f"(it has {', '.join(columns)})"
        )
    check_types(path, frame.schema, spec)
    return frame


def _header(path: str) -> list[str]:
    """Return the column names of a CSV file. Spark would start a job to find them.

    Raises:
        UserError: the file has none, names one twice, or is no text.
    """
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8-sig")
            if path.endswith(".gz")
            else open(path, encoding="utf-8-sig", newline="") as text
        ):
            header = next((row for row in csv.reader(text) if row), None)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)})") from error
    if header is None:
        raise UserError(f"{path}: is empty")
    for name in header:
        if header.count(name) > 1:
            raise UserError(f"{path}: column '{name}' is there twice; rename one of them")
    return header


def _files_of(path: str) -> list[Path]:
    """Return the files of a landed file: itself, or the parts of a folder that Spark wrote under such a name."""
    return [Path(path)] if Path(path).is_file() else sorted(p for p in Path(path).rglob("*") if p.is_file())


def _size(path: str) -> int:
    return sum(file.stat().st_size for file in _files_of(path))


def _digest(path: str) -> str:
    digest = hashlib.sha256()
    for file in _files_of(path):
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def _report(spec: ModelSpec, landed: list[Landed]) -> Report:
    new = [one for one in landed if one.version is not None]
    rows = sum(one.rows for one in new)
    reasons: dict[str, int] = {}
    for one in landed:
        for reason, count in one.reasons.items():
            reasons[reason] = reasons.get(reason, 0) + count
    quarantined = sum(reasons.values())
    before = sum(1 for one in landed if one.version is None and one.rows)
    lines = [f"landed {rows:,} rows of {len(new)} files for {spec.name}"]
    if before:
        lines.append(f"{before} files had been landed before and changed nothing")
    if quarantined:
        lines.append(
            f"quarantined {quarantined:,} rows: "
            + "; ".join(f"{n:,} {r}" for r, n in sorted(reasons.items()))
        )
    versions = [one.version for one in new if one.version is not None]
    if versions:
        lines.append(f"the measurements table is at version {versions[-1]}")
    return Report(
        lines,
        {
            "model": spec.name,
            "files": len(landed),
            "files_landed": len(new),
            "files_landed_before": before,
            "rows": rows,
            "quarantined": quarantined,
            "reasons": reasons,
            "version": versions[-1] if versions else None,
        },
    )


if __name__ == "__main__":
    from jobs.cli import main

    main("ingest")
