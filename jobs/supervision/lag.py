"""The lag of a stream behind its source, from the source's metadata, without a Spark job."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from jobs.storage.tables import measurements
from jobs.storage.warehouse import Tables
from jobs.supervision.progress import Lag, count_offsets_behind

MOST_VERSIONS = 1000
"""Maximum number of versions per measurement; a larger lag is complete after several measurements."""

Reader = Callable[[int], str | None]
"""Returns the text of a version's file in the Delta log, or None if the version does not exist."""


class TableLag:
    """Counts the rows of table versions that a stream has not read; reads each version's log file once."""

    def __init__(self, read: Reader, now: Callable[[], float] = time.time, most: int = MOST_VERSIONS) -> None:
        self._read, self._now, self._most = read, now, most
        self._known: dict[int, tuple[int, float]] = {}

    def measure(self, done: int) -> Lag:
        """Return the lag of a stream that has read all versions up to `done`."""
        for version in [one for one in self._known if one <= done]:
            del self._known[version]
        version = max(self._known, default=done) + 1
        for _ in range(self._most):
            text = self._read(version)
            if text is None:
                break
            self._known[version] = _count_added_rows(text)
            version += 1
        waiting = [(rows, landed) for rows, landed in self._known.values() if rows]
        if not waiting:
            return Lag(0, 0.0)
        return Lag(sum(rows for rows, _ in waiting), max(0.0, self._now() - min(at for _, at in waiting)))


def _count_added_rows(log: str) -> tuple[int, float]:
    """Return the number of rows that a version added, and its commit time (seconds since 1970)."""
    for line in log.splitlines():
        action = json.loads(line) if line.strip() else {}
        commit = action.get("commitInfo")
        if commit is not None:
            rows = (commit.get("operationMetrics") or {}).get("numOutputRows") or 0
            return int(rows) if commit.get("operation") == "WRITE" else 0, float(commit["timestamp"]) / 1000
    return 0, 0.0


def measure_table_lag(warehouse: Tables, table: str, done: int) -> Lag:
    """Return the lag of a stream that has read all versions of a table up to `done`."""
    return TableLag(_build_reader(warehouse, table), most=1_000_000).measure(done)


def build_lag_meter(warehouse: Tables, model: str) -> Callable[[dict[str, Any]], Lag]:
    """Return a function that computes a stream's lag behind its table or topic from the source's progress."""
    table = TableLag(_build_reader(warehouse, measurements(model)))

    def lag(source: dict[str, Any]) -> Lag:
        end = source.get("endOffset")
        if isinstance(end, dict) and "reservoirVersion" in end:
            return table.measure(int(end["reservoirVersion"]) - 1)
        return Lag(count_offsets_behind(source))

    return lag


def _build_reader(warehouse: Tables, table: str) -> Reader:
    log = warehouse.files(f"{table}/_delta_log")

    def read(version: int) -> str | None:
        content = log.read(f"{version:020d}.json")
        return None if content is None else content.decode()

    return read
