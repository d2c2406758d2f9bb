"""History's estimates by the tasks that make them: Java's rows, and only where there is nothing to replace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.errors import PySparkException

from jobs import estimate
from jobs.core.errors import UserError
from jobs.history.bucket import estimator
from jobs.history.source import Interval
from jobs.history.table import HistoryTable, Part, Slices
from jobs.storage.part_files import write_parts
from jobs.storage.table_log import WRITER, FileTable
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.tables import estimates_history
from tests.jobs.support.pipeline import Pipeline, random_rows, random_walk_spec

TABLE = estimates_history("walk")
DAY = 86_400_000_000
BOUNDS = pa.schema([("batch_id", pa.int64()), ("event_time", pa.timestamp("us", "UTC"))])


def writers(pipeline: Pipeline) -> list[str]:
    """Return who made each commit of estimates, in order."""
    log = Path(pipeline.settings.warehouse, TABLE, "_delta_log")
    infos = [json.loads(path.read_text().splitlines()[0]) for path in sorted(log.glob("*.json"))]
    found = [one["commitInfo"] for one in infos if "userMetadata" in one.get("commitInfo", {})]
    return ["files" if "delta-rs" in one["engineInfo"] else "java" for one in found]


def made_as(pipeline: Pipeline) -> tuple[Any, ...]:
    """Return protocol, columns with their comments, settings and partitions with which the table was made."""
    log = Path(pipeline.settings.warehouse, TABLE, "_delta_log", f"{0:020d}.json")
    actions = {name: one for line in log.read_text().splitlines() for name, one in json.loads(line).items()}
    about = actions["metaData"]
    return (
        actions["protocol"],
        json.loads(about["schemaString"]),
        about["configuration"],
        about["partitionColumns"],
    )


def part_of(first: int | None, last: int | None, slices: tuple[int, int] = (0, 1 << 16)) -> Part:
    return Part(Slices(*slices), Interval(first, last))


def bounds_of(folder: Path, slices: list[int | None], times: list[int | None]) -> pa.Table:
    """Return the bounds of a table of one file with these rows, as a commit of files gives them."""
    DeltaTable.create(str(folder / "t"), BOUNDS)
    spark: Any = None  # what is tested needs none
    table = FileTable(Warehouse(spark, str(folder)), "t")
    rows = pa.RecordBatch.from_pydict({"batch_id": slices, "event_time": times}, BOUNDS)
    table.commit(write_parts(table.path, "part-00000", [rows]), ("app", 1))
    found = table.bounds()
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("part", "beside"),
    [
        (part_of(None, None), False),
        (part_of(2 * DAY, 3 * DAY), False),
        (part_of(3 * DAY, None), False),  # the last row may be as late as this
        (part_of(3 * DAY + 3000, None), True),
        (part_of(None, 2 * DAY), True),
        (part_of(None, 2 * DAY + 1), False),
        (part_of(None, None, (0, 10)), True),
        (part_of(None, None, (0, 11)), False),
        (part_of(None, None, (20, 21)), False),
        (part_of(None, None, (21, 30)), True),
    ],
)
def test_only_what_no_file_can_have_is_beside_them(tmp_path: Path, part: Part, beside: bool) -> None:
    assert part.is_beside(bounds_of(tmp_path, [10, 20], [2 * DAY, 3 * DAY])) is beside


def test_a_file_without_bounds_may_have_any_row(tmp_path: Path) -> None:
    assert not part_of(5 * DAY, None).is_beside(bounds_of(tmp_path, [None, None], [2 * DAY, 3 * DAY]))


@pytest.mark.spark
@pytest.mark.parametrize("text", [False, True])
def test_both_writers_write_the_same_rows_and_java_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bool
) -> None:
    days = random_rows(3, rows=60, text=text)
    tables: dict[str, pd.DataFrame] = {}
    types: dict[str, list[tuple[str, str]]] = {}
    made: dict[str, tuple[Any, ...]] = {}
    for writer in ("files", "java"):
        pipeline = Pipeline(tmp_path / writer, random_walk_spec(outputs={"innovation": True}))
        pipeline.land(*days)
        monkeypatch.setenv(WRITER, writer)
        estimate.run(pipeline.settings, "walk", to="2024-03-02")
        estimate.run(pipeline.settings, "walk", since="2024-03-02", to="2024-03-03")
        assert writers(pipeline) == [writer, writer]
        made[writer] = made_as(pipeline)
        rows = pipeline.warehouse.read(TABLE)
        tables[writer] = rows.orderBy("batch_id", "key", "event_time", "log_likelihood").toPandas()
        types[writer] = rows.dtypes
        # What has rows already is Java's to replace, and the next interval is not.
        estimate.run(pipeline.settings, "walk", since="2024-03-02", to="2024-03-03", smooth=True)
        estimate.run(pipeline.settings, "walk", since="2024-03-03")
        assert writers(pipeline) == [writer, writer, "java", writer]
        assert pipeline.warehouse.read(TABLE).count() == 180
    assert types["files"] == types["java"] and made["files"] == made["java"]
    # A run's name has the version's digest of its own table in it.
    by_files, by_java = (tables[one].drop(columns="generation") for one in ("files", "java"))
    pd.testing.assert_frame_equal(by_files, by_java, check_exact=True)


@pytest.mark.spark
def test_a_run_that_fails_leaves_no_file_and_one_that_another_has_overtaken_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WRITER, "files")
    pipeline = Pipeline(tmp_path, random_walk_spec())
    pipeline.land(*random_rows(2, rows=60))
    add = HistoryTable.add

    def overtaken(table: HistoryTable, *given: Any) -> int:
        monkeypatch.setattr(HistoryTable, "add", add)
        estimate.run(pipeline.settings, "walk", to="2024-03-09")
        return add(table, *given)

    monkeypatch.setattr(HistoryTable, "add", overtaken)
    with pytest.raises(
        UserError, match="another run has written estimates of the same rows meanwhile; run it again"
    ):
        estimate.run(pipeline.settings, "walk")
    assert writers(pipeline) == ["files"] and pipeline.warehouse.read(TABLE).count() == 120

    folder = Path(pipeline.settings.warehouse, TABLE)
    before = sorted(path.name for path in folder.glob("*.parquet"))
    pipeline.land(random_rows(3, rows=60)[2])
    monkeypatch.setattr("jobs.history.files.estimator", _failing)
    with pytest.raises(PySparkException, match="as it should"):
        estimate.run(pipeline.settings, "walk", since="2024-03-03")
    assert sorted(path.name for path in folder.glob("*.parquet")) == before


def _failing(plan: Any) -> Any:
    estimates = estimator(plan)

    def over(batches: Any) -> Any:
        yield from estimates(batches)
        raise ValueError("as it should")

    return over
