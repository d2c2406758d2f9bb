"""Keep the states of some hundreds of keys as one binary value, which says whose states they are.

A block begins with a header: the model, its version, the names of its states and the layout of its numbers. Spark
checks a state's shape and never its meaning, so every block is checked here when it is loaded.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import NamedTuple

from jobs.keys import KeyKind
from jobs.packets import Column, Layout, Records

_MAGIC = b"KSB1"
FLOAT64 = "<f8"
_PREFIX = struct.Struct("<4sI")  # magic, bytes of the header (padded to 8)


class StateMismatch(Exception):
    """A block holds the states of another model, version or layout than the one that wants to read it."""


class StateFormat(NamedTuple):
    """How the states of one model are stored: what the header must say, and the packet's layout."""

    header: bytes
    layout: Layout

    def encode(self, records: Records) -> bytes:
        """Return the block of `records`, which are ordered by route."""
        return _PREFIX.pack(_MAGIC, len(self.header)) + self.header + self.layout.encode(records)

    def decode(self, block: bytes) -> Records:
        """Return the records of a block, as views of it.

        Raises:
            StateMismatch: the block belongs to something else.
        """
        if len(block) < _PREFIX.size:
            raise StateMismatch(f"a state block has {len(block)} bytes: it is cut short")
        magic, length = _PREFIX.unpack_from(block)
        if magic != _MAGIC:
            raise StateMismatch(f"a state block begins with {magic!r}, not with {_MAGIC!r}")
        end = _PREFIX.size + length
        if block[_PREFIX.size : end] != self.header:
            raise StateMismatch(_difference(block[_PREFIX.size : end], self.header))
        return self.layout.decode(block, end)


def state_layout(kind: KeyKind, size: int, dtype: str = FLOAT64) -> Layout:
    """Return the layout of key states with `size` numbers of a type a key (`kalman.rounded.stored_as`)."""
    columns = (
        *kind.identity_columns,
        Column("event_time", "<i8"),
        Column("count", "<i8"),
        Column("log_likelihood", "<f8"),
        Column("values", dtype, size),
    )
    return Layout(columns, text=not kind.integer)


def state_format(
    model: str,
    version: int,
    states: list[str],
    fields: Mapping[str, tuple[int, ...]],
    kind: KeyKind,
    size: int,
    dtype: str = FLOAT64,
) -> StateFormat:
    """Return how the states of a model's version are stored."""
    meaning = {
        "model": model,
        "version": version,
        "states": list(states),
        "fields": {name: list(shape) for name, shape in fields.items()},
        "key": dict(zip(kind.columns, kind.types, strict=True)),
    }
    if dtype != FLOAT64:
        meaning["numbers"] = dtype
    header = json.dumps(meaning, separators=(",", ":")).encode()
    return StateFormat(header + b" " * (-len(header) % 8), state_layout(kind, size, dtype))


def _difference(found: bytes, wanted: bytes) -> str:
    """Say in a sentence how two headers differ."""
    have, want = json.loads(found), json.loads(wanted)
    parts = [
        f"{name} is {have.get(name)!r}, not {want[name]!r}" for name in want if have.get(name) != want[name]
    ]
    return (
        "the checkpoint holds the state of something else: "
        + "; ".join(parts)
        + ". Start a new generation from a snapshot of this version (stream --adopt SNAPSHOT)"
    )
