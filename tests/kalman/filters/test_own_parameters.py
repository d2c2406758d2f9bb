"""The parameters that each key has for itself: their names, their places, and states that are given some."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kalman
from kalman.building.values import collect_parameter_values
from kalman.filters.own_parameters import find_key_parameters, with_key_parameters

WALK: dict[str, Any] = {
    "states": ["x"],
    "measurement": ["y"],
    "process": {"kind": "random_walk", "variance": 0.5},
    "observation": {"R": [[1.0]]},
    "initial": {"mean": [0.0], "covariance": [[10.0]]},
    "learn": {"parameters": ["R", "variance"], "scope": "key"},
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"form": "square_root"},
        {"storage": {"dtype": "float32"}},
        {"smoothing": {"lag": 2}},
        {"robust": {"gate": {"probability": 0.99}}},
        {"robust": {"gate": {"probability": 0.99}}, "form": "square_root"},
        {"adaptive": {"Q": 0.1}},
        {"initial": {"diffuse": True}},
    ],
)
def test_each_key_gets_its_own_parameters_by_name(changes: dict[str, Any]) -> None:
    """A key with parameters of its own filters as a model with these values written down does, to the last bit."""
    definition = {**WALK, **changes}
    model = kalman.build(definition)
    own = find_key_parameters(model)
    assert set(own.learned) == {"variance", "R"}
    state = with_key_parameters(model, model.initial(3), {"R": np.array([[0.25, 2.0, 8.0]])})
    state = with_key_parameters(model, state, {"variance": np.array([[1.0, 2.0, 4.0]])})
    y = np.random.default_rng(1).normal(size=(1, 15))
    rows = kalman.SortedRows(
        np.repeat(np.arange(3), 5), np.tile(np.arange(5) * 10**6, 3), y, np.empty((0, 15))
    )
    states = kalman.initial_states(model, 3)._replace(values=state)
    _, found = kalman.run(model, states, rows, 1e6)
    for key, (q, r) in enumerate([(1.0, 0.25), (2.0, 2.0), (4.0, 8.0)]):
        written = {
            **definition,
            "process": {"kind": "random_walk", "variance": q},
            "observation": {"R": [[r]]},
        }
        alone = kalman.build(written)
        mine = rows.take(rows.key == key)._replace(key=np.zeros(5, np.int64))
        _, expected = kalman.run(alone, kalman.initial_states(alone, 1), mine, 1e6)
        np.testing.assert_array_equal(found.mean[:, rows.key == key], expected.mean)
        np.testing.assert_array_equal(found.log_likelihood[rows.key == key], expected.log_likelihood)


def test_parameters_that_follow_the_innovations_are_told_apart() -> None:
    model = kalman.build(
        {**WALK, "learn": {"parameters": ["variance"], "scope": "key"}, "adaptive": {"R": 0.1}}
    )
    own = find_key_parameters(model)
    assert (own.learned, own.adapted, list(own.rows)) == (("variance",), ("R",), ["variance", "R"])
    shared = kalman.build({**WALK, "learn": {"parameters": ["variance"]}})
    assert find_key_parameters(shared).rows == {}
    state = shared.initial(2)
    assert with_key_parameters(shared, state, {}) is state


def test_the_values_of_a_models_parameters_are_listed_by_the_names_they_are_learned_under() -> None:
    assert collect_parameter_values(WALK) == {"variance": 0.5, "R": [[1.0]]}
    assert collect_parameter_values(WALK, {"R": [[3.0]]}) == {"variance": 0.5, "R": [[3.0]]}
    explicit = {
        **WALK,
        "process": {"kind": "explicit", "F": [[0.9]], "Q": [[2.0]]},
        "observation": {"H": [[1.0]], "R": [[1.0]]},
        "learn": {"parameters": ["F[0][0]", "initial.mean"]},
    }
    assert collect_parameter_values(explicit) == {
        "Q": [[2.0]],
        "R": [[1.0]],
        "F[0][0]": 0.9,
        "initial.mean": [0.0],
    }
    modes = {
        **{name: value for name, value in WALK.items() if name not in ("process", "observation", "learn")},
        "filter": "imm",
        "modes": [
            {"name": name, "process": {"kind": "random_walk", "variance": q}, "observation": {"R": [[1.0]]}}
            for name, q in (("calm", 0.1), ("wild", 9.0))
        ],
        "transition": [[0.9, 0.1], [0.2, 0.8]],
    }
    assert collect_parameter_values(modes, {"wild.variance": 4.0}) == {
        "calm.variance": 0.1,
        "calm.R": [[1.0]],
        "wild.variance": 4.0,
        "wild.R": [[1.0]],
        "transition": [[0.9, 0.1], [0.2, 0.8]],
    }
