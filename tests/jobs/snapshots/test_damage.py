"""Damaged checkpoints and snapshots are refused with a clear error, or rewritten, and no row is lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from delta.tables import DeltaTable
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from jobs import export, rollback, status, upgrade
from jobs.core.errors import RUN_FAILED, UserError
from jobs.lineage import generations
from jobs.lineage.live import live_estimates
from jobs.snapshots import manifests, store, verified_rows
from jobs.spark.warehouse import Warehouse
from tests.jobs.support.pipeline import (
    Pipeline,
    assert_bit_equal,
    ordered,
    random_rows,
    random_walk_spec,
    since,
    streaming,
)

pytestmark = pytest.mark.spark


def live(pipeline: Pipeline) -> pd.DataFrame:
    return ordered(live_estimates(pipeline.warehouse, "walk").toPandas())


def cut(path: Path) -> None:
    """Cut a file in half, and keep the checksum of the whole."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_unnoticed(path: Path) -> None:
    """Cut a file in half, and remove its checksum."""
    cut(path)
    path.with_name(f".{path.name}.crc").unlink()


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)  # Hadoop's checksum


CHECKPOINTS: list[tuple[Callable[[Path], None], str, str]] = [
    (cut, "offsets/1", r"offsets/1 cannot be read \(ChecksumException\)"),
    (remove, "offsets/1", "micro-batch 1 is committed, and offsets/1 is missing"),
    (cut, "commits/1", r"commits/1 cannot be read \(ChecksumException\)"),
    (remove, "commits", "micro-batch 1 is planned, and commits/0 is missing"),
    (cut_unnoticed, "offsets/1", "offsets/1 is (cut short|damaged)"),
    (remove, "", "there is nothing in checkpoints/walk-g0001, and walk-g0001 has written estimates"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "damages",
    [
        pytest.param(CHECKPOINTS[-2:], id="some"),
        pytest.param(CHECKPOINTS[:-2], id="others"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_a_snapshot_recovers_the_stream(
    tmp_path: Path, damages: list[tuple[Callable[[Path], None], str, str]]
) -> None:
    days = random_rows(4, rows=60)
    pipeline = streaming(tmp_path, days[0], *days[1:3])
    settings = pipeline.settings
    exported = export.run(settings, "walk", batch=0).data["snapshot"]
    pipeline.land(days[3])
    checkpoint, copy = tmp_path / "warehouse" / "checkpoints" / "walk-g0001", tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    written = len(pipeline.estimates())

    for damage, name, said in damages:
        damage(checkpoint / name)
        with pytest.raises(UserError, match=f"the checkpoint of walk-g0001 is damaged: {said}") as refused:
            pipeline.stream()
        assert refused.value.exit_code == RUN_FAILED
        assert refused.value.message.endswith(f"`kalman-pipeline stream --model walk --adopt {exported}`")
        if damage is cut_unnoticed:
            with pytest.raises(UserError, match="the checkpoint of walk-g0001 is damaged"):
                export.run(settings, "walk")
            (seen,) = status.run(settings, "walk").data["models"][0]["generations"]
            assert seen["last_error"].startswith("the checkpoint is damaged: ")
        shutil.rmtree(checkpoint, ignore_errors=True)
        shutil.copytree(copy, checkpoint)

    # The state itself: Spark finds the damage when it loads the state.
    for path in (checkpoint / "state" / "0").glob("*/2_*"):
        path.unlink()
    with pytest.raises(UserError, match=rf"the stream of walk failed: .*--adopt {exported}`$"):
        pipeline.stream()
    assert len(pipeline.estimates()) == written
    adopted = pipeline.stream(adopt=exported).data
    assert (adopted["generation"], adopted["rows"]) == ("walk-g0002", sum(map(len, days[2:])))
    assert_bit_equal(live(pipeline), since(pipeline.batch(), days[1]))
    shutil.rmtree(checkpoint)
    with pytest.raises(UserError, match="the checkpoint of walk-g0001 is damaged: there is nothing in"):
        rollback.run(settings, "walk", to="walk-g0001")
    assert generations.read_named(pipeline.warehouse, "walk").generation == "walk-g0002"


@pytest.mark.slow
def test_half_written_micro_batches_repeated_adoptions_and_wrong_snapshots(tmp_path: Path) -> None:
    days = random_rows(4, rows=60)
    pipeline = streaming(tmp_path, days[0], *days[1:3])
    settings = pipeline.settings
    exported = export.run(settings, "walk", batch=0).data["snapshot"]
    checkpoint = tmp_path / "warehouse" / "checkpoints" / "walk-g0001"

    # Not damaged but half written, as by a driver that was killed before its commit.
    remove(checkpoint / "commits" / "1")
    pipeline.write_spec(random_walk_spec(late="apply"))
    with pytest.raises(
        UserError, match="micro-batch 1 of walk-g0001 is half written, and late has changed since"
    ):
        pipeline.stream()
    pipeline.write_spec(random_walk_spec())
    pipeline.land(days[3])
    pipeline.stream()
    expected = since(pipeline.batch(), days[1])
    assert_bit_equal(live(pipeline), expected)

    # Without its checkpoint: from an export, then from the snapshot that this generation began from.
    for number in (1, 2):
        shutil.rmtree(tmp_path / "warehouse" / "checkpoints" / f"walk-g000{number}")
        with pytest.raises(UserError, match=f"nothing in checkpoints/walk-g000{number}.*--adopt {exported}`"):
            pipeline.stream()
        for began in (True, False):  # a repeated start makes no new generation
            adopted = pipeline.stream(adopt=exported).data
            assert (adopted["generation"], adopted["began"]) == (f"walk-g000{number + 1}", began)
            assert_bit_equal(live(pipeline), expected)

    # A generation whose row names the state of another model.
    mine = {"generation": "walk-g0003"}
    generations.update(pipeline.warehouse, mine, {"fingerprint": "0" * 64})
    with pytest.raises(
        UserError, match="walk-g0003 and the snapshot that it began from are not of one model"
    ):
        pipeline.stream()


def pinned_to(warehouse: Warehouse, rows: Callable[[DataFrame], DataFrame]) -> None:
    """Change the rows of the only snapshot, and point its manifest to the version with the changed rows."""
    (manifest,) = manifests.read_manifests(warehouse)
    frame = verified_rows.read_rows(warehouse, manifest.snapshot_id, "walk", manifest.snapshots_version)
    changed = rows(frame).localCheckpoint()
    changed.write.format("delta").mode("overwrite").save(warehouse.path("snapshots"))
    table = DeltaTable.forPath(warehouse.spark, warehouse.path("manifests"))
    table.update(set={"snapshots_version": F.lit(warehouse.latest_version("snapshots"))})


def data_files(warehouse: Warehouse) -> list[Path]:
    """Return the files that hold the rows of the only snapshot."""
    (manifest,) = manifests.read_manifests(warehouse)
    frame = verified_rows.read_rows(warehouse, manifest.snapshot_id, "walk", manifest.snapshots_version)
    return [Path(name.removeprefix("file:").replace("//", "")) for name in frame.inputFiles()]


def missing(warehouse: Warehouse) -> None:
    pinned_to(warehouse, lambda rows: rows.filter(F.col("key") != "7"))


def doubled(warehouse: Warehouse) -> None:
    pinned_to(warehouse, lambda rows: rows.unionAll(rows.filter(F.col("key") == "7")))


def changed(warehouse: Warehouse) -> None:
    pinned_to(warehouse, lambda rows: rows.withColumn("log_likelihood", F.lit(0.0)))


def none(warehouse: Warehouse) -> None:
    pinned_to(warehouse, lambda rows: rows.limit(0))


def lost_file(warehouse: Warehouse) -> None:
    data_files(warehouse)[0].unlink()


def cut_file(warehouse: Warehouse) -> None:
    cut(data_files(warehouse)[0])


def leave_unmade(warehouse: str, *tables: str) -> None:
    """Leave a table as a process does that is killed in its first commit."""
    for table in tables:
        log = Path(warehouse, table, "_delta_log")
        (log / "_staged_commits").mkdir(parents=True)
        for name in (".00000000000000000000.json.1.tmp", "..00000000000000000000.json.1.tmp.crc"):
            (log / name).touch()


@pytest.mark.parametrize(
    "damages",
    [
        pytest.param((lost_file, none), id="some", marks=pytest.mark.slow),
        pytest.param((missing, doubled, changed, cut_file, none), id="others", marks=pytest.mark.soak),
    ],
)
def test_a_damaged_snapshot_is_refused_and_rewritten(
    tmp_path: Path, damages: tuple[Callable[[Warehouse], None], ...]
) -> None:
    days = random_rows(2, rows=60)
    pipeline = Pipeline(tmp_path, random_walk_spec())
    leave_unmade(pipeline.settings.warehouse, "measurements/walk", "snapshots", "manifests", "generations")
    pipeline.land(days[0])
    first = pipeline.pretrain().data
    (manifest,) = manifests.read_manifests(pipeline.warehouse)
    for damage in damages:
        damage(pipeline.warehouse)
        what = r"is damaged: \d+ keys with checksum" if "file" not in damage.__name__ else "cannot be read"
        with pytest.raises(UserError, match=what):
            (found,) = manifests.read_manifests(pipeline.warehouse)
            store.verify(pipeline.warehouse, found)
        if damage is none:
            pipeline.land(days[1])
            with pytest.raises(UserError, match="is damaged: 0 keys") as refused:
                pipeline.stream()
            assert refused.value.exit_code == RUN_FAILED
            first["again"] = pipeline.pretrain(to_version=1).data
        again = pipeline.pretrain(to_version=1).data
        assert again["snapshot"] == first["snapshot"]
        (mended,) = manifests.read_manifests(pipeline.warehouse)
        assert (mended.checksum, mended.key_count) == (manifest.checksum, manifest.key_count)
        store.verify(pipeline.warehouse, mended)
    assert first["again"]["made"] and not pipeline.pretrain(to_version=1).data["made"]
    assert pipeline.stream().data["rows"] == len(days[1])
    assert_bit_equal(live(pipeline), since(pipeline.batch(), days[1]))


@pytest.mark.soak
def test_the_state_of_another_version_is_refused_by_its_blocks(tmp_path: Path) -> None:
    days = random_rows(4, rows=60)
    pipeline = streaming(tmp_path, days[0], days[1])
    pipeline.write_spec(random_walk_spec(version=2))
    upgrade.run(pipeline.settings, "walk", mode="stop-start")
    pipeline.land(days[2])
    pipeline.stream()
    known: Any = {one.generation: one for one in generations.read_generations(pipeline.warehouse, "walk")}
    mine = {"generation": "walk-g0002"}
    place = {name: known[name].checkpoint for name in known}
    generations.update(pipeline.warehouse, mine, {"checkpoint": place["walk-g0001"]})
    with pytest.raises(UserError, match="holds the state of something else: version is 1, not 2"):
        pipeline.stream()
    # Nothing was written, and the stream resumes from its own checkpoint.
    generations.update(pipeline.warehouse, mine, {"checkpoint": place["walk-g0002"]})
    pipeline.land(days[3])
    pipeline.stream()
    assert_bit_equal(live(pipeline), since(pipeline.batch(), days[1]))
