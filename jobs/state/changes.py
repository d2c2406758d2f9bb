"""Changes beside blocks: one value per micro-batch with the changed states, kept until the blocks include them.

A store of states (`block_store`) holds three kinds of values by number: blocks (0, 1, ...), changes (from
`CHANGES_FROM` on, in the order of their micro-batches), and the mark (`MARK`). A change holds the records of some keys
in the format of a block. A key's state is its record in the last change with the key, else its record in the block. A
block may be newer than a change if all later changes are still in the store.

The mark has a token: a hash of the former token and all later writes. The first token is a hash of all values in the
store. So states with the same token are equal, whichever tasks and attempts have written them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from hashlib import sha1
from typing import Any, NamedTuple

import numpy as np

from jobs.state.block_format import StateFormat, StateMismatch
from jobs.state.block_store import Store
from jobs.state.encoding.keys import group, match
from jobs.state.encoding.packets import Records, join_records, merge_records

MARK = -1
"""Number of the value with the version of a bucket's states."""
CHANGES_FROM = 1 << 40
"""Number of the first change."""

TOKEN_BYTES = 16

_MAGIC = b"KSV1"
_MARK = struct.Struct("<4s16sIQQ")  # magic, token, padding, next change, changes in the store
_WRITE = struct.Struct("<qq")  # number and length of a written value
_REMOVED = -1
"""Stands for the length of a removed value."""


class Mark(NamedTuple):
    """The version of a bucket's states.

    token: 16 bytes, different for each state; next: number of the next change; kept: count of changes in the store.
    """

    token: bytes
    next: int = CHANGES_FROM
    kept: int = 0

    def encode(self) -> bytes:
        """Return the mark as one value."""
        return _MARK.pack(_MAGIC, self.token, 0, self.next, self.kept)

    @classmethod
    def decode(cls, value: bytes) -> Mark:
        """Return the mark that is encoded in a value.

        Raises:
            StateMismatch: the value is not a mark.
        """
        if len(value) != _MARK.size or value[:4] != _MAGIC:
            raise StateMismatch(
                f"the mark of a bucket's states begins with {value[:4]!r}, not with {_MAGIC!r}"
            )
        _, token, _, following, kept = _MARK.unpack(value)
        return cls(token, following, kept)


class Writes:
    """A store that hashes its writes between `begin` and `end` into the token of its state."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._digest: Any = None
        self.get, self.get_all, self.items = store.get, store.get_all, store.items

    def begin(self, former: bytes) -> None:
        """Begin a token; `former` is the token of the stored state."""
        self._digest = _digest(former)

    def end(self) -> bytes:
        """Return the token of the state after the writes, and stop hashing."""
        assert self._digest is not None
        digest, self._digest = self._digest, None
        return digest.digest()[:TOKEN_BYTES]

    def put(self, number: int, value: bytes) -> None:
        """Set a value."""
        self._note(number, value)
        self._store.put(number, value)

    def put_all(self, values: Iterable[tuple[int, bytes]]) -> None:
        """Set values by number."""
        self._store.put_all(self._noted(values))

    def remove(self, number: int) -> None:
        """Remove an existing value."""
        self._note(number, None)
        self._store.remove(number)

    def _noted(self, values: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
        for number, value in values:
            self._note(number, value)
            yield number, value

    def _note(self, number: int, value: bytes | None) -> None:
        if self._digest is not None:
            _add(self._digest, number, value)


def compute_first_token(blocks: dict[int, bytes]) -> bytes:
    """Return the token of a state without a mark; such a state has only blocks."""
    digest = _digest(b"")
    for number in sorted(blocks):
        _add(digest, number, blocks[number])
    return digest.digest()[:TOKEN_BYTES]


def _digest(begin: bytes) -> Any:
    """Return a SHA-1 digest: the fastest hash of sufficient length; no attacker has a reason to forge it."""
    return sha1(begin, usedforsecurity=False)


def _add(digest: Any, number: int, value: bytes | None) -> None:
    """Add a written value to a digest; None stands for a removed value."""
    digest.update(_WRITE.pack(number, _REMOVED if value is None else len(value)))
    digest.update(value or b"")


class Entries(NamedTuple):
    """The values of a store: blocks by number, changes by number, and the mark, or None."""

    blocks: dict[int, bytes]
    changes: dict[int, bytes]
    mark: Mark | None

    @classmethod
    def of(cls, items: Iterable[tuple[int, bytes]]) -> Entries:
        """Sort the numbers and values of a store, which come in any order, into blocks, changes and mark."""
        blocks: dict[int, bytes] = {}
        changes: dict[int, bytes] = {}
        mark = None
        for number, value in items:
            if number == MARK:
                mark = Mark.decode(value)
            elif number >= CHANGES_FROM:
                changes[number] = value
            else:
                blocks[number] = value
        return cls(blocks, changes, mark)

    def states(self, state: StateFormat) -> Records:
        """Return the records of all keys, ordered by route.

        Raises:
            StateMismatch: a value is not of this format.
        """
        known = state.decode_all(self.blocks[number] for number in sorted(self.blocks))
        if not self.changes:
            return known
        return overlay_records(known, select_newest(state, self.changes))


def select_newest(state: StateFormat, changes: dict[int, bytes]) -> Records:
    """Return the last record of each key in the changes (at least one), ordered by route."""
    joined = join_records([state.decode(changes[number]) for number in sorted(changes)])
    grouped = group(joined)
    ends = np.append(grouped.first[1:], joined.size) - 1
    return joined.take(grouped.order[ends])


def overlay_records(known: Records, newer: Records) -> Records:
    """Return known records with the newer records in place of them or added; all are ordered by route."""
    at = match(known, newer)
    there = at >= 0
    arrays = {}
    for name, array in known.arrays.items():
        changed = np.array(array)
        changed[..., at[there]] = newer.arrays[name][..., there]
        arrays[name] = changed
    replaced = known._replace(arrays=arrays)
    if there.all():
        return replaced
    return merge_records(replaced, newer.take(np.flatnonzero(~there)))
