"""History's estimates as files: what a run replaces, in one commit, beside which other rows stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from jobs import estimate
from jobs.batch.batch_filter import Interval
from jobs.batch.bucket_estimates import build_estimator
from jobs.batch.history_table import ReplacedPart, Slices
from jobs.core.errors import UserError
from jobs.spark.warehouse import Warehouse
from jobs.spark.written_rows import keep_rows
from jobs.storage.part_files import write_parts
from jobs.storage.row_changes import ReplacingTable
from jobs.storage.table_rows import UTC_MICROSECONDS, Met, find_files, open_log
from jobs.storage.tables import estimates_history
from tests.jobs.support.pipeline import Pipeline, random_rows, random_walk_spec

TABLE = estimates_history("walk")
DAY = 86_400_000_000
BOUNDS = pa.schema([("batch_id", pa.int64()), ("event_time", pa.timestamp("us", "UTC"))])


def files(pipeline: Pipeline) -> set[str]:
    return {path.name for path in Path(pipeline.settings.warehouse, TABLE).glob("*.parquet")}


def rows(pipeline: Pipeline) -> pd.DataFrame:
    order = ["batch_id", "key", "event_time", "log_likelihood"]
    return pipeline.warehouse.read(TABLE).orderBy(*order).toPandas()


def part_of(first: int | None, last: int | None, slices: tuple[int, int] = (0, 1 << 16)) -> ReplacedPart:
    return ReplacedPart(Slices(*slices), Interval(first, last))


def files_of(folder: Path, slices: list[int | None], times: list[int | None]) -> pa.Table:
    """Return the files of a table of one file with these rows, as a commit of files gives them."""
    DeltaTable.create(str(folder / "t"), BOUNDS)
    spark: Any = None  # what is tested needs none
    table = ReplacingTable(Warehouse(spark, str(folder)), "t")
    batch = pa.RecordBatch.from_pydict({"batch_id": slices, "event_time": times}, BOUNDS)
    table.commit(write_parts(table.path, "part-00000", [batch]), ("app", 1))
    return table.files()


@pytest.mark.parametrize(
    ("part", "met"),
    [
        (part_of(None, None), "whole"),
        (part_of(2 * DAY, 3 * DAY), "across"),
        (part_of(2 * DAY, 3 * DAY + 2000), "whole"),
        (part_of(2 * DAY + 1000, None), "across"),
        (part_of(3 * DAY, None), "across"),  # the last row may be as late as this
        (part_of(3 * DAY + 3000, None), ""),
        (part_of(None, 2 * DAY), ""),
        (part_of(None, 2 * DAY + 1), "across"),
        (part_of(None, None, (0, 10)), ""),
        (part_of(None, None, (0, 11)), "across"),
        (part_of(None, None, (10, 21)), "whole"),
        (part_of(None, None, (20, 21)), "across"),
        (part_of(None, None, (21, 30)), ""),
    ],
)
def test_files_have_rows_of_a_part_or_of_others_by_their_bounds(
    tmp_path: Path, part: ReplacedPart, met: str
) -> None:
    found = files_of(tmp_path, [10, 20], [2 * DAY, 3 * DAY])
    name = frozenset(found["path"].to_pylist())
    assert find_files(found, part.rows) == Met(
        **{"whole": frozenset(), "across": frozenset(), **({met: name} if met else {})}
    )
    assert find_files(found.slice(0, 0), part.rows) == Met(frozenset(), frozenset())


def test_a_file_without_bounds_may_have_any_row_but_for_one_that_has_only_nulls(tmp_path: Path) -> None:
    found = files_of(tmp_path, [None, None], [2 * DAY, 3 * DAY])
    for part in (part_of(2 * DAY, None), part_of(None, None)):
        assert find_files(found, part.rows) == Met(frozenset(), frozenset())
    bare = found.select(["path"])
    assert find_files(bare, part_of(5 * DAY, None).rows).across == frozenset(bare["path"].to_pylist())


@pytest.mark.spark
@pytest.mark.parametrize("text", [False, True])
@pytest.mark.slow
def test_a_run_replaces_its_interval_and_leaves_other_rows_as_they_are(tmp_path: Path, text: bool) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec(outputs={"innovation": True}))
    pipeline.land(*random_rows(3, rows=60, text=text))
    estimate.run(pipeline.settings, "walk")
    whole = rows(pipeline)
    assert len(whole) == 180
    table = DeltaTable(pipeline.warehouse.path(TABLE))
    assert [one.type.type for one in table.schema().fields if one.name == "id"] == [
        "string" if text else "long"
    ]
    version = table.version()
    estimate.run(pipeline.settings, "walk", since="2024-03-02", to="2024-03-03", smooth=True)
    assert DeltaTable(pipeline.warehouse.path(TABLE)).version() == version + 2  # a column more, and the rows
    again: Any = rows(pipeline)
    inside = (again["event_time"] >= "2024-03-02") & (again["event_time"] < "2024-03-03")
    assert again["generation"].nunique() == 2 and len(again) == 180
    assert set(again[inside]["generation"]).isdisjoint(again[~inside]["generation"])
    left = again[~inside][whole.columns].reset_index(drop=True)
    before = whole[~((whole["event_time"] >= "2024-03-02") & (whole["event_time"] < "2024-03-03"))]
    pd.testing.assert_frame_equal(left, before.reset_index(drop=True), check_exact=True)
    keys = ["key", "event_time"]
    for one in (again, whole):
        one.sort_values(keys, inplace=True, ignore_index=True)
    pd.testing.assert_frame_equal(again[keys], whole[keys])
    estimate.run(pipeline.settings, "walk", since="2024-03-03", smooth=True)
    assert len(rows(pipeline)) == 180
    pipeline.warehouse.spark.sql(f"OPTIMIZE delta.`{pipeline.warehouse.path(TABLE)}`")
    estimate.run(pipeline.settings, "walk")
    assert len(rows(pipeline)) == 180 and rows(pipeline)["generation"].nunique() == 1


@pytest.mark.spark
def test_kept_rows_of_files_with_fewer_columns_have_all_columns(spark: SparkSession, tmp_path: Path) -> None:
    """More files than tasks, so that one task meets both kinds."""
    warehouse = Warehouse(spark, str(tmp_path))
    warehouse.create("t", "batch_id bigint, event_time timestamp")
    table = ReplacingTable(warehouse, "t")
    for number in range(24):
        columns: dict[str, Any] = {
            "batch_id": pa.array([number, number], pa.int64()),
            "event_time": pa.array([0, 1], UTC_MICROSECONDS),
        }
        if number >= 12:
            columns["more"] = pa.array(["a", None], pa.string())
        batch = pa.RecordBatch.from_pydict(columns)
        table.ready(batch.schema)
        table.commit(write_parts(table.path, "part-00000", [batch]), ("app", number))
    rows, files = part_of(1, None).rows, table.files()
    kept, gone = keep_rows(warehouse, table, rows)(files, find_files(files, rows))
    assert set(gone) == set(files["path"].to_pylist())
    assert sum(one.rows for one in kept) == 24
    found = [pq.read_table(Path(table.path, one.path)) for one in kept]
    assert {tuple(one.column_names) for one in found} == {("batch_id", "event_time", "more")}
    assert sorted(str(value) for one in found for value in one["more"].to_pylist()) == [
        *["None"] * 12,
        *["a"] * 12,
    ]


@pytest.mark.spark
def test_a_run_replaces_what_another_has_written_meanwhile_and_one_that_fails_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec())
    pipeline.land(*random_rows(2, rows=60))
    replace, others = ReplacingTable._commit, [1]

    def overtaken(table: ReplacingTable, *given: Any) -> int | None:
        if others and others.pop():
            estimate.run(pipeline.settings, "walk", to="2024-03-09")
        return replace(table, *given)

    monkeypatch.setattr(ReplacingTable, "_commit", overtaken)
    estimate.run(pipeline.settings, "walk")
    assert len(rows(pipeline)) == 120 and rows(pipeline)["generation"].nunique() == 1
    before = files(pipeline)

    def always(table: ReplacingTable, parts: Any, due: Any, *given: Any) -> None:
        empty = open_log(pipeline.settings.warehouse, table.name, 0)
        assert due(empty) is None  # as if others had changed the files

    monkeypatch.setattr(ReplacingTable, "_commit", always)
    with pytest.raises(
        UserError, match="another run has written estimates of the same rows meanwhile; run it again"
    ):
        estimate.run(pipeline.settings, "walk", since="2024-03-02")
    assert files(pipeline) == before
    monkeypatch.setattr(ReplacingTable, "_commit", replace)
    monkeypatch.setattr("jobs.batch.history_table.build_estimator", _failing)
    with pytest.raises(ValueError, match="as it should"):
        estimate.run(pipeline.settings, "walk", since="2024-03-02")
    assert files(pipeline) == before
    monkeypatch.setattr("jobs.batch.file_rows.FEW_ROWS", 0)  # tasks of Spark
    with pytest.raises(PySparkException, match="as it should"):
        estimate.run(pipeline.settings, "walk", since="2024-03-02")
    assert files(pipeline) == before and len(rows(pipeline)) == 120


def _failing(plan: Any) -> Any:
    estimates = build_estimator(plan)

    def over(batches: Any) -> Any:
        yield from estimates(batches)
        raise ValueError("as it should")

    return over
