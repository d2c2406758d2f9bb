"""Learn a model's parameters from history on Spark: the rows stay on the workers, which return sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.core.errors import RUN_FAILED, UserError
from jobs.encoding.packets import Column, Layout, Records
from jobs.encoding.rows import KeyedRows
from jobs.specs.model_spec import Learn
from jobs.state.distinct import each_bucket
from jobs.state.key_groups import group_keys
from jobs.training.batch_filter import Batch, Begin
from jobs.training.group_learning import LearnedGroups, learn_groups
from kalman.learning.em import Evaluation, Fit, Learner
from kalman.learning.key_fits import Population
from kalman.learning.learners import learnable
from kalman.run import SortedRows
from kalman.types import Filter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SAMPLE = 4096
"""About how many rows a model may sample to choose its starting point."""


@dataclass(frozen=True, slots=True)
class Window:
    """The event times, in microseconds, of the rows to learn from: first <= time < last; None means no bound."""

    first: int | None = None
    last: int | None = None

    def holds(self, time: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Mark the times (N,) that are in the window."""
        held = np.ones(len(time), bool)
        if self.first is not None:
            held &= time >= self.first
        if self.last is not None:
            held &= time < self.last
        return held


@dataclass(frozen=True, slots=True)
class Learned:
    """Learned parameters, as `kalman.build` takes them, and how the search ended."""

    parameters: dict[str, Any]
    log_likelihood: float
    iterations: int
    converged: bool
    rows: int
    theta: NDArray[np.float64]
    """The parameters as the optimiser's unconstrained variables (p,)."""
    held_out: float | None = None
    """Log-likelihood per row of the held-out rows, if the start was chosen among several."""
    errors: Mapping[str, Any] | None = None
    """Standard errors in the shape of the parameters, if known."""
    groups: LearnedGroups | None = None
    """Learned parameters of each group of keys; they are in `parameters` too."""


def learn_pooled(
    packed: DataFrame,
    definition: dict[str, Any],
    learn: Learn,
    batch: Batch,
    window: Window,
    keys: int | None,
    on_progress: Callable[[str], None],
) -> Learned:
    """Learn from the window's rows of all keys together, and then for each group of keys if `learn.by` asks for it.

    Args:
        packed: bucketed rows (`jobs.training.batch_filter.bucket_rows`).
        definition: of the model (`ModelSpec.definition`).
        learn: what to learn, and limits of the search.
        batch: settings of the batch pass.
        window: of the rows that count; each key starts it at the initial distribution.
        keys: about how many keys there are, if `learn.sample_keys` asks for a sample.
        on_progress: called with a line after each evaluation.

    Raises:
        UserError: there is nothing to learn from.
    """
    problem = learnable(definition)
    by = tuple(learn.by)
    share = 1.0 if learn.sample_keys is None or not keys else learn.sample_keys / keys
    rows = window_rows(packed, batch, window, share, by).persist()
    try:
        count = rows.groupBy().sum("rows").collect()[0][0] or 0
        if count == 0:
            raise UserError(
                "there are no rows to learn from in the window: choose another window", RUN_FAILED
            )
        evaluations = 0

        def objective(theta: NDArray[np.float64]) -> Evaluation:
            nonlocal evaluations
            value, vector, used = _evaluate(rows, problem, theta, batch, by)
            evaluations += 1
            on_progress(
                f"learning {', '.join(problem.names)}: evaluation {evaluations}, log-likelihood {value:,.3f}"
            )
            return value, vector, used

        result = problem.fit(
            objective, lambda: _sample(rows, batch, max(1, int(count) // SAMPLE), by), learn.max_iterations
        )
        groups = None
        if by:
            layout = _layout(batch, by)
            groups = learn_groups(
                rows, layout, problem, by, batch, result.theta, learn.max_iterations, on_progress
            )
        return _learned(problem, result, groups, int(count))
    finally:
        rows.unpersist()


def _learned(problem: Learner, result: Fit, groups: LearnedGroups | None, rows: int) -> Learned:
    return Learned(
        {**problem.parameters(result.theta), **({} if groups is None else groups.parameters)},
        result.log_likelihood,
        result.iterations,
        result.converged,
        rows,
        result.theta,
        result.held_out,
        result.errors,
        groups,
    )


def each_key_learner(
    definition: dict[str, Any], kernel: Filter, window: Window, pooled: NDArray[np.float64], unit: float
) -> Begin:
    """Return the function from a bucket's rows to initial states (size, K), each with parameters learned for its key.

    A key's parameters are shrunk towards the pooled ones, the more the fewer rows it has in the window.
    """

    def begin(keyed: KeyedRows) -> NDArray[np.float64]:
        keys, rows = keyed.keys.size, keyed.rows
        kept = np.flatnonzero(window.holds(rows.time))
        part = SortedRows(rows.key[kept], rows.time[kept], rows.y[:, kept], rows.u[:, kept])
        around = Population(pooled, np.eye(len(pooled)), 0)
        found = learnable(definition).fit_keys(part, keys, unit, around)
        return kernel.with_parameters(kernel.initial(keys), found.parameters)

    return begin


def _layout(batch: Batch, by: tuple[str, ...] = ()) -> Layout:
    """Return the layout of sorted rows with numbered keys."""
    columns = [Column("key", "<i8"), Column("time", "<i8"), Column("y", "<f8", len(batch.rows.measurement))]
    if batch.rows.control:
        columns.append(Column("u", "<f8", len(batch.rows.control)))
    if by:
        columns.append(Column("group", "<i8"))
    return Layout(tuple(columns), text=False)


def window_rows(
    packed: DataFrame, batch: Batch, window: Window, share: float, by: tuple[str, ...] = ()
) -> DataFrame:
    """Return the rows to learn from: one packet of sorted rows per bucket, with the names of its groups if any."""
    layout = _layout(batch, by)

    def work(keyed: KeyedRows) -> Iterator[pa.RecordBatch]:
        rows = keyed.rows
        keep = window.holds(rows.time)
        if share < 1.0:  # always the same keys: those with the lowest routes
            keep &= (keyed.keys.arrays["route"] < np.uint64(int(share * 2**64)))[rows.key]
        kept = np.flatnonzero(keep)
        if len(kept) == 0:
            return
        _, code = np.unique(rows.key[kept], return_inverse=True)
        arrays = {"key": code, "time": rows.time[kept], "y": rows.y[:, kept], "u": rows.u[:, kept]}
        names: list[str] = []
        if by:
            grouping = group_keys(batch.rows.kind, by, keyed.keys)
            present, arrays["group"] = np.unique(grouping.code[rows.key[kept]], return_inverse=True)
            names = [grouping.names[g] for g in present.tolist()]
        packet = layout.encode(Records(arrays, None))
        order = int(keyed.keys.arrays["route"][0] >> np.uint64(1))
        columns = [pa.array([order]), pa.array([len(kept)]), pa.array([packet], pa.binary())]
        if by:
            columns.append(pa.array([names], pa.list_(pa.string())))
        yield pa.RecordBatch.from_arrays(columns, ["place", "rows", "payload", "groups"][: len(columns)])

    schema = "place bigint, rows bigint, payload binary" + (", groups array<string>" if by else "")
    return packed.mapInArrow(each_bucket(batch.rows, work), schema)


def _evaluate(
    rows: DataFrame, problem: Learner, theta: NDArray[np.float64], batch: Batch, by: tuple[str, ...] = ()
) -> Evaluation:
    """Return the evaluation at `theta`, summed over buckets in a fixed order."""
    layout, unit = _layout(batch, by), batch.unit

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for place, part in _parts(layout, batches):
            value, vector, used = problem.evaluate(theta, part, int(part.key[-1]) + 1, unit)
            yield pa.RecordBatch.from_arrays(
                [pa.array([place]), pa.array([value]), _list(vector), pa.array([used])],
                ["place", "value", "vector", "used"],
            )

    parts = sorted(
        rows.mapInArrow(work, "place bigint, value double, vector array<double>, used bigint").collect()
    )
    value = sum(part["value"] for part in parts)
    vector = np.sum([part["vector"] for part in parts], axis=0)
    return value, vector, sum(part["used"] for part in parts)


def _sample(rows: DataFrame, batch: Batch, every: int, by: tuple[str, ...] = ()) -> NDArray[np.float64]:
    """Return the measurements (m, N) of every n-th row of each bucket."""
    layout = _layout(batch, by)

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for place, part in _parts(layout, batches):
            some = _list(part.y[:, ::every].ravel())
            yield pa.RecordBatch.from_arrays([pa.array([place]), some], ["place", "some"])

    parts = sorted(rows.mapInArrow(work, "place bigint, some array<double>").collect())
    m = len(batch.rows.measurement)
    return np.concatenate([np.array(part["some"]).reshape(m, -1) for part in parts], axis=1)


def _parts(layout: Layout, batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, SortedRows]]:
    """Yield the place and the rows of each bucket's packet."""
    for one in batches:
        pairs = zip(one.column("place").to_pylist(), one.column("payload").to_pylist(), strict=True)
        for place, payload in pairs:
            arrays = layout.decode(payload).arrays
            key = arrays["key"]
            u = arrays.get("u", np.empty((0, len(key))))
            yield place, SortedRows(key, arrays["time"], arrays["y"], u)


def _list(values: NDArray[np.float64]) -> pa.Array:
    return pa.array([values.tolist()], pa.list_(pa.float64()))
