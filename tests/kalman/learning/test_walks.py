"""Compiled learning steps: the bits of rounds of NumPy calls, for all keys at once and for one long series."""

from typing import Any

import numpy as np
import pytest
from statsmodels.tsa.statespace.structural import UnobservedComponents

import kalman
from kalman.learning.groups import group_learning
from kalman.learning.key_fits import FitOutcome
from kalman.learning.key_rows import sort_by_rounds
from kalman.learning.keys import walks
from kalman.learning.keys.directions import compute_direction, invert_information
from kalman.learning.keys.values import compute_fits, evaluate, whiten_innovations
from kalman.learning.maximum_likelihood import build_linear_learner
from kalman.linalg import elementwise
from kalman.linalg.compiled import load_llvm
from tests.kalman.support.key_series import LEVEL
from tests.kalman.support.models import same
from tests.kalman.support.oracles import UNIT

TREND: dict[str, Any] = {
    "states": ["level", "slope"],
    "measurement": ["y"],
    "process": {"kind": "local_linear_trend", "level_variance": 0.5, "slope_variance": 0.01},
    "observation": {"H": [[1.0, 0.0]], "R": [[1.0]]},
    "initial": {"mean": [0.0, 0.0], "covariance": [[10.0, 0.0], [0.0, 1.0]]},
    "learn": {"parameters": ["level_variance", "slope_variance", "R"], "scope": "key"},
}
PAIR: dict[str, Any] = {
    **TREND,
    "measurement": ["a", "b"],
    "observation": {"H": [[1.0, 0.0], [0.5, 1.0]], "R": [[1.0, 0.2], [0.2, 2.0]]},
    "initial": {"diffuse": True},
}
KINDS: dict[str, dict[str, Any]] = {
    "trend": TREND,
    "diffuse": {**TREND, "initial": {"diffuse": True}},
    "two measurements": PAIR,
    "an exponential of the time step": {
        **TREND,
        "process": {"kind": "damped_trend", "level_variance": 0.5, "slope_variance": 0.1, "damping": 0.9},
    },
    "a matrix entry": {
        **TREND,
        "process": {"kind": "explicit", "F": [[1.0, 0.9], [0.0, 0.8]], "Q": [[0.5, 0.0], [0.0, 0.1]]},
        "learn": {"parameters": ["F[0][1]", "Q", "R"], "scope": "key"},
    },
}


@pytest.fixture(autouse=True)
def _nothing_compiled_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_llvm() is not None, "the tests of this file would compare rounds with rounds"
    monkeypatch.setattr(walks, "_PHASES", {})


def _draw(kind: dict[str, Any], keys: int, most: int, missing: bool) -> tuple[Any, Any, np.ndarray]:
    """Return learned entries, rows in rounds, and numbers for the entries of each key."""
    rng = np.random.default_rng(38)
    count = rng.integers(most // 20 + 1, most, keys) if keys > 1 else np.array([most])
    key = np.repeat(np.arange(keys), count)
    time = np.concatenate([np.cumsum(rng.integers(1, 4, n)) for n in count]) * int(UNIT)
    y = rng.normal(size=(len(kind["measurement"]), len(key)))
    if missing:
        y[rng.random(y.shape) < 0.2] = np.nan
    of = build_linear_learner(kind).key_model.of
    rows = sort_by_rounds(kalman.SortedRows(key, time, y, np.empty((0, len(key)))), UNIT)
    entries = np.exp(rng.normal(size=(len(of.entries), keys)))
    for place, (name, entry) in enumerate(of.entries):
        if name in ("Q", "R") and entry == 1:  # a covariance
            entries[place] = 0.1 * rng.normal(size=keys)
    return of, rows, entries


@pytest.mark.parametrize("keys, most", [(203, 40), (1, 500)])
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_learning_changes_no_bit(
    kind: str, missing: bool, keys: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, rows, entries = _draw(KINDS[kind], keys, most, missing)
    results = []
    for enough in (10**9, 0):
        monkeypatch.setattr(walks, "ENOUGH_ROWS", enough)
        monkeypatch.setattr(walks, "_PHASES", {})
        values, fits = evaluate(of, rows, entries), compute_fits(of, rows, entries)
        results.append([*values, *fits, whiten_innovations(of, rows, entries)])
        assert (None not in walks._PHASES.values()) and bool(walks._PHASES) == (enough == 0)
    for compiled, rounds in zip(*results, strict=True):
        same(compiled, rounds)


def test_what_a_state_needs_of_a_function_of_a_learned_number_is_not_compiled() -> None:
    kind = {
        **TREND,
        "process": {"kind": "ornstein_uhlenbeck", "rate": 0.1, "variance": 0.5},
        "states": ["level"],
        "observation": {"H": [[1.0]], "R": [[1.0]]},
        "initial": {"diffuse": True},
        "learn": {"parameters": ["rate", "R"], "scope": "key"},
    }
    of, rows, entries = _draw(kind, 3, 30, False)
    assert walks.sum_rows(of, rows._replace(missing=np.zeros(len(rows.missing), bool)), entries) is None


@pytest.mark.parametrize("p", [1, 3])
def test_compiled_directions_change_no_bit(p: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, keys = np.random.default_rng(p), 5000
    root = rng.normal(size=(p, p, keys))
    information = np.einsum("ikn,jkn->ijn", root, root)
    information[:, :, :3] = [0.0, np.nan, np.inf]
    held = rng.random((p, keys)) < 0.2
    pairs = rng.normal(size=(3, p, keys)), rng.normal(size=(3, p, keys)), rng.random((3, keys)) < 0.5
    given = rng.normal(size=(p, keys)), information, held, pairs
    compiled = compute_direction(*given)
    monkeypatch.setattr(elementwise, "MANY_KEYS", 10**9)
    monkeypatch.setattr(elementwise.Elementwise, "_find_lanes", lambda self, keys: None)
    for one, other in zip(compiled, compute_direction(*given), strict=True):
        same(one, other)


def test_directions_are_those_of_matrices() -> None:
    """Without pairs the step is the inverse information times the gradient, over the numbers that move."""
    rng, p, keys = np.random.default_rng(5), 10, 4
    for size in (3, p):
        root = rng.normal(size=(size, 2 * size, keys))
        information = np.einsum("ikn,jkn->ijn", root, root)
        gradient, held = rng.normal(size=(size, keys)), rng.random((size, keys)) < 0.2
        none = np.zeros((3, size, keys))
        step, rise = compute_direction(gradient, information, held, (none, none, np.zeros((3, keys), bool)))
        for k in range(keys):
            free = ~held[:, k]
            wanted = np.zeros(size)
            wanted[free] = np.linalg.solve(information[free][:, free][:, :, k], gradient[free, k])
            np.testing.assert_allclose(step[:, k], wanted, rtol=1e-4, atol=1e-8)
            np.testing.assert_allclose(rise[k], 0.5 * wanted @ gradient[:, k], rtol=1e-4)
        assert invert_information(information, held).shape == (size, size, keys)


@pytest.mark.parametrize("keys, most", [(60, 40), (1, 400)])
def test_pooled_learning_evaluates_as_the_adjoint(
    keys: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Value, gradient and rows are those of the adjoint; the information is that of differences, but exact."""
    learner = build_linear_learner({**KINDS["diffuse"], "learn": {"parameters": ["level_variance", "R"]}})
    rng = np.random.default_rng(7)
    key = np.repeat(np.arange(keys), most)
    y = np.cumsum(rng.normal(size=(1, len(key))), axis=1)
    y[0, ::7] = np.nan
    time = np.tile(np.arange(most) * int(UNIT), keys)
    rows = kalman.SortedRows(key, time, y, np.empty((0, len(key))))
    theta, group = learner.start + 0.3, np.arange(keys) % 2
    both = np.repeat(theta[:, None], 2, axis=1)
    results = []
    for enough in (0, 10**9):
        monkeypatch.setattr(walks, "ENOUGH_ROWS", enough)
        monkeypatch.setattr(walks, "_PHASES", {})
        results.append(
            (
                *learner.evaluate(theta, rows, keys, UNIT),
                *group_learning(learner).evaluate(both, group, rows, keys, UNIT),
            )
        )
    for compiled, adjoint in zip(*results, strict=True):
        np.testing.assert_allclose(compiled, adjoint, rtol=1e-4, atol=1e-6)
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-12)


def test_pooled_learning_leaves_out_flagged_rows_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "ENOUGH_ROWS", 0)
    learner = build_linear_learner({**TREND, "learn": {"parameters": ["level_variance", "R"]}})
    y = np.array([[0.0, 1.0, 1e300, 2.0, np.inf, 1.0]])
    rows = kalman.SortedRows(np.zeros(6, np.int64), np.arange(6) * int(UNIT), y, np.empty((0, 6)))
    value, vector, used = learner.evaluate(learner.start, rows, 1, UNIT)
    assert np.isfinite(value) and np.isfinite(vector).all() and used == 4


def _fit_by_statsmodels(y: np.ndarray) -> Any:
    """Return statsmodels' fit of a local level."""
    peer: Any = UnobservedComponents
    return peer(y, "llevel", use_exact_diffuse=True).fit(disp=0)


@pytest.mark.parametrize("q, r", [(1.7e5, 4.6e-4), (288.0, 3.4e-9), (2.3e8, 2.1e-8), (1e9, 1e-3)])
def test_the_scale_of_the_written_noises_does_not_matter(q: float, r: float) -> None:
    """Of white noise, wherever the search of the long series starts; statsmodels starts at the data's scale."""
    y = np.random.default_rng(4).normal(size=400)
    level = {
        "states": ["level"],
        "measurement": ["y"],
        "process": {"kind": "random_walk", "variance": q},
        "observation": {"R": [[r]]},
        "initial": {"diffuse": True},
        "learn": {"parameters": ["variance", "R"]},
    }
    learner = build_linear_learner(level)
    rows = kalman.SortedRows(np.zeros(400, np.int64), np.arange(400) * int(UNIT), y[None], np.empty((0, 400)))
    found = learner.fit(lambda theta: learner.evaluate(theta, rows, 1, UNIT), lambda: rows.y, 100)
    assert found.outcome == FitOutcome.CONVERGED
    assert found.log_likelihood == pytest.approx(_fit_by_statsmodels(y).llf, abs=1e-4)


def test_a_long_series_is_learned_in_seconds_as_by_statsmodels() -> None:
    """20,000 rows; in rounds of NumPy calls this takes minutes."""
    rng = np.random.default_rng(11)
    y = np.cumsum(rng.normal(size=20_000)) + 2.0 * rng.normal(size=20_000)
    key, time = np.zeros(len(y), np.int64), np.arange(len(y)) * int(UNIT)
    rows = kalman.SortedRows(key, time, y[None], np.empty((0, len(y))))
    found = build_linear_learner(LEVEL).fit_keys(rows, 1, UNIT, None)
    best = _fit_by_statsmodels(y)
    assert found.log_likelihood[0] >= best.llf - 1e-3
    np.testing.assert_allclose(found.parameters[::-1, 0], best.params, rtol=1e-2)
