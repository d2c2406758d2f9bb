"""A copy of a bucket's states in local files, so that a micro-batch reads only the states of its keys.

Spark's state is authoritative, and the copy is a function of it. The copy is valid only if its token equals the token
in the mark of Spark's state (`changes`). If a copy is lost, stale, damaged, incomplete or from another machine, it only
takes time to make the copy anew:

- The token is erased before any change, and written last. A task that ends in between leaves a copy without a token.
- Different states have different tokens. So the copy of a failed or second attempt of a task is valid only if Spark's
  state has the same values.
- A lock on the file of the copy gives the copy to one task at a time.
- Each read is compared with a checksum: the header with its own, and the runs with theirs (`sorted_run`).

The records are in two runs, each ordered by route: `base`, and `new` with the keys that came after the base was written
(a few per cent of its number). The runs are memory-mapped arrays, so that only the pages of the wanted keys are read.
Files are allocated before they are mapped, so that a full disk raises an error instead of a signal.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import struct
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from jobs.core.processes import read_start_time
from jobs.state.encoding.packets import Layout, Records, merge_records
from jobs.state.encoding.sorted_run import SortedRun, split_records

CLEAN = np.iinfo(np.int64).max
"""Value in `since` of a block that includes all changes."""
NEW_KEYS = 32
"""Up to 1/`NEW_KEYS` of the keys may be in the run of new keys; a larger run is merged into the base."""
SMALL_RUN = 4096
"""A run of new keys up to this size is not merged into the base."""
ABANDONED_SECONDS = 24 * 3600.0
"""Age at which unused copies are removed, because their queries have ended."""

_HEADER = struct.Struct("<16sQQQQQQ")  # token, checksum, generation, keys of base and new, changes, credit
_SUMMED = 24
"""Offset in the header after the token and the checksum; the checksum covers the bytes from this offset on."""
_NO_TOKEN = bytes(16)


class LocalCopy:
    """The states of a bucket in files of one folder.

    since: (blocks,) number of the oldest change that each block lacks, or `CLEAN`
    changes: (2, C) the numbers of the changes in Spark's state, in order, and the number of records in each change
    credit: number of block records that may still be written (`key_states`)
    """

    def __init__(self, folder: Path, layout: Layout, blocks: int, lock: int) -> None:
        self.folder, self.layout, self.blocks, self._lock = folder, layout, blocks, lock
        self._generation = 0
        self.base = self.new = SortedRun(folder / "none", layout, 0)
        self.since: NDArray[np.int64] = np.full(blocks, CLEAN)
        self.changes: NDArray[np.int64] = np.zeros((2, 0), np.int64)
        self.credit = 0

    @classmethod
    def open(cls, folder: Path, layout: Layout, blocks: int, token: bytes) -> LocalCopy | None:
        """Open the copy in a folder; return None if it lacks this token, or if another task has locked it."""
        if token == _NO_TOKEN or not (folder / "header").exists():
            return None
        copy = cls._open_locked(folder, layout, blocks)
        if copy is None:
            return None
        try:
            if copy._load(token):
                return copy
        except (OSError, ValueError):
            pass  # files are truncated or missing, so the copy counts as missing
        copy.close()
        return None

    @classmethod
    def create(
        cls, folder: Path, layout: Layout, blocks: int, keys: int, parts: Iterable[Records]
    ) -> LocalCopy | None:
        """Make a copy with the records of `keys` keys; the parts are ordered by route.

        Return None if another task has locked the copy, or the disk is full.
        """
        try:
            remove_abandoned(folder.parent.parent)
            folder.mkdir(parents=True, exist_ok=True)
            (folder.parent.parent / "owner").write_text(_identify_executor())
            copy = cls._open_locked(folder, layout, blocks)
        except OSError:
            return None
        if copy is None:
            return None
        try:
            copy.begin()
            copy._generation = time.time_ns()
            copy.base = SortedRun.write(copy._path("base"), layout, keys, parts)
            copy.new = SortedRun.write(copy._path("new"), layout, 0, [])
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
        """Return the records (K) of the given routes; the routes and the records are ordered by route.

        Raises:
            Damaged: the copy is damaged and cannot be used any more.
        """
        base, new = self.base.find(route), self.new.find(route)
        if new.size == 0:
            return base
        return merge_records(base, new) if base.size else new

    def read_blocks(self, numbers: NDArray[np.int64]) -> Records:
        """Return the records, ordered by route, of the blocks with these ordered numbers.

        Raises:
            Damaged: the copy is damaged and cannot be used any more.
        """
        runs = (self.base, self.new) if self.new.size else (self.base,)
        found = [run.at(run.find_in_blocks(numbers, self.blocks)) for run in runs]
        return found[0] if len(found) == 1 else merge_records(*found)

    def begin(self) -> None:
        """Erase the token, so that the copy is invalid until `seal`."""
        os.pwrite(self._lock, _NO_TOKEN, 0)

    def update(self, records: Records) -> None:
        """Replace or add the records of some keys, which are ordered by route.

        Raises:
            OSError: the disk is full, or the copy is damaged; the copy cannot be used any more.
        """
        rest = self.base.replace(records)
        if rest.size:
            rest = self.new.replace(rest)
        if rest.size == 0:
            return
        added = merge_records(self.new.all(), rest) if self.new.size else rest
        if added.size > max(SMALL_RUN, self.base.size // NEW_KEYS):
            former = self.base, self.new
            self._generation += 1
            self.base = SortedRun.write_merged(self._path("base"), former[0], added)
            self.new = SortedRun.write(self._path("new"), self.layout, 0, [])
            for run in former:
                run.remove()
        else:
            self.new.remove()
            self.new = SortedRun.write(self._path("new"), self.layout, added.size, split_records(added))

    def seal(self, token: bytes) -> None:
        """Write the token of the version of Spark's state to which the copy is equal."""
        sizes = self.base.size, self.new.size, self.changes.shape[1], max(0, self.credit)
        head = _HEADER.pack(_NO_TOKEN, 0, self._generation, *sizes)
        body = head[_SUMMED:] + self.since.tobytes() + self.changes.tobytes()
        os.pwrite(self._lock, _NO_TOKEN + crc32(body).to_bytes(8, "little") + body, 0)
        os.pwrite(self._lock, token, 0)

    def close(self) -> None:
        """Release the copy for other tasks."""
        if self._lock >= 0:
            os.close(self._lock)  # closing unlocks the file
            self._lock = -1

    @classmethod
    def _open_locked(cls, folder: Path, layout: Layout, blocks: int) -> LocalCopy | None:
        lock = _lock(folder / "header")
        return None if lock is None else cls(folder, layout, blocks, lock)

    def _load(self, token: bytes) -> bool:
        """Map the files; return whether their token equals this token."""
        head = os.pread(self._lock, os.fstat(self._lock).st_size, 0)
        if len(head) < _HEADER.size or head[:16] != token:
            return False
        _, checksum, self._generation, *sizes, changes, self.credit = _HEADER.unpack_from(head)
        body = head[_SUMMED : _HEADER.size + 8 * (self.blocks + 2 * changes)]
        if checksum != crc32(body):
            return False
        self.since = np.frombuffer(head, np.int64, self.blocks, _HEADER.size).copy()
        self.changes = np.frombuffer(head, np.int64, 2 * changes, _HEADER.size + 8 * self.blocks)
        self.changes = self.changes.reshape(2, changes).copy()
        named = zip(("base", "new"), sizes, strict=True)
        self.base, self.new = (SortedRun.open(self._path(name), self.layout, size) for name, size in named)
        return True

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}-{self._generation}"

    def _sweep_files(self) -> None:
        """Remove files of former bases."""
        for path in self.folder.iterdir():
            if path.name != "header" and f"-{self._generation}." not in path.name:
                path.unlink(missing_ok=True)


def remove_abandoned(copies: Path) -> None:
    """Remove an executor's copies of queries that ended long ago, and the copies of executors that were killed.

    copies: the executor's folder, which has a folder per query with a folder per bucket. Folders of other executors
        have the same name, below siblings of the parent folder of `copies`.
    """
    with suppress(OSError):
        for others in copies.parent.parent.glob(f"*/{copies.name}"):
            with suppress(OSError):
                if _is_ours(others.parent) and _is_ours(others):
                    _remove_ended(others, others != copies and _has_ended(others))


def _remove_ended(copies: Path, executor: bool) -> None:
    """Remove all copies of an executor that has ended, or only the copies of queries that ended long ago."""
    if executor:
        _remove(copies, list(copies.glob("*/*/header")))
        return
    for query in copies.iterdir():
        headers = list(query.glob("*/header"))
        used = [path.stat().st_mtime for path in headers]
        if headers and time.time() - max(used) > ABANDONED_SECONDS:
            _remove(query, headers)


def _remove(folder: Path, headers: list[Path]) -> None:
    """Remove a folder of copies, unless a task has locked one of them."""
    with ExitStack() as locks:
        for header in headers:
            lock = _lock(header)
            if lock is None:
                return
            locks.callback(os.close, lock)
        shutil.rmtree(folder, ignore_errors=True)


def _lock(header: Path) -> int | None:
    """Open and lock the header of a copy; closing it unlocks it. Return None if another task has locked it."""
    lock = os.open(header, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(header)):
            return lock
    except (BlockingIOError, FileNotFoundError):  # a missing file was removed before it was locked
        pass
    os.close(lock)
    return None


def _is_ours(folder: Path) -> bool:
    """Return whether no other user can have created a folder in order to make this process remove other files."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _identify_executor() -> str:
    """Return the identity of the parent process, which ends with its executor."""
    parent = os.getppid()
    return json.dumps([*_read_process_scope(), parent, read_start_time(parent)])


def _has_ended(copies: Path) -> bool:
    """Return whether the executor of a folder of copies has certainly ended; in another container, this is unknown."""
    try:
        *numbers, parent, started = json.loads((copies / "owner").read_text())
        return len(numbers) > 0 and numbers == _read_process_scope() and read_start_time(parent) != started
    except (OSError, ValueError, TypeError):  # the file is incomplete, or has other content
        return False


def _read_process_scope() -> list[str]:
    """Return the scope in which process numbers are unique: the boot of the machine, and the process namespace."""
    try:
        return [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    except OSError:
        return []
