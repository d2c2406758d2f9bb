"""Filter, or smooth, the rows of a file and judge the model's fit by its innovations. No Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

import kalman
from jobs.core.errors import UserError
from jobs.encoding import arrow
from jobs.encoding.order import order_rows
from jobs.ingestion.parsing import ParsedRows
from jobs.offline.prior import Prior, specs_prior
from jobs.offline.result_files import lists, save
from jobs.specs.model_spec import ModelSpec
from jobs.specs.row_order import Duplicates
from jobs.state import duplicates
from jobs.state.expiry import lives
from kalman.evaluation.diagnostics import Watch, consistency, ljung_box
from kalman.smoothers.smooth import smooth_observed as smooth_rows

LAGS = 10

FEWEST = 3 * LAGS
"""Innovations that a key needs for the test of their correlation to be meaningful."""

Floats = NDArray[np.float64]


class Fit(NamedTuple):
    """Counts of keys: with a NIS, with a NIS outside its bounds; tested for correlation, correlated."""

    judged: int
    outside: int
    tested: int
    correlated: int

    @property
    def data(self) -> dict[str, Any]:
        """The counts for a program."""
        return {
            "keys_judged": self.judged,
            "keys_nis_outside": self.outside,
            "keys_tested": self.tested,
            "keys_correlated": self.correlated,
        }

    @property
    def lines(self) -> list[str]:
        """The counts for a person."""
        if not self.judged:
            return []
        text = f"NIS outside its 95 % bounds: {_share(self.outside, self.judged)}"
        if self.tested:
            text += f"; innovations correlated (Ljung-Box): {_share(self.correlated, self.tested)}"
        return [f"{text}; 5 % are expected of a correct model" if self.judged > 1 else text]


def watch(model: kalman.Filter, states: kalman.KeyStates, rows: kalman.SortedRows) -> Watch | None:
    """Return an observer of a run's innovations, None where the filter has none."""
    try:
        return Watch(model, states, rows)
    except kalman.ModelError:
        return None


def fit(key: NDArray[np.int64], outputs: kalman.Outputs, keys: int, innovations: NDArray[np.float64]) -> Fit:
    """Test the outputs and normalised innovations (m, N) of a run over rows of keys (N,)."""
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


class Estimates(NamedTuple):
    """The filter's output for N input rows, in input order; NaN where a row was not applied.

    mean (n, N), covariance (n*n, N) row by row, log_likelihood (N,), nis (N,), flag (N,) text or None,
    extra name -> (d, N); fit: the test of the model's fit, None where the filter has no innovations.
    """

    applied: NDArray[np.bool_]
    mean: Floats
    covariance: Floats
    log_likelihood: Floats
    nis: Floats
    flag: NDArray[np.object_]
    extra: dict[str, Floats]
    fit: Fit | None = None


def filter_rows(
    spec: ModelSpec, rows: ParsedRows, smooth: bool = False, prior: Prior | None = None
) -> Estimates:
    """Filter rows in any order, and `smooth` them; rejected rows are left out.

    prior: what the keys begin with; None: the spec's values.

    Raises:
        UserError: the model's filter cannot be smoothed.
    """
    prior = prior or specs_prior(spec, rows.keys)
    model, states = prior.kernel, prior.key_states()
    order, sorted_rows = in_order(rows, spec.duplicates)
    if spec.idle_us is not None:
        sorted_rows, key_of_life = lives(model, states, sorted_rows, spec.unit_us, spec.idle_us)
        states = states.take(key_of_life)
    keys = len(states.count)
    n = len(spec.states)
    places = [max(i, j) * (max(i, j) + 1) // 2 + min(i, j) for i in range(n) for j in range(n)]
    smoothed: dict[str, Floats] = {}
    if smooth:
        observer = None if watch(model, states, sorted_rows.take(np.arange(0))) is None else Watch
        try:
            _, out, smooth_states, white = smooth_rows(
                model, states, sorted_rows, spec.unit_us, observer=observer
            )
        except kalman.ModelError as error:
            raise UserError(f"--smooth: {spec.name}: {error}") from error
        smoothed = {
            "smoothed_mean": smooth_states.mean,
            "smoothed_covariance": smooth_states.covariance[places],
            **{f"smoothed_{name}": values for name, values in smooth_states.extra.items()},
        }
    else:
        watched = watch(model, states, sorted_rows)
        _, out = kalman.run(model, states, sorted_rows, spec.unit_us, watched)
        white = None if watched is None else watched.normalised()
    tested = None if white is None else fit(sorted_rows.key, out, keys, white)
    total = len(rows.reason)

    def in_input_order(values: Floats) -> Floats:
        result = np.full((*values.shape[:-1], total), np.nan)
        result[..., order] = values
        return result

    applied = np.zeros(total, dtype=bool)
    applied[order] = True
    flag = np.full(total, None, dtype=object)
    flag[order] = np.array(kalman.FLAGS, dtype=object)[out.flag]
    flag[~applied] = np.array([f"rejected: {reason}" for reason in rows.reason[~applied]], dtype=object)
    return Estimates(
        applied,
        in_input_order(out.mean),
        in_input_order(out.covariance[places]),
        in_input_order(out.log_likelihood),
        in_input_order(out.nis),
        flag,
        {name: in_input_order(values) for name, values in (out.extra | smoothed).items()},
        tested,
    )


def in_order(rows: ParsedRows, rule: Duplicates | None = None) -> tuple[NDArray[np.int64], kalman.SortedRows]:
    """Return the places of the accepted rows in the order of their application, and these rows.

    With a rule for duplicates, duplicates are rejected first.
    """
    good = np.flatnonzero(rows.reason == None)  # noqa: E711 - elementwise
    order = good[order_rows(rows.key[good], rows.time[good], rows.y[:, good], rows.u[:, good])]
    if rule is not None:
        if rule.id is None:
            repeated = duplicates.repeated(_sorted_rows(rows, order))
        else:
            with_id = np.flatnonzero(rows.ids[order] >= 0)
            places = order[with_id]
            repeated = np.zeros(len(order), bool)
            marks = duplicates.Marks(rows.key[places], rows.ids[None, places], rows.time[places])
            repeated[with_id] = duplicates.resent(marks, rule.within_us)
        rows.reason[order[repeated]] = duplicates.REASON if rule.id is None else duplicates.SAME_ID
        order = order[~repeated]
    return order, _sorted_rows(rows, order)


def _sorted_rows(rows: ParsedRows, order: NDArray[np.int64]) -> kalman.SortedRows:
    return kalman.SortedRows(rows.key[order], rows.time[order], rows.y[:, order], rows.u[:, order])


def write(path: Path, states: list[str], columns: dict[str, pa.Array], estimates: Estimates) -> None:
    """Write the output table atomically.

    Raises:
        UserError: the file cannot be written.
    """
    table = dict(columns)
    for field, values in (("mean", estimates.mean), ("covariance", estimates.covariance)):
        table |= lists(path, field, values, estimates.applied, _parts(field, len(values), states))
    table["log_likelihood"] = arrow.numbers(estimates.log_likelihood)
    table["nis"] = arrow.numbers(estimates.nis)
    table["flag"] = arrow.texts(list(estimates.flag))
    for field, values in estimates.extra.items():
        table |= lists(path, field, values, estimates.applied, _parts(field, len(values), states))
    save(path, table)


def _parts(field: str, width: int, states: list[str]) -> list[str] | None:
    """Return the names of a list's numbers in CSV: states, pairs of states, or numbers; None for a single one."""
    if field.endswith("mean") and width == len(states):
        return states
    if field.endswith("covariance") and width == len(states) ** 2:
        return [f"{a}_{b}" for a in states for b in states]
    return None if width == 1 else [str(index) for index in range(width)]
