"""A model whose step would take minutes and gigabytes to compile is refused when its spec is loaded."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.specs.model_spec import SpecError
from jobs.state.kernel import load_checked_spec


def spec_of(states: int, dense: bool) -> dict[str, Any]:
    one = [[float(i == j or dense) * 0.1 for j in range(states)] for i in range(states)]
    return {
        "name": "big",
        "version": 1,
        "time": "at",
        "measurement": ["y"],
        "states": [f"s{i}" for i in range(states)],
        "process": {
            "kind": "explicit",
            "F": one,
            "Q": [[float(i == j) for j in range(states)] for i in range(states)],
        },
        "observation": {"H": [[1.0] + [0.0] * (states - 1)], "R": [[1.0]]},
        "initial": {
            "mean": [0.0] * states,
            "covariance": [[float(i == j) for j in range(states)] for i in range(states)],
        },
    }


@pytest.mark.parametrize(
    ("states", "dense", "fits"), [(30, True, True), (40, True, False), (60, False, True)]
)
def test_the_length_of_a_step(tmp_path: Path, states: int, dense: bool, fits: bool) -> None:
    path = tmp_path / "big.yaml"
    path.write_text(yaml.safe_dump(spec_of(states, dense), default_flow_style=None))
    began = time.process_time()
    if fits:
        assert len(load_checked_spec(path).states) == states
    else:
        with pytest.raises(SpecError, match="big.yaml:.*states: are too many for one step.*use fewer states"):
            load_checked_spec(path)
    assert time.process_time() - began < 20
