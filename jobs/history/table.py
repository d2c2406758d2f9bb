"""The table of a history's estimates: each commit replaces an interval of event time for some slices of the keys.

A row of the measurements has at most one estimate in the table, after every commit: that of the last run over it. The
metadata of each commit says what it has replaced, so a run that was killed is continued after its last commit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from delta.tables import DeltaTable

from jobs.history.source import Interval
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.files import hadoop_files
from jobs.warehouse.positions import to_datetime

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

STATISTICS = "generation,batch_id,event_time,key"
"""Columns of which Delta keeps the least and the greatest value in each file, by which it finds what to replace."""
_NO_CHANGE = ("OPTIMIZE", "VACUUM START", "VACUUM END", "SET TBLPROPERTIES", "CREATE TABLE", "ADD COLUMNS")


class Slices(NamedTuple):
    """The slices of keys from the first up to and without the last."""

    first: int
    stop: int

    def within(self, covered: Iterable[Slices]) -> bool:
        """Tell if others, in any order, have all of these slices."""
        at = self.first
        for one in sorted(covered):
            if one.first <= at < one.stop:
                at = one.stop
        return at >= self.stop


class Replaced(NamedTuple):
    """What a run has replaced so far: its version of the rows, and the slices, in the order of the commits."""

    run: str
    version: int | None
    slices: list[Slices]


class HistoryTable(NamedTuple):
    """The table of one model's history."""

    warehouse: Warehouse
    name: str

    def replace(self, rows: DataFrame, run: str, question: str, version: int | None, part: Part) -> int:
        """Replace a part of the table by rows, in one commit; return how many were written.

        Args:
            rows: estimates, with `generation` and `batch_id`.
            run, question: of the run.
            version: of what it reads.
            part: what is replaced.
        """
        self._create(rows)
        detail = {
            "run": run,
            "question": question,
            "version": version,
            "slices": list(part.slices),
            "interval": part.interval.data,
        }
        writer = rows.write.format("delta").mode("overwrite").option("replaceWhere", part.condition)
        writer = writer.option("mergeSchema", "true").option("userMetadata", json.dumps(detail))
        with self.warehouse.lock(self.name):
            writer.save(self.warehouse.path(self.name))
            return self._written()

    def unfinished(self, question: str, whole: Interval) -> Replaced | None:
        """Return what the last run that touched an interval has replaced, if it was one over the same question.

        None: the last run was another one, or nothing is known of it. Delta keeps the metadata for 30 days.
        """
        if not self.warehouse.exists(self.name):
            return None
        found: Replaced | None = None
        table = DeltaTable.forPath(self.warehouse.spark, self.warehouse.path(self.name))
        rows = table.history().select("version", "operation", "userMetadata").orderBy("version").collect()
        for row in reversed(rows):
            if row["operation"] in _NO_CHANGE:
                continue
            detail: dict[str, Any] = json.loads(row["userMetadata"] or "{}")
            if "run" not in detail:
                break
            if not _meet(Interval(*detail["interval"]), whole):
                continue
            if detail["question"] != question or (found is not None and detail["run"] != found.run):
                break
            found = found or Replaced(detail["run"], detail["version"], [])
            found.slices.append(Slices(*detail["slices"]))
        return found

    def _create(self, rows: DataFrame) -> None:
        fields = ", ".join(f"`{one.name}` {one.dataType.simpleString()}" for one in rows.schema.fields)
        self.warehouse.create(self.name, fields, properties={"delta.dataSkippingStatsColumns": STATISTICS})

    def _written(self) -> int:
        """Return how many rows the newest commit has written."""
        files = hadoop_files(self.warehouse, f"{self.name}/_delta_log")
        line = files.first_line(f"{self.warehouse.latest_version(self.name):020d}.json")
        metrics = json.loads(line or "{}").get("commitInfo", {}).get("operationMetrics", {})
        copied = int(metrics.get("numCopiedRows", 0))
        return int(metrics.get("numOutputRows", 0)) - copied


class Part(NamedTuple):
    """What one commit replaces: an interval of event time for some slices of the keys."""

    slices: Slices
    interval: Interval

    @property
    def condition(self) -> str:
        """Return the condition of its rows, in SQL."""
        conditions = [f"batch_id >= {self.slices.first}", f"batch_id < {self.slices.stop}"]
        for sign, micros in ((">=", self.interval.first), ("<", self.interval.last)):
            time = to_datetime(micros)
            if time is not None:
                conditions.append(f"event_time {sign} TIMESTAMP '{time:%Y-%m-%d %H:%M:%S.%f}+00:00'")
        return " AND ".join(conditions)


def _meet(one: Interval, other: Interval) -> bool:
    """Tell if two intervals have a time in common."""
    starts = one.first is None or other.last is None or one.first < other.last
    return starts and (one.last is None or other.first is None or other.first < one.last)
