"""The states of a bucket's keys, read and written at a cost that grows with the keys of a micro-batch.

With blocks alone (`block_store`), each key with a row costs a read and a write of some hundred keys. So a bucket that
is read often has a local copy (`local_copy`). A micro-batch takes the states of its keys from the copy, and writes only
these to Spark's state, as one change. Blocks follow later: each micro-batch also rewrites some blocks from
the copy, `SWEPT` records for each record of its change, block after block, and removes the changes that all blocks
include. So no micro-batch pays for all blocks, and a change is written about three times in all. The changes together
have at most about one record per key.

A micro-batch whose keys are most keys of their blocks writes these blocks and no change. So does each micro-batch of a
bucket without a copy.

A store of states (`block_store`) holds three kinds of values by number: blocks (0, 1, ...), changes (from
`CHANGES_FROM` on, in the order of their micro-batches), and the mark (`MARK`). A change holds the records of some keys
in the format of a block. A key's state is its record in the last change with the key, else its record in the block. A
block may be newer than a change if all later changes are still in the store.

The mark has a token: a hash of the former token and all later writes. The first token is a hash of all values in the
store. So states with the same token are equal, whichever tasks and attempts have written them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha1
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.core.stopwatch import STATE_READ, STATE_WRITE, step
from jobs.state.block_format import StateFormat, StateMismatch
from jobs.state.block_store import Blocks, Store
from jobs.state.encoding.keys import group, match
from jobs.state.encoding.packets import Records, StateVariable, join_records, merge_records
from jobs.state.encoding.routing import compute_blocks
from jobs.state.local_copy import CLEAN, LocalCopy

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


SWEPT = 2
"""Number of block records that are written for each record of a change."""
DENSE = 2
"""Blocks are written whole if they have at most this many records for each changed record, ..."""
FEW = 512
"""... or at most this many records in all."""
DECODED = 64
"""Number of blocks that are decoded at a time to make a copy."""
MOST_CHANGES, JOINED = 1024, 512
"""If a bucket has more changes than the first number, `JOINED` consecutive changes are joined into one."""

Ints = NDArray[np.int64]

Copies = Callable[[StateVariable], Path | None]
"""Returns the folder for the local copy of a state variable of a bucket, or None if it has no copy."""


def no_copy(variable: StateVariable) -> Path | None:
    """Return None for each state variable."""


class BucketStates(Blocks):
    """The states of a bucket's keys, none of which is ever removed."""

    def __init__(
        self, store: Store, state: StateFormat, blocks: int, folder: Callable[[], Path | None] | None = None
    ) -> None:
        """Open the states in a store.

        Args:
            store: store of blocks, changes and the mark.
            state: format of the states.
            blocks: number of blocks in the bucket.
            folder: returns the folder of the bucket's local copy, or None if the bucket has no copy.
        """
        self._writes = Writes(store)
        super().__init__(self._writes, state, blocks)
        self._folder = folder or (lambda: None)
        self._copy: LocalCopy | None = None
        self._mark: Mark | None = None
        self._token = b""

    @step(STATE_READ)
    def load(self, route: NDArray[np.uint64]) -> tuple[Ints, Records]:
        """Return the block numbers and the records of ordered routes, ordered by route.

        The result may include all records of the blocks. The caller must pass all returned records to `save`.
        """
        self.close()
        present = np.unique(compute_blocks(route, self.blocks))
        self._mark = self._read_mark()
        self._token = b"" if self._mark is None else self._mark.token
        found = self._from_copy(route, len(present))
        return present, self._read_blocks(present, self._mark) if found is None else found

    @step(STATE_READ)
    def read(self, numbers: Ints) -> Records:
        """Read blocks by their ordered numbers, with their changes; return their records ordered by route."""
        return self._read_blocks(numbers, self._read_mark())

    def _read_blocks(self, numbers: Ints, mark: Mark | None) -> Records:
        """Read blocks as `read` does, with the mark that the store has."""
        if mark is None or mark.kept == 0:
            return super().read(numbers)
        known = Entries.of(self.store.items()).states(self.state)
        return known.take(
            np.flatnonzero(np.isin(compute_blocks(known.arrays["route"], self.blocks), numbers))
        )

    @step(STATE_WRITE)
    def save(self, present: Ints, records: Records) -> None:
        """Write the changed records of `load` and the records of new keys; all are ordered by route."""
        copy = self._copy
        try:
            if copy is None:
                self._save_blocks(present, records)
            else:
                self._save_in_copy(copy, present, records)
        finally:
            self.close()

    def close(self) -> None:
        """Release the copy for other tasks."""
        if self._copy is not None:
            self._copy.close()
            self._copy = None

    def _read_mark(self) -> Mark | None:
        held = self.store.get(MARK)
        return None if held is None else Mark.decode(held)

    def _from_copy(self, route: NDArray[np.uint64], wanted: int) -> Records | None:
        """Return the records of ordered routes in `wanted` blocks from the local copy, or None without a copy."""
        folder = self._folder()
        if folder is None:
            return None
        for there in (True, False):
            copy = self._opened(folder) if there else self._made(folder, wanted)
            if copy is None:
                continue
            try:
                found = copy.find(route)
            except OSError:  # it is damaged
                copy.close()
            else:
                self._copy = copy
                return found
        return None

    def _opened(self, folder: Path) -> LocalCopy | None:
        """Return the existing local copy, or None."""
        if self._mark is None:
            return None
        return LocalCopy.open(folder, self.state.layout, self.blocks, self._mark.token)

    def _made(self, folder: Path, wanted: int) -> LocalCopy | None:
        """Make the local copy from Spark's state if there are changes, or if reading blocks has cost as much."""
        changes = self._mark is not None and self._mark.kept > 0
        if not changes and not _pays(folder, wanted, self.blocks):
            return None
        entries = Entries.of(self.store.items())
        if self._mark is None:
            self._token = compute_first_token(entries.blocks)
        keys = sum(map(self.state.count_records_in, entries.blocks.values()))
        parts = self._decoded(entries.blocks)
        copy = LocalCopy.create(folder, self.state.layout, self.blocks, keys, parts)
        if copy is None:
            return None
        try:
            numbers = sorted(entries.changes)
            sizes = []
            for number in numbers:
                change = self.state.decode(entries.changes[number])
                copy.update(change)
                _lacks(copy, change, number)
                sizes.append(change.size)
        except OSError:
            copy.close()
            return None
        copy.changes = np.array([numbers, sizes], np.int64).reshape(2, -1)
        return copy

    def _decoded(self, blocks: dict[int, bytes]) -> Iterator[Records]:
        """Yield the records of blocks in order, and drop decoded blocks: all of them may be a gigabyte."""
        numbers = sorted(blocks)
        for start in range(0, len(numbers), DECODED):
            yield self.state.decode_all(blocks.pop(number) for number in numbers[start : start + DECODED])

    def _save_in_copy(self, copy: LocalCopy, present: Ints, records: Records) -> None:
        """Write records to the copy, and as a change or as blocks to Spark's state."""
        mark = self._mark or Mark(b"")
        following = mark.next
        try:  # do all reads of the copy before any change of Spark's state
            copy.begin()
            copy.update(records)
            numbers = np.union1d(present, np.flatnonzero(copy.since != CLEAN))
            dense = len(numbers) * (copy.keys / self.blocks) <= max(DENSE * records.size, FEW)
            if not dense:
                following += 1
                _lacks(copy, records, mark.next)
                numbers = _next_blocks(copy, records.size)
            whole = records if dense and records.size == copy.keys else copy.read_blocks(numbers)
        except OSError:  # the disk of the copy is full, or the copy is damaged
            copy.close()
            self._save_blocks(present, records, complete=False)
            return
        self._writes.begin(self._token)
        if not dense:
            self.store.put(mark.next, self.state.encode(records))
            copy.changes = np.append(copy.changes, [[mark.next], [records.size]], axis=1)
        super().save(numbers, whole)
        copy.since[numbers] = CLEAN
        self._forget(copy)
        if copy.changes.shape[1] > MOST_CHANGES:
            self._join(copy)
        written = Mark(self._writes.end(), following, copy.changes.shape[1])
        self.store.put(MARK, written.encode())
        copy.seal(written.token)

    def _forget(self, copy: LocalCopy) -> None:
        """Remove the changes that all blocks include."""
        needed = copy.changes[0] >= copy.since.min()
        for number in copy.changes[0][~needed].tolist():
            self.store.remove(number)
        copy.changes = copy.changes[:, needed]

    def _join(self, copy: LocalCopy) -> None:
        """Join consecutive changes, those with the fewest records, into one."""
        totals = np.concatenate([[0], np.cumsum(copy.changes[1])])
        start = int(np.argmin(totals[JOINED:] - totals[:-JOINED]))
        joined = copy.changes[0][start : start + JOINED]
        values = zip(joined.tolist(), self.store.get_all(joined.tolist()), strict=True)
        change = select_newest(self.state, {number: value for number, value in values if value is not None})
        last = int(joined[-1])
        self.store.put(last, self.state.encode(change))
        for number in joined[:-1].tolist():
            self.store.remove(number)
        copy.since[(copy.since >= joined[0]) & (copy.since < last)] = last
        kept = np.ones(copy.changes.shape[1], bool)
        kept[start : start + JOINED - 1] = False
        copy.changes = copy.changes[:, kept]
        copy.changes[1, start] = change.size

    def _save_blocks(self, present: Ints, records: Records, complete: bool = True) -> None:
        """Write records to their blocks, and with them all later changes of these blocks.

        complete: `records` are all records of the blocks `present`; if not, the blocks keep their other records.
        """
        mark = self._mark
        if mark is not None:
            self._writes.begin(mark.token)
        if not complete or (mark is not None and mark.kept):
            entries = Entries.of(self.store.items())
            if entries.changes:
                changed = compute_blocks(
                    select_newest(self.state, entries.changes).arrays["route"], self.blocks
                )
                present = np.union1d(present, changed)
            known = overlay_records(entries.states(self.state), records)
            records = known.take(
                np.flatnonzero(np.isin(compute_blocks(known.arrays["route"], self.blocks), present))
            )
            for number in entries.changes:
                self.store.remove(number)
        super().save(present, records)
        if mark is not None:  # some executor may have a copy of this state: the new mark invalidates it
            self.store.put(MARK, Mark(self._writes.end(), mark.next).encode())


def _lacks(copy: LocalCopy, change: Records, number: int) -> None:
    """Note that the blocks of a change's keys do not include it."""
    blocks = np.unique(compute_blocks(change.arrays["route"], copy.blocks))
    copy.since[blocks] = np.minimum(copy.since[blocks], number)


def _next_blocks(copy: LocalCopy, changed: int) -> Ints:
    """Return the numbers of the blocks to write after `changed` records have changed, as far as the credit goes.

    These are the blocks that lack the oldest changes.
    """
    copy.credit += SWEPT * changed
    a_block = max(1, copy.keys // copy.blocks)
    lacking = np.flatnonzero(copy.since != CLEAN)
    oldest = lacking[np.argsort(copy.since[lacking], kind="stable")][: copy.credit // a_block]
    if len(oldest):
        copy.credit = max(0, copy.credit - (copy.credit // a_block) * a_block)
    return np.sort(oldest)


def _pays(folder: Path, wanted: int, blocks: int) -> bool:
    """Return whether the blocks read without a copy are as many as all blocks."""
    path = folder / "read"
    try:
        before = int(path.read_text()) if path.exists() else 0
        if before + wanted >= blocks:
            return True
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(str(before + wanted))
    except (OSError, ValueError):
        pass
    return False
