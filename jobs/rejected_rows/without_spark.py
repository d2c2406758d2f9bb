"""Count and show the rejected rows of a local warehouse without Spark, as `rows` does with it."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from jobs.rejected_rows.rows import COLUMNS
from jobs.storage.warehouse import Tables
from jobs.warehouse.quarantine import DISCARDED, HELD, REPLAYED, REPLAYING, TABLE, Choice


def count_by_reason(tables: Tables, model: str, choice: Choice) -> list[dict[str, Any]]:
    """Return for each reason how many rows have each status, and when the first and the last was quarantined."""
    found: dict[str, dict[str, Any]] = {}
    for row in _chosen(tables, model, choice, ("id", "reason", "status", "quarantined_at")):
        at: datetime = row["quarantined_at"]
        nothing = {
            "reason": row["reason"],
            HELD: 0,
            REPLAYING: 0,
            REPLAYED: 0,
            DISCARDED: 0,
            "first": at,
            "last": at,
        }
        one = found.setdefault(row["reason"], nothing)
        one[row["status"] or HELD] += 1
        one["first"], one["last"] = min(one["first"], at), max(one["last"], at)
    return sorted(found.values(), key=lambda one: (-one[HELD], one["reason"]))


def held_rows(tables: Tables, model: str, choice: Choice, limit: int) -> list[dict[str, Any]] | None:
    """Return the oldest held rows; None if the table has rows of an earlier release, without an id."""
    rows = [row for row in _chosen(tables, model, choice, (*COLUMNS, "status")) if row["status"] is None]
    if any(row["id"] is None for row in rows):
        return None
    rows.sort(key=lambda row: (row["quarantined_at"], row["reason"], row["id"]))
    return [{name: row[name] for name in COLUMNS} for row in rows[:limit]]


def _chosen(tables: Tables, model: str, choice: Choice, columns: tuple[str, ...]) -> list[dict[str, Any]]:
    since = choice.earliest()
    return [
        row
        for row in tables.rows(TABLE, {"model": model}, ("model", *columns))
        if (choice.reason is None or row["reason"].startswith(choice.reason))
        and (since is None or row["quarantined_at"] >= since)
        and (not choice.ids or row["id"] in choice.ids)
    ]
