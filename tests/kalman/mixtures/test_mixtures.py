"""Online mixtures against sufficient statistics written out, one key at a time, with the densities of scipy."""

import itertools
from typing import Any

import numpy as np
import pytest
from scipy import special, stats

import kalman
from kalman import flags
from kalman.mixtures.components import judge, unpack_components
from kalman.mixtures.families import Gaussian
from kalman.mixtures.online import MixtureFilter
from tests.kalman.support import laws
from tests.kalman.support.models import random_covariance, random_rows, same
from tests.kalman.support.oracles import UNIT, full

KINDS = ("gaussian_mixture", "poisson_mixture", "bernoulli_mixture")
MEANS = dict(zip(KINDS, ("means", "rates", "probabilities"), strict=True))


def definition(rng, kind, k, m, **more) -> dict[str, Any]:
    mixture: dict[str, Any] = {"components": k, "weights": rng.dirichlet([5.0] * k).tolist(), **more}
    if kind == "gaussian_mixture":
        mixture["means"] = (rng.normal(size=(k, m)) * 3).tolist()
        mixture["covariances"] = [random_covariance(rng, m) for _ in range(k)]
    elif kind == "poisson_mixture":
        mixture["rates"] = rng.uniform(0.5, 20, (k, m)).tolist()
    else:
        mixture["probabilities"] = rng.uniform(0.1, 0.9, (k, m)).tolist()
    names = [f"y{i}" for i in range(m)]
    return {"filter": kind, "states": names, "measurement": names, "control": [], "mixture": mixture}


def built(given) -> MixtureFilter:
    model = kalman.build(given)
    assert isinstance(model, MixtureFilter)
    return model


def total_of(logs, axis=None) -> Any:
    """Return the logarithm of the sum of what these are the logarithms of."""
    return special.logsumexp(logs, axis=axis)


def rows_for(rng, given, keys, longest, missing=0.25):
    rows = random_rows(rng, given, keys, longest, missing)
    y = rows.y
    if given["filter"] == "poisson_mixture":
        y = np.floor(np.abs(y) * 3)
    if given["filter"] == "bernoulli_mixture":
        y = np.where(np.isnan(y), np.nan, y > 0)
    return rows._replace(y=y)


# The textbook: sums of r, r y and r y y', one row after another


class Textbook:
    """Online EM of Cappé and Moulines (2009), in the statistics themselves."""

    def __init__(self, kind, mixture, gamma, batch, warm_up=0):
        self.warm_up = warm_up
        self.kind, self.gamma, self.batch, self.rows, self.steps = kind, gamma, batch, 0, 0
        self.w = np.array(mixture["weights"])
        self.mu = np.array(mixture[MEANS[kind]], float)
        self.k, self.m = self.mu.shape
        self.C = np.array(mixture.get("covariances", np.zeros((self.k, self.m, self.m))))
        self.s = self.statistics(self.w, self.mu, self.C)
        self.waiting = []

    def statistics(self, r, y, spread):
        second = r[:, None, None] * (spread + y[:, :, None] * y[:, None, :])
        return r.copy(), r[:, None] * y, second

    def density(self, k, y, o):
        if self.kind == "gaussian_mixture":
            C: Any = self.C[k][np.ix_(o, o)]
            return stats.multivariate_normal.logpdf(y[o], self.mu[k, o], C)
        if self.kind == "poisson_mixture":
            return stats.poisson.logpmf(y[o], self.mu[k, o]).sum()
        return stats.bernoulli.logpmf(y[o], self.mu[k, o]).sum()

    def predicted(self):
        within = self.C
        if self.kind == "poisson_mixture":
            within = np.array([np.diag(a) for a in self.mu])
        if self.kind == "bernoulli_mixture":
            within = np.array([np.diag(a * (1 - a)) for a in self.mu])
        mean = self.w @ self.mu
        second = within + self.mu[:, :, None] * self.mu[:, None, :]
        return mean, np.tensordot(self.w, second, 1) - np.outer(mean, mean)

    def step(self, y, batch=None, gamma=None) -> tuple[float, float, np.ndarray]:
        """Return log-likelihood, NIS and responsibilities of a row, and move the mixture; batch, gamma: of this row."""
        o = np.flatnonzero(~np.isnan(y))
        if len(o) == 0:
            return 0.0, np.nan, self.w
        logs = np.log(self.w) + [self.density(k, y, o) for k in range(self.k)]
        total = total_of(logs)
        r = np.exp(logs - total)
        mean, P = self.predicted()
        away = (y - mean)[o]
        nis = away @ np.linalg.solve(P[np.ix_(o, o)], away)
        value, spread = self.mu.copy(), np.zeros((self.k, self.m, self.m))
        value[:, o] = y[o]
        u = np.flatnonzero(np.isnan(y))
        if self.kind == "gaussian_mixture" and len(u):
            for k in range(self.k):
                C = self.C[k]
                gain = np.linalg.solve(C[np.ix_(o, o)], C[np.ix_(o, u)]).T
                value[k, u] = self.mu[k, u] + gain @ (y - self.mu[k])[o]
                spread[k][np.ix_(u, u)] = C[np.ix_(u, u)] - gain @ C[np.ix_(o, u)]
        self.waiting.append(self.statistics(r, value, spread))
        self.rows += 1
        if len(self.waiting) >= (self.batch if batch is None else batch):
            self.steps += 1
            gamma = (gamma or self.gamma)(self.steps)
            fresh = [np.mean(a, axis=0) for a in zip(*self.waiting, strict=True)]
            self.s = tuple((1 - gamma) * a + gamma * b for a, b in zip(self.s, fresh, strict=True))
            self.waiting = []
            if self.rows <= self.warm_up:
                return total, nis, r
            self.w, self.mu = self.s[0] / self.s[0].sum(), self.s[1] / self.s[0][:, None]
            self.C = self.s[2] / self.s[0][:, None, None] - self.mu[:, :, None] * self.mu[:, None, :]
        return total, nis, r


SHAPES = [(1, 1, 1), (2, 1, 1), (3, 2, 1), (2, 3, 4), (4, 2, 3)]


@pytest.mark.parametrize(("kind", "shape"), list(itertools.product(KINDS, SHAPES)))
def test_every_row_is_the_textbooks(kind, shape):
    against_the_textbook(kind, shape)


@pytest.mark.parametrize(("kind", "shape"), list(itertools.product(KINDS, SHAPES[1:4])))
@pytest.mark.parametrize("warm_up", [1, 10])
def test_components_wait_for_the_end_of_a_warm_up_and_statistics_do_not(kind, shape, warm_up):
    against_the_textbook(kind, shape, warm_up=warm_up)


def test_in_a_warm_up_every_row_is_judged_by_the_start():
    rng = np.random.default_rng(4)
    given = definition(rng, "gaussian_mixture", 2, 1, warm_up=8)
    n = 20
    rows = kalman.SortedRows(
        np.zeros(n, np.int64), np.arange(n) * 1_000_000, rng.normal(size=(1, n)), np.empty((0, n))
    )
    rows.y[0, 3] = np.nan  # does not count
    model = built(given)
    _, outputs = kalman.run(model, kalman.initial_states(model, 1), rows, UNIT)
    plain = built({**given, "mixture": {**given["mixture"], "warm_up": None}})
    _, begun = kalman.run(plain, kalman.initial_states(plain, 1), rows, UNIT)
    start, _ = model.moments(model.initial(1))
    assert (outputs.mean[0, :9] == start[0]).all() and outputs.mean[0, 9] != start[0]
    assert begun.mean[0, 0] != start[0]


def against_the_textbook(kind, shape, **more):
    k, m, batch = shape
    rng = np.random.default_rng([k, m, len(kind)])
    step = {"decay": 0.7, "offset": 5.0, "minimum": 0.08}
    given = definition(rng, kind, k, m, batch=batch, step=step, **more)
    rows, model = rows_for(rng, given, 6, 30), built(given)
    states, outputs = kalman.run(model, kalman.initial_states(model, 6), rows, UNIT)
    assert not outputs.flag.any()
    for key in range(6):
        truth = Textbook(kind, given["mixture"], lambda t: max((t + 5.0) ** -0.7, 0.08), batch, **more)
        for n in np.flatnonzero(rows.key == key):
            score, nis, r = truth.step(rows.y[:, n])
            np.testing.assert_allclose(outputs.log_likelihood[n], score, rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(outputs.nis[n], nis, rtol=1e-9)
            np.testing.assert_allclose(outputs.extra["responsibilities"][:, n], r, rtol=1e-9, atol=1e-12)
            mean, P = truth.predicted()
            np.testing.assert_allclose(outputs.mean[:, n], mean, rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(full(outputs.covariance[:, n : n + 1])[0], P, rtol=1e-9, atol=1e-10)
        end = states.values[:, key]
        np.testing.assert_allclose(end[model.places["weights"]], truth.w, rtol=1e-10)
        np.testing.assert_allclose(end[model.places[MEANS[kind]]], truth.mu.ravel(), rtol=1e-10, atol=1e-12)
        assert end[model.places["rows"]] == truth.rows


COLUMNS = ["decay", "offset", "least", "rows"]


def from_columns(rng, kind, k, m, **more) -> dict[str, Any]:
    """Return a mixture whose every row says how it moves."""
    step = {"decay": "decay", "offset": "offset", "minimum": "least"}
    return {**definition(rng, kind, k, m, step=step, batch="rows", **more), "control": COLUMNS}


def columns_for(rng, size):
    return np.array(
        [
            rng.uniform(0.5, 1.0, size),
            rng.uniform(5.0, 12.0, size),
            rng.choice([0.0, 0.08, 0.15], size),
            rng.choice([1.0, 2.0, 2.5, 4.0], size),
        ]
    )


@pytest.mark.parametrize(("kind", "warm_up"), [*itertools.product(KINDS, (None, 5))])
def test_the_steps_and_batches_of_columns_are_the_textbooks(kind, warm_up):
    rng = np.random.default_rng(len(kind))
    given = from_columns(rng, kind, 3, 2, warm_up=warm_up)
    rows, model = rows_for(rng, given, 6, 30), built(given)
    rows = rows._replace(u=columns_for(rng, rows.y.shape[1]))
    states, outputs = kalman.run(model, kalman.initial_states(model, 6), rows, UNIT)
    assert not outputs.flag.any()
    for key in range(6):
        truth = Textbook(kind, given["mixture"], None, None, warm_up or 0)
        for n in np.flatnonzero(rows.key == key):
            decay, offset, least, batch = rows.u[:, n]
            score, _, r = truth.step(
                rows.y[:, n], batch, lambda t, a=decay, b=offset, c=least: max((t + b) ** -a, c)
            )
            np.testing.assert_allclose(outputs.log_likelihood[n], score, rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(outputs.extra["responsibilities"][:, n], r, rtol=1e-9, atol=1e-12)
        end = states.values[:, key]
        np.testing.assert_allclose(end[model.places["weights"]], truth.w, rtol=1e-10)
        counted = [end[model.places[name]].item() for name in ("rows", "steps", "batch_rows")]
        assert counted == [truth.rows, truth.steps, len(truth.waiting)]


@pytest.mark.parametrize("batch", [1, 3])
def test_columns_with_one_value_give_what_the_number_gives(batch):
    rng = np.random.default_rng(9)
    numbers = definition(
        rng, KINDS[0], 2, 2, batch=batch, step={"decay": 0.7, "offset": 5.0, "minimum": 0.08}
    )
    mixture = {**numbers["mixture"], "step": {"decay": "decay", "offset": "offset", "minimum": "least"}}
    given = {**numbers, "control": COLUMNS, "mixture": {**mixture, "batch": "rows"}}
    rows = rows_for(rng, numbers, 6, 30)
    one, other = built(numbers), built(given)
    _, expected = kalman.run(one, kalman.initial_states(one, 6), rows, UNIT)
    u = np.repeat([[0.7], [5.0], [0.08], [batch]], rows.y.shape[1], axis=1)
    _, found = kalman.run(other, kalman.initial_states(other, 6), rows._replace(u=u), UNIT)
    if batch == 1:  # a batch's mean of one row is rounded, the row itself is not
        np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-12)
        np.testing.assert_allclose(found.covariance, expected.covariance, rtol=1e-11)
    else:
        same(found.mean, expected.mean)
        same(found.covariance, expected.covariance)


@pytest.mark.parametrize(
    ("place", "value"), [(0, 0.0), (0, 1.1), (1, 0.0), (2, -0.1), (2, 1.1), (3, 0.9), (3, -1.0)]
)
def test_a_row_whose_columns_give_no_step_is_flagged_alone(place, value):
    rng = np.random.default_rng(3)
    given = from_columns(rng, KINDS[0], 2, 1)
    model, n = built(given), 12
    u = columns_for(rng, n)
    kept = np.arange(n) != 5
    u[place, 5] = value
    rows = kalman.SortedRows(np.zeros(n, np.int64), np.arange(n) * 1_000_000, rng.normal(size=(1, n)), u)
    end, outputs = kalman.run(model, kalman.initial_states(model, 1), rows, UNIT)
    assert outputs.flag.tolist() == np.where(kept, flags.WELL, flags.NOT_PSD).tolist()
    rest = rows._replace(key=rows.key[kept], time=rows.time[kept], y=rows.y[:, kept], u=rows.u[:, kept])
    without, _ = kalman.run(model, kalman.initial_states(model, 1), rest, UNIT)
    same(end.values, without.values)


@pytest.mark.parametrize(
    ("kind", "batch", "warm_up"),
    [*itertools.product(KINDS, (1, 3), (None,)), (KINDS[0], 3, 4), (KINDS[0], "rows", 4)],
)
def test_laws(kind, batch, warm_up):
    rng = np.random.default_rng([len(str(batch))] if batch == "rows" else batch)
    given = definition(rng, kind, 3, 2, batch=batch, warm_up=warm_up)
    if batch == "rows":
        given = from_columns(rng, kind, 3, 2, warm_up=warm_up)
    rows, model = rows_for(rng, given, 40, 12), built(given)
    if batch == "rows":
        rows = rows._replace(u=columns_for(rng, rows.y.shape[1]))
    laws.splitting_and_permuting_keys_changes_no_bit(model, rows, 40, rng)
    laws.cutting_rows_changes_no_bit(model, rows, 40, rng)
    laws.snapshot_restores_every_bit(model, rows, 40)
    laws.a_bad_row_hurts_its_own_key_alone(model, rows, 40, np.inf, flags.NON_FINITE)


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        ("poisson_mixture", -1.0),
        ("poisson_mixture", 2.5),
        ("bernoulli_mixture", 0.5),
        ("bernoulli_mixture", 2.0),
        ("bernoulli_mixture", -1.0),
    ],
)
def test_a_measurement_outside_the_support_is_flagged_alone(kind, bad):
    rng = np.random.default_rng(2)
    given = definition(rng, kind, 2, 2)
    rows, model = rows_for(rng, given, 20, 12), built(given)
    laws.a_bad_row_hurts_its_own_key_alone(model, rows, 20, bad, flags.OUT_OF_SUPPORT)
    assert kalman.FLAGS[flags.OUT_OF_SUPPORT] == "out_of_support"


def test_a_number_too_large_for_a_square_is_flagged_alone():
    rng = np.random.default_rng(3)
    given = definition(rng, "gaussian_mixture", 2, 2)
    rows, model = rows_for(rng, given, 20, 12, 0.0), built(given)
    laws.a_bad_row_hurts_its_own_key_alone(model, rows, 20, 1e200, flags.OVERFLOW)


def gaussians(means, variances=None, weights=None) -> dict[str, Any]:
    k = len(means)
    covariances = [[[a]] for a in (variances or [1.0] * k)]
    mixture = {"means": means, "covariances": covariances, "weights": weights or [1.0 / k] * k}
    return {"filter": "gaussian_mixture", "measurement": ["y"], "mixture": mixture}


def one_row(given, y):
    model = built(given)
    y = np.array(y, float).reshape(1, -1)
    zeros = np.zeros(y.shape[1])
    state = model.initial(y.shape[1])
    return model.step(state, kalman.Rows(zeros, zeros == 0, y, np.empty((0, y.shape[1]))))


def test_far_tails_of_many_components_keep_their_digits():
    """Every exp of a log-likelihood here is zero in float64; the true values follow from their differences."""
    means = [0.0, 1.0, 2.0, 3.0, 4.0]
    _, said = one_row(gaussians(means), [1000.0, -1e6])
    for j, y in enumerate((1000.0, -1e6)):
        logs = np.array([stats.norm.logpdf(y, mu) + np.log(0.2) for mu in means])
        assert said.log_likelihood[j] == pytest.approx(total_of(logs), rel=1e-12)
        expected = np.exp(logs - total_of(logs))
        np.testing.assert_allclose(said.extra["responsibilities"][:, j], expected, rtol=1e-6, atol=1e-300)
        assert said.extra["responsibilities"][:, j].sum() == pytest.approx(1.0, rel=1e-14)
    # three components that are alike, at a row far from all: a third each
    _, said = one_row(gaussians([5.0, 5.0, 5.0]), [1e5])
    np.testing.assert_allclose(said.extra["responsibilities"][:, 0], 1 / 3, rtol=1e-12)


def test_means_far_from_zero_lose_no_digits():
    """In raw sums of squares a variance of 1 around 1e9 is lost; here the mixture moves as it would around 0."""
    rng = np.random.default_rng(4)
    y = rng.normal(size=200) + np.where(rng.random(200) < 0.5, 0.0, 8.0)
    y = np.round(y * 64) / 64  # exact after the shift
    ends = []
    for shift in (0.0, 1e9):
        model = built(gaussians([shift, shift + 8.0]))
        rows = kalman.SortedRows(
            np.zeros(200, np.int64), np.arange(200), (y + shift)[None], np.empty((0, 200))
        )
        states, outputs = kalman.run(model, kalman.initial_states(model, 1), rows, UNIT)
        ends.append((states.values[model.places["covariances"], 0], outputs.log_likelihood))
    np.testing.assert_allclose(ends[1][0], ends[0][0], rtol=1e-5)
    np.testing.assert_allclose(ends[1][1], ends[0][1], rtol=1e-5)


def test_components_do_not_degenerate():
    """The same row over and over, with steps that forget everything else: variance, weight, rate stay above a bound."""
    given = gaussians([0.0, 10.0])
    given["mixture"]["step"] = {"decay": 1.0, "offset": 1.0, "minimum": 0.9}
    model = built(given)
    rows = kalman.SortedRows(np.zeros(300, np.int64), np.arange(300), np.ones((1, 300)), np.empty((0, 300)))
    states, outputs = kalman.run(model, kalman.initial_states(model, 1), rows, UNIT)
    assert not outputs.flag.any()
    end = {name: states.values[place, 0] for name, place in model.places.items()}
    assert end["covariances"][0] == pytest.approx(1e-6 * 26.0)  # of the start's variance, within and between
    assert end["weights"].min() == pytest.approx(1e-6, rel=1e-5) and end["means"][0] == 1.0
    # and the component that had nothing can come back
    state, _ = model.step(
        states.values, kalman.Rows(np.ones(1), np.zeros(1, bool), np.full((1, 1), 10.0), np.empty((0, 1)))
    )
    assert state[1, 0] > 0.8
    zeros = {"filter": "bernoulli_mixture", "measurement": ["y"]}
    zeros["mixture"] = {"probabilities": [0.3, 0.6], "step": {"minimum": 0.9}, "floor": 1e-3}
    model = built(zeros)
    states, outputs = kalman.run(model, kalman.initial_states(model, 1), rows, UNIT)
    assert states.values[model.places["probabilities"], 0].max() == 1 - 1e-3 and not outputs.flag.any()


def test_a_row_with_nothing_in_it_changes_nothing():
    given = definition(np.random.default_rng(5), "gaussian_mixture", 2, 2)
    model = built(given)
    before = model.initial(1)
    nothing = kalman.Rows(np.ones(1), np.zeros(1, bool), np.full((2, 1), np.nan), np.empty((0, 1)))
    after, said = model.step(before, nothing)
    same(after, before)
    assert said.log_likelihood[0] == 0.0 and np.isnan(said.nis[0]) and said.flag[0] == 0
    np.testing.assert_allclose(said.extra["responsibilities"][:, 0], given["mixture"]["weights"], rtol=1e-12)


def test_nis_is_one_a_component_on_average():
    rng = np.random.default_rng(6)
    for kind in KINDS:
        given = definition(rng, kind, 3, 2)
        mixture, n = given["mixture"], 40_000
        which = rng.choice(3, n, p=mixture["weights"])
        centre = np.array(mixture[MEANS[kind]])[which]
        if kind == "gaussian_mixture":
            roots = np.linalg.cholesky(np.array(mixture["covariances"]))
            y = centre + np.einsum("nij,nj->ni", roots[which], rng.normal(size=(n, 2)))
        else:
            y = rng.poisson(centre) if kind == "poisson_mixture" else rng.random((n, 2)) < centre
        zeros = np.zeros(n)
        model = built(given)
        rows = kalman.Rows(zeros, zeros == 0, np.ascontiguousarray(y.T, dtype=float), np.empty((0, n)))
        _, said = model.step(model.initial(n), rows)
        assert said.nis.mean() == pytest.approx(2.0, rel=0.03)


def test_gaussian_densities_integrate_over_missing_components():
    """A row without its second component has the density of the first alone, and expects the second by regression."""
    C = [[2.0, 1.2], [1.2, 1.0]]
    flat = [1.0, 1.0, -1.0, 2.0, 1.2, 1.0]
    y, there = np.array([[2.5], [np.nan]]), [np.array([True]), np.array([False])]
    with np.errstate(all="ignore"):
        judged = judge(Gaussian(), unpack_components(flat, 1, 2, 3), list(y), there)
    assert np.asarray(judged.log_likelihood)[0] == pytest.approx(
        stats.norm.logpdf(2.5, 1.0, np.sqrt(2.0)), rel=1e-12
    )
    (seen,) = judged.seen
    assert np.asarray(seen.value[1])[0] == pytest.approx(-1.0 + 1.2 / 2.0 * 1.5)
    assert np.asarray(seen.spread[2])[0] == pytest.approx(C[1][1] - 1.2**2 / 2.0)


POISSON = {"filter": "poisson_mixture", "measurement": ["y"], "mixture": {"rates": [1.0, 2.0]}}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"mixture": None}, "mixture"),
        ({"mixture": {"rates": [1.0], "components": 2}}, "mixture.rates"),
        ({"mixture": {"rates": [1.0, -2.0]}}, "mixture.rates[1]"),
        ({"mixture": {"rates": [1.0, 2.0], "weights": [0.5, 0.6]}}, "mixture.weights"),
        ({"mixture": {"rates": [1.0, 2.0], "means": [1.0, 2.0]}}, "mixture.means"),
        ({"mixture": {"components": 2}}, "mixture.rates"),
        ({"mixture": {"step": {}}}, "mixture.components"),
        ({"mixture": {"components": 99}}, "mixture.components"),
        ({"mixture": {"components": 2, "weights": [0.5, 0.5]}}, "mixture.weights"),
        ({"mixture": {"rates": [1.0, 2.0], "step": {"decay": 1.5}}}, "mixture.step.decay"),
        ({"mixture": {"rates": [1.0, 2.0], "batch": 0}}, "mixture.batch"),
        ({"mixture": {"rates": [1.0, 2.0], "rate": 1}}, "mixture.rate"),
        ({"states": ["a", "b"]}, "states"),
        ({"control": ["u"]}, "control"),
        ({"mixture": {"rates": [1.0, 2.0], "step": {"minimum": "u"}}}, "mixture.step.minimum"),
        ({"mixture": {"rates": [1.0, 2.0], "batch": "u"}}, "mixture.batch"),
        ({"process": {"kind": "random_walk", "variance": 1.0}}, "process"),
        ({"initial": {"diffuse": True}}, "initial"),
        ({"smoothing": {"lag": 2}}, "smoothing"),
        ({"robust": {"fading": 1.1}}, "robust"),
        ({"learn": {"parameters": ["rate"]}}, "learn.parameters[0]"),
        ({"filter": "bernoulli_mixture", "mixture": {"probabilities": [1.0]}}, "mixture.probabilities[0]"),
        ({"filter": "gaussian_mixture", "mixture": {"means": [1.0]}}, "mixture.covariances"),
        (
            {"filter": "gaussian_mixture", "mixture": {"means": [1.0], "covariances": [0.0]}},
            "mixture.covariances[0]",
        ),
        (
            {"filter": "gaussian_mixture", "mixture": {"means": [1.0], "covariances": [-1.0]}},
            "mixture.covariances[0][0][0]",
        ),
    ],
)
def test_an_error_names_the_field(change, field):
    with pytest.raises(kalman.ModelError) as error:
        kalman.build({**POISSON, **change})
    assert error.value.field == field


def test_a_mixture_without_components_cannot_begin():
    given = {**POISSON, "mixture": {"components": 2}, "learn": {"parameters": ["weights", "rates"]}}
    with pytest.raises(kalman.ModelError, match=r"mixture\.rates.*pretrain"):
        built(given).initial(1)
    model = kalman.build(given, {"weights": [0.25, 0.75], "rates": [[3.0], [4.0]]})
    assert model.initial(1)[:, 0].tolist() == [0.25, 0.75, 3.0, 4.0, 0.0]
    with pytest.raises(kalman.ModelError, match=r"parameters\.weights"):
        kalman.build(given, {"weights": [0.25], "rates": [[3.0], [4.0]]})
