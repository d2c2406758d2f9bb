"""State rows that tasks read from files by Arrow: the rows and the checksum that Java gives, whoever wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from jobs.core.errors import UserError
from jobs.snapshots import store
from jobs.snapshots.state_rows import measure, read_rows
from jobs.snapshots.stored_rows import measure_rows, stored_rows
from jobs.storage.table_log import WRITER
from jobs.warehouse.delta import Warehouse
from tests.jobs.snapshots.test_state_files import KEYS, made, manifest

pytestmark = pytest.mark.spark


def rows_of(frame: Any) -> str:
    return repr(frame.orderBy("key").collect())  # NaN is no number that equals itself


@pytest.mark.core
def test_they_are_those_of_java_whoever_wrote_them(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for writer in ("java", "files"):
        monkeypatch.setenv(WRITER, writer)
        warehouse = Warehouse(spark, str(tmp_path / writer))
        store.write(warehouse, manifest("walk-v1-0-abc"), made(spark, 7))  # another partition
        written = store.write(warehouse, manifest(), made(spark))
        rows = stored_rows(warehouse, written, written.snapshots_version)
        assert rows.source.columns == ["path"]
        by_java = read_rows(warehouse, written.snapshot_id, "walk")
        columns = ["key", "state_index", "event_time", "mean", "covariance", "log_likelihood", "extras"]
        assert rows_of(rows.frame) == rows_of(by_java.select(*columns))
        assert measure_rows(rows) == measure(by_java) == (KEYS, written.checksum, written.rows)


def test_times_that_nanoseconds_cannot_hold_are_read(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WRITER, "java")  # whose times are INT96
    warehouse = Warehouse(spark, str(tmp_path / "warehouse"))
    far = made(spark, 3).frame.withColumn("event_time", F.expr("timestamp'1500-01-01 00:00:00.000001Z'"))
    written = store.write(warehouse, manifest(), far)
    rows = stored_rows(warehouse, written, written.snapshots_version)
    assert rows_of(rows.frame.select("key", "event_time")) == rows_of(far.select("key", "event_time"))
    assert store.find_whole(warehouse, written.snapshot_id) == written


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("harm", [damage, Path.unlink])
def test_a_damaged_file_is_told_with_its_snapshot(spark: SparkSession, tmp_path: Path, harm: Any) -> None:
    warehouse = Warehouse(spark, str(tmp_path / "warehouse"))
    written = store.write(warehouse, manifest(), made(spark))
    harm(Path(DeltaTable(warehouse.path("snapshots")).file_uris()[0]))
    with pytest.raises(UserError, match=f"snapshot {written.snapshot_id} (is damaged|cannot be read)"):
        store.verify(warehouse, written)
    assert store.find_whole(warehouse, written.snapshot_id) is None
    again = store.write(warehouse, manifest(), made(spark))
    assert again.checksum == written.checksum and store.find_whole(warehouse, written.snapshot_id) == again


def test_a_version_that_the_log_no_longer_has_gives_way_to_the_newest(
    spark: SparkSession, tmp_path: Path
) -> None:
    warehouse = Warehouse(spark, str(tmp_path / "warehouse"))
    written = store.write(warehouse, manifest(), made(spark, 10))
    store.write(warehouse, manifest("walk-v1-2-abc"), made(spark, 10))
    table = DeltaTable(warehouse.path("snapshots"))
    table.create_checkpoint()
    for version in range(written.snapshots_version + 1):
        (Path(warehouse.path("snapshots")) / "_delta_log" / f"{version:020d}.json").unlink()
    assert store.whole_version(warehouse, written) == table.version()
