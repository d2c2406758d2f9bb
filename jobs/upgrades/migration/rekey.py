"""Give the states of a snapshot new keys, by a function of the key columns and a rule that merges colliding keys.

Without a merge rule, old keys that have the same new key are refused. Each function is called once per partition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import Window
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from jobs.core.errors import UserError
from jobs.snapshots.state_rows import build_state_columns
from jobs.state.encoding.arrow import build_matrix
from jobs.state.encoding.keys import KeyKind, build_key_columns, build_key_kind, build_key_text
from jobs.state.encoding.row_order import find_starts
from jobs.state.encoding.rows import map_batches
from jobs.storage.tables import measurements
from jobs.upgrades.migration.state_map import find_wrong_states, load_function
from jobs.upgrades.migration.versions import MigrationStep
from kalman.models.named import Named
from kalman.types import Filter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.spark.warehouse import Warehouse

NEWEST = "newest"
PART_KEYS = 65_536
"""Approximate number of old keys in one call of a merge function."""
SHOWN_COLLISIONS = 3
WHOLE_NUMBERS = ("tinyint", "smallint", "int", "bigint")


class Rekey(NamedTuple):
    """A change of keys. Picklable, because it is sent to the executors.

    old: kind of the old keys. names: the new key columns. whole: the new key columns with whole numbers in the
    measurements table. merge: None, "newest", or a function. target: filter of the new version.
    """

    old: KeyKind
    names: tuple[str, ...]
    whole: tuple[bool, ...]
    function: Named
    merge: str | Named | None
    target: Filter


def build_rekey(warehouse: Warehouse, steps: Sequence[MigrationStep], target: Filter) -> Rekey | None:
    """Return how the steps change the keys; None if the steps do not change the keys.

    Raises:
        UserError: several steps change the keys, or a function is missing.
    """
    changing = [(step, step.keys) for step in steps if step.keys is not None]
    if not changing:
        return None
    if len(changing) > 1:
        versions = " and ".join(str(step.new.version) for step, _ in changing)
        raise UserError(
            f"versions {versions} both change the keys: migrate to version {changing[0][0].new.version} first "
            f"(`kalman-pipeline migrate --model {changing[0][0].new.name} --to {changing[0][0].new.version}`), and "
            f"then that snapshot"
        )
    ((step, rules),) = changing
    folder = step.new.functions_folder
    merge = rules.merge
    schema = warehouse.read(measurements(step.new.name)).schema
    types = {field.name: field.dataType.simpleString() for field in schema.fields}
    return Rekey(
        build_key_kind(step.old.key, schema),
        tuple(step.new.key),
        tuple(types.get(name) in WHOLE_NUMBERS for name in step.new.key),
        load_function(rules.function, "migrate.keys.function", folder),
        merge if merge in (None, NEWEST) else load_function(merge, "migrate.keys.merge", folder),
        target,
    )


def rekey_rows(rows: DataFrame, rekey: Rekey) -> DataFrame:
    """Return a snapshot's state rows with the new keys, and the old keys as `old_key`; new keys may collide."""
    old = [column.alias(f"k{i}") for i, column in enumerate(build_key_columns(rekey.old, F.col("key")))]
    rest = [field for field in rows.schema.fields if field.name != "key"]
    new = [StructField(f"n{i}", StringType()) for i in range(len(rekey.names))]
    schema = StructType([StructField("old_key", StringType()), *new, *rest])
    named = rows.select("*", *old).mapInArrow(
        map_batches(partial(_rename_keys, rekey, [field.name for field in rest])), schema
    )
    text = build_key_text(KeyKind(tuple(field.name for field in new), ("string",) * len(new), False))
    return named.select(text.alias("key"), "old_key", *(field.name for field in rest))


def find_collisions(rows: DataFrame) -> tuple[int, int, list[str]]:
    """Return the number of old keys that collide, the number of their new keys, and examples of old keys as text."""
    shared = rows.groupBy("key").agg(
        F.count("*").alias("n"), F.sort_array(F.collect_list("old_key")).alias("old")
    )
    shared = shared.filter("n > 1")
    total = shared.agg(F.sum("n").alias("old"), F.count("*").alias("new")).first()
    assert total is not None
    some = (
        shared.orderBy("key")
        .select("key", F.slice("old", 1, SHOWN_COLLISIONS).alias("old"))
        .limit(SHOWN_COLLISIONS)
        .collect()
    )
    return (
        int(total["old"] or 0),
        int(total["new"]),
        [f"{', '.join(row['old'])} -> {row['key']}" for row in some],
    )


def merge_rows(rows: DataFrame, rekey: Rekey) -> DataFrame:
    """Return one state row for each new key, made by the merge rule.

    Raises:
        UserError: the merge function returns invalid states; this error is raised when the rows are computed.
    """
    columns = [name for name in rows.columns if name != "old_key"]
    if rekey.merge is None:
        return rows.select(*columns)
    if rekey.merge == NEWEST:
        order = Window.partitionBy("key").orderBy(F.desc("event_time"), F.desc("state_index"), "old_key")
        return rows.withColumn("place", F.row_number().over(order)).filter("place = 1").select(*columns)
    counted = rows.withColumn("shares", F.count("*").over(Window.partitionBy("key")))
    unique = counted.filter("shares = 1").select(*columns)
    parts = max(1, rows.count() // PART_KEYS)
    part = F.pmod(F.xxhash64("key"), F.lit(parts))
    colliding = counted.filter("shares > 1").drop("shares").withColumn("part", part)
    return unique.unionByName(colliding.groupBy("part").applyInArrow(_build_merger(rekey), unique.schema))


def compute_new_keys(rekey: Rekey, old: pd.DataFrame) -> list[list[str]]:
    """Return the new key columns, as text, for a table of the old key columns.

    Raises:
        UserError: the function does not return a whole number or a text for each key and column.
    """
    field = f"migrate.keys.function: {rekey.function.name}"
    found = rekey.function(old)
    if not isinstance(found, pd.DataFrame) or list(found.columns) != list(rekey.names):
        given = list(found.columns) if isinstance(found, pd.DataFrame) else type(found).__name__
        raise UserError(
            f"{field} returned {given}, not a pandas table of the columns {', '.join(rekey.names)}"
        )
    if len(found) != len(old):
        raise UserError(
            f"{field} returned {len(found)} rows for {len(old)} keys: it has to give each key one new key"
        )
    return [
        _convert_to_texts(cast(pd.Series, found[name]), whole, f"{field}: {name}")
        for name, whole in zip(rekey.names, rekey.whole, strict=True)
    ]


def merge_states(
    rekey: Rekey,
    group: NDArray[np.int64],
    event_time: NDArray[np.int64],
    mean: NDArray[np.float64],
    covariance: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Merge the states of K old keys into G states, mean (n, G) and covariance (n*n, G), by the merge function.

    Args:
        rekey: change of keys with a merge function.
        group: (K,) number of the new key of each state, 0 to G-1, in ascending order.
        event_time: (K,) event time of each state in microseconds.
        mean: (n, K) mean of each state.
        covariance: (n*n, K) covariance of each state.

    Raises:
        UserError: the function returns other shapes, or invalid states.
    """
    assert isinstance(rekey.merge, Named)
    n, groups = mean.shape[0], int(group[-1]) + 1
    field = f"migrate.keys.merge: {rekey.merge.name}"
    returned = rekey.merge(group, event_time, mean, covariance)
    try:
        new_mean, new_covariance = (np.asarray(part, np.float64) for part in returned)
    except (TypeError, ValueError):
        raise UserError(f"{field} did not return a mean and a covariance") from None
    if new_mean.shape != (n, groups) or new_covariance.shape != (n * n, groups):
        raise UserError(
            f"{field} returned mean {new_mean.shape} and covariance {new_covariance.shape}, not {(n, groups)} and "
            f"{(n * n, groups)}"
        )
    wrong = find_wrong_states(new_mean, new_covariance)
    if wrong.any():
        raise UserError(
            f"{field} made {int(wrong.sum())} states of {groups} that are not finite, not symmetric or not positive "
            f"semidefinite"
        )
    return new_mean, new_covariance


def _convert_to_texts(column: pd.Series, whole: bool, field: str) -> list[str]:
    if column.isna().any():
        raise UserError(f"{field} has no value for {int(column.isna().sum())} of {len(column)} keys")
    if pd.api.types.is_integer_dtype(column.dtype):
        return [str(value) for value in column.tolist()]
    values = column.tolist()
    if not all(isinstance(value, str) for value in values):
        raise UserError(f"{field} is {column.dtype}: give whole numbers or texts")
    if whole:
        try:
            return [str(int(value)) for value in values]
        except ValueError as error:
            raise UserError(
                f"{field} is to be a whole number, as in the measurements table: {error}"
            ) from None
    return values


def _rename_keys(rekey: Rekey, rest: list[str], batch: pa.RecordBatch) -> pa.RecordBatch:
    old = pd.DataFrame({name: batch.column(f"k{i}").to_pandas() for i, name in enumerate(rekey.old.columns)})
    new = {f"n{i}": pa.array(texts, pa.string()) for i, texts in enumerate(compute_new_keys(rekey, old))}
    others = {name: batch.column(name) for name in rest}
    return pa.RecordBatch.from_pydict({"old_key": batch.column("key"), **new, **others})


def _build_merger(rekey: Rekey) -> Callable[[pa.Table], pa.Table]:
    def merge(table: pa.Table) -> pa.Table:
        needed = table.select([name for name in table.column_names if name not in ("extras", "part")])
        by = [(name, "ascending") for name in ("key", "event_time", "old_key")]
        ordered = needed.sort_by(by).combine_chunks()
        part: Any = ordered.to_batches()[0]
        keys = part.column("key")
        code = keys.dictionary_encode().indices.to_numpy()
        starts = find_starts(code)
        first = np.flatnonzero(starts)
        n = len(rekey.target.states)
        times = part.column("event_time")
        time = times.cast(pa.timestamp("us", times.type.tz)).cast(pa.int64()).to_numpy()
        mean = build_matrix(part.column("mean"), n, "mean")
        covariance = build_matrix(part.column("covariance"), n * n, "covariance")
        new = merge_states(rekey, np.cumsum(starts) - 1, time, mean, covariance)
        moments = rekey.target.snapshot(rekey.target.from_moments(*new))
        count, likelihood = (
            pa.array(np.add.reduceat(part.column(name).to_numpy(), first))
            for name in ("state_index", "log_likelihood")
        )
        newest = times.take(pa.array(np.append(first[1:], len(keys)) - 1))
        return pa.table(build_state_columns(keys.take(pa.array(first)), count, newest, likelihood, moments))

    return merge
