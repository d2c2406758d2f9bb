"""The at-least-once sinks: latest states, functions, files; recovery from a crash between two of them."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

import kalman
from jobs.core.errors import RUN_FAILED, UserError
from jobs.lineage.leases import Lease
from jobs.lineage.live import live_latest
from jobs.spark.warehouse import Warehouse
from jobs.specs.source import Sinks
from jobs.storage.tables import estimates
from jobs.streaming.estimate_files import select_last_of_runs
from jobs.streaming.publishing import MicroBatch, Publisher, open_sinks
from tests.jobs.support.pipeline import (
    Pipeline,
    assert_bit_equal,
    ordered,
    random_rows,
    random_walk_spec,
    since,
)
from tests.jobs.support.processes import Driver, files

OWN_SINK = """
import json, pathlib

here = pathlib.Path(FOLDER)

def take(rows, generation, batch_id):
    if (here / "broken").exists() and batch_id == 1:
        raise OSError("the shelf is full")
    taken = [[row["key"], row["event_time"].isoformat(), row["mean"]] for row in rows.collect()]
    with (here / "taken.jsonl").open("a") as file:
        file.write(json.dumps([generation, batch_id, taken]) + "\\n")
"""


def test_the_last_row_of_each_key_is_kept_wherever_batches_end() -> None:
    rng = np.random.default_rng(1)
    key = np.repeat(rng.permutation(40), rng.integers(1, 6, 40))
    n = len(key)
    rows = pa.RecordBatch.from_pydict({"key": [f"ü{one}" for one in key], "mean": np.arange(n, dtype=float)})
    last = pd.Series(np.arange(n, dtype=float)).groupby(key, sort=False).last()
    for cuts in ([], [0, 1], [7, 8, 50], list(range(n))):
        edges = [0, *cuts, n]
        batches = [rows.slice(a, b - a) for a, b in zip(edges, edges[1:], strict=False)]
        found = [
            value for one in select_last_of_runs(iter(batches)) for value in one.column("mean").to_pylist()
        ]
        assert found == last.to_list()


def sinks_spec(**sinks: Any) -> dict[str, Any]:
    return random_walk_spec(sinks=sinks, outputs={"covariance": "diagonal"})


def prepared(folder: Path, days: int, **sinks: Any) -> tuple[Pipeline, list[pd.DataFrame]]:
    """Return a pipeline with one day in its snapshot, the others landed after it, and a user function as sink."""
    frames = random_rows(days, keys=30, rows=60)
    pipeline = Pipeline(folder, sinks_spec(**sinks))
    (folder / "models" / "shelf.py").write_text(OWN_SINK.replace("FOLDER", repr(str(folder / "models"))))
    pipeline.land(frames[0])
    pipeline.pretrain()
    pipeline.land(*frames[1:])
    return pipeline, frames


def taken(pipeline: Pipeline) -> list[tuple[str, int, list[Any]]]:
    file = pipeline.folder / "models" / "taken.jsonl"
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def assert_all_taken(pipeline: Pipeline, expected: pd.DataFrame) -> None:
    """Check that the function got every estimate, and that repeated micro-batches were equal."""
    by_batch: dict[int, list[Any]] = {}
    for _, batch, rows in taken(pipeline):
        assert by_batch.setdefault(batch, rows) == rows
    found = sorted((key, at, tuple(mean)) for rows in by_batch.values() for key, at, mean in rows)
    wanted = zip(expected["key"], expected["event_time"], expected["mean"], strict=True)
    assert found == sorted((key, at.isoformat(), mean) for key, at, mean in wanted)


def assert_in_files(pipeline: Pipeline, expected: pd.DataFrame, folder: str, kind: str) -> None:
    """Check that the files have every estimate once, with its micro-batch."""
    schema = pipeline.warehouse.read("estimates/walk").schema
    reader = pipeline.warehouse.spark.read.format(kind).schema(schema)
    found = ordered(reader.load(pipeline.warehouse.path(folder)).toPandas())
    assert_bit_equal(found, expected)
    assert found["batch_id"].to_list() == pipeline.estimates()["batch_id"].to_list()


def assert_all_named(pipeline: Pipeline) -> None:
    """Check that each file of the estimates is named by the table, though a micro-batch was written again."""
    table = Path(pipeline.warehouse.path(estimates("walk")))
    named = {Path(one).name for one in DeltaTable(str(table)).file_uris()}
    assert named == {one.name for one in table.glob("*.parquet")}


def assert_latest(pipeline: Pipeline) -> None:
    """Check that the latest states are each key's last estimates of one batch pass over all rows."""
    everything = pipeline.batch()
    last = everything.sort_values("event_time", kind="stable").groupby("key").tail(1).sort_values("key")
    found = live_latest(pipeline.warehouse, "walk").toPandas().sort_values("key", ignore_index=True)
    for name in ("key", "event_time"):
        assert found[name].to_list() == last[name].to_list()
    # The batch table does not order rows of one event time: any of them may be the last.
    ties = everything.merge(last[["key", "event_time"]], on=["key", "event_time"])
    possible = set(zip(ties["key"], ties["mean"], ties["covariance"], strict=True))
    assert possible >= set(
        zip(found["key"], found["mean"].map(tuple), found["covariance"].map(tuple), strict=True)
    )


@pytest.mark.slow
@pytest.mark.spark
def test_a_failing_sink_fails_its_micro_batch_and_the_retry_converges(tmp_path: Path) -> None:
    pipeline, frames = prepared(
        tmp_path, 3, latest=True, files={"folder": "handed", "format": "json"}, functions=["shelf:take"]
    )
    broken = tmp_path / "models" / "broken"
    broken.touch()
    for _ in range(2):
        with pytest.raises(
            UserError, match="micro-batch 1 could not be written to shelf:take .*shelf is full"
        ) as error:
            pipeline.stream()
        assert_all_named(pipeline)
    assert error.value.exit_code == RUN_FAILED
    assert "its estimates are safe: repair shelf:take and restart the stream" in str(error.value)
    assert set(pipeline.estimates()["batch_id"]) == {0, 1}
    assert [(generation, batch) for generation, batch, _ in taken(pipeline)] == [("walk-g0001", 0)]
    broken.unlink()
    pipeline.stream()
    expected = since(pipeline.batch(), frames[1])
    assert_bit_equal(pipeline.estimates(), expected)
    assert_all_taken(pipeline, expected)
    assert [batch for _, batch, _ in taken(pipeline)] == [0, 1]
    assert_latest(pipeline)
    assert_in_files(pipeline, expected, "handed", "json")

    # If the spec drops the sink, its rows are deleted; if the spec adds it again, they come from the state.
    more = random_rows(4, keys=30, rows=60)[3]
    before = live_latest(pipeline.warehouse, "walk").toPandas()
    pipeline.write_spec(sinks_spec(functions=["shelf:take"]))
    pipeline.land(more)
    pipeline.stream()
    assert live_latest(pipeline.warehouse, "walk").isEmpty()
    pipeline.write_spec(sinks_spec(latest=True))
    pipeline.stream()
    assert_latest(pipeline)
    after = live_latest(pipeline.warehouse, "walk").toPandas()
    assert set(before["key"]) <= set(after["key"]) and (after["batch_id"] == -1).all()


def test_an_error_names_a_missing_sink(tmp_path: Path) -> None:
    (tmp_path / "lone_shelf.py").write_text("def take(rows, generation, batch_id): ...")
    for name, said in (
        ("lone_shelf:give", "sinks.functions: module lone_shelf has no function give"),
        ("no_shelf:take", "sinks.functions: there is no module no_shelf"),
    ):
        with pytest.raises(kalman.ModelError, match=said):
            open_sinks(cast(Warehouse, None), Sinks(functions=[name]), str(tmp_path))
    with pytest.raises(ValueError, match="does not name a function; write module:function"):
        Sinks(functions=["take"])


class Recording:
    """A sink that records its rows."""

    name = "recording"

    def __init__(self) -> None:
        self.got: list[tuple[int, list[int]]] = []
        self.places: list[tuple[int, dict[int, int]]] = []

    def write(self, rows: DataFrame, batch: MicroBatch) -> None:
        found = rows.collect()
        assert batch.generation == "g" and len({row["ordinal"] for row in found}) == len(found)
        self.got.append((batch.batch_id, sorted(row["value"] for row in found)))
        self.places.append((batch.batch_id, {row["ordinal"]: row["value"] for row in found}))


@pytest.mark.spark
def test_a_promoted_generation_publishes_what_it_estimated_as_a_shadow(
    spark: SparkSession, tmp_path: Path
) -> None:
    warehouse, sink = Warehouse(spark, str(tmp_path)), Recording()
    drive = SimpleNamespace(status="shadow")
    one = SimpleNamespace(generation="g", model="m", checkpoint="c", partitions=2, epoch=1)
    lease = cast(Lease, SimpleNamespace(generation=one, record=drive, check=lambda: None))

    def begun(committed: int | None) -> Publisher:
        made = Publisher(warehouse, lease, [sink])
        made.begin(committed)
        return made

    def batch(number: int) -> DataFrame:
        columns = "key string, event_time int, value int, generation string, batch_id bigint"
        rows = [(f"k{value}", value, 10 * number + value, "g", number) for value in range(2)]
        frame = spark.createDataFrame([*rows, ("k", 0, 99, "other", number)], columns)
        warehouse.append(frame, "estimates/m")
        return frame.filter("generation = 'g'")

    publisher = begun(None)
    publisher(batch(0), 0)
    publisher(batch(1), 1)
    assert sink.got == []
    drive.status = "live"
    publisher(None, 2)
    assert sink.got == [(0, [0, 1]), (1, [10, 11])]
    publisher(batch(3), 3)
    begun(3)  # restarted: it has published everything
    assert sink.got[2:] == [(3, [30, 31])]
    batch(4)  # estimated and committed, but killed before it was published
    begun(4)
    assert sink.got[3:] == [(4, [40, 41])]
    before = dict(sink.places)
    (note,) = Path(tmp_path, "_published", "g").iterdir()
    note.write_text(json.dumps({"sink": "recording", "batch_id": -1}))
    sink.got, sink.places = sink.got[:4], []
    begun(1)  # as after a kill before the note: the same rows again, with the same ordinals
    assert sink.places == [(0, before[0]), (1, before[1])]
    sink.got = sink.got[:4]
    Publisher(warehouse, lease, []).begin(4)  # the spec no longer names the sink
    batch(5)
    begun(5)  # the spec names it again: it is a new sink
    assert sink.got[4:] == []


@pytest.mark.spark
@pytest.mark.soak
def test_all_sinks_are_complete_though_drivers_are_killed_between_them(tmp_path: Path) -> None:
    kills = 8
    pipeline, frames = prepared(
        tmp_path, kills + 3, latest=True, files={"folder": str(tmp_path / "handed")}, functions=["shelf:take"]
    )
    moments = random.Random(1)
    log = tmp_path / "warehouse" / "estimates" / "walk" / "_delta_log"
    checkpoint = tmp_path / "warehouse" / "checkpoints" / "walk-g0001"
    for batch in range(kills):
        driver = Driver(pipeline, "stream", "--model", "walk")
        driver.wait_for(lambda batch=batch: str(batch) in files(checkpoint / "offsets"))
        had = len(files(log))
        driver.wait_for(
            lambda had=had: len(files(log)) > had
        )  # the estimates are written, the others not yet
        time.sleep(moments.uniform(0.0, 1.0))
        driver.kill(moments.random() < 0.5)
    pipeline.stream()
    expected = since(pipeline.batch(), frames[1])
    assert_bit_equal(pipeline.estimates(), expected)
    assert_all_taken(pipeline, expected)
    assert_latest(pipeline)
    assert_in_files(pipeline, expected, "../handed", "parquet")
