"""Fixed-interval smoothing against the joint Gaussian of all rows, published numbers and statsmodels."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from scipy.linalg import null_space
from statsmodels.tsa.statespace.structural import UnobservedComponents

import kalman
from kalman.smoothers.moments import MomentSmoother
from kalman.smoothers.smooth import Smoothed, smooth
from tests.kalman.filters.test_linear import NILE, nile_model
from tests.kalman.support.decimals import given_all
from tests.kalman.support.models import random_definition, random_rows, same
from tests.kalman.support.oracles import UNIT, full, transition_of

KINDS = ["explicit", "local_linear_trend", "constant_velocity", "continuous", "sum"]


class Joint(NamedTuple):
    means: np.ndarray  # (N, n)
    covariances: np.ndarray  # (N, n, n), infinite where nothing determines the state


def joint(definition: dict[str, Any], H: np.ndarray, y: np.ndarray, dt: np.ndarray, u: np.ndarray) -> Joint:
    """Every state given every measurement: y (N, m), dt (N,), u (N, c), from one big Gaussian.

    Diffuse states at the start are unknown constants with a flat prior (Harvey 1989, section 3.4.3).
    """
    n, N = len(definition["states"]), len(y)
    initial = definition["initial"]
    flat = np.broadcast_to(np.array(initial.get("diffuse", False)), n)
    R = np.array(definition["observation"]["R"], float)
    B = np.array(definition["process"].get("B") or np.zeros((n, u.shape[1])))
    mean, cov, reach = np.zeros(n * N), np.zeros((n * N, n * N)), np.zeros((n * N, flat.sum()))
    mean[:n] = initial.get("mean") or np.zeros(n)
    cov[:n, :n] = initial.get("covariance") or np.zeros((n, n))
    reach[:n] = np.eye(n)[:, flat]
    for k in range(1, N):
        F, Q, c = transition_of(definition["process"], dt[k])
        old, new = slice(n * (k - 1), n * k), slice(n * k, n * (k + 1))
        mean[new] = F @ mean[old] + B @ u[k] + c
        reach[new] = F @ reach[old]
        cov[new, : n * k] = F @ cov[old, : n * k]
        cov[: n * k, new] = cov[new, : n * k].T
        cov[new, new] = F @ cov[old, old] @ F.T + Q
    seen = ~np.isnan(y.ravel())
    Z = np.kron(np.eye(N), H)[seen]
    V = Z @ cov @ Z.T + np.kron(np.eye(N), R)[np.ix_(seen, seen)]
    X = Z @ reach
    free = null_space(X, rcond=1e-9) if X.size else np.eye(X.shape[1])  # what no measurement says anything of
    gain = np.linalg.solve(V, Z @ cov).T
    left = reach - gain @ X
    information = np.linalg.pinv(X.T @ np.linalg.solve(V, X), rcond=1e-10, hermitian=True)
    v = y.ravel()[seen] - Z @ mean
    start = information @ X.T @ np.linalg.solve(V, v)
    mean = mean + reach @ start + gain @ (v - X @ start)
    cov = cov - gain @ Z @ cov + left @ information @ left.T
    cov = np.where(np.abs(reach @ free @ free.T @ reach.T) > 1e-22, np.inf, cov)
    blocks = [cov[n * k : n * (k + 1), n * k : n * (k + 1)] for k in range(N)]
    return Joint(mean.reshape(N, n), np.array(blocks))


def smooth_rows(
    definition: dict[str, Any], rows: kalman.SortedRows, keys: int
) -> tuple[kalman.Outputs, Smoothed]:
    model = kalman.build(definition)
    _, outputs, smoothed = smooth(model, kalman.initial_states(model, keys), rows, UNIT)
    return outputs, smoothed


def smooth_one(definition: dict[str, Any], y: Any, seconds: Any = None, u: Any = None) -> Smoothed:
    y = np.asarray(y, float)
    y = y.reshape(len(y), -1)
    seconds = np.arange(len(y)) if seconds is None else np.asarray(seconds)
    u = np.empty((len(y), 0)) if u is None else np.asarray(u, float)
    time = np.round(seconds * UNIT).astype(np.int64)
    rows = kalman.SortedRows(np.zeros(len(y), np.int64), time, y.T.copy(), u.T.copy())
    return smooth_rows(definition, rows, 1)[1]


def check(
    definition: dict[str, Any], rows: kalman.SortedRows, smoothed: Smoothed, rtol: float = 1e-9
) -> None:
    H = np.array(definition["observation"]["H"])
    for key in np.unique(rows.key):
        here = rows.key == key
        dt = np.diff(rows.time[here], prepend=0) / UNIT
        compare(joint(definition, H, rows.y[:, here].T, dt, rows.u[:, here].T), smoothed, here, rtol)


def compare(truth: Any, smoothed: Smoothed, here: np.ndarray, rtol: float) -> None:
    """Compare the rows `here`, the rest of a covariance's digits in units of the key's greatest."""
    V = full(smoothed.covariance[:, here])
    finite = np.isfinite(truth.covariances)
    np.testing.assert_array_equal(np.isfinite(V), finite)
    known = np.isfinite(np.diagonal(truth.covariances, axis1=1, axis2=2))
    size = np.abs(truth.covariances[finite]).max(initial=1e-3)
    close: Any = {"rtol": rtol, "atol": rtol * np.sqrt(size)}
    np.testing.assert_allclose(smoothed.mean[:, here].T[known], truth.means[known], **close)
    np.testing.assert_allclose(V[finite], truth.covariances[finite], rtol=rtol, atol=rtol * size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_joint_gaussian_over_random_models(kind, seed):
    """Correlated noise, missing components and rows, irregular times that repeat, control."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    controls = int(rng.integers(0, 3)) if kind == "explicit" else 0
    definition = random_definition(rng, kind, int(rng.integers(1, 5)), int(rng.integers(1, 4)), controls)
    rows = random_rows(rng, definition, 6, 12)
    _, smoothed = smooth_rows(definition, rows, 6)
    check(definition, rows, smoothed)


def newest_share(definition: dict[str, Any], H: np.ndarray, y: np.ndarray, dt: np.ndarray) -> float:
    """Return how much of a measurement's dependence on the diffuse states is new, where it is least.

    Of the rows that determine these states, one after another: what those before leave of its length, over all of it.
    """
    n = len(definition["states"])
    reach = np.eye(n)[:, np.broadcast_to(np.array(definition["initial"].get("diffuse", False)), n)]
    share, known = 1.0, np.zeros((0, reach.shape[1]))
    for k in range(len(y)):
        reach = transition_of(definition["process"], dt[k])[0] @ reach if k else reach
        for row in (H @ reach)[~np.isnan(y[k])]:
            rest = row - known.T @ (known @ row)
            rest = rest - known.T @ (known @ rest)
            length = np.linalg.norm(rest)
            if length > 1e-9 * np.linalg.norm(row):
                share = min(share, float(length / np.linalg.norm(row)))
                known = np.vstack([known, rest / length])
    return share


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_joint_gaussian_with_a_diffuse_start(kind, seed):
    """Wholly or partly diffuse, with rows missing while it is, and keys too short to determine it."""
    rng = np.random.default_rng([seed, KINDS.index(kind), 1])
    controls = int(rng.integers(0, 2)) if kind == "explicit" else 0
    definition = random_definition(rng, kind, int(rng.integers(1, 4)), int(rng.integers(1, 3)), controls)
    n, m = len(definition["states"]), len(definition["measurement"])
    definition["observation"]["H"] = rng.normal(size=(m, n)).tolist()
    if n > 1 and seed % 2:
        flat = np.arange(n) < rng.integers(1, n)
        P = np.where(np.logical_or.outer(flat, flat), 0.0, definition["initial"]["covariance"])
        definition["initial"] |= {"diffuse": flat.tolist(), "covariance": P.tolist()}
    else:
        definition["initial"] = {"diffuse": True}
    rows = random_rows(rng, definition, 6, 9)
    gaps = rng.choice([1_000_000, 2_000_000, 500_000], len(rows.key))  # a tiny gap hardly tells a slope
    rows = rows._replace(time=np.cumsum(gaps))
    _, smoothed = smooth_rows(definition, rows, 6)
    H = np.array(definition["observation"]["H"])
    for key in np.unique(rows.key):
        here = rows.key == key
        y, u, dt = rows.y[:, here].T, rows.u[:, here].T, np.diff(rows.time[here], prepend=0) / UNIT
        # the covariance has terms in 1 / F_inf^2, and F_inf is the square of the share
        rtol = max(1e-10, 2e-16 / newest_share(definition, H, y, dt) ** 4)
        assert rtol < 1e-7
        compare(given_all(definition, H, y, dt, u), smoothed, here, rtol)


def test_nile():
    """Durbin and Koopman (2012), section 2.4 and 2.7: exact diffuse start, then rows 21-40, 61-80 missing."""
    smoothed = smooth_one(nile_model({"diffuse": True}), NILE)
    for row, mean, variance in ((0, 1111.668319, 4032.157942), (49, 834.763259, 2326.756870)):
        assert smoothed.mean[0, row] == pytest.approx(mean, abs=5e-7)
        assert smoothed.covariance[0, row] == pytest.approx(variance, abs=5e-7)
    y = NILE.copy()
    y[20:40] = y[60:80] = np.nan
    smoothed = smooth_one(nile_model({"diffuse": True}), y)
    assert smoothed.mean[0, 30] == pytest.approx(893.791945, abs=5e-7)
    assert smoothed.covariance[0, 30] == pytest.approx(9715.005549, abs=5e-7)
    near = smooth_one(nile_model({"mean": [0.0], "covariance": [[1e7]]}), NILE)
    np.testing.assert_allclose(near.mean[0, 0], 1111.668319, rtol=1e-3)


def test_matlab_toolbox():
    """EKF/UKF toolbox for MATLAB (Hartikainen, Solin, Sarkka 2011): RTS smoother."""
    definition = {
        "states": ["a", "b"],
        "measurement": ["z"],
        "process": {"kind": "explicit", "F": [[1, 1], [0, 1]], "Q": [[2, 0], [0, 2]]},
        "observation": {"H": [[0.5, -0.3]], "R": [[0.5]]},
        "initial": {"mean": [1, 1], "covariance": [[1, 0.1], [0.1, 1]]},
    }
    smoothed = smooth_one(definition, [np.nan, 1, 2, 3])
    np.testing.assert_allclose(smoothed.mean[:, 1], (2.9272501150, 1.6358250940), atol=5e-11)


def test_diffuse_local_linear_trend_is_that_of_statsmodels():
    y = NILE.copy()
    y[[1, 5, 6, 40]] = np.nan
    model = UnobservedComponents(y, "lltrend", use_exact_diffuse=True)  # type: ignore[arg-type]
    theirs: Any = model.smooth([12000.0, 900.0, 12.0])
    definition = {
        "states": ["level", "slope"],
        "measurement": ["volume"],
        "process": {"kind": "explicit", "F": [[1, 1], [0, 1]], "Q": [[900, 0], [0, 12]]},
        "observation": {"H": [[1, 0]], "R": [[12000]]},
        "initial": {"diffuse": True},
    }
    ours = smooth_one(definition, y)
    np.testing.assert_allclose(ours.mean, theirs.smoothed_state, rtol=1e-9)
    np.testing.assert_allclose(full(ours.covariance), theirs.smoothed_state_cov.transpose(2, 0, 1), rtol=1e-9)


@pytest.mark.parametrize("initial", [{"diffuse": True}, {"mean": [0, 0], "covariance": [[0, 0], [0, 4]]}])
def test_singular_noise(initial):
    """No measurement noise and a process noise of rank one: nothing is inverted, all stays exact."""
    definition = {
        "states": ["p", "v"],
        "measurement": ["z"],
        "process": {"kind": "explicit", "F": [[1, 1], [0, 1]], "Q": [[1, 1], [1, 1]]},
        "observation": {"H": [[1, 0]], "R": [[0]]},
        "initial": initial,
    }
    y = np.array([np.nan, 1.0, 2.5, np.nan, 5.0])[:, None]
    smoothed = smooth_one(definition, y)
    truth = joint(definition, np.array([[1.0, 0.0]]), y, np.ones(5), np.empty((5, 0)))
    np.testing.assert_allclose(smoothed.mean.T, truth.means, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(full(smoothed.covariance), truth.covariances, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(smoothed.mean[0, [1, 2, 4]], [1.0, 2.5, 5.0], rtol=1e-12)


def test_flagged_and_late_rows():
    """A flagged row repeats its key's last good state, smoothed as that is; a late row has nothing."""
    definition = nile_model({"diffuse": True})
    y = np.array([[np.inf, 3.0, 4.0, np.inf, 6.0]])
    time = np.arange(5) * 1_000_000
    rows = kalman.SortedRows(np.zeros(5, np.int64), time, y, np.empty((0, 5)))
    outputs, smoothed = smooth_rows(definition, rows, 1)
    assert outputs.flag.tolist() == [1, 0, 0, 1, 0]
    clean = smooth_one(definition, [3.0, 4.0, 6.0])
    np.testing.assert_array_equal(smoothed.mean[:, [1, 2, 4]], clean.mean)
    np.testing.assert_array_equal(smoothed.covariance[:, [1, 2, 4]], clean.covariance)
    np.testing.assert_array_equal(smoothed.mean[:, 3], smoothed.mean[:, 2])
    np.testing.assert_array_equal(smoothed.mean[:, 0], smoothed.mean[:, 1])  # nothing was predicted yet
    model = kalman.build(definition)
    states, _ = kalman.run(model, kalman.initial_states(model, 1), rows._replace(time=time + 2_000_000), UNIT)
    more = rows._replace(y=np.ones((1, 5)), time=np.array([0, 1, 10_000_000, 11_000_000, 12_000_000]))
    _, outputs, smoothed = smooth(model, states, more, UNIT)
    assert outputs.late.tolist() == [True, True, False, False, False]
    assert np.isnan(smoothed.mean[:, :2]).all() and np.isfinite(smoothed.mean[:, 2:]).all()


def test_splitting_keys_changes_no_bit():
    rng = np.random.default_rng(5)
    definition = random_definition(rng, "explicit", 3, 2)
    definition["initial"] = {"diffuse": True}
    rows = random_rows(rng, definition, 60, 7)
    _, together = smooth_rows(definition, rows, 60)
    for group in np.array_split(np.arange(60), [1, 20]):
        mask = np.isin(rows.key, group)
        part = kalman.SortedRows(rows.key[mask] - group[0], rows.time[mask], rows.y[:, mask], rows.u[:, mask])
        _, alone = smooth_rows(definition, part, len(group))
        same(list(alone[:2]), [a[:, mask] for a in together[:2]])


@pytest.mark.parametrize("kind", KINDS)
def test_the_moments_of_later_rows_are_the_same(kind, monkeypatch):
    """Rauch, Tung and Striebel's states against the moments r and N, which the rows while diffuse are smoothed by."""
    rng = np.random.default_rng([3, KINDS.index(kind)])
    definition = random_definition(rng, kind, 3, 2, 1 if kind == "explicit" else 0)
    rows = random_rows(rng, definition, 40, 8)
    _, expected = smooth_rows(definition, rows, 40)
    monkeypatch.setattr("kalman.smoothers.kinds.LinearSmoother", MomentSmoother)
    _, smoothed = smooth_rows(definition, rows, 40)
    np.testing.assert_allclose(smoothed.mean, expected.mean, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(smoothed.covariance, expected.covariance, rtol=1e-9, atol=1e-9)


def test_each_keys_own_parameters():
    definition = nile_model({"diffuse": True}) | {"learn": {"parameters": ["Q", "R"], "scope": "key"}}
    model = kalman.build(definition)
    states = kalman.initial_states(model, 2)
    states = states._replace(values=model.with_parameters(states.values, np.array([[9.0, 1.0], [4.0, 2.0]])))
    y = np.tile(NILE[:6], 2)[None]
    time = np.tile(np.arange(6) * 1_000_000, 2)
    rows = kalman.SortedRows(np.repeat([0, 1], 6), time, y, np.empty((0, 12)))
    _, _, smoothed = smooth(model, states, rows, UNIT)
    for key, (Q, R) in enumerate(((9.0, 4.0), (1.0, 2.0))):
        one = nile_model({"diffuse": True})
        one["process"]["Q"], one["observation"]["R"] = [[Q]], [[R]]
        expected = smooth_one(one, NILE[:6])
        np.testing.assert_allclose(smoothed.mean[:, key * 6 : key * 6 + 6], expected.mean, rtol=1e-12)
