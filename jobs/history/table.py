"""The table of a history's estimates: each commit replaces an interval of event time for some slices of the keys.

A row of the measurements has at most one estimate in the table, after every commit: that of the last run over it. The
metadata of each commit says what it has replaced, so a run that was killed is continued after its last commit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema

from jobs.core.errors import RUN_FAILED, UserError
from jobs.history.source import Interval
from jobs.storage.table_log import FileTable, create_table, takes_files
from jobs.storage.warehouse import LogEntry
from jobs.warehouse.delta import Warehouse, commented
from jobs.warehouse.positions import to_datetime

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.storage.part_files import PartFile

STATISTICS = "generation,batch_id,event_time,key"
"""Columns of which Delta keeps the least and the greatest value in each file, by which it finds what to replace."""
STATISTICS_SETTING = "delta.dataSkippingStatsColumns"
_SETTINGS = {STATISTICS_SETTING: STATISTICS}
APPLICATION = "history"
"""The transactions of runs whose tasks write files: of two that have not seen each other, one fails."""
_NO_CHANGE = ("OPTIMIZE", "VACUUM START", "VACUUM END", "SET TBLPROPERTIES", "CREATE TABLE", "ADD COLUMNS")


_MARK = "-history-"


def run_name(model: str, version: int, digest: str) -> str:
    """Return the id of a run over the history of a version of a model."""
    return f"{model}-v{version}{_MARK}{digest}"


def is_run(generation: str) -> bool:
    """Tell if estimates are of a run over history; the names of a stream's generations have a number alone."""
    return _MARK in generation


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


class Run(NamedTuple):
    """What the metadata of a run's commits say of it.

    run: its id; question: the digest of what it was asked, without the version of the rows; version: of the rows;
    snapshot: whose parameters it took, None: the spec's values; model_version, fingerprint: of the spec
    """

    run: str
    question: str
    version: int | None
    snapshot: str | None
    model_version: int
    fingerprint: str


class Replaced(NamedTuple):
    """What a run has replaced so far: its version of the rows, and the slices, in the order of the commits."""

    run: str
    version: int | None
    slices: list[Slices]


class HistoryTable(NamedTuple):
    """The table of one model's history."""

    warehouse: Warehouse
    name: str

    def replace(self, rows: DataFrame, run: Run, part: Part) -> int:
        """Replace a part of the table by rows of a run, in one commit; return how many were written."""
        self._create(rows)
        writer = rows.write.format("delta").mode("overwrite").option("replaceWhere", part.condition)
        writer = writer.option("mergeSchema", "true").option("userMetadata", json.dumps(_detail(run, part)))
        with self.warehouse.lock(self.name):
            writer.save(self.warehouse.path(self.name))
            return self._written()

    def taking(self, rows: DataFrame, part: Part) -> FileTable | None:
        """Return the table as one that takes files with such rows of a part, or None if Java has to replace its rows.

        It takes them if it is local, and no file of it can have a row of the part: so there is nothing to replace.
        """
        if not takes_files(self.warehouse):
            return None
        fields = commented(self.name, _columns(rows)).json()
        if not create_table(self.warehouse, self.name, fields, _SETTINGS):
            self._create(rows)
        files = FileTable(self.warehouse, self.name, frozenset({STATISTICS_SETTING}))
        try:
            bounds = files.bounds() if files.takes(to_arrow_schema(rows.schema, timezone="UTC")) else None
        except UserError:
            return None  # Java may read what delta-rs cannot
        return None if bounds is None or not part.is_beside(bounds) else files

    def add(self, files: FileTable, parts: Sequence[PartFile], run: Run, part: Part) -> int:
        """Add the files of a part's rows in one commit; return how many rows they have.

        Raises:
            UserError: another run has written rows of the part meanwhile, or the commit failed.
        """
        detail = json.dumps(_detail(run, part))
        if files.add(parts, APPLICATION, part.is_beside, {"userMetadata": detail}) is None:
            raise UserError(
                f"{files.path}: another run has written estimates of the same rows meanwhile; run it again",
                RUN_FAILED,
            )
        return sum(one.rows for one in parts)

    def runs(self) -> list[Run]:
        """Return the runs that have written to the table, the last one first, as far as Delta's history tells."""
        found = (entry.detail for entry in self._commits())
        marks = [Run(**{name: one[name] for name in Run._fields}) for one in found if "run" in one]
        return list({one.run: one for one in marks}.values())

    def unfinished(self, question: str, whole: Interval) -> Replaced | None:
        """Return what the last run that touched an interval has replaced, if it was one over the same question.

        None: the last run was another one, or nothing is known of it. Delta keeps the metadata for 30 days.
        """
        found: Replaced | None = None
        for entry in self._commits():
            detail = entry.detail
            if entry.operation in _NO_CHANGE:
                continue
            if "run" not in detail:
                break
            if not _meet(Interval(*detail["interval"]), whole):
                continue
            if detail["question"] != question or (found is not None and detail["run"] != found.run):
                break
            found = found or Replaced(detail["run"], detail["version"], [])
            found.slices.append(Slices(*detail["slices"]))
        return found

    def _commits(self) -> list[LogEntry]:
        """Return the commits that Delta's history has, the newest first."""
        return self.warehouse.log_entries(self.name) if self.warehouse.exists(self.name) else []

    def _create(self, rows: DataFrame) -> None:
        self.warehouse.create(self.name, _columns(rows), properties=_SETTINGS)

    def _written(self) -> int:
        """Return how many rows the newest commit has written."""
        files = self.warehouse.files(f"{self.name}/_delta_log")
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

    def is_beside(self, bounds: pa.Table) -> bool:
        """Tell from the bounds of files (`FileTable.bounds`) if none of them has a row of the part.

        A file without bounds may have some. Those of times are in whole milliseconds, which Delta in Java
        rounds down.
        """
        if bounds.num_rows == 0:
            return True
        names = [f"{side}.{name}" for name in ("batch_id", "event_time") for side in ("min", "max")]
        if not set(names) <= set(bounds.column_names):
            return False
        if any(bounds.column(name).null_count for name in names):
            return False
        least, greatest, earliest, latest = (
            bounds.column(name).cast(kind).cast(pa.int64()).to_numpy()
            for name, kind in zip(names, [pa.int64()] * 2 + [pa.timestamp("us", "UTC")] * 2, strict=True)
        )
        beside = (greatest < self.slices.first) | (least >= self.slices.stop)
        if self.interval.first is not None:
            beside |= latest + 1000 < self.interval.first
        if self.interval.last is not None:
            beside |= earliest >= self.interval.last
        return bool(beside.all())


def _columns(rows: DataFrame) -> str:
    """Return the columns of rows as DDL."""
    return ", ".join(f"`{one.name}` {one.dataType.simpleString()}" for one in rows.schema.fields)


def _detail(run: Run, part: Part) -> dict[str, Any]:
    """Return what a commit's metadata says of a part that a run has written."""
    return {**run._asdict(), "slices": list(part.slices), "interval": part.interval.data}


def _meet(one: Interval, other: Interval) -> bool:
    """Tell if two intervals have a time in common."""
    starts = one.first is None or other.last is None or one.first < other.last
    return starts and (one.last is None or other.first is None or other.first < one.last)
