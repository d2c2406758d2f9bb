"""`filter --smooth`: the columns that it adds, in both formats, and the rows that have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from jobs import filter as filter_command
from jobs.core.settings import Settings
from tests.jobs.offline.test_filter import MODELS, filtered, nile, random_rows, two_states

__all__ = ["nile"]


def smoothed(model: str | Path, source: Path, output: Path) -> None:
    filter_command.run(Settings.load(models=MODELS), str(model), str(source), str(output), smooth=True)


def test_nile_gives_the_published_numbers(nile: Path, tmp_path: Path) -> None:
    """Durbin and Koopman (2012), figure 2.2, here with a prior of variance 1e7."""
    model = tmp_path / "diffuse.yaml"
    text = (MODELS / "nile.yaml").read_text()
    prior = next(line for line in text.splitlines() if line.startswith("initial:"))
    model.write_text(text.replace(prior, "initial: {diffuse: true}"))
    smoothed(model, nile, tmp_path / "out.csv")
    out = pd.read_csv(tmp_path / "out.csv")
    assert list(out)[-3:] == ["flag", "smoothed_mean_level", "smoothed_covariance_level_level"]
    assert out.smoothed_mean_level[[0, 49]].tolist() == pytest.approx([1111.668319, 834.763259], abs=5e-7)
    variances = out.smoothed_covariance_level_level[[0, 49]].tolist()
    assert variances == pytest.approx([4032.157942, 2326.756870], abs=5e-7)


def test_the_filters_columns_stay_as_they_are_and_rejected_rows_have_nulls(tmp_path: Path) -> None:
    rows = random_rows(80)
    rows["a"] = rows["a"].astype(object)
    rows.loc[5, "a"] = "seven"
    rows.to_csv(tmp_path / "in.csv", index=False)
    model = two_states(tmp_path)
    filtered(model, tmp_path / "in.csv", tmp_path / "plain.parquet")
    smoothed(model, tmp_path / "in.csv", tmp_path / "out.parquet")
    smoothed(model, tmp_path / "in.csv", tmp_path / "out.csv")
    plain, out = pq.read_table(tmp_path / "plain.parquet"), pq.read_table(tmp_path / "out.parquet")
    assert out.select(plain.column_names).equals(plain)
    means, covariances = (out[f"smoothed_{name}"].to_pylist() for name in ("mean", "covariance"))
    assert means[5] is None and covariances[5] is None
    exact: Any = {"float_precision": "round_trip"}
    flat = pd.read_csv(tmp_path / "out.csv", **exact).drop(index=5)
    names = ["smoothed_mean_x", "smoothed_mean_y"]
    np.testing.assert_array_equal(flat[names].to_numpy(), [mean for mean in means if mean])
    names = [f"smoothed_covariance_{a}_{b}" for a in "xy" for b in "xy"]
    np.testing.assert_array_equal(flat[names].to_numpy(), [P for P in covariances if P])
    last = rows.drop(index=5).groupby(["site", "sensor"])["at"].idxmax().tolist()
    for row in last:  # no later row
        np.testing.assert_allclose(means[row], out["mean"].to_pylist()[row], rtol=1e-14)


def test_modes_are_smoothed_too(nile: Path, tmp_path: Path) -> None:
    model = tmp_path / "modes.yaml"
    lines = (MODELS / "nile.yaml").read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("process:", "filter:"))]
    modes = "filter: imm\nmodes:\n" + "".join(
        f"  - {{process: {{kind: explicit, F: [[1.0]], Q: [[{q}]]}}}}\n" for q in (10.0, 50000.0)
    )
    model.write_text("\n".join(kept) + f"\n{modes}transition: [[0.98, 0.02], [0.5, 0.5]]\n")
    smoothed(model, nile, tmp_path / "out.csv")
    exact: Any = {"float_precision": "round_trip"}
    out = pd.read_csv(tmp_path / "out.csv", **exact)
    given_all = out[["smoothed_mode_probabilities_0", "smoothed_mode_probabilities_1"]].to_numpy()
    np.testing.assert_allclose(given_all.sum(axis=1), 1.0, rtol=1e-12)
    np.testing.assert_allclose(given_all[-1], out[["mode_probabilities_0", "mode_probabilities_1"]].iloc[-1])
    # the level is known to have fallen between 1898 and 1899 (Cobb 1978): row 28 is 1899
    assert given_all[:, 1].argmax() == 28 and given_all[28, 1] > 0.5 > given_all[27, 1]
    smoothed(model, nile, tmp_path / "out.parquet")
    lists = pq.read_table(tmp_path / "out.parquet")["smoothed_mode_probabilities"].to_pylist()
    np.testing.assert_array_equal(np.array(lists), given_all)


def test_a_fixed_lag_estimate_is_written_with_the_later_row(tmp_path: Path) -> None:
    random_rows(60).to_csv(tmp_path / "in.csv", index=False)
    model = two_states(tmp_path)
    model.write_text(model.read_text() + "smoothing: {lag: 2}\n")
    filtered(model, tmp_path / "in.csv", tmp_path / "out.csv")
    filtered(model, tmp_path / "in.csv", tmp_path / "out.parquet")
    out, lists = pd.read_csv(tmp_path / "out.csv"), pq.read_table(tmp_path / "out.parquet")
    assert [name for name in out if str(name).startswith("lagged")] == [
        *("lagged_mean_x", "lagged_mean_y"),
        *(f"lagged_covariance_{a}_{b}" for a in "xy" for b in "xy"),
        "lagged_age",
    ]
    assert out["lagged_age"].isna().sum() == 2 * len(out.groupby(["site", "sensor"]))
    ages = [age for (age,) in lists["lagged_age"].to_pylist()]
    np.testing.assert_allclose(ages, out["lagged_age"])
