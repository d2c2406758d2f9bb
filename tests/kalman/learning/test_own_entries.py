"""Entries of F, H and A that groups and keys learn for themselves, by scoring and by EM."""

import numpy as np
import pytest
from scipy.linalg import expm
from scipy.optimize import minimize
from scipy.stats import multivariate_normal
from statsmodels.tools.numdiff import approx_hess3
from statsmodels.tsa.statespace.mlemodel import MLEModel

import kalman
from kalman.learning import learners, maximum_likelihood
from kalman.learning.groups import group_learning
from kalman.learning.key_fits import FitOutcome
from kalman.learning.key_rows import sort_by_rounds
from kalman.learning.keys.values import evaluate
from kalman.learning.score import score
from kalman.learning.tangents import list_learned_entries
from kalman.models.groups import begin_states
from tests.kalman.learning.test_group_learning import fit_all, of_group
from tests.kalman.support.models import random_definition, random_rows, same, states_with
from tests.kalman.support.oracles import UNIT

BY_KEY = {"scope": "key"}
METHODS = ["mle", pytest.param("em", marks=pytest.mark.slow)]
BY_GROUP = {"scope": "group", "by": ["region"]}
ENTRIES = {"explicit": ["F[0][1]", "F[1][1]"], "continuous": ["A[0][1]", "A[2][0]"]}
NOISE = {"explicit": "Q", "continuous": "diffusion"}


@pytest.mark.parametrize("nilpotent", [False, True])
def test_gradient_by_entries_of_a_process_in_continuous_time_is_exact(nilpotent):
    """Against a fourth-order difference of the filter's own likelihood; with an offset, of which c is the integral."""
    rng = np.random.default_rng(3)
    definition = random_definition(rng, "continuous", 3, 2)
    definition["learn"] = {"parameters": ["A[0][1]", "A[1][2]", "diffusion", "R", "H[0][1]"]}
    if nilpotent:
        definition["process"]["A"] = [[0.0, 0.7, 0.0], [0.0, 0.0, -0.4], [0.0, 0.0, 0.0]]
    learn = maximum_likelihood.build_linear_learner(definition)
    rows = random_rows(rng, definition, 6, 8)
    theta = learn.start + 0.1 * rng.normal(size=len(learn.start))
    value, vector, _ = learn.evaluate(theta, rows, 6, UNIT)
    model = kalman.build(definition, learn.parameters(theta))
    states, _ = kalman.run(model, kalman.initial_states(model, 6), rows, UNIT)
    assert value == pytest.approx(states.log_likelihood.sum(), rel=1e-11)
    h, p = 1e-3, len(theta)
    for i, step in enumerate(h * np.eye(p)):
        one, two = (
            learn.evaluate(theta + k * step, rows, 6, UNIT)[0]
            - learn.evaluate(theta - k * step, rows, 6, UNIT)[0]
            for k in (1, 2)
        )
        assert vector[i] == pytest.approx(
            (8 * one - two) / (12 * h), rel=1e-6, abs=1e-6 * np.abs(vector[:p]).max()
        )


@pytest.mark.parametrize("diffuse", [False, True])
@pytest.mark.parametrize("kind", ["explicit", "continuous"])
def test_value_and_gradient_of_keys_are_those_of_the_filter_and_its_adjoint(kind, diffuse):
    """The pass that carries derivatives, each key at entries of its own, against the adjoint."""
    rng = np.random.default_rng(len(kind))
    definition = random_definition(rng, kind, 2, 2)
    names = [*ENTRIES[kind], "H[1][0]", NOISE[kind], "R"]
    definition["learn"] = {"parameters": names, "scope": "key"}
    if diffuse:
        definition["initial"] = {"diffuse": True}
    learn = maximum_likelihood.build_linear_learner(definition)
    rows = random_rows(rng, definition, 7, 9)
    theta = learn.start[:, None] + 0.1 * rng.normal(size=(len(learn.start), 7))
    taken = sort_by_rounds(rows, UNIT)
    entries = np.array([np.broadcast_to(a, 7) for a in learn.entries(theta)])
    found = evaluate(list_learned_entries(learn.each), taken, entries[:, taken.number])
    expected = score(learn.each, learn.own_names, rows, 7, UNIT, learn.begun(theta, 7))
    np.testing.assert_allclose(
        found.log_likelihood, expected.log_likelihood[taken.number], rtol=1e-8, atol=1e-8
    )
    size = np.abs(expected.gradient).max()
    np.testing.assert_allclose(
        found.gradient, expected.gradient[:, taken.number], rtol=1e-6, atol=1e-8 * size
    )


class Autoregression(MLEModel):
    """y = x + noise, x an AR(1) that begins at N(0, 4); parameters F, Q, R."""

    start_params = [0.3, 1.0, 1.0]  # type: ignore[assignment] # noqa: RUF012

    def __init__(self, y):
        super().__init__(y, k_states=1, initialization="known", constant=[0.0], stationary_cov=[[4.0]])
        self["design", 0, 0] = self["selection", 0, 0] = 1.0

    def update(self, params, **kwargs):
        params = super().update(params, **kwargs)
        for name, value in zip(("transition", "state_cov", "obs_cov"), params, strict=True):  # type: ignore[arg-type]
            self[name, 0, 0] = value


AR = {
    "filter": "linear",
    "states": ["x"],
    "measurement": ["y"],
    "process": {"kind": "explicit", "F": [[0.3]], "Q": [[1.0]]},
    "observation": {"H": [[1.0]], "R": [[1.0]]},
    "initial": {"mean": [0.0], "covariance": [[4.0]]},
}
FREE = ["F[0][0]", "Q", "R"]


def autoregressions(rng, F, length):
    x = np.zeros((len(F), length))
    x[:, 0] = 2.0 * rng.normal(size=len(F))
    for t in range(1, length):
        x[:, t] = F * x[:, t - 1] + rng.normal(size=len(F))
    return x + 0.7 * rng.normal(size=x.shape)


def rows_of(y):
    key = np.repeat(np.arange(len(y)), y.shape[1])
    time = np.tile(np.arange(y.shape[1]) * 1_000_000, len(y))
    return kalman.SortedRows(key, time, y.reshape(1, -1), np.empty((0, len(key))))


def best_of(y):
    """The maximum over positive variances, from several starts, and standard errors by numerical second derivatives."""
    model = Autoregression(y)

    def negative(free):
        return -model.loglike([free[0], *np.exp(free[1:])])

    ends = [
        minimize(negative, [F, *np.log(variances)], method="BFGS", options={"gtol": 1e-7})
        for F, variances in ((0.3, (1.0, 1.0)), (0.9, (0.3, 2.0)), (-0.5, (2.0, 0.3)), (0.7, (1.0, 0.1)))
    ]
    best = min(ends, key=lambda end: end.fun)
    point = np.array([best.x[0], *np.exp(best.x[1:])])
    hessian = approx_hess3(point, lambda params: -model.loglike(params))
    return -best.fun, point, hessian


@pytest.mark.parametrize("method", METHODS)
def test_each_key_finds_its_own_coefficient(method):
    """Against statsmodels: the log-likelihood of each key's maximum, and errors that go with the curvature there."""
    rng = np.random.default_rng(8)
    y = autoregressions(rng, np.array([-0.6, 0.0, 0.5, 0.7, 0.9, 0.98]), 100)
    learn = learners.learnable({**AR, "learn": {"parameters": FREE, "method": method, **BY_KEY}})
    found = learn.fit_keys(rows_of(y), len(y), UNIT, None)
    sure = 0
    for k, one in enumerate(y):
        best, point, hessian = best_of(one)
        assert found.log_likelihood[k] == pytest.approx(best, abs=0.01) or found.log_likelihood[k] > best
        if found.outcome[k] == FitOutcome.CONVERGED and abs(found.log_likelihood[k] - best) < 1e-4:
            np.testing.assert_allclose(found.parameters[:, k], point[[1, 0, 2]], rtol=5e-3, atol=5e-3)
            if abs(point[0]) > 0.6:  # else the information that was observed is far from the expected one
                errors = np.sqrt(np.diag(np.linalg.inv(hessian)))[[1, 0, 2]]
                np.testing.assert_allclose(found.errors[:, k], errors, rtol=0.45)
                sure += 1
    assert sure >= 2
    assert learn.places == {"Q": [[0.0]], "F[0][0]": 1.0, "R": [[2.0]]}
    alone = learn.fit_keys(rows_of(y[3:4]), 1, UNIT, None)
    same(found.parameters[:, 3:4], alone.parameters)


def test_a_key_filters_with_what_it_learned():
    rng = np.random.default_rng(9)
    y = autoregressions(rng, np.array([0.5, 0.9]), 200)
    definition = {**AR, "learn": {"parameters": FREE, **BY_KEY}}
    found = learners.learnable(definition).fit_keys(rows_of(y), 2, UNIT, None)
    model = kalman.build(definition)
    after, _ = kalman.run(model, states_with(model, found.parameters), rows_of(y), UNIT)
    np.testing.assert_allclose(after.log_likelihood, found.log_likelihood, rtol=1e-11)
    for form in ("square_root", "information"):
        other = kalman.build({**definition, "form": form})
        ended, _ = kalman.run(other, states_with(other, found.parameters), rows_of(y), UNIT)
        np.testing.assert_allclose(ended.log_likelihood, after.log_likelihood, rtol=1e-9)


def test_few_rows_lean_on_the_population_of_coefficients():
    rng = np.random.default_rng(10)
    F = 0.8 + 0.05 * rng.normal(size=120)
    learn = maximum_likelihood.build_linear_learner({**AR, "learn": {"parameters": FREE, **BY_KEY}})
    population = learn.population([learn.fit_keys(rows_of(autoregressions(rng, F, 250)), 120, UNIT, None)])
    assert population.mean[1] == pytest.approx(0.8, abs=0.03)
    few = autoregressions(rng, F[:60], 15)
    alone, leaning = (learn.fit_keys(rows_of(few), 60, UNIT, one) for one in (None, population))
    error = [np.sqrt(np.mean((fits.parameters[1] - F[:60]) ** 2)) for fits in (alone, leaning)]
    assert error[1] < 0.1 < error[0]
    assert (leaning.own < 0.9).all() and (leaning.outcome == FitOutcome.TOO_FEW_ROWS).sum() > 30


def brute_force(y, times, A, D, R):
    """The log density of all measurements of one oscillator at once: their joint covariance, from an exact start."""
    n = len(times)
    lags = [expm(np.array([[0.0, 1.0], A]) * (b - a)) for a, b in zip(times[:-1], times[1:], strict=True)]
    P = np.eye(2)
    moments = [P]
    for a, b, F in zip(times[:-1], times[1:], lags, strict=True):
        grid = np.array([[0.0, 1.0], A])
        block = np.block([[-grid, np.diag([0.0, D])], [np.zeros((2, 2)), grid.T]]) * (b - a)
        both = expm(block)  # Van Loan (1978)
        P = F @ P @ F.T + both[2:, 2:].T @ both[:2, 2:]
        moments.append(P)
    cov = np.zeros((n, n))
    for i in range(n):
        cross = moments[i]
        for j in range(i, n):
            cov[i, j] = cov[j, i] = cross[0, 0]
            cross = cross @ lags[j].T if j < n - 1 else cross
    return multivariate_normal(np.zeros(n), cov + R * np.eye(n)).logpdf(y)


@pytest.mark.slow
def test_each_key_finds_the_matrix_of_its_own_oscillator():
    """Stiffness and damping of A in continuous time, at irregular times, against a joint Gaussian and SciPy."""
    rng = np.random.default_rng(12)
    definition = {
        "filter": "linear",
        "states": ["place", "speed"],
        "measurement": ["y"],
        "process": {
            "kind": "continuous",
            "A": [[0.0, 1.0], [-1.0, -0.3]],
            "diffusion": [[0.0, 0.0], [0.0, 0.5]],
        },
        "observation": {"H": [[1.0, 0.0]], "R": [[0.1]]},
        "initial": {"mean": [0.0, 0.0], "covariance": [[1.0, 0.0], [0.0, 1.0]]},
        "learn": {"parameters": ["A[1][0]", "A[1][1]", "diffusion", "R"], **BY_KEY},
    }
    keys, length, truth = 3, 80, [(-1.5, -0.2), (-0.6, -0.4), (-1.0, -0.1)]
    times, y = [], []
    for stiff, damp in truth:
        t = np.cumsum(rng.choice([0.2, 0.5, 1.0], length))
        x, seen = rng.normal(size=2), []
        for a, b in zip([t[0], *t[:-1]], t, strict=True):
            steps = 40
            for _ in range(steps if b > a else 0):
                h = (b - a) / steps
                x = x + h * np.array([x[1], stiff * x[0] + damp * x[1]])
                x[1] += np.sqrt(0.4 * h) * rng.normal()
            seen.append(x[0] + 0.2 * rng.normal())
        times.append(t)
        y.append(np.array(seen))
    rows = kalman.SortedRows(
        np.repeat(np.arange(keys), length),
        np.concatenate([np.round(1e6 * t) for t in times]).astype(np.int64),
        np.concatenate(y)[None],
        np.empty((0, keys * length)),
    )
    found = learners.learnable(definition).fit_keys(rows, keys, UNIT, None)
    for k in range(keys):
        D, stiff, damp, R = found.parameters[2, k], *found.parameters[3:, k]
        value = brute_force(y[k], times[k], (stiff, damp), D, R)
        assert found.log_likelihood[k] == pytest.approx(value, rel=1e-6, abs=1e-5)
        if k:
            continue
        end = minimize(
            lambda free, k=k: -brute_force(y[k], times[k], free[:2], np.exp(free[2]), np.exp(free[3])),
            [-1.0, -0.3, np.log(0.5), np.log(0.1)],
            method="BFGS",
            options={"gtol": 1e-3, "maxiter": 25},
        )
        assert found.log_likelihood[k] >= -end.fun - 1e-3
    assert (found.outcome == FitOutcome.CONVERGED).sum() >= 2


@pytest.mark.parametrize("method", METHODS)
def test_each_group_learns_its_own_coefficient(method):
    rng = np.random.default_rng(11)
    group = rng.permutation(np.repeat([0, 1, 2], 8))
    y = autoregressions(rng, np.array([0.2, 0.7, 0.95])[group], 80)
    rows = rows_of(y)
    definition = {**AR, "learn": {"parameters": FREE, "method": method, **BY_GROUP}}
    learn = learners.learnable(definition)
    pooled = learn.fit(lambda theta: learn.evaluate(theta, rows, 24, UNIT), lambda: rows.y, 100)
    assert pooled.errors is not None and 0.0 < pooled.errors["F[0][0]"] < 0.1
    found, asked = fit_all(group_learning(learn), rows, group, pooled, 3)
    assert found.converged.all() and len(asked) < 60
    F = np.array([one["F[0][0]"] for one in found.parameters])
    np.testing.assert_allclose(F, [0.2, 0.7, 0.95], atol=0.25)
    model = learners.learnable({**AR, "learn": {"parameters": FREE, **BY_GROUP}})
    for g in range(3):  # where no step of the group's own posterior leads further
        alone = of_group(rows, group, g)
        _, gradient, _ = model.compute_gradient(found.theta[:, g], alone, 8, UNIT)  # type: ignore[attr-defined]
        drawn = found.precision @ (found.theta[:, g] - pooled.theta)
        np.testing.assert_allclose(gradient, drawn, atol=2e-3)
    learned_values = {**learn.parameters(pooled.theta)}
    learned_values["groups"] = {
        "by": ["region"],
        "values": [["a"], ["b"], ["c"]],
        "parameters": found.parameters,
    }
    states = begin_states(kalman.build, definition, learned_values)
    assert states.shape[1] == 4
    np.testing.assert_allclose(states[-2, :3], F)


def test_em_by_key_ends_where_scoring_does():
    """Noise and initial values of a trend, where plain EM would creep."""
    rng = np.random.default_rng(13)
    level = np.cumsum(np.cumsum(0.1 * rng.normal(size=(8, 80)), axis=1) + rng.normal(size=(8, 80)), axis=1)
    y = level + 2.0 * rng.normal(size=level.shape)
    y[rng.random(y.shape) < 0.1] = np.nan
    definition = {
        "filter": "linear",
        "states": ["level", "slope"],
        "measurement": ["y"],
        "process": {"kind": "local_linear_trend", "level_variance": 1.0, "slope_variance": 1.0},
        "observation": {"R": [[1.0]]},
        "initial": {"diffuse": True},
    }
    names = ["level_variance", "slope_variance", "R"]
    ends = [
        learners.learnable({**definition, "learn": {"parameters": names, "method": m, **BY_KEY}}).fit_keys(
            rows_of(y), 8, UNIT, None
        )
        for m in ("mle", "em")
    ]
    np.testing.assert_allclose(ends[0].log_likelihood, ends[1].log_likelihood, atol=1e-3)
    assert ends[0].outcome.tolist() == ends[1].outcome.tolist() and ends[0].reason == ends[1].reason


DRAWN = {"kind": "continuous", "A": [[-1.0]], "diffusion": [[1.0]]}
REFUSED = [
    (["A[0][0]"], {}, "no process.A"),
    (["A[0][0]"], {"process": {"kind": "random_walk", "variance": 1.0}}, "no process.A"),
    (["A[0][0]"], {"learn": {"method": "em"}, "process": DRAWN}, "no closed form"),
    (["F[0][0]", "initial.mean"], {"learn": BY_KEY}, "a key begins once"),
    (["F[0][2]"], {"learn": BY_KEY}, "no entry"),
]


@pytest.mark.parametrize(("names", "changes", "problem"), REFUSED)
def test_what_cannot_be_learned_is_refused(names, changes, problem):
    definition = {**AR, **changes, "learn": {"parameters": names, **changes.get("learn", {})}}
    with pytest.raises(kalman.ModelError, match=problem):
        learners.learnable(definition)
