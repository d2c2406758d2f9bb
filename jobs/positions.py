"""Find positions in a model's measurements: a Delta version, up to which and including all rows are reflected."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, NamedTuple

from jobs.errors import UserError
from jobs.tables import Warehouse
from jobs.times import TimeParser

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Cut(NamedTuple):
    """A position, and the event time (microseconds) before which rows count; None: all up to the position count."""

    version: int
    before: int | None


class Commit(NamedTuple):
    """One version of a measurements table: the event times of what it added; None where it added no rows.

    known is False where another tool wrote it, so that what it added is not known.
    """

    version: int
    first: int | None
    last: int | None
    known: bool


def parse_time(text: str, option: str) -> int:
    """Return the microseconds of an ISO 8601 time given on the command line; without an offset it is UTC.

    Raises:
        UserError: it is no time.
    """
    value = TimeParser(None, UTC)(text)
    if value is None:
        raise UserError(f"{option}: '{text}' is not a time; write it as 2013-10-01 or 2013-10-01T00:00:00Z")
    return value


def check_version(warehouse: Warehouse, table: str, version: int | None) -> int:
    """Return `version`, or the newest one.

    Raises:
        UserError: the table has no such version.
    """
    latest = warehouse.latest_version(table)
    if version is None:
        return latest
    if not 0 <= version <= latest:
        raise UserError(f"--to-version {version}: {table} has versions 0 to {latest}")
    return version


def commits(warehouse: Warehouse, table: str) -> list[Commit]:
    """Return a measurements table's versions, oldest first."""
    from delta.tables import DeltaTable

    history = DeltaTable.forPath(warehouse.spark, warehouse.path(table)).history()
    rows = history.select("version", "operation", "userMetadata").orderBy("version").collect()
    return [_commit(int(row["version"]), row["operation"], row["userMetadata"]) for row in rows]


def cut_at(warehouse: Warehouse, table: str, latest: int, before: int) -> Cut:
    """Find the position of "all that happened before a time".

    Where one version has all rows before the time and none after it, that version is the position, and a stream may
    go on behind it. Otherwise the position is the newest version and the cut stays: such a snapshot is history only,
    for its position says nothing of the rows that were cut away.
    """
    exact = 0
    past = True
    for commit in commits(warehouse, table):
        if commit.version > latest:
            break
        if not commit.known:
            return Cut(latest, before)
        if commit.first is None or commit.last is None:
            exact = commit.version if past else exact
            continue
        if commit.last < before and past:
            exact = commit.version
        elif commit.first >= before:
            past = False
        else:
            return Cut(latest, before)
    return Cut(exact, None)


def to_datetime(micros: int | None) -> datetime | None:
    """Return microseconds since 1970 as a time in UTC, exact to the microsecond."""
    from datetime import timedelta

    return None if micros is None else EPOCH + timedelta(microseconds=micros)


def delta_position(table: str, version: int) -> dict[str, Any]:
    """Return the position as a manifest says it."""
    return {"source": "delta", "table": table, "version": version}


def _commit(version: int, operation: str, metadata: str | None) -> Commit:
    if metadata:
        detail = json.loads(metadata)
        return Commit(version, detail["min_time"], detail["max_time"], True)
    return Commit(
        version, None, None, operation not in ("WRITE", "STREAMING UPDATE", "MERGE", "UPDATE", "DELETE")
    )
