"""Changes beside blocks: the states that a micro-batch has changed, as one value of the store, until blocks have them.

A store of states (`block_store`) holds three kinds of values by number: blocks (0, 1, ...), changes (from
`CHANGES_FROM` on, in the order of their micro-batches), and the mark (`MARK`). Each change has the records of some keys
in the format of a block. A key's state is that of the last change that has the key, else that of its block. A block may
be newer than a change, if all changes after that one are still there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jobs.encoding.keys import group, match
from jobs.encoding.packets import Records, concat, merged
from jobs.state.block_format import StateFormat, StateMismatch

MARK = -1
"""Number of the value that names the version of a bucket's states."""
CHANGES_FROM = 1 << 40
"""Number of the first change."""

_MAGIC = b"KSV1"
_MARK = struct.Struct("<4s16sIQQ")  # magic, token, padding, next change, changes that are kept


class Mark(NamedTuple):
    """The version of a bucket's states.

    token: 16 random bytes, new at each write; next: number of the next change; kept: changes in the store.
    """

    token: bytes
    next: int = CHANGES_FROM
    kept: int = 0

    def encode(self) -> bytes:
        """Return the mark as one value."""
        return _MARK.pack(_MAGIC, self.token, 0, self.next, self.kept)

    @classmethod
    def decode(cls, value: bytes) -> Mark:
        """Return the mark of a value.

        Raises:
            StateMismatch: the value is something else.
        """
        if len(value) != _MARK.size or value[:4] != _MAGIC:
            raise StateMismatch(
                f"the mark of a bucket's states begins with {value[:4]!r}, not with {_MAGIC!r}"
            )
        _, token, _, following, kept = _MARK.unpack(value)
        return cls(token, following, kept)


class Entries(NamedTuple):
    """The values of a store: blocks by number, changes by number, and the mark if there is one."""

    blocks: dict[int, bytes]
    changes: dict[int, bytes]
    mark: Mark | None

    @classmethod
    def of(cls, items: Iterable[tuple[int, bytes]]) -> Entries:
        """Return the values of a store, from all its numbers and values in any order."""
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
        return overlaid(known, newest(state, self.changes))


def newest(state: StateFormat, changes: dict[int, bytes]) -> Records:
    """Return the last record of each key of at least one change, ordered by route."""
    joined = concat([state.decode(changes[number]) for number in sorted(changes)])
    grouped = group(joined)
    ends = np.append(grouped.first[1:], joined.size) - 1
    return joined.take(grouped.order[ends])


def overlaid(known: Records, newer: Records) -> Records:
    """Return known records with those of some keys replaced or added; all are ordered by route."""
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
    return merged(replaced, newer.take(np.flatnonzero(~there)))
