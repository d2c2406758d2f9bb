"""Smoothing, forecasts and innovations of the non-linear kinds and of every form of the linear one."""

from typing import cast

import numpy as np
import pytest

import kalman
from kalman.evaluation.diagnostics import innovations
from kalman.evaluation.forecast import check_measuring, forecast
from kalman.filters.state_layout import StateLayout
from kalman.smoothers.smooth import smooth
from tests.kalman.support.models import random_definition, random_rows, same
from tests.kalman.support.oracles import UNIT, full

FORMS = [
    {"filter": "extended"},
    {"filter": "unscented", "unscented": {"alpha": 1.0, "beta": 0.0, "kappa": 2.0}},
    {"filter": "cubature"},
    {"filter": "linear", "form": "square_root"},
    {"filter": "unscented", "form": "square_root"},
    {"filter": "linear", "form": "information"},
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))
@pytest.mark.parametrize("kind", ["explicit", "constant_velocity"])
def test_all_are_the_linear_one_where_the_model_is_linear(kind, form):
    rng = np.random.default_rng(4)
    definition = random_definition(rng, kind, 3, 2, 1 if kind == "explicit" else 0)
    rows = random_rows(rng, definition, 20, 8)
    dt, u = rng.uniform(0, 2, (2, 20)), rng.normal(size=(2, len(definition["control"]), 20))
    found = []
    for one in (definition, definition | form):
        model = kalman.build(one)
        start = kalman.initial_states(model, 20)
        states, outputs, smoothed = smooth(model, start, rows, UNIT)
        again, _, white = innovations(model, start, rows, UNIT)
        same(list(states), list(again))
        found.append([*smoothed[:2], white, *forecast(model, states, dt, u)[:4], outputs.mean])
    for ours, linear in zip(found[1], found[0], strict=True):
        np.testing.assert_allclose(ours, linear, rtol=1e-8, atol=1e-8)


def growth(x, dt, u):
    return 0.5 * x + 25 * x / (1 + x**2)


def squared(x):
    return x**2 / 20


GROWTH = {
    "filter": "extended",
    "states": ["x"],
    "measurement": ["z"],
    "process": {"kind": "function", "f": f"{__name__}:growth", "Q": [[1.0]]},
    "observation": {"h": f"{__name__}:squared", "R": [[1.0]]},
    "initial": {"mean": [1.0], "covariance": [[0.5]]},
}


def points(m, P, rule):
    """Sigma points and weights in one dimension: mean, spread, for extended a tangent."""
    if rule == "cubature":
        return m + np.sqrt(P) * np.array([1.0, -1.0]), np.array([0.5, 0.5])
    return m + np.sqrt(3 * P) * np.array([0.0, 1.0, -1.0]), np.array([2 / 3, 1 / 6, 1 / 6])


@pytest.mark.parametrize("rule", ["extended", "unscented", "cubature"])
def test_a_non_linear_model_against_the_textbook(rule):
    """The growth model of Gordon, Salmond and Smith (1993); Särkkä (2013), algorithms 9.1, 9.3 and 10.4."""
    definition = GROWTH | {"filter": rule}
    if rule == "unscented":
        definition |= {"unscented": {"alpha": 1.0, "beta": 0.0, "kappa": 2.0}}
    y = np.array([0.1, 3.0, np.nan, 5.0, 2.0])
    model = kalman.build(definition)
    rows = kalman.SortedRows(np.zeros(5, np.int64), np.arange(5) * 1_000_000, y[None], np.empty((0, 5)))
    states, _, smoothed = smooth(model, kalman.initial_states(model, 1), rows, UNIT)

    def moved(m, P):
        """Mean and variance after the process, and the covariance with the state before."""
        if rule == "extended":
            slope = 0.5 + 25 * (1 - m**2) / (1 + m**2) ** 2
            return growth(m, None, None), slope**2 * P + 1.0, P * slope
        x, w = points(m, P, rule)
        f = growth(x, None, None)
        mean = w @ f
        return mean, w @ (f - mean) ** 2 + 1.0, w @ ((x - m) * (f - mean))

    def seen(m, P):
        if rule == "extended":
            return m**2 / 20, (m / 10) ** 2 * P + 1.0, P * m / 10
        x, w = points(m, P, rule)
        h = squared(x)
        return w @ h, w @ (h - w @ h) ** 2 + 1.0, w @ ((x - m) * (h - w @ h))

    m, P, steps = 1.0, 0.5, []
    for k, z in enumerate(y):
        before = (m, P)
        C = 0.0
        if k:
            m, P, C = moved(m, P)
        predicted = (m, P, C, before)
        if not np.isnan(z):
            mean, S, D = seen(m, P)
            m, P = m + D / S * (z - mean), P - D**2 / S
        steps.append((predicted, (m, P)))
    means, variances = [m], [P]
    for (m_next, P_next, C, (m, P)), _ in reversed(steps[1:]):
        G = C / P_next
        means.append(m + G * (means[-1] - m_next))
        variances.append(P + G**2 * (variances[-1] - P_next))
    np.testing.assert_allclose(smoothed.mean[0], means[::-1], rtol=1e-8)
    np.testing.assert_allclose(smoothed.covariance[0], variances[::-1], rtol=1e-8)
    ahead = forecast(model, states, np.ones((2, 1)))
    m, P = steps[-1][1]
    for s in range(2):
        m, P, _ = moved(m, P)
        np.testing.assert_allclose([ahead.mean[0, s, 0], ahead.covariance[0, s, 0]], [m, P], rtol=1e-8)
        mean, S, _ = seen(m, P)
        ours = [ahead.measurement_mean[0, s, 0], ahead.measurement_covariance[0, s, 0]]
        np.testing.assert_allclose(ours, [mean, S], rtol=1e-8)


def test_a_gated_row_is_smoothed_as_if_it_had_not_been():
    definition = random_definition(np.random.default_rng(2), "constant_velocity", m=2)
    definition["robust"] = {"gate": {"probability": 0.9999}}
    model = kalman.build(definition)
    y = np.random.default_rng(0).normal(size=(2, 8))
    y[:, 4] = 1e4
    rows = kalman.SortedRows(np.zeros(8, np.int64), np.arange(8) * 1_000_000, y, np.empty((0, 8)))
    _, outputs, smoothed = smooth(model, kalman.initial_states(model, 1), rows, UNIT)
    assert np.flatnonzero(outputs.flag).tolist() == [4]
    plain = kalman.build({**definition, "robust": None})
    good = np.delete(np.arange(8), 4)
    without = kalman.SortedRows(rows.key[good], rows.time[good], y[:, good], rows.u[:, good])
    _, _, expected = smooth(plain, kalman.initial_states(plain, 1), without, UNIT)
    np.testing.assert_allclose(smoothed.mean[:, good], expected.mean, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(
        full(smoothed.covariance[:, good]), full(expected.covariance), rtol=1e-8, atol=1e-9
    )
    np.testing.assert_array_equal(smoothed.mean[:, 4], smoothed.mean[:, 3])


def test_a_filter_that_cannot_be_smoothed_or_predicts_no_measurement_is_refused():
    definition = {"filter": "rls", "states": ["b"], "measurement": ["z"], "control": ["x"]}
    model = kalman.build({**definition, "observation": {"H": [["x"]]}})
    rows = kalman.SortedRows(np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones((1, 1)), np.ones((1, 1)))
    start = kalman.initial_states(model, 1)
    with pytest.raises(kalman.ModelError, match="cannot be smoothed"):
        smooth(model, start, rows, UNIT)
    with pytest.raises(kalman.ModelError, match="does not predict its measurements"):
        innovations(model, start, rows, UNIT)  # a residual's law is Student's t
    with pytest.raises(kalman.ModelError, match="does not predict its measurements"):
        check_measuring(cast(kalman.Filter, StateLayout()))
