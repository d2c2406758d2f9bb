"""Fixed-lag smoothing of any filter with a `prediction`.

Beside the filter's state, a key keeps for each of its last `lag` rows the row's state, the prediction of the next
state, and the gain between the two. A new row's state is smoothed back through the kept rows, which is fixed-interval
smoothing of the rows so far. The result is exact if the filter is exact, and otherwise as approximate as the filter.

References: as in `kalman.smoothers.rts`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kalman import flags
from kalman.filters.prediction import Prediction, Smoothable
from kalman.filters.retrodiction import Retrodiction, carry_covariance_back, retrodict_mean
from kalman.filters.state_layout import BLOCK, StateLayout, StepTarget, Wrapping, step_in_blocks
from kalman.linalg.packing import packed_size, unpack
from kalman.types import Array, Filter, Rows, Step


class SmoothableFilter(Filter, Smoothable, Protocol):
    """A filter with a `prediction`."""


@dataclass(frozen=True)
class CrossLagFilter(Wrapping, StateLayout):
    """A filter that also outputs each row's state given `lag` more rows of its key."""

    inner: SmoothableFilter
    lag: int

    @property
    def _kept(self) -> dict[str, int]:
        n = len(self.states)
        p = packed_size(n)
        return {"means": n, "covariances": p, "predictions": n, "predicted": p, "gains": n * n, "ages": 1}

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """The filter's fields, then those of the kept rows: `lag` values of each entry, the newest first."""
        lags = {f"lagged_{name}": (width * self.lag,) for name, width in self._kept.items()}
        return {**self.inner.fields, **lags}

    @property
    def outputs(self) -> Mapping[str, int]:
        """The filter's outputs; the state `lag` rows ago, its row-major covariance, time units since that row."""
        n = len(self.states)
        return {**self.inner.outputs, "lagged_mean": n, "lagged_covariance": n * n, "lagged_age": 1}

    def initial(self, keys: int) -> Array:
        """Return the state (size, keys) of keys that have no row yet."""
        return self._append_empty_rows(self.inner.initial(keys))

    def moments(self, state: Array) -> tuple[Array, Array]:
        """Return mean (n, K) and packed covariance of the newest row's state."""
        return self.inner.moments(state[: self.inner.size])

    def prediction(self, state: Array, rows: Rows) -> Prediction:
        """Return the filter's prediction from the states (size, K) before the rows."""
        return self.inner.prediction(state[: self.inner.size], rows)

    def snapshot(self, state: Array) -> tuple[Array, Array, dict[str, Array]]:
        """Return mean (n, K), full row-major covariance (n*n, K) and the other fields, each (d, K)."""
        mean, covariance, extras = self.inner.snapshot(state[: self.inner.size])
        lags = {f"lagged_{name}": state[self.places[f"lagged_{name}"]] for name in self._kept}
        return mean, covariance, {**extras, **lags}

    def restore(self, mean: Array, covariance: Array, extras: Mapping[str, Array]) -> Array:
        """Return the state from the parts that `snapshot` returned, bit for bit."""
        lags = [np.asarray(extras[f"lagged_{name}"], float) for name in self._kept]
        return np.concatenate([self.inner.restore(mean, covariance, extras), *lags])

    def from_moments(self, mean: Array, covariance: Array) -> Array:
        """Return the states of keys with this mean (n, K) and full row-major covariance (n*n, K)."""
        return self._append_empty_rows(self.inner.from_moments(mean, covariance))

    def with_parameters(self, state: Array, parameters: Array) -> Array:
        """Return the state with each key's own learned parameters (d, K)."""
        size = self.inner.size
        return np.concatenate([self.inner.with_parameters(state[:size], parameters), state[size:]])

    def step(self, state: Array, rows: Rows) -> tuple[Array, Step]:
        """Return the state (size, K) after one row for each key, and the rows' `Step`."""
        return step_in_blocks(state, rows, self.outputs, self._step_block, max(BLOCK // (self.lag + 1), 64))

    def _step_block(self, state: Array, rows: Rows, target: StepTarget) -> None:
        size, n = self.inner.size, len(self.states)
        before = state[:size]
        target.state[:size], step = self.inner.step(before, rows)
        target.log_likelihood[:], target.nis[:] = step.log_likelihood, step.nis
        for name, values in step.extra.items():
            target.extra[name][:] = values
        kept = self._push_row(state[size:], before, rows)
        widths = list(self._kept.values())
        links = np.split(kept, np.cumsum(widths)[:-1])
        ages = links[-1][0]
        mean, covariance = (list(a) for a in self.inner.moments(target.state[:size]))
        for j in range(self.lag):
            m, kept_rest, to, lost, G = (list(part[:, j]) for part in links[:-1])
            gain = [G[i * n : (i + 1) * n] for i in range(n)]
            # a row of an earlier release has the whole covariance; `lost` is the part of the next one removed by G
            spread = [a - b for a, b in zip(covariance, lost, strict=True)]
            mean, covariance = (
                retrodict_mean(m, to, gain, mean),
                carry_covariance_back(Retrodiction(gain, kept_rest), spread),
            )
        there = ages[-1] >= 0.0
        well = step.flag == flags.WELL
        for name, values in (
            ("lagged_mean", np.array(mean)),
            ("lagged_covariance", unpack(np.array(covariance))),
            ("lagged_age", ages[-1]),
        ):
            target.extra[name][:] = np.where(there & well, values, np.nan)
        flat = kept.reshape(-1, state.shape[1])
        target.state[size:] = np.where(well, flat, state[size:])
        target.flag[:] = step.flag
        lost = well & ~(np.isfinite(flat).all(axis=0))
        if lost.any():
            codes = np.where(lost, flags.OVERFLOW, flags.WELL).astype(np.uint8)
            target.leave(state, codes)
            target.flag[:] = np.where(lost, flags.OVERFLOW, step.flag)

    def _push_row(self, ring: Array, before: Array, rows: Rows) -> Array:
        """Return the kept rows (width, lag, K) after these rows, with the states before them as the newest."""
        old = ring.reshape(-1, self.lag, ring.shape[1])
        first = rows.mask_first_rows()
        if first is True:
            return old
        prediction = self.inner.prediction(before, rows)
        m, P = self.inner.moments(before)
        nothing = np.zeros_like(P)
        G = prediction.gain.reshape(-1, len(rows.dt))
        new = np.empty_like(old)
        new[:, 1:] = old[:, :-1]
        new[:, 0] = [*m, *prediction.rest, *prediction.mean, *nothing, *G, nothing[0]]
        new[-1] = np.where(new[-1] >= 0.0, new[-1] + rows.dt, new[-1])
        return new if first is False else np.where(first, old, new)

    def _append_empty_rows(self, inner: Array) -> Array:
        state = np.concatenate([inner, np.zeros((self.size - len(inner), inner.shape[1]))])
        state[self.places["lagged_ages"]] = -1.0
        return state


def check_lag_filter(inner: Any, lag: int) -> CrossLagFilter:
    """Return a filter with a lag. Raises the ModelError of its prediction."""
    row = Rows(
        np.zeros(1), np.zeros(1, bool), np.zeros((inner.measurements, 1)), np.zeros((inner.controls, 1))
    )
    inner.prediction(inner.initial(1), row)
    return CrossLagFilter(inner, lag)
