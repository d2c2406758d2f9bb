"""Forecast the state and the measurements of every key of a file from the key's newest row. No Spark."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

import kalman
from jobs.core.errors import UserError
from jobs.landing.checking import ParsedRows
from jobs.landing.raw_rows import RawRows
from jobs.offline.ahead import Ahead, ForecastKeys, Future, forecast_ahead, list_forecasts
from jobs.offline.filtering import build_list_columns, order_accepted_rows, save
from jobs.offline.horizon import Horizon
from jobs.offline.key_inputs import convert_key_texts
from jobs.offline.prior import Prior, build_spec_prior
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding import arrow
from jobs.state.expiry import run_lives
from jobs.state.row_filter import RowFilter

Ints = NDArray[np.int64]


def forecast_keys(
    spec: ModelSpec,
    source: RawRows,
    rows: ParsedRows,
    horizon: Horizon,
    prior: Prior | None = None,
    future: Future | None = None,
) -> tuple[Ahead, dict[str, pa.Array]]:
    """Filter the rows of a file and forecast each key from its newest row.

    Also return the values of the key columns for the keys with a state.

    Args:
        spec: the spec of the model.
        source: columns of the file.
        rows: rows of the file, with the inputs of their keys.
        horizon: the horizon of the forecasts.
        prior: the filter and the initial states of the keys; None means the spec's values.
        future: inputs of future rows, for a model with controls or inputs.

    Raises:
        UserError: no row could be applied, the horizon is out of range, a future input is missing, or the model cannot
            be forecast.
    """
    order, sorted_rows = order_accepted_rows(rows, spec.duplicates)
    prior = prior or build_spec_prior(spec, rows.keys)
    kernel, initial = prior.kernel, prior.key_states()
    if spec.idle_us is None:
        states, _ = kalman.run(kernel, initial, sorted_rows, spec.unit_us)
    else:
        states = run_lives(RowFilter(kernel, spec.unit_us), initial, initial, sorted_rows, spec.idle_us).after
    places, states = _select_keys_with_state(rows, order, states)
    columns = {name: source.columns[name].take(arrow.build_integers(places)) for name in spec.key}
    keys = ForecastKeys(
        list(map(convert_key_texts, columns.values())), states, rows.u[len(spec.control) :, places]
    )
    typical = _compute_median_gap(sorted_rows, int(spec.unit_us))
    return forecast_ahead(spec, kernel, keys, horizon, future, typical), columns


def _select_keys_with_state(
    rows: ParsedRows, order: Ints, states: kalman.KeyStates
) -> tuple[Ints, kalman.KeyStates]:
    """Return the place of a row of each key with a state, in the order of the input, and the states of these keys."""
    codes, firsts = np.unique(rows.key[order], return_index=True)
    earliest = np.full(len(codes), len(rows.key))
    np.minimum.at(earliest, np.searchsorted(codes, rows.key[order]), order)
    known = np.flatnonzero(states.count[codes] > 0)
    if len(known) == 0:
        raise UserError("no row of the input could be applied: there is nothing to forecast from")
    known = known[np.argsort(earliest[known])]
    return earliest[known], states.take(codes[known])


def _compute_median_gap(rows: kalman.SortedRows, unit: int) -> int:
    """Return the median time between two rows of a key, in microseconds; the unit of time if no key has two rows."""
    gaps = np.diff(rows.time)[rows.key[1:] == rows.key[:-1]]
    gaps = gaps[gaps > 0]
    return int(np.median(gaps)) if len(gaps) else unit


def write_forecasts(
    path: Path, spec: ModelSpec, found: Ahead, keys: Mapping[str, pa.Array], probability: float
) -> None:
    """Write a row for each key and wanted time; the rows of a key follow each other.

    Args:
        path: the path of the file.
        spec: the spec of the model.
        found: the forecasts.
        keys: for each key column, its values for the keys that were forecast.
        probability: the probability that a value lies between its bounds.

    Raises:
        UserError: a key column has the name of an output column, or the file cannot be written.
    """
    rows = list_forecasts(spec, found, probability)
    columns = {name: values.take(arrow.build_integers(rows.key)) for name, values in keys.items()}
    clashes = {*keys, spec.time} & {"step", "flag"}
    columns[spec.time] = arrow.build_times(rows.time, np.ones(len(rows.time), bool))
    columns["step"] = arrow.build_integers(rows.step)
    for field, values, parts in rows.columns:
        new = build_list_columns(path, field, values, rows.flag == 0, parts)
        clashes |= columns.keys() & new.keys()
        columns |= new
    columns["flag"] = arrow.build_texts(list(np.array(kalman.FLAGS, dtype=object)[rows.flag]))
    if clashes:
        raise UserError(
            f"column {sorted(clashes)[0]} of the input has the name of an output column; rename it"
        )
    save(path, columns)
