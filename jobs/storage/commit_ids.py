"""Which commit a version of a table is: a number says it only as long as the table is never put back from a backup.

A table that was put back and has grown again has other commits under the same numbers, and still the same id. Delta
gives each commit an id of its own, which is in the first line of its file in the log; a commit that another tool wrote
without one is known by a digest of its file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from jobs.storage.positions import DELTA
from jobs.storage.warehouse import Tables


class CommitMark(NamedTuple):
    """What tells one commit from every other: its id; and when it was made, None if it does not say."""

    id: str
    at: datetime | None


def commit_mark(warehouse: Tables, table: str, version: int) -> CommitMark | None:
    """Return the mark of a version's commit, or None if the log does not have it: not yet, or no longer."""
    info = warehouse.commit_info(table, version)
    if info is None:
        return None
    at = info.get("timestamp")
    when = datetime.fromtimestamp(at / 1000, UTC) if isinstance(at, int) else None
    if info.get("txnId"):
        return CommitMark(str(info["txnId"]), when)
    content = warehouse.files(f"{table}/_delta_log").read(f"{version:020d}.json")
    return None if content is None else CommitMark(f"sha256:{hashlib.sha256(content).hexdigest()}", when)


def commit_id(warehouse: Tables, table: str, version: int) -> str | None:
    """Return the id of a version's commit, or None if the log does not have it."""
    mark = commit_mark(warehouse, table, version)
    return None if mark is None else mark.id


def in_table(warehouse: Tables, position: Mapping[str, Any]) -> bool:
    """Tell if the table has a position now, as far as both tell; a position in a topic counts."""
    if position["source"] != DELTA:
        return True
    table, version = position["table"], int(position["version"])
    if version > warehouse.latest_version(table):
        return False
    stored = position.get("commit")
    return stored is None or commit_id(warehouse, table, version) in (None, stored)
