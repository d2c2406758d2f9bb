"""Learning by key: each key's maximum against statsmodels, how it ended, errors, few rows and the population."""

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

import kalman
from kalman.evaluation.diagnostics import innovations, ljung_box
from kalman.learning import constraints, key_learning
from kalman.learning.fisher_information import compute_fisher_information
from kalman.learning.key_fits import ARRIVED, FitOutcome, Population, build_unexamined
from kalman.learning.key_population import compute_evidence, compute_posterior, compute_row_share
from kalman.learning.key_rows import sort_by_rounds
from kalman.learning.key_search import Box
from kalman.learning.key_starts import Free, _measure_differences, free_numbers
from kalman.learning.keys.values import evaluate
from kalman.learning.maximum_likelihood import STEP, build_linear_learner
from kalman.learning.score import score
from kalman.learning.tangents import list_learned_entries
from kalman.models.structure import Parameter
from tests.kalman.learning.test_learning import CASES, LEARNED, NILE, STARTS, assert_same_fits
from tests.kalman.support import peers
from tests.kalman.support.key_series import LEVEL, TREND, loads, made, rows_of
from tests.kalman.support.models import random_definition, random_rows, same, states_with
from tests.kalman.support.oracles import UNIT

LEVELS, TRENDS = build_linear_learner(LEVEL), build_linear_learner(TREND)
OF = {1: LEVELS, 2: TRENDS}


def judge(y, states):
    """Fit the series y, and return how much log-likelihood is lost against the best of several starts."""
    found = OF[states].fit_keys(rows_of(y), len(y), UNIT, None)
    lost = np.array([peers.best(one, states).log_likelihood for one in y]) - found.log_likelihood
    inside = np.asarray((found.parameters > 0.0).all(axis=0))
    assert inside[found.outcome == FitOutcome.CONVERGED].all(), "nothing at a bound is told as converged"
    assert all(
        (text is None) == (a == FitOutcome.CONVERGED)
        for text, a in zip(found.reason, found.outcome, strict=True)
    )
    assert not (lost[found.outcome == FitOutcome.CONVERGED] > 2.0).any()
    return lost, found


@pytest.mark.parametrize(("states", "keys"), [(1, 6), (2, 3)])
def test_made_series_reach_the_best_of_statsmodels(states, keys):
    """Scales of 1e-6 to 1e9, gaps, outliers, signal to noise of 1e-3 to 1e3: the exact diffuse likelihood of both."""
    y = made(keys, 300, 1, states)
    lost, found = judge(y, states)
    assert np.quantile(lost, 0.99) <= 0.1
    for k in range(3):  # the likelihood is the same function
        peer = peers.log_likelihood(y[k], states, found.parameters[:, k])
        assert found.log_likelihood[k] == pytest.approx(peer, rel=1e-9, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("states", [1, 2])
def test_a_thousand_made_series_reach_the_best_of_statsmodels(states):
    lost, _ = judge(made(500, 300, 7, states), states)
    assert np.mean(lost <= 0.1) >= 0.99


def test_series_like_loads_each_reach_their_own_maximum():
    """One loud series among quiet, rounded and idle ones: searched from a common maximum, each lost about 1,000."""
    y = loads(700)
    lost, found = judge(y, 1)
    assert np.abs(lost).max() < 0.1
    assert len(np.unique(np.round(np.log(found.parameters[1]), 3))) == 10, "no key has another's noise"
    leaning = LEVELS.fit_keys(rows_of(y), 10, UNIT, LEVELS.population([found]))
    assert np.abs(leaning.log_likelihood - found.log_likelihood).max() < 0.1
    assert (leaning.own > 0.9).all()


@pytest.mark.parametrize("learner", [LEVELS, TRENDS])
def test_units_do_not_matter(learner):
    y = made(6, 120, 3, 2)
    one, other = (learner.fit_keys(rows_of(a), 6, UNIT, None) for a in (y, 1e6 * y))
    assert one.outcome.tolist() == other.outcome.tolist() and one.reason == other.reason
    np.testing.assert_allclose(other.parameters, 1e12 * one.parameters, rtol=1e-5)
    np.testing.assert_allclose(other.errors, 1e12 * one.errors, rtol=1e-5)
    np.testing.assert_allclose(other.nis, one.nis, rtol=1e-7)


def test_nile():
    """Durbin and Koopman (2012), section 2.10: 15098.53 and 1469.18; standard errors from the curvature there."""
    found = LEVELS.fit_keys(NILE, 1, UNIT, None)
    np.testing.assert_allclose(found.parameters[:, 0], [1469.18, 15098.53], rtol=2e-3)
    assert found.log_likelihood[0] == pytest.approx(-633.464564, abs=1e-5)
    assert found.outcome[0] == FitOutcome.CONVERGED and found.reason == [None]
    q, r = found.parameters[:, 0]

    def slope(step):  # second difference of statsmodels' log-likelihood by the logarithm of R
        return [peers.log_likelihood(NILE.y[0], 1, [q, r * np.exp(a)]) for a in (-step, 0.0, step)]

    low, middle, high = slope(0.05)
    alone = r / np.sqrt((2 * middle - low - high) / 0.05**2)
    assert alone < found.errors[1, 0] < 1.6 * alone, (
        "R alone is known better than beside the level's variance"
    )


def test_a_key_without_doubt_is_searched_once(monkeypatch):
    """Only an end that is not told, at a bound or at zero is searched for again from other starts."""
    searched, real = [], key_learning.search

    def search(point, begin, *more, **others):
        searched.append(begin.shape[1])
        return real(point, begin, *more, **others)

    monkeypatch.setattr(key_learning, "search", search)
    rng = np.random.default_rng(1)
    slopes = np.cumsum(rng.normal(size=(3, 300)), axis=1)
    y = np.cumsum(slopes + 3.0 * rng.normal(size=(3, 300)), axis=1) + 3.0 * rng.normal(size=(3, 300))
    assert TRENDS.fit_keys(rows_of(y), 3, UNIT, None).outcome.tolist() == [FitOutcome.CONVERGED] * 3
    assert searched == [3]


def test_a_variance_of_zero_is_an_answer():
    rng = np.random.default_rng(2)
    noise, walk = rng.normal(5.0, 2.0, 200), np.cumsum(rng.normal(size=200))
    found = LEVELS.fit_keys(rows_of([noise, np.round(walk, 6)]), 2, UNIT, None)
    if found.parameters[1, 1] > 0.0:
        pytest.fail("this walk has a likelihood that is greatest without noise")
    assert found.outcome.tolist() == [FitOutcome.AT_BOUND] * 2
    assert found.reason == ["variance is zero", "R is zero"]
    assert found.parameters[0, 0] == 0.0
    assert np.isnan(found.errors).tolist() == [[True, False], [False, True]]
    # the other parameter has the closed form: the variance of the noise, and of the steps
    assert found.parameters[1, 0] == pytest.approx(noise.var(ddof=1), rel=1e-3)
    assert found.parameters[0, 1] == pytest.approx(np.mean(np.diff(walk) ** 2), rel=1e-3)
    assert found.errors[0, 1] == pytest.approx(found.parameters[0, 1] * np.sqrt(2 / 199), rel=1e-3)


def test_standard_errors_cover():
    """Over 300 series the truth is within 1.96 standard errors of the logarithm for about 95 %."""
    rng = np.random.default_rng(4)
    y = np.cumsum(rng.normal(size=(300, 200)), axis=1) + rng.normal(size=(300, 200))
    found = LEVELS.fit_keys(rows_of(y), 300, UNIT, None)
    assert (found.outcome == FitOutcome.CONVERGED).all()
    away = np.log(found.parameters) / (found.errors / found.parameters)
    inside = (np.abs(away) < 1.96).mean(axis=1)
    assert ((inside > 0.91) & (inside < 0.985)).all(), inside
    np.testing.assert_allclose(found.nis, 1.0, atol=0.02)
    assert stats.kstest(found.ljung_box, "uniform").pvalue > 1e-3


def test_diagnostics_are_those_of_the_filter():
    rng = np.random.default_rng(5)
    definition = {
        **random_definition(rng, "random_walk", 1, 2, 0),
        "learn": {"parameters": ["variance", "R"], "scope": "key"},
    }
    learner = build_linear_learner(definition)
    rows = random_rows(rng, definition, 5, 60)
    found = learner.fit_keys(rows, 5, UNIT, None)
    states = states_with(learner.each, found.parameters)
    after, _, white = innovations(learner.each, states, rows, UNIT)
    for key in np.flatnonzero(np.isfinite(found.log_likelihood) & (found.used > 12)):
        seen = white[:, rows.key == key]
        assert found.log_likelihood[key] == pytest.approx(after.log_likelihood[key], rel=1e-9)
        assert found.nis[key] == pytest.approx(np.nanmean(seen**2), rel=1e-9)
        fitted = len(found.theta) - 1
        p = [ljung_box(np.zeros(seen.shape[1], np.int64), one, 1, fitted=fitted).p_value[0] for one in seen]
        assert found.ljung_box[key] == pytest.approx(min(1.0, 2 * np.nanmin(p)), rel=1e-9)


@pytest.mark.parametrize(("kind", "start"), CASES)
def test_derivatives_are_those_of_the_adjoint(kind, start):
    """Value and gradient against the filter run backwards, information against differences of innovations."""
    rng = np.random.default_rng([len(kind), len(start)])
    definition = random_definition(rng, kind, 2, 2, 1 if kind == "explicit" else 0)
    definition |= {"learn": {"parameters": LEARNED[kind], "scope": "key"}, **STARTS[start]}
    definition["observation"]["H"] = rng.normal(size=np.shape(definition["observation"]["H"])).tolist()
    rows = random_rows(rng, definition, 8, 9)
    if start == "diffuse":  # see test_gradient_is_exact
        rows = rows._replace(time=np.cumsum(rng.choice([0, 500_000, 1_000_000], len(rows.time))))
    assert_derivatives(build_linear_learner(definition), rows, rng)


def test_derivatives_of_three_measurements_are_those_of_the_adjoint():
    """With correlated noise: the covariance of two of them leaves the part of the third one's alone."""
    rng = np.random.default_rng(3)
    definition = random_definition(rng, "explicit", 2, 3) | {"learn": {"parameters": ["R"], "scope": "key"}}
    assert_derivatives(build_linear_learner(definition), random_rows(rng, definition, 8, 9), rng)


def assert_derivatives(learner, rows, rng):
    """Assert value, gradient and information at numbers about the written ones, of eight keys."""
    theta = learner.start[:, None] + 0.2 * rng.normal(size=(len(learner.start), 8))
    expected = score(learner.each, learner.own_names, rows, 8, UNIT, learner.begun(theta, 8))
    of, taken = list_learned_entries(learner.each), sort_by_rounds(rows, UNIT)
    packed = [(p.name, e) for p in learner.learned for e in range(len(p.value))]
    places = [packed.index(entry) for entry in of.entries]
    entries = np.array([np.broadcast_to(a, 8) for a in learner.entries(theta)])[places]
    found, keys = evaluate(of, taken, entries[:, taken.number]), taken.number
    np.testing.assert_allclose(found.log_likelihood, expected.log_likelihood[keys], rtol=1e-12, atol=1e-12)
    scale = np.abs(expected.gradient).max(axis=1)[places]
    assert (np.abs(found.gradient - expected.gradient[places][:, keys]) <= 1e-11 * scale[:, None]).all()
    steps = [np.zeros(len(theta)), *STEP * np.eye(len(theta))]
    begun = [learner.begun(theta + step[:, None], 8) for step in steps]
    J = compute_fisher_information(learner.each, rows, 8, UNIT, begun, np.full(len(theta), STEP))[:, keys]
    moved = [
        np.array([np.broadcast_to(a, 8) for a in learner.entries(theta + step[:, None])])[places]
        for step in steps
    ]
    by_theta = np.array([(a - moved[0])[:, keys] / STEP for a in moved[1:]])  # (p, d, K)
    own = np.einsum("iak,abk,jbk->ijk", by_theta, found.information, by_theta)
    i, j = np.tril_indices(len(theta))
    np.testing.assert_allclose(own[i, j], J, rtol=2e-3, atol=2e-3 * np.abs(J).max())


def test_of_fits_that_give_values_alone_nothing_else_is_known():
    theta, entries = np.arange(6.0).reshape(2, 3), np.ones((4, 3))
    found = build_unexamined(theta, entries, np.zeros(3), np.full(3, 9))
    assert found.converged.all() and found.reason == [None] * 3 and found.own.tolist() == [1.0] * 3
    shapes = {"errors": (4, 3), "information": (2, 2, 3), "nis": (3,), "ljung_box": (3,)}
    for name, shape in shapes.items():
        same(getattr(found, name), np.full(shape, np.nan))


@pytest.mark.parametrize(
    ("Q", "numbers"),
    [
        (np.diag([1.0, 2.0]), {"Q[0][0]": (2, True), "Q[1][1]": (2, True)}),
        ([[1.0, 0.5], [0.5, 2.0]], {"Q[0][0]": (2, False), "Q[1][0]": (0, False), "Q[1][1]": (2, False)}),
    ],
    ids=["diagonal", "full"],
)
def test_a_variance_that_has_covariances_cannot_be_zero_alone(Q, numbers):
    process = {"kind": "explicit", "F": [[1.0, 1.0], [0.0, 0.5]], "Q": np.asarray(Q).tolist()}
    given = {**TREND, "process": process, "observation": {"H": [[1.0, 0.0]], "R": [[1.0]]}}
    learner = build_linear_learner({**given, "learn": {"parameters": ["Q"], "scope": "key"}})
    found = free_numbers(learner.each, learner.learned)
    assert {one.name: (one.power, one.alone) for one in found} == numbers


def test_few_rows_lean_on_the_population():
    rng = np.random.default_rng(5)
    keys = 160
    q, r = np.exp(rng.normal(1, 0.7, keys)), np.exp(rng.normal(0, 0.7, keys))
    lengths = np.where(np.arange(keys) % 4 == 0, rng.integers(0, 15, keys), 100)
    y = [
        np.cumsum(rng.normal(size=n) * np.sqrt(a)) + rng.normal(size=n) * np.sqrt(b)
        for n, a, b in zip(lengths, q, r, strict=True)
    ]
    y[7] = 1e4 * y[7]  # an odd one moves the population little
    rows = rows_of(y)
    alone = LEVELS.fit_keys(rows, keys, UNIT, None)
    population = LEVELS.population([alone.take(np.arange(80)), alone.take(np.arange(80, keys))])
    np.testing.assert_allclose(population.mean * [1, 2], [1.0, 0.0], atol=0.5)
    assert 0.25 < population.covariance[0, 0] < 0.8 and 0.02 < population.covariance[1, 1] < 0.2
    found = LEVELS.fit_keys(rows, keys, UNIT, population)
    few = lengths < 15
    assert (found.outcome[few] == FitOutcome.TOO_FEW_ROWS).all() and (found.own[few] < 0.5).all()
    assert (found.own[~few] > 0.5).all() and (found.outcome[~few] == FitOutcome.CONVERGED).mean() > 0.9
    assert all("measured values" in text or "no rows" in text for text in np.array(found.reason)[few])
    truth = np.log([q, r])
    error = np.abs(np.log(found.parameters[:, few]) - truth[:, few]).mean()
    assert error < 0.7, "about what the population's spread leaves"
    with np.errstate(divide="ignore"):
        assert np.abs(np.log(np.maximum(alone.parameters, 1e-9)) - truth)[:, few].mean() > 3 * error
    none = found.used == 0
    assert none.any() or lengths.min() > 0
    np.testing.assert_array_equal(
        found.theta[:, none], np.repeat(population.mean[:, None], none.sum(), axis=1)
    )
    # the mode of the posterior, as another optimiser finds it
    k = int(np.flatnonzero(few & (lengths > 8))[0])
    one = rows_of([y[k]])
    precision = np.linalg.inv(population.covariance)

    def objective(theta):
        value, gradient, used = LEVELS.compute_gradient(theta, one, 1, UNIT)
        away = theta - population.mean
        return value - 0.5 * away @ precision @ away, gradient - precision @ away, used

    from kalman.learning.optimisers import fit

    np.testing.assert_allclose(found.theta[:, k], fit(objective, population.mean).theta, atol=2e-3)


def test_nothing_to_learn_from_is_said_and_the_others_go_on():
    rng = np.random.default_rng(6)
    good = np.cumsum(rng.normal(size=60)) + rng.normal(size=60)
    rows = rows_of([good, np.full(50, 7.0), np.array([3.0]), np.array([1.0, 2.0, 1.5])])
    values = rows.y.copy()
    values[0, 5] = np.inf  # such a row the filter flags
    extra = kalman.SortedRows(np.full(4, 5), np.arange(4), np.full((1, 4), np.nan), np.empty((0, 4)))
    rows = kalman.SortedRows(
        np.concatenate([rows.key, extra.key]),
        np.concatenate([rows.time, extra.time]),
        np.concatenate([values, extra.y], axis=1),
        np.empty((0, len(rows.key) + 4)),
    )
    expected = [FitOutcome.CONVERGED, FitOutcome.FAILED, *[FitOutcome.TOO_FEW_ROWS] * 4]
    alone = LEVELS.fit_keys(rows, 6, UNIT, None)
    assert alone.outcome.tolist() == expected
    assert alone.reason[1] == "its measurements do not vary" and alone.reason[4] == "it has no rows"
    assert alone.used.tolist() == [59, 50, 1, 3, 0, 4] and np.isfinite(alone.parameters).all()
    assert np.isfinite(alone.errors[:, 0]).all() and np.isnan(alone.errors[:, [1, 2, 4, 5]]).all()
    population = Population(np.array([0.5, 0.2]), np.eye(2), 9)
    found = LEVELS.fit_keys(rows, 6, UNIT, population)
    assert found.outcome.tolist() == expected
    for key in (1, 4, 5):  # the population's
        np.testing.assert_allclose(found.parameters[:, key], np.exp([0.5, 0.4]), rtol=1e-12)
    assert_same_fits(
        LEVELS.fit_keys(rows.take(rows.key == 0), 1, UNIT, population), found.take(np.array([0]))
    )


def test_a_trial_without_a_likelihood_is_told_by_its_value_without_a_warning():
    """Where both variances are zero, the rows have no likelihood."""
    y = [np.array([25.0, 30.0]), np.array([20.0, 25.0])]
    points = LEVELS.key_model.searches(rows_of(y), UNIT).points()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = points.point(np.zeros((2, 2)), np.array([[True, False], [True, False]]), np.arange(2))
    assert found.value[0] == -np.inf and np.isfinite(found.value[1])


def test_repeated_times_do_not_make_the_noise_zero():
    """Two values at one time: without noise the second would be impossible."""
    rng = np.random.default_rng(7)
    walk = np.repeat(np.cumsum(rng.normal(size=100)), 2) + np.tile([0.0, 1e-3], 100)
    time = np.repeat(np.arange(100), 2) * 1_000_000
    rows = kalman.SortedRows(np.zeros(200, np.int64), time, walk[None], np.empty((0, 200)))
    found = LEVELS.fit_keys(rows, 1, UNIT, None)
    assert found.parameters[1, 0] == pytest.approx(0.5e-6, rel=0.2)
    assert found.outcome[0] == FitOutcome.CONVERGED


def ends_of(theta, zero=None, covariance=None, **others) -> Any:
    """Return the ends of searches (p, J), without fault but for what is given."""
    p, keys = theta.shape
    whole = {
        "theta": theta,
        "zero": np.zeros((p, keys), bool) if zero is None else zero,
        "value": np.zeros(keys),
        "information": np.zeros((p, p, keys)),
        "covariance": np.zeros((p, p, keys)) if covariance is None else covariance,
        "own": np.ones(keys),
        "done": np.ones(keys, bool),
        "lacking": np.zeros(keys),
    }
    return key_learning._Ends(**{**whole, **others})


LEARNABLE = (
    Parameter("variance", "positive", (2.0,)),
    Parameter("R", "covariance", (4.0, 0.7, 3.0, -0.4, 0.2, 1.0)),
    Parameter("rate", "bounded", (0.5,), (0.0, 2.0)),
    Parameter("weights", "chances", (0.2, 0.5, 0.3)),
    Parameter("blocks", "covariance", (1.0, 0.0, 2.0, 0.0, 0.5, 2.0)),
)


def test_errors_are_those_of_the_delta_method():
    """The slopes of all entries by complex steps, which are exact, of parameters of every kind side by side."""
    rng = np.random.default_rng(15)
    begin = np.concatenate([constraints.start(one, one.name) for one in LEARNABLE])
    p, keys = len(begin), 4
    theta = begin[:, None] + 0.3 * rng.normal(size=(p, keys))
    root = rng.normal(size=(p, p, keys))
    covariance = np.einsum("ikj,lkj->ilj", root, root)
    searches: Any = SimpleNamespace(keys=keys, model=SimpleNamespace(parameters=LEARNABLE))

    def entries(free):
        widths = np.cumsum([len(constraints.list_free_entries(one)) for one in LEARNABLE])[:-1]
        parts = zip(LEARNABLE, np.split(free, widths), strict=True)
        return np.array([a for one, part in parts for a in constraints.compute_entries(one, list(part))])

    none = np.zeros((p, keys), bool)
    found = key_learning._compute_errors(searches, theta, none, ends_of(theta, none, covariance))
    fixed = np.flatnonzero(entries(begin) == 0.0)
    assert len(entries(begin)) == len(found) and len(fixed) == 2
    for k in range(keys):
        slopes = np.array([np.imag(entries(theta[:, k] + 1e-30j * row)) / 1e-30 for row in np.eye(p)]).T
        expected = np.sqrt(np.diag(slopes @ covariance[:, :, k] @ slopes.T))
        expected[fixed] = np.nan
        np.testing.assert_allclose(found[:, k], expected, rtol=1e-11)


def test_a_variance_that_is_zero_takes_no_error_from_the_others():
    """What has no covariance spoils the errors of those entries alone that depend on it."""
    R = Parameter("R", "covariance", (1.0, 0.0, 4.0))
    Q = Parameter("Q", "covariance", (1.0, 0.5, 4.0))
    theta = np.array([[0.5], [-40.0], [0.0], [0.5], [0.7]])
    covariance = np.diag([0.01, np.nan, 0.04, 0.01, np.nan])[:, :, None]
    covariance[[1, 4]] = covariance[:, [1, 4]] = np.nan
    searches: Any = SimpleNamespace(keys=1, model=SimpleNamespace(parameters=(R, Q)))
    gone = np.array([[False], [True], [False], [False], [False]])
    found = key_learning._compute_errors(searches, theta, gone, ends_of(theta, gone, covariance))[:, 0]
    assert np.isnan(found).tolist() == [False, True, True, False, True, True]
    # of exp(2 t), whose slope is twice itself
    np.testing.assert_allclose(found[[0, 3]], [2.0 * np.exp(1.0) * 0.1, 2.0 * np.exp(0.0) * 0.2], rtol=1e-14)


def test_each_key_is_judged_by_what_stopped_it():
    """The first fault that there is: no variation, few rows, no maximum, a bound; each with its reason."""
    R = Parameter("R", "covariance", (1.0, 0.0, 1.0))
    free = [Free(R, 0, 2, True), Free(R, 2, 2, True), Free(Parameter("q", "positive", (1.0,)), 0, 1, True)]
    cases: list[tuple[dict[str, Any], FitOutcome, str | None]] = [
        ({}, FitOutcome.CONVERGED, None),
        ({"measured": 15.0}, FitOutcome.CONVERGED, None),
        ({"measured": 14.0}, FitOutcome.TOO_FEW_ROWS, "14 measured values for 3 numbers"),
        ({"measured": 14.0, "constant": True}, FitOutcome.FAILED, "its measurements do not vary"),
        ({"measured": 1.0, "constant": True}, FitOutcome.TOO_FEW_ROWS, "1 measured values for 3 numbers"),
        ({"own": 0.5}, FitOutcome.CONVERGED, None),
        ({"own": 0.49}, FitOutcome.TOO_FEW_ROWS, "99 measured values for 3 numbers"),
        ({"done": False}, FitOutcome.FAILED, "the search found no maximum"),
        ({"value": np.inf}, FitOutcome.FAILED, "the search found no maximum"),
        ({"value": np.nan, "lacking": np.nan}, FitOutcome.FAILED, "the search found no maximum"),
        ({"lacking": 0.9 * ARRIVED}, FitOutcome.CONVERGED, None),
        ({"lacking": 0.25}, FitOutcome.FAILED, "0.25 of log-likelihood is still expected"),
        ({"lacking": ARRIVED, "theta": (9.0, 0.0, 0.0)}, FitOutcome.FAILED, "0.01 of log-likelihood"),
        ({"theta": (0.0, -9.0, 0.0)}, FitOutcome.AT_BOUND, "R[1][1] is at its lowest"),
        ({"theta": (0.0, 9.0, 0.0)}, FitOutcome.AT_BOUND, "R[1][1] is at its highest"),
        ({"theta": (9.0, 0.0, -9.0)}, FitOutcome.AT_BOUND, "R[0][0] is at its highest, q is at its lowest"),
        ({"zero": (True, False, False), "theta": (-9.0, 0.0, 9.0)}, FitOutcome.AT_BOUND,
         "R[0][0] is zero, q is at its highest"),
    ]  # fmt: skip

    def of(name, usual):
        return np.array([case.get(name, usual) for case, _, _ in cases]).T

    high = np.full((3, len(cases)), 9.0)
    ends = ends_of(
        of("theta", (0.0, 0.0, 0.0)),
        of("zero", (False, False, False)),
        **{name: of(name, usual) for name, usual in
           (("value", -3.0), ("own", 1.0), ("done", True), ("lacking", 0.0))},
    )  # fmt: skip
    searches: Any = SimpleNamespace(
        box=Box(-high, high, np.full(3, 1.0), np.ones(3, bool), np.array([2.0, 2.0, 1.0])),
        keys=len(cases),
        measured=of("measured", 99.0),
        model=SimpleNamespace(free=free),
        starts=SimpleNamespace(constant=of("constant", False)),
    )
    outcome, reason = key_learning._judge_ends(searches, ends, None)
    for found, text, (case, expected, said) in zip(outcome, reason, cases, strict=True):
        assert found == expected, case
        assert text == said or (said is not None and str(text).startswith(said)), (case, text)
    _, reason = key_learning._judge_ends(searches, ends, Population(np.zeros(3), np.eye(3), 9))
    assert reason[2] == "14 measured values for 3 numbers, 100 % its own"
    assert reason[6] == "99 measured values for 3 numbers, 49 % its own"


def test_the_evidence_of_normal_likelihoods_is_their_integral():
    """Where the likelihood is normal in theta Laplace's approximation is exact, with variances that are zero too."""
    rng = np.random.default_rng(16)
    p, keys = 3, 8
    mean, wide = rng.normal(size=p), rng.normal(size=(p, p))
    covariance = wide @ wide.T + 0.1 * np.eye(p)
    share = np.array([0.3, 0.0, 0.6])
    population = Population(mean, covariance, keys, share)
    root = rng.normal(size=(p, p, keys))
    J = np.einsum("ikj,lkj->ilj", root, root) + 0.1 * np.eye(p)[:, :, None]
    own, peak = rng.normal(size=(p, keys)), rng.normal(size=keys)
    zero = np.zeros((p, keys), bool)
    zero[0, 3:], zero[2, 5:6], zero[1, 7] = True, True, True
    theta, value, expected = own.copy(), peak.copy(), peak.copy()
    for k in range(keys):
        there = np.flatnonzero(~zero[:, k])
        Q, C, m = J[:, :, k][np.ix_(there, there)], covariance[np.ix_(there, there)], mean[there]
        at = np.linalg.solve(Q + np.linalg.inv(C), Q @ own[there, k] + np.linalg.solve(C, m))
        theta[there, k] = at
        away = at - own[there, k]
        value[k] -= 0.5 * away @ Q @ away
        joint = stats.multivariate_normal(m, C + np.linalg.inv(Q))
        expected[k] += joint.logpdf(own[there, k]) + 0.5 * (
            len(there) * np.log(2 * np.pi) - np.linalg.slogdet(Q)[1]
        )
        chance = np.clip(share, 1e-6, 1.0)
        expected[k] += np.log(np.where(zero[:, k], chance, 1.0 - chance)).sum()
    np.testing.assert_allclose(compute_evidence(population, theta, zero, value, J), expected, rtol=1e-11)
    # and without zeros: the posterior, and how much of it the key's own rows make
    found, spread = compute_posterior(population, own, J)
    shares = compute_row_share(population, J)
    for k in range(keys):
        C = np.linalg.inv(J[:, :, k] + np.linalg.inv(covariance))
        np.testing.assert_allclose(spread[:, :, k], C, rtol=1e-9, atol=1e-12)
        both = J[:, :, k] @ own[:, k] + np.linalg.solve(covariance, mean)
        np.testing.assert_allclose(found[:, k], C @ both, rtol=1e-9, atol=1e-12)
        pairs = np.linalg.eigvals(np.eye(p) - C @ np.linalg.inv(covariance)).real
        assert shares[k] == pytest.approx(pairs.mean(), rel=1e-10)


def test_a_key_s_differences_are_its_own():
    """By their median, by their mean square where most are zero; 102 rows, so that each difference is picked once."""
    rng = np.random.default_rng(18)
    walk = np.cumsum(rng.normal(size=(2, 102)), axis=1)
    steps = np.cumsum(rng.choice([0.0, 5.0, -2.0], (2, 102), p=[0.8, 0.1, 0.1]), axis=1)
    gaps = steps + 1e3
    gaps[0, 40:43] = np.nan
    series = [
        walk,
        1e6 * steps,
        np.full((2, 1), 3.0),
        gaps,
        np.full((2, 30), 7.0),
        np.array([[1.0, 2.0]] * 2),
    ]
    lengths = [one.shape[1] for one in series]
    time = np.concatenate([(k + 1) * 500_000 * np.arange(n) for k, n in enumerate(lengths)])
    rows = kalman.SortedRows(
        np.repeat(np.arange(6), lengths), time, np.concatenate(series, axis=1), np.empty((0, sum(lengths)))
    )
    sizes, largest, step, constant = _measure_differences(rows, UNIT)
    assert constant.tolist() == [False, False, True, False, True, False]
    assert step.tolist() == [0.5, 1.0, 1.0, 2.0, 2.5, 3.0]
    for k, one in enumerate(series):
        alone = _measure_differences(
            rows.take(rows.key == k)._replace(key=np.zeros(lengths[k], np.int64)), UNIT
        )
        for found, expected in zip((*sizes, largest, step, constant), (*alone[0], *alone[1:]), strict=True):
            np.testing.assert_array_equal(found[..., k], expected[..., 0])
        np.testing.assert_allclose(largest[:, k], (np.nanmax(one, axis=1) - np.nanmin(one, axis=1)) ** 2)
    middle = np.sort(np.abs(np.diff(walk)), axis=1)[:, 50]
    np.testing.assert_allclose(sizes[0][:, 0], (1.4826 * middle) ** 2, rtol=1e-14)
    for k in (1, 3):
        np.testing.assert_allclose(sizes[0][:, k], np.nanmean(np.diff(series[k]) ** 2, axis=1), rtol=1e-13)
    assert not sizes[0][:, [2, 4]].any() and sizes[0][0, 5] == pytest.approx(1.4826**2)


def test_the_bounds_of_the_variances_that_end_there_move_out():
    """By factors of e^28 down and e^14 up in the variance, whatever its power; all other bounds stay."""
    low, high = np.array([[-1.0, -2.0, -3.0]] * 3), np.array([[4.0, 5.0, 6.0]] * 3)
    box = Box(low, high, np.ones(3), np.ones(3, bool), np.array([1.0, 2.0, 0.0]))
    beyond = np.array([[True, False, False], [False, True, False], [False, False, False]])
    wider: Any = key_learning.KeySearches._widen_box(SimpleNamespace(box=box), beyond)  # type: ignore[arg-type]
    np.testing.assert_array_equal(wider.low, [[-29.0, -2.0, -3.0], [-1.0, -16.0, -3.0], low[2]])
    np.testing.assert_array_equal(wider.high, [[18.0, 5.0, 6.0], [4.0, 12.0, 6.0], high[2]])
