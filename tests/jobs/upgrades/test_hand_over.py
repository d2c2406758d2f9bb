"""At every hand-over that is not an export, each accepted row stays in the live estimates exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from delta.tables import DeltaTable
from pyspark.sql import functions as F

from jobs import rollback, upgrade
from jobs.core.errors import UserError
from jobs.lineage import generations
from jobs.lineage.live import is_live, live_estimates
from jobs.streaming.micro_batch import MicroBatchWriter
from tests.jobs.support.pipeline import (
    Pipeline,
    assert_bit_equal,
    ordered,
    random_rows,
    random_walk_spec,
    since,
)

pytestmark = pytest.mark.spark

ROWS = [120, 150, 140, 130, 110]
DAYS = [day.head(count) for day, count in zip(random_rows(5, rows=150), ROWS, strict=True)]
"""Landed as versions 1 to 5 of the measurements; version 0 made the table."""


def spec(files: int, **changes: Any) -> dict[str, Any]:
    stream = {"max_files_per_batch": files, "partitions": 2, "keys_per_block": 8}
    return random_walk_spec(stream=stream, **changes)


@pytest.fixture(scope="module")
def landed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pipeline, dict[int, str]]:
    """History and three more versions, and the snapshots at all of them; no stream has run."""
    pipeline = Pipeline(tmp_path_factory.mktemp("landed") / "walk", spec(1))
    pipeline.land(*DAYS[:4])
    return pipeline, {
        version: pipeline.pretrain(to_version=version).data["snapshot"] for version in (3, 2, 1)
    }


@pytest.fixture
def streamed(
    request: pytest.FixtureRequest, landed: tuple[Pipeline, dict[int, str]], tmp_path: Path
) -> tuple[Pipeline, dict[int, str]]:
    """A stream from version 1 that has read up to version 4, so many files (the parameter) a micro-batch."""
    base, snapshots = landed
    pipeline = base.copied(tmp_path / "walk")
    pipeline.write_spec(spec(request.param, sinks={"files": {"folder": "handed"}}))
    # From the snapshot of the history, as if the others had been made later.
    pipeline.stream(adopt=snapshots[1])
    return pipeline, snapshots


def live(pipeline: Pipeline) -> pd.DataFrame:
    return ordered(live_estimates(pipeline.warehouse, "walk").toPandas())


def assert_once(pipeline: Pipeline, days: Sequence[pd.DataFrame]) -> None:
    """Check that the live estimates have each row of these days once, and no other."""
    wanted = Counter(
        (str(key), at.tz_localize(None)) for day in days for key, at in zip(day["id"], day["at"], strict=True)
    )
    found = live(pipeline)
    have = Counter(zip(found["key"], found["event_time"], strict=True))
    lost, doubled = (wanted - have).total(), (have - wanted).total()
    assert (lost, doubled) == (0, 0), f"{lost} of {wanted.total()} rows are lost, {doubled} are there twice"


def forget(pipeline: Pipeline, generation: str, *batches: int) -> None:
    """Remove the files of micro-batches, as Spark does with all but the last hundred."""
    folder = Path(pipeline.settings.warehouse, "checkpoints", generation)
    for batch in batches:
        for part in ("offsets", "commits"):
            (folder / part / str(batch)).unlink()
            (folder / part / f".{batch}.crc").unlink()


def forget_ranges(pipeline: Pipeline) -> None:
    """Make the estimates those of an earlier release."""
    path = pipeline.warehouse.path("estimates/walk")
    rows = pipeline.warehouse.read("estimates/walk").drop("source_range").localCheckpoint()
    rows.write.format("delta").mode("overwrite").option("overwriteSchema", "true").save(path)


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [1], indirect=True)
def test_snapshots_at_the_ends_of_micro_batches_are_adopted(
    streamed: tuple[Pipeline, dict[int, str]],
) -> None:
    pipeline, snapshots = streamed
    expected = since(pipeline.batch(), DAYS[1])

    def adopt(version: int, generation: str) -> None:
        assert pipeline.stream(adopt=snapshots[version]).data["generation"] == generation
        assert_once(pipeline, DAYS[1:4])
        assert_bit_equal(live(pipeline), expected)

    forget(pipeline, "walk-g0001", 0, 1)
    adopt(2, "walk-g0002")  # at a micro-batch whose files are gone
    adopt(3, "walk-g0003")
    adopt(2, "walk-g0004")  # before the live generation's start: that of its parent
    adopt(1, "walk-g0005")  # before the starts of all but the first
    back = rollback.run(pipeline.settings, "walk").data
    assert (back["generation"], back["retired"]) == ("walk-g0004", "walk-g0005")
    assert_once(pipeline, DAYS[1:4])

    # What a sink was handed has the rows of every generation; one condition keeps those that are live.
    handed = pipeline.warehouse.spark.read.parquet(pipeline.warehouse.path("handed"))
    kept = ordered(handed.filter(is_live(pipeline.warehouse, "walk")).toPandas())
    assert handed.count() > len(kept) and "source_range" not in kept
    assert_bit_equal(kept, expected)


@pytest.mark.parametrize("streamed", [3], indirect=True)
@pytest.mark.slow
def test_a_snapshot_within_a_micro_batch_or_ahead_of_the_stream_is_refused(
    streamed: tuple[Pipeline, dict[int, str]],
) -> None:
    pipeline, snapshots = streamed
    rows = len(DAYS[1]) + len(DAYS[2])
    known = len(generations.read_generations(pipeline.warehouse, "walk"))
    with pytest.raises(UserError, match=f"{rows} rows up to measurements version 3 would have no") as refused:
        pipeline.stream(adopt=snapshots[3])
    assert "A snapshot at version 1 or 4 misses none: `kalman-pipeline pretrain" in refused.value.message
    assert "--allow-missing-estimates" in refused.value.message
    pipeline.land(DAYS[4])
    ahead = pipeline.pretrain().data["snapshot"]
    with pytest.raises(UserError, match=f"{len(DAYS[4])} rows up to measurements version 5 .*catch up first"):
        pipeline.stream(adopt=ahead)
    assert len(generations.read_generations(pipeline.warehouse, "walk")) == known
    assert_once(pipeline, DAYS[1:4])

    pipeline.stream()
    pipeline.stream(adopt=ahead)
    assert_once(pipeline, DAYS[1:])
    allowed = pipeline.stream(adopt=snapshots[3], allow_missing_estimates=True).data
    assert any(f"{rows} rows up to measurements version 3" in note for note in allowed["notes"])
    assert_once(pipeline, DAYS[3:])


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [1], indirect=True)
def test_estimates_of_an_earlier_release_are_found_by_the_checkpoint_or_asked_about(
    streamed: tuple[Pipeline, dict[int, str]],
) -> None:
    pipeline, snapshots = streamed
    forget(pipeline, "walk-g0001", 0)
    forget_ranges(pipeline)
    pipeline.stream(adopt=snapshots[3])
    assert_once(pipeline, DAYS[1:4])
    with pytest.raises(
        UserError, match=f"{len(DAYS[1])} rows up to measurements version 2 .*earlier release"
    ):
        pipeline.stream(adopt=snapshots[2])
    pipeline.stream(adopt=snapshots[1])
    assert_once(pipeline, DAYS[1:4])


class Stopped(Exception):
    """Stands for the end of the process."""


def stop_after(pipeline: Pipeline, batches: int, patch: pytest.MonkeyPatch) -> None:
    """Run the stream until it has committed so many micro-batches."""
    write = MicroBatchWriter.__call__

    def stopping(self: MicroBatchWriter, packets: Any, batch_id: int) -> None:
        if batch_id == batches:
            raise Stopped
        write(self, packets, batch_id)

    with patch.context() as patched:
        patched.setattr(MicroBatchWriter, "__call__", stopping)
        with pytest.raises(UserError, match="the stream of walk failed"):
            pipeline.stream()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["retrain", "stateless"])
def test_a_stream_that_stopped_within_a_version_is_replaced(
    landed: tuple[Pipeline, dict[int, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    base, snapshots = landed
    pipeline = base.copied(tmp_path / "walk")
    # Version 5 has three files, each with all rows of its keys, so that none is late. By two files a micro-batch:
    # versions 2 and 3; version 4 and a file of 5; the rest of 5.
    columns = pipeline.warehouse.read("measurements/walk").limit(0)
    rows = pipeline.warehouse.spark.createDataFrame(DAYS[4]).repartition(3, "id")
    rows = columns.unionByName(rows, allowMissingColumns=True)
    rows.write.format("delta").mode("append").save(pipeline.warehouse.path("measurements/walk"))
    pipeline.write_spec(spec(2))
    for version, name in snapshots.items():  # the oldest one is the only one that a stream can start from
        if version > 1:
            mine = F.col("snapshot_id") == name
            delta_table(pipeline, "manifests").update(mine, {"status": F.lit("removed")})
    stop_after(pipeline, 2, monkeypatch)
    assert (
        generations.read_position(pipeline.warehouse, generations.read_named(pipeline.warehouse, "walk"))[
            "version"
        ]
        == 4
    )
    pipeline.write_spec(spec(2, version=2))
    options: dict[str, Any] = {"lose_state": True} if mode == "stateless" else {}
    done = upgrade.run(pipeline.settings, "walk", mode=mode, **options).data
    assert done["generation"] == "walk-g0002"
    pipeline.stream()
    assert_once(pipeline, DAYS[1:])


def delta_table(pipeline: Pipeline, name: str) -> Any:
    return DeltaTable.forPath(pipeline.warehouse.spark, pipeline.warehouse.path(name))
