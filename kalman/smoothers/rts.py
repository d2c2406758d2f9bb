"""Fixed-interval smoothing of any filter with a `prediction` (Rauch, Tung and Striebel).

References: Rauch, Tung and Striebel (1965); for non-linear models Särkkä (2008), equations 26-28.
"""

from dataclasses import dataclass

import numpy as np

from kalman.filters.clear_step import ClearStep, PredictionRecorder
from kalman.filters.prediction import Smoothable
from kalman.filters.retrodiction import Retrodiction, carry_covariance_back, retrodict_mean
from kalman.linalg.packing import packed_size
from kalman.linalg.program import Recorded, Tape
from kalman.types import Array, Rows


@dataclass(frozen=True)
class CrossSmoother:
    """The smoother of a filter with a `prediction`, which carries back the smoothed state of the next row."""

    model: Smoothable

    def begin(self, values: Array) -> Array:
        """Return the moments of the last states, which are smoothed already."""
        return np.concatenate(self.model.moments(values))

    def smoothed(self, after: Array, later: Array) -> tuple[Array, Array]:
        """Return mean (n, K) and packed covariance (p, K) given all rows."""
        n = _count_states(len(later))
        return later[:n], later[n:]

    def extra(self, later: Array) -> dict[str, Array]:
        """Return an empty mapping: the smoother has no outputs beside mean and covariance."""
        return {}

    def back(self, before: Array, rows: Rows, later: Array) -> Array:
        """Return the smoothed states before the rows, from the smoothed states after the rows."""
        m, _ = self.model.moments(before)
        n = len(m)
        with np.errstate(all="ignore"):  # only flagged rows can fail, and they are excluded
            prediction = self.model.prediction(before, rows)
            back = Retrodiction([list(row) for row in prediction.gain], list(prediction.rest))
            mean = retrodict_mean([*m], [*prediction.mean], back.G, [*later[:n]])
            covariance = carry_covariance_back(back, [*later[n:]])
        earlier = np.array([np.broadcast_to(a, before.shape[1:]) for a in (*mean, *covariance)])
        return np.where(rows.first, later, earlier)

    def build_clear_back(self, missing: bool) -> ClearStep | None:
        """Return the step back over a row in order; missing: whether the rows have masks, which the step ignores.

        Its inputs are the array, the state before the row, dt, control, measurement and masks. None where the
        prediction calls Python functions.
        """
        model = self.model
        predicted = model.record_clear_prediction() if isinstance(model, PredictionRecorder) else None
        if predicted is None or not isinstance(model, PredictionRecorder):
            return None
        tape, n = Tape(), len(model.states)
        m, later = tape.symbols(n), tape.symbols(n + packed_size(n))
        expected, gain, rest = tape.symbols(n), tape.symbols(n * n), tape.symbols(packed_size(n))
        back = Retrodiction([gain[i * n : (i + 1) * n] for i in range(n)], rest)
        mean = retrodict_mean(m, expected, back.G, later[:n])
        outputs = [*mean, *carry_covariance_back(back, later[n:])]
        carried = Recorded(tape.operations, [*m, *expected, *gain, *rest, *later], outputs)
        whole = carried.follow(predicted, [*predicted.inputs[:n], *predicted.outputs])
        unused = Tape().symbols(model.measurements * (2 if missing else 1))
        inputs = [*whole.inputs[-len(later) :], *predicted.inputs, *unused]
        return ClearStep(Recorded(whole.operations, inputs, whole.outputs), [])


def _count_states(depth: int) -> int:
    n = 1
    while n + packed_size(n) < depth:
        n += 1
    return n
