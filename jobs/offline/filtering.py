"""Filter or smooth the rows of a file from their keys' initial states, and judge the fit by the innovations.

Only learned parameters come from a snapshot; each key starts from the initial distribution. Results are written to CSV
or Parquet atomically. No Spark.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import csv

import kalman
from jobs.core.errors import UserError
from jobs.core.input_files import parse_path
from jobs.core.report import format_count
from jobs.landing.checking import ParsedRows
from jobs.landing.values.keys import find_places
from jobs.offline.row_faults import Gaps, Lost, count_gaps, find_lost, list_row_step_kinds
from jobs.snapshots.learned import LearnedParameters, read_key_parameters
from jobs.specs.model_spec import ModelSpec
from jobs.specs.row_order import Duplicates
from jobs.state.encoding import arrow, row_order
from jobs.state.encoding.packets import CONTROL, MEASURED
from jobs.state.encoding.row_order import order_rows
from jobs.state.encoding.table_columns import COMPUTED, SCALARS, build_extra_column, split_keys
from jobs.state.expiry import split_lives
from jobs.state.row_filter import RowFilter
from kalman.evaluation.diagnostics import consistency, ljung_box
from kalman.evaluation.row_figures import INNOVATION, RESIDUAL, RESIDUAL_COVARIANCE, figures
from kalman.filters.own_parameters import copy_key_parameters, find_key_parameters
from kalman.linalg.packing import unpack
from kalman.models.groups import GROUPS, begin_states
from kalman.types import Filter


class Prior(NamedTuple):
    """The filter, and the initial states (size, K) of the K keys of some rows.

    lines, data: the origin of the parameters, for a report.
    """

    kernel: Filter
    states: NDArray[np.float64]
    lines: list[str]
    data: dict[str, Any]

    def key_states(self) -> kalman.KeyStates:
        """Return the states of the keys before their first row."""
        return kalman.initial_states(self.kernel, self.states.shape[1])._replace(values=self.states.copy())


def build_spec_prior(spec: ModelSpec, keys: int) -> Prior:
    """Return the prior with only the values in the spec."""
    kernel = kalman.build(spec.definition())
    return Prior(kernel, kernel.initial(keys), [], {})


def build_prior(
    spec: ModelSpec,
    rows: ParsedRows,
    columns: Mapping[str, pa.Array],
    root: str,
    learned: LearnedParameters,
    asked: bool,
) -> Prior:
    """Return the prior of the keys of a file's rows.

    Args:
        spec: the spec of the model.
        rows: rows of the file.
        columns: columns of the file, with the key columns.
        root: the root of the warehouse.
        learned: learned parameters (`jobs.snapshots.learned`).
        asked: whether the user named a snapshot.

    Raises:
        UserError: the snapshot's rows cannot be read.
    """
    kernel = kalman.build(spec.definition(), learned.parameters)
    states = kernel.initial(rows.keys)
    data: dict[str, Any] = {"snapshot": learned.snapshot}
    if learned.snapshot is None or not learned.parameters:
        return Prior(kernel, states, _explain_spec_values(spec, learned, asked), data)
    line = f"parameters of snapshot {learned.snapshot}"
    if spec.learn is None or spec.learn.scope not in ("group", "key"):
        return Prior(kernel, states, [line], data)
    good = np.flatnonzero(rows.accepted)
    codes, firsts = np.unique(rows.key[good], return_index=True)
    places = good[firsts]
    texts = [columns[name].take(arrow.build_integers(places)).cast(pa.string()) for name in spec.key]
    states[:, codes], known = read_learned_begin(root, spec, learned, kernel, texts, len(codes))
    by_group = spec.learn.scope == "group"
    whose = ("their group's", "those of all groups") if by_group else ("their own", "the population's")
    counts = {"keys_known": known, "keys_unknown": len(codes) - known}
    named = f"{format_count(known, 'key')} with {whose[0]}, {len(codes) - known:,} with {whose[1]}"
    return Prior(kernel, states, [f"{line}: {named}"], {**data, **counts})


def read_learned_begin(
    root: str,
    spec: ModelSpec,
    learned: LearnedParameters,
    kernel: Filter,
    texts: Sequence[pa.Array],
    size: int,
) -> tuple[NDArray[np.float64], int]:
    """Return the initial states (size, K) of keys, and the number of keys with learned parameters by group or key.

    A parameter that adapts to the innovations is part of a key's state, and keeps its initial value here.

    Args:
        root: the root of the warehouse.
        spec: the spec of the model.
        learned: parameters by group or by key.
        kernel: the filter with the pooled parameters, for all other keys.
        texts: texts of each key column of the K keys.
        size: the number K of keys; without key columns there is one key.

    Raises:
        UserError: the snapshot's rows cannot be read.
    """
    assert spec.learn is not None
    states, own = kernel.initial(size), find_key_parameters(kernel)
    if spec.learn.scope == "group":
        groups = learned.parameters.get(GROUPS)
        if groups is None:
            return states, 0
        begin = begin_states(kalman.build, spec.definition(), learned.parameters)
        mine = [texts[spec.key.index(name)] for name in groups["by"]]
        known = [arrow.build_texts(values) for values in zip(*groups["values"], strict=True)]
        at = find_places(mine, known, size, len(groups["values"]))
        return begin[:, at], int((at >= 0).sum())  # the last state, at -1, is for keys without a known group
    if not own.learned:
        return states, 0
    stored = read_key_parameters(root, spec, learned, max(rows.stop for rows in own.rows.values()))
    at = find_places(texts, split_keys(stored.keys, len(spec.key)), size, len(stored.keys))
    found = np.flatnonzero(at >= 0)
    states[:, found] = copy_key_parameters(
        kernel, states[:, found], stored.values[:, at[found]], adapted=False
    )
    return states, len(found)


def _explain_spec_values(spec: ModelSpec, learned: LearnedParameters, asked: bool) -> list[str]:
    """Return lines with the reason for using the spec's values, if the reader may expect learned values."""
    if learned.snapshot is not None:
        said = f"snapshot {learned.snapshot} has learned none"
        return [f"parameters: the spec's values; {said}"] if asked or spec.learn is not None else []
    if spec.learn is None and not asked:
        return []
    lines = f"parameters: the spec's values, {learned.reason}"
    learns = "" if asked else f"; learn them with `kalman-pipeline pretrain --model {spec.name}`"
    return [lines + learns]


FORMATS = (".csv", ".parquet")
Floats = NDArray[np.float64]


def check_target(target: Path, source: Path) -> None:
    """Check that the results of `source` can be written to `target`.

    Raises:
        UserError: the format is unknown, the folder does not exist, the target is a folder or the source, or a name is
            not a valid file name.
    """
    for path in (target, source):
        parse_path(str(path))
    if target.suffix.lower() not in FORMATS:
        raise UserError(f"{target}: the file's ending must be .csv or .parquet")
    if not target.parent.is_dir():
        raise UserError(f"{target}: there is no folder {target.parent}; create it first")
    if target.is_dir():
        raise UserError(f"{target}: is a folder; give a file's name")
    if target.exists() and source.exists() and os.path.samefile(source, target):
        raise UserError(f"{target}: is the input itself; give another output")


def build_list_columns(
    path: Path, field: str, values: Floats, valid: NDArray[np.bool_], parts: Sequence[str] | None
) -> dict[str, pa.Array]:
    """Return the columns of values (d, N): in Parquet a column of lists, in CSV a column for each of the d parts.

    Without names of parts (and with d = 1) the CSV column has the field's name.
    """
    if path.suffix.lower() == ".csv" and parts is None:
        return {field: arrow.build_numbers(values[0])}
    if path.suffix.lower() == ".csv" and parts is not None:
        return {f"{field}_{part}": arrow.build_numbers(row) for part, row in zip(parts, values, strict=True)}
    return {field: arrow.build_vectors(values, valid)}


def save(path: Path, columns: dict[str, pa.Array]) -> None:
    """Write columns as a table, atomically.

    Raises:
        UserError: the file cannot be written.
    """
    write = _build_writer(path, pa.table(columns))
    temporary: Path | None = None
    try:
        # A new file with an unpredictable name: under a known name, a prepared link could redirect the rows.
        handle, name = tempfile.mkstemp(".part", ".", path.parent)
        os.close(handle)
        temporary = Path(name)
        write(temporary)
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _build_writer(path: Path, table: pa.Table) -> Callable[[Path], None]:
    if path.suffix.lower() == ".parquet":
        return lambda temporary: pq.write_table(table, temporary)

    return lambda temporary: csv.write_csv(table, temporary, csv.WriteOptions(quoting_style="needed"))


LAGS = 10

FEWEST = 3 * LAGS
"""The number of innovations that a key needs for a meaningful test of their correlation."""


class ModelFit(NamedTuple):
    """Numbers of keys: with a NIS, with a NIS outside its bounds, tested for correlation, and correlated."""

    keys_judged: int
    keys_nis_outside: int
    keys_tested: int
    keys_correlated: int

    @property
    def lines(self) -> list[str]:
        """Return the counts as readable lines."""
        if not self.keys_judged:
            return []
        text = f"NIS outside its 95 % bounds: {_format_share(self.keys_nis_outside, self.keys_judged)}"
        if self.keys_tested:
            text += f"; innovations correlated (Ljung-Box): {_format_share(self.keys_correlated, self.keys_tested)}"
        return [f"{text}; 5 % are expected of a correct model" if self.keys_judged > 1 else text]


def fit(key: NDArray[np.int64], nis: Floats, keys: int, innovations: Floats) -> ModelFit:
    """Test the fit by the NIS (N,) and the normalised innovations (m, N) of rows; a flagged row has the NIS NaN.

    key: (N,) number of each row's key.
    keys: the number of keys.
    """
    components = np.isfinite(innovations).sum(axis=0)
    whole = consistency(key, nis, np.maximum(components, 1), keys)
    correlated = np.zeros(keys, bool)
    tested = np.zeros(keys, bool)
    for values in innovations:
        test = ljung_box(key, values, keys, LAGS)
        enough = (test.count >= FEWEST) & np.isfinite(test.p_value)
        tested |= enough
        correlated |= enough & (test.p_value < 0.05 / len(innovations))  # several tests per key: Bonferroni
    return ModelFit(
        int((whole.components > 0).sum()),
        int(whole.outside().sum()),
        int(tested.sum()),
        int(correlated.sum()),
    )


def select_unflagged_nis(out: kalman.Outputs) -> Floats:
    """Return the NIS of rows (N,), with NaN for a flagged row."""
    return np.where(out.flag == 0, out.nis, np.nan)


def compute_nis_ratio(nis: Floats, y: Floats) -> float | None:
    """Return the mean NIS per measured component of rows (N,) with measurements (m, N); None if no row has a NIS."""
    observed = np.isfinite(nis)
    components = int((~np.isnan(y[:, observed])).sum())
    return float(nis[observed].sum()) / components if components else None


def _format_share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} key{'s'[: whole != 1]}" + (f" ({part / whole:.1%})" if whole > 1 else "")


class FilteredRows(NamedTuple):
    """The filter's output for N input rows, in input order; NaN for a row that was not applied.

    mean: (n, N).
    covariance: (n*n, N), row by row.
    log_likelihood: (N,).
    nis: (N,).
    flag: (N,) text or None.
    extra: for each name, numbers (d, N).
    fit: the test of the model's fit; None if the filter has no innovations.
    lost: keys whose last rows all have a flag.
    gaps: unequal time steps, for a process with one step per row.
    """

    applied: NDArray[np.bool_]
    mean: Floats
    covariance: Floats
    log_likelihood: Floats
    nis: Floats
    flag: NDArray[np.object_]
    extra: dict[str, Floats]
    fit: ModelFit | None = None
    lost: Lost | None = None
    gaps: Gaps | None = None

    @property
    def unsmoothed(self) -> int:
        """Return the number of applied rows without a smoothed state."""
        found = self.extra.get("smoothed_mean")
        if found is None:
            return 0
        applied = self.applied & (self.flag == None)  # noqa: E711 - elementwise
        return int((np.isnan(found).any(axis=0) & applied).sum())


def filter_rows(
    spec: ModelSpec, rows: ParsedRows, smooth: bool = False, prior: Prior | None = None
) -> FilteredRows:
    """Filter rows in any order, and also smooth them if `smooth` is true; rejected rows are left out.

    prior: the filter and the initial states of the keys; None means the spec's values.

    Raises:
        UserError: the model's filter cannot be smoothed.
    """
    prior = prior or build_spec_prior(spec, rows.keys)
    model, states = prior.kernel, prior.key_states()
    order, sorted_rows = order_accepted_rows(rows, spec.duplicates)
    if spec.idle_us is not None:
        sorted_rows, key_of_life = split_lives(model, states, sorted_rows, spec.unit_us, spec.idle_us)
        states = states.take(key_of_life)
    keys = len(states.count)
    judged = INNOVATION in figures(model)
    beside = {
        name: None for name in (*spec.outputs.columns, *([INNOVATION] if judged else ())) if name in COMPUTED
    }
    row_filter = RowFilter(model, spec.unit_us, tuple(beside))
    out, smoothed = _filter_rows(spec, row_filter, states, sorted_rows, smooth)
    tested = fit(sorted_rows.key, select_unflagged_nis(out), keys, out.extra[INNOVATION]) if judged else None
    given = {MEASURED: sorted_rows.y, CONTROL: sorted_rows.u}
    wanted = {name: given[name] if name in given else out.extra[name] for name in spec.outputs.columns}
    extra = {name: out.extra[name] for name in model.outputs} | wanted | smoothed
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
    return FilteredRows(
        applied,
        in_input_order(out.mean),
        in_input_order(unpack(out.covariance)),
        in_input_order(out.log_likelihood),
        in_input_order(out.nis),
        flag,
        {name: in_input_order(values) for name, values in extra.items()},
        tested,
        find_lost(rows.key[order], out.flag),
        count_gaps(rows.key[order], sorted_rows.time) if list_row_step_kinds(spec.definition()) else None,
    )


def _filter_rows(
    spec: ModelSpec, row_filter: RowFilter, states: kalman.KeyStates, rows: kalman.SortedRows, smooth: bool
) -> tuple[kalman.Outputs, dict[str, Floats]]:
    """Return the filter's outputs and, if `smooth` is true, the smoother's columns (d, N) by name."""
    if not smooth:
        return row_filter.run(states, rows)[1], {}
    try:
        out, found = row_filter.smoothed(states, rows)
    except kalman.ModelError as error:
        raise UserError(f"--smooth: {spec.name}: {error}") from error
    more = {f"smoothed_{name}": values for name, values in found.extra.items()}
    whole = unpack(found.covariance)
    return out, {"smoothed_mean": found.mean, "smoothed_covariance": whole, **more}


def order_accepted_rows(
    rows: ParsedRows, rule: Duplicates | None = None
) -> tuple[NDArray[np.int64], kalman.SortedRows]:
    """Return the positions of the accepted rows in the order of their application, and these rows.

    With a rule for duplicates, duplicates are rejected first.
    """
    good = np.flatnonzero(rows.accepted)
    order = good[order_rows(rows.key[good], rows.time[good], rows.y[:, good], rows.u[:, good])]
    if rule is not None:
        if rule.id is None:
            repeated = row_order.find_repeated(_take_rows(rows, order))
        else:
            with_id = np.flatnonzero(rows.ids[order] >= 0)
            places = order[with_id]
            repeated = np.zeros(len(order), bool)
            marks = row_order.Marks(rows.key[places], rows.ids[None, places], rows.time[places])
            repeated[with_id] = row_order.find_resent(marks, rule.within_us)
        rows.reason[order[repeated]] = row_order.REASON if rule.id is None else row_order.SAME_ID
        order = order[~repeated]
    return order, _take_rows(rows, order)


def _take_rows(rows: ParsedRows, order: NDArray[np.int64]) -> kalman.SortedRows:
    return kalman.SortedRows(rows.key[order], rows.time[order], rows.y[:, order], rows.u[:, order])


def write(path: Path, spec: ModelSpec, columns: dict[str, pa.Array], estimates: FilteredRows) -> None:
    """Write the output table atomically, with the columns that the spec's `outputs` select.

    Raises:
        UserError: the file cannot be written.
    """
    n = len(spec.states)
    diagonal = spec.outputs.covariance == "diagonal"
    table = dict(columns)

    def add(field: str, values: Floats) -> None:
        if diagonal and field in ("covariance", "smoothed_covariance"):
            table.update(build_list_columns(path, field, values[:: n + 1], estimates.applied, spec.states))
        elif field in SCALARS:
            table[field] = build_extra_column(field, values)
        else:
            table.update(
                build_list_columns(
                    path, field, values, estimates.applied, _list_part_names(field, len(values), spec)
                )
            )

    add("mean", estimates.mean)
    add("covariance", estimates.covariance)
    table["log_likelihood"] = arrow.build_numbers(estimates.log_likelihood)
    table["nis"] = arrow.build_numbers(estimates.nis)
    table["flag"] = arrow.build_texts(list(estimates.flag))
    for field, values in estimates.extra.items():
        add(field, values)
    save(path, table)


def _list_part_names(field: str, width: int, spec: ModelSpec) -> list[str] | None:
    """Return the CSV names of a list's numbers: states, measurements, their pairs, or indices; None for a single
    number.
    """
    states, measurements = spec.states, spec.measurement
    if field.endswith("mean") and width == len(states):
        return states
    if field in (RESIDUAL, INNOVATION, MEASURED):
        return measurements
    if field == CONTROL:
        return [*spec.control, *spec.input_names]
    if field == RESIDUAL_COVARIANCE:
        return _list_pairs(measurements)
    if field.endswith("covariance") and width == len(states) ** 2:
        return _list_pairs(states)
    return None if width == 1 else [str(index) for index in range(width)]


def _list_pairs(names: list[str]) -> list[str]:
    return [f"{a}_{b}" for a in names for b in names]
