"""Migrations of states from version to version, against dense matrices written down here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import kalman
from jobs.core.errors import UserError
from jobs.specs.model_spec import ModelSpec
from jobs.upgrades.migration.apply import compute_change_summary, format_change_table
from jobs.upgrades.migration.state_map import SYMMETRY, build_migration, build_state_map, find_wrong_states
from jobs.upgrades.migration.versions import MigrationStep, find_path_between
from kalman.filters.affine import Affine, move_moments
from kalman.linalg.packing import pack, unpack
from kalman.types import Rows

PERCENT = {"from": "b", "scale": 100.0, "offset": 1.0}


def spec(version: int, states: list[str], **changes: Any) -> ModelSpec:
    n = len(states)
    return ModelSpec.model_validate(
        {
            "name": "m",
            "version": version,
            "key": ["k"],
            "time": "at",
            "measurement": ["y"],
            "states": states,
            "process": {"kind": "explicit", "F": np.eye(n).tolist(), "Q": np.eye(n).tolist()},
            "observation": {"H": [[1.0] * n], "R": [[1.0]]},
            "initial": {"mean": [0.5] * n, "covariance": (np.eye(n) + 0.25).tolist()},
            **changes,
        }
    )


def states(n: int, keys: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random means (n, K) and covariances (n*n, K), symmetric to the last bit."""
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(keys, n, n)) * np.exp(rng.normal(size=(keys, n, 1)) * 3)
    P = np.moveaxis(root @ root.transpose(0, 2, 1), 0, 2).reshape(n * n, keys)
    return rng.normal(size=(n, keys)), unpack(pack(P))


def rows_of(matrix: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, matrix.tolist()))


def test_a_linear_map_moves_mean_and_covariance() -> None:
    rng = np.random.default_rng(1)
    for n, m in ((1, 1), (2, 3), (4, 2)):
        mean, covariance = states(n, 7, n)
        T, b = rng.normal(size=(m, n)), rng.normal(size=m)
        root = rng.normal(size=(m, m))
        to = Affine(rows_of(T), tuple(b.tolist()), rows_of(root @ root.T))
        found, P = move_moments(mean, covariance, to)
        full = covariance.reshape(n, n, 7)
        np.testing.assert_allclose(found, T @ mean + b[:, None], rtol=1e-12)
        for k in range(7):
            np.testing.assert_allclose(P.reshape(m, m, 7)[..., k], T @ full[..., k] @ T.T + to.N, rtol=1e-11)


def test_states_are_kept_renamed_rescaled_dropped_and_added() -> None:
    old = spec(1, ["a", "b", "c"])
    rules = {
        "states": {
            "per_cent": PERCENT,
            "x": {"mean": 2.0, "variance": 4.0, "covariance": {"y": 1.0}},
            "y": {"mean": 3.0, "variance": 9.0},
            "z": {"initial": True},
        },
        "drop": ["c"],
    }
    new = spec(2, ["y", "per_cent", "a", "x", "z"], migrate=rules)
    built = build_migration([MigrationStep.forward(old, new)], {}, {})
    mean, covariance = states(3, 11)
    after = built.apply(mean, covariance, {})
    P, Q = covariance.reshape(3, 3, 11), after.covariance.reshape(5, 5, 11)
    expected = [np.full(11, 3.0), 100.0 * mean[1] + 1.0, mean[0], np.full(11, 2.0), np.full(11, 0.5)]
    assert np.array_equal(after.mean, expected)
    assert np.array_equal(Q[2, 2], P[0, 0])  # what is kept keeps its bits
    np.testing.assert_allclose(Q[1, 1], 1e4 * P[1, 1], rtol=1e-15)
    np.testing.assert_allclose(Q[1, 2], 100 * P[1, 0], rtol=1e-15)
    assert (Q[0, 0] == 9).all() and (Q[0, 3] == 1).all() and (Q[4, 4] == 1.25).all()
    assert not Q[0, 1].any() and not Q[2, 3].any() and not Q[4, 0].any()
    assert not after.wrong.any()


def test_a_rescaling_and_its_inverse_give_the_states_to_the_last_bit() -> None:
    old, new = (
        spec(1, ["a", "b"]),
        spec(2, ["b2", "a"], migrate={"states": {"b2": {"from": "b", "scale": 4.0}}}),
    )
    back = spec(3, ["a", "b"], migrate={"states": {"b": {"from": "b2", "scale": 0.25}}})
    mean, covariance = states(2, 50)
    after = build_migration(
        [MigrationStep.forward(old, new), MigrationStep.forward(new, back)], {}, {}
    ).apply(mean, covariance, {})
    assert np.array_equal(after.mean, mean) and np.array_equal(after.covariance, covariance)


def test_an_identity_passes_extras_unchanged() -> None:
    learn = {"parameters": ["R"], "scope": "key"}
    old, new = spec(1, ["a"], learn=learn), spec(2, ["a"], learn=learn)
    extras = {"parameters": np.array([[1.0, 2.0]])}
    after = build_migration([MigrationStep.forward(old, new)], {}, {}).apply(*states(1, 2), extras)
    assert after.extras["parameters"] is extras["parameters"]


def a_mode(q: float) -> dict[str, Any]:
    return {
        "process": {"kind": "explicit", "F": np.eye(2).tolist(), "Q": (q * np.eye(2)).tolist()},
        "observation": {"H": [[1.0, 1.0]], "R": [[1.0]]},
    }


IMM: dict[str, Any] = {
    "filter": "imm",
    "modes": [a_mode(1.0), a_mode(1.0)],
    "transition": [[0.9, 0.1], [0.2, 0.8]],
    "process": None,
    "observation": None,
}


@pytest.mark.parametrize(
    ("changes", "rtol"),
    [
        ({"form": "square_root"}, 1e-10),
        ({"filter": "unscented"}, 1e-10),
        ({"filter": "unscented", "form": "square_root"}, 1e-10),
        ({"filter": "cubature"}, 1e-10),
        ({"smoothing": {"lag": 3}}, 1e-10),
        ({"robust": {"gate": {"probability": 1.0 - 1e-12}}}, 1e-10),
        (IMM, 1e-10),  # of equal modes: it is the one filter
        ({"storage": {"dtype": "float32"}}, 1e-5),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_another_filter_continues_from_the_state(changes: dict[str, Any], rtol: float) -> None:
    """Carried over, there and back, the next row gives what the linear filter gives by the textbook."""
    old, new, back = spec(1, ["a", "b"]), spec(2, ["a", "b"], **changes), spec(3, ["a", "b"])
    rng = np.random.default_rng(3)
    mean, root = rng.normal(size=(2, 9)), rng.normal(size=(9, 2, 2))
    covariance = unpack(pack(np.moveaxis(root @ root.transpose(0, 2, 1), 0, 2).reshape(4, 9)))
    after = build_migration([MigrationStep.forward(old, new)], {}, {}).apply(mean, covariance, {})
    assert not after.wrong.any()
    target = kalman.build(new.definition())
    y = rng.normal(size=(1, 9))
    rows = Rows(np.ones(9), np.zeros(9, bool), y, np.empty((0, 9)))
    state, _ = target.step(target.restore(after.mean, after.covariance, after.extras), rows)
    found, packed = target.moments(state)
    H = np.array([1.0, 1.0])
    for key in range(9):
        P = covariance.reshape(2, 2, 9)[..., key] + np.eye(2)
        S = H @ P @ H + 1.0
        K = P @ H / S
        expected = mean[:, key] + K * (y[0, key] - H @ mean[:, key])
        np.testing.assert_allclose(found[:, key], expected, rtol=rtol, atol=rtol)
        wanted = (np.eye(2) - np.outer(K, H)) @ P
        np.testing.assert_allclose(packed[:, key], wanted[[0, 1, 1], [0, 0, 1]], rtol=rtol, atol=rtol)
    again = build_migration([MigrationStep.forward(new, back)], {}, {}).apply(
        after.mean, after.covariance, after.extras
    )
    np.testing.assert_allclose(again.mean, mean, rtol=rtol, atol=rtol)
    np.testing.assert_allclose(again.covariance, covariance, rtol=rtol, atol=rtol)


LMS: dict[str, Any] = {
    "filter": "lms",
    "process": None,
    "lms": {"step": 0.1},
    "observation": {"H": [[1.0, 0.5]]},
    "initial": {"mean": [1.0, 2.0]},
}
RLS: dict[str, Any] = {
    "filter": "rls",
    "process": None,
    "observation": {"H": [[1.0, 0.5]]},
    "initial": None,
}


@pytest.mark.parametrize("changes", [LMS, RLS], ids=["lms", "rls"])
def test_a_filter_whose_state_is_more_than_moments_follows_only_its_own_kind(changes: dict[str, Any]) -> None:
    old, new = spec(1, ["a", "b"], **changes), spec(2, ["a", "b"], **changes)
    model = kalman.build(old.definition())
    parts = model.snapshot(model.initial(4))
    after = build_migration([MigrationStep.forward(old, new)], {}, {}).apply(*parts)
    assert not after.wrong.any()  # though its covariance is not finite
    np.testing.assert_array_equal(model.restore(after.mean, after.covariance, after.extras), model.initial(4))
    for steps in (
        [MigrationStep.forward(old, spec(2, ["a", "b"]))],
        [MigrationStep.forward(spec(1, ["a", "b"]), new)],
    ):
        with pytest.raises(
            UserError, match=r"from version 1 to 2: of version [12] \([lr].s\) the filter keeps"
        ):
            build_migration(steps, {}, {})


def test_parameters_learned_per_key_are_kept_with_the_key() -> None:
    learn = {"parameters": ["R"], "scope": "key"}
    old = spec(1, ["a"], learn=learn)
    new = spec(2, ["b", "a"], learn=learn, migrate={"states": {"b": {"mean": 0.0, "variance": 1.0}}})
    extras, learned = {"parameters": np.array([[1.0, 2.0]])}, {"R": [[3.0]]}
    kept = build_migration([MigrationStep.forward(old, new)], learned, learned).apply(*states(1, 2), extras)
    assert kept.extras["parameters"].tolist() == [[1.0, 2.0]]
    given_up = build_migration([MigrationStep.forward(old, new)], learned, {}).apply(*states(1, 2), extras)
    assert given_up.extras["parameters"].tolist() == [[1.0, 1.0]]  # the spec's


def test_diffuse_states_stay_diffuse() -> None:
    diffuse = {"initial": {"diffuse": True}}
    old = spec(1, ["a", "b"], **diffuse)
    model = kalman.build(old.definition())
    rng = np.random.default_rng(0)
    rows = kalman.SortedRows(
        np.array([1, 2, 2, 2]), np.array([0, 0, 1, 2]), rng.normal(size=(1, 4)), np.empty((0, 4))
    )
    at = kalman.run(model, kalman.initial_states(model, 3), rows, 1.0)[0].values
    parts = model.snapshot(at)
    assert parts[2]["diffuse"].any(axis=0).tolist() == [True, True, True]  # H sees only a + b

    swapped = spec(2, ["b", "c"], migrate={"states": {"c": {"from": "a", "scale": 2.0}}}, **diffuse)
    after = build_migration([MigrationStep.forward(old, swapped)], {}, {}).apply(*parts)
    assert not after.wrong.any()
    A, B = parts[2]["diffuse"].reshape(2, 2, 3), after.extras["diffuse"].reshape(2, 2, 3)
    np.testing.assert_allclose(B[0], A[1])
    np.testing.assert_allclose(B[1], 2 * A[0])

    proper = spec(2, ["a", "b"])
    assert build_migration([MigrationStep.forward(old, proper)], {}, {}).apply(*parts).wrong.all()
    grown = spec(2, ["a", "b", "c"], migrate={"states": {"c": {"initial": True}}}, **diffuse)
    known = kalman.build(old.definition()).from_moments(*states(2, 4))
    after = build_migration([MigrationStep.forward(old, grown)], {}, {}).apply(*model.snapshot(known))
    assert after.extras["diffuse"].reshape(3, 3, 4).any(axis=2).sum() == 1 and not after.wrong.any()


def test_a_preview_says_which_states_are_diffuse() -> None:
    diffuse = {"initial": {"diffuse": True}}
    old = spec(1, ["a", "b"])
    new = spec(2, ["a", "b", "c"], migrate={"states": {"c": {"initial": True}}}, **diffuse)
    mean, covariance = states(2, 4)
    batch = pa.RecordBatch.from_pydict(
        {
            "key": list("wxyz"),
            "mean": mean.T.tolist(),
            "covariance": covariance.T.tolist(),
            "extras": pa.array([{}] * 4, pa.map_(pa.string(), pa.list_(pa.float64()))),
        }
    )
    change = compute_change_summary([batch], build_migration([MigrationStep.forward(old, new)], {}, {}))
    variances = {name: one["variance"] for name, one in change["after"].items()}
    assert variances == pytest.approx(
        {**dict(zip("ab", covariance[::3].mean(axis=1), strict=True)), "c": np.inf}
    )
    assert format_change_table(change)[-1].split() == ["c", "-", "0", "-", "diffuse", "new"]
    renamed = spec(
        2,
        ["c", "d"],
        migrate={"states": {name: {"initial": True} for name in "cd"}, "drop": ["a", "b"]},
        **diffuse,
    )
    change = compute_change_summary([batch], build_migration([MigrationStep.forward(old, renamed)], {}, {}))
    assert change["keys"] == 4 and change["added"] == ["c", "d"] and change["dropped"] == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "apart"),
    [
        ({}, True),
        ({"storage": {"dtype": "float32"}}, False),
        ({"initial": {"mean": [0.0] * 3, "covariance": np.eye(3).tolist()}}, False),
        ({"filter": "unscented", "initial": {"mean": [0.0] * 3, "covariance": np.eye(3).tolist()}}, False),
    ],
)
def test_what_a_start_determines_only_just_is_carried_over(changes: dict[str, Any], apart: bool) -> None:
    """Six days of a year's waves: apart from the covariance where the target has room for that, else within it."""
    process = {
        "kind": "sum",
        "parts": [
            {"name": "level", "kind": "random_walk", "variance": 1.0},
            {
                "name": "year",
                "kind": "seasonal_trigonometric",
                "period": 365.25,
                "harmonics": 1,
                "variance": 0.0,
            },
        ],
    }
    same: dict[str, Any] = {"process": process, "observation": {"H": [[1.0, 1.0, 0.0]], "R": [[1.0]]}}
    old = spec(1, ["a", "b", "c"], **same, initial={"diffuse": True})
    new = spec(2, ["a", "b", "c"], **{**same, "initial": {"diffuse": True}, **changes})
    model, target = kalman.build(old.definition()), kalman.build(new.definition())
    y = np.random.default_rng(0).normal(size=(1, 6))
    rows = kalman.SortedRows(np.zeros(6, np.int64), np.arange(6), y, np.empty((0, 6)))
    states = kalman.run(model, kalman.initial_states(model, 1), rows, 1.0)[0]
    parts = model.snapshot(states.values)
    assert parts[2]["diffuse"].any()
    after = build_migration([MigrationStep.forward(old, new)], {}, {}).apply(*parts)
    assert not after.wrong.any() and after.extras.get("diffuse", np.zeros(1)).any() == apart
    state = target.restore(after.mean, after.covariance, after.extras)
    mean, covariance = target.moments(state)
    wanted = model.moments(states.values)
    np.testing.assert_allclose(mean, wanted[0], rtol=1e-6)
    np.testing.assert_allclose(covariance, wanted[1], rtol=1e-6)


def test_keys_with_an_invalid_state_are_found() -> None:
    old, new = (
        spec(1, ["a", "b"]),
        spec(2, ["a", "b"], migrate={"states": {"b": {"from": "b", "scale": 2.0}}}),
    )
    mean, covariance = states(2, 4)
    mean[0, 1] = np.nan
    covariance[1, 2] += 1.0  # the lower triangle is what counts, and it is still right
    covariance[[1, 2], 3] = 10 * np.sqrt(covariance[0, 3] * covariance[3, 3])
    after = build_migration([MigrationStep.forward(old, new)], {}, {}).apply(mean, covariance, {})
    assert after.wrong.tolist() == [False, True, False, True]


@pytest.mark.parametrize(
    ("covariance", "wrong"),
    [
        ([[4.0, 1.0], [1.0, 1.0]], False),
        ([[4.0, 1.0], [1.0 + 3.9 * SYMMETRY, 1.0]], False),  # relative to the largest variance
        ([[4.0, 1.0], [1.0 + 4.1 * SYMMETRY, 1.0]], True),
        ([[1.0, 1.0 - 4.1 * SYMMETRY], [1.0, 4.0]], True),
        ([[1.0, 1.0 + 9e-8], [1.0 + 9e-8, 1.0]], False),  # a correlation above 1 by rounding
        ([[1.0, 1.0 + 2e-7], [1.0 + 2e-7, 1.0]], True),
        ([[1e-12, 1.0 + 9e-8], [1.0 + 9e-8, 1e12]], False),  # whatever the units
        ([[1e-12, 1.0 + 2e-7], [1.0 + 2e-7, 1e12]], True),
        ([[1e12, -1.0 - 2e-7], [-1.0 - 2e-7, 1e-12]], True),
        ([[0.0, 0.0], [0.0, 0.0]], False),
        ([[0.0, 1e-3], [1e-3, 1.0]], True),  # a variance of zero has no covariance
        ([[-1e-12, 0.0], [0.0, 1.0]], True),
        ([[1.0, 0.0], [0.0, -1e-12]], True),
        ([[np.inf, 0.0], [0.0, 1.0]], True),
        ([[1.0, np.nan], [np.nan, 1.0]], True),
    ],
)
def test_a_state_is_wrong_or_right_by_its_own_covariance(covariance: list[list[float]], wrong: bool) -> None:
    P = np.array(covariance).reshape(4, 1)
    sound = np.array([4.0, 1.0, 1.0, 1.0]).reshape(4, 1)
    assert find_wrong_states(np.zeros((2, 1)), P).tolist() == [wrong]
    among = np.concatenate([sound, P, sound, P], axis=1)
    assert find_wrong_states(np.zeros((2, 4)), among).tolist() == [False, wrong, False, wrong]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_state_is_wrong_by_its_mean(value: float) -> None:
    mean = np.array([[0.0, value, 0.0, -1e300], [value, 0.0, 0.0, 1e300]])
    assert find_wrong_states(mean, np.tile(np.eye(2).reshape(4, 1), 4)).tolist() == [True, True, False, False]


@pytest.mark.filterwarnings("error")
def test_a_covariance_with_infinity_is_wrong_without_a_warning() -> None:
    P = np.array([[np.inf, np.inf], [np.inf, 1.0]]).reshape(4, 1)
    assert find_wrong_states(np.zeros((2, 1)), P).tolist() == [True]


def test_new_states_that_begin_as_the_spec_says_keep_their_covariances() -> None:
    initial = {
        "mean": [1.0, 2.0, 3.0, 4.0],
        "covariance": (np.diag([5.0, 6.0, 7.0, 8.0]) + np.eye(4)[::-1]).tolist(),
    }
    initial["covariance"][1][3] = initial["covariance"][3][1] = -0.5
    rules = {"states": {name: {"initial": True} for name in ("w", "y", "z")}}
    new = spec(2, ["w", "a", "y", "z"], initial=initial, migrate=rules)
    mean, covariance = states(1, 3)
    after = build_migration([MigrationStep.forward(spec(1, ["a"]), new)], {}, {}).apply(mean, covariance, {})
    expected = np.tile(np.array(initial["covariance"])[..., None], 3)
    expected[1, :] = expected[:, 1] = 0.0  # the state that is kept has nothing to do with the new ones
    expected[1, 1] = covariance[0]
    assert np.array_equal(after.covariance.reshape(4, 4, 3), expected)
    assert np.array_equal(after.mean, np.array([[1.0] * 3, mean[0], [3.0] * 3, [4.0] * 3]))


def test_a_covariance_of_new_states_may_be_said_at_either_of_them() -> None:
    one, other = {"mean": 2.0, "variance": 4.0}, {"mean": 3.0, "variance": 9.0}
    mean, covariance = states(1, 3)
    for said in (
        {"x": {**one, "covariance": {"y": -5.9}}, "y": other},
        {"x": one, "y": {**other, "covariance": {"x": -5.9}}},
    ):
        new = spec(2, ["x", "a", "y"], migrate={"states": said})
        P = (
            build_migration([MigrationStep.forward(spec(1, ["a"]), new)], {}, {})
            .apply(mean, covariance, {})
            .covariance
        )
        expected = [4.0, 0.0, -5.9, 0.0, 0.0, 0.0, -5.9, 0.0, 9.0]
        expected[4] = covariance[0, 1]
        assert P[:, 1].tolist() == expected


@pytest.mark.parametrize(
    ("value", "other", "message"),
    [
        (6.1, "y", "not positive semidefinite"),
        (-6.1, "y", "not positive semidefinite"),
        (1.0, "a", r"migrate.states.x.covariance.a is no new state"),
        (1.0, "q", r"migrate.states.x.covariance.q is no new state"),
    ],
)  # fmt: skip
def test_an_impossible_covariance_of_new_states_is_refused(value: float, other: str, message: str) -> None:
    said = {
        "x": {"mean": 2.0, "variance": 4.0, "covariance": {other: value}},
        "y": {"mean": 3.0, "variance": 9.0},
    }
    with pytest.raises(UserError, match=message):
        build_state_map(
            MigrationStep.forward(spec(1, ["a"]), spec(2, ["x", "a", "y"], migrate={"states": said}))
        )


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (spec(2, ["a", "b", "c"]), "state c is new, and migrate.states does not say what it begins with"),
        (spec(2, ["a"]), "state b of version 1 goes nowhere: name it in migrate.drop"),
        (spec(2, ["a", "c"], migrate={"states": {"c": {"from": "bb"}}}), r"version 1 has no state bb \(it has a, b\)"),
        (spec(2, ["a", "b"], migrate={"states": {"d": PERCENT}}), "migrate.states.d is no state of version 2"),
        (spec(2, ["a", "b"], migrate={"drop": ["a"]}), "migrate.drop: a is kept"),
        (spec(2, ["a", "b"], key=["k", "l"]), "the key columns changed from k to k, l"),
        (spec(2, ["a", "b"], migrate={"transform": {"matrix": [[1.0]]}}), "2 rows .* of 2 numbers"),
        (spec(2, ["a", "b"], migrate={"function": "no_such:thing"}), "migrate.function: there is no module no_such"),
    ],
)  # fmt: skip
def test_an_impossible_migration_is_refused_with_the_reason(new: ModelSpec, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_state_map(MigrationStep.forward(spec(1, ["a", "b"]), new))


def test_the_path_between_versions_is_found() -> None:
    known = {1: spec(1, ["a"]), 2: spec(2, ["a"]), 3: spec(3, ["a"]), 5: spec(5, ["a"], migrate={"from": 3})}
    assert [step.new.version for step in find_path_between(known, 1, 5)] == [2, 3, 5]
    assert find_path_between(known, 3, 3) == []
    with pytest.raises(UserError, match="has no version 4"):
        find_path_between(known, 4, 5)
    with pytest.raises(UserError, match="cannot be migrated from version 5 to 2"):
        find_path_between(known, 5, 2)
    del known[3]
    with pytest.raises(UserError, match="the spec of version 3 is not known"):
        find_path_between(known, 1, 5)


MIXTURE = {
    "filter": "gaussian_mixture",
    "states": ["y"],
    "process": None,
    "observation": None,
    "initial": None,
    "mixture": {"means": [0.0, 5.0], "covariances": [[[1.0]], [[2.0]]]},
}
RLS = {"filter": "rls", "process": None, "observation": {"H": [[1.0]]}, "initial": None}


@pytest.mark.parametrize(
    "kind", [{}, {"adaptive": {"R": 0.1}}, RLS, MIXTURE], ids=["plain", "adaptive", "rls", "mixture"]
)
@pytest.mark.parametrize("windows", [(None, 3), (3, None), (3, 3), (3, 5)])
def test_a_sliding_window_is_begun_kept_or_removed_and_all_else_of_a_state_stays(
    kind: dict[str, Any], windows: tuple[int | None, int | None]
) -> None:
    one, other = (
        spec(
            version,
            ["y"],
            outputs={"sliding_log_likelihood": window},
            **{k: v for k, v in kind.items() if k != "states"},
        )
        for version, window in enumerate(windows, 1)
    )
    source, target = kalman.build(one.definition()), kalman.build(other.definition())
    rng = np.random.default_rng(5)
    rows = kalman.SortedRows(
        np.repeat(np.arange(4), 6),
        np.tile(np.arange(6) * 1_000_000, 4),
        rng.normal(size=(1, 24)),
        np.empty((0, 24)),
    )
    held, _ = kalman.run(source, kalman.initial_states(source, 4), rows, 1e6)
    mean, covariance, extras = source.snapshot(held.values)
    after = build_migration([MigrationStep.forward(one, other)], {}, {}).apply(mean, covariance, extras)
    assert not after.wrong.any()
    found = target.restore(after.mean, after.covariance, after.extras)
    size = source.size - (windows[0] + 1 if windows[0] else 0)
    np.testing.assert_array_equal(found[:size], held.values[:size])
    rest = held.values[size:] if windows[0] == windows[1] else np.zeros((target.size - size, 4))
    np.testing.assert_array_equal(found[size:], rest)


def test_a_new_state_cannot_start_from_a_column() -> None:
    """A key with a state has no first row again whose column could say where the new one starts."""
    first = spec(1, ["a"])
    second = spec(
        2,
        ["a", "b"],
        control=["start"],
        initial={"mean": [0.0, "start"], "covariance": [[1.0, 0.0], [0.0, 1.0]]},
        migrate={"states": {"b": {"initial": True}}},
    )
    (step,) = find_path_between({1: first, 2: second}, 1, 2)
    with pytest.raises(UserError, match="takes it from column start of a key's first row"):
        build_state_map(step)
