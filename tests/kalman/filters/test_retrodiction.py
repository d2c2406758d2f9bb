"""The way back to the previous state: with the predicted covariance it makes up the state's own, in every filter."""

from typing import Any

import numpy as np
import pytest

import kalman
from tests.kalman.support.nonlinear import random_nonlinear
from tests.kalman.support.oracles import full


@pytest.mark.parametrize("fading", [1.0, 1.1])
@pytest.mark.parametrize("form", ["covariance", "square_root"])
@pytest.mark.parametrize(
    ("kind", "points"),
    [
        ("extended", None),
        ("unscented", {"alpha": 1.0, "beta": 2.0, "kappa": 0.0}),
        ("unscented", {"alpha": 1.0, "beta": 0.0, "kappa": -0.3}),  # the covariance is a difference
        ("cubature", None),
    ],
)
def test_rest_and_gain_make_up_the_covariance(kind, points, form, fading):
    """P = rest + G P' G', where P' is that of the step over a row without a measurement."""
    rng = np.random.default_rng(4)
    definition = random_nonlinear(rng, kind, 3, 2, 0) | {"form": form}
    if points:
        definition["unscented"] = points
    if fading != 1.0:
        definition["robust"] = {"fading": fading}
    model: Any = kalman.build(definition)
    state = model.initial(5)
    state[:3] += rng.normal(size=(3, 5))
    rows = kalman.Rows(rng.uniform(0.1, 2.0, 5), np.zeros(5, bool), np.full((2, 5), np.nan), np.empty((0, 5)))
    after, step = model.step(state, rows)
    assert not step.flag.any()
    found = model.prediction(state, rows)
    mean, predicted = model.moments(after)
    G, rest = np.moveaxis(found.gain, 2, 0), full(found.rest)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(
        rest + G @ full(predicted) @ G.swapaxes(1, 2), full(model.moments(state)[1]), rtol=1e-11, atol=1e-13
    )
    assert (np.linalg.eigvalsh(rest) > 0.0).all()
