"""Micro-batches planned by the driver: offsets and rows are those of Delta's source, which reads unusual commits."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.transaction import AddAction
from pyspark.sql import SparkSession

from jobs.snapshots.measurement_files import MeasurementTable, open_measurements
from jobs.spark.queries import await_end, start_micro_batches
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding.keys import KeyKind
from jobs.state.encoding.routing import make_routing
from jobs.state.encoding.rows import RowFormat, build_row_packer, pack_rows, unpack_rows
from jobs.storage.tables import LATE_COPIES, LATE_COPIES_TABLE
from jobs.storage.warehouse import Tables
from jobs.streaming.planned_rows import (
    MOST_FILES,
    RowPlanner,
    UnplannedCommit,
    forget_planner,
    read_planned_rows,
)
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, random_rows, random_walk_spec, since

TIME = pa.timestamp("us", "UTC")
FIRST, STEP = 1_700_000_000_000_000, 1_000_001
FORMAT = RowFormat(KeyKind(("id",), ("string",), False), "at", ("a", "b"), ())
ROUTING = make_routing(2, 1)


def spec_of() -> ModelSpec:
    return ModelSpec.model_validate(random_walk_spec(name="t"))


def rows_of(start: int, count: int = 4) -> pa.Table:
    at = np.arange(start, start + count)
    return pa.table(
        {
            "id": pa.array([f"key {i % 5}" for i in at.tolist()]),
            "at": pa.array(FIRST + STEP * at, TIME),
            "a": pa.array(np.sin(at)),
            "b": pa.array(np.cos(at)),
        }
    )


def write_rows(root: Path, start: int) -> None:
    write_deltalake(root / "measurements" / "t", rows_of(start), mode="append")


def add_files(root: Path, *sizes: int) -> None:
    """Commit several files in one version; a file has as many rows as its size says."""
    log = DeltaTable(root / "measurements" / "t")
    actions = []
    for number, size in enumerate(sizes):
        name = f"v{log.version() + 1}-{number}.parquet"
        pq.write_table(rows_of(100 * number, size), root / "measurements" / "t" / name, row_group_size=3)
        length = (root / "measurements" / "t" / name).stat().st_size
        actions.append(AddAction(name, length, {}, 0, True, json.dumps({"numRecords": size})))
    log.create_write_transaction(actions, "append", log.schema())


def plan_of(root: Path, start: int, files: int = MOST_FILES, size: float = math.inf) -> RowPlanner:
    tables = Tables(str(root))
    opened = open_measurements(tables, spec_of(), "measurements/t", tables.latest_version("measurements/t"))
    assert not isinstance(opened, str), opened
    assert isinstance(opened[0], MeasurementTable)
    return RowPlanner(tables, opened[0], start, (files, size), 2)


def walk(planner: RowPlanner) -> list[tuple[int, int]]:
    """Return the places at the ends of all micro-batches, and check that these have all row groups once."""
    found, start = [], planner.begin()
    while (end := planner.advance(start)) != start:
        place = json.loads(end)
        found.append((place["reservoirVersion"], place["index"]))
        start = end
    tasks = planner.plan(planner.begin(), start).split("\n")
    groups = [tuple(one) for task in tasks if task for one in json.loads(task)]
    assert len(groups) == len(set(groups))
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a warehouse whose table has four versions, of which the third one adds three files."""
    write_rows(tmp_path, 0)
    write_rows(tmp_path, 4)
    add_files(tmp_path, 7, 2, 5)
    write_rows(tmp_path, 8)
    return tmp_path


def test_a_micro_batch_ends_at_the_limit_of_files_or_bytes(root: Path) -> None:
    assert walk(plan_of(root, 1)) == [(4, -1)]
    assert walk(plan_of(root, 1, files=1)) == [(2, -1), (2, 0), (2, 1), (3, -1), (4, -1)]
    assert walk(plan_of(root, 1, files=2)) == [(2, 0), (3, -1), (4, -1)]
    assert walk(plan_of(root, 1, size=1)) == [(2, -1), (2, 0), (2, 1), (3, -1), (4, -1)]
    assert walk(plan_of(root, 4)) == []


def test_a_run_to_the_newest_row_ends_at_the_version_of_its_start(root: Path) -> None:
    planner = plan_of(root, 1)
    planner.bound()
    write_rows(root, 12)
    assert walk(planner) == [(4, -1)] and planner.refusal is None
    assert walk(plan_of(root, 1)) == [(5, -1)]


def test_a_planned_micro_batch_has_the_same_rows_in_another_process(root: Path) -> None:
    first = plan_of(root, 1, files=2)
    start = first.begin()
    ends = [start]
    while (end := first.advance(ends[-1])) != ends[-1]:
        ends.append(end)
    plans = [first.plan(a, b) for a, b in zip(ends, ends[1:], strict=False)]
    again = [plan_of(root, 1).plan(a, b) for a, b in zip(ends, ends[1:], strict=False)]
    assert again == plans and len(plans) == 3


def delete_rows(root: Path) -> None:
    DeltaTable(root / "measurements" / "t").delete("a > 0.5")


def set_property(root: Path) -> None:
    DeltaTable(root / "measurements" / "t").alter.set_table_properties({"delta.checkpointInterval": "7"})


def replace_column(root: Path) -> None:
    log = DeltaTable(root / "measurements" / "t")
    rows = rows_of(50).set_column(2, "a", pa.array([1, 2, 3, 4], pa.int32()))
    pq.write_table(rows, root / "measurements" / "t" / "odd.parquet")
    action = AddAction("odd.parquet", 1000, {}, 0, True, json.dumps({"numRecords": 4}))
    log.create_write_transaction([action], "append", log.schema())


def name_elsewhere(root: Path) -> None:
    log = DeltaTable(root / "measurements" / "t")
    action = AddAction("/elsewhere/odd.parquet", 1000, {}, 0, True, json.dumps({"numRecords": 4}))
    log.create_write_transaction([action], "append", log.schema())


def replay_late_rows(root: Path) -> None:
    Tables(str(root)).create(LATE_COPIES_TABLE, LATE_COPIES)
    write_rows(root, 12)


UNUSUAL: dict[str, tuple[Callable[[Path], None], str]] = {
    "rows are deleted": (delete_rows, "version 4 of measurements/t changes rows"),
    "a property changes": (set_property, "version 4 of measurements/t changes its columns or properties"),
    "a column has another type": (replace_column, "another type than the table's"),
    "a file is elsewhere": (name_elsewhere, "names files of another place"),
    "late rows are replayed": (replay_late_rows, "copies of late rows"),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_a_commit_that_delta_must_judge_is_left_to_delta(root: Path, case: str) -> None:
    planner = plan_of(root, 1)
    start = planner.advance(planner.begin())
    change, why = UNUSUAL[case]
    change(root)
    write_rows(root, 16)
    assert planner.advance(start) == start and why in str(planner.refusal)
    version = DeltaTable(root / "measurements" / "t").version()
    beyond = json.dumps({**json.loads(start), "reservoirVersion": version + 1})
    with pytest.raises(UnplannedCommit):
        planner.plan(start, beyond)


def test_commits_before_one_that_delta_must_judge_are_planned(root: Path) -> None:
    planner = plan_of(root, 1)
    set_property(root)
    assert walk(planner) == [(4, -1)] and planner.refusal is not None


def test_a_table_made_anew_or_a_log_without_its_versions_is_left_to_delta(root: Path, tmp_path: Path) -> None:
    planner = plan_of(root, 1)
    other = json.dumps({**json.loads(planner.begin()), "reservoirId": "another"})
    assert planner.advance(other) == other and "not the table" in str(planner.refusal)
    log = root / "measurements" / "t" / "_delta_log"
    planner = plan_of(root, 1)
    end = planner.advance(planner.begin())
    assert planner.advance(end) == end and planner.refusal is None
    (log / f"{3:020d}.json").unlink()
    assert planner.advance(end) == end and "no longer in its log" in str(planner.refusal)
    planner = plan_of(root, 1)
    planner._newest = 3
    assert walk(planner) == [(3, -1)] and "no longer in its log" in str(planner.refusal)


def run_source(spark: SparkSession, root: Path, rows: Any, checkpoint: Path) -> Any:
    """Run a source to its end; return its rows in packets, with the offsets of each micro-batch."""
    found: list[bytes] = []

    def take(frame: Any, batch: int) -> None:
        found.extend(bytes(row["payload"]) for row in frame.collect())

    await_end(start_micro_batches(rows, "test", str(checkpoint), take, None), threading.Event())
    numbers = sorted(int(one.name) for one in (checkpoint / "offsets").iterdir() if one.name.isdigit())
    offsets = [(checkpoint / "offsets" / str(one)).read_text().splitlines()[-1] for one in numbers]
    return unpack_rows(found, FORMAT), offsets


@pytest.mark.spark
@pytest.mark.parametrize(("files", "size"), [(None, None), (1, None), (2, None), (None, "1k"), (3, "1k")])
def test_offsets_and_rows_are_those_of_the_source_of_delta(
    spark: SparkSession, root: Path, tmp_path: Path, files: int | None, size: str | None
) -> None:
    DeltaTable(root / "measurements" / "t").optimize.compact()  # a commit that adds no rows
    write_rows(root, 30)
    reader = spark.readStream.format("delta").option("startingVersion", 1)
    reader = reader if files is None else reader.option("maxFilesPerTrigger", files)
    reader = reader if size is None else reader.option("maxBytesPerTrigger", size)
    theirs = pack_rows(reader.load(str(root / "measurements" / "t")), FORMAT, ROUTING)
    expected = run_source(spark, root, theirs, tmp_path / "theirs")
    planner = plan_of(root, 1, MOST_FILES if files is None else files, math.inf if size is None else 1024)
    ours = read_planned_rows(spark, planner, FORMAT, build_row_packer(FORMAT, ROUTING), False)
    try:
        found = run_source(spark, root, ours, tmp_path / "ours")
    finally:
        forget_planner(spark, planner)
    assert found[1] == expected[1]
    assert found[0].keys.text.equals(expected[0].keys.text)
    for left, right in zip(found[0].rows, expected[0].rows, strict=True):
        assert left.tobytes() == right.tobytes()


@pytest.mark.spark
def test_a_checkpoint_continues_with_either_source(spark: SparkSession, root: Path, tmp_path: Path) -> None:
    def read_by_delta() -> Iterator[Any]:
        reader = spark.readStream.format("delta").option("startingVersion", 1)
        yield pack_rows(reader.load(str(root / "measurements" / "t")), FORMAT, ROUTING)

    def read_by_tasks() -> Iterator[Any]:
        planner = plan_of(root, 1)
        yield read_planned_rows(spark, planner, FORMAT, build_row_packer(FORMAT, ROUTING), False)
        forget_planner(spark, planner)

    for turn in range(4):
        for rows in (read_by_delta, read_by_tasks)[turn % 2]():
            keyed, offsets = run_source(spark, root, rows, tmp_path / "checkpoint")
        assert len(keyed.rows.key) == (22 if turn == 0 else 4)
        assert len(offsets) == turn + 1
        write_rows(root, 40 + 4 * turn)


@pytest.mark.spark
def test_a_stream_goes_on_where_delta_must_read(spark: SparkSession, tmp_path: Path) -> None:
    first, *days = random_rows(4)
    pipeline = Pipeline(tmp_path, random_walk_spec())
    pipeline.land(first)
    pipeline.pretrain()
    pipeline.land(days[0])
    DeltaTable(pipeline.warehouse.path("measurements/walk")).alter.set_table_properties(
        {"delta.checkpointInterval": "7"}
    )
    pipeline.land(days[1], days[2])
    report = pipeline.stream()
    rows = sum(map(len, days))
    assert (report.data["rows"], report.data["batches"]) == (rows, 3)
    assert_bit_equal(pipeline.estimates(), since(pipeline.batch(), days[0]))
