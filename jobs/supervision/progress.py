"""The progress record of a micro-batch, and the lag of a stream behind its source, without a Spark job."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from jobs.storage.tables import measurements
from jobs.storage.warehouse import Tables

SCHEMA = """
    model string, generation string, run string, batch_id bigint, started_at timestamp, seconds double,
    rows bigint, estimated bigint, quarantined bigint, late bigint, bad_state bigint, expired bigint,
    rows_per_second double, durations map<string, bigint>, state_rows bigint, state_bytes bigint,
    watermark timestamp, position string, lag_rows bigint, lag_seconds double
"""
"""Columns of the table `progress/<model>`; the fields of a record in JSON have the same names."""
COLUMNS = tuple(part.strip().split(" ")[0] for part in SCHEMA.replace("<string, bigint>", "").split(","))
OUTCOMES = ("late", "bad_state", "expired")
"""Counts of the sink, besides `estimated` and `quarantined`, that have a separate column."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Lag(NamedTuple):
    """The lag of a stream behind its source: number of waiting rows, and waiting time of the first; None if unknown."""

    rows: int | None = None
    seconds: float | None = None


def record(
    progress: dict[str, Any], counts: dict[str, int], lag: Lag, model: str, generation: str, run: str
) -> dict[str, Any]:
    """Return the record of a micro-batch.

    Args:
        progress: Spark's `StreamingQueryProgress` as JSON.
        counts: numbers of rows from the sink: `estimated`, `quarantined`, and any of `OUTCOMES`; empty if unknown. If
            the stream's state has a watermark, also the `watermark` in microseconds.
        lag: lag of the stream.
        model: name of the model.
        generation: name of the stream's generation.
        run: id of the driver's run.
    """
    durations = {name: int(value) for name, value in (progress.get("durationMs") or {}).items()}
    seconds = durations.get("triggerExecution", 0) / 1000
    operators = progress.get("stateOperators") or []
    sources = progress.get("sources") or [{}]
    rows = counts.get("estimated", 0) + counts.get("quarantined", 0) if counts else _count_rows(progress)
    watermark = (progress.get("eventTime") or {}).get("watermark")
    if "watermark" in counts:
        watermark = (EPOCH + timedelta(microseconds=counts["watermark"])).isoformat()
    return {
        "model": model,
        "generation": generation,
        "run": run,
        "batch_id": int(progress["batchId"]),
        "started_at": progress["timestamp"],
        "seconds": seconds,
        "rows": rows,
        "estimated": counts.get("estimated"),
        "quarantined": counts.get("quarantined"),
        **{name: counts.get(name, 0) if counts else None for name in OUTCOMES},
        "rows_per_second": rows / seconds if seconds else None,
        "durations": durations,
        "state_rows": sum(int(one.get("numRowsTotal") or 0) for one in operators),
        "state_bytes": sum(int(one.get("memoryUsedBytes") or 0) for one in operators),
        # Spark reports the year 1970 before the first watermark.
        "watermark": None if watermark is None or watermark.startswith("1970-01-01T00:00:00") else watermark,
        "position": json.dumps(sources[0].get("endOffset")),
        "lag_rows": lag.rows,
        "lag_seconds": lag.seconds,
    }


def parse_start_time(one: dict[str, Any]) -> datetime:
    """Return the start time of a record's micro-batch, from the record's JSON."""
    return datetime.fromisoformat(one["started_at"]).astimezone(UTC)


def parse_end_time(one: dict[str, Any]) -> datetime:
    """Return the end time of a record's micro-batch, from the record's JSON."""
    return parse_start_time(one) + timedelta(seconds=one["seconds"])


def has_executed(progress: dict[str, Any]) -> bool:
    """Return whether a progress report belongs to a micro-batch that ran; an idle query also reports progress."""
    return "addBatch" in (progress.get("durationMs") or {})


def count_offsets_behind(source: dict[str, Any]) -> int | None:
    """Return the lag in messages over all topics and partitions; None if the source is not Kafka."""
    latest, end = source.get("latestOffset"), source.get("endOffset")
    if not (
        isinstance(latest, dict) and isinstance(end, dict) and _is_by_topic(latest) and _is_by_topic(end)
    ):
        return None
    return sum(
        max(0, int(newest) - int(end.get(topic, {}).get(partition, newest)))
        for topic, partitions in latest.items()
        for partition, newest in partitions.items()
    )


def _is_by_topic(offset: dict[str, Any]) -> bool:
    return all(isinstance(value, dict) for value in offset.values())


def _count_rows(progress: dict[str, Any]) -> int:
    return int(progress.get("numInputRows") or 0)


MOST_VERSIONS = 1000
"""Maximum number of versions that one measurement reads; a larger lag is complete after several measurements."""

Reader = Callable[[int], str | None]
"""Function that returns the text of a version's file in the Delta log; None if the version does not exist."""


class TableLag:
    """Counts the rows in table versions that a stream has not read yet; the log file of each version is read once."""

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
    """Return the number of rows that a version added, and the commit time of the version (seconds since 1970)."""
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
    """Return a function that computes the lag of a stream behind its table or topic from the progress of the source."""
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
