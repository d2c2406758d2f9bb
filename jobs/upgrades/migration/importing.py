"""Convert a user's table of states to a snapshot; every key is checked before the commit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Window
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DateType, StringType, TimestampNTZType, TimestampType

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.input_files import find_files, is_several_files, open_input, parse_path
from jobs.core.report import format_count
from jobs.snapshots.manifests import IMPORTED, Manifest
from jobs.snapshots.runtime import ModelRuntime
from jobs.snapshots.state_files import measure_rows
from jobs.snapshots.state_rows import StateRows, restore_types
from jobs.snapshots.store import find_whole, write
from jobs.spark.job_labels import label_jobs
from jobs.spark.read_files import convert_path
from jobs.state.encoding.keys import build_key_text
from jobs.storage.warehouse import find_home
from jobs.upgrades.migration.migrating import MOST_LEFT_OUT, keep_left_out
from jobs.upgrades.migration.state_tables import (
    CHECKED,
    COUNT,
    EVENT_TIME,
    SCORE,
    StateTable,
    build_checker,
    plan_table,
)

if TYPE_CHECKING:
    from typing import Any

    from pyspark.sql import Column, DataFrame

    from jobs.spark.warehouse import Warehouse

SHOWN_KEYS = 5
_FILES = (".csv", ".parquet")


class Imported(NamedTuple):
    """Snapshot made from a table (None in a dry run), and the keys that were left out.

    keys: number of keys in the snapshot; left_out: number of refused rows by problem; some: examples of refused keys;
    made: whether this call wrote the snapshot
    """

    manifest: Manifest | None
    keys: int
    left_out: dict[str, int]
    some: list[str]
    made: bool


def read_table(warehouse: Warehouse, name: str) -> DataFrame:
    """Read .csv or .parquet files (one, a folder or a glob), or a Delta table, by path or by name in the warehouse.

    Raises:
        UserError: the file or table does not exist.
    """
    home, table = find_home(warehouse, name)
    path = Path(name) if "://" in name else parse_path(name)
    several = "://" not in name and is_several_files(name, ()) and not home.exists(table)
    if several or path.is_file() and path.suffix.lower() in _FILES:
        files = [Path(one) for one in find_files([name], _FILES)]
        frames = [_read_file(warehouse, file) for file in files]
        for file, frame in zip(files, frames, strict=True):
            if set(frame.columns) != set(frames[0].columns):
                raise UserError(f"{file}: has other columns than {files[0]}; give each file the same")
        return reduce(lambda one, other: one.unionByName(other), frames)
    if path.is_file() or not home.exists(table):
        raise UserError(f"--input {name}: no such .csv or .parquet file, and no such Delta table")
    return home.read(table)


def _read_file(warehouse: Warehouse, path: Path) -> DataFrame:
    if path.suffix.lower() == ".csv":
        return warehouse.spark.read.csv(convert_path(warehouse.spark, str(path.absolute())), header=True)
    return _read_parquet(warehouse, path)


def _read_parquet(warehouse: Warehouse, path: Path) -> DataFrame:
    """Read a Parquet file that may have nanosecond times, which Spark reads only as integers."""
    with open_input(path) as stream:
        schema = pq.read_schema(stream)
    fine = [field.name for field in schema if field.type in (pa.timestamp("ns"), pa.timestamp("ns", "UTC"))]
    if fine:
        warehouse.spark.conf.set("spark.sql.legacy.parquet.nanosAsLong", "true")
    frame = warehouse.spark.read.parquet(convert_path(warehouse.spark, str(path.absolute())))
    for name in fine:
        frame = frame.withColumn(name, F.timestamp_micros(F.expr(f"`{name}` div 1000")))
    return frame


def import_states(
    warehouse: Warehouse,
    runtime: ModelRuntime,
    name: str,
    position: dict[str, Any],
    dry_run: bool = False,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Imported:
    """Return the snapshot of a table's states at a position in the model's measurements.

    The same table and position give the same snapshot. If the process is killed before the commit of the manifest,
    nothing is visible, and the next call completes it.

    Raises:
        UserError: a column is missing or unknown, the table has no rows, or too many keys have an invalid state.
    """
    spec, spark = runtime.spec, warehouse.spark
    frame = read_table(warehouse, name)
    table = plan_table(runtime.kernel, spec.key, frame.columns, f"--input {name}")
    _refuse_texts(frame, table, name)
    runtime.ship(spark)
    on_progress("checking every key")
    rows = (
        _prepare_rows(frame, runtime, table)
        .mapInArrow(build_checker(runtime.kernel, table.form), CHECKED)
        .persist()
    )
    try:
        with label_jobs(spark, f"import {spec.name}", "check every key"):
            good = restore_types(rows.filter(F.col("problem").isNull())).drop("problem", "given")
            keys, checksum, _ = measure_rows(StateRows.of(good))
            left_out, some = _count_refused_rows(rows)
        _refuse(keys, left_out, some, name)
        identity = _compute_snapshot_id(runtime, position, keys, checksum)
        if dry_run:
            return Imported(None, keys, left_out, some, False)
        found = find_whole(warehouse, identity)
        if found is not None:
            return Imported(found, keys, left_out, some, False)
        if left_out:
            bad = rows.filter(F.col("problem").isNotNull()).withColumnRenamed("given", "state")
            why = F.concat(F.lit("state: "), "problem", F.lit("; left out of the import"))
            keep_left_out(warehouse, bad, spec.name, f"import/{name}", why, identity, "import")
        on_progress(f"writing {format_count(keys, 'key')}")
        manifest = Manifest(
            snapshot_id=identity,
            model=spec.name,
            model_version=spec.version,
            fingerprint=spec.fingerprint(),
            parameters={},
            position=position,
            key_count=keys,
            checksum="",
            rows=0,
            snapshots_version=0,
            spec=spec.format_stored_text(),
        )
        with label_jobs(spark, f"import {spec.name}", "write the snapshot"):
            return Imported(write(warehouse, manifest, good), keys, left_out, some, True)
    finally:
        rows.unpersist()


def _refuse_texts(frame: DataFrame, table: StateTable, name: str) -> None:
    """Refuse columns that store lists of numbers as text."""
    for column in table.lists:
        if column in frame.columns and table.form.widths[column] > 1:
            kind = frame.schema[column].dataType
            if not isinstance(kind, ArrayType):
                raise UserError(
                    f"--input {name}: {column} is of type {kind.simpleString()}, not a list of numbers: in a .csv "
                    f"file write flat columns, a number each (docs/upgrades.md)"
                )


def _prepare_rows(frame: DataFrame, runtime: ModelRuntime, table: StateTable) -> DataFrame:
    """Return the rows with the columns that `checker` expects."""
    kind = runtime.kind
    typed = [
        F.col(f"`{name}`").try_cast(type_).alias(name)
        for name, type_ in zip(kind.columns, kind.types, strict=True)
    ]
    missing = F.lit(False)
    for name in kind.columns:
        missing = missing | F.col(f"`{name}`").isNull()
    wide = frame.select(
        *typed,
        F.unix_micros(_build_time_column(frame)).alias("_time"),
        _build_optional_column(frame, COUNT, "bigint", 1).alias("_count"),
        _build_optional_column(frame, SCORE, "double", 0.0).alias("_score"),
        F.to_json(F.struct(*(F.col(f"`{column}`") for column in frame.columns))).alias("_given"),
        *table.lists.values(),
    )
    text = F.when(~missing, build_key_text(kind)).alias("key")
    keyed = wide.select(
        text,
        F.col("_time").alias(EVENT_TIME),
        F.col("_count").alias(COUNT),
        F.col("_score").alias(SCORE),
        F.col("_given").alias("given"),
        *(f"`l_{name}`" for name in table.lists),
    )
    return keyed.withColumn("times", F.count("key").over(Window.partitionBy("key")))


def _build_time_column(frame: DataFrame) -> Column:
    column = F.col(f"`{EVENT_TIME}`")
    kind = frame.schema[EVENT_TIME].dataType
    if not isinstance(kind, TimestampType | TimestampNTZType | DateType | StringType):
        return F.lit(None).cast("timestamp")  # a number has no known origin and unit
    return column.try_cast("timestamp")


def _build_optional_column(frame: DataFrame, name: str, kind: str, default: float) -> Column:
    """Return a column, or its default if the table lacks it; a value that is not a number becomes null."""
    if name not in frame.columns:
        return F.lit(default).cast(kind)
    value = F.col(f"`{name}`").try_cast(kind)
    return F.when(F.col(f"`{name}`").isNull(), F.lit(default).cast(kind)).otherwise(value)


def _count_refused_rows(rows: DataFrame) -> tuple[dict[str, int], list[str]]:
    """Return the number of refused rows by problem, and examples of their keys."""
    bad = rows.filter(F.col("problem").isNotNull())
    counts = {row["problem"]: int(row["count"]) for row in bad.groupBy("problem").count().collect()}
    shown = bad.select("key").distinct().orderBy("key").limit(SHOWN_KEYS).collect() if counts else []
    return dict(sorted(counts.items())), [str(row["key"]) for row in shown]


def _refuse(keys: int, left_out: dict[str, int], some: list[str], name: str) -> None:
    """Refuse a table without keys, or with too many keys to leave out: then the table is wrong, not a key."""
    bad = sum(left_out.values())
    if keys + bad == 0:
        raise UserError(f"--input {name}: it has no rows: nothing was written")
    if bad > MOST_LEFT_OUT * (keys + bad):
        reasons = "; ".join(f"{problem}: {count:,}" for problem, count in left_out.items())
        raise UserError(
            f"--input {name}: {bad:,} of {keys + bad:,} rows have no valid state (such as {', '.join(some)}), which is "
            f"more than an import leaves out: nothing was written. {reasons}. Correct the table",
            RUN_FAILED,
        )


def _compute_snapshot_id(runtime: ModelRuntime, position: dict[str, Any], keys: int, checksum: str) -> str:
    """Return the snapshot's id: a digest of all inputs of its content."""
    spec = runtime.spec
    made_of = {"fingerprint": spec.fingerprint(), "position": position, "keys": keys, "checksum": checksum}
    digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
    return f"{spec.name}-v{spec.version}{IMPORTED}{digest[:10]}"
