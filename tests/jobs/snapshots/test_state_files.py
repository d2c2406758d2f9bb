"""State rows of snapshots: written by the tasks that make them, whole whenever they are killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from jobs.core.errors import UserError
from jobs.snapshots import manifests, store
from jobs.snapshots.manifests import Manifest
from jobs.snapshots.state_rows import STATE_COLUMNS, StateRows, map_of
from jobs.snapshots.verified_rows import read_rows
from jobs.spark.warehouse import Warehouse
from jobs.state.encoding.arrow import build_lists
from jobs.storage.row_changes import ReplacingTable

pytestmark = pytest.mark.spark

KEYS = 1_250
"""More than an Arrow batch of the warehouse's in each of two partitions."""


def manifest(name: str = "walk-v1-1-abc") -> Manifest:
    return Manifest(
        snapshot_id=name,
        model="walk",
        model_version=7,
        fingerprint="f",
        parameters={"q": 1.0},
        position={"source": "delta", "version": 1},
        key_count=KEYS,
        checksum="",
        rows=0,
        snapshots_version=0,
        spec="{}",
    )


def made(spark: SparkSession, keys: int = KEYS, wrong: int | None = None, integer: bool = False) -> StateRows:
    """Return state rows that two tasks make; the one of key `wrong` fails after it has written."""

    def make(batches: Any) -> Any:
        for batch in batches:
            number = batch.column("id").to_numpy()
            yield rows_of(number, integer)
            if wrong is not None and wrong in number:
                raise ValueError("the task fails")

    return StateRows(spark.range(keys, numPartitions=2), make, integer)


def rows_of(number: Any, integer: bool) -> pa.RecordBatch:
    size = len(number)
    key = pa.array(number) if integer else pa.array([f"key {one}" for one in number])
    at = pa.array(np.where(number % 5 == 0, 0, number * 1_000_001), mask=number % 5 == 0)
    values = np.stack([number / 7, -number / 3, np.where(number % 11 == 0, np.nan, -0.0)])
    columns = [
        pa.array(number + 1),
        at,
        build_lists(values),
        build_lists(np.tile(values, (3, 1))),
        pa.array(number * 0.1),
    ]
    extras = map_of({"gate": values[:2], "own": values[:1]}, size)
    return pa.RecordBatch.from_arrays([key, *columns, extras], ["key", *(one.name for one in STATE_COLUMNS)])


def rows_in(warehouse: Warehouse, name: str = "walk-v1-1-abc") -> list[Any]:
    return read_rows(warehouse, name, "walk").orderBy("key").collect()


@pytest.mark.core
@pytest.mark.parametrize("integer", [False, True])
def test_the_table_has_the_rows_that_tasks_make_and_the_manifest_their_sums(
    spark: SparkSession, warehouse: Warehouse, integer: bool
) -> None:
    states = made(spark, integer=integer)
    written = store.write(warehouse, manifest(), states)
    assert (written.key_count, written.rows) == (KEYS, KEYS * (KEYS + 1) // 2)
    columns = ["key", "state_index", "event_time", "mean", "covariance", "log_likelihood", "extras"]
    found = store.verify(warehouse, written)
    assert repr(found.select(*columns).orderBy("key").collect()) == repr(
        states.frame.select(*columns).orderBy("key").collect()  # NaN is no number that equals itself
    )
    hashed = F.xxhash64(*columns[:-1], F.map_entries("extras")).cast("decimal(38,0)")
    (total,) = found.agg(F.sum(hashed)).first() or (0,)
    assert f"{int(total) % (1 << 64):016x}" == written.checksum
    (row,) = found.select("model", "snapshot_id", "model_version").distinct().collect()
    assert tuple(row) == ("walk", "walk-v1-1-abc", 7)


def test_a_plain_table_of_states_is_written_by_the_tasks_too(warehouse: Warehouse) -> None:
    first = store.write(warehouse, manifest(), made(warehouse.spark))
    second = store.write(warehouse, manifest("walk-v1-2-abc"), made(warehouse.spark).frame)
    assert second.checksum == first.checksum and second.snapshots_version == first.snapshots_version + 1
    assert repr([row["mean"] for row in rows_in(warehouse)]) == repr(
        [row["mean"] for row in rows_in(warehouse, "walk-v1-2-abc")]
    )


def test_a_snapshot_without_states_is_written(warehouse: Warehouse) -> None:
    written = store.write(warehouse, manifest(), made(warehouse.spark, 0))
    assert (written.key_count, written.rows, written.checksum) == (0, 0, "0" * 16)
    assert store.find_whole(warehouse, written.snapshot_id) == written


@pytest.mark.core
def test_rows_of_an_attempt_that_was_killed_before_its_manifest_are_replaced(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "_commit", killed)
        with pytest.raises(KeyboardInterrupt):
            store.write(warehouse, manifest(), made(warehouse.spark, 10))
    assert not warehouse.exists("manifests") and len(rows_in(warehouse)) == 10
    written = store.write(warehouse, manifest(), made(warehouse.spark))
    assert len(rows_in(warehouse)) == written.key_count == KEYS
    assert store.find_whole(warehouse, written.snapshot_id) == written


def test_a_task_that_fails_leaves_no_file(warehouse: Warehouse) -> None:
    with pytest.raises(PySparkException, match="the task fails"):
        store.write(warehouse, manifest(), made(warehouse.spark, wrong=KEYS - 1))
    assert not list(Path(warehouse.root).glob("snapshots/*/*/*.parquet"))
    assert DeltaTable(warehouse.path("snapshots")).version() == 0


def test_of_two_writers_of_one_snapshot_the_later_one_replaces_the_rows(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one commits while this one's tasks write; its manifest goes on naming its own version."""
    replace, others = ReplacingTable._commit, []

    def overtaken(self: ReplacingTable, *arguments: Any) -> Any:
        if not others:
            others.append(None)
            others[0] = store.write(warehouse, manifest(), made(warehouse.spark))
        return replace(self, *arguments)

    monkeypatch.setattr(ReplacingTable, "_commit", overtaken)
    written = store.write(warehouse, manifest(), made(warehouse.spark))
    assert len(rows_in(warehouse)) == KEYS
    for one in (others[0], written):
        assert store.verify(warehouse, one).count() == KEYS


def test_a_file_that_vanished_before_the_commit_is_told(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = ReplacingTable._commit

    def vacuumed(self: ReplacingTable, parts: Any, *rest: Any) -> Any:
        Path(self.path, parts[0].path).unlink()
        return replace(self, parts, *rest)

    monkeypatch.setattr(ReplacingTable, "_commit", vacuumed)
    with pytest.raises(UserError, match="the file was changed or removed before it was committed"):
        store.write(warehouse, manifest(), made(warehouse.spark))
    assert manifests.read_manifests(warehouse) == []


def test_rows_with_a_name_that_delta_escapes_are_replaced_and_removed(warehouse: Warehouse) -> None:
    odd = manifest("walk-v1-1-a=b c%")
    store.write(warehouse, odd, made(warehouse.spark, 10))
    written = store.write(warehouse, odd, made(warehouse.spark, 20))
    assert store.verify(warehouse, written).count() == len(rows_in(warehouse, odd.snapshot_id)) == 20
    rewritten = warehouse.read("snapshots").drop("model_version").withColumn("model_version", F.lit(7))
    rewritten.write.format("delta").mode("overwrite").save(
        warehouse.path("snapshots")
    )  # in folders of Delta's
    again = store.write(warehouse, odd, made(warehouse.spark, 30))
    assert store.verify(warehouse, again).count() == len(rows_in(warehouse, odd.snapshot_id)) == 30
    store.remove(warehouse, "walk", [odd.snapshot_id])
    assert rows_in(warehouse, odd.snapshot_id) == []
