"""Which files have landed: the path and the content of each, from the Delta log.

The rows of a file are committed in the transaction `ingest-MODEL-SHA256`, whose number stands for the path; a commit of
several files has a transaction for each. So the
commit itself tells path and content, Delta keeps both for as long as the table, and no second record can disagree. The
same holds for the file's rejected rows in the quarantine table.

Earlier releases numbered each of these transactions 1. What they have landed is known by its content from the
transaction, and by its path from the commit's metadata, or, where the history has expired, from `_origin`.
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

from jobs.core.input_files import open_input, part_files
from jobs.storage.measurements_table import HISTORY_PREFIX
from jobs.storage.quarantine import TABLE
from jobs.storage.tables import measurements
from jobs.storage.warehouse import Tables

UNKNOWN = ""
"""Stands for a content that nothing describes any more."""
_NO_PATH = 1
"""The number of a transaction of a release that did not note paths."""


def transaction(model: str, path: str, digest: str) -> tuple[str, int]:
    """Return the transaction in which the rows of a file with this content are committed."""
    return f"ingest-{model}-{digest}", path_number(path)


def path_number(path: str) -> int:
    """Return the number that stands for a path: 60 bits of its hash, above the number of earlier releases."""
    return int(hashlib.sha256(path.encode()).hexdigest()[:15], 16) + _NO_PATH + 1


class FileState(NamedTuple):
    """A file as it was when its content was hashed."""

    path: str
    digest: str
    size: int
    changed: int

    @property
    def position(self) -> str:
        """The `position` of its rejected rows in the quarantine."""
        return json.dumps({"file": self.path, "sha256": self.digest})


def file_state(path: str, salt: bytes = b"") -> FileState:
    """Return the state of a file with the SHA-256 of its content, after `salt`."""
    size, changed = stamp_of(path)
    digest = hashlib.sha256(salt)
    for file in part_files(Path(path)):
        with open_input(file) as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    return FileState(path, digest.hexdigest(), size, changed)


def stamp_of(path: str) -> tuple[int, int]:
    """Return the bytes of a file, or of a folder's part files, and the time of its last change (ns)."""
    stats = [file.stat() for file in part_files(Path(path))]
    return sum(one.st_size for one in stats), max((one.st_mtime_ns for one in stats), default=0)


@dataclass(frozen=True, slots=True)
class Known:
    """What is committed of a file: of its present content, and of other contents that the same path had.

    landed, kept: the accepted rows, the rejected rows of this content are committed, maybe under another path.
    accepted, rejected: the other contents (SHA-256) of which the accepted rows, the rejected rows are committed.
    """

    landed: bool
    kept: bool
    accepted: frozenset[str]
    rejected: frozenset[str]

    @property
    def others(self) -> list[str]:
        """The other contents, sorted."""
        return sorted(self.accepted | self.rejected)


@dataclass
class Numbers:
    """The number of each content's transaction, in the measurements and in the quarantine."""

    accepted: dict[str, int]
    rejected: dict[str, int]

    @cached_property
    def by_path(self) -> tuple[dict[int, set[str]], dict[int, set[str]]]:
        """The contents with each number, in the measurements and in the quarantine."""
        return _inverted(self.accepted), _inverted(self.rejected)


@dataclass
class LandedFiles:
    """The files of one model that have landed."""

    warehouse: Tables
    model: str

    def numbers(self) -> Numbers:
        """Return what the two tables have committed now, to ask `known` of many files."""
        return Numbers(self._numbers(measurements(self.model)), self._numbers(TABLE))

    def known(self, path: str, digest: str, numbers: Numbers | None = None) -> Known:
        """Return what is committed of a file with this content: by `numbers`, or now.

        A content that has landed under another path is the same file, moved or copied.
        """
        numbers = self.numbers() if numbers is None else numbers
        landed, kept = digest in numbers.accepted, digest in numbers.rejected
        number = path_number(path)
        rows, bad = numbers.by_path
        accepted, rejected = rows.get(number, set()), bad.get(number, set())
        if _NO_PATH in rows:
            accepted = accepted | self._former_of_earlier_release(path, rows[_NO_PATH])
        if _NO_PATH in bad:
            rejected = rejected | self._rejected_by_earlier_release.get(path, set())
        return Known(landed, kept, frozenset(accepted - {digest}), frozenset(rejected - {digest}))

    def describe(self, digests: Sequence[str]) -> str:
        """Return contents in words, with what the history still says about them."""
        if not self._commits.keys() >= set(digests):
            self.__dict__.pop("_commits")  # read before these were landed
        return " and ".join(_described(one, self._commits.get(one, {})) for one in digests)

    def _numbers(self, table: str) -> dict[str, int]:
        """Return the number of each landed content's transaction."""
        of_file = re.compile(rf"ingest-{re.escape(self.model)}-([0-9a-f]{{64}})")
        found = self.warehouse.transactions(table)
        return {match[1]: number for name, number in found.items() if (match := of_file.fullmatch(name))}

    def _former_of_earlier_release(self, path: str, digests: set[str]) -> set[str]:
        known = {digest for digest in digests if digest in self._commits}
        found = {digest for digest in known if self._commits[digest]["file"] == path}
        if not found and known != digests and path in self._origins:
            return {UNKNOWN}
        return found

    @cached_property
    def _commits(self) -> dict[str, Mapping[str, Any]]:
        """What the history says about the contents that had landed when this was first asked."""
        table = measurements(self.model)
        # A commit of one file tells of it; one of several has a list of them.
        return {
            one["sha256"]: {**one, "version": entry.version}
            for entry in self.warehouse.log_entries(table)
            for one in entry.detail.get("files", [entry.detail])
            if "sha256" in one
        }

    @cached_property
    def _origins(self) -> set[str]:
        """The paths in `_origin`."""
        origins = self.warehouse.group_counts(measurements(self.model), ["_origin"])
        return {one["_origin"].removeprefix(HISTORY_PREFIX) for one in origins if one["_origin"]}

    @cached_property
    def _rejected_by_earlier_release(self) -> dict[str, set[str]]:
        """The contents of which the quarantine has rows, by path."""
        found: dict[str, set[str]] = {}
        for row in self.warehouse.group_counts(TABLE, ["model", "position", "reason"]):
            # Nothing of a file that is held as a whole has landed.
            if row["model"] == self.model and not row["reason"].startswith("file: "):
                detail = json.loads(row["position"] or "{}")
                if "sha256" in detail:
                    found.setdefault(detail["file"], set()).add(detail["sha256"])
        return found


def _inverted(numbers: Mapping[str, int]) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for digest, number in numbers.items():
        found.setdefault(number, set()).add(digest)
    return found


def _described(digest: str, commit: Mapping[str, Any]) -> str:
    if digest == UNKNOWN:
        return "a content that the history no longer has"
    parts = [f"{commit['bytes']:,} bytes" if "bytes" in commit else "", f"SHA-256 {digest[:16]}"]
    if commit:
        parts.append(f"{commit['rows']:,} rows in version {commit['version']}")
    return ", ".join(filter(None, parts))
