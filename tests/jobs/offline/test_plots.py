"""The content of each plot, from a real filter run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kalman
from kalman.evaluation.diagnostics import innovations
from kalman.smoothers.smooth import smooth
from tests.kalman.filters.test_linear import NILE, nile_model

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from jobs.offline import plots  # noqa: E402


def test_one_keys_pictures(tmp_path: Path) -> None:
    model = kalman.build(nile_model({"diffuse": True}))
    y = NILE.copy()
    y[20:30] = np.nan
    rows = kalman.SortedRows(np.zeros(100, np.int64), np.arange(100) * 1_000_000, y[None], np.empty((0, 100)))
    states = kalman.initial_states(model, 1)
    _, outputs, white = innovations(model, states, rows, 1e6)
    _, _, smoothed = smooth(model, states, rows, 1e6)
    lines = [
        plots.Line(outputs.mean[0], np.sqrt(outputs.covariance[0])),
        plots.Line(smoothed.mean[0], np.sqrt(smoothed.covariance[0]), "smoothed", plots.SMOOTHED),
    ]
    before = matplotlib.pyplot.get_fignums()
    plots.figure(tmp_path / "nile.png", "Nile", np.arange(1871, 1971), y, lines, white[0], outputs.nis)
    assert (tmp_path / "nile.png").read_bytes()[:4] == b"\x89PNG"
    assert matplotlib.pyplot.get_fignums() == before


def test_what_the_axes_say() -> None:
    import matplotlib.pyplot as plt

    _, (left, middle, right) = plt.subplots(1, 3)
    time = np.arange(200)
    white = np.random.default_rng(0).normal(size=200)
    white[:3] = np.nan
    plots.draw_innovations(left, time, white)
    outside = (np.abs(white[3:]) > 1.96).mean()
    assert left.get_title(loc="left") + left.get_title() == f"{outside:.1%} outside ±1.96 (5 % expected)"
    plots.draw_nis(middle, white**2, 1)
    assert "95 % bound 3.84" in [text.get_text() for text in middle.get_legend().get_texts()]
    deviation = np.full(200, 2.0)
    deviation[0] = np.inf
    plots.draw_estimate(right, time, white, [plots.Line(np.zeros(200), deviation)])
    band = right.collections[0].get_paths()[0].vertices
    assert np.nanmax(np.abs(np.asarray(band)[:, 1])) == pytest.approx(2 * plots.BAND)
    plots.draw_nis(right, np.full(3, np.nan), 2)  # an empty plot is no error
    plt.close("all")
