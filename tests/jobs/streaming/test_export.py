"""An exported state equals that of a batch pass up to the same position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs import export
from jobs.core.errors import UserError
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, random_rows, random_walk_spec, since

pytestmark = pytest.mark.spark

STATE = ("key", "state_index", "event_time", "mean", "covariance", "log_likelihood", "extras")


def same_states(pipeline: Pipeline, found: str, expected: str) -> None:
    """Check that two snapshots hold the same states, bit for bit."""
    left, right = pipeline.snapshot(found), pipeline.snapshot(expected)
    assert len(left) == len(right) > 0
    for name in STATE:
        assert list(left[name].map(plain)) == list(right[name].map(plain)), name


def plain(value: Any) -> Any:
    """Return a cell in a form that compares: arrays as tuples, maps as sorted pairs."""
    if isinstance(value, dict):
        return tuple(sorted((name, tuple(numbers)) for name, numbers in value.items()))
    return tuple(value) if hasattr(value, "__len__") and not isinstance(value, str) else value


@pytest.mark.slow
def test_an_export_equals_the_batch_pass_up_to_its_position(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec(initial={"diffuse": True}))
    days = random_rows(5, rows=80, text=True)
    pipeline.land(days[0])
    before = pipeline.pretrain().data["snapshot"]
    with pytest.raises(UserError, match="has no live generation"):
        export.run(pipeline.settings, "walk")
    pipeline.stream()  # no rows after the snapshot yet: the generation waits
    assert export.run(pipeline.settings, "walk").data["snapshot"] == before
    pipeline.land(*days[1:4])
    pipeline.stream()

    last = export.run(pipeline.settings, "walk").data
    assert (last["batch"], last["version"], last["made"]) == (2, 4, True)
    same_states(pipeline, last["snapshot"], pipeline.pretrain(to_version=4).data["snapshot"])
    again = export.run(pipeline.settings, "walk").data
    assert (again["snapshot"], again["made"]) == (last["snapshot"], False)

    with pytest.raises(UserError, match="has no micro-batch 7: its last committed one is 2"):
        export.run(pipeline.settings, "walk", batch=7)
    earlier = export.run(pipeline.settings, "walk", batch=1).data
    assert (earlier["batch"], earlier["version"]) == (1, 3)

    # A new generation from the export continues exactly after it, bit-equal to the batch pass.
    pipeline.land(days[4])
    adopted = pipeline.stream(adopt=earlier["snapshot"]).data
    assert adopted["began"] and adopted["rows"] == len(days[3]) + len(days[4])
    expected = since(pipeline.batch(), days[3])
    assert_bit_equal(pipeline.estimates(adopted["generation"]), expected)
