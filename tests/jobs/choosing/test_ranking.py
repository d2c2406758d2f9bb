"""Structures are fitted near the maximum of their likelihood, and ranked with the noise of the comparison."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import kalman
from jobs.choosing.ranking import choose, compute_standard_error, rank
from jobs.choosing.rhythm import Rhythm
from jobs.choosing.samples import Fitted, SplitRows, mark_held_out, predict, sample_series
from jobs.choosing.search import (
    STUDENT_T,
    build_definition,
    compose,
    fit_grid,
    fit_robust,
    list_structures,
    search,
)
from jobs.core.errors import UserError

DAY = 86_400_000_000
DAILY = Rhythm(DAY, 1.0, 0, 0, 0, "day")


def series(seed: int, n: int, level: float, noise: float) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.cumsum(rng.normal(size=n)) * level + rng.normal(size=n) * noise


def sorted_rows(values: list[np.ndarray]) -> kalman.SortedRows:
    key = np.repeat(np.arange(len(values)), [len(one) for one in values])
    time = np.concatenate([np.arange(len(one)) for one in values]) * DAY
    y = np.concatenate(values)[None]
    return kalman.SortedRows(key, time, y, np.empty((0, len(key))))


@pytest.mark.parametrize(("name", "kind"), [("level", "llevel"), ("trend", "lltrend")])
def test_the_grid_comes_near_statsmodels_maximum(name: str, kind: str) -> None:
    from statsmodels.tsa.statespace import structural

    model_of: Any = structural.UnobservedComponents

    values = [series(k, 150 + 20 * k, level, 1.0) for k, level in enumerate((0.0, 0.03, 0.3, 3.0, 1000.0))]
    values = [one / np.std(np.diff(one)) for one in values]
    rows = sorted_rows(values)
    structure = next(one for one in list_structures(DAILY, None) if one.name == name)
    sample = SplitRows(rows, len(values), np.ones(len(rows.key), bool), float(DAY))
    found = fit_grid(structure, sample, 1.0, 5)
    model = build_definition(compose(["y"], [structure]), ["y"])

    def likelihood(parameters: np.ndarray) -> np.ndarray:
        return np.bincount(rows.key, predict(model, Fitted(parameters, {}), sample))

    best = np.zeros_like(found.parameters)
    for k, one in enumerate(values):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fits = [
                model_of(one, kind, use_exact_diffuse=True).fit(start, disp=0, maxiter=300)
                for start in (None, np.full(len(best), 0.1), np.r_[1.0, np.full(len(best) - 1, 1e-3)])
            ]
        top = max(fits, key=lambda fit: fit.llf)
        best[:, k] = np.roll(top.params, -1)  # ours come before the noise, which is its first
    assert (likelihood(found.parameters) >= likelihood(best) - 0.1).all()
    assert found.at_zero[0]  # white noise about a level that does not move


def test_held_out_rows_are_the_last_of_each_key() -> None:
    key = np.repeat([0, 1], [10, 20])
    seen = np.ones(30, bool)
    seen[8:10] = False
    held = mark_held_out(key, 2, seen)
    assert np.flatnonzero(held[:10]).tolist() == [6, 7, 8, 9]  # 6 of the 8 with a measurement are fitted on
    assert np.flatnonzero(held[10:]).tolist() == [14, 15, 16, 17, 18, 19]


def test_the_standard_error_allows_for_autocorrelation() -> None:
    rng = np.random.default_rng(3)
    n, rho = 400, 0.8
    means, errors = [], []
    for _ in range(300):
        noise = rng.normal(size=n + 50)
        for i in range(1, n + 50):
            noise[i] += rho * noise[i - 1]
        means.append(noise[50:].mean())
        errors.append(compute_standard_error(np.zeros(n, np.int64), noise[50:]))
    assert 0.7 < np.median(errors) / np.std(means) < 1.1
    many = rng.normal(size=(50, 40)) + rng.normal(size=50)[:, None]
    code = np.repeat(np.arange(50), 40)
    assert np.isclose(compute_standard_error(code, many.ravel()), many.mean(axis=1).std(ddof=1) / np.sqrt(50))


def test_equal_models_are_not_told_apart_and_the_simplest_is_chosen() -> None:
    rng = np.random.default_rng(0)
    key = np.repeat(np.arange(20), 50)
    base = rng.normal(size=1000)
    noisy = base + rng.normal(size=1000) * 0.01
    better = base + 0.5 + rng.normal(size=1000) * 0.1
    found = rank(["level", "trend"], key, [base, noisy])
    assert len(found.equals) == 2 and choose(found, ["level", "trend"]).name == "level"
    found = rank(["level", "trend", "season"], key, [base, noisy, better])
    assert [one.name for one in found.equals] == ["season"] and found.best.wins == 1.0
    assert choose(found, ["level", "trend", "season"]).name == "season"
    # better on average, and for a fifth of the keys worse: not for all
    for_some = np.where(key < 4, base - 0.5, base + 1.0)
    found = rank(["level", "season"], key, [base, for_some])
    assert found.best.name == "season" and found.best.at_least == 0.8
    assert choose(found, ["level", "season"]).name == "level"


@pytest.mark.parametrize(("keys", "losers", "chosen"), [(6, 1, "season"), (6, 2, "level"), (4, 1, "level")])
def test_one_of_a_handful_of_keys_is_no_veto(keys: int, losers: int, chosen: str) -> None:
    rng = np.random.default_rng(1)
    key = np.repeat(np.arange(keys), 50)
    base = rng.normal(size=50 * keys)
    for_most = np.where(key < losers, base - 0.2, base + 1.0) + rng.normal(size=50 * keys) * 0.01
    found = rank(["level", "season"], key, [base, for_most])
    assert found.best.name == "season"
    assert choose(found, ["level", "season"]).name == chosen


def test_rows_without_a_likelihood_under_one_model_count_for_none() -> None:
    key = np.zeros(6, np.int64)
    a, b = np.arange(6.0), np.arange(6.0) + 1
    b[2] = np.nan
    found = rank(["a", "b"], key, [a, b])
    assert (found.rows, found.of("b").missing, found.of("b").behind) == (5, 1, 0.0)
    assert np.isclose(found.of("a").behind, 1.0)
    with pytest.raises(ValueError, match="no held-out row"):
        rank(["a", "b"], key, [a, np.full(6, np.nan)])


def noisy(seed: int, keys: int, n: int, draw: Any) -> kalman.SortedRows:
    """Levels that wander, with noise drawn by a function of a generator and a size."""
    rng = np.random.default_rng(seed)
    return sorted_rows([np.cumsum(rng.normal(size=n)) * 0.3 + draw(rng, n) for _ in range(keys)])


def spiked(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.normal(size=n) + np.where(rng.random(n) < 0.03, 50.0 * rng.normal(size=n), 0.0)


@pytest.mark.parametrize(
    ("draw", "robust"),
    [
        (lambda rng, n: rng.standard_t(2, n), 6),
        (spiked, 6),
        (lambda rng, n: rng.normal(size=n), 0),
    ],
    ids=["t2", "spikes", "normal"],
)
@pytest.mark.parametrize(
    ("keys", "n"), [(1, 400), *(pytest.param(k, 200, marks=pytest.mark.slow) for k in (6, 12))]
)
def test_outliers_make_the_choice_robust_and_normal_noise_does_not(
    draw: Any, robust: int, keys: int, n: int
) -> None:
    chosen = []
    for seed in range(6):
        series_ = sample_series(noisy(seed, keys, n, draw), keys, keys, n)
        assert series_ is not None
        choice = search(series_, list_structures(DAILY, None)[:1], float(DAY), 1.0)
        chosen.append(choice.names[0])
        ahead = choice.ranking.of("level").behind - choice.ranking.of("level robust").behind
        assert (ahead > 0.0) == (robust > 0)
    assert sum(name.endswith("robust") for name in chosen) == robust, chosen


def test_a_wanted_season_that_was_not_tried_says_how_to_have_it_tried() -> None:
    series_ = sample_series(sorted_rows([series(1, 80, 0.3, 1.0)]), 1, 1, 80)
    assert series_ is not None
    tried = list_structures(DAILY, None)[:1]
    with pytest.raises(
        UserError, match=r"level robust; a season is tried if .* about 3 .* \(without --quick"
    ):
        search(series_, tried, float(DAY), 1.0, "trend season")
    with pytest.raises(UserError, match=r"tried: level, level robust$"):
        search(series_, tried, float(DAY), 1.0, "levle")


def test_robust_updates_are_fitted_by_their_own_likelihood() -> None:
    """R is the scale of Student's t, which outliers hardly widen; the Gaussian R is their mean square."""
    keys, n = 8, 400
    rows = noisy(0, keys, n, lambda rng, size: rng.standard_t(4, size) * 2.0)
    spikes = rows._replace(y=rows.y + np.where(np.arange(rows.y.size) % 40 == 5, 300.0, 0.0))
    structure = list_structures(DAILY, None)[0]
    model = build_definition(compose(["y"], [structure]), ["y"], STUDENT_T)
    found = {}
    for name, some in (("clean", rows), ("spikes", spikes)):
        sample = SplitRows(some, keys, np.ones(len(some.key), bool), float(DAY))
        plain = fit_grid(structure, sample, 1.0, 5)
        robust = fit_robust(structure, sample, plain, STUDENT_T, 5)
        found[name] = plain.parameters, robust.parameters
        better = [
            np.bincount(some.key, predict(model, Fitted(one, {}), sample))
            for one in (robust.parameters, np.tile([[0.09], [4.0]], keys))
        ]
        assert (better[0] > better[1] - 1.0).all()  # not below the numbers that the rows were made with
    assert np.median(found["spikes"][0][1]) > 400.0
    assert 2.5 < np.median(found["clean"][1][1]) < 6.0 and 2.5 < np.median(found["spikes"][1][1]) < 7.0


@pytest.mark.parametrize("keys", [1, 12])
def test_outliers_do_not_hide_the_better_model_in_their_own_noise(keys: int) -> None:
    rng = np.random.default_rng(2)
    key = np.repeat(np.arange(keys), 240 // keys)
    base = rng.normal(size=240)
    better = base + 0.2 + rng.normal(size=240) * 0.3
    better[7] += 2_000.0  # an outlier that the better model expects
    found = rank(["level", "level robust"], key, [base, better])
    level = found.of("level")
    assert level.behind < 2.0 * level.error and level.is_apart
    assert choose(found, ["level", "level robust"]).name == "level robust"
    equal = base - 0.05 + rng.normal(size=240) * 0.3
    equal[7] += 2_000.0  # one row is not enough to tell
    found = rank(["level", "level robust"], key, [base, equal])
    assert not found.of("level").is_apart
