"""The names that textbooks give the process structures mean the same state as the project's own."""

from __future__ import annotations

from typing import Any

import pytest

import kalman
from jobs.specs.model_spec import ModelSpec
from jobs.specs.sections import NAMES
from tests.jobs.support.pipeline import random_walk_spec


def fingerprint(process: dict[str, Any]) -> str:
    return ModelSpec.model_validate(random_walk_spec(process=process)).fingerprint()


@pytest.mark.parametrize(
    ("textbook", "ours"),
    [
        ({"kind": "local_level", "variance": 2.0}, {"kind": "random_walk", "variance": 2.0}),
        ({"kind": "Local Level", "level_variance": 2.0}, {"kind": "random_walk", "variance": 2.0}),
        (
            {"kind": "smooth-trend", "variance": 2.0},
            {"kind": "local_linear_trend", "level_variance": 0.0, "slope_variance": 2.0},
        ),
        (
            {"kind": "white_noise_acceleration", "acceleration_variance": 2.0},
            {"kind": "constant_velocity", "acceleration_variance": 2.0},
        ),
        (
            {"kind": "vasicek", "theta": 0.5, "variance": 2.0, "mu": 1.0},
            {"kind": "ornstein_uhlenbeck", "rate": 0.5, "variance": 2.0, "mean": 1.0},
        ),
        (
            {"kind": "sum", "parts": [{"kind": "local_level", "variance": 2.0, "name": "a"}]},
            {"kind": "sum", "parts": [{"kind": "random_walk", "variance": 2.0, "name": "a"}]},
        ),
    ],
)
def test_a_textbooks_name_gives_the_same_model(textbook: dict[str, Any], ours: dict[str, Any]) -> None:
    assert fingerprint(textbook) == fingerprint(ours)


def test_each_name_means_a_structure_and_hides_none() -> None:
    assert {meaning.kind for meaning in NAMES.values()} <= set(kalman.STRUCTURES)
    assert not set(NAMES) & set(kalman.STRUCTURES)
