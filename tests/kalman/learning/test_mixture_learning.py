"""Batch EM of mixtures: published fits, EM written out in the test, and what a learner promises to those who use it."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import optimize, special, stats

import kalman
from kalman.learning.key_fits import FitOutcome, Population
from kalman.learning.learners import learnable
from kalman.learning.mixtures import MixtureLearner, build_mixture_learner
from kalman.mixtures.building import request
from kalman.mixtures.seeds import draw_seeds
from tests.kalman.support.models import random_covariance, same
from tests.kalman.support.oracles import UNIT

FIXTURES = Path(__file__).parents[2] / "fixtures"
# Earthquakes of magnitude 7 or more in the world, 1900 to 2006: Zucchini and MacDonald (2009), table 1.1
QUAKES = np.loadtxt(FIXTURES / "earthquakes.csv", delimiter=",", skiprows=1, usecols=1)[None]
# Minutes between eruptions of Old Faithful: Azzalini and Bowman (1990), as R's `faithful$waiting`
FAITHFUL = np.loadtxt(FIXTURES / "faithful.csv", skiprows=1)[None]
NAMES = {
    "gaussian_mixture": ["weights", "means", "covariances"],
    "poisson_mixture": ["weights", "rates"],
    "bernoulli_mixture": ["weights", "probabilities"],
}


def total_of(logs, axis=None) -> Any:
    """Return the logarithm of the sum of what these are the logarithms of."""
    return special.logsumexp(logs, axis=axis)


def rows_of(y, key=None):
    n = y.shape[1]
    key = np.zeros(n, np.int64) if key is None else np.asarray(key, np.int64)
    return kalman.SortedRows(key, np.arange(n), np.asarray(y, float), np.empty((0, n)))


def learner(kind, k, m=1, learn=None, scope="pooled", **more) -> MixtureLearner:
    names = [f"y{i}" for i in range(m)]
    mixture = {"components": k, **more}
    learning = {"parameters": learn or NAMES[kind], "scope": scope}
    return build_mixture_learner(
        {"filter": kind, "measurement": names, "mixture": mixture, "learn": learning}
    )


def fitted(found, rows, max_iterations=5000, tolerance=1e-15):
    keys = int(rows.key.max()) + 1
    sample = rows.y[:, ::2]
    return found.fit(
        lambda theta: found.evaluate(theta, rows, keys, UNIT), lambda: sample, max_iterations, tolerance
    )


def random_data(rng, kind, m, n, missing=0.2):
    which, lift = rng.random(n) < 0.4, rng.uniform(1, 3, (m, 1))
    if kind == "gaussian_mixture":
        y = rng.normal(size=(m, n)) + rng.normal(size=n) + lift * 2 * which
    elif kind == "poisson_mixture":
        y = rng.poisson(2 + 4 * lift * which).astype(float)
    else:
        y = (rng.random((m, n)) < 0.2 + 0.2 * lift * which).astype(float)
    y[rng.random(y.shape) < missing] = np.nan
    return y


def poisson_optimum(y, start, prior=None, strength=0.0):
    """Return weights and rates (2 k,) where the score of the exact likelihood of rows (N,) vanishes, by Newton steps.

    prior: of so many rows `strength`, each exactly as these weights and rates say.
    """
    k, a = (
        len(start) // 2,
        np.zeros(len(start) // 2) if prior is None else strength * prior[: len(start) // 2],
    )
    b = 0.0 if prior is None else a * prior[k:]

    def values(free):
        return special.softmax(np.append(free[: k - 1], 0.0)), np.exp(free[k - 1 :])

    def score(free):
        w, rates = values(free)
        r = special.softmax(np.log(w)[:, None] + stats.poisson.logpmf(y, rates[:, None]), axis=0)
        rows, sums = r.sum(axis=1) + a, (r * y).sum(axis=1) + b
        return np.concatenate([(rows - rows.sum() * w)[:-1], sums - rows * rates])

    free = np.concatenate([np.log(start[: k - 1] / start[k - 1]), np.log(start[k:])])
    found = optimize.root(score, free, tol=1e-13)
    assert np.abs(found.fun).max() < 1e-10 * len(y)
    return np.concatenate(values(found.x))


# Published fits


def test_earthquakes():
    """Zucchini and MacDonald (2009), section 1.2: rates and -log L of one to four components."""
    assert QUAKES.shape == (1, 107) and QUAKES.sum() == 2072
    found = fitted(learner("poisson_mixture", 1), rows_of(QUAKES))
    assert found.log_likelihood == pytest.approx(-391.918928, abs=1e-6)
    assert found.theta.tolist() == [1.0, pytest.approx(19.364486, abs=1e-6)]
    two = learner("poisson_mixture", 2)
    found = fitted(two, rows_of(QUAKES))
    assert found.converged and found.log_likelihood == pytest.approx(-360.369044, abs=1e-6)
    np.testing.assert_allclose(found.theta, [0.675726, 0.324274, 15.777108, 26.839895], atol=2e-5)
    assert two.parameters(found.theta).keys() == {"weights", "rates"}
    found = fitted(learner("poisson_mixture", 3), rows_of(QUAKES))
    assert found.log_likelihood == pytest.approx(-356.848939, abs=1e-6)
    np.testing.assert_allclose(found.theta, [0.278, 0.593, 0.130, 12.736, 19.785, 31.629], rtol=3e-3)
    found = fitted(learner("poisson_mixture", 4), rows_of(QUAKES), 800, 1e-10)
    assert found.log_likelihood == pytest.approx(-356.7337, abs=1e-3)


def test_old_faithful():
    """Pearson (2011), "Fitting mixture distributions with the R package mixtools": normalmixEM(faithful$waiting).

    It prints seven digits, of which its stopping rule leaves five to six.
    """
    assert FAITHFUL.shape == (1, 272) and FAITHFUL.mean() == pytest.approx(70.8970588)
    gaussian = learner("gaussian_mixture", 2)
    found = fitted(gaussian, rows_of(FAITHFUL))
    values = gaussian.parameters(found.theta)
    np.testing.assert_allclose(values["weights"], [0.3608868, 0.6391132], rtol=5e-6)
    np.testing.assert_allclose(np.ravel(values["means"]), [54.61489, 80.09109], rtol=5e-6)
    np.testing.assert_allclose(np.sqrt(np.ravel(values["covariances"])), [5.871241, 5.867718], rtol=1e-5)
    parts = zip(values["weights"], np.ravel(values["means"]), np.ravel(values["covariances"]), strict=True)
    logs = [np.log(w) + stats.norm.logpdf(FAITHFUL[0], mu, np.sqrt(v)) for w, mu, v in parts]
    assert found.log_likelihood == pytest.approx(total_of(logs, axis=0).sum(), rel=1e-12)


# EM written out


def textbook(kind, values, y):
    """Return log-likelihood and the parameters after one step, row by row with whole matrices."""
    mean_name = NAMES[kind][1]
    w, mu = np.array(values["weights"]), np.array(values[mean_name])
    k, m = mu.shape
    C = np.array(values.get("covariances", np.zeros((k, m, m))))
    total, s0, s1, s2 = 0.0, np.zeros(k), np.zeros((k, m)), np.zeros((k, m, m))
    for row in y.T:
        o, u = np.flatnonzero(~np.isnan(row)), np.flatnonzero(np.isnan(row))
        if len(o) == 0:
            continue
        logs, values_, spreads = np.log(w), mu.copy(), np.zeros((k, m, m))
        for a in range(k):
            values_[a, o] = row[o]
            if kind == "gaussian_mixture":
                logs[a] += stats.multivariate_normal.logpdf(row[o], mu[a, o], C[a][np.ix_(o, o)])
                gain = C[a][np.ix_(u, o)] @ np.linalg.inv(C[a][np.ix_(o, o)])
                values_[a, u] += gain @ (row - mu[a])[o]
                spreads[a][np.ix_(u, u)] = C[a][np.ix_(u, u)] - gain @ C[a][np.ix_(o, u)]
            elif kind == "poisson_mixture":
                logs[a] += stats.poisson.logpmf(row[o], mu[a, o]).sum()
            else:
                logs[a] += stats.bernoulli.logpmf(row[o], mu[a, o]).sum()
        total += total_of(logs)
        r = np.exp(logs - total_of(logs))
        s0 += r
        s1 += r[:, None] * values_
        s2 += r[:, None, None] * (spreads + values_[:, :, None] * values_[:, None, :])
    mean = s1 / s0[:, None]
    after = {"weights": s0 / s0.sum(), mean_name: mean}
    if kind == "gaussian_mixture":
        after["covariances"] = s2 / s0[:, None, None] - mean[:, :, None] * mean[:, None, :]
    return total, after


def written(rng, kind, k, m) -> dict[str, Any]:
    if kind == "gaussian_mixture":
        covariances = [random_covariance(rng, m) for _ in range(k)]
        start: dict[str, Any] = {"means": rng.normal(size=(k, m)).tolist(), "covariances": covariances}
    elif kind == "poisson_mixture":
        start = {"rates": rng.uniform(1, 9, (k, m)).tolist()}
    else:
        start = {"probabilities": rng.uniform(0.1, 0.9, (k, m)).tolist()}
    return start | {"weights": rng.dirichlet([5.0] * k).tolist()}


@pytest.mark.parametrize("kind", NAMES)
def test_a_step_is_the_textbooks_and_never_loses(kind):
    for seed, (k, m) in enumerate([(1, 1), (2, 1), (3, 2), (2, 3)]):
        rng = np.random.default_rng([seed, len(kind)])
        y, start = random_data(rng, kind, m, 60), written(rng, kind, k, m)
        one = learner(kind, k, m, **start)
        rows, seen = rows_of(y), []

        def evaluate(theta, one=one, rows=rows, seen=seen):
            seen.append((theta, one.evaluate(theta, rows, 1, UNIT)))
            return seen[-1][1]

        after = one.fit(evaluate, lambda y=y: y, 1)
        value, expected = textbook(kind, start, y)
        assert seen[0][1][0] == pytest.approx(value, rel=1e-10)
        assert seen[0][1][2] == (~np.isnan(y).all(axis=0)).sum()
        moved = one.parameters(seen[1][0])
        for name in NAMES[kind]:
            np.testing.assert_allclose(moved[name], expected[name], rtol=1e-9, atol=1e-11)
        assert after.iterations == 1
        one.fit(evaluate, lambda y=y: y, 60, 0.0)
        values = [a[1][0] for a in seen[2:]]
        assert len(values) > 2 and np.diff(values).min() > -1e-9 * abs(values[-1])


def test_other_parameters_stay():
    """Known rates and unknown weights; known weights and unknown rates; variances about means that are known."""
    for kind, names, kept in (
        ("poisson_mixture", ["weights"], "rates"),
        ("poisson_mixture", ["rates"], "weights"),
        ("gaussian_mixture", ["covariances"], "means"),
    ):
        rng = np.random.default_rng(3)
        y, start = random_data(rng, kind, 2, 100, 0.1), written(rng, kind, 2, 2)
        one = learner(kind, 2, 2, names, **start)
        found = fitted(one, rows_of(y), 100)
        values = one.parameters(found.theta)
        np.testing.assert_allclose(values[kept], start[kept], rtol=1e-15)
        assert not np.allclose(values[names[0]], start[names[0]])
        at_start = one.evaluate(np.array(one._asked.start), rows_of(y), 1, UNIT)[0]
        assert found.log_likelihood > at_start
    one = learner("gaussian_mixture", 1, 1, ["covariances"], means=[0.0], covariances=[1.0])
    found = fitted(one, rows_of(FAITHFUL))
    assert found.theta[2] == pytest.approx((FAITHFUL**2).mean())  # about 0, not about the mean of the rows


# What jobs rely on


@pytest.mark.parametrize("kind", NAMES)
def test_buckets_add_up(kind):
    rng = np.random.default_rng(5)
    y, key = random_data(rng, kind, 2, 300), np.sort(rng.integers(0, 9, 300))
    one = pickle.loads(pickle.dumps(learner(kind, 3, 2)))
    rows = rows_of(y, key)
    parts = [
        kalman.SortedRows(rows.key[here] - low, rows.time[here], rows.y[:, here], rows.u[:, here])
        for low, high in ((0, 2), (2, 7), (7, 9))
        for here in [(key >= low) & (key < high)]
    ]

    def of_buckets(theta):
        found = [one.evaluate(theta, part, int(part.key[-1]) + 1, UNIT) for part in parts]
        return sum(f[0] for f in found), np.sum([f[1] for f in found], axis=0), sum(f[2] for f in found)

    found = one.fit(of_buckets, lambda: y, 40)
    whole, vector, used = one.evaluate(found.theta, rows, 9, UNIT)
    assert found.log_likelihood == pytest.approx(whole, rel=1e-12) and used == of_buckets(found.theta)[2]
    np.testing.assert_allclose(of_buckets(found.theta)[1], vector, rtol=1e-9, atol=1e-9)
    same(one.fit(of_buckets, lambda: y, 40).theta, found.theta)  # the same starts, the same choice
    model = kalman.build(one.definition, one.parameters(found.theta))
    same(model.initial(1)[: len(found.theta), 0], found.theta)


def test_the_start_is_chosen_by_rows_held_out():
    rng = np.random.default_rng(6)
    y = np.concatenate([rng.normal(c, 1.0, 60) for c in (0.0, 20.0, 40.0)])[rng.permutation(180)][None]
    one = learner("gaussian_mixture", 3, holdout=0.2)
    good, bad = (
        np.array([1 / 3] * 3 + [0.0, 20.0, 40.0] + [1.0] * 3),
        np.array([1 / 3] * 3 + [-1.0, 1.0, 30.0] + [1.0, 1.0, 400.0]),
    )
    evaluate = lambda theta: one.evaluate(theta, rows_of(y), 1, UNIT)  # noqa: E731
    _, vector, used = evaluate(np.concatenate([[5], bad, good]))
    table = vector.reshape(2, -1)
    held = y[0, 4::5]
    scores = total_of([stats.norm.logpdf(held, c) - np.log(3) for c in (0.0, 20.0, 40.0)], axis=0)
    assert table[1, :2].tolist() == [pytest.approx(scores.sum(), rel=1e-12), 36.0]
    assert used == 144 and table[1, 3] == 144
    chosen, held_out = one._chosen(evaluate, np.array([bad, good]))
    np.testing.assert_allclose(sorted(chosen[3:6]), [0, 20, 40], atol=1.0)
    assert held_out == pytest.approx(scores.mean(), abs=0.2)
    found = fitted(one, rows_of(y), 200)
    np.testing.assert_allclose(found.theta[3:6], [0, 20, 40], atol=0.5)  # in the order of the means
    assert found.held_out == pytest.approx(scores.mean(), abs=0.2)
    found = fitted(learner("gaussian_mixture", 3, holdout=0.0), rows_of(y), 200)
    assert found.converged and found.held_out is None


def test_rows_that_cannot_be_are_left_out():
    one = learner("poisson_mixture", 2)
    bad = np.insert(QUAKES, [3, 50, 80, 90], [-1.0, 2.5, np.inf, np.nan], axis=1)
    best = poisson_optimum(QUAKES[0], np.array([0.6, 0.4, 15.0, 27.0]))
    np.testing.assert_allclose(best, [0.675726, 0.324274, 15.777108, 26.839895], atol=1e-6)  # as published
    found = fitted(one, rows_of(bad))
    assert found.converged
    np.testing.assert_allclose(found.theta, best, rtol=2e-6)  # EM stops short of it, by its own rate
    theta = np.array([0.5, 0.5, 15.0, 25.0])
    assert one.evaluate(theta, rows_of(bad), 1, UNIT)[0] == one.evaluate(theta, rows_of(QUAKES), 1, UNIT)[0]
    nothing = one.evaluate(theta, rows_of(np.array([[-1.0, 0.5]])), 1, UNIT)  # a bucket without one good row
    assert nothing[0] == 0.0 and nothing[2] == 0 and not nothing[1].any()
    with pytest.raises(kalman.ModelError, match="no row"):
        fitted(one, rows_of(np.array([[-1.0, 0.5]])))
    assert (
        fitted(learner("gaussian_mixture", 3), rows_of(np.full((1, 20), 7.0))).theta[3:6].tolist()
        == [7.0] * 3
    )


# Each key


def test_each_key_is_drawn_towards_the_pooled_mixture():
    rng = np.random.default_rng(7)
    counts, rates = [0, 3, 4000], [None, (4.0, 12.0), (4.0, 12.0)]
    y = np.concatenate([rng.poisson(rng.choice(r, n)) for n, r in zip(counts[1:], rates[1:], strict=True)])[
        None
    ]
    rows = rows_of(y, np.repeat(np.arange(3), counts))
    one = learner("poisson_mixture", 2, scope="key")
    pooled = np.array([0.5, 0.5, 5.0, 15.0])
    around = Population(pooled, np.eye(4), 0)
    found = one.fit_keys(rows, 3, UNIT, around)
    assert found.used.tolist() == counts
    assert found.outcome.tolist() == [FitOutcome.TOO_FEW_ROWS, FitOutcome.TOO_FEW_ROWS, FitOutcome.CONVERGED]
    assert found.reason == ["0 usable rows", "3 usable rows", None]
    np.testing.assert_allclose(found.own, np.array(counts) / (np.array(counts) + 20.0))
    np.testing.assert_allclose(found.theta[:, 0], pooled, rtol=1e-12)
    # the mode of the posterior: the key's rows and 20 more that are as the pooled mixture says
    theta = found.theta[:, 1]
    few, many = (poisson_optimum(part, pooled, pooled, 20.0) for part in (y[0, :3], y[0, 3:]))
    np.testing.assert_allclose(theta, few, rtol=1e-12)
    np.testing.assert_allclose(found.theta[:, 2], many, rtol=1e-8)
    # a key's result does not depend on its company
    part = kalman.SortedRows(np.zeros(3, np.int64), rows.time[:3], rows.y[:, :3], rows.u[:, :3])
    same(one.fit_keys(part, 1, UNIT, around).theta[:, 0], theta)
    # and is what its filter begins with
    model = kalman.build(one.definition, one.parameters(pooled))
    state = model.with_parameters(model.initial(3), found.parameters)
    same(state[:4], found.theta)


@pytest.mark.parametrize(("k", "m"), [(1, 1), (1, 2), (2, 2), (2, 3)])
def test_each_key_of_normal_components_is_the_mode_of_its_posterior(k, m):
    """What EM leaves as it is: moments of the key's rows and 20 more, which are exactly as the pooled mixture says."""
    rng = np.random.default_rng([17, k, m])
    counts = [3, 40, 400]
    one = learner("gaussian_mixture", k, m, scope="key")
    weights = np.array([0.3, 0.7])[2 - k :] / (1.0 if k == 2 else 0.7)
    means = 4.0 * np.arange(k)[:, None] + rng.normal(size=(k, m))
    covariances = np.array([random_covariance(rng, m) + np.eye(m) for _ in range(k)])
    lower = np.tril_indices(m)
    pooled = np.concatenate([weights, means.ravel(), *(a[lower] for a in covariances)])
    y = rng.normal(size=(m, sum(counts))) * 1.5 + 1.0 + 4.0 * rng.integers(0, k, sum(counts))
    found = one.fit_keys(
        rows_of(y, np.repeat(np.arange(3), counts)), 3, UNIT, Population(pooled, np.eye(len(pooled)), 0)
    )
    for key, rows in enumerate(np.split(y, np.cumsum(counts)[:-1], axis=1)):
        theta = found.theta[:, key]
        w, mu, spread = theta[:k], theta[k : k + k * m].reshape(k, m), theta[k + k * m :].reshape(k, -1)
        S = np.zeros((k, m, m))
        S[:, lower[0], lower[1]] = S[:, lower[1], lower[0]] = spread
        logs = [np.log(w[c]) + stats.multivariate_normal(mu[c], S[c]).logpdf(rows.T) for c in range(k)]
        r = special.softmax(np.array(logs).reshape(k, -1), axis=0)
        total = r.sum(axis=1) + 20.0 * weights
        np.testing.assert_allclose(w, total / (counts[key] + 20.0), rtol=1e-7)
        for c in range(k):
            middle = (rows @ r[c] + 20.0 * weights[c] * means[c]) / total[c]
            away, shift = rows - mu[c][:, None], means[c] - mu[c]
            square = (r[c] * away) @ away.T + 20.0 * weights[c] * (covariances[c] + np.outer(shift, shift))
            np.testing.assert_allclose(mu[c], middle, rtol=1e-7, atol=1e-7)
            np.testing.assert_allclose(S[c], square / total[c], rtol=1e-6, atol=1e-7)


def test_a_population_of_mixtures_is_that_of_all_rows():
    rng = np.random.default_rng(11)
    counts = [0, 600, 900, 4]
    y = np.concatenate([rng.poisson(rng.choice([4.0, 15.0], n)) for n in counts])[None].astype(float)
    one = learner("poisson_mixture", 2, scope="key")
    alone = one.fit_keys(rows_of(y, np.repeat(np.arange(4), counts)), 4, UNIT, None)
    few, sound = FitOutcome.TOO_FEW_ROWS, FitOutcome.CONVERGED
    assert alone.outcome.tolist() == [few, sound, sound, few] and np.isnan(alone.theta[:, 0]).all()
    own = fitted(one, rows_of(y[:, :600]))
    np.testing.assert_allclose(alone.theta[:, 1], own.theta, rtol=1e-3)
    population = one.population([alone.take(np.arange(2)), alone.take(np.arange(2, 4))])
    assert population.keys == 3
    np.testing.assert_allclose(population.mean, [0.5, 0.5, 4.0, 15.0], rtol=0.15)
    nothing = one.fit_keys(rows_of(np.empty((1, 0))), 2, UNIT, None)
    with pytest.raises(kalman.ModelError, match="no row"):
        one.population([nothing])


def test_online_em_converges_to_batch_em():
    """Keys of one mixture, begun wrong: their online estimates approach those of batch EM over the same rows."""
    rng = np.random.default_rng(8)
    keys, length = 60, 1500
    y = rng.poisson(rng.choice([3.0, 12.0], (keys, length), p=[0.3, 0.7])).astype(float)
    given = {"filter": "poisson_mixture", "measurement": ["y"]}
    given["mixture"] = {"rates": [1.0, 20.0], "step": {"decay": 0.7, "offset": 10.0}}
    model = kalman.build(given)
    key = np.repeat(np.arange(keys), length)
    states, outputs = kalman.run(
        model, kalman.initial_states(model, keys), rows_of(y.reshape(1, -1), key), UNIT
    )
    batch = fitted(learner("poisson_mixture", 2), rows_of(y.reshape(1, -1), key), 100, 1e-12)
    np.testing.assert_allclose(batch.theta, [0.3, 0.7, 3.0, 12.0], rtol=0.02)
    np.testing.assert_allclose(states.values[:4].mean(axis=1), batch.theta, rtol=0.02)
    # the rows are predicted as well as by the truth, and better than at first
    logs = [np.log(w) + stats.poisson.logpmf(y, rate) for w, rate in ((0.3, 3.0), (0.7, 12.0))]
    loss = total_of(logs, axis=0).mean(axis=0) - outputs.log_likelihood.reshape(keys, length).mean(axis=0)
    assert loss[:50].mean() > 0.02 > 3 * loss[-500:].mean()


def test_only_mixtures_learn_so():
    asked = {"parameters": ["weights", "rates"]}
    given = {"filter": "poisson_mixture", "measurement": ["y"], "mixture": {"components": 2}, "learn": asked}
    assert isinstance(learnable(given), MixtureLearner)
    with pytest.raises(kalman.ModelError, match="the model has no parameter 'R'"):
        learner("poisson_mixture", 2, learn=["R"])


def test_a_start_s_clusters_have_one_row_more_at_the_overall_mean():
    """Two clusters far apart, of three and of one row: weights, means and the variance within, by hand."""
    learn = {"parameters": NAMES["gaussian_mixture"]}
    given = {"filter": "gaussian_mixture", "measurement": ["y"], "mixture": {"components": 2}, "learn": learn}
    asked = request(given)
    for start in draw_seeds(asked, np.array([[0.0, 1.0, 2.0, 101.0]]), 4):
        order = np.argsort(start[2:4])
        np.testing.assert_allclose(start[:2][order], [4 / 6, 2 / 6], rtol=1e-14)
        np.testing.assert_allclose(start[2:4][order], [(3 + 26) / 4, (101 + 26) / 2], rtol=1e-14)
        variance = np.var([0.0, 1.0, 2.0, 101.0])
        away = np.array([0.0, 1.0, 2.0]) - 29 / 4
        within = 0.01 * variance + (away @ away + (101 - 127 / 2) ** 2) / 4
        np.testing.assert_allclose(start[4:], within, rtol=1e-14)
