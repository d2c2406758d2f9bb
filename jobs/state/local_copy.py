"""A copy of a bucket's states in local files, so that a micro-batch reads the states of its own keys alone.

Spark's state is the truth, and the copy is a function of it: it counts only if its token is the one in the mark of
Spark's state (`changes`). A copy that is lost, stale, of another machine, or that a task left half way costs the time
to make it anew and nothing else:

- The token is erased before anything changes, and written last. A task that dies between leaves a copy without one.
- Tokens are random, so a copy to which a failed or second attempt of a task wrote matches no state that was committed.
- One task at a time has the copy, by a lock on its file.

Records are kept in two runs, each ordered by route: `base`, and `new` with the keys that came since the base was
written, some per cent of it. They are arrays that are mapped into memory, so that only the pages of the wanted keys are
touched. Files are allocated before they are mapped: a full disk is an error, not a signal.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.encoding.keys import match
from jobs.encoding.packets import Layout, Records, merged

CLEAN = np.iinfo(np.int64).max
"""In `since`: the block has all that changed."""
NEW_KEYS = 32
"""One in so many keys may be in the run of new keys; then it becomes part of the base."""
SMALL_RUN = 4096
"""A run of new keys up to this size is left as it is."""
PIECE = 1 << 16
"""Records that become rows at a time where many are written."""
ABANDONED_SECONDS = 24 * 3600.0
"""Copies that were not used for so long are removed: their queries have ended."""

_HEADER = struct.Struct("<16sQQQ")  # token, generation of the base, changes, credit
_NO_TOKEN = bytes(16)


class LocalCopy:
    """The states of a bucket in files of one folder.

    since: (blocks,) for each block the number of the oldest change that it lacks, or `CLEAN`
    changes: (2, C) the changes in Spark's state: their numbers, in order, and how many records each has
    credit: records of blocks that may still be written (`key_states`)
    """

    def __init__(self, folder: Path, layout: Layout, blocks: int, lock: int) -> None:
        self.folder, self.layout, self.blocks, self._lock = folder, layout, blocks, lock
        self._generation = 0
        self.base = self.new = Run(folder / "none", layout, 0)
        self.since: NDArray[np.int64] = np.full(blocks, CLEAN)
        self.changes: NDArray[np.int64] = np.zeros((2, 0), np.int64)
        self.credit = 0

    @classmethod
    def open(cls, folder: Path, layout: Layout, blocks: int, token: bytes) -> LocalCopy | None:
        """Open the copy of a folder, or return None: there is none with this token, or another task has it."""
        if token == _NO_TOKEN or not (folder / "header").exists():
            return None
        copy = cls._locked(folder, layout, blocks)
        if copy is None:
            return None
        try:
            if copy._load(token):
                return copy
        except (OSError, ValueError):
            pass  # files that are cut short or gone: as good as none
        copy.close()
        return None

    @classmethod
    def create(
        cls, folder: Path, layout: Layout, blocks: int, keys: int, parts: Iterable[Records]
    ) -> LocalCopy | None:
        """Make a copy of the records of so many keys, in parts in the order of their routes.

        Returns None where another task has it, or the disk is full.
        """
        try:
            remove_abandoned(folder.parent.parent)
            folder.mkdir(parents=True, exist_ok=True)
            copy = cls._locked(folder, layout, blocks)
        except OSError:
            return None
        if copy is None:
            return None
        try:
            copy.begin()
            copy._generation = time.time_ns()
            copy.base = Run.write(copy._path("base"), layout, keys, parts)
            copy.new = Run.write(copy._path("new"), layout, 0, [])
            copy._sweep_files()
        except OSError:
            copy.close()
            shutil.rmtree(folder, ignore_errors=True)
            return None
        except BaseException:
            copy.close()
            raise
        return copy

    @property
    def keys(self) -> int:
        """Return the number of keys."""
        return self.base.size + self.new.size

    def find(self, route: NDArray[np.uint64]) -> Records:
        """Return the records (K) of ordered routes, ordered by route."""
        base, new = self.base.find(route), self.new.find(route)
        if new.size == 0:
            return base
        return merged(base, new) if base.size else new

    def of_blocks(self, numbers: NDArray[np.int64]) -> Records:
        """Return the records of blocks by their ordered numbers, ordered by route."""
        runs = (self.base, self.new) if self.new.size else (self.base,)
        found = [run.at(run.in_blocks(numbers, self.blocks)) for run in runs]
        return found[0] if len(found) == 1 else merged(*found)

    def begin(self) -> None:
        """Erase the token: from here on the copy counts only once it is sealed."""
        os.pwrite(self._lock, _NO_TOKEN, 0)

    def update(self, records: Records) -> None:
        """Replace or add the records of some keys, ordered by route.

        Raises:
            OSError: the disk is full. The copy is of no use any more.
        """
        rest = self.base.replace(records)
        if rest.size:
            rest = self.new.replace(rest)
        if rest.size == 0:
            return
        added = merged(self.new.all(), rest) if self.new.size else rest
        if added.size > max(SMALL_RUN, self.base.size // NEW_KEYS):
            former = self.base, self.new
            self._generation += 1
            self.base = Run.merged(self._path("base"), former[0], added)
            self.new = Run.write(self._path("new"), self.layout, 0, [])
            for run in former:
                run.remove()
        else:
            self.new.remove()
            self.new = Run.write(self._path("new"), self.layout, added.size, pieces(added))

    def seal(self, token: bytes) -> None:
        """Say which version of Spark's state the copy equals."""
        body = self.since.tobytes() + self.changes.tobytes()
        head = _HEADER.pack(_NO_TOKEN, self._generation, self.changes.shape[1], max(0, self.credit))
        os.pwrite(self._lock, head + body, 0)
        os.pwrite(self._lock, token, 0)

    def close(self) -> None:
        """Let other tasks have the copy."""
        if self._lock >= 0:
            os.close(self._lock)  # which unlocks it
            self._lock = -1

    @classmethod
    def _locked(cls, folder: Path, layout: Layout, blocks: int) -> LocalCopy | None:
        lock = os.open(folder / "header", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return cls(folder, layout, blocks, lock)

    def _load(self, token: bytes) -> bool:
        """Map the files, and tell if they have this token."""
        head = os.pread(self._lock, os.fstat(self._lock).st_size, 0)
        if len(head) < _HEADER.size or head[:16] != token:
            return False
        _, self._generation, changes, self.credit = _HEADER.unpack_from(head)
        if len(head) < _HEADER.size + 8 * (self.blocks + 2 * changes):
            return False
        self.since = np.frombuffer(head, np.int64, self.blocks, _HEADER.size).copy()
        self.changes = np.frombuffer(head, np.int64, 2 * changes, _HEADER.size + 8 * self.blocks)
        self.changes = self.changes.reshape(2, changes).copy()
        self.base, self.new = (Run.open(self._path(name), self.layout) for name in ("base", "new"))
        return True

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}-{self._generation}"

    def _sweep_files(self) -> None:
        """Remove files of former bases."""
        for path in self.folder.iterdir():
            if path.name != "header" and f"-{self._generation}." not in path.name:
                path.unlink(missing_ok=True)


class Run:
    """Records ordered by route, in files: routes, rows of the other columns, and the texts of keys that have some."""

    def __init__(self, path: Path, layout: Layout, size: int) -> None:
        self.path, self.layout, self.size = path, layout, size
        self.route: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.rows: NDArray[Any] = np.zeros(0, row_type(layout))
        self.text: pa.LargeStringArray | None = None
        if layout.text:
            self.text = pa.array([], pa.large_string())

    @classmethod
    def open(cls, path: Path, layout: Layout) -> Run:
        """Map the files of a run.

        Raises:
            OSError, ValueError: they are not there, or cut short.
        """
        size = (path.with_suffix(".route")).stat().st_size // 8
        run = cls(path, layout, size)
        if size == 0:
            return run
        run.route = np.memmap(path.with_suffix(".route"), np.uint64, "r+", shape=(size,))
        run.rows = np.memmap(path.with_suffix(".rows"), row_type(layout), "r+", shape=(size,))
        if layout.text:
            offsets = np.memmap(path.with_suffix(".offsets"), np.int64, "r", shape=(size + 1,))
            length = int(offsets[-1])
            data = np.memmap(path.with_suffix(".text"), np.uint8, "r", shape=(length,)) if length else b""
            run.text = pa.LargeStringArray.from_buffers(size, pa.py_buffer(offsets), pa.py_buffer(data))
        return run

    @classmethod
    def write(cls, path: Path, layout: Layout, size: int, parts: Iterable[Records]) -> Run:
        """Write the `size` records of parts, which follow each other by route, to files, and map them.

        Raises:
            OSError: the disk is full.
        """
        route, rows = _allocated(path, layout, size)

        def placed() -> Iterator[pa.Array | None]:
            at = 0
            for part in parts:
                into = slice(at, at + part.size)
                route[into] = part.arrays["route"]
                rows[into] = rows_of(layout, part)
                at += part.size
                yield part.text

        if layout.text:
            _write_texts(path, placed())
        else:
            for _ in placed():
                pass
        return cls.open(path, layout)

    @classmethod
    def merged(cls, path: Path, base: Run, new: Records) -> Run:
        """Write the records of a run and of other keys to files, and map them.

        Raises:
            OSError: the disk is full.
        """
        if base.size == 0:
            return cls.write(path, base.layout, new.size, pieces(new))
        size = base.size + new.size
        route, rows = _allocated(path, base.layout, size)
        at = np.searchsorted(base.route, new.arrays["route"]) + np.arange(new.size)
        held = np.ones(size, bool)
        held[at] = False
        route[at], route[held] = new.arrays["route"], base.route
        rows[at], rows[held] = rows_of(base.layout, new), base.rows
        if base.text is not None and new.text is not None:
            order = np.empty(size, np.int64)
            order[held], order[at] = np.arange(base.size), base.size + np.arange(new.size)
            joined = pa.concat_arrays([base.text, new.text.cast(pa.large_string())])
            _write_texts(path, [joined.take(pa.array(order))])
        return cls.open(path, base.layout)

    def find(self, route: NDArray[np.uint64]) -> Records:
        """Return the records of ordered routes."""
        if self.size == 0 or len(route) == 0:
            return self.at(np.zeros(0, np.int64))
        wanted = np.unique(route)
        first = np.searchsorted(self.route, wanted)
        inside = np.minimum(first, self.size - 1)
        first = first[(first < self.size) & (self.route[inside] == wanted)]
        if "check" not in (self.rows.dtype.names or ()):
            return self.at(first)
        last = np.searchsorted(self.route, self.route[first], "right")
        if (last - first == 1).all():
            return self.at(first)
        return self.at(np.concatenate([np.arange(*span) for span in zip(first, last, strict=True)]))

    def in_blocks(self, numbers: NDArray[np.int64], blocks: int) -> NDArray[np.int64]:
        """Return the positions of the records of blocks by their ordered numbers."""
        if self.size == 0 or len(numbers) == 0:
            return np.zeros(0, np.int64)
        if len(numbers) == blocks:
            return np.arange(self.size)
        start = np.searchsorted(self.route, _lowest_route(numbers, blocks))
        highest = _lowest_route(numbers + 1, blocks) - np.uint64(1)  # after the last block: 0 - 1, all bits
        stop = np.searchsorted(self.route, highest, "right")
        lengths = stop - start
        ends = np.cumsum(lengths)
        return np.arange(ends[-1]) + np.repeat(start - (ends - lengths), lengths)

    def all(self) -> Records:
        """Return all records."""
        return self.at(np.arange(self.size))

    def at(self, index: NDArray[np.int64]) -> Records:
        """Return the records at ordered positions."""
        rows = self.rows[index]
        arrays: dict[str, NDArray] = {"route": np.asarray(self.route[index])}
        for column in self.layout.columns[1:]:
            arrays[column.name] = np.ascontiguousarray(rows[column.name].T)
        text = None
        if self.text is not None:
            text = self.text.take(pa.array(index)).cast(pa.string())
        return Records(arrays, text)

    def replace(self, records: Records) -> Records:
        """Replace the records of keys that are here, and return those of the others; all are ordered by route."""
        if self.size == 0 or records.size == 0:
            return records
        arrays: dict[str, NDArray] = {"route": self.route}
        if "check" in records.arrays:
            arrays["check"] = self.rows["check"]
        at = match(Records(arrays, None), records)
        there = at >= 0
        if there.all():
            self.rows[at] = rows_of(self.layout, records)
            return records.slice(0, 0)
        self.rows[at[there]] = rows_of(self.layout, records)[there]
        return records.take(np.flatnonzero(~there))

    def remove(self) -> None:
        """Remove the files; what is mapped stays readable."""
        for path in self.path.parent.glob(f"{self.path.name}.*"):
            path.unlink(missing_ok=True)


def row_type(layout: Layout) -> np.dtype:
    """Return the type of a row: all columns of a record but its route, which is the first."""
    fields = [
        (c.name, c.dtype) if c.width is None else (c.name, c.dtype, (c.width,)) for c in layout.columns[1:]
    ]
    return np.dtype(fields, align=True)


def pieces(records: Records) -> Iterator[Records]:
    """Yield records in slices: rows are made of some at a time."""
    for start in range(0, records.size, PIECE):
        yield records.slice(start, start + PIECE)


def rows_of(layout: Layout, records: Records) -> NDArray[Any]:
    """Return records as rows (N,)."""
    rows = np.empty(records.size, row_type(layout))
    for column in layout.columns[1:]:
        rows[column.name] = records.arrays[column.name].T
    return rows


def remove_abandoned(copies: Path) -> None:
    """Remove the copies of queries that have long ended: the folder of each query has one folder a bucket."""
    with suppress(OSError):
        for query in copies.iterdir():
            headers = [path.stat().st_mtime for path in query.glob("*/header")]
            if headers and time.time() - max(headers) > ABANDONED_SECONDS:
                shutil.rmtree(query, ignore_errors=True)


def _lowest_route(numbers: NDArray[np.int64], blocks: int) -> NDArray[np.uint64]:
    """Return the lowest route of each block (`routing.block_of`); 0 for the number after the last block."""
    first = ((numbers.astype(np.uint64) << np.uint64(32)) + np.uint64(blocks - 1)) // np.uint64(blocks)
    return first << np.uint64(32)


def _allocated(path: Path, layout: Layout, size: int) -> tuple[NDArray[np.uint64], NDArray[Any]]:
    """Return new files of routes and rows, mapped."""
    found: list[NDArray[Any]] = []
    for suffix, kind in ((".route", np.dtype(np.uint64)), (".rows", row_type(layout))):
        with open(path.with_suffix(suffix), "wb") as file:
            _allocate(file, size * kind.itemsize)
        if size == 0:
            found.append(np.zeros(0, kind))
        else:
            found.append(np.memmap(path.with_suffix(suffix), kind, "r+", shape=(size,)))
    return found[0], found[1]


def _allocate(file: BinaryIO, size: int) -> None:
    """Give a file its blocks on the disk.

    Raises:
        OSError: the disk is full.
    """
    if size and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    zeros = bytes(1 << 20)
    for at in range(0, size, len(zeros)):
        file.write(zeros[: size - at])


def _write_texts(path: Path, texts: Iterable[pa.Array | None]) -> None:
    """Write texts as offsets and bytes."""
    start = 0
    with open(path.with_suffix(".offsets"), "wb") as offsets, open(path.with_suffix(".text"), "wb") as data:
        offsets.write(np.zeros(1, np.int64).tobytes())
        for text in texts:
            if text is None or len(text) == 0:
                continue
            large = text.cast(pa.large_string())
            _, bounds, content = large.buffers()
            ends = np.frombuffer(bounds, np.int64)[large.offset : large.offset + len(large) + 1]
            offsets.write((ends[1:] - ends[0] + start).tobytes())
            if content is not None:
                data.write(content[int(ends[0]) : int(ends[-1])])
            start += int(ends[-1] - ends[0])
