"""Learning by key: each key's maximum against statsmodels, how it ended, errors, few rows and the population."""

import numpy as np
import pytest
from scipy import stats

import kalman
from kalman.evaluation.diagnostics import innovations, ljung_box
from kalman.learning.fisher_information import information
from kalman.learning.key_fits import Outcome, Population
from kalman.learning.key_rows import by_rounds
from kalman.learning.maximum_likelihood import STEP, maximum_likelihood
from kalman.learning.score import score
from kalman.learning.tangents import evaluate, learned
from tests.kalman.learning.test_learning import LEARNED, NILE, STARTS, assert_same_fits
from tests.kalman.support import peers
from tests.kalman.support.key_series import LEVEL, TREND, loads, made, rows_of
from tests.kalman.support.models import random_definition, random_rows, states_with
from tests.kalman.support.oracles import UNIT

LEVELS, TRENDS = maximum_likelihood(LEVEL), maximum_likelihood(TREND)
OF = {1: LEVELS, 2: TRENDS}


def judge(y, states):
    """Fit the series y, and return how much log-likelihood is lost against the best of several starts."""
    found = OF[states].fit_keys(rows_of(y), len(y), UNIT, None)
    lost = np.array([peers.best(one, states).log_likelihood for one in y]) - found.log_likelihood
    inside = np.asarray((found.parameters > 0.0).all(axis=0))
    assert inside[found.outcome == Outcome.CONVERGED].all(), "nothing at a bound is told as converged"
    assert all(
        (text is None) == (a == Outcome.CONVERGED)
        for text, a in zip(found.reason, found.outcome, strict=True)
    )
    assert not (lost[found.outcome == Outcome.CONVERGED] > 2.0).any()
    return lost, found


@pytest.mark.parametrize(("states", "keys"), [(1, 40), (2, 12)])
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
    y = made(12, 120, 3, 2)
    one, other = (learner.fit_keys(rows_of(a), 12, UNIT, None) for a in (y, 1e6 * y))
    assert one.outcome.tolist() == other.outcome.tolist() and one.reason == other.reason
    np.testing.assert_allclose(other.parameters, 1e12 * one.parameters, rtol=1e-5)
    np.testing.assert_allclose(other.errors, 1e12 * one.errors, rtol=1e-5)
    np.testing.assert_allclose(other.nis, one.nis, rtol=1e-7)


def test_nile():
    """Durbin and Koopman (2012), section 2.10: 15098.53 and 1469.18; standard errors from the curvature there."""
    found = LEVELS.fit_keys(NILE, 1, UNIT, None)
    np.testing.assert_allclose(found.parameters[:, 0], [1469.18, 15098.53], rtol=2e-3)
    assert found.log_likelihood[0] == pytest.approx(-633.464564, abs=1e-5)
    assert found.outcome[0] == Outcome.CONVERGED and found.reason == [None]
    q, r = found.parameters[:, 0]

    def slope(step):  # second difference of statsmodels' log-likelihood by the logarithm of R
        return [peers.log_likelihood(NILE.y[0], 1, [q, r * np.exp(a)]) for a in (-step, 0.0, step)]

    low, middle, high = slope(0.05)
    alone = r / np.sqrt((2 * middle - low - high) / 0.05**2)
    assert alone < found.errors[1, 0] < 1.6 * alone, (
        "R alone is known better than beside the level's variance"
    )


def test_a_variance_of_zero_is_an_answer():
    rng = np.random.default_rng(2)
    noise, walk = rng.normal(5.0, 2.0, 200), np.cumsum(rng.normal(size=200))
    found = LEVELS.fit_keys(rows_of([noise, np.round(walk, 6)]), 2, UNIT, None)
    if found.parameters[1, 1] > 0.0:
        pytest.fail("this walk has a likelihood that is greatest without noise")
    assert found.outcome.tolist() == [Outcome.AT_BOUND] * 2
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
    assert (found.outcome == Outcome.CONVERGED).all()
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
    learner = maximum_likelihood(definition)
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


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("kind", LEARNED)
def test_derivatives_are_those_of_the_adjoint(kind, start):
    """Value and gradient against the filter run backwards, information against differences of innovations."""
    rng = np.random.default_rng([len(kind), len(start)])
    definition = random_definition(rng, kind, 2, 2, 1 if kind == "explicit" else 0)
    definition |= {"learn": {"parameters": LEARNED[kind], "scope": "key"}, **STARTS[start]}
    definition["observation"]["H"] = rng.normal(size=np.shape(definition["observation"]["H"])).tolist()
    learner = maximum_likelihood(definition)
    rows = random_rows(rng, definition, 8, 9)
    if start == "diffuse":  # see test_gradient_is_exact
        rows = rows._replace(time=np.cumsum(rng.choice([0, 500_000, 1_000_000], len(rows.time))))
    theta = learner.start[:, None] + 0.2 * rng.normal(size=(len(learner.start), 8))
    expected = score(learner.each, learner.own_names, rows, 8, UNIT, learner.begun(theta, 8))
    of, taken = learned(learner.each), by_rounds(rows, UNIT)
    packed = [(p.name, e) for p in learner.learned for e in range(len(p.value))]
    places = [packed.index(entry) for entry in of.entries]
    entries = np.array([np.broadcast_to(a, 8) for a in learner.entries(theta)])[places]
    found, keys = evaluate(of, taken, entries[:, taken.number]), taken.number
    np.testing.assert_allclose(found.log_likelihood, expected.log_likelihood[keys], rtol=1e-12, atol=1e-12)
    scale = np.abs(expected.gradient).max(axis=1)[places]
    assert (np.abs(found.gradient - expected.gradient[places][:, keys]) <= 1e-11 * scale[:, None]).all()
    steps = [np.zeros(len(theta)), *STEP * np.eye(len(theta))]
    begun = [learner.begun(theta + step[:, None], 8) for step in steps]
    J = information(learner.each, rows, 8, UNIT, begun, np.full(len(theta), STEP))[:, keys]
    moved = [
        np.array([np.broadcast_to(a, 8) for a in learner.entries(theta + step[:, None])])[places]
        for step in steps
    ]
    by_theta = np.array([(a - moved[0])[:, keys] / STEP for a in moved[1:]])  # (p, d, K)
    own = np.einsum("iak,abk,jbk->ijk", by_theta, found.information, by_theta)
    i, j = np.tril_indices(len(theta))
    np.testing.assert_allclose(own[i, j], J, rtol=2e-3, atol=2e-3 * np.abs(J).max())


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
    assert (found.outcome[few] == Outcome.TOO_FEW_ROWS).all() and (found.own[few] < 0.5).all()
    assert (found.own[~few] > 0.5).all() and (found.outcome[~few] == Outcome.CONVERGED).mean() > 0.9
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
        value, gradient, used = LEVELS.value_and_gradient(theta, one, 1, UNIT)
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
    expected = [Outcome.CONVERGED, Outcome.FAILED, *[Outcome.TOO_FEW_ROWS] * 4]
    alone = LEVELS.fit_keys(rows, 6, UNIT, None)
    assert alone.outcome.tolist() == expected
    assert alone.reason[1] == "its measurements do not vary" and alone.reason[4] == "it has no rows"
    assert alone.used.tolist() == [59, 50, 1, 3, 0, 4] and np.isfinite(alone.parameters).all()
    population = Population(np.array([0.5, 0.2]), np.eye(2), 9)
    found = LEVELS.fit_keys(rows, 6, UNIT, population)
    assert found.outcome.tolist() == expected
    for key in (1, 4, 5):  # the population's
        np.testing.assert_allclose(found.parameters[:, key], np.exp([0.5, 0.4]), rtol=1e-12)
    assert_same_fits(
        LEVELS.fit_keys(rows.take(rows.key == 0), 1, UNIT, population), found.take(np.array([0]))
    )


def test_repeated_times_do_not_make_the_noise_zero():
    """Two values at one time: without noise the second would be impossible."""
    rng = np.random.default_rng(7)
    walk = np.repeat(np.cumsum(rng.normal(size=100)), 2) + np.tile([0.0, 1e-3], 100)
    time = np.repeat(np.arange(100), 2) * 1_000_000
    rows = kalman.SortedRows(np.zeros(200, np.int64), time, walk[None], np.empty((0, 200)))
    found = LEVELS.fit_keys(rows, 1, UNIT, None)
    assert found.parameters[1, 0] == pytest.approx(0.5e-6, rel=0.2)
    assert found.outcome[0] == Outcome.CONVERGED
