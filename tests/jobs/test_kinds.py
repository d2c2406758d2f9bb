"""Functions of a spec run in the tasks of pretrain, stream and migration; the other kinds are in test_every_kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs import export, migrate
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, random_rows, random_walk_spec, since

pytestmark = pytest.mark.spark

MODULE = '''
"""A position on a line, seen from beside it."""
import numpy as np

def move(x, dt, u):
    return np.stack([x[0] + 0.01 * dt * x[1], 0.999 * x[1]])

def see(x):
    return np.stack([np.hypot(x[0], 3.0), x[1] + 0.1 * x[0]])

def turn(x):
    return np.stack([np.hypot(x[0], 3.0), np.arctan2(np.sin(x[1] + 0.1 * x[0]), np.cos(x[1] + 0.1 * x[0]))])

def doubled(mean, covariance, extras):
    return 2.0 * mean, 4.0 * covariance
'''
FUNCTIONS: dict[str, Any] = {
    "filter": "unscented",
    "process": {"kind": "function", "f": "sideways:move", "Q": [[0.1, 0.0], [0.0, 0.1]]},
    "observation": {"h": "sideways:see", "R": [[1.0, 0.3], [0.3, 2.0]]},
}
EXPLICIT: dict[str, Any] = {
    "process": {"kind": "explicit", "F": [[1.0, 0.1], [0.0, 1.0]], "Q": [[0.1, 0.0], [0.0, 0.1]]},
    "observation": {"H": [[1.0, 0.0], [0.5, 1.0]], "R": [[1.0, 0.3], [0.3, 2.0]]},
}
MIXTURE: dict[str, Any] = {
    "filter": "gaussian_mixture",
    "states": ["a", "b"],
    "process": None,
    "observation": None,
    "initial": None,
    "mixture": {
        "means": [[0.0, 0.0], [3.0, -3.0]],
        "covariances": [[[4.0, 1.0], [1.0, 4.0]], [[9.0, 0.0], [0.0, 9.0]]],
        "batch": 2,
    },
}
KINDS: dict[str, dict[str, Any]] = {
    "imm": {
        "filter": "imm",
        "modes": [EXPLICIT, {**EXPLICIT, "process": {**EXPLICIT["process"], "Q": [[9.0, 0.0], [0.0, 1.0]]}}],
        "transition": [[0.95, 0.05], [0.2, 0.8]],
        "process": None,
        "observation": None,
    },
    "unscented": FUNCTIONS,
    "angles by differences": {
        **FUNCTIONS,
        "filter": "extended",
        "observation": {"h": "sideways:turn", "R": [[1.0, 0.3], [0.3, 2.0]], "wrap": {"b": "radians"}},
        "initial": {"mean": [0.0, 0.0], "covariance": [[1e6, 0.0], [0.0, 1.0]]},  # steps are shortened
    },
    "square root": {"form": "square_root"},
    "gated": {"robust": {"gate": {"probability": 0.99}}},
    "fixed lag": {"smoothing": {"lag": 3}},
    "adaptive": {"adaptive": {"R": 0.05}},
    "mixture": MIXTURE,
}
OUTPUTS = {"residual": True, "state_index": True, "sliding_log_likelihood": 2}


@pytest.mark.slow
def test_functions_beside_the_spec_are_found_by_tasks_and_for_versions_that_only_manifests_know(
    tmp_path: Path,
) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec())
    (pipeline.settings.models / "sideways.py").write_text(MODULE)
    pipeline.write_spec(random_walk_spec(**FUNCTIONS, outputs=OUTPUTS))
    days = random_rows(3, rows=60)
    pipeline.land(days[0])
    pipeline.pretrain()
    pipeline.land(*days[1:])
    assert pipeline.stream().data["rows"] == len(days[1]) + len(days[2])
    found, expected = pipeline.estimates(), since(pipeline.batch(), days[1])
    assert_bit_equal(found, expected)
    assert_bit_equal(found, expected, ["state_index", "sliding_log_likelihood"])
    for name in ("residual", "residual_covariance"):
        for ours, theirs in zip(found[name], expected[name], strict=True):
            np.testing.assert_array_equal(ours, theirs)

    moved = {"version": 2, "migrate": {"function": "sideways:doubled"}}
    pipeline.write_spec(random_walk_spec(**{**FUNCTIONS, **moved}))
    exported = export.run(pipeline.settings, "walk").data["snapshot"]
    migrated = migrate.run(pipeline.settings, "walk", snapshot=exported).data["snapshot"]
    before, after = pipeline.snapshot(exported), pipeline.snapshot(migrated)
    assert list(before["key"]) == list(after["key"])
    for name, factor in (("mean", 2.0), ("covariance", 4.0)):
        for old, new in zip(before[name], after[name], strict=True):
            assert [factor * number for number in old] == list(new)
