"""Learn each key's parameters on Spark: first a population from a sample of keys, then each key with it as prior.

Both passes fit all keys of a bucket at once (`Learner.fit_keys`). The second pass also filters: it returns the state
and the fit of each key.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.batch.batch_filter import Batch, Interval, build_bucket_filter
from jobs.batch.learning import learn_pooled
from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.report import format_count, format_names
from jobs.snapshots import learned_rows
from jobs.snapshots.learned_rows import FIT, FIT_ROWS, Entry
from jobs.snapshots.state_rows import STATE_COLUMNS, STATE_ROWS, build_state_rows
from jobs.specs.model_spec import Learn
from jobs.state.encoding.keys import KeyKind, build_key_array
from jobs.state.encoding.rows import KeyedRows, build_bucket_worker
from jobs.state.key_groups import group_keys
from kalman.learning.em import Learner
from kalman.learning.key_fits import FitOutcome, KeyFit, Population
from kalman.learning.learners import learnable
from kalman.mixtures.building import FAMILIES
from kalman.models.groups import GROUPS
from kalman.run import SortedRows
from kalman.types import Filter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SAMPLE_KEYS = 4096
"""The approximate number of keys from which the population is learned, if `learn.sample_keys` is not set."""
GROUP_SAMPLE_KEYS = 16_384
"""The same number if each group of keys has a population."""
LEAST_KEYS = 10
"""A group with fewer soundly fitted keys in the sample uses the population of all keys."""


@dataclass(frozen=True)
class Populations:
    """The populations that serve as priors of the keys.

    by: key columns that define the groups.
    of_all: the population of all keys.
    groups: the population of each group, by the group's name (a JSON array of its columns' texts). A group without an
        entry uses the population of all keys.
    """

    by: tuple[str, ...]
    of_all: Population
    groups: Mapping[str, Population]

    def parameters(self, problem: Learner) -> dict[str, Any]:
        """Return the learned parameters for keys that the snapshot does not contain: the mean of their population."""
        found = dict(problem.parameters(self.of_all.mean))
        if self.groups:
            found[GROUPS] = {
                "by": list(self.by),
                "values": [json.loads(name) for name in self.groups],
                "parameters": [problem.parameters(one.mean) for one in self.groups.values()],
            }
        return found

    def entries(self, problem: Learner) -> list[Entry]:
        """Return the rows of the populations for the table of learned parameters."""
        named = [(None, self.of_all), *self.groups.items()]
        return [
            Entry(learned_rows.POPULATION, name, problem.parameters(one.mean), population=one)
            for name, one in named
        ]


def learn_populations(
    packed: DataFrame,
    definition: dict[str, Any],
    learn: Learn,
    batch: Batch,
    window: Interval,
    keys: int,
    on_progress: Callable[[str], None],
) -> Populations:
    """Return the populations, learned from a sample of keys, each of which is fitted from its rows alone.

    The sample is always the same: the keys with the lowest routes. The arguments are those of `learn_pooled`.

    Raises:
        UserError: there are no rows to learn from.
    """
    problem, by = learnable(definition), tuple(learn.by)
    if definition.get("filter") in FAMILIES:  # components of different keys do not correspond
        found = learn_pooled(packed, definition, learn, batch, window, keys, on_progress)
        return Populations((), Population(found.fit.theta, np.eye(len(found.fit.theta)), 0), {})
    wanted = learn.sample_keys or (GROUP_SAMPLE_KEYS if by else SAMPLE_KEYS)
    on_progress(
        f"learning {format_names(problem.names)}: the population, from about {format_count(min(wanted, keys), 'key')}"
    )
    route, group, fit = _fit_sample(packed, problem, batch, window, wanted / max(keys, 1), by)
    if not len(route) or not fit.used.any():
        raise UserError("there are no rows to learn from in the window: choose another window", RUN_FAILED)
    order = np.argsort(route, kind="stable")
    fit, group = fit.take(order), [group[i] for i in order.tolist()]
    groups: dict[str, Population] = {}
    sound = fit.outcome <= FitOutcome.AT_BOUND
    for name in sorted(set(group)) if by else ():
        which = np.flatnonzero(np.array([one == name for one in group]))
        if np.count_nonzero(sound[which]) >= LEAST_KEYS:
            groups[name] = problem.population([fit.take(which)])
    return Populations(by, problem.population([fit]), groups)


def _fit_sample(
    packed: DataFrame,
    problem: Learner,
    batch: Batch,
    window: Interval,
    share: float,
    by: tuple[str, ...],
) -> tuple[NDArray[np.uint64], list[str], KeyFit]:
    """Return the routes, group names and fits of the sampled keys, in no particular order."""

    def work(keyed: KeyedRows) -> Iterator[pa.RecordBatch]:
        route = np.asarray(keyed.keys.arrays["route"])
        chosen = np.ones(len(route), bool) if share >= 1.0 else route < np.uint64(int(share * 2**64))
        if not chosen.any():
            return
        rows = _select_window(keyed.rows, window, chosen)
        fit = problem.fit_keys(rows, int(chosen.sum()), batch.unit, None)
        names = group_names(batch.rows.kind, by, keyed)
        payload = pickle.dumps((route[chosen], [names[i] for i in np.flatnonzero(chosen).tolist()], fit))
        yield pa.RecordBatch.from_arrays([pa.array([payload], pa.binary())], ["payload"])

    found = packed.mapInArrow(build_bucket_worker(batch.rows, work), "payload binary").collect()
    parts = [pickle.loads(row["payload"]) for row in found]
    if not parts:
        return np.zeros(0, np.uint64), [], problem.fit_keys(_build_empty_rows(batch), 0, batch.unit, None)
    routes, names, fits = zip(*parts, strict=True)
    return np.concatenate(routes), [name for some in names for name in some], join_fits(fits)


def _build_empty_rows(batch: Batch) -> SortedRows:
    none = np.zeros(0, np.int64)
    y, u = (np.zeros((len(columns), 0)) for columns in (batch.rows.measurement, batch.rows.control))
    return SortedRows(none, none, y, u)


def join_fits(fits: Sequence[KeyFit]) -> KeyFit:
    """Return the fits of several buckets as one fit."""
    joined: dict[str, Any] = {}
    for name in KeyFit._fields:
        parts = [getattr(one, name) for one in fits]
        joined[name] = (
            [a for part in parts for a in part] if name == "reason" else np.concatenate(parts, axis=-1)
        )
    return KeyFit(**joined)


def group_names(kind: KeyKind, by: tuple[str, ...], keyed: KeyedRows) -> list[str | None]:
    """Return the name of each key's group; None if there are no groups."""
    if not by:
        return [None] * keyed.keys.size
    grouping = group_keys(kind, by, keyed.keys)
    return [grouping.names[code] for code in grouping.code.tolist()]


def _select_window(rows: SortedRows, window: Interval, chosen: NDArray[np.bool_]) -> SortedRows:
    """Return the rows of the chosen keys in the window, with the keys renumbered; a chosen key may have no row."""
    number = np.cumsum(chosen) - 1
    kept = np.flatnonzero(window.holds(rows.time) & chosen[rows.key])
    return SortedRows(number[rows.key[kept]], rows.time[kept], rows.y[:, kept], rows.u[:, kept])


def fit_bucket(
    problem: Learner, keyed: KeyedRows, batch: Batch, window: Interval, populations: Populations
) -> tuple[KeyFit, list[str | None]]:
    """Return the fits of a bucket's keys, each with its population as prior, and the names of the keys' groups."""
    names = group_names(batch.rows.kind, populations.by, keyed)
    own = {name: place + 1 for place, name in enumerate(populations.groups)}
    place = np.array([0 if name is None else own.get(name, 0) for name in names], np.int64)
    listed = [populations.of_all, *populations.groups.values()]
    parts: list[KeyFit] = []
    order: list[NDArray[np.int64]] = []
    for number in np.unique(place).tolist():
        chosen = place == number
        rows = _select_window(keyed.rows, window, chosen)
        parts.append(problem.fit_keys(rows, int(chosen.sum()), batch.unit, listed[number]))
        order.append(np.flatnonzero(chosen))
    return join_fits(parts).take(np.argsort(np.concatenate(order), kind="stable")), names


def learn_key_states(
    packed: DataFrame,
    definition: dict[str, Any],
    kernel: Filter,
    batch: Batch,
    window: Interval,
    populations: Populations,
) -> DataFrame:
    """Learn each key's parameters and filter its rows with them.

    The frame has a row for each key's latest state, with the columns of a snapshot's rows (its `fit` is null), and a
    row for each key's fit (`learned_rows.build_key_rows`).
    """
    kind = batch.rows.kind
    step = build_bucket_filter(kernel, batch)
    key_column = pa.field("key", pa.int64() if kind.integer else pa.string())
    schema = pa.schema([key_column, *STATE_COLUMNS, pa.field("fit", FIT)])

    def work(keyed: KeyedRows) -> Iterator[pa.RecordBatch]:
        problem = learnable(definition)
        fit, names = fit_bucket(problem, keyed, batch, window, populations)
        start = kernel.with_parameters(kernel.initial(keyed.keys.size), fit.parameters)
        for states in build_state_rows(kernel, step(keyed, start).records):
            columns = [*states.columns, pa.nulls(states.num_rows, FIT)]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)
        key = build_key_array(keyed.keys)
        nothing = [pa.nulls(len(key), field.type) for field in list(schema)[1:-1]]
        fits = learned_rows.fit_array(fit, problem.places, names)
        yield pa.RecordBatch.from_arrays([key, *nothing, fits], schema=schema)

    key_type = "bigint" if kind.integer else "string"
    return packed.mapInArrow(
        build_bucket_worker(batch.rows, work), f"key {key_type}, {STATE_ROWS}, fit {FIT_ROWS}"
    )
