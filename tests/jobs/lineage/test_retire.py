"""A shadow is retired while a driver runs it: the driver stops, and the live stream is not affected."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import retire, upgrade
from jobs.core.errors import UserError
from jobs.lineage import generations
from jobs.supervision.driver_log import DriverLog
from tests.jobs.support.pipeline import assert_bit_equal, random_rows, random_walk_spec, since, streaming
from tests.jobs.support.processes import Driver

pytestmark = [pytest.mark.spark, pytest.mark.soak]


def test_a_shadow_that_is_driven_is_retired_and_its_driver_ends(tmp_path: Path) -> None:
    days = random_rows(4, rows=60)
    pipeline = streaming(tmp_path, days[0], days[1])
    pipeline.write_spec(random_walk_spec(version=2, upgrade={"rows": 0}))
    upgrade.run(pipeline.settings, "walk", promote=False)
    pipeline.land(days[2])
    log = DriverLog.at(pipeline.settings.warehouse, "walk")
    driver = Driver(pipeline, "stream", "--model", "walk", "--generation", "walk-g0002", "--trigger", "1")
    commits = Path(pipeline.settings.warehouse, "checkpoints", "walk-g0002", "commits", "0")
    driver.wait_for(commits.exists)
    assert retire.run(pipeline.settings, "walk").data["retired"] is True
    # Asked to stop, the driver ends well, unless it first sees that its lease is lost.
    assert driver.finish() in (0, 1), driver.said()
    ended = {one.generation: one.ended_at for one in log.list_drivers()}
    assert ended["walk-g0002"] is not None
    known = {
        one.generation: (one.status, one.owner)
        for one in generations.read_generations(pipeline.warehouse, "walk")
    }
    assert known == {"walk-g0001": ("live", None), "walk-g0002": ("retired", None)}
    with pytest.raises(UserError, match="walk-g0002 is retired"):
        pipeline.stream(generation="walk-g0002")
    pipeline.land(days[3])
    pipeline.stream()
    assert_bit_equal(pipeline.estimates("walk-g0001"), since(pipeline.batch(), days[1]))
