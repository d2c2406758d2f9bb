"""State rows that tasks read from files by Arrow: the rows that Spark reads, whoever wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import functions as F

from jobs.core.errors import UserError
from jobs.snapshots import store
from jobs.snapshots.state_rows import measure_rows, read_stored_rows
from jobs.snapshots.verified_rows import read_rows
from jobs.spark.warehouse import Warehouse
from tests.jobs.snapshots.test_state_files import KEYS, made, manifest

pytestmark = pytest.mark.spark


def rows_of(frame: Any) -> str:
    return repr(frame.orderBy("key").collect())  # NaN is no number that equals itself


@pytest.mark.core
def test_they_are_those_that_spark_reads(warehouse: Warehouse) -> None:
    store.write(warehouse, manifest("walk-v1-0-abc"), made(warehouse.spark, 7))  # another partition
    written = store.write(warehouse, manifest(), made(warehouse.spark))
    rows = read_stored_rows(warehouse, written, written.snapshots_version)
    columns = ["key", "state_index", "event_time", "mean", "covariance", "log_likelihood", "extras"]
    assert rows_of(rows.frame) == rows_of(read_rows(warehouse, written.snapshot_id, "walk").select(*columns))
    assert measure_rows(rows) == (KEYS, written.checksum, written.rows)


def test_times_of_earlier_releases_that_nanoseconds_cannot_hold_are_read(warehouse: Warehouse) -> None:
    far = made(warehouse.spark, 3).frame.withColumn(
        "event_time", F.expr("timestamp'1500-01-01 00:00:00.000001Z'")
    )
    written = store.write(warehouse, manifest(), far)
    rows = warehouse.read("snapshots").localCheckpoint()
    rows.write.format("delta").mode("overwrite").save(warehouse.path("snapshots"))  # Java's times are INT96
    found = read_stored_rows(warehouse, written, written.snapshots_version + 1)
    assert rows_of(found.frame.select("key", "event_time")) == rows_of(far.select("key", "event_time"))
    assert measure_rows(found) == (3, written.checksum, written.rows)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize("harm", [damage, cut, Path.unlink])
def test_a_damaged_file_is_told_with_its_snapshot(warehouse: Warehouse, harm: Any, here: bool) -> None:
    written = store.write(warehouse, manifest(), made(warehouse.spark))
    harm(Path(DeltaTable(warehouse.path("snapshots")).file_uris()[0]))
    reader = warehouse.work(in_process=True) if here else warehouse
    with pytest.raises(UserError, match=f"snapshot {written.snapshot_id} (is damaged|cannot be read)"):
        store.find_whole_states(reader, written)
    assert store.find_whole(reader, written.snapshot_id) is None
    again = store.write(warehouse, manifest(), made(warehouse.spark))
    assert again.checksum == written.checksum and store.find_whole(warehouse, written.snapshot_id) == again


def test_a_version_that_the_log_no_longer_has_gives_way_to_the_newest(warehouse: Warehouse) -> None:
    written = store.write(warehouse, manifest(), made(warehouse.spark, 10))
    store.write(warehouse, manifest("walk-v1-2-abc"), made(warehouse.spark, 10))
    table = DeltaTable(warehouse.path("snapshots"))
    table.create_checkpoint()
    for version in range(written.snapshots_version + 1):
        (Path(warehouse.path("snapshots")) / "_delta_log" / f"{version:020d}.json").unlink()
    assert store.find_whole_states(warehouse, written) == table.version()
