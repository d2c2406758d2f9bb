"""The state of every earlier release is taken up by this one: its checkpoint goes on, its snapshots start streams.

Within a release batch and stream are equal to the last bit. Between two the arithmetic may have changed (decision
0002), and what has gone on from the older state is what this release gives from the beginning, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from jobs.lineage.live import live_estimates
from jobs.snapshots.manifests import read_manifests
from tests.fixtures.make_release import FOLDER
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, ordered
from tests.jobs.support.released import unpacked

pytestmark = pytest.mark.spark

RELEASES = sorted(FOLDER.glob("*.tar.gz"))


@pytest.fixture
def folder(release: Path) -> Iterator[Path]:
    """The folder of a release's warehouse and specs."""
    with unpacked(release) as place:
        yield place


def assert_equal_up_to_rounding(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    """Check that two sets of estimates have the same rows, and numbers within 1e-11."""
    assert_bit_equal(found, expected, ("key", "event_time", "flags"))
    for name in ("mean", "covariance", "log_likelihood", "nis"):
        left, right = (np.array(frame[name].tolist(), float) for frame in (found, expected))
        np.testing.assert_allclose(left, right, rtol=1e-11, atol=1e-11, err_msg=name)


@pytest.mark.parametrize(
    "release",
    [  # the last alone in every run: states in format 1 are handed over in test_former_states, too
        pytest.param(path, marks=pytest.mark.slow if path != RELEASES[-1] else [], id=path.name[:5])
        for path in RELEASES
    ],
)
def test_a_release_s_state_is_taken_up(folder: Path, release: Path) -> None:
    former = release.name < "0.3.0"  # states in format 1
    spec = yaml.safe_load((folder / "models" / "walk.yaml").read_text())
    pipeline = Pipeline(folder, spec)
    first, exported = read_manifests(pipeline.warehouse, "walk")
    expected = pipeline.batch(parameters=first.parameters)

    def same() -> None:
        found = ordered(live_estimates(pipeline.warehouse, "walk").toPandas())
        later = expected["event_time"] >= found["event_time"].min()
        assert_equal_up_to_rounding(found, expected.loc[later].reset_index(drop=True))

    # The snapshot is found, though a release that named no commit made it.
    again = pipeline.pretrain(to_version=first.position["version"]).data
    assert (again["snapshot"], again["made"]) == (first.snapshot_id, False)
    went_on = (
        pipeline.stream().data
    )  # the checkpoint goes on, or hands its states over in the export that is there
    assert (went_on["batches"], went_on["began"]) == (2, former)
    assert went_on["snapshot"] == (exported if former else first).snapshot_id
    same()
    adopted = pipeline.stream(adopt=(first if former else exported).snapshot_id).data
    assert (adopted["batches"], adopted["began"]) == (3 if former else 2, True)
    same()
