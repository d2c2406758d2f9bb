"""The files sink: a micro-batch's folder has each row once, though a driver freezes while it writes, and wakes up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession

from jobs.spark.hadoop_files import HadoopFiles
from jobs.storage.files import open_files
from jobs.streaming.publishing import FolderSink, MicroBatch, _remove_others

pytestmark = pytest.mark.spark

ROWS = [(f"k{number}", float(number)) for number in range(10)]
SCHEMA = "key string, value double, generation string, batch_id bigint"


def rows_of(
    spark: SparkSession,
    values: list[tuple[str, float]] = ROWS,
    before: Callable[[DataFrame], DataFrame] = lambda rows: rows,
) -> DataFrame:
    """Return a micro-batch's rows in two partitions, the same in each attempt; before: what happens on their way."""
    return before(spark.createDataFrame([(*one, "g", 0) for one in values], SCHEMA)).repartition(2, "key")


def publish(folder: Path, rows: DataFrame, epoch: int, kind: str = "parquet", plan: str = "a1") -> None:
    FolderSink(rows.sparkSession, str(folder), kind).write(rows, MicroBatch("g", 0, lambda: plan, epoch))


def found(spark: SparkSession, folder: Path, kind: str = "parquet") -> list[tuple[str, float]]:
    schema = "key string, value double, generation string, batch_id bigint"
    rows = spark.read.schema(schema).format(kind).load(str(folder)).collect()
    assert {(row["generation"], row["batch_id"]) for row in rows} <= {("g", 0)}
    return sorted((row["key"], row["value"]) for row in rows)


def freeze(asleep: Path, woken: Path) -> Callable[[DataFrame], DataFrame]:
    """Return what holds rows up until a file is there: the driver's write has begun, and none of its files has."""
    first, second = str(asleep), str(woken)

    def wait(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        if context is not None and context.partitionId() == 0:  # the other of two slots stays free
            Path(first).touch()
            while not Path(second).exists():
                time.sleep(0.05)
        yield from batches

    return lambda rows: rows.mapInArrow(wait, rows.schema)


def failing(rows: DataFrame) -> DataFrame:
    """Return rows whose tasks fail: a driver that is killed in the middle of its write."""

    def fail(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        raise OSError("killed")
        yield from batches

    return rows.mapInArrow(fail, rows.schema)


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_a_frozen_driver_adds_nothing_to_what_its_successor_has_published(
    spark: SparkSession, tmp_path: Path, kind: str
) -> None:
    folder, asleep, woken = tmp_path / "handed", tmp_path / "asleep", tmp_path / "woken"
    old, _ = in_thread(lambda: publish(folder, rows_of(spark, before=freeze(asleep, woken)), 1, kind))
    wait_for(asleep)
    publish(folder, rows_of(spark), 2, kind)
    assert found(spark, folder, kind) == ROWS
    woken.touch()
    old.join(120)
    assert found(spark, folder, kind) == ROWS
    place = folder / "generation=g" / "batch_id=0"
    assert (place / "_SUCCESS").exists()
    publish(folder, rows_of(spark), 3, kind)
    assert found(spark, folder, kind) == ROWS
    names = sorted(path.name[:5] for path in place.iterdir() if path.name[0] != ".")
    assert names == ["_SUCC", "part-", "part-"]


def test_a_driver_that_wakes_and_dies_takes_nothing_away(spark: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "handed"
    publish(folder, rows_of(spark), 2)
    woken, errors = in_thread(lambda: publish(folder, failing(rows_of(spark)), 1))
    woken.join(120)
    assert errors and "killed" in str(errors[0])
    assert found(spark, folder) == ROWS


def test_what_an_earlier_release_left_and_what_a_backup_undid_is_replaced(
    spark: SparkSession, tmp_path: Path
) -> None:
    folder = tmp_path / "handed"
    place = folder / "generation=g" / "batch_id=0"
    # An earlier release wrote in place. It was killed before `_SUCCESS`; some of its files are there.
    rows_of(spark).drop("generation", "batch_id").write.parquet(str(place))
    (place / "_SUCCESS").unlink()
    (place / "_temporary" / "0").mkdir(parents=True)
    publish(folder, rows_of(spark), 1)
    assert found(spark, folder) == ROWS
    assert not (place / "_temporary").exists()
    # The warehouse was put back, the folder was not, and the micro-batch is planned again with other rows.
    publish(folder, rows_of(spark, ROWS[:4]), 2, plan="b2")
    assert found(spark, folder) == ROWS[:4]


def test_a_random_id_that_holds_the_mark_of_the_plan_is_of_other_rows(tmp_path: Path) -> None:
    ours = ["part-00000-a1-c000.snappy.parquet", "part-00001-a1.c000.json"]
    others = [
        f"part-00000-{id_}-c000.snappy.parquet"
        for id_ in (
            "a1d2c3b4-0000-4000-8000-000000000000",
            "00000000-a1d2-4000-8000-000000000000",
            "00000000-0000-4000-a1d2-00000000000",
        )
    ]
    for name in (*ours, *others):
        (tmp_path / name).touch()
    _remove_others(open_files(str(tmp_path.parent)), tmp_path.name, "a1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ours


def test_files_through_the_file_system_of_hadoop(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.streaming.publishing._open_files", HadoopFiles)
    folder = tmp_path / "handed"
    for epoch in (1, 2):
        publish(folder, rows_of(spark), epoch)
        assert found(spark, folder) == ROWS
