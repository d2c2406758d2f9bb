"""The path of states back to an earlier version: a step and its inverse give the same states, or it is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kalman
from jobs.core.errors import UserError
from jobs.specs.model_spec import ModelSpec
from jobs.upgrades.migration.state_map import build_migration
from jobs.upgrades.migration.versions import MigrationStep, find_path_between, reverse_path, reverse_rules
from tests.jobs.upgrades.test_migration import spec, states

UNITS = np.diag([1.0, 3.6, 1e3]) @ np.array([[2.0, 1.0, 0.0], [0.0, 1.0, 1.0], [1.0, 0.0, 3.0]])
"""A linear map that mixes the states, into units that are far apart."""


def there_and_back(*specs: ModelSpec, keys: int = 40) -> tuple[Any, Any, Any, Any]:
    """Return mean and covariance of the first version, and both after a migration to the last version and back."""
    known = {one.version: one for one in specs}
    first, last = specs[0].version, specs[-1].version
    mean, covariance = states(len(specs[0].states), keys, 7)
    there = build_migration(find_path_between(known, first, last), {}, {}).apply(mean, covariance, {})
    back = build_migration(reverse_path(known, last, first), {}, {}).apply(
        there.mean, there.covariance, there.extras
    )
    assert not there.wrong.any() and not back.wrong.any()
    return mean, covariance, back.mean, back.covariance


def assert_same(mean: Any, covariance: Any, found: Any, P: Any) -> None:
    """Check to 1e-12 of each key's largest entry, in units in which its states' deviations are 1."""
    n, keys = mean.shape
    deviation = np.sqrt(covariance.reshape(n, n, keys)[range(n), range(n)])
    np.testing.assert_allclose(found / deviation, mean / deviation, rtol=1e-12, atol=1e-12)
    outer = (deviation[:, None] * deviation[None]).reshape(n * n, keys)
    np.testing.assert_allclose(P / outer, covariance / outer, rtol=1e-12, atol=1e-12)


SCALED = {"v": {"from": "b", "scale": 3.6, "offset": -2.0}, "c": {"from": "c", "scale": -0.7}}
ADDED = {"bias": {"mean": 1.0, "variance": 4.0, "covariance": {"gust": 1.0}}, "gust": {"initial": True}}


@pytest.mark.parametrize(
    ("after", "rules"),
    [
        (["a", "b", "c"], None),
        (["c", "a", "b"], None),
        (["a", "v", "c"], {"states": SCALED}),
        (["a", "b", "c"], {"states": {"a": {"from": "b"}, "b": {"from": "a"}}}),
        (["gust", "v", "bias", "c", "a"], {"states": {**SCALED, **ADDED}}),
        (["x", "y", "z"], {"transform": {"matrix": [[0, 1, 0], [0, 0, 2], [4, 0, 0]], "offset": [1, 2, 3]}}),
    ],
    ids=["the same", "another order", "rescaled", "swapped", "added to", "transformed"],
)
def test_a_step_and_its_inverse_give_the_same_states(after: list[str], rules: dict[str, Any] | None) -> None:
    assert_same(*there_and_back(spec(1, ["a", "b", "c"]), spec(2, after, migrate=rules)))


def test_a_transform_that_mixes_the_states_is_inverted() -> None:
    rng = np.random.default_rng(0)
    for T in (UNITS, *(np.linalg.qr(rng.normal(size=(n, n)))[0] * 3.0 for n in (1, 2, 5))):
        names = [f"s{i}" for i in range(len(T))]
        rules = {"transform": {"matrix": T.tolist(), "offset": rng.normal(size=len(T)).tolist()}}
        mean, covariance, found, P = there_and_back(spec(1, names), spec(2, names, migrate=rules))
        np.testing.assert_allclose(found, mean, rtol=1e-12, atol=1e-12)
        # Each key's largest entry: next to it a state that is known far better is no better known in a mixture.
        assert (np.abs(P - covariance).max(axis=0) <= 1e-12 * np.abs(covariance).max(axis=0)).all()


def test_a_path_back_goes_through_every_version_in_between() -> None:
    specs = (
        spec(1, ["a", "b"]),
        spec(2, ["a", "b", "c"], migrate={"states": {"c": {"mean": 0.0, "variance": 1.0}}}),
        spec(4, ["c", "w", "a"], migrate={"from": 2, "states": {"w": {"from": "b", "scale": 9.0}}}),
        spec(5, ["w", "a"], migrate={"drop": ["c"]}),
    )
    assert_same(*there_and_back(*specs))
    back = reverse_path({one.version: one for one in specs}, 5, 1)
    assert [(step.old.version, step.new.version) for step in back] == [(5, 4), (4, 2), (2, 1)]


def test_a_dropped_state_starts_from_the_earlier_versions_initial() -> None:
    first = spec(
        1,
        ["a", "b", "c"],
        initial={"mean": [1.0, 2.0, 3.0], "covariance": [[9.0, 0.0, 1.0], [0.0, 8.0, 2.0], [1.0, 2.0, 7.0]]},
    )
    second = spec(2, ["v"], migrate={"states": {"v": {"from": "a", "scale": 0.5}}, "drop": ["b", "c"]})
    mean, covariance, found, P = there_and_back(first, second)
    P, Q = covariance.reshape(3, 3, -1), P.reshape(3, 3, -1)
    np.testing.assert_allclose(found[0], mean[0], rtol=1e-12)
    np.testing.assert_allclose(Q[0, 0], P[0, 0], rtol=1e-12)
    assert (found[1] == 2.0).all() and (found[2] == 3.0).all()
    assert (Q[1, 1] == 8.0).all() and (Q[1, 2] == 2.0).all() and (Q[2, 2] == 7.0).all()
    assert not Q[0, 1:].any() and not Q[1:, 0].any()  # what is known of the kept one tells nothing of them

    diffuse = spec(1, ["a", "b"], initial={"diffuse": True})
    second = spec(2, ["a"], migrate={"drop": ["b"]}, initial={"diffuse": True})
    (step,) = reverse_path({1: diffuse, 2: second}, 2, 1)
    model = kalman.build(second.definition())
    after = build_migration([step], {}, {}).apply(*model.snapshot(model.from_moments(*states(1, 3))))
    A = after.extras["diffuse"].reshape(2, 2, 3)
    assert not after.wrong.any() and A[1].any(axis=0).all() and not A[0].any()


def test_a_new_state_of_an_old_name_is_not_mapped_back_to_the_old_one() -> None:
    first, second = (
        spec(1, ["a", "b"]),
        spec(2, ["a", "b"], migrate={"states": {"b": {"mean": 7.0, "variance": 49.0}}, "drop": ["b"]}),
    )
    _, _, found, P = there_and_back(first, second)
    assert (found[1] == 0.5).all() and (P[3] == 1.25).all()  # the first version's initial, not 7


def half(mean: Any, covariance: Any, extras: Any) -> tuple[Any, Any]:
    """A reverse function: drop the second of two equal parts."""
    n = len(mean)
    return mean[: n // 2], covariance.reshape(n, n, -1)[: n // 2, : n // 2].reshape((n // 2) ** 2, -1)


def test_migrate_reverse_takes_precedence_over_the_inverse() -> None:
    twice = {"a2": {"from": "a"}, "b2": {"from": "b"}}
    tall = {"matrix": [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]}
    flat = [[0.5, 0.0, 0.5, 0.0], [0.0, 0.5, 0.0, 0.5]]
    wanted = {"states": {"b": {"from": "b2"}}, "drop": ["a2", "b"]}
    for there, back in (
        ({"states": twice}, wanted),
        ({"transform": tall}, {"transform": {"matrix": flat}}),
        ({"states": twice}, {"function": f"{__name__}:half"}),
    ):
        rules = {**there, "reverse": back}
        assert_same(*there_and_back(spec(1, ["a", "b"]), spec(2, ["a", "b", "a2", "b2"], migrate=rules)))


def test_migrate_reverse_is_no_part_of_the_fingerprint() -> None:
    plain = spec(2, ["a"], migrate={"drop": ["b"]})
    reversible = spec(2, ["a"], migrate={"drop": ["b"], "reverse": {"states": {"b": {"initial": True}}}})
    assert plain.fingerprint() == reversible.fingerprint()


NOISE = {"transform": {"matrix": [[1.0, 0.0], [0.0, 1.0]], "noise": [[1.0, 0.0], [0.0, 0.0]]}}
KEYS = {"keys": {"function": "m:f"}}


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (spec(2, ["a", "b", "c"], migrate={"states": {"c": {"from": "a"}}}), "state a became a and c"),
        (spec(2, ["a", "b"], migrate={"function": "m:f"}), r"migrate.function \(m:f\) cannot be inverted"),
        (spec(2, ["a"], migrate={"transform": {"matrix": [[1.0, 1.0]]}}), "has 1 rows and 2 columns"),
        (spec(2, ["a", "b"], migrate={"transform": {"matrix": [[1.0, 1.0], [1.0, 1.0]]}}), "is singular"),
        (spec(2, ["a", "b"], migrate={"transform": {"matrix": [[1, 0], [0, 0]]}}), "is singular"),
        (spec(2, ["a", "b"], migrate={"transform": {"matrix": [[1, 1], [1, 1 + 1e-7]]}}), "or nearly so"),
        (spec(2, ["a", "b"], migrate=NOISE), "adds noise"),
    ],
)
def test_a_step_without_inverse_is_refused_with_what_to_write(new: ModelSpec, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        reverse_rules(MigrationStep.forward(spec(1, ["a", "b"]), new))
    assert "Say in the spec of version 2, under migrate.reverse" in raised.value.message


def test_other_keys_and_unknown_versions_are_refused() -> None:
    old = spec(1, ["a"])
    for new in (spec(2, ["a"], key=["k", "l"], migrate=KEYS), spec(2, ["a"], migrate=KEYS)):
        with pytest.raises(UserError, match="gave the keys other names"):
            reverse_rules(MigrationStep.forward(old, new))
    with pytest.raises(UserError, match="the spec of version 2 is not known"):
        reverse_path({1: old, 3: spec(3, ["a"])}, 3, 1)


def test_an_error_in_migrate_reverse_names_that_section() -> None:
    new = spec(2, ["a"], migrate={"drop": ["b"], "reverse": {"states": {"b": {"from": "q"}}}})
    with pytest.raises(
        UserError, match=r"version 2 of m: migrate.reverse.states.b.from: version 2 has no state q"
    ):
        build_migration(reverse_path({1: spec(1, ["a", "b"]), 2: new}, 2, 1), {}, {})
    lms = spec(1, ["a", "b"], filter="lms", process=None, lms={"step": 0.1}, observation={"H": [[1.0, 0.5]]},
               initial={"mean": [1.0, 2.0]})  # fmt: skip
    with pytest.raises(UserError, match=r"of version 1 \(lms\) the filter keeps"):
        build_migration(reverse_path({1: lms, 2: spec(2, ["a", "b"])}, 2, 1), {}, {})
