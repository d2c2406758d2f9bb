"""An upgrade killed at any step and retried ends as if it had not been killed."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pandas as pd
import pytest

from jobs import promote, rollback, upgrade
from jobs.lineage import generations
from jobs.lineage.live import live_estimates
from jobs.snapshots import manifests
from tests.jobs.support.pipeline import (
    Pipeline,
    assert_bit_equal,
    ordered,
    random_rows,
    random_walk_spec,
    since,
    streaming,
)
from tests.jobs.support.processes import Driver, files

pytestmark = pytest.mark.spark

# After which file an upgrade is killed: table or checkpoint folder, and how many files more than before.
MOMENTS = {
    "the export's rows": ("snapshots/_delta_log", 1),
    "the export": ("manifests/_delta_log", 1),
    "the migrated rows": ("snapshots/_delta_log", 2),
    "the migrated snapshot": ("manifests/_delta_log", 2),
    "the shadow": ("generations/_delta_log", 1),
    "its first plan": ("checkpoints/walk-g0002/offsets", 1),
    "its first commit": ("checkpoints/walk-g0002/commits", 1),
    "its second plan": ("checkpoints/walk-g0002/offsets", 2),
}


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(one, marks=pytest.mark.slow if one == "its first plan" else pytest.mark.soak)
        for one in MOMENTS
    ],
)
def test_an_upgrade_killed_after(tmp_path: Path, moment: str) -> None:
    days = random_rows(5, rows=60)
    pipeline = streaming(tmp_path, days[0], days[1])
    # Version 2 is the same model, so that all estimates, across the switch, are one batch to the last bit.
    # The old version never reads the rows that the new one reads: there is nothing to compare, so it is forced.
    pipeline.write_spec(random_walk_spec(version=2))
    pipeline.land(*days[2:])
    where, more = MOMENTS[moment]
    folder = Path(pipeline.settings.warehouse, where)
    before = commits(folder)
    driver = Driver(pipeline, "upgrade", "--model", "walk", "--force")
    driver.wait_for(lambda: commits(folder) >= before + more)
    driver.kill()
    done = upgrade.run(pipeline.settings, "walk", force=True).data
    assert (done["generation"], done["promoted"]) == ("walk-g0002", True)
    known = {one.generation: one.status for one in generations.read_generations(pipeline.warehouse, "walk")}
    assert known == {"walk-g0001": "retired", "walk-g0002": "live"}
    assert len(manifests.read_manifests(pipeline.warehouse, "walk")) == 3
    table = ordered(live_estimates(pipeline.warehouse, "walk").toPandas())
    assert_bit_equal(table, since(pipeline.batch(), days[1]))

    assert rollback.run(pipeline.settings, "walk").data["generation"] == "walk-g0001"
    pipeline.stream()
    table = ordered(live_estimates(pipeline.warehouse, "walk").toPandas())
    assert set(table["model_version"]) == {1}
    assert_bit_equal(table, since(pipeline.batch(), days[1]))


# The other modes, whose steps are commits alone.
AT_ONCE: dict[str, dict[str, tuple[str, int]]] = {
    "stop-start": {
        "the export's rows": ("snapshots/_delta_log", 1),
        "the export": ("manifests/_delta_log", 1),
        "the migrated rows": ("snapshots/_delta_log", 2),
        "the migrated snapshot": ("manifests/_delta_log", 2),
        "the new generation": ("generations/_delta_log", 1),
    },
    "retrain": {
        "the snapshot's rows": ("snapshots/_delta_log", 1),
        "the snapshot": ("manifests/_delta_log", 1),
        "the new generation": ("generations/_delta_log", 1),
    },
    "stateless": {
        "the empty snapshot": ("manifests/_delta_log", 1),  # it has no rows, so there is no commit of them
        "the new generation": ("generations/_delta_log", 1),
    },
}


@pytest.mark.soak
@pytest.mark.parametrize("mode", list(AT_ONCE))
def test_the_other_modes_killed_after_each_step(tmp_path: Path, mode: str) -> None:
    """Killed after each step in turn, each time in a pipeline of its own, a retry ends as one that was not killed."""
    words = ["upgrade", "--model", "walk", "--mode", mode, *(["--lose-state"] * (mode == "stateless"))]
    lose = mode == "stateless"

    def begun(name: str) -> tuple[Pipeline, list[pd.DataFrame]]:
        days = random_rows(4, rows=60)
        pipeline = streaming(tmp_path / name, days[0], days[1])
        pipeline.write_spec(random_walk_spec(version=2))
        return pipeline, days

    def ended(pipeline: Pipeline, days: list[pd.DataFrame]) -> tuple[pd.DataFrame, dict[str, str], int]:
        upgrade.run(pipeline.settings, "walk", mode=mode, lose_state=lose)
        pipeline.land(*days[2:])
        pipeline.stream()
        known = {
            one.generation: one.status for one in generations.read_generations(pipeline.warehouse, "walk")
        }
        table = ordered(live_estimates(pipeline.warehouse, "walk").toPandas())
        return table, known, len(manifests.read_manifests(pipeline.warehouse, "walk"))

    wanted, known, made = ended(*begun("whole"))
    assert known == {"walk-g0001": "retired", "walk-g0002": "live"}
    assert len(wanted) == 3 * 60
    for number, (where, more) in enumerate(AT_ONCE[mode].values()):
        pipeline, days = begun(f"killed-{number}")
        folder = Path(pipeline.settings.warehouse, where)
        before = commits(folder)
        driver = Driver(pipeline, *words)
        driver.wait_for(lambda folder=folder, before=before, more=more: commits(folder) >= before + more)
        driver.kill()
        table, statuses, snapshots_made = ended(pipeline, days)
        assert (statuses, snapshots_made) == (known, made), where
        assert_bit_equal(table, wanted)


@pytest.mark.soak
@pytest.mark.parametrize("verb", ["promote", "rollback"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_killed_promotion_or_roll_back_is_atomic(tmp_path: Path, verb: str, seed: int) -> None:
    days = random_rows(3, rows=60)
    pipeline = streaming(tmp_path, days[0], days[1])
    pipeline.write_spec(random_walk_spec(version=2))
    upgrade.run(pipeline.settings, "walk", promote=verb == "rollback", force=True)
    folder = Path(pipeline.settings.warehouse, "generations")
    before = len(files(folder))
    driver = Driver(pipeline, verb, "--model", "walk", *(["--force"] * (verb == "promote")))
    # The commit's data file is written just before the commit: somewhere around it the process ends.
    driver.wait_for(lambda: len(files(folder)) > before)
    time.sleep(random.Random(seed).uniform(0.0, 0.3))
    driver.kill()
    live = "walk-g0002" if verb == "promote" else "walk-g0001"
    known = {one.generation: one.status for one in generations.read_generations(pipeline.warehouse, "walk")}
    assert sorted(known.values()) in (["live", "retired"], ["live", "shadow"])
    if verb == "promote":
        promote.run(pipeline.settings, "walk", "walk-g0002", force=True)
    else:
        rollback.run(pipeline.settings, "walk", to="walk-g0001")
    known = {one.generation: one.status for one in generations.read_generations(pipeline.warehouse, "walk")}
    assert {name for name, status in known.items() if status == "live"} == {live}
    pipeline.land(days[2])
    pipeline.stream()
    table = ordered(live_estimates(pipeline.warehouse, "walk").toPandas())
    assert_bit_equal(table, since(pipeline.batch(), days[1]))


def commits(folder: Path) -> int:
    """Return how many commits a Delta log, or how many micro-batches a folder of a checkpoint has."""
    return sum(name.isdigit() or (name.endswith(".json") and name[0].isdigit()) for name in files(folder))
