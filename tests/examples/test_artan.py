"""The examples of docs/artan.md: the page's commands are run, and what they write is compared with other arithmetic.

The other arithmetic solves least squares from all rows at once, or is the recursion written out for one model.
"""

from __future__ import annotations

import re
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy.special import logsumexp
from scipy.stats import multivariate_normal, norm
from statsmodels.tsa.statespace.mlemodel import MLEModel

from examples.artan.rows import SETS, made
from jobs import filter as offline
from jobs.core.settings import Settings
from tests.jobs.support.pipeline import Pipeline

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "artan"
PAGE = (ROOT / "docs" / "artan.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line)
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S)
    for line in block.splitlines()
    if line.startswith("kalman-pipeline filter")
]


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pd.DataFrame]:
    """Run the page's commands; return what they wrote beside the rows, by the name of the output."""
    folder = tmp_path_factory.mktemp("artan")
    settings = Settings.load(warehouse=str(folder / "warehouse"), models=FOLDER, quiet=True)
    found = {}
    for command in COMMANDS:
        rows = folder / option(command, "--input")
        if not rows.exists():
            made(rows.stem).to_csv(rows, index=False)
        target = (folder / option(command, "--output")).with_suffix(".parquet")
        model = str(ROOT / option(command, "--model"))
        offline.run(settings, model, str(rows), str(target), "--smooth" in command)
        read: Any = pd.read_csv
        measured = read(rows, float_precision="round_trip").drop(columns=["model", "at"])
        found[target.stem] = pd.concat([pd.read_parquet(target), measured], axis=1)
        assert found[target.stem]["flag"].isna().all()
    return found


def numbers(frame: pd.DataFrame, name: str) -> np.ndarray:
    """Return a column of lists (N, d)."""
    return np.stack([np.asarray(one, float) for one in frame[name]])


def test_each_spec_has_a_command_on_the_page() -> None:
    named = {Path(option(command, "--model")).name for command in COMMANDS}
    assert named == {path.name for path in FOLDER.glob("*.yaml")}
    sets = re.findall(r"^python -m examples\.artan\.rows (\w+) (\w+)\.csv$", PAGE, re.M)
    assert {name for name, _ in sets} == set(SETS) and all(name == file for name, file in sets)


def test_rows_are_the_same_each_time() -> None:
    for name in SETS:
        pd.testing.assert_frame_equal(made(name), made(name))
    assert made("line").groupby("model").size().tolist() == [60] * 10


def test_recursive_least_squares_is_weighted_least_squares_of_all_rows_so_far(written) -> None:
    for _, rows in written["rls"].groupby("model"):
        X, z = np.column_stack([np.ones(len(rows)), rows["x"], rows["y"]]), rows["z"].to_numpy()
        found = numbers(rows, "mean")
        for k in (4, 10, 30, 60):
            w = np.sqrt(0.99 ** np.arange(k)[::-1])
            ridge = np.sqrt(1e-7 * 0.99**k) * np.eye(3)  # the start is forgotten too
            A, b = np.vstack([X[:k] * w[:, None], ridge]), np.append(z[:k] * w, np.zeros(3))
            expected = np.linalg.lstsq(A, b, rcond=None)[0]
            np.testing.assert_allclose(found[k - 1], expected, rtol=1e-8, atol=1e-8)
        assert rows["state_index"].tolist() == list(range(1, 61))


def test_normalised_least_mean_squares(written) -> None:
    for _, rows in written["nlms"].groupby("model"):
        w = np.zeros(3)
        for k, (x, y, z) in enumerate(rows[["x", "y", "z"]].to_numpy()):
            h = np.array([1.0, x, y])
            w = w + (z - h @ w) * h / (1.0 + h @ h)
            np.testing.assert_allclose(rows["mean"].iloc[k], w, rtol=1e-11, atol=1e-11)


def ridge_of(rows: pd.DataFrame, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and covariance of the line's coefficients given the first k rows, from all of them at once."""
    X = np.column_stack([rows["x"], rows["y"], np.ones(len(rows))])[:k]
    covariance = np.linalg.inv(np.eye(3) / 10.0 + X.T @ X)
    return covariance @ X.T @ rows["z"].to_numpy()[:k], covariance


def test_a_kalman_filter_finds_the_line_and_its_covariance(written) -> None:
    for _, rows in written["ols"].groupby("model"):
        for k in (1, 2, 5, 20, 60):
            mean, covariance = ridge_of(rows, k)
            np.testing.assert_allclose(rows["mean"].iloc[k - 1], mean, rtol=1e-9)
            found = np.reshape(rows["covariance"].iloc[k - 1], (3, 3))
            np.testing.assert_allclose(found, covariance, rtol=1e-9, atol=1e-12)


def test_parallel_models_are_weighted_by_how_well_they_predict(written) -> None:
    """The estimate of all models together, weighted by the likelihood of the last ten rows."""
    frame = written["ols"]
    expected = []
    for _, rows in frame.groupby("model"):
        scores = []
        for k, (x, y, z) in enumerate(rows[["x", "y", "z"]].to_numpy()):
            h, (mean, covariance) = np.array([x, y, 1.0]), ridge_of(rows, k)
            scores.append(norm.logpdf(z, h @ mean, np.sqrt(h @ covariance @ h + 1.0)))
        sums: Any = pd.Series(scores).rolling(10).sum()
        expected.append(sums.to_numpy())
    found = frame["sliding_log_likelihood"].to_numpy().reshape(10, 60)
    np.testing.assert_allclose(found, expected, rtol=1e-8)
    weights = np.exp(found[:, 9:] - logsumexp(found[:, 9:], axis=0))
    pooled = np.einsum("kt,ktn->tn", weights, numbers(frame, "mean").reshape(10, 60, 3)[:, 9:])
    x = np.arange(9.0, 60.0)
    line = 0.5 * x + 0.2 * np.sqrt(x) + 1.2
    away = np.einsum("tn,nt->t", pooled, np.array([x, np.sqrt(x), np.ones(51)])) - line
    assert np.sqrt((away**2).mean()) < 0.5


def test_one_filter_of_three_candidates(written) -> None:
    for _, rows in written["mmae"].groupby("model"):
        means, scores = [np.zeros(3)] * 3, [[], [], []]
        covariances = [10.0 * np.eye(3)] * 3
        for k, (x, y, z) in enumerate(rows[["x", "y", "z"]].to_numpy()):
            h = np.array([x, y, 1.0])
            for j, R in enumerate((0.25, 1.0, 4.0)):
                m, P = means[j], covariances[j]
                S = h @ P @ h + R
                scores[j].append(norm.logpdf(z, h @ m, np.sqrt(S)))
                means[j], covariances[j] = m + P @ h * (z - h @ m) / S, P - np.outer(P @ h, P @ h) / S
            sums = np.array([sum(one[-10:]) for one in scores])
            p = np.exp(sums - logsumexp(sums))
            np.testing.assert_allclose(rows["mode_probabilities"].iloc[k], p, rtol=1e-5, atol=2e-6)
            np.testing.assert_allclose(rows["mean"].iloc[k], p @ np.array(means), rtol=1e-4, atol=1e-5)


PUBLISHED = [0.999500249900037, 0.998012912493968, 0.832649076225536, 0.699687597788894, 0.599860305854393]
"""The level's variance after the first five rows, as Artan's README prints it."""


class Trend(MLEModel):
    """The trend for statsmodels."""

    def __init__(self, z: np.ndarray) -> None:
        super().__init__(z, k_states=2)
        self["design"], self["transition"] = [[1.0, 0.0]], [[1.0, 1.0], [0.0, 1.0]]
        self["selection"], self["state_cov"], self["obs_cov"] = np.eye(2), 1e-4 * np.eye(2), [[1.0]]
        self.ssm.initialize_known(np.zeros(2), np.array([[2000.0001, 1000.0], [1000.0, 1000.0001]]))


def test_a_trend_is_that_of_statsmodels_and_has_the_variances_that_artan_prints(written) -> None:
    for _, rows in written["levels"].groupby("model"):
        theirs = Trend(rows["z"].to_numpy()).smooth([])
        found = numbers(rows, "covariance")
        np.testing.assert_allclose(found[:5, 0], PUBLISHED, rtol=1e-12)
        np.testing.assert_allclose(numbers(rows, "mean").T, theirs.filtered_state, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(
            found.T.reshape(2, 2, -1), theirs.filtered_state_cov, rtol=1e-8, atol=1e-10
        )
        np.testing.assert_allclose(rows["log_likelihood"], theirs.llf_obs, rtol=1e-9)
        smoothed = numbers(rows, "smoothed_mean").T
        np.testing.assert_allclose(smoothed, theirs.smoothed_state, rtol=1e-7, atol=1e-8)
        np.testing.assert_allclose(
            numbers(rows, "smoothed_covariance").T.reshape(2, 2, -1),
            theirs.smoothed_state_cov,
            rtol=1e-6,
            atol=1e-10,
        )


def by_slope(mean: np.ndarray, P: np.ndarray, x: float) -> tuple[float, np.ndarray, float]:
    """Return the expected measurement, its covariance with the state, and its variance without noise: the EKF's."""
    expected = np.exp(mean @ [x, 1.0])
    H = expected * np.array([x, 1.0])
    return float(expected), P @ H, float(H @ P @ H)


def by_points(mean: np.ndarray, P: np.ndarray, x: float, reach: float, centre: float):
    """Return the same by points at `reach` times the columns of a root of P; centre: the weight of the mean itself."""
    L = np.linalg.cholesky(P)
    points = np.array([mean, *(mean + s * reach * one for s in (1, -1) for one in L.T)])
    weights = np.array([centre, *[(1.0 - centre) / 4.0] * 4])
    values = np.exp(points @ [x, 1.0])
    expected = weights @ values
    away = values - expected
    return expected, (weights * away) @ (points - mean), weights @ away**2


CURVES = {
    "extended": (by_slope, 10.0, 10.0),
    "unscented": (partial(by_points, reach=2.0, centre=0.5), 1.0, 1.0),  # kappa 2: lambda = 2
    "cubature": (partial(by_points, reach=np.sqrt(2.0), centre=0.0), 1.0, 1.0),
}


@pytest.mark.parametrize("kind", CURVES)
def test_the_exponent_of_a_curve(kind: str, written) -> None:
    measure, start, R = CURVES[kind]
    for _, rows in written[kind].groupby("model"):
        mean, P = np.zeros(2), start * np.eye(2)
        for k, (x, z) in enumerate(rows[["x", "z"]].to_numpy()):
            expected, cross, spread = measure(mean, P, x)
            S = spread + R
            row = rows.iloc[k]
            np.testing.assert_allclose(row["residual"], [z - expected], rtol=1e-6, atol=1e-7)
            np.testing.assert_allclose(row["residual_covariance"], [S], rtol=1e-6)
            np.testing.assert_allclose(np.sqrt(row["nis"]), abs(z - expected) / np.sqrt(S), rtol=1e-5)
            mean, P = mean + cross * (z - expected) / S, P - np.outer(cross, cross) / S
            np.testing.assert_allclose(row["mean"], mean, rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(mean, [0.2, 0.7], atol=0.1)


def test_online_em_with_a_constant_step(written) -> None:
    """Cappé's recursion on the sufficient statistics: weights, sums and sums of squares of each component."""
    for _, rows in written["gmm"].groupby("model"):
        means = np.array([[3.0, 5.0], [6.0, 6.0], [7.0, 1.0]])
        s0, s1 = np.full(3, 1 / 3), means / 3
        s2 = np.array([np.eye(2) + np.outer(m, m) for m in means]) / 3
        for k, y in enumerate(rows[["a", "b"]].to_numpy()):
            means = s1 / s0[:, None]
            spreads = s2 / s0[:, None, None] - np.einsum("ki,kj->kij", means, means)
            logs = [
                np.log(w) + multivariate_normal.logpdf(y, m, C)
                for w, m, C in zip(s0, means, spreads, strict=True)
            ]
            row = rows.iloc[k]
            assert row["log_likelihood"] == pytest.approx(logsumexp(logs), rel=1e-8)
            r = np.exp(logs - logsumexp(logs))
            np.testing.assert_allclose(row["responsibilities"], r, rtol=1e-7, atol=1e-12)
            s0, s1 = 0.99 * s0 + 0.01 * r, 0.99 * s1 + 0.01 * r[:, None] * y
            s2 = 0.99 * s2 + 0.01 * r[:, None, None] * np.outer(y, y)
            np.testing.assert_allclose(row["mean"], s1.sum(axis=0), rtol=1e-9)


@pytest.mark.spark
@pytest.mark.slow
def test_a_batch_state_starts_the_stream(tmp_path: Path, written) -> None:
    """Pretrained on the first rows of each key, then streamed: the bits of one filter over all rows."""
    rows: Any = made("trend")
    rows["at"] = pd.to_datetime(rows["at"])
    early = rows["at"] < rows["at"].iloc[25]
    pipeline = Pipeline(tmp_path, yaml.safe_load((FOLDER / "artan_trend.yaml").read_text()))
    pipeline.land(rows[early])
    pipeline.pretrain()
    pipeline.land(rows[~early])
    pipeline.stream()
    found = pipeline.estimates()
    expected = written["levels"][~early.to_numpy()].sort_values(["model", "at"])
    assert len(found) == len(expected) == 30
    for name in ("mean", "covariance"):
        np.testing.assert_array_equal(numbers(found, name), numbers(expected, name))
    assert found["state_index"].tolist() == expected["state_index"].tolist() == [*range(26, 41)] * 2
