"""A user's Delta table as the source: each row lands once, and a table that does not continue is refused in words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pytest
from delta.tables import DeltaTable
from deltalake import write_deltalake

from jobs import ingest, quarantine
from jobs.core.errors import UserError
from jobs.core.report import Report
from jobs.storage.table_log import FileTable
from jobs.storage.tables import measurements
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, random_rows, random_walk_spec, since
from tests.jobs.support.processes import Driver

pytestmark = pytest.mark.spark


def opened(folder: Path, **changes: Any) -> tuple[Pipeline, Path]:
    """Return a pipeline whose source is a table, and the table's folder."""
    table = folder / "theirs" / "readings"
    source = {"kind": "delta", "table": str(table), **changes.pop("source", {})}
    return Pipeline(folder, random_walk_spec(source=source, **changes)), table


def add(table: Path, rows: pd.DataFrame, mode: Literal["append", "overwrite"] = "append") -> None:
    write_deltalake(str(table), rows.astype({"at": "datetime64[us, UTC]"}), mode=mode)


def add_by_spark(pipeline: Pipeline, table: Path, rows: pd.DataFrame) -> None:
    """Add rows to a table whose features delta-rs does not write."""
    frame = pipeline.warehouse.spark.createDataFrame(rows).coalesce(1)
    frame.write.format("delta").mode("append").save(str(table))


def numbered(*numbers: int) -> pd.DataFrame:
    """Return a row for each number, which is its key and value."""
    at = pd.Timestamp("2024-03-01", tz="UTC") + pd.to_timedelta(list(numbers), "min")
    return pd.DataFrame({"id": list(numbers), "at": at, "a": [float(n) for n in numbers], "b": 1.0})


def replaced(pipeline: Pipeline, table: Path, by: Path | None = None) -> None:
    """Remove a table, or put another in its place, as another process would: Delta's caches do not know."""
    shutil.rmtree(table)
    if by is not None:
        shutil.copytree(by, table)
    spark: Any = pipeline.warehouse.spark
    spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()
    spark.catalog.clearCache()


def land(pipeline: Pipeline, **options: Any) -> Report:
    return ingest.run(pipeline.settings, "walk", **options)


def keys(pipeline: Pipeline) -> list[int]:
    return sorted(int(row["id"]) for row in pipeline.tables.rows(measurements("walk")))


def refused(pipeline: Pipeline, told: str) -> None:
    before = keys(pipeline)
    with pytest.raises(UserError, match=told) as error:
        land(pipeline)
    assert "--accept-loss" in error.value.message
    assert keys(pipeline) == before


def test_rows_land_once_as_the_table_grows_and_the_stream_is_one_batch(tmp_path: Path) -> None:
    pipeline, table = opened(tmp_path)
    days = random_rows(2, rows=60)
    add(table, days[0].assign(comment="theirs"))
    first = land(pipeline)
    assert first.data["rows"] == 60 and first.lines[0] == f"landed 60 rows of table {table} for walk"
    pipeline.pretrain()
    assert land(pipeline).data["rows"] == 0
    for day in days[1:]:
        add(table, day.assign(comment=None))
        DeltaTable.forPath(pipeline.warehouse.spark, str(table)).optimize().executeCompaction()
        assert land(pipeline).data["rows"] == 60
        # Killed after its commit, before Spark's note of it: the micro-batch runs again.
        (checkpoint,) = (tmp_path / "warehouse" / "checkpoints").glob("ingest-walk-*")
        notes = sorted((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
        notes[-1].unlink()
        notes[-1].with_name(f".{notes[-1].name}.crc").unlink(missing_ok=True)
        land(pipeline)
    assert pipeline.warehouse.read(measurements("walk")).count() == 120
    detail = pipeline.warehouse.read(measurements("walk")).select("_origin").distinct().collect()
    assert [row["_origin"] for row in detail] == [f"delta:{table}"]
    pipeline.stream()
    assert_bit_equal(pipeline.estimates(), since(pipeline.batch(), days[1]))


def test_bad_rows_are_kept_once_and_replayed_and_unusable_columns_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, table = opened(tmp_path)
    rows = numbered(1, 2, 3).astype({"a": str})
    rows.loc[1, "a"] = "much"
    rows.loc[2, "at"] = None
    add(table, rows)
    commit = FileTable.commit

    def killed(self: FileTable, *more: Any) -> int | None:
        if self.name == measurements("walk") and '"rows": 1' in str(more):
            raise OSError("killed between the two commits")
        return commit(self, *more)

    with monkeypatch.context() as patch, pytest.raises(UserError, match="landing table .* failed"):
        patch.setattr(FileTable, "commit", killed)
        land(pipeline)
    assert (keys(pipeline), pipeline.warehouse.read("quarantine").count()) == ([], 2)
    assert land(pipeline).data["reasons"] == {"measurement a: not a number": 1, "time at: missing": 1}
    kept = pipeline.warehouse.read("quarantine").orderBy("reason").collect()
    assert (keys(pipeline), len(kept)) == ([1], 2)
    assert json.loads(kept[0]["payload"])["a"] == "much" and kept[0]["source"] == f"delta:{table}"
    assert json.loads(kept[0]["position"])["version"] == 0
    pipeline.write_spec({**pipeline.spec.model_dump(include={"name"}), **json.loads(json.dumps(
        random_walk_spec(missing_values=["much"], source={"kind": "delta", "table": str(table)})))})  # fmt: skip
    assert quarantine.act(pipeline.settings, "replay", "walk").data["landed"] == 1
    assert keys(pipeline) == [1, 2]

    other, theirs = opened(tmp_path / "other")
    with pytest.raises(UserError, match="there is no such Delta table"):
        land(other)
    add(theirs, numbered(1).rename(columns={"b": "bb"}))
    with pytest.raises(UserError, match="there is no column 'b'; did you mean 'bb'"):
        land(other)
    add(other.folder / "theirs" / "third", numbered(1).assign(a=True))
    other.write_spec(
        random_walk_spec(source={"kind": "delta", "table": str(other.folder / "theirs" / "third")})
    )
    with pytest.raises(UserError, match="measurement column 'a' holds bool; it must hold numbers"):
        land(other)


@pytest.mark.slow
def test_a_table_that_was_put_back_or_changed_is_refused_until_the_loss_is_accepted(tmp_path: Path) -> None:
    pipeline, table = opened(tmp_path)
    add(table, numbered(1, 2))
    shutil.copytree(table, tmp_path / "copy")
    add(table, numbered(3))
    land(pipeline)
    assert keys(pipeline) == [1, 2, 3]

    # put back from a backup, and grown again: the same id and the same version, another commit
    replaced(pipeline, table, tmp_path / "copy")
    refused(pipeline, "ends at version 0, and version 1 has landed: it was put back")
    add(table, numbered(4))
    refused(pipeline, "was put back from a backup: version 1 is another commit")
    assert land(pipeline, accept_loss=True).lines[0].startswith(f"table {table} lands after version 1")
    add(table, numbered(5))
    assert land(pipeline).data["rows"] == 1 and keys(pipeline) == [1, 2, 3, 5]

    # overwritten, and rows removed
    add(table, numbered(6), mode="overwrite")
    refused(pipeline, "rows of it were changed, removed or overwritten")
    land(pipeline, accept_loss=True)
    DeltaTable.forPath(pipeline.warehouse.spark, str(table)).delete("id = 6")
    refused(pipeline, "rows of it were changed, removed or overwritten")
    land(pipeline, accept_loss=True)
    add(table, numbered(7))
    assert land(pipeline).data["rows"] == 1 and keys(pipeline) == [1, 2, 3, 5, 7]


@pytest.mark.slow
def test_a_table_that_was_vacuumed_or_made_anew_is_refused_until_the_loss_is_accepted(tmp_path: Path) -> None:
    pipeline, table = opened(tmp_path)
    add(table, numbered(1))
    land(pipeline)
    # vacuumed past the position: a commit that has not landed has lost its file, or its place in the log
    add(table, numbered(7))
    add(table, numbered(8))
    spark: Any = pipeline.warehouse.spark
    DeltaTable.forPath(spark, str(table)).optimize().executeCompaction()
    spark.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    DeltaTable.forPath(spark, str(table)).vacuum(0)
    refused(pipeline, "files of its commits that have not landed are gone, as VACUUM removes them")
    land(pipeline, accept_loss=True)
    add(table, numbered(9))
    add(table, numbered(10))
    log = sorted((table / "_delta_log").glob("*.json"))
    DeltaTable.forPath(spark, str(table)).detail().collect()
    spark._jvm.org.apache.spark.sql.delta.DeltaLog.forTable(spark._jsparkSession, str(table)).checkpoint()
    log[-2].unlink()  # as Delta does when a version is older than its retention
    spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()
    refused(pipeline, r"its log no longer has version \d+")

    # made anew
    replaced(pipeline, table)
    add(table, numbered(11))
    refused(pipeline, "was deleted and made anew")
    assert "was made anew: it lands from its first row" in land(pipeline, accept_loss=True).lines[0]
    assert keys(pipeline) == [1, 11]
    add(table, numbered(12))
    assert land(pipeline).data["rows"] == 1


@pytest.mark.slow
def test_columns_that_the_spec_does_not_name_may_change_and_one_that_it_names_must_be_there(
    tmp_path: Path,
) -> None:
    pipeline, table = opened(tmp_path)
    sql, name = pipeline.warehouse.spark.sql, f"delta.`{table}`"
    properties = "'delta.columnMapping.mode'='name', 'delta.enableTypeWidening'='true'"
    sql(
        f"CREATE TABLE {name} (id BIGINT, at TIMESTAMP, a DOUBLE, b DOUBLE, note INT, extra STRING) USING delta "
        f"TBLPROPERTIES ({properties})"
    )
    add_by_spark(pipeline, table, numbered(1, 2))
    assert land(pipeline).data["rows"] == 2
    add_by_spark(pipeline, table, numbered(3))
    sql(f"ALTER TABLE {name} RENAME COLUMN note TO remark")
    add_by_spark(pipeline, table, numbered(4))
    sql(f"ALTER TABLE {name} DROP COLUMN extra")
    sql(f"ALTER TABLE {name} ALTER COLUMN remark TYPE BIGINT")
    add_by_spark(pipeline, table, numbered(5))
    sql(f"ALTER TABLE {name} ADD COLUMN more DATE")
    assert land(pipeline).data["rows"] == 3 and keys(pipeline) == [1, 2, 3, 4, 5]
    add_by_spark(pipeline, table, numbered(6, 7))
    sql(f"ALTER TABLE {name} RENAME COLUMN a TO level")
    with pytest.raises(UserError, match="there is no column 'a'; .*rename it back, or give the spec of walk"):
        land(pipeline)
    sql(f"ALTER TABLE {name} RENAME COLUMN level TO a")
    assert land(pipeline).data["rows"] == 2 and keys(pipeline) == [1, 2, 3, 4, 5, 6, 7]


def test_the_first_landing_may_begin_with_what_comes_next_and_a_moved_table_goes_on(tmp_path: Path) -> None:
    pipeline, table = opened(tmp_path, source={"start": "latest"})
    add(table, numbered(1, 2))
    assert land(pipeline).data["rows"] == 0
    replaced(pipeline, table)
    add(table, numbered(1, 2))
    add(table, numbered(2))
    refused(pipeline, "was deleted and made anew")
    accepted = land(pipeline, accept_loss=True)
    assert "was made anew: it lands after its version 1;" in accepted.lines[0] and accepted.data["rows"] == 0
    add(table, numbered(3))
    shutil.move(table, tmp_path / "elsewhere")
    pipeline.write_spec(random_walk_spec(source={"kind": "delta", "table": str(tmp_path / "elsewhere")}))
    assert land(pipeline).data["rows"] == 1 and keys(pipeline) == [3]
    own = {"kind": "delta", "table": "measurements/walk"}
    pipeline.write_spec(random_walk_spec(source=own))
    with pytest.raises(UserError, match="is the table that walk lands rows in"):
        land(pipeline)


@pytest.mark.slow
def test_landings_that_are_killed_lose_and_double_nothing(tmp_path: Path) -> None:
    pipeline, table = opened(tmp_path)
    add(table, numbered(0))
    for number in range(1, 40, 10):
        driver = Driver(pipeline, "ingest", "--model", "walk", "--trigger", "0.2")
        for one in range(number, number + 10):
            add(table, numbered(one))
        driver.wait_for(lambda last=number: last in keys_or_none(pipeline))
        driver.kill()
    land(pipeline)
    assert keys(pipeline) == list(range(41))


def keys_or_none(pipeline: Pipeline) -> list[int]:
    return keys(pipeline) if pipeline.warehouse.exists(measurements("walk")) else []


@pytest.mark.slow
def test_texts_of_a_table_have_the_decimal_mark_of_the_spec(tmp_path: Path) -> None:
    pipeline, table = opened(tmp_path, files={"decimal": ",", "thousands": "."})
    add(table, numbered(1, 2, 3).assign(a=["1,5", "1.234", "1.5"]))
    assert (
        land(pipeline).data["rows"],
        sorted(row["a"] for row in pipeline.tables.rows(measurements("walk"))),
    ) == (
        2,
        [1.5, 1234.0],
    )
