"""Read a user's table of states: check its columns and each key's state, and convert states to the model's form.

Columns: the key columns; `event_time`, the time of the newest row that the state reflects; `mean` (n numbers) and
`covariance` (n * n, row by row), or flat columns, `mean_<state>` and `covariance_<state>_<state>`. Optional:
`state_index` (number of rows reflected, 1 by default), `log_likelihood` (of these rows, 0 by default), and further
fields of the model's state, such as `parameters`, each a list or flat as `<field>_<i>`. Without them, these fields
begin as in a new key. A mixture has only its fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import functions as F

from jobs.core.errors import UserError
from jobs.snapshots.state_rows import STATE_ROWS, map_of
from jobs.state.encoding.arrow import build_lists
from jobs.upgrades.migration.state_map import check_moments_suffice, find_wrong_states
from kalman.filters.state_layout import locate_fields
from kalman.linalg.packing import pack, unpack
from kalman.types import Filter

if TYPE_CHECKING:
    from pyspark.sql import Column

Floats = NDArray[np.float64]

MEAN, COVARIANCE, EVENT_TIME = "mean", "covariance", "event_time"
COUNT, SCORE = "state_index", "log_likelihood"
MADE = ("factor", "diffuse", MEAN, COVARIANCE)
"""Fields of a state that follow from mean and covariance."""
CHECKED = f"key string, {STATE_ROWS}, problem string, given string"
"""Result of the check for each row: key and state, or the problem and the row as JSON."""
TOLERANCE = 1e-6
"""Tolerance for the sum of a mixture's weights, which should be 1."""


class Form(NamedTuple):
    """Widths of the lists of numbers in a table, by name. Sent to the executors.

    whole: the state consists of its fields only (mixtures), not of mean and covariance.
    """

    widths: Mapping[str, int]
    whole: bool


class StateTable(NamedTuple):
    """How to read a table: each list of numbers as a column expression, by name, and the form of these lists."""

    lists: Mapping[str, Column]
    form: Form


def plan_table(model: Filter, key: Sequence[str], columns: Sequence[str], where: str) -> StateTable:
    """Return how to read a model's states from a table with these columns.

    Raises:
        UserError: a column is missing or unknown; the message lists the possible columns.
    """
    n = len(model.states)
    whole = check_moments_suffice(model) is not None
    widths = {name: int(np.prod(shape)) for name, shape in model.fields.items() if name not in MADE}
    parts = {
        name: [f"{name}_{i}" for i in range(width)] if width > 1 else [name] for name, width in widths.items()
    }
    if not whole:
        widths |= {MEAN: n, COVARIANCE: n * n}
        parts[MEAN] = [f"{MEAN}_{a}" for a in model.states]
        parts[COVARIANCE] = [f"{COVARIANCE}_{a}_{b}" for a in model.states for b in model.states]
    needed = [name for name in widths if name != "rows"] if whole else [MEAN, COVARIANCE]
    known = [*key, EVENT_TIME, COUNT, SCORE, *widths, *(one for flat in parts.values() for one in flat)]
    unknown = [name for name in columns if name not in known]
    found = {name: _build_expression(name, parts[name], columns) for name in widths}
    absent = [name for name in (*key, EVENT_TIME) if name not in columns]
    absent += [name for name in needed if found[name] is None]
    if unknown or absent:
        problem = (
            f"there is no column {', '.join(absent)}" if absent else f"unknown column {', '.join(unknown)}"
        )
        more = [name for name in widths if name not in needed]
        raise UserError(
            f"{where}: {problem}. It may have {', '.join([*key, EVENT_TIME, *needed])}; and "
            f"{', '.join([COUNT, SCORE, *more])} (lists of numbers, or flat columns such as {parts[needed[0]][0]})"
        )
    lists = {name: one for name, one in found.items() if one is not None}
    return StateTable(lists, Form({name: widths[name] for name in lists}, whole))


def _build_expression(name: str, flat: Sequence[str], columns: Sequence[str]) -> Column | None:
    """Return a list of numbers as a column, or None if the table lacks it."""
    if name in columns and (len(flat) > 1 or flat != [name]):
        return F.col(f"`{name}`").try_cast("array<double>").alias(f"l_{name}")
    if not all(one in columns for one in flat):
        return None
    if flat == [name]:
        return F.coalesce(
            F.array(F.col(f"`{name}`").try_cast("double")), F.array(F.lit(None).cast("double"))
        ).alias(f"l_{name}")
    return F.array(*(F.col(f"`{one}`").try_cast("double") for one in flat)).alias(f"l_{name}")


def build_checker(
    model: Filter, table: Form
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function from rows to `CHECKED`.

    A row has: key, event_time (microseconds), state_index, log_likelihood, times (number of rows of its key), given,
    the lists.
    """

    def check(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                yield _check_batch(model, table, batch)

    return check


def _check_batch(model: Filter, table: Form, batch: pa.RecordBatch) -> pa.RecordBatch:
    size = batch.num_rows
    problems: list[str | None] = [None] * size
    read = {name: _read_numbers(batch.column(f"l_{name}"), table.widths[name]) for name in table.widths}
    with np.errstate(all="ignore"):
        state = _build_states(model, table, {name: values for name, (values, _) in read.items()}, size)
    found = [
        *_find_row_problems(batch),
        *((bad, f"{name} is not {table.widths[name]} finite numbers") for name, (_, bad) in read.items()),
    ]
    found += _find_state_problems(model, table, state, {name: values for name, (values, _) in read.items()})
    for bad, what in found:
        for place in np.flatnonzero(bad):
            problems[place] = problems[place] or what
    wrong = np.array([one is not None for one in problems])
    state[:, wrong] = 0.0  # nothing reads the states of refused rows
    mean, covariance, extras = model.snapshot(state)
    counts = batch.column(COUNT).fill_null(1)
    columns = {
        "key": batch.column("key"),
        COUNT: counts,
        EVENT_TIME: batch.column(EVENT_TIME),
        MEAN: build_lists(mean),
        COVARIANCE: build_lists(covariance),
        SCORE: batch.column(SCORE),
        "extras": map_of(extras, size),
        "problem": pa.array(problems, pa.string()),
        "given": pa.array(
            [a if bad else None for a, bad in zip(batch.column("given").to_pylist(), wrong, strict=True)],
            pa.string(),
        ),
    }
    return pa.RecordBatch.from_arrays(list(columns.values()), list(columns))


def _read_numbers(column: pa.ListArray, width: int) -> tuple[Floats, NDArray[np.bool_]]:
    """Return lists as (width, N), NaN for a list of another length, and the rows that are not all finite numbers."""
    values = np.full((width, len(column)), np.nan)
    lengths = np.array([-1 if a is None else a for a in column.value_lengths().to_pylist()])
    right = np.flatnonzero(lengths == width)
    if len(right):
        flat = column.take(pa.array(right)).flatten().to_numpy(zero_copy_only=False)
        values[:, right] = np.asarray(flat, float).reshape(len(right), width).T
    return values, np.asarray(~np.isfinite(values).all(axis=0))


def _find_row_problems(batch: pa.RecordBatch) -> list[tuple[NDArray[np.bool_], str]]:
    """Return the problems of keys, times and counts."""

    def null(name: str) -> NDArray[np.bool_]:
        return batch.column(name).is_null().to_numpy(zero_copy_only=False)

    counts = batch.column(COUNT).fill_null(1).to_numpy()
    scores = batch.column(SCORE).to_numpy(zero_copy_only=False)
    return [
        (null("key"), "the key is missing, or of another type than in the measurements"),
        (batch.column("times").to_numpy() > 1, "the key has several rows"),
        (null(EVENT_TIME), f"{EVENT_TIME} is missing or not a time"),
        (counts < 1, f"{COUNT} is below 1"),
        (~np.isfinite(scores), f"{SCORE} is not a finite number"),
    ]


def _build_states(model: Filter, table: Form, given: Mapping[str, Floats], size: int) -> Floats:
    """Return the states (size, K) of the model."""
    if table.whole:
        state = np.zeros((model.size, size))
    else:
        P = given[COVARIANCE].reshape(len(model.states), -1, size)
        even = 0.5 * (P + P.transpose(1, 0, 2))
        state = model.from_moments(given[MEAN], even.reshape(-1, size))
    for name, place in locate_fields(model.fields).items():
        if name in given and name not in MADE:
            state[place] = given[name]
    return state


def _find_state_problems(
    model: Filter, table: Form, state: Floats, given: Mapping[str, Floats]
) -> list[tuple[NDArray[np.bool_], str]]:
    """Return the keys with impossible states, by problem."""
    finite = np.asarray(np.isfinite(state).all(axis=0))
    found: list[tuple[NDArray[np.bool_], str]] = [(~finite, "the state is not finite")]
    if table.whole:
        weights = given["weights"]
        off = (weights < 0.0).any(axis=0) | ~(np.abs(weights.sum(axis=0) - 1.0) <= TOLERANCE)
        found.append((off, "weights are below 0, or do not sum to 1"))
        with np.errstate(all="ignore"):
            mean, packed = model.moments(np.where(finite, state, 0.0))
        covariance = unpack(packed)
    else:
        mean, covariance = given[MEAN], given[COVARIANCE]
    mean, covariance = (np.where(finite, a, 0.0) for a in (mean, covariance))
    even = unpack(pack(covariance))
    uneven = find_wrong_states(mean, covariance) & ~find_wrong_states(mean, even)
    found.append((uneven, "the covariance is not symmetric"))
    found.append((find_wrong_states(mean, covariance), "the covariance is not positive semidefinite"))
    return found
