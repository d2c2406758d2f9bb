"""Find out from the Delta log which files have landed, with their paths and contents.

The accepted rows of a file are committed in the Delta transaction `ingest-MODEL-SHA256`; the number of the transaction
is a hash of the path. A commit of several files has a transaction for each file. Therefore the commit itself identifies
path and content, Delta stores both as long as the table exists, and no separate record can contradict the table. The
rejected rows of a file are committed to the quarantine table in the same way.

Earlier releases gave each transaction the number 1. For files that landed by these releases, the transaction identifies
only the content. Their path is in the metadata of the commit or, if the history has expired, in the column `_origin`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from jobs.core.input_files import list_part_files, open_input
from jobs.storage.measurements_table import HISTORY_PREFIX
from jobs.storage.quarantine import TABLE
from jobs.storage.tables import measurements
from jobs.storage.warehouse import Tables

UNKNOWN = ""
"""Placeholder for the hash of a content that is no longer in the history of the table."""
_NO_PATH = 1
"""Transaction number of releases that did not record paths."""


def build_file_transaction(model: str, path: str, digest: str) -> tuple[str, int]:
    """Return the Delta transaction (application, number) that commits a file with this content."""
    return f"ingest-{model}-{digest}", hash_path(path)


def hash_path(path: str) -> int:
    """Return the transaction number of a path: 60 bits of a hash, plus a constant so that the number exceeds 1."""
    return int(hashlib.sha256(path.encode()).hexdigest()[:15], 16) + _NO_PATH + 1


class FileState(NamedTuple):
    """State of a file at the time when its content was hashed.

    path: path of the file.
    digest: SHA-256 of the content.
    size: size in bytes.
    changed: modification time in nanoseconds.
    """

    path: str
    digest: str
    size: int
    changed: int

    @property
    def position(self) -> str:
        """Return the value of the column `position` for the file's rejected rows in the quarantine."""
        return json.dumps({"file": self.path, "sha256": self.digest})


def read_file_state(path: str, salt: bytes = b"") -> FileState:
    """Return the state of a file; the SHA-256 is that of `salt` followed by the content."""
    size, changed = stamp_of(path)
    digest = hashlib.sha256(salt)
    for file in list_part_files(Path(path)):
        with open_input(file) as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    return FileState(path, digest.hexdigest(), size, changed)


def stamp_of(path: str) -> tuple[int, int]:
    """Return the size in bytes and the modification time (ns) of a file or of the part files in a folder.

    The size of a folder is the sum of the sizes of its part files; its time is the newest of their times.
    """
    stats = [file.stat() for file in list_part_files(Path(path))]
    return sum(one.st_size for one in stats), max((one.st_mtime_ns for one in stats), default=0)


@dataclass(frozen=True, slots=True)
class Known:
    """Committed rows of a file, for its present content and for other contents of the same path.

    landed: whether the accepted rows of the present content are committed, for any path.
    kept: whether the rejected rows of the present content are committed, for any path.
    accepted: SHA-256 of the other contents whose accepted rows are committed.
    rejected: SHA-256 of the other contents whose rejected rows are committed.
    """

    landed: bool
    kept: bool
    accepted: frozenset[str]
    rejected: frozenset[str]

    @property
    def others(self) -> list[str]:
        """Return the SHA-256 of all other contents, sorted."""
        return sorted(self.accepted | self.rejected)


@dataclass
class TransactionNumbers:
    """Transaction number of each content, in the measurements table and in the quarantine."""

    accepted: dict[str, int]
    rejected: dict[str, int]

    @cached_property
    def by_path(self) -> tuple[dict[int, set[str]], dict[int, set[str]]]:
        """Return the contents of each transaction number, in the measurements table and in the quarantine."""
        return _invert_numbers(self.accepted), _invert_numbers(self.rejected)


@dataclass
class LandedFiles:
    """Files of one model that have landed."""

    warehouse: Tables
    model: str

    def numbers(self) -> TransactionNumbers:
        """Return the present transaction numbers of both tables; they can be used for many calls of `known`."""
        return TransactionNumbers(self._numbers(measurements(self.model)), self._numbers(TABLE))

    def known(self, path: str, digest: str, numbers: TransactionNumbers | None = None) -> Known:
        """Return the committed rows of a file.

        A content that has landed with another path counts as landed, because the file was moved or copied.

        Args:
            path: path of the file.
            digest: SHA-256 of the content.
            numbers: transaction numbers. None means the present numbers.
        """
        numbers = self.numbers() if numbers is None else numbers
        landed, kept = digest in numbers.accepted, digest in numbers.rejected
        number = hash_path(path)
        rows, bad = numbers.by_path
        accepted, rejected = rows.get(number, set()), bad.get(number, set())
        if _NO_PATH in rows:
            accepted = accepted | self._find_former_digests(path, rows[_NO_PATH])
        if _NO_PATH in bad:
            rejected = rejected | self._rejected_by_earlier_release.get(path, set())
        return Known(landed, kept, frozenset(accepted - {digest}), frozenset(rejected - {digest}))

    def describe(self, digests: Sequence[str]) -> str:
        """Return a description of contents in words, with the details that are still in the history of the table."""
        if not self._commits.keys() >= set(digests):
            self.__dict__.pop("_commits")  # a commit is newer than the cache
        return " and ".join(_describe_landing(one, self._commits.get(one, {})) for one in digests)

    def _numbers(self, table: str) -> dict[str, int]:
        """Return the transaction number of each landed content in a table."""
        of_file = re.compile(rf"ingest-{re.escape(self.model)}-([0-9a-f]{{64}})")
        found = self.warehouse.transactions(table)
        return {match[1]: number for name, number in found.items() if (match := of_file.fullmatch(name))}

    def _find_former_digests(self, path: str, digests: set[str]) -> set[str]:
        known = {digest for digest in digests if digest in self._commits}
        found = {digest for digest in known if self._commits[digest]["file"] == path}
        if not found and known != digests and path in self._origins:
            return {UNKNOWN}
        return found

    @cached_property
    def _commits(self) -> dict[str, Mapping[str, Any]]:
        """Return the commit metadata by content; the result is cached at the first call."""
        table = measurements(self.model)
        # The metadata of a commit describe one file directly, and several files in the list `files`.
        return {
            one["sha256"]: {**one, "version": entry.version}
            for entry in self.warehouse.read_log_entries(table)
            for one in entry.detail.get("files", [entry.detail])
            if "sha256" in one
        }

    @cached_property
    def _origins(self) -> set[str]:
        """Return the paths in the column `_origin` of the measurements table."""
        origins = self.warehouse.group_counts(measurements(self.model), ["_origin"])
        return {one["_origin"].removeprefix(HISTORY_PREFIX) for one in origins if one["_origin"]}

    @cached_property
    def _rejected_by_earlier_release(self) -> dict[str, set[str]]:
        """Return the contents whose rows are in the quarantine, by path."""
        found: dict[str, set[str]] = {}
        for row in self.warehouse.group_counts(TABLE, ["model", "position", "reason"]):
            # A row for a whole quarantined file is skipped, because no row of this file has landed.
            if row["model"] == self.model and not row["reason"].startswith("file: "):
                detail = json.loads(row["position"] or "{}")
                if "sha256" in detail:
                    found.setdefault(detail["file"], set()).add(detail["sha256"])
        return found


def _invert_numbers(numbers: Mapping[str, int]) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for digest, number in numbers.items():
        found.setdefault(number, set()).add(digest)
    return found


def _describe_landing(digest: str, commit: Mapping[str, Any]) -> str:
    if digest == UNKNOWN:
        return "a content that the history no longer has"
    parts = [f"{commit['bytes']:,} bytes" if "bytes" in commit else "", f"SHA-256 {digest[:16]}"]
    if commit:
        parts.append(f"{commit['rows']:,} rows in version {commit['version']}")
    return ", ".join(filter(None, parts))
