"""Learn parameters for groups of keys on Spark: each round is one job for all groups, which returns sums."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.batch.batch_filter import Batch
from jobs.core.errors import UserError
from jobs.core.report import format_count, format_names
from jobs.state.encoding.order import find_starts
from jobs.state.encoding.packets import Layout
from kalman.learning.em import Fit, Learner
from kalman.learning.groups import GroupFit, Sums, group_learning
from kalman.models.groups import GROUPS
from kalman.run import SortedRows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Evaluate = Callable[["NDArray[np.float64]", "NDArray[np.int64]", SortedRows, int, float], Sums]
"""Returns the sums of groups over a bucket's rows (`kalman.learning.groups.GroupLearning.evaluate`)."""
MOST_GROUPS = 10_000
"""A limit, because the parameters of all groups are in one row of the manifests table."""


@dataclass(frozen=True, slots=True)
class LearnedGroups:
    """Learned parameters by group.

    by: key columns that define the groups; values: their texts for each group; result: of the fit.
    """

    by: tuple[str, ...]
    values: list[list[str]]
    result: GroupFit

    @property
    def parameters(self) -> dict[str, Any]:
        """Return the entry of all groups among a model's learned parameters."""
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
        layout: of the packets.
        problem: what to learn.
        by: key columns that define the groups.
        batch: settings of the batch pass.
        pooled: the fit of all keys together.
        max_iterations: limit on the optimiser's steps.
        on_progress: called with a line after each round.

    Raises:
        UserError: too many groups.
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
            f"learning {format_names(problem.names)} by {', '.join(by)}: round {rounds}, {format_count(len(which), 'group')}"
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
    """Return the number of rows of each group, in the order of their names."""

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _, part, group, names in unpack_grouped_parts(layout, batches):
            count = np.bincount(group[part.key], minlength=len(names))
            yield pa.RecordBatch.from_arrays(
                [pa.array([names]), pa.array([count.tolist()])], ["groups", "rows"]
            )

    total: dict[str, int] = {}
    for part in rows.mapInArrow(work, "groups array<string>, rows array<bigint>").collect():
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

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for place, part, group, here in unpack_grouped_parts(layout, batches):
            which = np.array([wanted.get(name, -1) for name in here], np.int64)
            kept = which[group] >= 0
            if not kept.any():
                continue
            present, code = np.unique(which[group[kept]], return_inverse=True)
            mask = kept[part.key]
            number = np.cumsum(kept) - 1
            some = SortedRows(number[part.key[mask]], part.time[mask], part.y[:, mask], part.u[:, mask])
            value, vector, used = evaluate(theta[:, present], code, some, int(kept.sum()), unit)
            columns = [pa.array([a.tolist()]) for a in (present, value, vector.ravel(), used)]
            yield pa.RecordBatch.from_arrays([pa.array([place]), *columns], _SUMS)

    schema = (
        "place bigint, which array<bigint>, value array<double>, vector array<double>, used array<bigint>"
    )
    J = theta.shape[1]
    value, used = np.zeros(J), np.zeros(J, np.int64)
    vector = np.zeros((0, J))
    for part in sorted(rows.mapInArrow(work, schema).collect()):
        at = np.array(part["which"])
        own = np.array(part["vector"]).reshape(-1, len(at))
        if not len(vector):
            vector = np.zeros((len(own), J))
        value[at] += part["value"]
        vector[:, at] += own
        used[at] += part["used"]
    return value, vector, used


_SUMS = ["place", "which", "value", "vector", "used"]


def unpack_grouped_parts(
    layout: Layout, batches: Iterator[pa.RecordBatch]
) -> Iterator[tuple[int, SortedRows, NDArray[np.int64], list[str]]]:
    """Yield, for each bucket's packet: place, rows, the group (K,) of each key, and the names of the groups.

    In packets without names all keys are of group 0.
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
