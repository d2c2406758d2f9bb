"""Smoothing of several models: laws, textbook equations, Kim's smoother, and all sequences of modes one by one."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from scipy.special import logsumexp, softmax
from statsmodels.tsa.regime_switching.markov_regression import MarkovRegression

import kalman
from kalman.smoothers.smooth import smooth
from tests.kalman.filters.test_modes import combined, hamilton, identical, random_modes, walk
from tests.kalman.support.models import random_definition, random_rows
from tests.kalman.support.oracles import UNIT, corrected, full, transition_of
from tests.kalman.support.series import FEDFUNDS

NONLINEAR = "tests.kalman.support.nonlinear"


def smoothed_one(definition, y, seconds=None):
    """Smooth one key; return outputs and what is smoothed."""
    y = np.asarray(y, float).reshape(len(y), -1)
    seconds = np.arange(len(y)) if seconds is None else np.asarray(seconds)
    model = kalman.build(definition)
    rows = kalman.SortedRows(
        np.zeros(len(y), np.int64),
        np.round(seconds * UNIT).astype(np.int64),
        y.T.copy(),
        np.empty((0, len(y))),
    )
    _, outputs, smoothed = smooth(model, kalman.initial_states(model, 1), rows, UNIT)
    return outputs, smoothed


def close(a, b, tolerance=1e-9):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


# Laws


@pytest.mark.parametrize("kind", ["imm", "mmae"])
def test_identical_modes_are_smoothed_as_one_filter(kind):
    rng = np.random.default_rng(1)
    transition = rng.dirichlet(np.ones(3), 3).tolist()
    sections = {"filter": "imm", "transition": transition} if kind == "imm" else {"filter": "mmae"}
    one, definition = identical(rng, **sections)
    rows = random_rows(rng, one, 20, 10)
    found = []
    for each in (one, definition):
        model = kalman.build(each)
        found.append(smooth(model, kalman.initial_states(model, 20), rows, UNIT)[1:])
    close(found[1][1].mean, found[0][1].mean)
    close(found[1][1].covariance, found[0][1].covariance)
    # nothing tells the modes apart, now or later
    close(found[1][1].extra["mode_probabilities"], found[1][0].extra["mode_probabilities"])


@pytest.mark.parametrize("kind", ["imm", "mmae"])
def test_modes_that_never_change_are_smoothed_each_for_itself(kind):
    rng = np.random.default_rng(3)
    definition = random_modes(rng, "local_linear_trend", 3, 2, 1, 0)
    definition["transition"] = np.eye(3).tolist() if kind == "imm" else None
    definition["filter"] = kind
    y = rng.normal(size=(9, 1)) * 2
    y[2] = np.nan
    seconds = np.cumsum(rng.uniform(0, 3, 9))
    outputs, smoothed = smoothed_one(definition, y, seconds)
    last = outputs.extra["mode_probabilities"][:, -1]
    close(smoothed.extra["mode_probabilities"], np.tile(last[:, None], 9))
    singles = []
    for mode in definition["modes"]:
        single = {**definition, **mode, "filter": "linear", "modes": None, "transition": None}
        single["initial"] = {k: v for k, v in definition["initial"].items() if k != "mode_probabilities"}
        singles.append(smoothed_one(single, y, seconds)[1])
    for t in range(9):
        m, P = combined(last, [a.mean[:, t] for a in singles], [full(a.covariance)[t] for a in singles])
        close(smoothed.mean[:, t], m)
        close(full(smoothed.covariance)[t], P)


def test_with_a_state_that_is_known_it_is_kims_smoother():
    """The federal funds rate, as in test_modes: nothing is merged, so that it is exact."""
    stay, leave, low, high, variance = 0.9820939, 0.0503587, 3.70877, 9.556793, 2.107562**2
    _, smoothed = smoothed_one(hamilton(stay, leave, (low, high), variance), FEDFUNDS)
    theirs = MarkovRegression(np.array(FEDFUNDS), k_regimes=2).smooth([stay, leave, low, high, variance])
    np.testing.assert_allclose(
        smoothed.extra["mode_probabilities"].T, theirs.smoothed_marginal_probabilities, rtol=1e-8, atol=1e-11
    )
    np.testing.assert_array_equal(smoothed.mean, 1.0)
    np.testing.assert_array_equal(smoothed.covariance, 0.0)


@pytest.mark.parametrize("count", [2, 3])
def test_a_future_without_measurements_changes_nothing(count):
    rng = np.random.default_rng(count)
    definition = random_modes(rng, "local_linear_trend", count, 2, 2, 0)
    y = rng.normal(size=(10, 2))
    y[6:] = np.nan
    outputs, smoothed = smoothed_one(definition, y, np.cumsum(rng.uniform(0, 2, 10)))
    close(smoothed.mean[:, 5:], outputs.mean[:, 5:], 1e-11)
    close(smoothed.covariance[:, 5:], outputs.covariance[:, 5:], 1e-11)
    shown = smoothed.extra["mode_probabilities"], outputs.extra["mode_probabilities"]
    close(shown[0][:, 5:], shown[1][:, 5:], 1e-11)
    assert np.abs(smoothed.mean[:, 3] - outputs.mean[:, 3]).max() > 0.01


@pytest.mark.parametrize("kind", ["extended", "unscented", "cubature"])
def test_modes_of_other_kinds_are_smoothed_the_same_on_matrices(kind):
    rng = np.random.default_rng(8)
    definition = random_modes(rng, "sum", 3, 3, 2, 0)
    other = {**definition, "modes": [{**mode, "filter": kind} for mode in definition["modes"]]}
    other["modes"][0] = definition["modes"][0]
    rows = random_rows(rng, definition, 20, 8)
    found = []
    for each in (definition, other):
        model = kalman.build(each)
        found.append(smooth(model, kalman.initial_states(model, 20), rows, UNIT)[2])
    close(found[1].mean, found[0].mean, 1e-7)
    close(found[1].covariance, found[0].covariance, 1e-7)
    close(found[1].extra["mode_probabilities"], found[0].extra["mode_probabilities"], 1e-7)


def test_company_changes_nothing_and_late_rows_are_left_out():
    rng = np.random.default_rng(5)
    definition = random_modes(rng, "explicit", 2, 2, 2, 1)
    model = kalman.build(definition)
    rows = random_rows(rng, definition, 12, 8)
    _, outputs, smoothed = smooth(model, kalman.initial_states(model, 12), rows, UNIT)
    for key in np.unique(rows.key)[:4]:
        here = np.flatnonzero(rows.key == key)
        own = kalman.SortedRows(
            np.zeros(len(here), np.int64), rows.time[here], rows.y[:, here], rows.u[:, here]
        )
        start = kalman.initial_states(model, 1)
        alone = smooth(model, start, own, UNIT)[2]
        close(smoothed.mean[:, here], alone.mean, 1e-12)
        close(smoothed.covariance[:, here], alone.covariance, 1e-12)
        last = here[-1]  # the last row's state has no later rows
        np.testing.assert_array_equal(smoothed.mean[:, last], outputs.mean[:, last])
    late = kalman.initial_states(model, 12)._replace(
        event_time=np.full(12, np.median(rows.time).astype(np.int64)), count=np.ones(12, np.int64)
    )
    _, outputs, smoothed = smooth(model, late, rows, UNIT)
    assert outputs.late.any() and not outputs.late.all()
    assert np.isnan(smoothed.extra["mode_probabilities"][:, outputs.late]).all()
    assert np.isfinite(smoothed.mean[:, ~outputs.late]).all()


def test_a_mode_that_fails_and_one_that_nothing_leads_to():
    noiseless = {
        "process": {"kind": "random_walk", "variance": 1.0},
        "observation": {"H": [[1.0]], "R": [[0.0]]},
    }
    good = {"process": {"kind": "random_walk", "variance": 1.0}, "observation": {"H": [[1.0]], "R": [[1.0]]}}
    _, smoothed = smoothed_one(walk(modes=[noiseless, good]), [0.5, 0.7, 0.9, 1.1], [0.0, 0.0, 1.0, 2.0])
    assert np.isfinite(smoothed.mean).all() and (smoothed.covariance >= 0.0).all()
    close(smoothed.extra["mode_probabilities"].sum(axis=0), 1.0)
    definition = walk(transition=[[0.0, 1.0], [0.0, 1.0]])
    outputs, smoothed = smoothed_one(definition, [0.5, 0.7, 0.9])
    probabilities = smoothed.extra["mode_probabilities"]
    assert probabilities[1, 1:].min() > 1 - 1e-9
    close(probabilities.sum(axis=0), 1.0)


def test_robust_modes_and_wild_outliers():
    definition = walk(robust={"student_t": {"degrees": 4}})
    _, smoothed = smoothed_one(definition, [0.1, 0.0, 80.0, 0.0])
    assert abs(smoothed.mean[0, 2]) < 5
    for y in ([0.0, 1e6, -1e9, 1.0], [1e-30, 1e-20, 0.0]):
        _, smoothed = smoothed_one(walk(), y)
        assert np.isfinite(smoothed.mean).all() and (smoothed.covariance > 0.0).all()
        close(smoothed.extra["mode_probabilities"].sum(axis=0), 1.0)


def test_a_window_is_refused():
    definition = walk(filter="mmae", transition=None, mmae={"window": 3})
    with pytest.raises(kalman.ModelError, match="given all rows") as error:
        smoothed_one(definition, [0.1, 0.2])
    assert error.value.field == "mmae.window"


# The equations with inverses


def no_wider(V, P):
    """V where it is not above P, which is the most that later rows can leave open."""
    L = np.linalg.cholesky(P)
    values, axes = np.linalg.eigh(np.linalg.solve(L, np.linalg.solve(L, V).T))
    return L @ axes @ np.diag(np.minimum(values, 1.0)) @ axes.T @ L.T


def textbook(definition: Any, y: Any, dt: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Means (N, n), covariances and mode probabilities of one key, by the information that later rows have.

    Of the Gaussian N(a, B) that a mode predicts and what it is given all rows, N(x, V), the quotient is what the
    measurements of that row and later ones say: V^-1 - B^-1 and V^-1 x - B^-1 a. Each pair's prediction is multiplied
    with it (Fraser and Potter 1969; Helmick, Blair and Hoffman 1995).
    """
    inv: Any = np.linalg.inv
    modes, M, N = definition["modes"], len(definition["modes"]), len(y)
    T, mu = np.array(definition["transition"]), np.array(definition["initial"]["mode_probabilities"])
    m: list[Any] = [np.array(definition["initial"]["mean"], float)] * M
    P: list[Any] = [np.array(definition["initial"]["covariance"], float)] * M
    forward: list[Any] = []
    for t in range(N):
        moves: list[Any] = [transition_of(mode["process"], dt[t]) for mode in modes]
        c, a, B = mu, m, P
        if t:
            c = T.T @ mu
            share = T * mu[:, None] / c
            start = [combined(share[:, k], m, P) for k in range(M)]
            a = [moves[k][0] @ start[k][0] + moves[k][2] for k in range(M)]
            B = [moves[k][0] @ start[k][1] @ moves[k][0].T + moves[k][1] for k in range(M)]
        rows = [
            corrected(
                a[k], B[k], np.array(mode["observation"]["H"]), np.array(mode["observation"]["R"]), y[t]
            )
            for k, mode in enumerate(modes)
        ]
        m, P = [row.mean for row in rows], [row.covariance for row in rows]
        joint = np.log(c) + [row.score for row in rows]
        mu = np.exp(joint - logsumexp(joint))
        forward.append((m, P, mu, a, B, moves))
    x, V, chance = forward[-1][0], forward[-1][1], forward[-1][2]
    found = [(*combined(chance, x, V), chance)]
    for t in range(N - 2, -1, -1):
        m, P, mu = forward[t][:3]
        a, B, moves = forward[t + 1][3:]
        states: dict[Any, Any] = {}
        W = np.zeros((M, M))
        V = [no_wider(V[k], forward[t + 1][1][k]) for k in range(M)]
        for k in range(M):
            told, about = inv(V[k]) - inv(B[k]), inv(V[k]) @ x[k] - inv(B[k]) @ a[k]
            scores = np.zeros(M)
            for j in range(M):
                F, Q, offset = moves[k]
                prior, spread = F @ m[j] + offset, F @ P[j] @ F.T + Q
                after = inv(inv(spread) + told)
                mean = after @ (inv(spread) @ prior + about)
                size = np.linalg.slogdet(after)[1] - np.linalg.slogdet(spread)[1]
                scores[j] = np.log(mu[j] * T[j, k]) + 0.5 * (
                    size + mean @ inv(after) @ mean - prior @ inv(spread) @ prior
                )
                G = P[j] @ F.T @ inv(spread)
                states[j, k] = m[j] + G @ (mean - prior), P[j] + G @ (after - spread) @ G.T
            W[:, k] = chance[k] * softmax(scores)
        chance = W.sum(axis=1)
        merged = [
            combined(W[j] / chance[j], *zip(*(states[j, k] for k in range(M)), strict=True)) for j in range(M)
        ]
        x, V = [a for a, _ in merged], [a for _, a in merged]
        found.append((*combined(chance, x, V), chance))
    means, covariances, chances = zip(*found[::-1], strict=True)
    return np.array(means), np.array(covariances), np.array(chances)


@pytest.mark.parametrize("kind", ["explicit", "local_linear_trend", "sum"])
@pytest.mark.parametrize("count", [2, 3])
def test_against_the_textbook(kind, count):
    """Means, covariances and probabilities; missing components, irregular times, several measurements."""
    for seed in range(2):
        rng = np.random.default_rng([seed, count])
        definition = random_modes(rng, kind, count, 2, int(rng.integers(1, 3)), 0)
        N, m = 7, len(definition["measurement"])
        y = rng.normal(size=(N, m)) * 1.5
        y[rng.random(y.shape) < 0.2] = np.nan
        seconds = np.cumsum(rng.choice([0.25, 0.5, 2.0], N))
        _, smoothed = smoothed_one(definition, y, seconds)
        truth = textbook(definition, y, np.diff(seconds, prepend=0))
        close(smoothed.mean.T, truth[0], 1e-7)
        close(full(smoothed.covariance), truth[1], 1e-7)
        close(smoothed.extra["mode_probabilities"].T, truth[2], 1e-7)


# All sequences of modes


def by_all_sequences(definition, y) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The exact answer: one smoother for each of the M^N sequences of modes, weighed by their probabilities."""
    modes, M, N = definition["modes"], len(definition["modes"]), len(y)
    T, start = np.array(definition["transition"]), np.array(definition["initial"]["mode_probabilities"])
    n = len(definition["states"])
    logs, means, covariances, sequences = [], [], [], list(product(range(M), repeat=N))
    for sequence in sequences:
        mean, cov = np.zeros(n * N), np.zeros((n * N, n * N))
        mean[:n], cov[:n, :n] = definition["initial"]["mean"], definition["initial"]["covariance"]
        Z, R = np.zeros((N, n * N)), np.zeros((N, N))
        for t, j in enumerate(sequence):
            new = slice(n * t, n * t + n)
            if t:
                F, Q, offset = transition_of(modes[j]["process"], 1.0)
                old = slice(n * t - n, n * t)
                mean[new] = F @ mean[old] + offset
                cov[new, : n * t] = F @ cov[old, : n * t]
                cov[: n * t, new] = cov[new, : n * t].T
                cov[new, new] = F @ cov[old, old] @ F.T + Q
            Z[t, new], R[t, t] = modes[j]["observation"]["H"][0], modes[j]["observation"]["R"][0][0]
        v, S = y - Z @ mean, Z @ cov @ Z.T + R
        gain = cov @ Z.T @ np.linalg.inv(S)
        chance = np.log(start[sequence[0]]) + sum(
            np.log(T[a, b]) for a, b in zip(sequence, sequence[1:], strict=False)
        )
        logs.append(chance - 0.5 * (v @ np.linalg.solve(S, v) + np.linalg.slogdet(2 * np.pi * S)[1]))
        means.append((mean + gain @ v).reshape(N, n))
        left = cov - gain @ Z @ cov
        covariances.append([left[n * t : n * t + n, n * t : n * t + n] for t in range(N)])
    w = np.exp(np.array(logs) - logsumexp(logs))
    mean = np.einsum("s,stn->tn", w, np.array(means))
    away = np.array(means) - mean
    spread = np.einsum("s,stij->tij", w, np.array(covariances)) + np.einsum("s,sti,stj->tij", w, away, away)
    chances = np.array([[w[[s[t] == j for s in sequences]].sum() for j in range(M)] for t in range(N)])
    return mean, spread, chances


@pytest.mark.parametrize("what", ["process", "noise"])
def test_it_comes_close_to_all_sequences_of_modes(what):
    """A quiet and a wild mode of a trend: how far the smoother is from the exact answer, and how far the filter is.

    Distances of means are in exact standard deviations, squared, a state; the bounds are about twice what was found.
    """
    T = [[0.9, 0.1], [0.2, 0.8]]
    modes: list[Any] = []
    for wild in (False, True):
        noise = 0.01 if what == "noise" or not wild else 4.0
        process = {"kind": "local_linear_trend", "level_variance": 0.01, "slope_variance": noise}
        R = 25.0 if what == "noise" and wild else 1.0
        modes.append({"process": process, "observation": {"H": [[1.0, 0.0]], "R": [[R]]}})
    definition = {
        "filter": "imm",
        "states": ["level", "slope"],
        "measurement": ["y"],
        "modes": modes,
        "transition": T,
        "initial": {
            "mean": [0.0, 0.0],
            "covariance": [[4.0, 0.0], [0.0, 1.0]],
            "mode_probabilities": [0.8, 0.2],
        },
    }
    away: dict[str, list[float]] = {"smoother": [], "filter": []}
    wrong: dict[str, list[float]] = {"smoother": [], "filter": []}
    rng = np.random.default_rng(0)
    for _ in range(8):
        x, mode, rows = np.array([0.0, 0.0]), 0, []
        for _ in range(7):
            mode = int(rng.random() < T[mode][1])
            F, Q, _ = transition_of(modes[mode]["process"], 1.0)
            x = rng.multivariate_normal(F @ x, Q)
            rows.append(x[0] + rng.normal() * np.sqrt(modes[mode]["observation"]["R"][0][0]))
        y = np.array(rows)
        mean, spread, chances = by_all_sequences(definition, y)
        outputs, smoothed = smoothed_one(definition, y)
        for name, found, shown in (
            ("smoother", smoothed.mean, smoothed.extra["mode_probabilities"]),
            ("filter", outputs.mean, outputs.extra["mode_probabilities"]),
        ):
            gap = found.T - mean
            away[name] += [d @ np.linalg.solve(C, d) / 2 for d, C in zip(gap, spread, strict=True)]
            wrong[name] += np.abs(shown.T - chances)[:, 0].tolist()
    assert np.mean(away["smoother"]) < 0.02 < 0.8 < np.mean(away["filter"])
    assert np.mean(wrong["smoother"]) < 0.03 < 0.06 < np.mean(wrong["filter"])


@pytest.mark.parametrize("size", [10.0, 100.0, 1e4])
def test_a_mode_at_the_floor_does_not_rise_above_it(size):
    """A spike: the quiet mode, out of the question there, has a state that suits the rows after it well."""
    definition = walk()
    definition["initial"]["mode_probabilities"] = [0.5, 0.5]
    for mode in definition["modes"]:
        mode["observation"] = {"H": [[1.0]], "R": [[1.0]]}
    y = np.array([0.0, 0.0, size, 0.0, 0.0])
    mean, _, chances = by_all_sequences(definition, y)
    _, smoothed = smoothed_one(definition, y)
    np.testing.assert_allclose(smoothed.mean[0], mean[:, 0], rtol=0.02)
    np.testing.assert_allclose(smoothed.extra["mode_probabilities"].T, chances, atol=1e-3)


# Beyond the limits of rounding


def test_scales_do_not_matter():
    """Units of a millionth and of a million for two states and the measurement: the same in those units."""
    rng = np.random.default_rng(11)
    definition = random_modes(rng, "explicit", 2, 2, 1, 0)
    y = rng.normal(size=(8, 1))
    _, plain = smoothed_one(definition, y)
    unit = np.array([1e-6, 1e6])
    scaled = {**definition, "modes": [], "initial": dict(definition["initial"])}
    scaled["initial"]["mean"] = (unit * definition["initial"]["mean"]).tolist()
    scaled["initial"]["covariance"] = (np.outer(unit, unit) * definition["initial"]["covariance"]).tolist()
    for mode in definition["modes"]:
        F, Q = (np.array(mode["process"][name]) for name in "FQ")
        process = {
            "kind": "explicit",
            "F": (F * unit[:, None] / unit).tolist(),
            "Q": (Q * np.outer(unit, unit)).tolist(),
        }
        H, R = np.array(mode["observation"]["H"]) * 1e3 / unit, np.array(mode["observation"]["R"]) * 1e6
        scaled["modes"].append({"process": process, "observation": {"H": H.tolist(), "R": R.tolist()}})
    _, found = smoothed_one(scaled, y * 1e3)
    close(found.mean / unit[:, None], plain.mean, 1e-8)
    close(full(found.covariance) / np.outer(unit, unit), full(plain.covariance), 1e-8)
    close(found.extra["mode_probabilities"], plain.extra["mode_probabilities"], 1e-8)


def test_random_models_give_covariances():
    rng = np.random.default_rng(12)
    for kind in ("explicit", "constant_velocity", "seasonal_dummy"):
        definition = random_modes(rng, kind, 3, 2, 2, 0)
        rows = random_rows(rng, random_definition(rng, kind, 2, 2), 40, 15)
        model = kalman.build(definition)
        _, outputs, smoothed = smooth(model, kalman.initial_states(model, 40), rows, UNIT)
        assert not outputs.flag.any()
        values = np.linalg.eigvalsh(full(smoothed.covariance))
        assert (values > -1e-9 * values.max(axis=1, keepdims=True)).all()
        shown = smoothed.extra["mode_probabilities"]
        close(shown.sum(axis=0), 1.0, 1e-12)
