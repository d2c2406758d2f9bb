"""What the keys of a file begin with: the model's filter with learned parameters, each key's own where it has some.

Parameters are taken from a snapshot, states never: each key starts from the initial distribution.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

import kalman
from jobs.core.report import plural
from jobs.encoding import arrow
from jobs.landing.parsing import ParsedRows
from jobs.snapshots.learned import KeyParameters, Learned, key_parameters
from jobs.specs.model_spec import ModelSpec
from kalman.filters.own_parameters import OwnParameters, own_parameters, with_own
from kalman.models.groups import GROUPS, begin_states
from kalman.types import Filter


class Prior(NamedTuple):
    """The filter, and the states (size, K) in which the K keys of some rows begin.

    lines, data: whose parameters these are, for a report.
    """

    kernel: Filter
    states: NDArray[np.float64]
    lines: list[str]
    data: dict[str, Any]

    def key_states(self) -> kalman.KeyStates:
        """Return the states of the keys before their first row."""
        return kalman.initial_states(self.kernel, self.states.shape[1])._replace(values=self.states.copy())


def specs_prior(spec: ModelSpec, keys: int) -> Prior:
    """Return what keys begin with by the values in the spec alone."""
    kernel = kalman.build(spec.definition())
    return Prior(kernel, kernel.initial(keys), [], {})


def prior_of(
    spec: ModelSpec,
    rows: ParsedRows,
    columns: Mapping[str, pa.Array],
    root: str,
    learned: Learned,
    asked: bool,
) -> Prior:
    """Return what the keys of a file's rows begin with.

    Args:
        spec: of the model.
        rows: of the file.
        columns: of the file, with the key columns.
        root: of the warehouse.
        learned: parameters (`jobs.snapshots.learned`).
        asked: whether the user named a snapshot.

    Raises:
        UserError: the snapshot's rows cannot be read.
    """
    kernel = kalman.build(spec.definition(), learned.parameters)
    states = kernel.initial(rows.keys)
    data: dict[str, Any] = {"snapshot": learned.snapshot}
    if learned.snapshot is None or not learned.parameters:
        return Prior(kernel, states, _spec_lines(spec, learned, asked), data)
    line = f"parameters of snapshot {learned.snapshot}"
    if spec.learn is None or spec.learn.scope not in ("group", "key"):
        return Prior(kernel, states, [line], data)
    codes, firsts = np.unique(rows.key[rows.reason == None], return_index=True)  # noqa: E711 - elementwise
    places = np.flatnonzero(rows.reason == None)[firsts]  # noqa: E711 - elementwise
    texts = {name: columns[name].take(arrow.integers(places)).cast(pa.string()) for name in spec.key}
    states[:, codes], known = own_begin(root, spec, learned, kernel, texts)
    by_group = spec.learn.scope == "group"
    whose = ("their group's", "those of all groups") if by_group else ("their own", "the population's")
    counts = {"keys_known": known, "keys_unknown": len(codes) - known}
    named = f"{plural(known, 'key')} with {whose[0]}, {len(codes) - known:,} with {whose[1]}"
    return Prior(kernel, states, [f"{line}: {named}"], {**data, **counts})


def own_begin(
    root: str, spec: ModelSpec, learned: Learned, kernel: Filter, texts: Mapping[str, pa.Array]
) -> tuple[NDArray[np.float64], int]:
    """Return the states (size, K) in which keys begin with their group's or their own parameters, and for how many.

    Args:
        root: of the warehouse.
        spec: of the model.
        learned: parameters by group or by key.
        kernel: the filter with the pooled parameters, which the other keys have.
        texts: the text of each key column of the K keys.

    Raises:
        UserError: the snapshot's rows cannot be read.
    """
    # without key columns there is one key
    codes = np.arange(len(texts[spec.key[0]]) if spec.key else 1)
    states, own = kernel.initial(len(codes)), own_parameters(kernel)
    assert spec.learn is not None
    if spec.learn.scope == "group":
        return states, _put_groups(spec, learned, codes, texts, states)
    if not own.learned:
        return states, 0
    stored = key_parameters(root, spec, learned, _width(own))
    return _with_key_parameters(kernel, own, stored, codes, [texts[name] for name in spec.key], states)


def _spec_lines(spec: ModelSpec, learned: Learned, asked: bool) -> list[str]:
    """Return why the spec's values are used, where the reader may expect others."""
    if learned.snapshot is not None:
        said = f"snapshot {learned.snapshot} has learned none"
        return [f"parameters: the spec's values; {said}"] if asked or spec.learn is not None else []
    if spec.learn is None and not asked:
        return []
    lines = f"parameters: the spec's values, {learned.reason}"
    learns = "" if asked else f"; learn them with `kalman-pipeline pretrain --model {spec.name}`"
    return [lines + learns]


def _width(own: OwnParameters) -> int:
    return max(rows.stop for rows in own.rows.values())


def _put_groups(
    spec: ModelSpec,
    learned: Learned,
    codes: NDArray[np.int64],
    texts: Mapping[str, pa.Array],
    states: NDArray[np.float64],
) -> int:
    """Write the states in which the keys of known groups begin, in place; return how many keys these are."""
    groups = learned.parameters.get(GROUPS)
    if groups is None:
        return 0
    begin = begin_states(kalman.build, spec.definition(), learned.parameters)
    place = {tuple(values): at for at, values in enumerate(groups["values"])}
    columns = [texts[name].to_pylist() for name in groups["by"]]
    at = np.array([place.get(values, -1) for values in zip(*columns, strict=True)], np.int64)
    states[:, codes] = begin[:, at]  # the last column, -1, is that of keys of no known group
    return int((at >= 0).sum())


def _with_key_parameters(
    kernel: Filter,
    own: OwnParameters,
    stored: KeyParameters,
    codes: NDArray[np.int64],
    texts: list[pa.Array],
    states: NDArray[np.float64],
) -> tuple[NDArray[np.float64], int]:
    """Return the states with the parameters of the keys that are stored, and how many these are.

    A parameter that adapts to the innovations is part of a key's state, and stays as it begins.
    """
    index_in: Any = pc.index_in  # type: ignore[attr-defined]
    if len(texts) == 1:
        found = index_in(texts[0], value_set=stored.keys)
        at = arrow.to_numpy(found, -1).astype(np.int64)
    else:
        place = {tuple(json.loads(key)): i for i, key in enumerate(stored.keys.to_pylist())}
        columns = [column.to_pylist() for column in texts]
        keys = (
            zip(*columns, strict=True) if columns else [()] * len(codes)
        )  # without key columns there is one key
        at = np.array([place.get(values, -1) for values in keys], np.int64)
    known = np.flatnonzero(at >= 0)
    field = stored.values[:, at[known]]
    fixed = [name for name in own.learned if name not in own.adapted]
    states = states.copy()
    part = with_own(kernel, states[:, codes[known]], {name: field[own.rows[name]] for name in fixed})
    states[:, codes[known]] = part
    return states, len(known)
