"""EM for the linear filter: it never loses likelihood, and ends where maximum likelihood does."""

import numpy as np
import pytest

import kalman
from kalman import learning
from tests.kalman.models import random_definition, random_rows
from tests.kalman.oracles import UNIT
from tests.kalman.test_learning import NILE, level, series


def climbed(definition, rows, keys, iterations=3000):
    learn = learning.learnable({**definition, "learn": {**definition["learn"], "method": "em"}})
    seen = []

    def evaluate(theta):
        seen.append(learn.evaluate(theta, rows, keys, UNIT))
        return seen[-1]

    found = learn.fit(evaluate, lambda: np.empty((1, 0)), iterations)
    return learn, found, np.array([value for value, _, _ in seen])


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
    learn, found, values = climbed(definition, rows, 10, 60)
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
    learn = learning.learnable(definition)
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


def test_what_has_no_closed_form_is_said():
    definition = random_definition(np.random.default_rng(1), "ornstein_uhlenbeck", 1, 1)
    definition["learn"] = {"parameters": ["R", "rate"], "method": "em"}
    with pytest.raises(kalman.ModelError, match="learn.method: mle") as error:
        learning.learnable(definition)
    assert error.value.field == "learn.parameters[1]"
    definition["learn"] = {"parameters": ["R"], "method": "em", "scope": "key"}
    with pytest.raises(kalman.ModelError, match="all keys together"):
        learning.learnable(definition)
    definition["learn"] = {"parameters": ["R"], "method": "ml"}
    with pytest.raises(kalman.ModelError, match="choose mle or em"):
        learning.learnable(definition)
