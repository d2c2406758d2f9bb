"""EM for the linear filter: it never loses likelihood, and ends where maximum likelihood does."""

from typing import Any

import numpy as np
import pytest

import kalman
from kalman.learning import learners, maximum_likelihood
from kalman.learning.em import climb
from kalman.learning.key_fits import FitOutcome
from tests.kalman.learning.test_learning import NILE, level, series
from tests.kalman.support.models import random_definition, random_rows
from tests.kalman.support.oracles import UNIT


def climbed(definition, rows, keys, iterations=3000):
    learn = learners.learnable({**definition, "learn": {**definition["learn"], "method": "em"}})
    seen = []

    def evaluate(theta):
        seen.append(learn.evaluate(theta, rows, keys, UNIT))
        return seen[-1]

    found = learn.fit(evaluate, lambda: np.empty((1, 0)), iterations)
    # the evaluations after the climb try variances of zero
    return learn, found, np.array([value for value, _, _ in seen[: found.iterations + 1]])


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        ("explicit", ["Q", "R", "initial.mean", "initial.covariance"]),
        ("local_linear_trend", ["level_variance", "slope_variance", "R"]),
        ("sum", ["local_linear_trend.slope_variance", "ornstein_uhlenbeck.variance", "R"]),
        ("constant_velocity", ["acceleration_variance", "initial.covariance"]),
    ],
)
def test_likelihood_never_decreases(kind, parameters):
    rng = np.random.default_rng(len(kind))
    definition = random_definition(rng, kind, 2, 2) | {"learn": {"parameters": parameters}}
    rows = random_rows(rng, definition, 10, 15)
    learn, found, values = climbed(definition, rows, 10, 30)
    assert len(values) > 20 and (np.diff(values) > -1e-9 * abs(values[0])).all()
    assert values[-1] > values[0] + 1.0
    kalman.build(definition, learn.parameters(found.theta))


def test_it_agrees_with_maximum_likelihood_on_the_nile():
    definition = level({"parameters": ["variance", "R"]})
    learn, found, values = climbed(definition, NILE, 1)
    assert found.converged and (np.diff(values) > -1e-9).all()
    assert found.log_likelihood == pytest.approx(-633.464564, abs=1e-5)
    assert learn.parameters(found.theta)["R"][0][0] == pytest.approx(15098.53, rel=1e-3)
    assert learn.parameters(found.theta)["variance"] == pytest.approx(1469.18, rel=1e-2)
    mle = maximum_likelihood.build_linear_learner(definition)
    best = mle.fit(lambda theta: mle.evaluate(theta, NILE, 1, UNIT), lambda: NILE.y, 60)
    assert found.errors is not None and best.errors is not None
    assert found.errors["R"][0][0] == pytest.approx(best.errors["R"][0][0], rel=1e-2)
    assert found.errors["variance"] == pytest.approx(best.errors["variance"], rel=2e-2)


def test_one_step_is_the_textbook_one():
    """Shumway and Stoffer (1982): moments from statsmodels' smoother."""
    from statsmodels.tsa.statespace.structural import UnobservedComponents

    definition = level({"parameters": ["Q", "R"]}) | {
        "process": {"kind": "explicit", "F": [[1.0]], "Q": [[1000.0]]},
        "observation": {"H": [[1.0]], "R": [[10000.0]]},
        "initial": {"mean": [1000.0], "covariance": [[5000.0]]},
        "learn": {"parameters": ["Q", "R", "initial.mean", "initial.covariance"], "method": "em"},
    }
    y = NILE.y[0].copy()
    y[[10, 11, 40]] = np.nan
    rows = series(y)
    learn = learners.learnable(definition)
    start = learn.model.start  # type: ignore[attr-defined]
    _, vector, _ = learn.evaluate(start, rows, 1, UNIT)
    stepped = learn.parameters(learn.maximise(start, vector))  # type: ignore[attr-defined]
    model = UnobservedComponents(y, "llevel")  # type: ignore[arg-type]
    model.initialize_known([1000.0], [[5000.0]])
    told = model.smooth([10000.0, 1000.0], transformed=True)
    x, V = told.smoothed_state[0], told.smoothed_state_cov[0, 0]
    lagged = told.smoothed_state_autocov[0, 0, :-1]
    Q = np.mean((np.diff(x)) ** 2 + V[1:] + V[:-1] - 2 * lagged)
    there = ~np.isnan(y)
    R = np.mean((y - x)[there] ** 2 + V[there])
    assert stepped["Q"][0][0] == pytest.approx(Q, rel=1e-9)
    assert stepped["R"][0][0] == pytest.approx(R, rel=1e-9)
    assert stepped["initial.mean"][0] == pytest.approx(x[0], rel=1e-9)
    assert stepped["initial.covariance"][0][0] == pytest.approx(V[0], rel=1e-9)


def test_a_parameter_without_a_closed_form_is_refused():
    definition = random_definition(np.random.default_rng(1), "ornstein_uhlenbeck", 1, 1)
    definition["learn"] = {"parameters": ["R", "rate"], "method": "em"}
    with pytest.raises(kalman.ModelError, match="learn.method: mle") as error:
        learners.learnable(definition)
    assert error.value.field == "learn.parameters[1]"
    definition["learn"] = {"parameters": ["R"], "method": "ml"}
    with pytest.raises(kalman.ModelError, match="choose mle or em"):
        learners.learnable(definition)


# Entries of F and H


def with_entries(rng, names, controls=0, missing=0.2):
    """A model that made its own rows, and starts from other entries."""
    n, m = 2, 2
    definition = random_definition(rng, "explicit", n, m, controls)
    rows = random_rows(rng, definition, 15, 15, missing)
    x = np.zeros(n)
    F, H = (np.array(definition[a][b]) for a, b in (("process", "F"), ("observation", "H")))
    root = [np.linalg.cholesky(definition[a][b]) for a, b in (("process", "Q"), ("observation", "R"))]
    B = np.array(definition["process"].get("B", np.zeros((n, 0))))
    y = rows.y.copy()
    for k in range(y.shape[1]):
        new = k == 0 or rows.key[k] != rows.key[k - 1]
        x = rng.normal(size=n) if new else F @ x + B @ rows.u[:, k] + root[0] @ rng.normal(size=n)
        y[:, k] = np.where(np.isnan(y[:, k]), np.nan, H @ x + root[1] @ rng.normal(size=m))
    definition["process"]["F"][0][1] += 0.4
    definition["observation"]["H"][1][0] -= 0.5
    definition["learn"] = {"parameters": names}
    return definition, rows._replace(y=y)


ENTRIES = [
    ["F[0][0]", "F[0][1]", "F[1][0]", "F[1][1]", "Q"],
    ["F[0][1]", "R"],
    ["H[1][0]", "R", "Q"],
    ["F[0][1]", "F[1][1]", "H[0][1]", "H[1][0]", "Q", "R", "initial.mean"],
    [{"name": "F[0][1]", "bounds": [-9.0, 9.0]}, {"name": "H[1][0]", "bounds": [None, 9.0]}],
]


@pytest.mark.parametrize("controls", [0, 1])
@pytest.mark.parametrize("names", ENTRIES, ids=str)
def test_entries_of_matrices_never_lose_likelihood(names, controls):
    rng = np.random.default_rng([len(names), controls])
    definition, rows = with_entries(rng, names, controls)
    _, _, values = climbed(definition, rows, 15, 8)
    assert (np.diff(values) > -1e-10 * abs(values[0])).all() and values[-1] > values[0] + 0.1


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(ENTRIES[1], marks=pytest.mark.slow),
        ["H[0][0]", "H[1][0]"],
        pytest.param(ENTRIES[4], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_entries_of_matrices_end_where_maximum_likelihood_does(names):
    definition, rows = with_entries(np.random.default_rng(7), names)
    mle = maximum_likelihood.build_linear_learner(definition)
    best = mle.fit(lambda theta: mle.evaluate(theta, rows, 15, UNIT), lambda: np.empty((1, 0)), 60)
    learn, found, _ = climbed(definition, rows, 15, 150)
    assert found.log_likelihood == pytest.approx(best.log_likelihood, abs=1e-4)
    expected = mle.parameters(best.theta)
    for name, value in learn.parameters(found.theta).items():
        np.testing.assert_allclose(value, expected[name], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("m", [1, 2, 3])
def test_one_step_of_the_matrices_is_the_textbook_one(m):
    """Shumway and Stoffer (1982), equations 12 to 14: all of F, H, Q and R, moments of the joint Gaussian."""
    rng = np.random.default_rng(9)
    n, N = 2, 8
    names = [f"{a}[{i}][{j}]" for a, rows in (("F", n), ("H", m)) for i in range(rows) for j in range(n)]
    definition = random_definition(rng, "explicit", n, m)
    definition["learn"] = {"parameters": [*names, "Q", "R"], "method": "em"}
    y = rng.normal(size=(m, N))
    rows = kalman.SortedRows(np.zeros(N, np.int64), np.arange(N) * 1_000_000, y, np.empty((0, N)))
    learn = learners.learnable(definition)
    start = learn.model.start  # type: ignore[attr-defined]
    _, vector, _ = learn.evaluate(start, rows, 1, UNIT)
    stepped = learn.parameters(learn.maximise(start, vector))  # type: ignore[attr-defined]
    F, Q, H, R = (
        np.array(definition[a][b])
        for a, b in (("process", "F"), ("process", "Q"), ("observation", "H"), ("observation", "R"))
    )
    mean, cov = np.zeros(n * N), np.zeros((n * N, n * N))
    mean[:n], cov[:n, :n] = definition["initial"]["mean"], definition["initial"]["covariance"]
    for k in range(1, N):
        old, new = slice(n * (k - 1), n * k), slice(n * k, n * (k + 1))
        mean[new] = F @ mean[old]
        cov[new, : n * k] = F @ cov[old, : n * k]
        cov[: n * k, new] = cov[new, : n * k].T
        cov[new, new] = F @ cov[old, old] @ F.T + Q
    Z = np.kron(np.eye(N), H)
    gain = np.linalg.solve(Z @ cov @ Z.T + np.kron(np.eye(N), R), Z @ cov).T
    mean = mean + gain @ (y.T.ravel() - Z @ mean)
    both = np.outer(mean, mean) + cov - gain @ Z @ cov
    block = both.reshape(N, n, N, n)
    S11, S00, Sxx = (
        np.sum([block[k, :, k] for k in ks], axis=0) for ks in (range(1, N), range(N - 1), range(N))
    )
    S10 = np.sum([block[k, :, k - 1] for k in range(1, N)], axis=0)
    Syx = np.sum([np.outer(y[:, k], mean[n * k : n * k + n]) for k in range(N)], axis=0)
    new_F, new_H = S10 @ np.linalg.inv(S00), Syx @ np.linalg.inv(Sxx)
    new_Q, new_R = (S11 - new_F @ S10.T) / (N - 1), (y @ y.T - new_H @ Syx.T) / N
    close: Any = {"rtol": 1e-9, "atol": 1e-10}
    np.testing.assert_allclose([stepped[a] for a in names[:4]], new_F.ravel(), **close)
    np.testing.assert_allclose([stepped[a] for a in names[4:]], new_H.ravel(), **close)
    np.testing.assert_allclose(stepped["Q"], new_Q, **close)
    np.testing.assert_allclose(stepped["R"], new_R, **close)


def test_bounds_hold_and_buckets_add_up():
    names = [{"name": "F[0][1]", "bounds": [0.0, 5.0]}, {"name": "H[1][0]", "bounds": [None, 0.0]}, "R"]
    definition, rows = with_entries(np.random.default_rng(3), names)
    definition["process"]["F"][0][1], definition["observation"]["H"][1][0] = 4.0, -4.0
    learn, found, values = climbed(definition, rows, 15, 30)
    said = learn.parameters(found.theta)
    assert 0.0 < said["F[0][1]"] < 5.0 and said["H[1][0]"] < 0.0
    assert (np.diff(values) > -1e-9 * abs(values[0])).all()
    whole = learn.evaluate(found.theta, rows, 15, UNIT)
    parts = []
    for half in (rows.key < 7, rows.key >= 7):
        part = kalman.SortedRows(
            rows.key[half] - rows.key[half][0], rows.time[half], rows.y[:, half], rows.u[:, half]
        )
        parts.append(learn.evaluate(found.theta, part, 15, UNIT))
    np.testing.assert_allclose(parts[0][1] + parts[1][1], whole[1], rtol=1e-10, atol=1e-9)


def test_scaled_noise_and_flagged_rows():
    """A row whose noise is scaled weighs less in the regression; one that is flagged is as if it were not there."""
    definition, rows = with_entries(np.random.default_rng(4), ["H[0][0]", "H[0][1]", "R"], 1)
    definition["control"] = ["u0", "scale"]
    definition["process"]["B"] = [[*row, 0.0] for row in definition["process"]["B"]]
    definition["observation"]["noise_scale"] = "scale"
    scale = np.random.default_rng(1).uniform(0.2, 5.0, len(rows.key))
    rows = rows._replace(u=np.concatenate([rows.u, scale[None]]))
    _, _, values = climbed(definition, rows, 15, 8)
    assert (np.diff(values) > -1e-10 * abs(values[0])).all() and values[-1] > values[0] + 0.1
    learn = learners.learnable({**definition, "learn": {**definition["learn"], "method": "em"}})
    start = learn.model.start  # type: ignore[attr-defined]
    bad = np.array([0, 5, 6, len(rows.key) - 1])
    y = rows.y.copy()
    y[:, bad] = np.inf
    kept = np.setdiff1d(np.arange(len(rows.key)), bad)
    # without the row the one after it has another time step, which `explicit` does not know of
    fewer = kalman.SortedRows(rows.key[kept], rows.time[kept], rows.y[:, kept], rows.u[:, kept])
    flagged = learn.evaluate(start, rows._replace(y=y), 15, UNIT)
    without = learn.evaluate(start, fewer, 15, UNIT)
    np.testing.assert_allclose(flagged[1][:-2], without[1][:-2], rtol=1e-10, atol=1e-9)


WITHOUT_REGRESSION = [
    ({"process": {"kind": "explicit", "F": [[1.0]], "Q": [[0.0]]}}, "F[0][0]", "is zero"),
    ({"observation": {"H": [[1.0]], "R": [["u"]]}, "control": ["u"]}, "H[0][0]", "comes from columns"),
    ({"initial": {"diffuse": True}}, "F[0][0]", "needs a proper initial distribution"),
]


@pytest.mark.parametrize(("changes", "name", "problem"), WITHOUT_REGRESSION)
def test_entries_without_a_regression_are_refused(changes, name, problem):
    definition = {
        **level({"parameters": [name], "method": "em"}),
        "process": {"kind": "explicit", "F": [[1.0]], "Q": [[1.0]]},
        "observation": {"H": [[1.0]], "R": [[1.0]]},
        "initial": {"mean": [0.0], "covariance": [[1.0]]},
        **changes,
    }
    with pytest.raises(kalman.ModelError, match=problem) as error:
        learners.learnable(definition)
    assert error.value.field == "learn.parameters[0]"


def test_a_variance_that_tends_to_zero_is_at_its_bound_and_a_cut_search_says_so():
    rng = np.random.default_rng(4)
    rows = series(10.0 + rng.normal(size=50))
    learn = learners.learnable(level({"parameters": ["variance", "R"], "method": "em"}, 0.5, 2.0))
    found = learn.fit(lambda theta: learn.evaluate(theta, rows, 1, UNIT), lambda: rows.y, 200)
    assert (found.outcome, found.reason) == (FitOutcome.AT_BOUND, "variance is zero")
    cut = learn.fit(lambda theta: learn.evaluate(theta, NILE, 1, UNIT), lambda: NILE.y, 2)
    assert cut.outcome == FitOutcome.FAILED and "stopped after 2 steps" in str(cut.reason)


def climbed_along(values, used, most, tolerance):
    """Climb where step i has the log-likelihood values(i); return the fit, and how many steps were made."""
    asked = []

    def evaluate(theta):
        asked.append(int(theta[0]))
        return values(asked[-1]), np.zeros(0), used

    return climb(evaluate, lambda theta, _: np.array([asked[-1] + 1.0]), np.zeros(1), most, tolerance), asked


@pytest.mark.parametrize("used", [1, 1000])
@pytest.mark.parametrize("tolerance", [1e-3, 1e-8])
@pytest.mark.parametrize("share", [0.3, 0.9, 0.995])
def test_a_climb_ends_where_neither_step_nor_all_steps_to_come_gain_much(share, tolerance, used):
    """Gains that are each the same share of the one before: what is left is known, and when both are small enough."""
    far = 7.3 * used

    def values(step):
        return -far * share**step

    found, asked = climbed_along(values, used, 10_000, tolerance)
    expected = next(
        i
        for i in range(2, 10_000)
        if far * (1.0 - share) * share ** (i - 1) <= tolerance * used and far * share**i <= 1e-6 * used
    )
    assert (found.outcome, found.reason, found.used) == (FitOutcome.CONVERGED, None, used)
    assert found.iterations == expected and asked == list(range(expected + 1))
    assert found.theta[0] == expected and found.log_likelihood == values(expected)
    stopped, _ = climbed_along(values, used, expected - 1, tolerance)
    assert stopped.outcome == FitOutcome.FAILED and stopped.iterations == expected - 1
    assert str(stopped.reason).startswith(f"it stopped after {expected - 1} steps")


def test_a_climb_that_loses_keeps_its_best():
    """A loss ends it, and so does a gain that is rounding of a large log-likelihood."""
    for values, steps, best in (([1.0, 5.0, 4.0], 2, 1), ([3.0, 3.0], 1, 0), ([-4.0, -9.0], 1, 0)):
        found, asked = climbed_along(values.__getitem__, 10, 50, 1e-9)
        assert found.converged and found.iterations == steps and len(asked) == steps + 1
        assert (found.theta[0], found.log_likelihood) == (best, values[best])
    ascent = [-1e12, -1e12 + 1e-2, -1e12 + 1.05e-2, 0.0]  # a gain of less than 1e-3 is rounding
    assert climbed_along(ascent.__getitem__, 10_000, 50, 0.0)[0].iterations == 2
