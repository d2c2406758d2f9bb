"""Maintenance of a real pipeline removes what nothing needs, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from jobs import estimate, export, maintain, quarantine, retire, rollback, upgrade
from jobs.core.errors import UserError
from jobs.insight.maintenance import Maintenance
from jobs.lineage import generations
from jobs.lineage.live import live_estimates
from jobs.snapshots import manifests, store
from jobs.spark.warehouse import Warehouse
from jobs.storage.tables import estimates
from jobs.storage.warehouse import Tables
from tests.conftest import cli_environment
from tests.jobs.support.pipeline import (
    Pipeline,
    assert_bit_equal,
    ordered,
    random_rows,
    random_walk_spec,
    since,
    streaming,
)
from tests.jobs.support.processes import Driver
from tests.jobs.support.stored_types import several_types, tables_of

pytestmark = [pytest.mark.spark, pytest.mark.slow]

DAYS = random_rows(5, rows=60)
LONG_AGO = datetime.now(UTC) - timedelta(days=400)
RULES: dict[str, Any] = {
    "retention": {
        "snapshots": {"newest": 0, "age": "30d"},
        "generations": {"newest": 0, "age": "30d"},
        "estimates": True,
    }
}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """A pipeline with a history of 400 days: three versions of one model, of which one was given up in shadow."""
    pipeline = streaming(tmp_path_factory.mktemp("old"), DAYS[0], DAYS[1])
    # Version 2 is given up in shadow; it is version 1's model, as all are, so that estimates are one batch.
    pipeline.write_spec(random_walk_spec(version=2, upgrade={"rows": 0}))
    pipeline.land(DAYS[2])
    upgrade.run(pipeline.settings, "walk", promote=False)
    pipeline.stream()
    with pytest.raises(UserError, match="walk-g0001 is the live generation of walk"):
        retire.run(pipeline.settings, "walk", "walk-g0001")
    given_up = retire.run(pipeline.settings, "walk").data
    assert (given_up["generation"], given_up["retired"]) == ("walk-g0002", True)
    assert retire.run(pipeline.settings, "walk", "walk-g0002").data["retired"] is False
    with pytest.raises(UserError, match="has no shadow to retire"):
        retire.run(pipeline.settings, "walk")
    pipeline.write_spec(random_walk_spec(version=3, migrate={"from": 1}))
    upgrade.run(pipeline.settings, "walk", mode="stop-start")
    pipeline.land(DAYS[3])
    pipeline.land(DAYS[0].head(5).assign(at="never"), suffix=".csv")
    pipeline.stream()
    export.run(pipeline.settings, "walk")
    quarantine.act(pipeline.settings, "discard", "walk", everything=True)
    warehouse = pipeline.warehouse
    for table, columns in (
        ("generations", ("retired_at", "created_at")),
        ("manifests", ("committed_at",)),
        ("quarantine", ("resolved_at",)),
    ):
        earlier = {column: f"{column} - INTERVAL '400 days'" for column in columns}
        DeltaTable(warehouse.path(table)).update(earlier)
    pipeline.write_spec(random_walk_spec(version=3, migrate={"from": 1}, **RULES))
    return pipeline


def left(warehouse: Warehouse) -> dict[str, Any]:
    """Return what exists of all that maintain may remove."""
    tables = Tables(warehouse.root)
    snapshots = DeltaTable(tables.path("snapshots")).partitions()
    return {
        "generations": {
            one.generation: one.status for one in generations.read_generations(warehouse, "walk")
        },
        "checkpoints": sorted(path.name for path in Path(warehouse.root, "checkpoints").iterdir()),
        "manifests": {one.snapshot_id: one.status for one in manifests.read_manifests(warehouse, "walk")},
        "snapshots": sorted(part["snapshot_id"] for part in snapshots),
        "reports": sorted(path.name for path in Path(warehouse.root, "reports", "walk").iterdir()),
        "quarantine": len(tables.rows("quarantine")),
        "estimates": {
            row["generation"]: row["count"]
            for row in warehouse.read(estimates("walk")).groupBy("generation").count().collect()
        },
    }


def versions(warehouse: Warehouse) -> dict[str, int]:
    names = ("generations", "manifests", "snapshots", "quarantine", "estimates/walk", "measurements/walk")
    return {name: warehouse.latest_version(name) for name in names}


STEPS: dict[str, tuple[Any, str]] = {
    "generations are marked": (Maintenance, "_remove_folder"),
    "checkpoints are gone": (Maintenance, "_remove_snapshots"),
    "manifests are marked": (store, "delete_rows"),
    "snapshots are gone": (Maintenance, "_remove_estimates"),
    "estimates are gone": (Maintenance, "_remove_resolved_rows"),
    "quarantine is smaller": (Maintenance, "_remove_progress"),
    "rows are gone": (Maintenance, "_compact"),
    "tables are compact": (Maintenance, "_vacuum"),
}
"""The step at whose start a run is interrupted."""


def test_old_things_are_removed_and_needed_ones_are_kept(old: Pipeline, tmp_path: Path) -> None:
    pipeline = old.copied(tmp_path / "copy")
    warehouse = pipeline.warehouse
    before, at = left(warehouse), versions(warehouse)
    known = manifests.read_manifests(warehouse, "walk")
    preview = maintain.run(pipeline.settings, "walk", dry_run=True).data
    assert (left(warehouse), versions(warehouse)) == (before, at), "a dry run changes nothing"

    done = maintain.run(pipeline.settings, "walk").data
    assert {key: done[key] for key in ("generations", "snapshots", "quarantine")} == {
        key: preview[key] for key in ("generations", "snapshots", "quarantine")
    }
    # 3 is live and started after 1, to which a roll-back goes. 2 was the shadow.
    assert done["generations"] == ["walk-g0002"] == done["checkpoints"]
    after = left(warehouse)
    assert after["generations"] == {"walk-g0001": "retired", "walk-g0002": "removed", "walk-g0003": "live"}
    assert after["checkpoints"] == ["walk-g0001", "walk-g0003"]
    assert before["reports"] == ["walk-g0002.html", "walk-g0002.json"] and after["reports"] == []
    assert done["reports"] == preview["reports"] == ["walk-g0002"]
    stay = [one for one in generations.read_generations(warehouse, "walk") if one.status != "removed"]
    last = {
        max(
            (one for one in known if one.fingerprint == generation.fingerprint), key=lambda one: one.version
        ).snapshot_id
        for generation in stay
    }
    assert set(after["snapshots"]) == {one.snapshot_id for one in stay} | last
    assert max(known, key=lambda one: one.version).snapshot_id in last
    good = {name for name, status in after["manifests"].items() if status == "good"}
    assert good == set(after["snapshots"]) and len(after["manifests"]) == len(before["manifests"])
    assert before["quarantine"] == done["quarantine"] == 5 and after["quarantine"] == 0
    assert set(after["estimates"]) == {"walk-g0001", "walk-g0003"}
    assert versions(warehouse)["measurements/walk"] == at["measurements/walk"]

    with pytest.raises(UserError, match="no retired generation walk-g0002"):
        rollback.run(pipeline.settings, "walk", to="walk-g0002")
    with pytest.raises(UserError, match="walk-g0002 is removed"):
        pipeline.stream(generation="walk-g0002")
    for name in after["snapshots"]:
        found = manifests.find(warehouse, name)
        assert found is not None
        store.verify(warehouse, found)

    # A second run has nothing to do.
    again = maintain.run(pipeline.settings, "walk").data
    assert again["generations"] == again["snapshots"] == again["checkpoints"] == again["optimized"] == []
    assert left(warehouse) == after


class Killed(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(
            one, marks=[] if one in ("generations are marked", "manifests are marked") else pytest.mark.soak
        )
        for one in STEPS
    ],
)
def test_interrupted_after_any_step_a_retry_converges(
    old: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, whole: dict[str, Any]
) -> None:
    pipeline = old.copied(tmp_path / "copy")
    what, name = STEPS[step]

    def die(*_: Any, **__: Any) -> None:
        raise Killed

    if name not in ("_compact", "_vacuum"):  # what they do is no part of what is compared
        monkeypatch.setattr(Maintenance, "_compact_and_vacuum", lambda self: None)
    with monkeypatch.context() as patch:
        patch.setattr(what, name, die)
        with pytest.raises(Killed):
            maintain.run(pipeline.settings, "walk")
    maintain.run(pipeline.settings, "walk")
    assert left(pipeline.warehouse) == whole


def test_no_command_resumes_from_a_half_removed_checkpoint(
    old: Pipeline, tmp_path: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run killed while it removed a folder may leave one that looks whole: the commit before says that it is not."""
    pipeline = old.copied(tmp_path / "copy")
    warehouse = pipeline.warehouse
    generations.remove(warehouse, ["walk-g0002"], generations.read_generations(warehouse, "walk"))
    shutil.rmtree(Path(warehouse.root, "checkpoints", "walk-g0002", "state"))
    with pytest.raises(UserError, match="walk-g0002 is removed"):
        pipeline.stream(generation="walk-g0002")
    with pytest.raises(UserError, match="walk-g0002 is removed, and its state with it"):
        export.run(pipeline.settings, "walk", generation="walk-g0002")
    with pytest.raises(UserError, match="no retired generation walk-g0002"):
        rollback.run(pipeline.settings, "walk", to="walk-g0002")
    monkeypatch.setattr(Maintenance, "_compact_and_vacuum", lambda self: None)
    maintain.run(pipeline.settings, "walk")
    assert left(warehouse) == whole


@pytest.fixture(scope="module")
def whole(old: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an uninterrupted run leaves."""
    pipeline = old.copied(tmp_path_factory.mktemp("whole") / "copy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Maintenance, "_compact_and_vacuum", lambda self: None)
        maintain.run(pipeline.settings, "walk")
    return left(pipeline.warehouse)


MANY = 30_000
"""Files that a checkpoint has, so that removing it takes long enough to be killed in."""


@pytest.mark.soak
@pytest.mark.parametrize("moment", ["marked", "half a folder", "folders", "snapshots"])
def test_killed_at_any_moment_a_retry_converges(
    old: Pipeline, tmp_path: Path, moment: str, whole: dict[str, Any]
) -> None:
    pipeline = old.copied(tmp_path / "copy")
    root = Path(pipeline.settings.warehouse)
    log = {
        name: len(list((root / name / "_delta_log").glob("*.json"))) for name in ("generations", "manifests")
    }

    def more(name: str) -> bool:
        return len(list((root / name / "_delta_log").glob("*.json"))) > log[name]

    state = root / "checkpoints" / "walk-g0002" / "state" / "0"
    if moment == "half a folder":
        for number in range(MANY):
            (state / f"more-{number}").touch()
    moments: dict[str, Callable[[], bool]] = {
        "marked": lambda: more("generations"),
        "half a folder": lambda: len(os.listdir(state)) < MANY,
        "folders": lambda: not (root / "checkpoints" / "walk-g0002").exists(),
        "snapshots": lambda: more("manifests"),
    }
    driver = Driver(pipeline, "maintain", "--model", "walk")
    driver.wait_for(moments[moment])
    driver.kill()
    if moment == "half a folder":
        assert 0 < len(os.listdir(state)) < MANY
    if moment == "marked":  # once as people do it
        done = subprocess.run(
            [sys.executable, "-m", "jobs.cli", "maintain", "--model", "walk", "--json"],
            env=cli_environment(root, {"KALMAN_MODELS": str(pipeline.settings.models)}),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["model"] == "walk", "standard output has the report alone"
    else:
        maintain.run(pipeline.settings, "walk")
    assert left(pipeline.warehouse) == whole


def test_after_maintenance_the_stream_continues_and_can_be_rolled_back(old: Pipeline) -> None:
    """The last test of this module: it maintains, and streams, in the place where the checkpoints are."""
    pipeline, warehouse = old, old.warehouse
    first = next(one for one in manifests.read_manifests(warehouse, "walk") if one.generation == "walk-g0001")
    before = ordered(live_estimates(warehouse, "walk").toPandas())
    estimate.run(pipeline.settings, "walk")
    done = maintain.run(pipeline.settings, "walk").data
    assert done["generations"] == ["walk-g0002"] and done["optimized"]
    assert_bit_equal(ordered(live_estimates(warehouse, "walk").toPandas()), before)
    pipeline.land(DAYS[4])
    assert pipeline.stream().data["rows"] == len(DAYS[4])
    assert rollback.run(pipeline.settings, "walk").data["generation"] == "walk-g0001"
    pipeline.stream()
    table = ordered(live_estimates(warehouse, "walk").toPandas())
    assert set(table["model_version"]) == {1}
    assert_bit_equal(table, since(pipeline.batch(), DAYS[1]))

    # The same export restores a removed snapshot.
    assert manifests.find(warehouse, first.snapshot_id) is None
    made = export.run(pipeline.settings, "walk", generation="walk-g0001", batch=first.batch_id).data
    assert (made["snapshot"], made["made"]) == (first.snapshot_id, True)
    back = manifests.find(warehouse, first.snapshot_id)
    assert back is not None and (back.status, back.checksum) == ("good", first.checksum)
    assert store.verify(warehouse, back).count() == back.key_count

    # Of all that this module has done, by Java, by tasks and by delta-rs, a column has one type in every file.
    root = Path(warehouse.root)
    assert {table.relative_to(root).parts[0] for table in tables_of(root)} >= {
        "estimates", "estimates_history", "generations", "manifests", "measurements", "progress", "quarantine",
        "snapshots",
    }  # fmt: skip
    assert several_types(root) == {}
