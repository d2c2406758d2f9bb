"""Learn a model's parameters from history on Spark, for all keys or by group.

The rows stay on the workers, which return sums.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy.special import chdtrc

from jobs.batch.batch_filter import Batch, Interval
from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.report import format_count, format_names
from jobs.snapshots.learned_rows import GROUP, POOLED, Entry
from jobs.specs.model_spec import Learn
from jobs.state.encoding.packets import Layout, PacketColumn, Records
from jobs.state.encoding.row_order import find_starts
from jobs.state.encoding.rows import KeyedRows, build_bucket_worker
from jobs.state.key_groups import format_group_name, group_keys
from jobs.storage.columns import parse_arrow_schema
from kalman.learning.em import Evaluation, Fit, Learner
from kalman.learning.groups import GroupFit, Sums, group_learning
from kalman.learning.learners import learnable
from kalman.models.groups import GROUPS
from kalman.run import SortedRows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row


Evaluate = Callable[["NDArray[np.float64]", "NDArray[np.int64]", SortedRows, int, float], Sums]
"""Computes the sums of groups over a bucket's rows (`kalman.learning.groups.GroupLearning.evaluate`)."""
MOST_GROUPS = 10_000
"""The maximum number of groups, because one row of the manifests table has the parameters of all groups."""


@dataclass(frozen=True, slots=True)
class LearnedGroups:
    """Learned parameters by group.

    by: key columns that define the groups.
    values: the texts of these columns for each group.
    result: the fits of the groups.
    """

    by: tuple[str, ...]
    values: list[list[str]]
    result: GroupFit

    @property
    def parameters(self) -> dict[str, Any]:
        """Return the entry with the parameters of all groups among a model's learned parameters."""
        found = {"by": list(self.by), "values": self.values, "parameters": self.result.parameters}
        return {GROUPS: found}


def learn_groups(
    rows: DataFrame,
    layout: Layout,
    problem: Learner,
    by: tuple[str, ...],
    batch: Batch,
    pooled: Fit,
    max_iterations: int,
    on_progress: Callable[[str], None],
) -> LearnedGroups:
    """Learn the parameters of each group from its rows.

    Args:
        rows: packets with the names of their groups (`jobs.batch.learning.pack_window_rows`).
        layout: the layout of the packets.
        problem: the learning problem.
        by: key columns that define the groups.
        batch: settings of the batch pass.
        pooled: the fit of all keys together.
        max_iterations: limit on the optimiser's steps.
        on_progress: called with a line after each round.

    Raises:
        UserError: there are too many groups.
    """
    rows_of = _count_group_rows(rows, layout)
    names = list(rows_of)
    if len(names) > MOST_GROUPS:
        raise UserError(
            f"learn.by: {', '.join(by)} make {len(names):,} groups, more than {MOST_GROUPS:,}: choose other columns, "
            f"or learn for each key (scope: key)"
        )
    learner = group_learning(problem)
    rounds = 0

    def objective(
        theta: NDArray[np.float64], which: NDArray[np.int64], of: Evaluate = learner.evaluate
    ) -> Sums:
        nonlocal rounds
        found = _evaluate_groups(rows, layout, of, theta, [names[g] for g in which.tolist()], batch.unit)
        rounds += 1
        on_progress(
            f"learning {format_names(problem.names)} by {', '.join(by)}: round {rounds}, "
            f"{format_count(len(which), 'group')}"
        )
        return found

    result = learner.fit(
        objective,
        pooled,
        len(names),
        max_iterations,
        lambda theta, which: objective(theta, which, learner.statistics),
    ).of_rows(np.array(list(rows_of.values())))
    return LearnedGroups(by, [json.loads(name) for name in names], result)


def _count_group_rows(rows: DataFrame, layout: Layout) -> dict[str, int]:
    """Return the number of rows of each group, ordered by the groups' names."""

    def count_rows(part: SortedRows, group: NDArray[np.int64], names: list[str]) -> Values:
        return names, np.bincount(group[part.key], minlength=len(names))

    total: dict[str, int] = {}
    for part in _collect_parts(rows, layout, "groups array<string>, rows array<bigint>", count_rows):
        for name, count in zip(part["groups"], part["rows"], strict=True):
            total[name] = total.get(name, 0) + count
    return dict(sorted(total.items()))


def _evaluate_groups(
    rows: DataFrame,
    layout: Layout,
    evaluate: Evaluate,
    theta: NDArray[np.float64],
    names: list[str],
    unit: float,
) -> Sums:
    """Return the sums of the groups `names` at theta (p, J), added over buckets in a fixed order."""
    wanted = {name: j for j, name in enumerate(names)}

    def evaluate_part(part: SortedRows, group: NDArray[np.int64], here: list[str]) -> Values | None:
        which = np.array([wanted.get(name, -1) for name in here], np.int64)
        kept = which[group] >= 0
        if not kept.any():
            return None
        present, code = np.unique(which[group[kept]], return_inverse=True)
        mask = kept[part.key]
        number = np.cumsum(kept) - 1
        some = SortedRows(number[part.key[mask]], part.time[mask], part.y[:, mask], part.u[:, mask])
        value, vector, used = evaluate(theta[:, present], code, some, int(kept.sum()), unit)
        return present, value, vector.ravel(), used

    columns = "which array<bigint>, value array<double>, vector array<double>, used array<bigint>"
    J = theta.shape[1]
    value, used = np.zeros(J), np.zeros(J, np.int64)
    vector = np.zeros((0, J))
    for part in _collect_parts(rows, layout, columns, evaluate_part):
        at = np.array(part["which"])
        own = np.array(part["vector"]).reshape(-1, len(at))
        if not len(vector):
            vector = np.zeros((len(own), J))
        value[at] += part["value"]
        vector[:, at] += own
        used[at] += part["used"]
    return value, vector, used


Values = tuple[Any, ...]
"""Values of a part of the rows: numbers, or one-dimensional arrays and lists."""


def _collect_parts(
    rows: DataFrame,
    layout: Layout,
    columns: str,
    compute: Callable[[SortedRows, NDArray[np.int64], list[str]], Values | None],
) -> list[Row]:
    """Return what a function computes of each part of the rows (`unpack_grouped_parts`), in a fixed order.

    columns: names and types of the values. A part without values is left out.
    """
    schema = f"place bigint, {columns}"

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        fields = parse_arrow_schema(schema)
        for place, part, group, names in unpack_grouped_parts(layout, batches):
            values = compute(part, group, names)
            if values is not None:
                pairs = zip((place, *values), fields, strict=True)
                arrays = [pa.array([value], field.type) for value, field in pairs]
                yield pa.RecordBatch.from_arrays(arrays, schema=fields)

    return sorted(rows.mapInArrow(work, schema).collect())


def unpack_grouped_parts(
    layout: Layout, batches: Iterator[pa.RecordBatch]
) -> Iterator[tuple[int, SortedRows, NDArray[np.int64], list[str]]]:
    """Yield, for each bucket's packet: place, rows, the group (K,) of each key, and the names of the groups.

    In packets without group names all keys have group 0.
    """
    for one in batches:
        named = "groups" in one.schema.names
        columns = [one.column(name).to_pylist() for name in ("place", "payload")]
        groups = one.column("groups").to_pylist() if named else [[]] * one.num_rows
        for place, payload, names in zip(*columns, groups, strict=True):
            arrays = layout.decode(payload).arrays
            key = arrays["key"]
            u = arrays.get("u", np.empty((0, len(key))))
            first = np.flatnonzero(find_starts(key))
            group = arrays["group"][first] if named else np.zeros(len(first), np.int64)
            yield place, SortedRows(key, arrays["time"], arrays["y"], u), group, names


SAMPLE = 4096
"""The approximate number of rows that a model may sample to choose its starting point."""


class Fitness(NamedTuple):
    """Mean NIS per measured component (expected: 1), and the p-value of the test for autocorrelated innovations."""

    nis: float
    ljung_box: float


UNKNOWN = Fitness(math.nan, math.nan)


@dataclass(frozen=True, slots=True)
class LearningResult:
    """Learned parameters, in the form that `kalman.build` takes, and how the search ended."""

    parameters: dict[str, Any]
    fit: Fit
    rows: int
    groups: LearnedGroups | None = None
    """Learned parameters of each group of keys; `parameters` contains them too."""
    fitness: Mapping[str | None, Fitness] = field(default_factory=dict)
    """How well the model fits the rows of all keys (None) and of each group (by its name)."""

    @property
    def entries(self) -> list[Entry]:
        """Return the learned parameters as rows of the snapshot."""
        shown = {name: value for name, value in self.parameters.items() if name != GROUPS}
        of_all = self.fitness.get(None, UNKNOWN)
        result = [
            Entry(
                POOLED,
                None,
                shown,
                self.fit.errors,
                self.fit.outcome,
                self.fit.reason,
                self.rows,
                self.fit.log_likelihood,
                None,
            )._replace(nis=of_all.nis, ljung_box=of_all.ljung_box)
        ]
        if self.groups is None:
            return result
        found = self.groups.result
        for g, values in enumerate(self.groups.values):
            name = format_group_name(values)
            fits = self.fitness.get(name, UNKNOWN)
            result.append(
                Entry(
                    GROUP,
                    name,
                    found.parameters[g],
                    found.errors[g],
                    found.outcome[g],
                    found.reason[g],
                    int(found.used[g]),
                    float(found.log_likelihood[g]),
                    float(found.own[g]),
                    fits.nis,
                    fits.ljung_box,
                )
            )
        return result


def learn_pooled(
    packed: DataFrame,
    definition: dict[str, Any],
    learn: Learn,
    batch: Batch,
    window: Interval,
    keys: int | None,
    on_progress: Callable[[str], None],
) -> LearningResult:
    """Learn from the window's rows of all keys together, and then for each group of keys if `learn.by` is set.

    Args:
        packed: bucketed rows (`jobs.batch.batch_filter.pack_buckets`).
        definition: the definition of the model (`ModelSpec.definition`).
        learn: the parameters to learn, and limits of the search.
        batch: settings of the batch pass.
        window: the interval of the rows to learn from; each key starts the window at the initial distribution.
        keys: the approximate number of keys, needed if `learn.sample_keys` is set.
        on_progress: called with a line after each evaluation.

    Raises:
        UserError: there are no rows to learn from.
    """
    problem = learnable(definition)
    by = tuple(learn.by) if learn.scope == "group" else ()
    share = 1.0 if learn.sample_keys is None or not keys else learn.sample_keys / keys
    rows = pack_window_rows(packed, batch, window, share, by).persist()
    try:
        count = sum(row["rows"] for row in rows.select("rows").collect())
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
                f"learning {format_names(problem.names)}: evaluation {evaluations}, log-likelihood {value:,.3f}"
            )
            return value, vector, used

        result = problem.fit(
            objective,
            lambda: _sample_measurements(rows, batch, max(1, int(count) // SAMPLE), by),
            learn.max_iterations,
        ).of_rows(int(count))
        groups = None
        if by:
            layout = _build_layout(batch, by)
            groups = learn_groups(rows, layout, problem, by, batch, result, learn.max_iterations, on_progress)
        fitness = _measure_fitness(rows, problem, batch, result, groups)
        learned = {**problem.parameters(result.theta), **({} if groups is None else groups.parameters)}
        return LearningResult(learned, result, int(count), groups, fitness)
    finally:
        rows.unpersist()


def _measure_fitness(
    rows: DataFrame, problem: Learner, batch: Batch, result: Fit, groups: LearnedGroups | None
) -> dict[str | None, Fitness]:
    """Return how well the learned parameters fit the rows of all keys and of each group, in one pass.

    A key's NIS has the weight of its number of rows; the p-values of keys are combined as in Fisher (1932).
    """
    by = () if groups is None else groups.by
    layout, unit = _build_layout(batch, by), batch.unit
    names = [] if groups is None else [format_group_name(values) for values in groups.values]
    theta = result.theta if groups is None else groups.result.theta

    place_of = {name: g for g, name in enumerate(names)}

    def check(part: SortedRows, group: NDArray[np.int64], here: list[str]) -> Values:
        keys = int(part.key[-1]) + 1
        if here:
            group = np.array([place_of[name] for name in here], np.int64)[group]
        own = np.repeat(theta[:, None], keys, axis=1) if theta.ndim == 1 else theta[:, group]
        nis, p_value = problem.check(own, part, keys, unit)
        count = np.bincount(part.key, minlength=keys).astype(float)
        told, tested = np.isfinite(nis), np.isfinite(p_value)
        logs = np.log(np.maximum(np.where(tested, p_value, 1.0), 1e-300))
        kinds = (np.where(told, nis * count, 0.0), np.where(told, count, 0.0), logs, tested.astype(float))
        sums = ([math.fsum(a[group == g].tolist()) for g in np.unique(group).tolist()] for a in kinds)
        return np.unique(group), *sums

    columns = (
        "which array<bigint>, nis array<double>, rows array<double>, logs array<double>, tested array<double>"
    )
    totals: dict[int, NDArray[np.float64]] = {}
    for _, which, *kinds in _collect_parts(rows, layout, columns, check):
        for g, *sums in zip(which, *kinds, strict=True):
            totals[g] = totals.get(g, np.zeros(4)) + np.array(sums)
    found: dict[str | None, Fitness] = {
        name: compute_fitness(totals[g]) for g, name in enumerate(names) if g in totals
    }
    if totals:
        found[None] = compute_fitness(sum(totals[g] for g in sorted(totals)))
    return found


def compute_fitness(sums: Any) -> Fitness:
    """Return the fitness from sums over keys: NIS times rows, rows, logarithms of p-values, number of p-values."""
    nis, rows, logs, tested = (float(a) for a in sums)
    p_value = float(chdtrc(2.0 * tested, -2.0 * logs)) if tested else math.nan
    return Fitness(nis / rows if rows else math.nan, p_value)


def _build_layout(batch: Batch, by: tuple[str, ...] = ()) -> Layout:
    """Return the layout of sorted rows with numbered keys."""
    columns = [
        PacketColumn("key", "<i8"),
        PacketColumn("time", "<i8"),
        PacketColumn("y", "<f8", len(batch.rows.measurement)),
    ]
    if batch.rows.control:
        columns.append(PacketColumn("u", "<f8", len(batch.rows.control)))
    if by:
        columns.append(PacketColumn("group", "<i8"))
    return Layout(tuple(columns), text=False)


def pack_window_rows(
    packed: DataFrame, batch: Batch, window: Interval, share: float, by: tuple[str, ...] = ()
) -> DataFrame:
    """Return the rows to learn from: one packet of sorted rows per bucket, with group names if `by` has columns."""
    layout = _build_layout(batch, by)

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
    return packed.mapInArrow(build_bucket_worker(batch.rows, work), schema)


def _evaluate(
    rows: DataFrame, problem: Learner, theta: NDArray[np.float64], batch: Batch, by: tuple[str, ...] = ()
) -> Evaluation:
    """Return the evaluation at `theta`, summed over buckets in a fixed order."""
    layout, unit = _build_layout(batch, by), batch.unit

    def evaluate(part: SortedRows, group: NDArray[np.int64], names: list[str]) -> Values:
        return problem.evaluate(theta, part, int(part.key[-1]) + 1, unit)

    parts = _collect_parts(rows, layout, "value double, vector array<double>, used bigint", evaluate)
    value = sum(part["value"] for part in parts)
    vector = np.sum([part["vector"] for part in parts], axis=0)
    return value, vector, sum(part["used"] for part in parts)


def _sample_measurements(
    rows: DataFrame, batch: Batch, every: int, by: tuple[str, ...] = ()
) -> NDArray[np.float64]:
    """Return the measurements (m, N) of every n-th row of each bucket."""
    layout = _build_layout(batch, by)

    def sample(part: SortedRows, group: NDArray[np.int64], names: list[str]) -> Values:
        return (part.y[:, ::every].ravel(),)

    parts = _collect_parts(rows, layout, "some array<double>", sample)
    m = len(batch.rows.measurement)
    return np.concatenate([np.array(part["some"]).reshape(m, -1) for part in parts], axis=1)
