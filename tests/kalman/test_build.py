"""From definition to filter: what is wrong is named by field, with a remedy."""

import copy
import pickle

import numpy as np
import pytest

import kalman
from kalman.models import checks

GOOD = {
    "filter": "linear",
    "states": ["level", "slope"],
    "measurement": ["y"],
    "control": [],
    "process": {"kind": "local_linear_trend", "level_variance": 1.0, "slope_variance": 0.1},
    "observation": {"R": [[2.0]]},
    "initial": {"mean": [0.0, 0.0], "covariance": [[1.0, 0.0], [0.0, 1.0]]},
    "learn": {"parameters": ["level_variance", "R"], "scope": "pooled"},
}
EXPLICIT = {"kind": "explicit", "F": [[1, 1], [0, 1]], "Q": [[1, 0], [0, 1]]}

WRONG = [
    ("filter", "particle", "filter", "not a filter"),
    ("states", [], "states", "not a list of names"),
    ("states", ["level"], "states", "the process has 2"),
    ("states", ["a", "a"], "states[1]", "twice"),
    ("measurement", "y", "measurement", "not a list"),
    ("process", None, "process.kind", "missing"),
    ("process", {"kind": "brownian"}, "process.kind", "not a process structure"),
    ("process.level_variance", -1.0, "process.level_variance", "zero or more"),
    ("process.level_variance", "much", "process.level_variance", "not a number"),
    ("process.level_variance", float("nan"), "process.level_variance", "not finite"),
    ("process.drift", 1.0, "process.drift", "not known"),
    ("process", {"kind": "local_linear_trend", "level_variance": 1.0}, "process.slope_variance", "missing"),
    ("process", EXPLICIT, "observation.H", "does not tell which"),
    ("process", {**EXPLICIT, "F": [[1, 1]]}, "process.F", "1 x 1 is needed"),
    ("process", {**EXPLICIT, "F": [[1, "x"], [0, 1]]}, "process.F[0][1]", "not a number"),
    ("process", {**EXPLICIT, "Q": [[1, 0.5], [0, 1]]}, "process.Q", "not symmetric"),
    ("process", {**EXPLICIT, "Q": [[1, 2], [2, 1]]}, "process.Q[0][1]", "too large for variances of 1 and 1"),
    ("process", {**EXPLICIT, "Q": [[0, 1], [1, 1]]}, "process.Q[0][1]", "too large"),
    ("process", {**EXPLICIT, "B": [[1], [1]]}, "process.B", "no control"),
    (
        "process",
        {"kind": "constant_velocity", "acceleration_variance": 1.0, "dimensions": 4},
        "process.dimensions",
        "1 to 3",
    ),
    ("process", {"kind": "sum", "parts": []}, "process.parts", "not a list"),
    ("process", {"kind": "sum", "parts": [{"kind": "random_walk"}]}, "process.parts[0].variance", "missing"),
    (
        "process",
        {"kind": "sum", "parts": [{"kind": "random_walk", "variance": 1.0}] * 2},
        "process.parts[1].name",
        "two parts",
    ),
    ("control", ["u"], "control", "does not use it"),
    ("observation", None, "observation", "not a mapping"),
    ("observation", {}, "observation.R", "missing"),
    ("observation.R", [[-1.0]], "observation.R[0][0]", "-1 is a variance below zero"),
    ("observation.R", [[1.0, 0.0], [0.0, 1.0]], "observation.R", "1 x 1"),
    ("observation.H", [[1.0]], "observation.H", "1 x 2"),
    ("initial", None, "initial", "not a mapping"),
    ("initial", {}, "initial.mean", "missing"),
    ("initial.mean", [0.0], "initial.mean", "2 numbers"),
    ("initial.covariance", [[1, 0], [0, -1]], "initial.covariance[1][1]", "-1 is a variance below zero"),
    ("initial", {"diffuse": "yes"}, "initial.diffuse", "not true or false"),
    ("initial", {"diffuse": True, "mean": [0.0, 0.0]}, "initial.covariance", "missing"),
    ("initial", {"diffuse": True, "covariance": [[0.0] * 2] * 2}, "initial.mean", "missing"),
    ("initial.diffuse", [True, False], "initial.covariance[0]", "diffuse and has a covariance"),
    ("learn.parameters", ["Q"], "learn.parameters[0]", "no parameter"),
    ("learn.scope", "tribe", "learn.scope", "not known"),
]


@pytest.mark.parametrize(("path", "value", "field", "problem"), WRONG)
def test_an_error_names_the_field(path, value, field, problem):
    definition = copy.deepcopy(GOOD)
    *parents, last = path.split(".")
    place = definition
    for parent in parents:
        place = place[parent]
    place[last] = value
    with pytest.raises(kalman.ModelError, match=problem) as error:
        kalman.build(definition)
    assert error.value.field == field or error.value.field.startswith(field + "[")
    assert error.value.remedy and error.value.remedy in str(error.value)
    again = pickle.loads(pickle.dumps(error.value))
    assert (again.field, str(again)) == (error.value.field, str(error.value))


def test_learned_parameters_take_the_place_of_the_written():
    model = kalman.build(GOOD, {"level_variance": 4.0, "R": [[5.0]]})
    values = {p.name: p.value for p in model.parameters}  # type: ignore[attr-defined]
    assert values == {"level_variance": (4.0,), "slope_variance": (0.1,), "R": (5.0,)}
    with pytest.raises(kalman.ModelError, match="no such parameter"):
        kalman.build(GOOD, {"Q": [[1.0]]})
    with pytest.raises(kalman.ModelError, match="zero or more"):
        kalman.build(GOOD, {"level_variance": -4.0})


def test_layout():
    model = kalman.build({**GOOD, "initial": {"diffuse": True}, "learn": {**GOOD["learn"], "scope": "key"}})
    assert dict(model.fields) == {"mean": (2,), "covariance": (3,), "diffuse": (4,), "parameters": (2,)}
    assert model.size == 11 and model.outputs == {} and model.states == ("level", "slope")
    assert (model.measurements, model.controls) == (1, 0)
    np.testing.assert_array_equal(model.initial(2)[:, 1], [0, 0, 0, 0, 0, 1, 0, 0, 1, 1.0, 2.0])


def test_kinds_are_listed():
    assert "linear" in kalman.FILTERS
    assert {
        "random_walk",
        "local_linear_trend",
        "constant_velocity",
        "ornstein_uhlenbeck",
        "explicit",
        "sum",
    } <= set(kalman.STRUCTURES)


def test_default_measurements():
    def H(process, states, measurement):
        n = len(states)
        initial = {"mean": [0.0] * n, "covariance": np.eye(n).tolist()}
        R = np.eye(len(measurement)).tolist()
        return kalman.build(
            {
                "states": states,
                "measurement": measurement,
                "process": process,
                "observation": {"R": R},
                "initial": initial,
            }
        ).H  # type: ignore[attr-defined]

    velocity = {"kind": "constant_velocity", "acceleration_variance": 1.0, "dimensions": 2}
    assert H(velocity, ["x", "vx", "y", "vy"], ["x", "y"]) == ((1, 0, 0, 0), (0, 0, 1, 0))
    drawn = {"kind": "ornstein_uhlenbeck", "rate": 1.0, "variance": 1.0}
    trend = {"kind": "random_walk", "variance": 1.0}
    assert H({"kind": "sum", "parts": [trend, drawn]}, ["level", "cycle"], ["y"]) == ((1, 1),)


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([2, 2, 2], "2 x 2 is needed, found 3 x 2"),
        ([1, 2], "2 x 2 is needed, found 2 rows of different lengths, 1, 2"),
        ([1, *[2] * 7], "2 x 2 is needed, found 8 rows of different lengths, 1, 2, 2, 2, 2, 2, 2, 2"),
        ([1, *[2] * 8], "2 x 2 is needed, found 9 rows of different lengths, 1, 2, 2, 2, 2, 2, 2, 2, ..."),
    ],
)
def test_a_matrix_of_another_size_is_told_by_its_rows(lengths, said):
    """All lengths are said of up to eight rows; of more rows the first eight."""
    with pytest.raises(kalman.ModelError) as error:
        checks.parse_matrix("process.F", [[1.0] * length for length in lengths], 2, 2)
    assert (error.value.field, error.value.problem) == ("process.F", said)
    assert "a list of rows, 2 x 2, such as [[1.0, 0.0], [0.0, 1.0]]" in error.value.remedy


@pytest.mark.parametrize(
    ("rows", "columns", "written"),
    [
        (1, 1, "[[1.0]]"),
        (4, 2, "[[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]"),
        (5, 2, "[[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0], ...]"),
        (1, 4, "[[1.0, 0.0, 0.0, 0.0]]"),
        (2, 5, "[[1.0, 0.0, 0.0, 0.0, ...], [0.0, 1.0, 0.0, 0.0, ...]]"),
    ],
)
def test_an_example_of_a_matrix_has_its_size_up_to_four(rows, columns, written):
    assert checks.format_example(rows, columns) == written
