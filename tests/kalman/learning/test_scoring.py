"""The pooled maximum in few evaluations, and standard errors."""

import numpy as np
import pytest
import yaml
from scipy.optimize import minimize
from statsmodels.tsa.statespace.structural import UnobservedComponents

import kalman
from kalman.learning import maximum_likelihood, scoring
from kalman.learning.key_fits import FitOutcome
from tests.kalman.learning.test_learning import NILE, level, series
from tests.kalman.support.models import same
from tests.kalman.support.oracles import UNIT

HOUR = 3_600_000_000.0


def counted(learn, rows, keys, unit=UNIT):
    seen = []

    def evaluate(theta):
        seen.append(theta)
        return learn.evaluate(theta, rows, keys, unit)

    return learn.fit(evaluate, lambda: np.empty((1, 0)), 100), len(seen)


def delays(rng, keys):
    """Rows as `models/aircraft_delay.yaml` has them: two values drawn back to their means, correlated noise."""
    definition = yaml.safe_load(open("models/aircraft_delay.yaml"))
    length = 40
    rate, variance, mean = np.array([[0.045, 0.006], [390.0, 100.0], [13.0, -6.0]])
    noise = np.linalg.cholesky(definition["observation"]["R"])
    dt = np.exp(rng.normal(1.5, 1.0, (length, keys)))
    x, y = np.empty((length, keys, 2)), np.empty((length, keys, 2))
    for t in range(length):
        kept = np.exp(-rate * dt[t][:, None]) if t else np.zeros((keys, 2))
        x[t] = (x[t - 1] - mean) * kept if t else 0.0
        x[t] += mean + rng.normal(size=(keys, 2)) * np.sqrt(variance * (1.0 - kept**2))
        y[t] = np.stack([x[t, :, 0], x[t].sum(axis=1)], axis=1) + rng.normal(size=(keys, 2)) @ noise.T
    y[rng.random(y.shape) < 0.04] = np.nan
    time = (np.cumsum(dt, axis=0) * HOUR).astype(np.int64)
    key = np.repeat(np.arange(keys), length)
    rows = kalman.SortedRows(
        key, time.T.ravel(), y.transpose(2, 1, 0).reshape(2, -1), np.empty((0, len(key)))
    )
    return definition, rows


def test_few_evaluations():
    """L-BFGS-B, which sees gradients alone, has not arrived after a hundred."""
    definition, rows = delays(np.random.default_rng(1), 150)
    learn = maximum_likelihood.build_linear_learner(definition)
    found, evaluations = counted(learn, rows, 150, HOUR)
    assert found.converged and evaluations <= 8
    rough = maximum_likelihood.build_linear_learner(
        {
            **definition,
            "process": {
                "kind": "sum",
                "parts": [
                    {"name": "departure", "kind": "ornstein_uhlenbeck", "rate": 0.2, "variance": 100.0},
                    {"name": "air", "kind": "ornstein_uhlenbeck", "rate": 0.02, "variance": 20.0},
                ],
            },
            "observation": {"H": [[1.0, 0.0], [1.0, 1.0]], "R": [[500.0, 100.0], [100.0, 500.0]]},
        }
    )
    again, evaluations = counted(rough, rows, 150, HOUR)
    assert again.converged and evaluations <= 25
    assert again.log_likelihood == pytest.approx(found.log_likelihood, abs=1e-5)
    assert found.covariance is not None
    distance = (again.theta - found.theta) / np.sqrt(np.diag(found.covariance))
    assert np.abs(distance).max() < 0.01
    # the truth is within four standard errors or so
    errors, values = dict(found.errors or {}), learn.parameters(found.theta)
    for name, truth in (("departure.mean", 13.0), ("departure.variance", 390.0), ("air.mean", -6.0)):
        assert abs(values[name] - truth) < 4.5 * errors[name]


def test_nile_to_all_published_digits_and_its_standard_errors():
    """Durbin and Koopman (2012), section 2.10; statsmodels' information matrix, which is Harvey's too."""
    learn = maximum_likelihood.build_linear_learner(level({"parameters": ["variance", "R"]}))
    found, evaluations = counted(learn, NILE, 1)
    values = learn.parameters(found.theta)
    assert found.converged and evaluations <= 12
    assert values["R"][0][0] == pytest.approx(15098.53, rel=2e-6)
    assert values["variance"] == pytest.approx(1469.18, rel=4e-6)
    assert found.log_likelihood == pytest.approx(-633.464564, abs=5e-7)
    errors = dict(found.errors or {})
    model = UnobservedComponents(NILE.y[0], "llevel", use_exact_diffuse=True)  # type: ignore[arg-type]
    told = model.observed_information_matrix([values["R"][0][0], values["variance"]]) * 100
    expected = np.sqrt(np.diag(np.linalg.inv(told)))
    np.testing.assert_allclose([errors["R"][0][0], errors["variance"]], expected, rtol=1e-3)


def test_errors_of_independent_values():
    """y ~ N(0, R) throughout: the error of the variance R is R sqrt(2 / N)."""
    rng = np.random.default_rng(3)
    definition = {
        "states": ["x", "z"],
        "measurement": ["a", "b"],
        "process": {"kind": "explicit", "F": np.eye(2).tolist(), "Q": np.zeros((2, 2)).tolist()},
        "observation": {"H": np.eye(2).tolist(), "R": [[2.0, 0.0], [0.0, 3.0]]},
        "initial": {"mean": [0.0, 0.0], "covariance": np.zeros((2, 2)).tolist()},
        "learn": {"parameters": ["R"]},
    }
    y = rng.normal(size=(2, 60))
    y[1, 40:] = np.nan
    rows = kalman.SortedRows(np.repeat(np.arange(3), 20), np.arange(60), y, np.empty((0, 60)))
    learn = maximum_likelihood.build_linear_learner(definition)
    found, _ = counted(learn, rows, 3)
    R, errors = learn.parameters(found.theta)["R"], dict(found.errors or {})["R"]
    np.testing.assert_allclose(np.diag(R), [np.mean(y[0] ** 2), np.mean(y[1, :40] ** 2)], rtol=1e-6)
    np.testing.assert_allclose(np.diag(errors), np.diag(R) * np.sqrt([2 / 60, 2 / 40]), rtol=1e-4)
    assert errors[0][1] == 0.0


def test_a_variance_of_zero_is_an_answer_at_its_bound():
    """The other parameter is what it is without the first; at the bound there is no standard error."""
    rng = np.random.default_rng(4)
    y = 10.0 + rng.normal(size=200)[::-1]
    for q, r, most in ((0.5, 2.0, 20), (1e-3, 1e6, 20), (1e9, 1e-3, 45)):
        learn = maximum_likelihood.build_linear_learner(level({"parameters": ["variance", "R"]}, q, r))
        found, evaluations = counted(learn, series(y), 1)
        assert (found.outcome, found.reason) == (
            FitOutcome.AT_BOUND,
            "variance is zero",
        ) and evaluations < most
        values, errors = learn.parameters(found.theta), dict(found.errors or {})
        assert values["variance"] < 1e-7 and values["R"][0][0] == pytest.approx(y.var(ddof=1), rel=1e-5)
        assert np.isnan(errors["variance"])
        assert errors["R"][0][0] == pytest.approx(y.var(ddof=1) * np.sqrt(2 / 199), rel=1e-3)


def test_a_search_that_is_cut_short_says_so():
    learn = maximum_likelihood.build_linear_learner(level({"parameters": ["variance", "R"]}, 1.0, 1.0))
    found = learn.fit(lambda theta: learn.evaluate(theta, NILE, 1, UNIT), lambda: NILE.y, 2)
    assert found.outcome == FitOutcome.FAILED and "stopped after 2 steps" in str(found.reason)


def unlike_units(seed, keys=24, length=300):
    """Return series whose units are 1e9 apart, with signal-to-noise ratios from 0.001 to 1000."""
    rng = np.random.default_rng(seed)
    scale = 10.0 ** np.linspace(-1, 8, keys)[:, None]
    ratio = 10.0 ** rng.uniform(-3, 3, (keys, 1))
    x = np.cumsum(rng.normal(size=(keys, length)) * np.sqrt(ratio), axis=1)
    y = scale * (x + rng.normal(size=(keys, length)) + 100.0 * rng.normal(size=(keys, 1)))
    time = np.tile(np.arange(length) * int(UNIT), keys)
    key = np.repeat(np.arange(keys), length)
    return kalman.SortedRows(key, time, y.reshape(1, -1), np.empty((0, keys * length)))


@pytest.mark.parametrize("seed", [0, 2])
def test_units_that_are_1e9_apart_take_few_evaluations(seed):
    """Against a search without gradients of the sum of statsmodels' log-likelihoods."""
    rows = unlike_units(seed)
    learn = maximum_likelihood.build_linear_learner(level({"parameters": ["variance", "R"]}, 1.0, 1.0))
    found, evaluations = counted(learn, rows, 24)
    assert found.outcome == FitOutcome.CONVERGED and evaluations < 20
    models = [UnobservedComponents(y, "llevel", use_exact_diffuse=True) for y in rows.y[0].reshape(24, -1)]  # type: ignore[arg-type]

    def negative(theta):
        level_variance, noise = np.exp(theta)
        return -sum(model.loglike([noise, level_variance]) for model in models) / len(rows.key)

    loudest = np.log(np.diff(rows.y[0].reshape(24, -1)[-1]).var())
    best = min(minimize(negative, [loudest + a, loudest + a], method="Nelder-Mead").fun for a in (-1.0, -4.0))
    assert found.log_likelihood == pytest.approx(-best * len(rows.key), abs=0.01)


def test_evaluation_does_not_depend_on_the_order_of_keys_and_adds_up():
    definition, rows = delays(np.random.default_rng(2), 12)
    rows.y[0, 77] = np.inf  # flagged, and left out of everything
    learn = maximum_likelihood.build_linear_learner(definition)
    theta = learn.start + 0.1
    whole = learn.evaluate(theta, rows, 12, HOUR)
    assert whole[2] == len(rows.key) - 1 and len(whole[1]) == 9 + 45
    turned = np.argsort(-rows.key, kind="stable")
    other = kalman.SortedRows(11 - rows.key[turned], rows.time[turned], rows.y[:, turned], rows.u[:, turned])
    same(
        [np.asarray(a) for a in learn.evaluate(theta, other, 12, HOUR)],
        [np.asarray(a) for a in whole],
    )
    parts = []
    for some in (rows.key < 5, rows.key >= 5):
        key = rows.key[some] - rows.key[some].min()
        part = kalman.SortedRows(key, rows.time[some], rows.y[:, some], rows.u[:, some])
        parts.append(learn.evaluate(theta, part, int(key.max()) + 1, HOUR))
    np.testing.assert_allclose(sum(part[1] for part in parts), whole[1], rtol=1e-12)


def test_a_parameter_without_information_has_an_infinite_error():
    found = scoring.invert_to_covariance(np.array([[4.0, 0.0], [0.0, 0.0]]))
    np.testing.assert_array_equal(found, [[0.25, 0.0], [0.0, np.inf]])
    learn = maximum_likelihood.build_linear_learner(level({"parameters": ["variance", "R"]}, 2.0))
    assert learn.errors(learn.start, found)["variance"] == pytest.approx(1.0)
    assert learn.errors(learn.start, found)["R"] == [[np.inf]]


@pytest.mark.parametrize(
    ("gradient", "power", "moves"),
    [(0.5, 1.0, True), (1e-3, 1.0, True), (0.5, 2.0, True), (-0.5, 1.0, False), (0.5, 0.0, False)],
)
def test_a_flat_variable_moves_only_as_a_variance_that_rises(gradient, power, moves):
    """Of it nothing is known; scoring in the variance itself leads far up, and all other steps rest."""
    known = 1e-5
    point = scoring.Point(np.zeros(2), 0.0, np.array([gradient, 0.3]), np.diag([known, 2.0]), 50)
    limits, held = np.array([2.0, 9.0]), np.zeros(2, np.int8)
    step, gain, _ = scoring._compute_step(point, limits, np.array([power, 0.0]), held, [])
    rise = np.log1p(power * gradient / known) / power if moves else 0.0
    assert step == pytest.approx([rise, 0.15], rel=1e-5)
    own = 0.5 * gradient**2 / known if moves else 0.0
    assert gain == pytest.approx(own + 0.0225, rel=1e-5)


@pytest.mark.parametrize(("most", "arrived"), [(100, True), (1, False)])
def test_without_information_at_the_start_the_gradients_lead(most, arrived):
    """Of a quadratic whose information is never a number, L-BFGS-B finds the top in the steps that it may take."""
    learn = maximum_likelihood.build_linear_learner(level({"parameters": ["variance", "R"]}))
    top, weight = learn.start + [1.0, -2.0], np.array([1.0, 7.0])

    def evaluate(theta):
        away = theta - top
        return -0.5 * float(weight @ away**2), np.array([*(-weight * away), *[np.nan] * 3]), 1

    found = learn.fit(evaluate, lambda: np.empty((1, 0)), most)
    assert found.converged == arrived and (found.iterations == 1) == (not arrived)
    assert (np.abs(found.theta - top).max() < 1e-5) == arrived
