"""Figures of each row beside a filter's own outputs: the residual and its covariance, innovations, system matrices.

They need a second prediction of each row, so they are computed only on request, and for many rounds of a run together:
a row's figures do not depend on the other rows in a call.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kalman import flags
from kalman.evaluation.forecast import extract_variances
from kalman.evaluation.system_matrices import MATRICES, compute_system_matrices, count_matrix_entries
from kalman.filters.prediction import Measuring, Residual, predict_measurement, turn_measurements
from kalman.filters.state_layout import BLOCK, unwrap_filter
from kalman.linalg.entries import times
from kalman.linalg.ldl import factor, whiten
from kalman.linalg.packing import unpack
from kalman.run import KeyStates, Round, SortedRows, build_rounds, find_late_rows, scatter_values
from kalman.types import Array, Filter, ModelError, Rows

INNOVATION, RESIDUAL, RESIDUAL_COVARIANCE = "innovation", "residual", "residual_covariance"
SYSTEM = {f"system_{name}": name for name in MATRICES}
"""Map the name of a figure to the name of its matrix."""


def figures(model: Filter) -> dict[str, int]:
    """Return name and width of each figure that the filter provides."""
    inner = unwrap_filter(model)
    m, found = model.measurements, dict[str, int]()
    if isinstance(inner, Measuring) and not isinstance(inner, Residual):
        found[INNOVATION] = m
    if isinstance(inner, Measuring | Residual):
        found |= {RESIDUAL: m, RESIDUAL_COVARIANCE: m * m}
    matrices = count_matrix_entries(model)
    return found | {figure: matrices[name] for figure, name in SYSTEM.items() if name in matrices}


def check_figures(model: Filter, names: Sequence[str]) -> None:
    """Raise ModelError where the kind of filter lacks one of the figures."""
    there = figures(model)
    for name in names:
        if name in there:
            continue
        if name in SYSTEM:
            has = [matrix for figure, matrix in SYSTEM.items() if figure in there]
            remedy = f"it has {', '.join(has)}" if has else "remove it"
            raise ModelError("outputs.matrices", f"the filter has no matrix {SYSTEM[name]}", remedy)
        option = "innovation" if name == INNOVATION else "residual"
        remedy = "remove it, or choose another filter"
        raise ModelError(f"outputs.{option}", "the filter does not predict its measurements", remedy)


class RowFigures:
    """Records figures of a run's rows: pass it to `run` or `smooth` as `on_round`."""

    def __init__(self, model: Filter, states: KeyStates, rows: SortedRows, names: Sequence[str]) -> None:
        """Prepare for rows after these states. Raises ModelError where the kind of filter lacks a figure."""
        check_figures(model, names)
        there = figures(model)
        self._model = unwrap_filter(model)
        self._kept = np.flatnonzero(~find_late_rows(states, rows))
        self._rows = len(rows.key)
        self._place = build_rounds(rows.key[self._kept]).place
        self._found = {name: np.full((there[name], len(self._kept)), np.nan) for name in names}
        self._waiting: list[Round] = []
        self._size = 0

    def __call__(self, taken: Round) -> None:
        """Record one round."""
        self._waiting.append(taken._replace(before=taken.before.copy()))
        self._size += len(taken.rows.dt)
        if self._size >= BLOCK:
            self._work()

    def found(self) -> dict[str, Array]:
        """Return each figure (d, N) of the rows, as from `compute_row_figures`; NaN where a row is late."""
        self._work()
        return {
            name: scatter_values(values[:, self._place], self._kept, self._rows)
            for name, values in self._found.items()
        }

    def _work(self) -> None:
        """Work out the pending rounds in one call."""
        if not self._waiting:
            return
        before = np.concatenate([taken.before for taken in self._waiting], axis=1)
        rows = Rows(
            *(np.concatenate(parts, axis=-1) for parts in zip(*(t.rows for t in self._waiting), strict=True))
        )
        flag = np.concatenate([taken.step.flag for taken in self._waiting])
        found = compute_row_figures(self._model, before[: self._model.size], rows, flag, list(self._found))
        at = 0
        for taken in self._waiting:
            width = len(taken.rows.dt)
            for name, values in found.items():
                self._found[name][:, taken.place] = values[:, at : at + width]
            at += width
        self._waiting, self._size = [], 0


def compute_row_figures(
    model: Filter, before: Array, rows: Rows, flag: npt.NDArray[np.uint8], names: Sequence[str]
) -> dict[str, Array]:
    """Return figures (d, K) of one row for each key, by name.

    Args: model: the filter without rounding and kept rows (`innermost`).
        before: (size, K) states before the rows.
        rows: one row for each key.
        flag: (K,) the rows' flags.
        names: figures to return, from `figures`.

    residual: the measurement minus its prediction, v = y - E[y]; for angles, within half a turn. A residual is NaN
        where a component is missing or depends on an undetermined state. residual_covariance: the full matrix S of the
        prediction, row by row, with missing components; infinite where undetermined. innovation: the residual of
        component i given the residuals of components 0 to i - 1, divided by its standard deviation. For the matrices
        see `kalman.evaluation.system_matrices.compute_system_matrices`. A gated row has all figures except the
        innovation, since the figures explain the gate; all figures of a row with another flag are NaN.
    """
    found: dict[str, Array] = {}
    if {INNOVATION, RESIDUAL, RESIDUAL_COVARIANCE} & set(names):
        residual, covariance = _compute_residuals(model, before, rows)
        found[RESIDUAL], found[RESIDUAL_COVARIANCE] = residual, unpack(covariance)
        if INNOVATION in names:
            found[INNOVATION] = np.where(
                flag == flags.WELL, _normalise_residuals(residual, covariance), np.nan
            )
    matrices = [SYSTEM[name] for name in names if name in SYSTEM]
    if matrices:
        used = compute_system_matrices(model, before, rows, matrices)
        found |= {f"system_{name}": values for name, values in used.items()}
    shown = (flag == flags.WELL) | (flag == flags.GATED)
    return {name: np.where(shown, found[name], np.nan) for name in names}


def _compute_residuals(model: Filter, before: Array, rows: Rows) -> tuple[Array, Array]:
    """Return residuals (m, K), NaN where unknown, and their packed covariances.

    A difference beyond the range of float64 is infinite with its sign. The filter flags the row, since its NIS is
    infinite, too.
    """
    with np.errstate(all="ignore"):
        if not isinstance(model, Residual):
            assert isinstance(model, Measuring)
            predicted, _ = model.step(before, rows._replace(y=np.full_like(rows.y, np.nan)))
            mean, covariance = predict_measurement(model, predicted, rows.u)
            residual = turn_measurements(model, rows.y, mean) - mean
        else:
            residual, covariance = model.residual(before, rows)
    return np.where(np.isinf(extract_variances(covariance)), np.nan, residual), covariance


def _normalise_residuals(residual: Array, covariance: Array) -> Array:
    """Return residuals (m, K) as independent N(0, 1), component by component."""
    known = ~np.isnan(residual)
    with np.errstate(all="ignore"):  # unknown components are left out
        factors = factor(list(covariance), list(known))
        white = whiten(factors.L, list(np.where(known, residual, 0.0)))
        result = [times(a, np.sqrt(b)) for a, b in zip(white, factors.inverse, strict=True)]
    return np.where(known, np.array(result), np.nan)
