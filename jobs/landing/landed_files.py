"""Find which files have landed from the Delta log: the path and the content of each.

The rows of a file are committed in the Delta transaction `ingest-MODEL-SHA256`; its number stands for the path. A
commit of several files has a transaction for each file. So the commit itself identifies path and content. Delta keeps
both as long as the table exists, and no second record can disagree. The same holds for the file's rejected rows in the
quarantine table.

Earlier releases gave each of these transactions the number 1. For files that they landed, the transaction identifies
the content; the path is in the commit's metadata or, where the history has expired, in `_origin`.
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
"""Placeholder for a content that the table's history no longer has."""
_NO_PATH = 1
"""Number of the transactions of releases that did not record paths."""


def build_file_transaction(model: str, path: str, digest: str) -> tuple[str, int]:
    """Return the Delta transaction (application, number) that commits a file with this content."""
    return f"ingest-{model}-{digest}", hash_path(path)


def hash_path(path: str) -> int:
    """Return the transaction number of a path: 60 bits of its hash, greater than the number of earlier releases."""
    return int(hashlib.sha256(path.encode()).hexdigest()[:15], 16) + _NO_PATH + 1


class FileState(NamedTuple):
    """A file as it was when its content was hashed."""

    path: str
    digest: str
    size: int
    changed: int

    @property
    def position(self) -> str:
        """Return the `position` of the file's rejected rows in the quarantine."""
        return json.dumps({"file": self.path, "sha256": self.digest})


def read_file_state(path: str, salt: bytes = b"") -> FileState:
    """Return the state of a file with the SHA-256 of its content, after `salt`."""
    size, changed = stamp_of(path)
    digest = hashlib.sha256(salt)
    for file in list_part_files(Path(path)):
        with open_input(file) as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    return FileState(path, digest.hexdigest(), size, changed)


def stamp_of(path: str) -> tuple[int, int]:
    """Return the size in bytes of a file, or of a folder's part files, and its modification time (ns)."""
    stats = [file.stat() for file in list_part_files(Path(path))]
    return sum(one.st_size for one in stats), max((one.st_mtime_ns for one in stats), default=0)


@dataclass(frozen=True, slots=True)
class Known:
    """Which rows of a file are committed, for its present content and for earlier contents of the same path.

    landed, kept: whether this content's accepted (landed) and rejected (kept) rows are committed, under any path.
    accepted, rejected: the other contents (SHA-256) whose accepted and whose rejected rows are committed.
    """

    landed: bool
    kept: bool
    accepted: frozenset[str]
    rejected: frozenset[str]

    @property
    def others(self) -> list[str]:
        """Return the other contents, sorted."""
        return sorted(self.accepted | self.rejected)


@dataclass
class TransactionNumbers:
    """Transaction number of each content, in the measurements and in the quarantine."""

    accepted: dict[str, int]
    rejected: dict[str, int]

    @cached_property
    def by_path(self) -> tuple[dict[int, set[str]], dict[int, set[str]]]:
        """Return the contents of each transaction number, in the measurements and in the quarantine."""
        return _invert_numbers(self.accepted), _invert_numbers(self.rejected)


@dataclass
class LandedFiles:
    """The files of one model that have landed."""

    warehouse: Tables
    model: str

    def numbers(self) -> TransactionNumbers:
        """Return the transaction numbers of both tables as of now, for many calls of `known`."""
        return TransactionNumbers(self._numbers(measurements(self.model)), self._numbers(TABLE))

    def known(self, path: str, digest: str, numbers: TransactionNumbers | None = None) -> Known:
        """Return which rows of a file with this content are committed, as of `numbers` or of now.

        A content that has landed under another path is the same file, moved or copied.
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
        """Describe contents in words, with the details that the table's history still has."""
        if not self._commits.keys() >= set(digests):
            self.__dict__.pop("_commits")  # the cache is older than these commits
        return " and ".join(_describe_landing(one, self._commits.get(one, {})) for one in digests)

    def _numbers(self, table: str) -> dict[str, int]:
        """Return the number of each landed content's transaction."""
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
        """Return commit metadata by content, as of the first call."""
        table = measurements(self.model)
        # A commit of one file describes it directly; a commit of several files has a list.
        return {
            one["sha256"]: {**one, "version": entry.version}
            for entry in self.warehouse.read_log_entries(table)
            for one in entry.detail.get("files", [entry.detail])
            if "sha256" in one
        }

    @cached_property
    def _origins(self) -> set[str]:
        """Return the paths in `_origin`."""
        origins = self.warehouse.group_counts(measurements(self.model), ["_origin"])
        return {one["_origin"].removeprefix(HISTORY_PREFIX) for one in origins if one["_origin"]}

    @cached_property
    def _rejected_by_earlier_release(self) -> dict[str, set[str]]:
        """Return the contents that have rows in the quarantine, by path."""
        found: dict[str, set[str]] = {}
        for row in self.warehouse.group_counts(TABLE, ["model", "position", "reason"]):
            # A file that is quarantined as a whole has no landed rows.
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
