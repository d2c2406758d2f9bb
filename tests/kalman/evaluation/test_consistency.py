"""Are filters as sure as they should be? Mean NEES and NIS of simulated keys, and of smoothed states (Bar-Shalom, 5.4).

The linear filter's are in test_linear and test_diagnostics, those of functions in test_gaussian.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kalman
from kalman.evaluation.diagnostics import mean_bounds, nees
from kalman.smoothers.smooth import smooth
from tests.kalman.support.oracles import UNIT, transition_of

KEYS, LENGTH = 300, 20
QUIET = {"kind": "constant_velocity", "acceleration_variance": 0.05}
WILD = {"kind": "constant_velocity", "acceleration_variance": 5.0}
TRANSITION = [[0.9, 0.1], [0.3, 0.7]]


def model(**sections: Any) -> dict[str, Any]:
    return {
        "states": ["x", "v"],
        "measurement": ["y"],
        "process": QUIET,
        "observation": {"R": [[1.0]]},
        "initial": {"mean": [0.0, 0.0], "covariance": [[4.0, 0.0], [0.0, 1.0]]},
        **sections,
    }


def simulated(rng, processes, transition=None, heavy=None, noise=1.0):
    """Return truth (2, N) and rows of keys; each key's process changes, or is drawn once where nothing changes."""
    steps = [transition_of(process, 1.0)[:2] for process in processes]
    mode = rng.integers(len(steps), size=KEYS) if transition is None else np.zeros(KEYS, int)
    x = rng.multivariate_normal([0, 0], [[4, 0], [0, 1]], KEYS)
    xs, ys = [], []
    for k in range(LENGTH):
        if k:
            if transition is not None:
                mode = (rng.random(KEYS) < np.array(transition)[mode, 1]).astype(int)
            roots = np.array([np.linalg.cholesky(Q) for _, Q in steps])[mode]
            x = x @ steps[0][0].T + (roots @ rng.normal(size=(KEYS, 2, 1)))[..., 0]
        e = rng.normal(size=KEYS) if heavy is None else rng.standard_t(heavy, KEYS)
        xs.append(x)
        ys.append(x[:, 0] + np.sqrt(noise) * e)
    key = np.repeat(np.arange(KEYS), LENGTH)
    time = np.tile(np.arange(LENGTH) * 1_000_000, KEYS)
    y = np.array(ys).T.reshape(1, -1)
    rows = kalman.SortedRows(key, time, y, np.empty((0, len(key))))
    return np.array(xs).transpose(2, 1, 0).reshape(2, -1), rows


def filtered(definition: Any, rows: Any, smoothing: bool = False) -> Any:
    built = kalman.build(definition)
    start = kalman.initial_states(built, KEYS)
    return smooth(built, start, rows, UNIT) if smoothing else kalman.run(built, start, rows, UNIT)


LAST = np.arange(KEYS) * LENGTH + LENGTH - 1
MIDDLE = np.arange(KEYS) * LENGTH + LENGTH // 2


@pytest.mark.parametrize(
    "form", [{}, {"form": "square_root"}, {"form": "information"}, {"smoothing": {"lag": 3}}]
)
def test_forms_and_smoothers_of_a_linear_model(form):
    """Exact: within the 99.9 % bounds; states given all rows and given three more are as sure as they should be too."""
    truth, rows = simulated(np.random.default_rng(1), [QUIET])
    _, outputs, *rest = filtered(model(**form), rows, smoothing="smoothing" not in form)
    low, high = mean_bounds(2, KEYS, 0.999)
    assert low < nees(outputs.mean[:, LAST], outputs.covariance[:, LAST], truth[:, LAST]).mean() < high
    low_nis, high_nis = mean_bounds(1, KEYS * LENGTH, 0.999)
    assert low_nis < outputs.nis.mean() < high_nis
    if rest:
        mean, covariance = rest[0].mean[:, MIDDLE], rest[0].covariance[:, MIDDLE]
    else:
        lagged = outputs.extra["lagged_covariance"][:, MIDDLE + 3]
        mean, covariance = outputs.extra["lagged_mean"][:, MIDDLE + 3], lagged[[0, 2, 3]]
    assert low < nees(mean, covariance, truth[:, MIDDLE]).mean() < high


@pytest.mark.parametrize("kind", ["imm", "mmae"])
def test_several_models(kind):
    """Mixtures are not normal, so that NEES spreads more than chi-square; its mean is right all the same."""
    rng = np.random.default_rng(2)
    modes = [{"process": QUIET}, {"process": WILD}]
    definition = model(filter=kind, modes=modes, process=None)
    if kind == "imm":
        definition["transition"] = TRANSITION
        definition["initial"] = {**definition["initial"], "mode_probabilities": [1.0, 0.0]}
    truth, rows = simulated(rng, [QUIET, WILD], TRANSITION if kind == "imm" else None)
    _, outputs, smoothed = filtered(definition, rows, smoothing=True)
    for mean, covariance, at in (
        (outputs.mean, outputs.covariance, LAST),
        (smoothed.mean, smoothed.covariance, MIDDLE),
    ):
        found = nees(mean[:, at], covariance[:, at], truth[:, at])
        assert abs(found.mean() - 2.0) < 3.3 * found.std() / np.sqrt(KEYS)
    assert abs(outputs.nis.mean() - 1.0) < 3.3 * outputs.nis.std() / np.sqrt(outputs.nis.size)


def test_tails_and_noise_that_adapts():
    """Under t-distributed noise robust filters are surer than they should be by little, the plain one by much.

    Their updates are approximations. An adaptive R finds most of a noise that is four times the written one.
    """
    truth, rows = simulated(np.random.default_rng(3), [QUIET], heavy=3)
    found = {}
    for name, section in (
        ("plain", None),
        ("t", {"student_t": {"degrees": 3}}),
        ("huber", {"huber": {"threshold": 1.345}}),
    ):
        _, outputs = filtered(model(robust=section), rows)
        found[name] = nees(outputs.mean[:, LAST], outputs.covariance[:, LAST], truth[:, LAST]).mean()
    for name in ("t", "huber"):
        assert 0.0 < found[name] - 2.0 < 0.6 * (found["plain"] - 2.0)
    truth, rows = simulated(np.random.default_rng(4), [QUIET], noise=4.0)
    nis = {}
    for name, section in (("plain", None), ("adaptive", {"R": 0.1})):
        _, outputs = filtered(model(adaptive=section), rows)
        nis[name] = outputs.nis[LAST].mean()
    assert nis["adaptive"] < 1.7 < 2.2 < nis["plain"]
