"""A copy of a bucket's states in local files, so that a micro-batch reads the states of its own keys alone.

Spark's state is the truth, and the copy is a function of it: it counts only if its token is the one in the mark of
Spark's state (`changes`). A copy that is lost, stale, of another machine, damaged, or that a task left half way costs
the time to make it anew and nothing else:

- The token is erased before anything changes, and written last. A task that dies between leaves a copy without one.
- States that differ have tokens that differ, so a copy to which a failed or second attempt of a task wrote counts only
  if Spark's state was given the same values.
- One task at a time has the copy, by a lock on its file.
- What is read is compared with its checksum: that of the header, and those of the runs (`sorted_run`).

Records are kept in two runs, each ordered by route: `base`, and `new` with the keys that came since the base was
written, some per cent of it. They are arrays that are mapped into memory, so that only the pages of the wanted keys are
touched. Files are allocated before they are mapped: a full disk is an error, not a signal.
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

from jobs.encoding.packets import Layout, Records, merged
from jobs.encoding.sorted_run import Run, pieces
from jobs.supervision.driver_identity import started_at

CLEAN = np.iinfo(np.int64).max
"""In `since`: the block has all that changed."""
NEW_KEYS = 32
"""One in so many keys may be in the run of new keys; then it becomes part of the base."""
SMALL_RUN = 4096
"""A run of new keys up to this size is left as it is."""
ABANDONED_SECONDS = 24 * 3600.0
"""Copies that were not used for so long are removed: their queries have ended."""

_HEADER = struct.Struct("<16sQQQQQQ")  # token, checksum, generation, keys of base and new, changes, credit
_SUMMED = 24
"""The checksum is that of the header's bytes from here on, which follow token and checksum."""
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
            (folder.parent.parent / "owner").write_text(_executor())
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
        """Return the records (K) of ordered routes, ordered by route.

        Raises:
            Damaged: the copy is of no use any more.
        """
        base, new = self.base.find(route), self.new.find(route)
        if new.size == 0:
            return base
        return merged(base, new) if base.size else new

    def of_blocks(self, numbers: NDArray[np.int64]) -> Records:
        """Return the records of blocks by their ordered numbers, ordered by route.

        Raises:
            Damaged: the copy is of no use any more.
        """
        runs = (self.base, self.new) if self.new.size else (self.base,)
        found = [run.at(run.in_blocks(numbers, self.blocks)) for run in runs]
        return found[0] if len(found) == 1 else merged(*found)

    def begin(self) -> None:
        """Erase the token: from here on the copy counts only once it is sealed."""
        os.pwrite(self._lock, _NO_TOKEN, 0)

    def update(self, records: Records) -> None:
        """Replace or add the records of some keys, ordered by route.

        Raises:
            OSError: the disk is full, or the copy is damaged. It is of no use any more.
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
        sizes = self.base.size, self.new.size, self.changes.shape[1], max(0, self.credit)
        head = _HEADER.pack(_NO_TOKEN, 0, self._generation, *sizes)
        body = head[_SUMMED:] + self.since.tobytes() + self.changes.tobytes()
        os.pwrite(self._lock, _NO_TOKEN + crc32(body).to_bytes(8, "little") + body, 0)
        os.pwrite(self._lock, token, 0)

    def close(self) -> None:
        """Let other tasks have the copy."""
        if self._lock >= 0:
            os.close(self._lock)  # which unlocks it
            self._lock = -1

    @classmethod
    def _locked(cls, folder: Path, layout: Layout, blocks: int) -> LocalCopy | None:
        lock = _lock(folder / "header")
        return None if lock is None else cls(folder, layout, blocks, lock)

    def _load(self, token: bytes) -> bool:
        """Map the files, and tell if they have this token."""
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
        self.base, self.new = (Run.open(self._path(name), self.layout, size) for name, size in named)
        return True

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}-{self._generation}"

    def _sweep_files(self) -> None:
        """Remove files of former bases."""
        for path in self.folder.iterdir():
            if path.name != "header" and f"-{self._generation}." not in path.name:
                path.unlink(missing_ok=True)


def remove_abandoned(copies: Path) -> None:
    """Remove an executor's copies of queries that have long ended, and the copies of executors that were killed.

    copies: the executor's folder, which has a folder a query, and in it one a bucket. Those of other executors have the
        same name in folders beside the one that it is in.
    """
    with suppress(OSError):
        for others in copies.parent.parent.glob(f"*/{copies.name}"):
            with suppress(OSError):
                if _is_ours(others.parent) and _is_ours(others):
                    _remove_ended(others, others != copies and _has_ended(others))


def _remove_ended(copies: Path, executor: bool) -> None:
    """Remove all copies of an executor that has ended, or those of queries that have long ended."""
    if executor:
        _remove(copies, list(copies.glob("*/*/header")))
        return
    for query in copies.iterdir():
        headers = list(query.glob("*/header"))
        used = [path.stat().st_mtime for path in headers]
        if headers and time.time() - max(used) > ABANDONED_SECONDS:
            _remove(query, headers)


def _remove(folder: Path, headers: list[Path]) -> None:
    """Remove a folder of copies, unless a task has one of them."""
    with ExitStack() as locks:
        for header in headers:
            lock = _lock(header)
            if lock is None:
                return
            locks.callback(os.close, lock)
        shutil.rmtree(folder, ignore_errors=True)


def _lock(header: Path) -> int | None:
    """Return the open header of a copy, locked until it is closed; None if another task has it."""
    lock = os.open(header, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(header)):
            return lock
    except (BlockingIOError, FileNotFoundError):  # not found: removed before it was locked
        pass
    os.close(lock)
    return None


def _is_ours(folder: Path) -> bool:
    """Tell if a folder is one that another user could not have put there, to have us remove something else."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _executor() -> str:
    """Return the identity of the process that started this one, which ends with its executor."""
    parent = os.getppid()
    return json.dumps([*_process_numbers(), parent, started_at(parent)])


def _has_ended(copies: Path) -> bool:
    """Tell if the executor of some copies is known to have ended. Processes of other containers are never known."""
    try:
        *numbers, parent, started = json.loads((copies / "owner").read_text())
        return len(numbers) > 0 and numbers == _process_numbers() and started_at(parent) != started
    except (OSError, ValueError, TypeError):  # half written, or something else
        return False


def _process_numbers() -> list[str]:
    """Return what tells the process numbers seen here from others: the start of the machine, and their namespace."""
    try:
        return [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    except OSError:
        return []
