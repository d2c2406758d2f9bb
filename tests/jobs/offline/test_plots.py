"""The content of each plot, from a real filter run."""

from __future__ import annotations

import numpy as np
import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from jobs.offline import plots  # noqa: E402


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
