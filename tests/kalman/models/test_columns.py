"""Entries of a model that come from columns: each row has its own matrices."""

import copy

import numpy as np
import pytest

import kalman
from kalman import flags
from kalman.learning import maximum_likelihood
from kalman.models import columns
from kalman.smoothers.smooth import smooth
from tests.kalman.support.models import random_covariance, random_rows, same
from tests.kalman.support.oracles import UNIT, corrected, full

NAMES = ["a", "b", "noise", "spread", "bias", "push"]


def definition(rng):
    """Every kind of entry from a column at once: n = 2, m = 2."""
    return {
        "states": ["x", "z"],
        "measurement": ["y0", "y1"],
        "control": NAMES,
        "process": {
            "kind": "explicit",
            "F": [[0.9, "a"], [0.0, 0.8]],
            "Q": [["noise", 0.1], [0.1, 2.0]],
            "B": [[0, 0, 0, 0, 0, 1.5], [0, 0, 0, 0, 0, "b"]],
            "offset": [0.3, "bias"],
            "noise_scale": "spread",
        },
        "observation": {
            "H": [[1.0, "b"], ["a", 0.5]],
            "R": [["noise", 0.2], [0.2, 1.5]],
            "offset": ["bias", -1.0],
            "noise_scale": "spread",
        },
        "initial": {"mean": rng.normal(size=2).tolist(), "covariance": random_covariance(rng, 2)},
    }


def random_inputs(rng, model, keys=8, longest=9):
    rows = random_rows(rng, model, keys, longest)
    rows.u[2] = rng.uniform(0.5, 3, len(rows.key))
    rows.u[3] = rng.uniform(0.2, 2, len(rows.key))
    return rows


def textbook(model, y, u):
    """Filter with the matrices of each row written out; y (N, m), u (N, c)."""
    x, P = np.array(model["initial"]["mean"]), np.array(model["initial"]["covariance"])
    found = []
    for k, (a, b, noise, spread, bias, push) in enumerate(u):
        if k:
            F, Q = np.array([[0.9, a], [0.0, 0.8]]), spread * np.array([[noise, 0.1], [0.1, 2.0]])
            x = F @ x + np.array([1.5, b]) * push + np.array([0.3, bias])
            P = F @ P @ F.T + Q
        R = spread * np.array([[noise, 0.2], [0.2, 1.5]])
        row = corrected(x, P, np.array([[1.0, b], [a, 0.5]]), R, y[k] - np.array([bias, -1.0]))
        x, P = row.mean, row.covariance
        found.append((x, P, row.score))
    return [np.array(part) for part in zip(*found, strict=True)]


@pytest.mark.parametrize("seed", range(4))
def test_every_row_has_its_own_matrices(seed):
    rng = np.random.default_rng(seed)
    model = definition(rng)
    rows = random_inputs(rng, model)
    kernel = kalman.build(model)
    _, outputs = kalman.run(kernel, kalman.initial_states(kernel, 8), rows, UNIT)
    assert not outputs.flag.any()
    for key in np.unique(rows.key):
        here = rows.key == key
        means, covariances, scores = textbook(model, rows.y[:, here].T, rows.u[:, here].T)
        np.testing.assert_allclose(outputs.mean[:, here].T, means, rtol=1e-10, atol=1e-11)
        np.testing.assert_allclose(full(outputs.covariance[:, here]), covariances, rtol=1e-10, atol=1e-11)
        np.testing.assert_allclose(outputs.log_likelihood[here], scores, rtol=1e-10, atol=1e-11)


def test_regression_is_least_squares():
    """Coefficients that never move, from a diffuse start: ordinary least squares, to the last row."""
    rng = np.random.default_rng(1)
    X = rng.normal(size=(40, 2))
    y = 3 + X @ [1.0, -2.0] + rng.normal(size=40)
    model = {
        "states": ["b0", "b1", "b2"],
        "measurement": ["y"],
        "control": ["x1", "x2"],
        "process": {"kind": "explicit", "F": np.eye(3).tolist(), "Q": np.zeros((3, 3)).tolist()},
        "observation": {"H": [[1.0, "x1", "x2"]], "R": [[1.0]]},
        "initial": {"diffuse": True},
    }
    kernel = kalman.build(model)
    rows = kalman.SortedRows(np.zeros(40, np.int64), np.arange(40), y[None], X.T.copy())
    _, outputs = kalman.run(kernel, kalman.initial_states(kernel, 1), rows, UNIT)
    A = np.column_stack([np.ones(40), X])
    np.testing.assert_allclose(outputs.mean[:, -1], np.linalg.lstsq(A, y)[0], rtol=1e-10)
    np.testing.assert_allclose(full(outputs.covariance)[-1], np.linalg.inv(A.T @ A), rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("noise", -1.0, flags.NOT_PSD),
        ("spread", -0.5, flags.NOT_PSD),
        ("noise", np.nan, flags.NON_FINITE),
        ("b", np.inf, flags.NON_FINITE),
    ],
)
def test_a_row_with_an_impossible_input_is_flagged_alone(name, value, code):
    rng = np.random.default_rng(5)
    model = definition(rng)
    rows = random_inputs(rng, model)
    kernel = kalman.build(model)
    where = np.flatnonzero(np.diff(rows.key, prepend=-1) == 0)[4]  # not a first row
    rows.u[NAMES.index(name), where] = value
    states, outputs = kalman.run(kernel, kalman.initial_states(kernel, 8), rows, UNIT)
    assert np.flatnonzero(outputs.flag).tolist() == [where] and outputs.flag[where] == code
    kept = np.delete(np.arange(len(rows.key)), where)
    rest = kalman.SortedRows(rows.key[kept], rows.time[kept], rows.y[:, kept], rows.u[:, kept])
    expected, _ = kalman.run(kernel, kalman.initial_states(kernel, 8), rest, UNIT)
    same(list(states), list(expected))


def test_a_first_row_needs_only_the_controls_of_the_measurement():
    rng = np.random.default_rng(6)
    model = definition(rng)
    model["observation"]["noise_scale"] = 1.0
    rows = random_inputs(rng, model, keys=3, longest=1)
    rows = kalman.SortedRows(
        np.arange(3), np.zeros(3, np.int64), rng.normal(size=(2, 3)), rng.normal(size=(6, 3))
    )
    rows.u[2] = 1.0
    rows.u[3:6:2] = np.nan  # spread and push: of the process alone
    rows.u[0, 1] = np.nan  # a: in H too
    kernel = kalman.build(model)
    _, outputs = kalman.run(kernel, kalman.initial_states(kernel, 3), rows, UNIT)
    assert outputs.flag.tolist() == [0, flags.NON_FINITE, 0]


@pytest.mark.parametrize("seed", range(30))
def test_psd_knows_covariances(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 5))
    rank = int(rng.integers(0, n + 1))
    L = rng.normal(size=(n, rank)) * 10.0 ** rng.integers(-8, 8, (n, 1))
    M = L @ L.T
    packed = [np.array([M[i, j]]) for i in range(n) for j in range(i + 1)]
    assert columns.compute_lowest_pivot(packed) >= 0
    i = int(rng.integers(n))
    M[i, i] -= 1e-3 * M[i, i] + (1e-3 if M[i, i] == 0 else 0)
    if (
        np.linalg.eigvalsh(M / np.sqrt(np.outer(*[np.abs(M.diagonal()) + 1e-300] * 2)).clip(1e-300)).min()
        < -1e-6
    ):
        packed = [np.array([M[i, j]]) for i in range(n) for j in range(i + 1)]
        assert not columns.compute_lowest_pivot(packed) >= 0


def test_the_gradient_is_exact_with_columns():
    rng = np.random.default_rng(7)
    model = definition(rng)
    model["process"]["Q"] = random_covariance(rng, 2)
    model["observation"]["R"] = random_covariance(rng, 2)
    model["learn"] = {"parameters": ["Q", "R"]}
    learn = maximum_likelihood.build_linear_learner(model)
    rows = random_inputs(rng, model)
    theta = learn.start + 0.1 * rng.normal(size=6)
    _, gradient, used = learn.compute_gradient(theta, rows, 8, UNIT)
    assert used == len(rows.key)
    for i in range(6):
        values = []
        for step in (1e-3, -1e-3, 2e-3, -2e-3):
            moved = theta.copy()
            moved[i] += step
            values.append(learn.compute_gradient(moved, rows, 8, UNIT)[0])
        difference = (8 * (values[0] - values[1]) - (values[2] - values[3])) / 12e-3
        assert gradient[i] == pytest.approx(difference, rel=1e-6, abs=1e-6 * np.abs(gradient).max())


def test_smoothing_knows_each_rows_matrices():
    """Regression coefficients that never move: smoothed at every row, they are those of the last row."""
    rng = np.random.default_rng(8)
    model = definition(rng)
    model["process"] |= {"F": [[1, 0], [0, 1]], "Q": [[0, 0], [0, 0]], "offset": [0, "noise"]}
    del model["process"]["B"]
    model["observation"]["offset"] = ["push", "bias"]
    rows = random_inputs(rng, model)
    rows.u[2] = 1.0
    kernel = kalman.build(model)
    _, outputs, smoothed = smooth(kernel, kalman.initial_states(kernel, 8), rows, UNIT)
    for key in np.unique(rows.key):
        here = np.flatnonzero(rows.key == key)
        steps = np.arange(len(here)) - (len(here) - 1)  # the offset moves the second by 1 a row
        expected = outputs.mean[:, here[-1:]] + np.outer([0, 1], steps)
        np.testing.assert_allclose(smoothed.mean[:, here], expected, rtol=1e-9, atol=1e-9)


WRONG = [
    ("process.F", [[0.9, "c"], [0.0, 0.8]], "process.F[0][1]", "'c' is not a number and not a control"),
    ("process.Q", [["noise", 0.1], ["a", 2.0]], "process.Q", "not symmetric"),
    ("process.Q", [["noise", 0.1], [0.1, -2.0]], "process.Q[1][1]", "zero or more"),
    ("process.offset", [1.0], "process.offset", "2 numbers"),
    ("process.noise_scale", -1.0, "process.noise_scale", "zero or more"),
    ("observation.offset", ["c", 0.0], "observation.offset[0]", "'c' is not a number"),
    ("control", [*NAMES, "unused"], "process.B", "2 x 7"),
    ("learn", {"parameters": ["R"]}, "learn.parameters[0]", "R comes from a column"),
]


@pytest.mark.parametrize(("path", "value", "field", "problem"), WRONG)
def test_an_error_names_the_field(path, value, field, problem):
    model = copy.deepcopy(definition(np.random.default_rng(0)))
    *parents, last = path.split(".")
    place = model
    for parent in parents:
        place = place[parent]
    place[last] = value
    with pytest.raises(kalman.ModelError, match=problem) as error:
        kalman.build(model)
    assert error.value.field == field or error.value.field.startswith(field)


def test_a_control_that_nothing_uses_is_refused():
    model = definition(np.random.default_rng(0))
    model["control"] = [*NAMES, "unused"]
    del model["process"]["B"]
    model["process"]["offset"] = ["push", "bias"]
    with pytest.raises(kalman.ModelError, match="does not use it: unused"):
        kalman.build(model)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_covariance_of_columns_has_a_row_for_each_measurement(rows):
    with pytest.raises(kalman.ModelError) as error:
        columns.parse_covariance_cells("observation.R", [["a", "b"]] * rows, 2, ["a", "b"])
    assert (error.value.field, error.value.problem) == ("observation.R", f"2 x 2 is needed, found {rows} x 2")
