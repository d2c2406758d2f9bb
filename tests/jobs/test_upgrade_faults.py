"""An upgrade killed at any of its steps, and run again, ends as if it had not been killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import generations, rollback, snapshots, upgrade
from jobs.live import live_estimates
from tests.jobs.pipeline import Pipeline, assert_bit_equal, ordered, random_rows, random_walk_spec, since
from tests.jobs.processes import Driver, files

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
    pipeline = Pipeline(tmp_path, random_walk_spec())
    pipeline.land(days[0])
    pipeline.pretrain()
    pipeline.land(days[1])
    pipeline.stream()
    # Version 2 is the same model, so that all estimates, across the switch, are one batch to the last bit.
    pipeline.write_spec(random_walk_spec(version=2, upgrade={"rows": 0}))
    pipeline.land(*days[2:])
    where, more = MOMENTS[moment]
    folder = Path(pipeline.settings.warehouse, where)
    before = commits(folder)
    driver = Driver(pipeline, "upgrade", "--model", "walk")
    driver.wait_for(lambda: commits(folder) >= before + more)
    driver.kill()
    done = upgrade.run(pipeline.settings, "walk").data
    assert (done["generation"], done["promoted"]) == ("walk-g0002", True)
    known = {one.generation: one.status for one in generations.all_of(pipeline.warehouse, "walk")}
    assert known == {"walk-g0001": "retired", "walk-g0002": "live"}
    assert len(snapshots.all_of(pipeline.warehouse, "walk")) == 3
    table = ordered(live_estimates(pipeline.warehouse, "walk").toPandas())
    assert_bit_equal(table, since(pipeline.batch(), days[1]))

    assert rollback.run(pipeline.settings, "walk").data["generation"] == "walk-g0001"
    pipeline.stream()
    table = ordered(live_estimates(pipeline.warehouse, "walk").toPandas())
    assert set(table["model_version"]) == {1}
    assert_bit_equal(table, since(pipeline.batch(), days[1]))


def commits(folder: Path) -> int:
    """Return how many commits a Delta log, or how many micro-batches a folder of a checkpoint has."""
    return sum(name.isdigit() or (name.endswith(".json") and name[0].isdigit()) for name in files(folder))
