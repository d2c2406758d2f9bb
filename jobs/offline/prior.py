"""The filter and initial states of the keys of a file, with learned parameters of the model, a group or a key.

Only parameters come from a snapshot; each key starts from the initial distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

import kalman
from jobs.core.report import format_count
from jobs.landing.checking import ParsedRows
from jobs.landing.values.keys import find_places
from jobs.snapshots.learned import LearnedParameters, read_key_parameters
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding import arrow
from jobs.state.encoding.table_columns import split_keys
from kalman.filters.own_parameters import copy_key_parameters, find_key_parameters
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
