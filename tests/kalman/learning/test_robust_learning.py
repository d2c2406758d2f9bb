"""Learning under Student-t and Huber noise: the likelihood is that of the noise, so that outliers do not widen R."""

import numpy as np
import pytest
from scipy.optimize import minimize

import kalman
from kalman.learning import learners
from kalman.learning.groups import group_learning
from kalman.learning.key_fits import FitOutcome
from tests.kalman.learning.test_filter_learning import level
from tests.kalman.learning.test_group_learning import fit_all
from tests.kalman.learning.test_own_entries import rows_of
from tests.kalman.support.models import states_with
from tests.kalman.support.oracles import UNIT

R = 2.0
"""Scale of the noise that the rows are made with."""
STUDENT_T = {"student_t": {"degrees": 3.0}}
HUBER = {"huber": {"threshold": 1.345}}
BY_GROUP = {"scope": "group", "by": ["region"]}


def heavy(seed, keys, length, degrees, scale: float | np.ndarray = R, variance=0.05):
    """Random walks, measured with Student-t noise (keys, length); scale: one, or one of each key (keys, 1)."""
    rng = np.random.default_rng(seed)
    steps = np.sqrt(variance) * rng.normal(size=(keys, length))
    steps[:, 0] = 2.0 * rng.normal(size=keys)
    return np.cumsum(steps, axis=1) + np.sqrt(scale) * rng.standard_t(degrees, size=steps.shape)


def robust(section, scope: str | dict = "pooled", names=("variance", "R"), kind="linear", **changes):
    learn = {"parameters": list(names), **(scope if isinstance(scope, dict) else {"scope": scope})}
    return level(kind, learn, robust=section, **changes)


def pooled(learn, y):
    rows = rows_of(y)
    return learn.fit(lambda theta: learn.evaluate(theta, rows, len(y), UNIT), lambda: y, 100)


def of_filter(definition, values, y):
    """The log-likelihood of the filter itself with these values, summed over keys."""
    model = kalman.build({**definition, "learn": None}, values)
    states, _ = kalman.run(model, kalman.initial_states(model, len(y)), rows_of(y), UNIT)
    return float(states.log_likelihood.sum())


@pytest.mark.parametrize("degrees", [pytest.param(2.0, marks=pytest.mark.slow), 3.0])
def test_the_learned_scale_is_that_of_the_noise(degrees):
    """By standard errors from the truth; normal noise learns the outliers' mean square."""
    y = heavy(0, 10, 100, degrees)
    learn = learners.learnable(robust({"student_t": {"degrees": degrees}}))
    plain = learners.learnable(robust(None))
    found = pooled(learn, y)
    assert found.outcome == FitOutcome.CONVERGED and found.errors is not None
    away = learn.parameters(found.theta)["R"][0][0] - R
    assert abs(away) < 2.0 * found.errors["R"][0][0] < 0.4
    normal = pooled(plain, y)
    assert normal.errors is not None
    assert plain.parameters(normal.theta)["R"][0][0] > R + 5.0 * normal.errors["R"][0][0]


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [2.0, 3.0])
def test_the_scale_that_a_key_learns_is_that_of_its_noise(degrees):
    y = heavy(9, 20, 300, degrees)
    section = {"student_t": {"degrees": degrees}}
    of_keys = learners.learnable(robust(section, "key")).fit_keys(rows_of(y), 20, UNIT, None)
    assert (of_keys.outcome <= FitOutcome.AT_BOUND).all()
    score = (of_keys.parameters[1] - R) / of_keys.errors[1]
    assert abs(score.mean()) < 0.6 and 0.6 < score.std() < 1.5


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        (STUDENT_T, {}),
        pytest.param(STUDENT_T, {"initial": {"diffuse": True}}, marks=pytest.mark.slow),
        pytest.param(STUDENT_T, {"kind": "extended"}, marks=pytest.mark.slow),
        (HUBER, {}),
        (HUBER, {"form": "square_root"}),
        (HUBER, {"adaptive": {"R": 0.02}}),
    ],
    ids=lambda one: "-".join(one),
)
def test_it_ends_at_the_maximum_of_the_likelihood_of_the_filter(section, changes):
    """Against SciPy over the log-likelihoods that the filter itself writes, from the truth on."""
    y = heavy(1, 5, 60, 3.0, variance=0.3)
    y[1, 20:25] = np.nan
    definition = robust(section, **changes)
    learn = learners.learnable(definition)
    found = pooled(learn, y)
    assert found.outcome == FitOutcome.CONVERGED
    own = {**definition, "adaptive": None}

    def negative(logs):
        variance, noise = np.exp(logs).tolist()
        return -of_filter(own, {"variance": variance, "R": [[noise]]}, y)

    values = learn.parameters(found.theta)
    assert of_filter(own, values, y) == pytest.approx(found.log_likelihood, rel=1e-10)
    best = minimize(negative, np.log([0.3, R]), method="Nelder-Mead", options={"xatol": 1e-4, "fatol": 1e-6})
    assert found.log_likelihood == pytest.approx(-best.fun, abs=2e-3)


@pytest.mark.parametrize("section", [STUDENT_T, HUBER])
def test_a_key_filters_with_what_it_learned(section):
    """Its likelihood is that of the model that is learned by key, and its weighed NIS is 1."""
    y = heavy(2, 4, 200, 3.0, np.array([[0.5], [2.0], [8.0], [1e6]]))
    definition = robust({**section, "gate": {"threshold": 1e9}}, "key")
    found = learners.learnable(definition).fit_keys(rows_of(y), 4, UNIT, None)
    assert (found.outcome <= FitOutcome.AT_BOUND).all()
    model = kalman.build(definition)
    after, _ = kalman.run(model, states_with(model, found.parameters), rows_of(y), UNIT)
    np.testing.assert_allclose(after.log_likelihood, found.log_likelihood, rtol=1e-10)
    assert (np.diff(found.parameters[1]) > 0.0).all()
    np.testing.assert_allclose(found.nis, 1.0, atol=0.05)


def test_groups_learn_their_own_scale_and_the_start():
    group = np.repeat([0, 1], 10)
    y = heavy(3, 20, 60, 3.0, np.where(group == 0, 0.5, 8.0)[:, None])
    names = ["variance", "R", "initial.mean", "initial.covariance"]
    learn = learners.learnable(robust(STUDENT_T, BY_GROUP, names))
    found, _ = fit_all(group_learning(learn), rows_of(y), group, pooled(learn, y), 2)
    assert all(outcome in (FitOutcome.CONVERGED, FitOutcome.TOO_FEW_ROWS) for outcome in found.outcome)
    for g, truth in enumerate((0.5, 8.0)):
        errors = found.errors[g]
        assert errors is not None
        assert abs(found.parameters[g]["R"][0][0] - truth) < 3.0 * errors["R"][0][0] < 0.6 * truth


@pytest.mark.parametrize("section", [STUDENT_T, pytest.param(HUBER, marks=pytest.mark.slow)])
def test_several_measurements_and_entries_of_matrices(section):
    """Two measurements with one weight, or two; F is learned too; the gradient vanishes at the end."""
    rng = np.random.default_rng(4)
    x = np.zeros((6, 80))
    for t in range(1, 80):
        x[:, t] = 0.8 * x[:, t - 1] + rng.normal(size=6)
    y = x.ravel() + rng.standard_t(3, size=(2, 480)) * np.array([[0.7], [1.5]])
    rows = rows_of(x)._replace(y=y)
    for section in (STUDENT_T, HUBER):
        definition = robust(
            section,
            names=("F[0][0]", "Q", "R"),
            measurement=["a", "b"],
            process={"kind": "explicit", "F": [[0.5]], "Q": [[0.5]]},
            observation={"H": [[1.0], [1.0]], "R": [[1.0, 0.1], [0.1, 1.0]]},
        )
        learn = learners.learnable(definition)
        found = learn.fit(lambda theta, of=learn: of.evaluate(theta, rows, 6, UNIT), lambda: y, 100)
        assert found.outcome == FitOutcome.CONVERGED
        _, vector, _ = learn.evaluate(found.theta, rows, 6, UNIT)
        assert np.abs(vector[: len(found.theta)]).max() < 0.05
        values = learn.parameters(found.theta)
        assert 0.6 < values["F[0][0]"] < 0.9 and 0.2 < values["R"][0][0] < 1.0 < values["R"][1][1] < 4.5


def test_a_gate_alone_changes_no_learning_and_em_has_no_steps_for_heavy_tails():
    y = heavy(5, 3, 40, 3.0)
    gated, plain = (pooled(learners.learnable(robust(a)), y) for a in ({"gate": {"threshold": 9.0}}, None))
    assert gated.theta.tolist() == plain.theta.tolist()
    ends = []
    for method in ("em", "mle"):
        definition = robust(STUDENT_T)
        ends.append(
            pooled(learners.learnable({**definition, "learn": {**definition["learn"], "method": method}}), y)
        )
    assert ends[0].theta.tolist() == ends[1].theta.tolist()
