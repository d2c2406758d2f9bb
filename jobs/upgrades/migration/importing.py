"""Check a user's table of states key by key, convert it to the model's form, and commit it as a snapshot."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyspark.sql import Window
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DateType, StringType, TimestampNTZType, TimestampType

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.input_files import find_files, is_several_files, open_input, parse_path
from jobs.core.report import format_count
from jobs.snapshots.manifests import IMPORTED, Manifest
from jobs.snapshots.model_runtime import ModelRuntime
from jobs.snapshots.state_rows import STATE_ROWS, StateRows, build_state_columns, measure_rows, restore_types
from jobs.snapshots.store import find_whole, write
from jobs.spark.foreign_files import read_own_files
from jobs.spark.hadoop_files import convert_path
from jobs.spark.job_labels import label_jobs
from jobs.state.encoding.keys import build_key_text
from jobs.state.encoding.rows import map_batches
from jobs.storage.warehouse import find_home
from jobs.upgrades.migration.migrating import MOST_LEFT_OUT, keep_left_out
from jobs.upgrades.migration.state_map import check_moments_suffice, find_wrong_states
from kalman.filters.state_layout import locate_fields
from kalman.linalg.packing import pack, unpack
from kalman.types import Filter

if TYPE_CHECKING:
    from typing import Any

    from pyspark.sql import Column, DataFrame

    from jobs.spark.warehouse import Warehouse


Floats = NDArray[np.float64]

MEAN, COVARIANCE, EVENT_TIME = "mean", "covariance", "event_time"
COUNT, SCORE = "state_index", "log_likelihood"
MADE = ("factor", "diffuse", MEAN, COVARIANCE)
"""Fields of a state that follow from mean and covariance."""
CHECKED = f"key string, {STATE_ROWS}, problem string, given string"
"""Columns of the check's result for each row: key and state, or the problem and the row as JSON."""
TOLERANCE = 1e-6
"""Tolerance of the check that the weights of a mixture add up to 1."""


class Form(NamedTuple):
    """Widths of the lists of numbers in a table, by name; sent to the executors.

    whole: whether the state has only the fields of a mixture, and no mean and covariance.
    """

    widths: Mapping[str, int]
    whole: bool


class StateTable(NamedTuple):
    """A plan for reading a table: a column expression for each list of numbers, by name, and the form of the lists."""

    lists: Mapping[str, Column]
    form: Form


def plan_table(model: Filter, key: Sequence[str], columns: Sequence[str], where: str) -> StateTable:
    """Return the plan for reading a model's states from a table with these columns.

    Raises:
        UserError: a column is missing or unknown; the message lists the possible columns.
    """
    n = len(model.states)
    whole = check_moments_suffice(model) is not None
    widths = {name: int(np.prod(shape)) for name, shape in model.fields.items() if name not in MADE}
    parts = {
        name: [f"{name}_{i}" for i in range(width)] if width > 1 else [name] for name, width in widths.items()
    }
    if not whole:
        widths |= {MEAN: n, COVARIANCE: n * n}
        parts[MEAN] = [f"{MEAN}_{a}" for a in model.states]
        parts[COVARIANCE] = [f"{COVARIANCE}_{a}_{b}" for a in model.states for b in model.states]
    needed = [name for name in widths if name != "rows"] if whole else [MEAN, COVARIANCE]
    known = [*key, EVENT_TIME, COUNT, SCORE, *widths, *(one for flat in parts.values() for one in flat)]
    unknown = [name for name in columns if name not in known]
    found = {name: _build_expression(name, parts[name], columns) for name in widths}
    absent = [name for name in (*key, EVENT_TIME) if name not in columns]
    absent += [name for name in needed if found[name] is None]
    if unknown or absent:
        problem = (
            f"there is no column {', '.join(absent)}" if absent else f"unknown column {', '.join(unknown)}"
        )
        more = [name for name in widths if name not in needed]
        raise UserError(
            f"{where}: {problem}. It may have {', '.join([*key, EVENT_TIME, *needed])}; and "
            f"{', '.join([COUNT, SCORE, *more])} (lists of numbers, or flat columns such as {parts[needed[0]][0]})"
        )
    lists = {name: one for name, one in found.items() if one is not None}
    return StateTable(lists, Form({name: widths[name] for name in lists}, whole))


def _build_expression(name: str, flat: Sequence[str], columns: Sequence[str]) -> Column | None:
    """Return the column expression of a list of numbers; None if the table lacks the list."""
    if name in columns and (len(flat) > 1 or flat != [name]):
        return F.col(f"`{name}`").try_cast("array<double>").alias(f"l_{name}")
    if not all(one in columns for one in flat):
        return None
    if flat == [name]:
        return F.coalesce(
            F.array(F.col(f"`{name}`").try_cast("double")), F.array(F.lit(None).cast("double"))
        ).alias(f"l_{name}")
    return F.array(*(F.col(f"`{one}`").try_cast("double") for one in flat)).alias(f"l_{name}")


def check_rows(model: Filter, table: Form, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert rows of a table to rows with the columns `CHECKED`.

    A row of the table has key, event_time (microseconds), state_index, log_likelihood, times (number of rows with its
    key), given, and the lists.
    """
    size = batch.num_rows
    problems: list[str | None] = [None] * size
    read = {name: _read_numbers(batch.column(f"l_{name}"), table.widths[name]) for name in table.widths}
    with np.errstate(all="ignore"):
        state = _build_states(model, table, {name: values for name, (values, _) in read.items()}, size)
    found = [
        *_find_row_problems(batch),
        *((bad, f"{name} is not {table.widths[name]} finite numbers") for name, (_, bad) in read.items()),
    ]
    found += _find_state_problems(model, table, state, {name: values for name, (values, _) in read.items()})
    for bad, what in found:
        for place in np.flatnonzero(bad):
            problems[place] = problems[place] or what
    wrong = np.array([one is not None for one in problems])
    state[:, wrong] = 0.0  # the states of refused rows are not used
    key, time, score, given = (batch.column(name) for name in ("key", EVENT_TIME, SCORE, "given"))
    columns = build_state_columns(key, batch.column(COUNT).fill_null(1), time, score, model.snapshot(state))
    columns["problem"] = pa.array(problems, pa.string())
    columns["given"] = pc.if_else(pa.array(wrong), given, None)  # type: ignore[attr-defined]
    return pa.RecordBatch.from_pydict(columns)


def _read_numbers(column: pa.ListArray, width: int) -> tuple[Floats, NDArray[np.bool_]]:
    """Return lists as (width, N), NaN for a wrong length, and a mask of the rows with a value that is not finite."""
    values = np.full((width, len(column)), np.nan)
    lengths = np.array([-1 if a is None else a for a in column.value_lengths().to_pylist()])
    right = np.flatnonzero(lengths == width)
    if len(right):
        flat = column.take(pa.array(right)).flatten().to_numpy(zero_copy_only=False)
        values[:, right] = np.asarray(flat, float).reshape(len(right), width).T
    return values, np.asarray(~np.isfinite(values).all(axis=0))


def _find_row_problems(batch: pa.RecordBatch) -> list[tuple[NDArray[np.bool_], str]]:
    """Return each problem of keys, times and counts, with a mask of the rows that have it."""

    def null(name: str) -> NDArray[np.bool_]:
        return batch.column(name).is_null().to_numpy(zero_copy_only=False)

    counts = batch.column(COUNT).fill_null(1).to_numpy()
    scores = batch.column(SCORE).to_numpy(zero_copy_only=False)
    return [
        (null("key"), "the key is missing, or of another type than in the measurements"),
        (batch.column("times").to_numpy() > 1, "the key has several rows"),
        (null(EVENT_TIME), f"{EVENT_TIME} is missing or not a time"),
        (counts < 1, f"{COUNT} is below 1"),
        (~np.isfinite(scores), f"{SCORE} is not a finite number"),
    ]


def _build_states(model: Filter, table: Form, given: Mapping[str, Floats], size: int) -> Floats:
    """Return the states (size, K) of the model from the given lists."""
    if table.whole:
        state = np.zeros((model.size, size))
    else:
        P = given[COVARIANCE].reshape(len(model.states), -1, size)
        even = 0.5 * (P + P.transpose(1, 0, 2))
        state = model.from_moments(given[MEAN], even.reshape(-1, size))
    for name, place in locate_fields(model.fields).items():
        if name in given and name not in MADE:
            state[place] = given[name]
    return state


def _find_state_problems(
    model: Filter, table: Form, state: Floats, given: Mapping[str, Floats]
) -> list[tuple[NDArray[np.bool_], str]]:
    """Return each problem of states, with a mask of the keys whose state has it."""
    finite = np.asarray(np.isfinite(state).all(axis=0))
    found: list[tuple[NDArray[np.bool_], str]] = [(~finite, "the state is not finite")]
    if table.whole:
        weights = given["weights"]
        off = (weights < 0.0).any(axis=0) | ~(np.abs(weights.sum(axis=0) - 1.0) <= TOLERANCE)
        found.append((off, "weights are below 0, or do not sum to 1"))
        with np.errstate(all="ignore"):
            mean, packed = model.moments(np.where(finite, state, 0.0))
        covariance = unpack(packed)
    else:
        mean, covariance = given[MEAN], given[COVARIANCE]
    mean, covariance = (np.where(finite, a, 0.0) for a in (mean, covariance))
    even = unpack(pack(covariance))
    uneven = find_wrong_states(mean, covariance) & ~find_wrong_states(mean, even)
    found.append((uneven, "the covariance is not symmetric"))
    found.append((find_wrong_states(mean, covariance), "the covariance is not positive semidefinite"))
    return found


SHOWN_KEYS = 5
_FILES = (".csv", ".parquet")


class Imported(NamedTuple):
    """The snapshot made from a table (None in a dry run), and the keys that were left out.

    keys: number of keys in the snapshot. left_out: number of refused rows by problem. some: examples of refused keys.
    made: whether this call wrote the snapshot.
    """

    manifest: Manifest | None
    keys: int
    left_out: dict[str, int]
    some: list[str]
    made: bool


def read_table(warehouse: Warehouse, name: str) -> DataFrame:
    """Read .csv or .parquet files (a file, a folder or a glob), or a Delta table by its path or its warehouse name.

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
    return read_own_files(home, table, f"--input {name}", False)


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

    The same table and position give the same snapshot. If the process is killed before the commit of the manifest, the
    snapshot does not exist, and the next call completes it.

    Raises:
        UserError: a column is missing or unknown, the table has no rows, or too many keys have an invalid state.
    """
    spec, spark = runtime.spec, warehouse.spark
    frame = read_table(warehouse, name)
    table = plan_table(runtime.kernel, spec.key, frame.columns, f"--input {name}")
    _refuse_texts(frame, table, name)
    runtime.ship(spark)
    on_progress("checking every key")
    checker = map_batches(partial(check_rows, runtime.kernel, table.form))
    rows = _prepare_rows(frame, runtime, table).mapInArrow(checker, CHECKED).persist()
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
    """Refuse a table in which a column stores lists of numbers as text."""
    for column in table.lists:
        if column in frame.columns and table.form.widths[column] > 1:
            kind = frame.schema[column].dataType
            if not isinstance(kind, ArrayType):
                raise UserError(
                    f"--input {name}: {column} is of type {kind.simpleString()}, not a list of numbers: in a .csv "
                    f"file write flat columns, a number each (docs/upgrades.md)"
                )


def _prepare_rows(frame: DataFrame, runtime: ModelRuntime, table: StateTable) -> DataFrame:
    """Return the rows with the columns that `check_rows` expects."""
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
        return F.lit(None).cast("timestamp")  # the origin and the unit of a number are unknown
    return column.try_cast("timestamp")


def _build_optional_column(frame: DataFrame, name: str, kind: str, default: float) -> Column:
    """Return a column, or its default value if the table lacks it; a value that is not a number becomes null."""
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
    """Refuse a table without keys, or with too many invalid keys, because then the table is wrong."""
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
