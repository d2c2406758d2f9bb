"""The notebook from a CSV to bands: run from the first cell to the last, and made a notebook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jupytext
import matplotlib
import numpy as np
import pytest
import yaml

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook" / "csv_to_bands.py"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the cells, run one after the other as a notebook does, have defined."""
    matplotlib.use("Agg")
    monkeypatch.setenv("KALMAN_WAREHOUSE", "")  # put back after the test
    found: dict[str, Any] = {"__file__": str(NOTEBOOK)}
    for cell in jupytext.read(NOTEBOOK).cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, str(NOTEBOOK), "exec"), found)
    return found


@pytest.mark.slow
def test_the_cells_lead_to_bands(names: dict[str, Any], tmp_path: Path) -> None:
    estimates, measured = names["estimates"], names["measured"]["volume"].to_numpy()
    assert len(estimates) == 100 and len(names["forecast"]) == 10
    assert (names["work"] / "bands.png").stat().st_size > 20_000
    # The oracle: the level's posterior from the joint Gaussian of all rows, with the days that are between them and a
    # first level of which (almost) nothing is known.
    spec = yaml.safe_load(names["spec"].read_text())
    days = (names["measured"]["at"] - names["measured"]["at"][0]).dt.days.to_numpy(float)
    prior = 1e9 + spec["process"]["variance"] * np.minimum(days[:, None], days)
    r = spec["observation"]["R"][0][0]
    smoothed = prior @ np.linalg.solve(prior + r * np.eye(100), measured)
    np.testing.assert_allclose(estimates["smoothed_mean_level"], smoothed, rtol=1e-5)
    inside = np.abs(measured - estimates["mean_level"]) < 1.96 * np.sqrt(
        estimates["covariance_level_level"] + r
    )
    assert 0.9 <= inside.mean() <= 1.0
    share = (estimates["nis"].dropna() < 3.84).mean()
    assert names["held"] == f"{share:.0%} of rows in their predicted 95 %"
    assert names["ax"].get_title() == f"the Nile at Aswan · {names['held']}"
    written = tmp_path / "csv_to_bands.ipynb"
    jupytext.write(jupytext.read(NOTEBOOK), written)
    again = jupytext.read(written)
    assert [cell.source for cell in again.cells] == [cell.source for cell in jupytext.read(NOTEBOOK).cells]
