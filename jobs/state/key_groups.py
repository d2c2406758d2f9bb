"""Groups of keys that share the values of some key columns, and the initial states of each group."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

import kalman
from jobs.state.encoding.keys import KeyKind, build_key_array
from jobs.state.encoding.packets import Records
from jobs.state.encoding.rows import KeyedRows
from kalman.models.groups import GROUPS, begin_states

_TOKEN = r'"(?:[^"\\]|\\.)*"|null'


class Grouping(NamedTuple):
    """The number (K,) of the group of each key, and the name of each group, a JSON array of its columns' texts."""

    code: NDArray[np.int64]
    names: list[str]


def group_keys(kind: KeyKind, by: tuple[str, ...], keys: Records) -> Grouping:
    """Group keys by some of their columns."""
    if kind.integer or len(kind.columns) == 1:
        coded = build_key_array(keys).dictionary_encode()
        return Grouping(_read_codes(coded), [json.dumps([str(v)]) for v in coded.dictionary.to_pylist()])
    assert keys.text is not None
    # The text of a key is a JSON array. Its items are cut out as text, so that only distinct items are parsed.
    tokens = (f"(?P<c{i}>{_TOKEN})" for i in range(len(kind.columns)))
    found = pc.extract_regex(keys.text, r"^\[" + ",".join(tokens) + r"\]$")  # type: ignore[attr-defined]
    code: NDArray[np.int64] = np.zeros(keys.size, np.int64)
    names: list[list[Any]] = [[]]
    for column in by:
        coded = found.field(kind.columns.index(column)).dictionary_encode()
        values = [json.loads(token) for token in coded.dictionary.to_pylist()]
        pair = code * len(values) + _read_codes(coded)
        present, code = np.unique(pair, return_inverse=True)
        names = [[*names[p // len(values)], values[p % len(values)]] for p in present.tolist()]
    return Grouping(code, [json.dumps(name) for name in names])


def format_group_name(values: list[str]) -> str:
    """Return the name of the group whose columns have the given texts."""
    return json.dumps(values)


@dataclass(frozen=True)
class GroupBegin:
    """The initial states of new keys, by group. Picklable.

    states: (size, G + 1) initial states of the G known groups, and in the last column the initial state of all other
    groups. place: column of each group.
    """

    kind: KeyKind
    by: tuple[str, ...]
    place: Mapping[str, int]
    states: NDArray[np.float64]

    def __call__(self, keyed: KeyedRows) -> NDArray[np.float64]:
        """Return the initial states (size, K) of a bucket's keys."""
        return self._of(keyed.keys)

    def build_from_texts(self, keys: pa.StringArray) -> NDArray[np.float64]:
        """Return the initial states (size, K) of keys that are given as texts."""
        return self._of(Records({"route": np.zeros(len(keys), np.uint64)}, keys))

    def _of(self, keys: Records) -> NDArray[np.float64]:
        grouping = group_keys(self.kind, self.by, keys)
        places = np.array([self.place.get(name, len(self.place)) for name in grouping.names], np.int64)
        return self.states[:, places[grouping.code]]


def group_begin(
    kind: KeyKind, definition: dict[str, Any], parameters: Mapping[str, Any]
) -> GroupBegin | None:
    """Return the initial states by group, or None if no group has learned parameters."""
    if GROUPS not in parameters:
        return None
    groups = parameters[GROUPS]
    place = {format_group_name(values): i for i, values in enumerate(groups["values"])}
    return GroupBegin(kind, tuple(groups["by"]), place, begin_states(kalman.build, definition, parameters))


def _read_codes(coded: pa.DictionaryArray) -> NDArray[np.int64]:
    return coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
