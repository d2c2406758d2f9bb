"""Measurements that are not those that a state has read: put back from a backup and grown again, or made anew."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jobs import export, promote, rollback, upgrade
from jobs.core.errors import UserError
from jobs.lineage import generations
from jobs.lineage.generation_checkpoint import ReachedCommits
from jobs.snapshots.manifests import read_manifests
from tests.jobs.support.pipeline import (
    Pipeline,
    assert_bit_equal,
    random_rows,
    random_walk_spec,
    since,
    streaming,
)

pytestmark = pytest.mark.spark

DAYS = random_rows(7, keys=20, rows=40)
TABLE = "measurements/walk"


def forget(pipeline: Pipeline) -> None:
    """Let Spark forget what it knows of the tables, as in a process that starts after they were replaced."""
    spark: Any = pipeline.warehouse.spark
    spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()
    spark.catalog.clearCache()


def put_back(pipeline: Pipeline, backup: Path) -> None:
    table = Path(pipeline.settings.warehouse, TABLE)
    shutil.rmtree(table)
    shutil.copytree(backup, table)
    forget(pipeline)


def backed_up(pipeline: Pipeline) -> Path:
    backup = pipeline.folder / "backup"
    shutil.copytree(Path(pipeline.settings.warehouse, TABLE), backup)
    return backup


def in_log(pipeline: Pipeline, version: int) -> str:
    """Return the id of a commit."""
    path = Path(pipeline.settings.warehouse, TABLE, "_delta_log", f"{version:020d}.json")
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


@pytest.mark.slow
def test_a_table_put_back_from_a_backup_and_grown_past_the_position_is_refused(tmp_path: Path) -> None:
    pipeline = streaming(tmp_path, DAYS[0], DAYS[1])
    notes = Path(pipeline.settings.warehouse, "checkpoints/walk-g0001/reached")
    shutil.rmtree(notes)  # as an earlier release left it, which is no reason to refuse it
    backup = backed_up(pipeline)
    pipeline.land(DAYS[2])
    assert pipeline.stream().data["version"] == 3
    (note,) = notes.iterdir()
    assert json.loads(note.read_text()) == {"version": 3, "commit": in_log(pipeline, 3)}
    export.run(pipeline.settings, "walk")
    named = [one.position["commit"] for one in read_manifests(pipeline.warehouse, "walk")]
    assert named == [in_log(pipeline, 1), in_log(pipeline, 3)]
    put_back(pipeline, backup)
    pipeline.land(DAYS[3], DAYS[4])  # again version 3, then 4

    refused = r"walk-g0001 has read version 3 of the measurements when it was another commit .*put back from a backup"
    with pytest.raises(
        UserError, match=refused + ".*pretrain --model walk`, then .*stream --model walk --adopt"
    ):
        pipeline.stream()
    # A stream that runs meanwhile stops at its next micro-batch.
    offsets = Path(pipeline.settings.warehouse, "checkpoints/walk-g0001/offsets")
    planned = (offsets / "1").read_text().replace('"reservoirVersion":4', '"reservoirVersion":5')
    (offsets / "2").write_text(planned)
    with pytest.raises(UserError, match="was put back while the stream ran: version 3 is another commit now"):
        ReachedCommits(pipeline.warehouse, "checkpoints/walk-g0001", TABLE).take(2)
    (offsets / "2").unlink()
    # Killed before Spark's commit of the micro-batch, and after its note.
    commits = Path(pipeline.settings.warehouse, "checkpoints/walk-g0001/commits")
    for name in ("1", ".1.crc"):
        (commits / name).unlink()
    with pytest.raises(UserError, match=refused):
        pipeline.stream()
    with pytest.raises(UserError, match=refused):
        export.run(pipeline.settings, "walk")
    pipeline.write_spec(random_walk_spec(version=2))
    for mode, more in (("retrain", {}), ("stateless", {"lose_state": True}), ("stop-start", {})):
        with pytest.raises(UserError, match=refused):
            upgrade.run(pipeline.settings, "walk", mode=mode, **more)
    pipeline.write_spec(random_walk_spec())

    # The way out that the sentence names: every row of the table is in the state.
    snapshot = pipeline.pretrain().data["snapshot"]
    with pytest.raises(UserError, match="lack since they were put back.*--allow-missing-estimates"):
        pipeline.stream(adopt=snapshot)
    assert pipeline.stream(adopt=snapshot, allow_missing_estimates=True).data["batches"] == 0
    pipeline.land(DAYS[5])
    assert pipeline.stream().data["rows"] == len(DAYS[5])
    assert_bit_equal(pipeline.estimates("walk-g0002"), since(pipeline.batch(), DAYS[5]))


@pytest.mark.slow
def test_what_has_read_other_measurements_is_neither_promoted_nor_rolled_back_to(tmp_path: Path) -> None:
    pipeline = streaming(tmp_path, DAYS[0], DAYS[1])
    backup = backed_up(pipeline)
    pipeline.land(DAYS[2])
    pipeline.stream()
    for version in (2, 3):  # walk-g0001 is retired, walk-g0002 live, walk-g0003 a shadow
        pipeline.write_spec(random_walk_spec(version=version))
        upgrade.run(pipeline.settings, "walk", promote=version == 2, force=True)  # without rows to compare
    put_back(pipeline, backup)
    pipeline.land(DAYS[3], DAYS[4])
    refused = "has read version 3 of the measurements when it was another commit"
    with pytest.raises(UserError, match=f"walk-g0003 {refused}"):
        promote.run(pipeline.settings, "walk", force=True)
    with pytest.raises(UserError, match=f"walk-g0001 {refused}"):
        rollback.run(pipeline.settings, "walk")
    statuses = {
        one.generation: one.status for one in generations.read_generations(pipeline.warehouse, "walk")
    }
    assert statuses == {"walk-g0001": "retired", "walk-g0002": "live", "walk-g0003": "shadow"}


@pytest.mark.slow
def test_a_snapshot_of_rows_that_a_backup_does_not_have_starts_no_stream(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec())
    pipeline.land(DAYS[0])
    older = pipeline.pretrain().data["snapshot"]
    backup = backed_up(pipeline)
    pipeline.land(DAYS[1])
    lost = pipeline.pretrain().data["snapshot"]
    put_back(pipeline, backup)
    with pytest.raises(UserError, match="the table ends with version 1: it was restored to an older state"):
        pipeline.stream(adopt=lost)
    pipeline.land(DAYS[2], DAYS[3])
    with pytest.raises(UserError, match="has read version 2 of the measurements when it was another commit"):
        pipeline.stream(adopt=lost)
    # The newest snapshot of rows that the table has.
    done = pipeline.stream().data
    assert (done["snapshot"], done["rows"]) == (older, len(DAYS[2]) + len(DAYS[3]))
    assert_bit_equal(pipeline.estimates(), since(pipeline.batch(), DAYS[2]))


@pytest.mark.slow
def test_measurements_made_anew_get_a_snapshot_of_their_own(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec())
    pipeline.land(DAYS[0])
    old = pipeline.pretrain().data["snapshot"]
    shutil.rmtree(Path(pipeline.settings.warehouse, TABLE))
    forget(pipeline)
    pipeline.land(DAYS[1])
    made = pipeline.pretrain().data
    assert made["made"] and made["snapshot"] != old
    again = pipeline.pretrain().data
    assert (again["snapshot"], again["made"]) == (made["snapshot"], False)
    pipeline.land(DAYS[2])
    assert pipeline.stream().data["snapshot"] == made["snapshot"]
    assert_bit_equal(pipeline.estimates(), since(pipeline.batch(), DAYS[2]))
