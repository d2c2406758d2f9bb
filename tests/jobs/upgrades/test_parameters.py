"""Which learned parameters a version carries over from the one before, of all keys, of groups and of each key."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kalman
from jobs.specs.model_spec import ModelSpec
from jobs.upgrades.migration.parameters import (
    carry_over_parameters,
    carry_over_without_states,
    format_parameters,
    list_parameter_changes,
    list_retraining_changes,
)
from jobs.upgrades.migration.state_map import build_migration
from jobs.upgrades.migration.versions import MigrationStep

LEARNED = {"variance": 0.426, "R": [[3.0]]}
TREND = {"kind": "local_linear_trend", "level_variance": 0.5, "slope_variance": 0.01}
SLOPE = {"states": {"slope": {"mean": 0.0, "variance": 1.0}}}
PLAIN_START = {"mean": [0.0, 0.0], "covariance": [[10.0, 0.0], [0.0, 1.0]]}
TWO = {"states": ["level", "slope"], "initial": PLAIN_START, "migrate": SLOPE}
WALK_AND_NOISE = {
    "kind": "sum",
    "parts": [
        {"kind": "random_walk", "variance": 0.5},
        {"kind": "ornstein_uhlenbeck", "rate": 0.1, "variance": 0.5},
    ],
}


def spec(version: int, **changes: Any) -> ModelSpec:
    return ModelSpec.model_validate(
        {
            "name": "walk",
            "version": version,
            "key": ["site", "id"],
            "time": "at",
            "time_unit": "hour",
            "measurement": ["y"],
            "states": ["level"],
            "process": {"kind": "random_walk", "variance": 0.5},
            "observation": {"R": [[1.0]]},
            "initial": {"mean": [0.0], "covariance": [[10.0]]},
            "learn": {"parameters": ["variance", "R"]},
            **changes,
        }
    )


def steps(*specs: ModelSpec) -> list[MigrationStep]:
    return [MigrationStep.forward(old, new) for old, new in zip(specs[:-1], specs[1:], strict=True)]


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [
        ({}, LEARNED),
        ({"filter": "unscented", "learn": None}, LEARNED),  # it learns none, and writes what version 1 wrote
        ({"robust": {"gate": {"probability": 0.99}}}, LEARNED),
        ({"learn": {"parameters": ["variance"]}}, LEARNED),
        ({"observation": {"R": [[2.0]]}}, LEARNED),  # where a search would begin
        ({"learn": {"parameters": ["variance"]}, "observation": {"R": [[2.0]]}}, {"variance": 0.426}),
        ({"migrate": {"parameters": "spec"}}, {}),
        ({"time_unit": "minute"}, {"R": [[3.0]]}),
        ({"measurement": ["z"]}, {"variance": 0.426}),
        ({"process": TREND, **TWO, "learn": {"parameters": ["level_variance", "R"]}}, {"R": [[3.0]]}),
        ({"migrate": {"states": {"level": {"from": "level", "scale": 2.0}}}}, {}),
        ({"migrate": {"states": {"level": {"from": "level", "scale": 2.0}}, "parameters": "keep"}}, LEARNED),
        ({"states": ["height"], "migrate": {"states": {"height": {"from": "level"}}}}, LEARNED),
        (
            {
                "process": WALK_AND_NOISE,
                **TWO,
                "learn": {"parameters": ["random_walk.variance", "ornstein_uhlenbeck.variance", "R"]},
            },
            {"random_walk.variance": 0.426, "R": [[3.0]]},
        ),
    ],
)
def test_a_parameter_stays_where_it_means_the_same(
    changes: dict[str, Any], parameters: dict[str, Any]
) -> None:
    assert carry_over_parameters(steps(spec(1), spec(2, **changes)), LEARNED).parameters == parameters


def test_the_same_name_in_another_process_is_another_parameter() -> None:
    noise = {"kind": "ornstein_uhlenbeck", "rate": 0.1, "variance": 0.5}
    found = carry_over_parameters(steps(spec(1), spec(2, process=noise)), LEARNED)
    assert found.parameters == {"R": [[3.0]]}
    assert found.given_up == {"variance": "it belongs to another process in version 2"}
    back = steps(spec(1), spec(2, process=noise), spec(3))
    assert carry_over_parameters(back, LEARNED).parameters == {"R": [[3.0]]}


def test_parameters_by_group_are_carried_over_name_by_name() -> None:
    by_site = {"parameters": ["variance", "R"], "scope": "group", "by": ["site"]}
    groups = {
        "by": ["site"],
        "values": [["a"], ["b"]],
        "parameters": [LEARNED, {"variance": 2.0, "R": [[9.0]]}],
    }
    learned = {**LEARNED, "groups": groups}
    old = spec(1, learn=by_site)
    assert carry_over_parameters(steps(old, spec(2, learn=by_site)), learned).parameters == learned
    fewer = spec(2, process=TREND, **TWO, learn={**by_site, "parameters": ["level_variance", "R"]})
    only_R = [{"R": [[3.0]]}, {"R": [[9.0]]}]
    assert carry_over_parameters(steps(old, fewer), learned).parameters == {
        "R": [[3.0]],
        "groups": {**groups, "parameters": only_R},
    }
    by_id = spec(2, learn={**by_site, "by": ["id"]})
    found = carry_over_parameters(steps(old, by_id), learned)
    assert found.parameters == LEARNED and found.given_up == {"groups": "version 2 does not learn by site"}


def own(changes: dict[str, Any], learned: dict[str, Any] | None = None) -> np.ndarray:
    """Return the field `parameters` of two keys of a migrated version, of (0.1, 1.0) and (0.2, 2.0) in version 1."""
    by_key = {"parameters": ["variance", "R"], "scope": "key"}
    path = steps(spec(1, learn=by_key), spec(2, **{"learn": by_key, **changes}))
    before = LEARNED if learned is None else learned
    found = carry_over_parameters(path, before)
    built = build_migration(path, before, found.parameters, found.names)
    model = kalman.build(spec(1, learn=by_key).definition(), before)
    moments = np.array([[1.0, 2.0]]), np.array([[0.5, 0.7]])
    extras = {"parameters": np.array([[0.1, 0.2], [1.0, 2.0]])}
    assert model.fields["parameters"] == (2,)
    after = built.apply(*moments, extras)
    assert not after.wrong.any()
    if "states" not in changes:
        np.testing.assert_array_equal(after.mean, moments[0])
    return after.extras.get("parameters", np.zeros((0, 2)))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [[0.1, 0.2], [1.0, 2.0]]),
        ({"learn": {"parameters": ["variance", "R"], "scope": "group", "by": ["site"]}}, [[0.1, 0.2], [1.0, 2.0]]),
        ({"learn": {"parameters": ["R"], "scope": "key"}}, [[1.0, 2.0]]),
        ({"learn": {"parameters": ["variance"], "scope": "key"}}, [[0.1, 0.2]]),
        ({"learn": {"parameters": ["variance", "R"]}}, np.zeros((0, 2)).tolist()),
        ({"migrate": {"parameters": "spec"}}, [[0.5, 0.5], [1.0, 1.0]]),
        ({"time_unit": "minute"}, [[0.5, 0.5], [1.0, 2.0]]),
        ({"robust": {"gate": {"probability": 0.99}}}, [[0.1, 0.2], [1.0, 2.0]]),
        ({"adaptive": {"R": 0.02}}, [[0.1, 0.2], [1.0, 2.0]]),
        (
            {"process": TREND, **TWO, "learn": {"parameters": ["slope_variance", "R"], "scope": "key"}},
            [[0.01, 0.01], [1.0, 2.0]],
        ),
        (
            {"process": WALK_AND_NOISE, **TWO, "observation": {"H": [[1.0, 1.0]], "R": [[1.0]]},
             "learn": {"parameters": ["R", "random_walk.variance"], "scope": "key"}},
            [[0.1, 0.2], [1.0, 2.0]],
        ),
    ],
)  # fmt: skip
def test_each_key_keeps_its_own_parameters(changes: dict[str, Any], expected: list[list[float]]) -> None:
    assert own(changes).tolist() == expected


def test_keys_begin_with_the_pooled_value_that_was_learned_before_each_had_its_own() -> None:
    """From pooled to each key its own: every key begins with the pooled value."""
    path = steps(spec(1), spec(2, learn={"parameters": ["variance"], "scope": "key"}))
    found = carry_over_parameters(path, LEARNED)
    after = build_migration(path, LEARNED, found.parameters, found.names).apply(
        np.zeros((1, 2)), np.ones((1, 2)), {}
    )
    assert after.extras["parameters"].tolist() == [[0.426, 0.426]]


def test_every_parameter_is_listed_with_both_values_and_where_the_new_one_comes_from() -> None:
    wide = spec(2, process=TREND, **TWO, learn={"parameters": ["level_variance", "slope_variance", "R"]})
    path = steps(spec(1), wide)
    found = carry_over_parameters(path, LEARNED)
    changes = list_parameter_changes(spec(1), wide, LEARNED, found.parameters, found)
    assert format_parameters("walk", changes) == [
        "parameter       before   after  from",
        "level_variance       -     0.5  the spec",
        "slope_variance       -    0.01  the spec",
        "R              [[3.0]] [[3.0]]  learned by version 1, carried over",
        "variance         0.426       -  learned, and given up: version 2 has no such parameter",
        "not learned yet: level_variance, slope_variance; learn from history instead with `kalman-pipeline upgrade "
        "--model walk --mode retrain`",
    ]
    scaled = spec(2, migrate={"states": {"level": {"from": "level", "scale": 2.0}}})
    found = carry_over_parameters(steps(spec(1), scaled), LEARNED)
    listed = list_parameter_changes(spec(1), scaled, LEARNED, found.parameters, found)
    assert [(one["name"], one["before"], one["after"], one["from"], one["to_learn"]) for one in listed] == [
        ("variance", 0.426, 0.5, "the spec: not carried over, as a state changed its unit", True),
        ("R", [[3.0]], [[1.0]], "the spec: not carried over, as a state changed its unit", True),
    ]


def test_a_version_that_starts_without_states_keeps_what_was_learned_and_one_that_is_retrained_does_not() -> (
    None
):
    assert carry_over_without_states(spec(1), spec(2), LEARNED).parameters == LEARNED
    unmapped = spec(2, process=TREND, **{**TWO, "migrate": None}, learn={"parameters": ["R"]})
    found = carry_over_without_states(spec(1), unmapped, LEARNED)
    assert found.parameters == {} and "state slope is new" in found.given_up["R"]
    before = list_retraining_changes(spec(1), spec(2), LEARNED, None)
    assert [(one["name"], one["before"], one["after"], one["from"]) for one in before] == [
        ("variance", 0.426, None, "is learned from history"),
        ("R", [[3.0]], None, "is learned from history"),
    ]
    done = list_retraining_changes(spec(1), spec(2), LEARNED, {"variance": 0.3, "R": [[2.0]]})
    assert [(one["after"], one["from"]) for one in done] == [
        (0.3, "learned by version 2 from history"),
        ([[2.0]], "learned by version 2 from history"),
    ]
