"""The stand-in for Delta does what Delta does: the same steps on both leave the same rows, versions and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from jobs.spark import warehouse as delta
from jobs.spark.warehouse import Warehouse, set_transaction
from jobs.storage.row_changes import delete_rows
from tests.protocol import actors, standing_in, world
from tests.protocol.world import World

COLUMNS = "part string, key bigint, value string"

Rows = list[tuple[Any, ...]]


def steps(warehouse: Warehouse) -> list[Any]:
    """Take some steps on a table, and return what is seen after each."""
    F: Any = delta_functions()
    seen: list[Any] = []

    def look(name: str) -> None:
        rows: Rows = sorted(tuple(row) for row in warehouse.read("t").collect())
        seen.append((name, warehouse.latest_version("t"), rows))

    def frame(*rows: tuple[str, int, str]) -> Any:
        return warehouse.spark.createDataFrame(
            [dict(zip(("part", "key", "value"), row, strict=True)) for row in rows],
            warehouse.read("t").schema,
        )

    warehouse.create("t", COLUMNS, partition_by=("part",))
    warehouse.create("t", COLUMNS)
    look("made once")
    warehouse.append(frame(("a", 1, "x")), "t", ("one", 5))
    look("appended")
    warehouse.append(frame(("a", 1, "x")), "t", ("one", 5))
    warehouse.append(frame(("a", 2, "x")), "t", ("one", 4))
    look("a transaction that is not newer is skipped")
    warehouse.append(frame(("b", 3, "y")), "t", ("two", 1))
    look("another application")
    warehouse.append(frame(), "t", ("two", 2))
    warehouse.append(frame(("b", 4, "y")), "t", ("two", 2))
    look("an empty commit uses up its number")
    target = delta.DeltaTable.forPath(warehouse.spark, warehouse.path("t"))
    target.update(F.col("key") == 99, {"value": F.lit("z")})
    look("an update of nothing is no commit")
    target.update((F.col("key") == 1) & F.col("value").isin("x", "y"), {"value": F.lit("z")})
    look("updated")
    merge = target.alias("t").merge(
        frame(("b", 3, "new"), ("b", 7, "new")).alias("s"), "t.part = s.part AND t.key = s.key"
    )
    merge.whenMatchedUpdate("t.value = 'y'", {"value": F.col("s.value")}).whenNotMatchedInsert(
        "s.key = 7", {"part": F.col("s.part"), "key": F.col("s.key"), "value": F.lit("fresh")}
    ).execute()
    look("merged")
    for _ in range(2):
        upserted = target.alias("t").merge(frame(("a", 1, "up")).alias("s"), "t.part = 'a' AND t.key = s.key")
        with set_transaction(warehouse.spark, "three", 1):
            upserted.whenMatchedUpdateAll().whenNotMatchedInsertAll().execute()
    look("an upsert with a transaction, twice")
    warehouse.replace(frame(("b", 8, "over")), "t", [[("part", "=", "b")]])
    look("a partition was replaced")
    assert delete_rows(warehouse, "t", [[("part", "=", "none")]]) == 0
    look("a deletion of nothing is no commit")
    assert delete_rows(warehouse, "t", [[("part", "=", "a")]], transaction=("three", 1)) == 0
    look("a deletion with a transaction that is not newer is skipped")
    delete_rows(warehouse, "t", [[("part", "=", "a")]], transaction=("three", 2))
    look("deleted")
    seen.append(sorted(tuple(row) for row in warehouse.read("t", 1).collect()))
    seen.append([entry.version for entry in warehouse.read_log_entries("t")])
    seen.append(_null_logic(warehouse, F))
    return seen


def _null_logic(warehouse: Warehouse, F: Any) -> list[Any]:
    rows = [{"part": "p", "key": None, "value": None}, {"part": "p", "key": 1, "value": "late:g:3:r"}]
    table = warehouse.spark.createDataFrame(rows, warehouse.read("t").schema)
    copy = F.coalesce(F.col("value").startswith("late:"), F.lit(False))
    parts = F.split(F.col("value"), ":")
    conditions = (
        F.col("key") != 1,
        ~(F.col("key") == 1),
        copy,
        ~copy | (F.get(parts, 2).try_cast("bigint") <= 3),
        F.when(F.col("key").isNull(), F.lit(True)).otherwise(F.lit(False)),
        F.expr("value LIKE 'late:%' AND NOT key IS NULL"),
    )
    return [table.filter(one).count() for one in conditions]


def delta_functions() -> Any:
    """Return `F` as the modules have it: Spark's, or the stand-in."""
    from jobs.lineage import fencing

    return fencing.F


@pytest.mark.slow
@pytest.mark.spark
def test_the_same_steps_give_the_same_table(spark: SparkSession, tmp_path: Path) -> None:
    real = steps(Warehouse(spark, str(tmp_path)))
    with standing_in.simulated(), world.inhabited(World()):
        simulated = steps(actors.warehouse())
    assert simulated == real
