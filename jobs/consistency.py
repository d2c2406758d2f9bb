"""What the offline command says of a model's fit: NIS and innovations, key by key."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import kalman
from kalman.diagnostics import Watch, consistency, ljung_box

LAGS = 10
FEWEST = 3 * LAGS
"""Innovations that a key must have for the test of their correlation to mean something."""


class Fit(NamedTuple):
    """How many keys have a NIS to judge and how many are outside its bounds; the same of correlation."""

    judged: int
    outside: int
    tested: int
    correlated: int

    @property
    def data(self) -> dict[str, Any]:
        """The same for a program."""
        return {
            "keys_judged": self.judged,
            "keys_nis_outside": self.outside,
            "keys_tested": self.tested,
            "keys_correlated": self.correlated,
        }

    @property
    def lines(self) -> list[str]:
        """The same for a person."""
        if not self.judged:
            return []
        text = f"NIS outside its 95 % bounds: {_share(self.outside, self.judged)}"
        if self.tested:
            text += f"; innovations correlated (Ljung-Box): {_share(self.correlated, self.tested)}"
        return [f"{text}; 5 % are expected of a right model" if self.judged > 1 else text]


def watch(model: kalman.Filter, states: kalman.KeyStates, rows: kalman.SortedRows) -> Watch | None:
    """Return what notes the innovations of a run, None where the filter has none."""
    try:
        return Watch(model, states, rows)
    except kalman.ModelError:
        return None


def fit(key: NDArray[np.int64], outputs: kalman.Outputs, keys: int, innovations: NDArray[np.float64]) -> Fit:
    """Judge a run over rows of keys (N,) by its outputs and normalised innovations (m, N)."""
    well = np.where(outputs.flag == 0, outputs.nis, np.nan)
    components = np.isfinite(innovations).sum(axis=0)
    whole = consistency(key, well, np.maximum(components, 1), keys)
    correlated = np.zeros(keys, bool)
    tested = np.zeros(keys, bool)
    for values in innovations:
        test = ljung_box(key, values, keys, LAGS)
        enough = (test.count >= FEWEST) & np.isfinite(test.p_value)
        tested |= enough
        correlated |= enough & (test.p_value < 0.05 / len(innovations))  # one key, several tests: Bonferroni
    return Fit(
        int((whole.components > 0).sum()),
        int(whole.outside().sum()),
        int(tested.sum()),
        int(correlated.sum()),
    )


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} key{'s'[: whole != 1]}" + (f" ({part / whole:.1%})" if whole > 1 else "")
