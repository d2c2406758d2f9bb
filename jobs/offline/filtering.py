"""TODO."""

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
from jobs.offline.result_files import lists, save
from jobs.specs.model_spec import ModelSpec
from jobs.specs.row_order import Duplicates
from jobs.state import duplicates
from jobs.state.expiry import lives
from kalman.evaluation.diagnostics import Watch, consistency, ljung_box
from kalman.smoothers.smooth import smooth as smooth_rows

LAGS = 10

FEWEST = 3 * LAGS
"""Innovations that a key must have for the test of their correlation to mean something."""

Floats = NDArray[np.float64]


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


class Estimates(NamedTuple):
    """What the filter says of N input rows, in input order; NaN where a row was not applied.

    mean (n, N), covariance (n*n, N) row by row, log_likelihood (N,), nis (N,), flag (N,) text or None,
    extra name -> (d, N); fit: how the model suits the keys, None where the filter does not say.
    """

    applied: NDArray[np.bool_]
    mean: Floats
    covariance: Floats
    log_likelihood: Floats
    nis: Floats
    flag: NDArray[np.object_]
    extra: dict[str, Floats]
    fit: Fit | None = None


def filter_rows(spec: ModelSpec, rows: ParsedRows, smooth: bool = False) -> Estimates:
    """Filter rows that are in any order, and `smooth` them; the rejected ones are left out.

    Raises:
        UserError: the model's filter cannot be smoothed.
    """
    model = kalman.build(spec.definition())
    order, sorted_rows = in_order(rows, spec.duplicates)
    keys = rows.keys
    if spec.idle_us is not None:
        sorted_rows, keys = lives(model, keys, sorted_rows, spec.unit_us, spec.idle_us)
    states = kalman.initial_states(model, keys)
    n = len(spec.states)
    places = [max(i, j) * (max(i, j) + 1) // 2 + min(i, j) for i in range(n) for j in range(n)]
    look = watch(model, states, sorted_rows)
    smoothed: dict[str, Floats] = {}
    if smooth:
        try:
            _, out, given_all = smooth_rows(model, states, sorted_rows, spec.unit_us, look)
        except kalman.ModelError as error:
            raise UserError(f"--smooth: {spec.name}: {error}") from error
        smoothed = {
            "smoothed_mean": given_all.mean,
            "smoothed_covariance": given_all.covariance[places],
            **{f"smoothed_{name}": values for name, values in given_all.extra.items()},
        }
    else:
        _, out = kalman.run(model, states, sorted_rows, spec.unit_us, look)
    judged = None if look is None else fit(sorted_rows.key, out, keys, look.normalised())
    total = len(rows.reason)

    def back(values: Floats) -> Floats:
        result = np.full((*values.shape[:-1], total), np.nan)
        result[..., order] = values
        return result

    applied = np.zeros(total, dtype=bool)
    applied[order] = True
    flag = np.full(total, None, dtype=object)
    flag[order] = np.array(kalman.FLAGS, dtype=object)[out.flag]
    flag[~applied] = np.array([f"rejected: {said}" for said in rows.reason[~applied]], dtype=object)
    return Estimates(
        applied,
        back(out.mean),
        back(out.covariance[places]),
        back(out.log_likelihood),
        back(out.nis),
        flag,
        {name: back(values) for name, values in (out.extra | smoothed).items()},
        judged,
    )


def in_order(rows: ParsedRows, rule: Duplicates | None = None) -> tuple[NDArray[np.int64], kalman.SortedRows]:
    """Return where the rows that are not rejected are in the order in which they are applied, and those rows.

    Where there is a rule for rows that repeat another, these are rejected first.
    """
    good = np.flatnonzero(rows.reason == None)  # noqa: E711 - elementwise
    order = good[order_rows(rows.key[good], rows.time[good], rows.y[:, good], rows.u[:, good])]
    if rule is not None:
        if rule.id is None:
            again = duplicates.repeated(_taken(rows, order))
        else:
            named = np.flatnonzero(rows.ids[order] >= 0)
            there = order[named]
            again = np.zeros(len(order), bool)
            marks = duplicates.Marks(rows.key[there], rows.ids[None, there], rows.time[there])
            again[named] = duplicates.resent(marks, rule.within_us)
        rows.reason[order[again]] = duplicates.REASON if rule.id is None else duplicates.SAME_ID
        order = order[~again]
    return order, _taken(rows, order)


def _taken(rows: ParsedRows, order: NDArray[np.int64]) -> kalman.SortedRows:
    return kalman.SortedRows(rows.key[order], rows.time[order], rows.y[:, order], rows.u[:, order])


def write(path: Path, states: list[str], columns: dict[str, pa.Array], estimates: Estimates) -> None:
    """Write the output table; the file appears whole or not at all.

    Raises:
        UserError: it cannot be written.
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
    """Return what each of a list's numbers is called in CSV: a state, a pair of states, or a number."""
    if field.endswith("mean") and width == len(states):
        return states
    if field.endswith("covariance") and width == len(states) ** 2:
        return [f"{a}_{b}" for a in states for b in states]
    return None if width == 1 else [str(index) for index in range(width)]
