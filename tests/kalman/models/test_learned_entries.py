"""Learning entries of F and H and the distribution in which keys begin."""

import numpy as np
import pytest

import kalman
from kalman.learning import maximum_likelihood
from tests.kalman.learning.test_learning import level
from tests.kalman.support.models import random_definition, random_rows
from tests.kalman.support.oracles import UNIT

WISHES = [
    "F[0][1]",
    {"name": "F[1][1]", "bounds": [-2, 2]},
    "H[0][1]",
    {"name": "H[1][0]", "bounds": [None, 9.0]},
    "initial.mean",
    "initial.covariance",
    {"name": "Q", "form": "diagonal"},
    "R",
]


def fitted(learn, rows, keys):
    return learn.fit(lambda theta: learn.evaluate(theta, rows, keys, UNIT), lambda: np.empty((1, 0)), 100)


@pytest.mark.parametrize("controls", [0, 2])
def test_gradient_is_exact(controls):
    """Against a fourth-order difference: missing components, correlated noise, inputs; and the filter's likelihood."""
    rng = np.random.default_rng(controls)
    definition = random_definition(rng, "explicit", 2, 2, controls)
    definition["process"]["F"][1][1] = 0.5
    definition["learn"] = {"parameters": WISHES}
    learn = maximum_likelihood.build_linear_learner(definition)
    rows = random_rows(rng, definition, 8, 9)
    theta = learn.start + 0.2 * rng.normal(size=len(learn.start))
    assert len(theta) == 4 + 2 + 3 + 2 + 3
    value, vector, used = learn.evaluate(theta, rows, 8, UNIT)
    assert used == len(rows.key)
    found = learn.parameters(theta)
    assert found["Q"][0][1] == 0.0 and abs(found["F[1][1]"]) < 2
    model = kalman.build(definition, found)
    states, _ = kalman.run(model, kalman.initial_states(model, 8), rows, UNIT)
    assert value == pytest.approx(states.log_likelihood.sum(), rel=1e-12)

    def along(i, step):
        moved = theta.copy()
        moved[i] += step
        return learn.evaluate(moved, rows, 8, UNIT)[0]

    h = 1e-3
    for i in range(len(theta)):
        difference = (8 * (along(i, h) - along(i, -h)) - (along(i, 2 * h) - along(i, -2 * h))) / (12 * h)
        assert vector[i] == pytest.approx(difference, rel=1e-6, abs=1e-6 * np.abs(vector[:14]).max())


def test_learned_values_are_written_into_the_definition():
    definition = random_definition(np.random.default_rng(1), "explicit", 2, 1)
    learned = {"F[0][1]": 0.25, "H[0][0]": 3.0, "initial.mean": [1.0, 2.0]}
    learned["initial.covariance"] = [[4.0, 1.0], [1.0, 5.0]]  # type: ignore[assignment]
    model = kalman.build(definition, learned)
    assert definition["process"]["F"][0][1] != 0.25, "the caller's stays as it is"
    state = model.initial(1)[:, 0]
    assert state[:5].tolist() == [1.0, 2.0, 4.0, 1.0, 5.0]
    definition["process"]["F"][0][1] = 0.25
    definition["observation"]["H"][0][0] = 3.0
    definition["initial"] = {"mean": [1.0, 2.0], "covariance": [[4.0, 1.0], [1.0, 5.0]]}
    assert kalman.build(definition) == model


def test_autoregression_is_found_with_its_error():
    """The error of an autoregression's coefficient is sqrt((1 - F^2) / N), with hardly any measurement noise."""
    rng = np.random.default_rng(5)
    keys, length = 20, 200
    x = np.zeros((keys, length))
    for t in range(1, length):
        x[:, t] = 0.8 * x[:, t - 1] + rng.normal(size=keys)
    definition = level({"parameters": [{"name": "F[0][0]", "bounds": [0.0, 1.0]}, "Q"]}, 1.0, 1e-8) | {
        "process": {"kind": "explicit", "F": [[0.3]], "Q": [[3.0]]},
        "observation": {"H": [[1.0]], "R": [[1e-8]]},
        "initial": {"mean": [0.0], "covariance": [[1e-8]]},
    }
    key = np.repeat(np.arange(keys), length)
    rows = kalman.SortedRows(key, np.tile(np.arange(length), keys), x.reshape(1, -1), np.empty((0, len(key))))
    learn = maximum_likelihood.build_linear_learner(definition)
    found = fitted(learn, rows, keys)
    least_squares = (x[:, 1:] * x[:, :-1]).sum() / (x[:, :-1] ** 2).sum()
    assert learn.parameters(found.theta)["F[0][0]"] == pytest.approx(least_squares, rel=1e-5)
    errors = dict(found.errors or {})
    assert errors["F[0][0]"] == pytest.approx(np.sqrt((1 - 0.64) / x.size), rel=0.1)


def population(rng, keys, length):
    """Levels that differ from key to key, around 50."""
    x = 50.0 + 7.0 * rng.normal(size=(keys, 1)) + np.cumsum(0.3 * rng.normal(size=(keys, length)), axis=1)
    y = x + rng.normal(size=x.shape)
    key = np.repeat(np.arange(keys), length)
    time = np.tile(np.arange(length) * 1_000_000, keys)
    return kalman.SortedRows(key, time, y.reshape(1, -1), np.empty((0, len(key))))


def test_new_keys_are_predicted_better_from_the_populations_prior():
    rng = np.random.default_rng(6)
    written = level({"parameters": ["variance", "R"]}, 0.5, 0.5) | {
        "initial": {"mean": [0.0], "covariance": [[1e4]]}
    }
    asked = {**written, "learn": {"parameters": ["variance", "R"], "prior": True}}
    seen, unseen = population(rng, 200, 12), population(rng, 100, 3)
    scores = {}
    for name, definition in (("written", written), ("prior", asked)):
        learn = maximum_likelihood.build_linear_learner(definition)
        parameters = learn.parameters(fitted(learn, seen, 200).theta)
        model = kalman.build(definition, parameters)
        states, _ = kalman.run(model, kalman.initial_states(model, 100), unseen, UNIT)
        scores[name] = states.log_likelihood.mean()
        if name == "prior":
            assert parameters["initial.mean"][0] == pytest.approx(50.0, abs=4 * 7 / np.sqrt(200))
            assert parameters["initial.covariance"][0][0] == pytest.approx(49.0, rel=4 * np.sqrt(2 / 200))
    assert scores["prior"] > scores["written"] + 2.0


def test_a_full_matrix_may_begin_with_zeros():
    definition = random_definition(np.random.default_rng(2), "explicit", 2, 2)
    definition["process"]["Q"] = [[1.0, 0.0], [0.0, 4.0]]
    definition["learn"] = {"parameters": [{"name": "Q", "form": "full"}]}
    learn = maximum_likelihood.build_linear_learner(definition)
    assert len(learn.start) == 3
    np.testing.assert_allclose(learn.parameters(learn.start)["Q"], [[1.0, 0.02], [0.02, 4.0]], rtol=1e-12)


WRONG = [
    (["F[2][0]"], {}, "learn.parameters[0]", "no entry"),
    (["F[0][0]", "F[0][0]"], {}, "learn.parameters[1]", "named twice"),
    ([{"name": "Q", "bounds": [0, 1]}], {}, "learn.parameters[0].bounds", "not one number"),
    ([{"name": "F[0][0]", "form": "full"}], {}, "learn.parameters[0].form", "not a covariance"),
    ([{"name": "F[0][0]", "bounds": [90, 91]}], {}, "learn.parameters[0].bounds", "not between"),
    ([{"name": "F[0][0]", "bounds": [2, 1]}], {}, "learn.parameters[0].bounds", "leaves nothing out"),
    ([{"name": "F[0][0]", "bound": [2, 1]}], {}, "learn.parameters[0].bound", "bound"),
    ([{"name": "Q", "form": "round"}], {}, "learn.parameters[0].form", "not known"),
    (["initial.mean"], {"initial": {"diffuse": True}}, "initial.diffuse", "to be learned"),
    (
        ["F[0][0]"],
        {"process": {"kind": "constant_velocity", "acceleration_variance": 1.0}},
        "learn.parameters[0]",
        "no process.F",
    ),
]


@pytest.mark.parametrize(("parameters", "changes", "field", "problem"), WRONG)
def test_an_invalid_learn_request_is_refused(parameters, changes, field, problem):
    definition = random_definition(np.random.default_rng(1), "explicit", 2, 1) | changes
    definition["learn"] = {"parameters": parameters}
    with pytest.raises(kalman.ModelError, match=problem) as error:
        maximum_likelihood.build_linear_learner(definition)
    assert error.value.field == field


def test_each_key_cannot_have_its_own_beginning():
    definition = level({"parameters": ["R", "initial.mean"], "scope": "key"}) | {
        "initial": {"mean": [0.0], "covariance": [[1.0]]}
    }
    with pytest.raises(kalman.ModelError, match="a key begins once"):
        maximum_likelihood.build_linear_learner(definition)
