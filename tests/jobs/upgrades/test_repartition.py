"""One command gives a stream's state another layout, idle or running, also when it is killed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from jobs import rollback, upgrade
from jobs.core.errors import INPUT_ERROR, RUN_FAILED, UserError
from jobs.lineage import generations
from jobs.lineage.compatibility import PARTITIONS
from jobs.lineage.live import live_estimates
from jobs.storage.checkpoints import Checkpoint
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

OTHER: dict[str, Any] = {"stream": {"max_files_per_batch": 1, "partitions": 3, "keys_per_block": 4}}


def prepared(folder: Path, days: list[pd.DataFrame]) -> Pipeline:
    """Return a pipeline with a day in its snapshot and a day in its stream."""
    pipeline = streaming(folder, days[0], days[1])
    return pipeline


def live(pipeline: Pipeline) -> pd.DataFrame:
    return ordered(live_estimates(pipeline.warehouse, "walk").toPandas())


def layout(pipeline: Pipeline, name: str) -> tuple[int, int, str | None]:
    """Return a generation's partitions and blocks, and the partitions in its checkpoint."""
    one = generations.read_named(pipeline.warehouse, "walk", name)
    return (
        one.partitions,
        one.blocks,
        Checkpoint(pipeline.warehouse, one.checkpoint).settings().get(PARTITIONS),
    )


@pytest.mark.slow
def test_a_stream_is_repartitioned_and_rolled_back(tmp_path: Path) -> None:
    days = random_rows(4, rows=60)
    pipeline = prepared(tmp_path, days)
    # An allowed change takes effect at the next start; another layout waits, and the stream continues.
    pipeline.write_spec(random_walk_spec(quarantine={"fail_above": 0.9}, **OTHER))
    pipeline.land(days[2])
    resumed = pipeline.stream().data
    assert (resumed["generation"], resumed["rows"], len(resumed["notes"])) == ("walk-g0001", len(days[2]), 2)
    assert "the spec wants 3 state partitions, and walk-g0001 keeps its 2" in resumed["notes"][0]

    with pytest.raises(UserError, match="--partitions 5: the spec of walk says stream.partitions: 3"):
        upgrade.run(pipeline.settings, "walk", mode="repartition", partitions=5)
    with pytest.raises(UserError, match="--partitions is for --mode repartition"):
        upgrade.run(pipeline.settings, "walk", partitions=3)
    assert upgrade.run(pipeline.settings, "walk", mode="repartition", dry_run=True).data["dry_run"]
    done = upgrade.run(pipeline.settings, "walk", mode="repartition").data
    assert (done["generation"], done["retired"], done["partitions"]) == ("walk-g0002", "walk-g0001", 3)
    assert done["blocks"] > 1
    again = upgrade.run(pipeline.settings, "walk", mode="repartition").data
    assert (again["generation"], again["upgraded"]) == ("walk-g0002", False)

    pipeline.land(days[3])
    resumed = pipeline.stream().data
    assert (resumed["generation"], resumed["rows"], resumed["notes"]) == ("walk-g0002", len(days[3]), [])
    assert layout(pipeline, "walk-g0001") == (2, layout(pipeline, "walk-g0001")[1], "2")
    assert layout(pipeline, "walk-g0002") == (3, done["blocks"], "3")
    expected = since(pipeline.batch(), days[1])
    assert_bit_equal(live(pipeline), expected)

    assert rollback.run(pipeline.settings, "walk").data["generation"] == "walk-g0001"
    assert len(pipeline.stream().data["notes"]) == 2
    assert_bit_equal(live(pipeline), expected)

    # Without touching anything, it refuses to continue.
    generations.update(pipeline.warehouse, {"generation": "walk-g0001"}, {"partitions": 5})
    with pytest.raises(UserError, match="has 2 state partitions and its row in `generations` says 5"):
        pipeline.stream()
    generations.update(pipeline.warehouse, {"generation": "walk-g0001"}, {"partitions": 2})
    shutil.rmtree(tmp_path / "warehouse" / "measurements" / "walk")
    pipeline.land(days[0])
    with pytest.raises(
        UserError, match="the measurements table has been recreated since walk-g0001"
    ) as refused:
        pipeline.stream()
    assert refused.value.exit_code == INPUT_ERROR
    assert_bit_equal(live(pipeline), expected)


@pytest.mark.soak
def test_a_running_stream_is_repartitioned_in_shadow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    days = random_rows(5, rows=60)
    pipeline = prepared(tmp_path, days)
    monkeypatch.setenv("KALMAN_LEASE_SECONDS", "6")
    driver = Driver(pipeline, "stream", "--model", "walk", "--trigger", "1")
    done_batches = Path(pipeline.settings.warehouse, "checkpoints", "walk-g0001", "commits")
    pipeline.land(days[2])
    driver.wait_for(lambda: "1" in files(done_batches))
    pipeline.land(days[3])
    pipeline.write_spec(random_walk_spec(**OTHER))
    # Forced, as the live one may have read everything before the shadow began.
    done = upgrade.run(pipeline.settings, "walk", mode="repartition", force=True).data
    assert (done["generation"], done["promoted"], done["partitions"]) == ("walk-g0002", True, 3)
    assert done["comparison"]["unequal_rows"] == 0
    assert driver.finish() == RUN_FAILED, driver.said()
    assert "the generation was retired, or another driver took it over" in driver.said()
    pipeline.land(days[4])
    assert pipeline.stream().data["generation"] == "walk-g0002"
    assert_bit_equal(live(pipeline), since(pipeline.batch(), days[1]))
