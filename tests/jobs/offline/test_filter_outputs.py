"""What `outputs` asks for is in the file that `filter` writes, or the command refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from statsmodels.datasets import nile
from statsmodels.tsa.statespace.structural import UnobservedComponents

from jobs.core.errors import UserError
from jobs.core.settings import Settings
from jobs.filter import run
from jobs.specs.loading import load_spec

DATA: Any = nile.load_pandas().data
VOLUMES = DATA["volume"].to_numpy()

EXACT: Any = "round_trip"

MODEL = """
name: level
version: 1
key: [river]
time: at
time_unit: day
measurement: [volume]
states: [level]
process: {{kind: explicit, F: [[1.0]], Q: [[1469.1]]}}
observation: {{H: [[1.0]], R: [[15099.0]]}}
initial: {{mean: [1000.0], covariance: [[1.0e5]]}}
{more}
"""


def filtered(
    folder: Path, more: str, ending: str = "parquet", model: str = MODEL, smooth: bool = False
) -> pd.DataFrame:
    (folder / "level.yaml").write_text(model.format(more=more))
    days = pd.date_range("1871-01-01", periods=100).strftime("%Y-%m-%d")
    source, target = folder / "rows.csv", folder / f"out.{ending}"
    pd.DataFrame({"river": "nile", "at": days, "volume": VOLUMES}).to_csv(source, index=False)
    run(Settings.load(models=folder), str(folder / "level.yaml"), str(source), str(target), smooth)
    return pd.read_parquet(target) if ending == "parquet" else pd.read_csv(target, float_precision=EXACT)


def theirs():
    model = UnobservedComponents(VOLUMES, "llevel")  # type: ignore[arg-type]
    model.ssm.initialize_known(np.array([1000.0]), np.array([[1e5]]))
    return model.filter([15099.0, 1469.1]).filter_results


def column(frame: pd.DataFrame, name: str) -> np.ndarray:
    return np.stack([np.asarray(one, float) for one in frame[name]]).T


def test_innovations_are_not_ignored(tmp_path: Path) -> None:
    found = filtered(tmp_path, "outputs: {innovation: true}")
    want = theirs().standardized_forecasts_error
    np.testing.assert_allclose(column(found, "innovation"), want, rtol=1e-10)


@pytest.mark.parametrize("smooth", [False, True])
def test_residuals_and_their_covariance_are_those_of_statsmodels(tmp_path: Path, smooth: bool) -> None:
    found = filtered(tmp_path, "outputs: {residual: true, matrices: [Q, H]}", smooth=smooth)
    want = theirs()
    np.testing.assert_allclose(column(found, "residual"), want.forecasts_error, rtol=1e-11, atol=1e-10)
    np.testing.assert_allclose(column(found, "residual_covariance"), want.forecasts_error_cov[0], rtol=1e-12)
    assert column(found, "system_Q")[0, 1:].tolist() == [1469.1] * 99 and np.isnan(found["system_Q"][0][0])
    assert column(found, "system_H").tolist() == [[1.0] * 100]
    assert "system_F" not in found and "innovation" not in found


def test_numbers_of_a_row_have_their_own_types_and_csv_its_own_columns(tmp_path: Path) -> None:
    asked = "outputs: {state_index: true, sliding_log_likelihood: 10, measured: true, innovation: true, residual: true}"
    found, text = filtered(tmp_path, asked), filtered(tmp_path, asked, "csv")
    assert found["state_index"].dtype == np.int64 and found["state_index"].tolist() == list(range(1, 101))
    assert text["state_index"].tolist() == list(range(1, 101))
    sums = np.convolve(found["log_likelihood"], np.ones(10), "valid")
    assert found["sliding_log_likelihood"].isna().tolist() == [True] * 9 + [False] * 91
    np.testing.assert_allclose(found["sliding_log_likelihood"][9:], sums, rtol=1e-14)
    np.testing.assert_array_equal(column(found, "measured")[0], VOLUMES)
    np.testing.assert_array_equal(text["measured_volume"], VOLUMES)
    np.testing.assert_array_equal(text["residual_volume"], column(found, "residual")[0])
    assert {"innovation_volume", "residual_covariance_volume_volume", "sliding_log_likelihood"} <= set(text)


TREND = MODEL.replace("states: [level]", "states: [level, slope]").replace(
    "{{kind: explicit, F: [[1.0]], Q: [[1469.1]]}}",
    "{{kind: local_linear_trend, level_variance: 1469.1, slope_variance: 0.1}}",
)
TREND = TREND.replace("H: [[1.0]]", "H: [[1.0, 0.0]]").replace(
    "{{mean: [1000.0], covariance: [[1.0e5]]}}",
    "{{mean: [1000.0, 0.0], covariance: [[1.0e5, 0.0], [0.0, 1.0]]}}",
)


def test_variances_alone_are_not_ignored_either(tmp_path: Path) -> None:
    whole = filtered(tmp_path, "", model=TREND, smooth=True)
    short = filtered(tmp_path, "outputs: {covariance: diagonal}", model=TREND, smooth=True)
    text = filtered(tmp_path, "outputs: {covariance: diagonal}", "csv", TREND, True)
    for name in ("covariance", "smoothed_covariance"):
        np.testing.assert_array_equal(column(short, name), column(whole, name)[[0, 3]])
        np.testing.assert_array_equal(
            text[[f"{name}_level", f"{name}_slope"]].to_numpy().T, column(short, name)
        )
        assert f"{name}_level_slope" not in text


MIXTURE = """
name: level
version: 1
key: [river]
time: at
measurement: [volume]
filter: gaussian_mixture
mixture: {{means: [900.0, 1100.0], covariances: [[[1.0e4]], [[1.0e4]]]}}
{more}
"""
LMS = """
name: level
version: 1
key: [river]
time: at
measurement: [volume]
filter: lms
states: [level]
observation: {{H: [[1.0]]}}
lms: {{step: 0.1}}
{more}
"""


@pytest.mark.parametrize(
    ("model", "asked", "said"),
    [
        (MIXTURE, "matrices: [F]", r"outputs\.matrices: the filter has no matrix F"),
        (LMS, "matrices: [H, Q]", r"outputs\.matrices: the filter has no matrix Q.*it has H"),
        (LMS, "innovation: true", r"outputs\.innovation: the filter does not predict its measurements"),
        (LMS, "sliding_log_likelihood: 5", r"outputs\.sliding_log_likelihood: .*no log-likelihood"),
    ],
)
def test_what_a_kind_of_filter_cannot_put_out_is_refused(
    tmp_path: Path, model: str, asked: str, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        filtered(tmp_path, f"outputs: {{{asked}}}", model=model)
    assert not (tmp_path / "out.parquet").exists()


def test_the_outputs_of_a_mixture(tmp_path: Path) -> None:
    found = filtered(
        tmp_path, "outputs: {residual: true, sliding_log_likelihood: 3, state_index: true}", model=MIXTURE
    )
    mean = column(found, "mean")[0]
    np.testing.assert_allclose(column(found, "residual")[0, 1:], VOLUMES[1:] - mean[:-1], rtol=1e-12)
    assert found["state_index"].iloc[-1] == 100


@pytest.mark.parametrize("name", ["residual", "system_F", "state_index", "residual_volume"])
def test_a_key_cannot_have_the_name_of_an_output(tmp_path: Path, name: str) -> None:
    spec = tmp_path / "level.yaml"
    asked = "outputs: {residual: true, matrices: [F], state_index: true}"
    spec.write_text(MODEL.format(more=asked).replace("river", name))
    with pytest.raises(UserError, match="name of an output column"):
        load_spec(spec)
    spec.write_text(MODEL.format(more="").replace("river", name))
    load_spec(spec)  # it is free where the output is off
