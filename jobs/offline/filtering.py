"""Filter or smooth the rows of a file, and judge the model's fit by its innovations.

Results are written to CSV or Parquet atomically. No Spark.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import csv

import kalman
from jobs.core.errors import UserError
from jobs.core.input_files import parse_path
from jobs.landing.checking import ParsedRows
from jobs.offline.prior import Prior, build_spec_prior
from jobs.offline.row_faults import Gaps, Lost, count_gaps, find_lost, list_row_step_kinds
from jobs.specs.model_spec import ModelSpec
from jobs.specs.row_order import Duplicates
from jobs.state.encoding import arrow, row_order
from jobs.state.encoding.packets import CONTROL, MEASURED
from jobs.state.encoding.row_order import find_starts, order_rows
from jobs.state.encoding.table_columns import COMPUTED, SCALARS, build_extra_column
from jobs.state.expiry import split_lives
from jobs.state.row_filter import RowFilter
from kalman.evaluation.diagnostics import consistency, ljung_box
from kalman.evaluation.row_figures import INNOVATION, RESIDUAL, RESIDUAL_COVARIANCE, figures
from kalman.linalg.packing import unpack
from kalman.run import FEW_KEYS

FORMATS = (".csv", ".parquet")
MATRICES = ("covariance", "smoothed_covariance")
ROWS_A_GROUP = 1 << 18
"""Number of rows that are written at a time, in Parquet as a row group."""
ROWS_A_PIECE, KEYS_A_PIECE = 1 << 17, 1000
"""Fewest rows of a piece that is filtered alone, and of its keys in all but the last of its rounds of rows."""
BLOCK = 1 << 15
"""Number of rows whose results are put into their places, or become text, at a time."""
SAMPLE = 1 << 14
"""Number of values that show whether the values of a column repeat."""
Floats = NDArray[np.float64]
Item = TypeVar("Item")
Found = TypeVar("Found")


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
    table = pa.table(columns)
    _save_parts(path, iter([_encode_part(path, table, True)]), table.slice(0, SAMPLE))


def _encode_part(path: Path, table: pa.Table, is_first: bool) -> pa.Table | pa.Buffer:
    """Return a part of a file: the table for Parquet, its text for CSV, with a header if it is the first part."""
    if path.suffix.lower() == ".parquet":
        return table
    text = pa.BufferOutputStream()
    options = csv.WriteOptions(include_header=is_first, quoting_style="needed", batch_size=BLOCK)
    csv.write_csv(table, text, options)
    return text.getvalue()


def _is_repetitive(column: pa.ChunkedArray) -> bool:
    """Return whether a dictionary of values shortens a column in Parquet: not if its numbers rarely repeat."""
    values = column.combine_chunks()
    if pa.types.is_list(values.type):
        values = values.flatten()
    return not pa.types.is_floating(values.type) or 8 * len(values.unique()) <= len(values)


def _save_parts(path: Path, parts: Iterator[pa.Table | pa.Buffer], sample: pa.Table) -> None:
    """Write parts from `_encode_part` one after another, atomically; the columns of some rows show what repeats.

    Raises:
        UserError: the file cannot be written.
    """
    temporary: Path | None = None
    try:
        # A new file with an unpredictable name: under a known name, a prepared link could redirect the rows.
        handle, name = tempfile.mkstemp(".part", ".", path.parent)
        temporary = Path(name)
        with open(handle, "wb") as file:
            first = next(parts)
            if isinstance(first, pa.Table):
                plain = [name for name in sample.column_names if not _is_repetitive(sample.column(name))]
                coded = [name for name in first.column_names if name not in plain]
                paths: Any = [*coded, *(f"{name}.list.element" for name in coded)]
                with pq.ParquetWriter(file, first.schema, use_dictionary=paths) as writer:
                    for part in chain([first], parts):
                        writer.write_table(part)
            else:
                for part in chain([first], parts):
                    file.write(part)
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


LAGS = 10

FEWEST = 3 * LAGS
"""The number of innovations that a key needs for a meaningful test of their correlation."""


NIS_OFF = 0.3
"""The distance of the mean NIS from 1 that counts as far, if it also exceeds four standard errors of the mean."""
DEPENDENT = 0.001
"""The p-value of Ljung and Box below which innovations are dependent; with a right model, one key in a thousand is."""
MANY = 0.05
"""A warning is given if the model does not fit at least this share of keys."""


def find_misfits(
    count: NDArray[Any], nis: Floats, p_value: Floats
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return of which keys (K,) the mean NIS is far from 1, and of which the innovations are dependent.

    count: (K,) the number of values behind a key's NIS; fewer than ten show nothing.
    """
    far = np.abs(nis - 1.0) > np.maximum(NIS_OFF, 4.0 * np.sqrt(2.0 / np.fmax(count, 1.0)))
    return (count >= 10) & far, (count >= 10) & (p_value < DEPENDENT)


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
    components = int((~np.isnan(y) & observed).sum())
    return float(nis[observed].sum()) / components if components else None


def _format_share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} key{'s'[: whole != 1]}" + (f" ({part / whole:.1%})" if whole > 1 else "")


class FilteredRows(NamedTuple):
    """The filter's output for N input rows, in input order.

    applied: (N,) whether the row was applied.
    flag: (N,) codes of `kalman.FLAGS`; 0 for a row that was not applied.
    values: (N, w) numbers of each row, NaN for a row that was not applied.
    places: for each name of a column, the places of its numbers in a row of `values`; of a matrix row by row.
    fit: the test of the model's fit; None if the filter has no innovations.
    lost: keys whose last rows all have a flag.
    gaps: unequal time steps, for a process with one step per row.
    unsmoothed: number of applied rows without a smoothed state.
    repeats: number of applied rows with the key and the time of another row before.
    """

    applied: NDArray[np.bool_]
    flag: NDArray[np.uint8]
    values: Floats
    places: dict[str, NDArray[np.int64]]
    fit: ModelFit | None
    lost: Lost | None
    gaps: Gaps | None
    unsmoothed: int
    repeats: int

    def read_numbers(self, name: str) -> Floats:
        """Return the numbers (N,) of a column with one number per row."""
        return np.ascontiguousarray(self.values[:, self.places[name][0]])


class _PieceFacts(NamedTuple):
    """Facts of a piece of the rows: its number of rows, and rows (key, flag) of the keys that have flagged rows."""

    rows: int
    fit: ModelFit | None
    flagged: tuple[NDArray[np.int64], NDArray[np.uint8]]
    gaps: Gaps | None
    unsmoothed: int
    repeats: int


def filter_rows(
    spec: ModelSpec,
    rows: ParsedRows,
    smooth: bool = False,
    prior: Prior | None = None,
    threads: int = 1,
    on_rows: Callable[[int], None] = lambda count: None,
) -> FilteredRows:
    """Filter rows in any order, and also smooth them if `smooth` is true; rejected rows are left out.

    Args:
        spec: the spec of the model.
        rows: N rows; the reason of a duplicate is set in place.
        smooth: whether to smooth.
        prior: the filter and the initial states of the keys; None means the spec's values.
        threads: number of threads, each of which filters the rows of some keys at a time.
        on_rows: called with the number of rows of each finished piece.

    Raises:
        UserError: the model's filter cannot be smoothed.
    """
    work = _Filtering(spec, rows, prior or build_spec_prior(spec, rows.keys), smooth)
    accepted = rows.accepted
    facts: list[_PieceFacts] = []
    for fact in _map_ahead(work.filter_piece, _cut_by_key(rows, accepted), threads):
        facts.append(fact)
        on_rows(fact.rows)
    assert work.values is not None
    if not work.applied.all():
        work.values[~work.applied] = np.nan
    fits = [fact.fit for fact in facts if fact.fit is not None]
    gaps = [fact.gaps for fact in facts if fact.gaps is not None]
    keys, flags = zip(*(fact.flagged for fact in facts), strict=True)
    lost = find_lost(np.concatenate(keys), np.concatenate(flags))
    if lost is not None:
        lost = lost._replace(of=len(np.unique(rows.key[work.applied])))
    return FilteredRows(
        work.applied,
        work.flag,
        work.values,
        work.places,
        ModelFit(*map(sum, zip(*fits, strict=True))) if fits else None,
        lost,
        sum(gaps[1:], gaps[0]) if gaps else None,
        sum(fact.unsmoothed for fact in facts),
        sum(fact.repeats for fact in facts),
    )


def _cut_by_key(
    rows: ParsedRows, accepted: NDArray[np.bool_]
) -> Iterator[tuple[NDArray[np.int64], int, int]]:
    """Yield pieces of the accepted rows: their places in ascending order, and their first and last key plus one.

    A piece has all rows of its keys. There are fewer pieces if they would have few keys in most rounds of rows.
    """
    good = None if accepted.all() else np.flatnonzero(accepted)
    key = rows.key if good is None else rows.key[good]
    counts, total = np.bincount(key, minlength=rows.keys), len(key)
    few = min(FEW_KEYS, rows.keys)
    rounds = int(np.partition(counts, -few)[-few]) if few else 0
    count = min(total // ROWS_A_PIECE, total // (KEYS_A_PIECE * max(rounds, 1)))
    if count < 2:
        yield np.arange(total) if good is None else good, 0, rows.keys
        return
    through = np.cumsum(counts)
    ends = np.unique(np.searchsorted(through, total * np.arange(1, count) // count) + 1)
    ends = [*ends[ends < rows.keys].tolist(), rows.keys]
    piece_of_key = np.repeat(np.arange(len(ends), dtype=np.uint16), np.diff(ends, prepend=0))
    order = np.argsort(piece_of_key[key], kind="stable")  # a radix sort
    start, first = 0, 0
    for end in ends:
        stop = int(through[end - 1])
        places = order[start:stop]
        yield places if good is None else good[places], first, end
        start, first = stop, end


def _map_ahead(work: Callable[[Item], Found], items: Iterable[Item], threads: int) -> Iterator[Found]:
    """Yield the results of a function in the order of the items, while threads work on the next few items."""
    waiting = deque[Future[Found]]()
    with ThreadPoolExecutor(threads) as pool:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class _Filtering:
    """The filtering of rows in pieces; threads may filter different pieces at a time."""

    def __init__(self, spec: ModelSpec, rows: ParsedRows, prior: Prior, smooth: bool) -> None:
        self.spec, self.rows, self.smooth, total = spec, rows, smooth, len(rows.reason)
        self.model, self.states = prior.kernel, prior.key_states()
        self.judged = INNOVATION in figures(self.model)
        self.has_gaps = bool(list_row_step_kinds(spec.definition()))
        self.applied, self.flag = np.zeros(total, bool), np.zeros(total, np.uint8)
        self.values: Floats | None = None
        self.places: dict[str, NDArray[np.int64]] = {}
        self._lock = Lock()

    def filter_piece(self, piece: tuple[NDArray[np.int64], int, int]) -> _PieceFacts:
        """Filter a piece from `_cut_by_key`, and put the results into their places.

        Raises:
            UserError: the model's filter cannot be smoothed.
        """
        spec, model, (places, first, stop) = self.spec, self.model, piece
        order, rows = order_accepted_rows(self.rows, spec.duplicates, places)
        key, states = rows.key, self.states.take(np.arange(first, stop))
        rows = rows._replace(key=key - first)
        if spec.idle_us is not None:
            rows, key_of_life = split_lives(model, states, rows, spec.unit_us, spec.idle_us)
            states = states.take(key_of_life)
        counts = np.bincount(rows.key, minlength=1)
        # One component needs no innovation to be counted, and few innovations are not tested for correlation.
        tested = self.judged and (len(rows.y) > 1 or int(counts.max()) >= FEWEST)
        beside = dict.fromkeys((*spec.outputs.columns, *([INNOVATION] if tested else ())))
        row_filter = RowFilter(model, spec.unit_us, tuple(name for name in beside if name in COMPUTED))
        out, smoothed = _filter_rows(spec, row_filter, states, rows, self.smooth)
        given = {MEASURED: rows.y, CONTROL: rows.u}
        wanted = {name: given[name] if name in given else out.extra[name] for name in spec.outputs.columns}
        extra = {name: out.extra[name] for name in model.outputs} | wanted | smoothed
        self._put(order, out, extra)
        judged = None
        if self.judged:
            innovations = out.extra[INNOVATION] if tested else np.empty((0, len(key)))
            judged = fit(rows.key, select_unflagged_nis(out), len(states.count), innovations)
        bad = np.isin(key, key[out.flag != 0]) if out.flag.any() else np.zeros(len(key), bool)
        lacking = np.isnan(smoothed["smoothed_mean"]).any(axis=0) & (out.flag == 0) if smoothed else ()
        return _PieceFacts(
            len(places),
            judged,
            (key[bad], out.flag[bad]),
            count_gaps(key, rows.time) if self.has_gaps else None,
            int(np.sum(lacking)),
            len(key) - int(find_starts(key, rows.time).sum()),
        )

    def _put(self, order: NDArray[np.int64], out: kalman.Outputs, extra: dict[str, Floats]) -> None:
        """Put outputs (d, M) of M rows into their places `order` (M,) among all rows, block by block."""
        one = {"log_likelihood": out.log_likelihood[None], "nis": out.nis[None]}
        columns = {"mean": out.mean, "covariance": out.covariance, **one, **extra}
        with self._lock:
            if self.values is None:
                at = 0
                for name, values in columns.items():
                    here = np.arange(at, at + len(values))
                    full = unpack(here.astype(float)).astype(np.int64) if name in MATRICES else here
                    self.places[name] = full
                    at += len(values)
                self.values = np.empty((len(self.applied), at))
        self.applied[order], self.flag[order] = True, out.flag
        # Rows are copied as single items, which takes a quarter of the time of copying their numbers.
        row = np.dtype((np.void, self.values.strides[0]))
        whole = self.values.view(row)[:, 0]
        for start in range(0, len(order), BLOCK):
            part = [values[:, start : start + BLOCK] for values in columns.values()]
            whole[order[start : start + BLOCK]] = np.concatenate(part).T.copy().view(row)[:, 0]


def _filter_rows(
    spec: ModelSpec, row_filter: RowFilter, states: kalman.KeyStates, rows: kalman.SortedRows, smooth: bool
) -> tuple[kalman.Outputs, dict[str, Floats]]:
    """Return the filter's outputs and, if `smooth` is true, the smoother's columns (d, N), covariances packed."""
    if not smooth:
        return row_filter.run(states, rows)[1], {}
    try:
        out, found = row_filter.smoothed(states, rows)
    except kalman.ModelError as error:
        raise UserError(f"--smooth: {spec.name}: {error}") from error
    more = {f"smoothed_{name}": values for name, values in found.extra.items()}
    return out, {"smoothed_mean": found.mean, "smoothed_covariance": found.covariance, **more}


def order_accepted_rows(
    rows: ParsedRows, rule: Duplicates | None = None, good: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], kalman.SortedRows]:
    """Return the positions of the accepted rows in the order of their application, and these rows.

    With a rule for duplicates, duplicates are rejected first. good: positions of all accepted rows of some keys; None
    means of all keys.
    """
    good = np.flatnonzero(rows.accepted) if good is None else good
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


def write(
    path: Path,
    spec: ModelSpec,
    columns: dict[str, pa.Array],
    estimates: FilteredRows,
    reason: NDArray[np.object_],
    threads: int = 1,
) -> None:
    """Write the output table atomically, with the columns that the spec's `outputs` select.

    Args:
        path: the path of the file.
        spec: the spec of the model.
        columns: columns of N rows that are written unchanged.
        estimates: the filter's output of these rows.
        reason: (N,) reason why each row was rejected, or None.
        threads: number of threads that prepare parts of the table.

    Raises:
        UserError: the file cannot be written.
    """

    build = partial(_build_columns, path, spec, estimates, reason)
    total = len(reason)
    size = ROWS_A_GROUP if path.suffix.lower() == ".parquet" else ROWS_A_GROUP // 4  # text takes more memory

    def encode(start: int) -> pa.Table | pa.Buffer:
        table = {name: column.slice(start, size) for name, column in columns.items()}
        table |= build(slice(start, start + size))
        return _encode_part(path, pa.table(table), not start)

    sample = pa.table(build(slice(0, total, max(1, total // SAMPLE))))
    _save_parts(path, _map_ahead(encode, range(0, total, size), threads), sample)


def _build_columns(
    path: Path, spec: ModelSpec, estimates: FilteredRows, reason: NDArray[np.object_], here: slice
) -> dict[str, pa.Array]:
    """Return the columns of the estimates of some rows; the arguments are those of `write`."""
    applied, values, table = estimates.applied[here], estimates.values[here], dict[str, pa.Array]()
    for field, places in estimates.places.items():
        names = _list_part_names(field, len(places), spec)
        if spec.outputs.covariance == "diagonal" and field in MATRICES:
            places, names = places[:: len(spec.states) + 1], spec.states
        numbers = values[:, places].T
        if field in SCALARS:
            table[field] = build_extra_column(field, numbers)
        elif field in ("log_likelihood", "nis"):
            table[field] = arrow.build_numbers(numbers[0])
        else:
            table.update(build_list_columns(path, field, numbers, applied, names))
        if field == "nis":
            table["flag"] = _build_flags(estimates.flag[here], applied, reason[here])
    return table


def _build_flags(
    flag: NDArray[np.uint8], applied: NDArray[np.bool_], reason: NDArray[np.object_]
) -> pa.Array:
    """Return the texts of flags (N,); a row that was not applied has its reason."""
    rejected = reason[~applied].tolist()
    texts = {text: len(kalman.FLAGS) + place for place, text in enumerate(dict.fromkeys(rejected))}
    codes = flag.astype(np.int64)
    codes[~applied] = [texts[text] for text in rejected]
    known = arrow.build_texts([*kalman.FLAGS, *(f"rejected: {text}" for text in texts)])
    return known.take(arrow.build_integers(codes))


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
