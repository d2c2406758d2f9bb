"""The table of a history's estimates: each commit replaces an interval of event time for some slices of the keys.

A row of the measurements has at most one estimate in the table, after every commit: that of the last run over it. The
metadata of each commit says what it has replaced, so a run that was killed is continued after its last commit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from jobs.batch.batch_filter import Interval
from jobs.batch.bucket_estimates import EstimatingPlan, build_estimator
from jobs.core.errors import RUN_FAILED, UserError
from jobs.spark.warehouse import Warehouse
from jobs.spark.written_rows import keep_rows, write_files
from jobs.state.encoding.estimates import build_table_batch
from jobs.storage.part_files import PartFile, remove
from jobs.storage.row_changes import Overtaken, ReplacingTable
from jobs.storage.table_rows import Filter, convert_time
from jobs.storage.warehouse import LogEntry, Tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.storage.table_log import FileTable

STATISTICS = "generation,batch_id,event_time,key"
"""Columns of which Delta keeps the least and the greatest value in each file, by which it finds what to replace."""
STATISTICS_SETTING = "delta.dataSkippingStatsColumns"
_SETTINGS = {STATISTICS_SETTING: STATISTICS}
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


class HistoryRun(NamedTuple):
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

    def ready(self, columns: str, schema: pa.Schema) -> ReplacingTable:
        """Return the table as one that takes files; it is made, and gets the columns that it lacks.

        Args:
            columns: of the files, as DDL.
            schema: the same as Arrow has them.

        Raises:
            UserError: the table cannot take the files.
        """
        self.warehouse.create(self.name, columns, properties=_SETTINGS)
        table = ReplacingTable(self.warehouse, self.name, frozenset({STATISTICS_SETTING}))
        table.ready(schema)
        return table

    def replace(
        self, table: ReplacingTable, parts: Sequence[PartFile], run: HistoryRun, part: ReplacedPart
    ) -> int:
        """Replace a part of the table by files of its rows, in one commit; return how many rows they have.

        Files that have other rows besides are written again without those of the part.

        Raises:
            UserError: other runs have written rows of the part meanwhile, again and again, or the commit failed.
        """
        detail, rows = {"userMetadata": json.dumps(_build_detail(run, part))}, part.rows
        try:
            table.replace_rows(parts, rows, keep_rows(self.warehouse.spark, table, rows), detail)
        except Overtaken as error:
            remove(table.path, parts)
            raise UserError(
                f"{table.path}: another run has written estimates of the same rows meanwhile; run it again",
                RUN_FAILED,
            ) from error
        return sum(one.rows for one in parts)

    def find_unfinished_part(self, question: str, whole: Interval) -> Replaced | None:
        """Return what the last run that touched an interval has replaced, if it was one over the same question.

        None: the last run was another one, or nothing is known of it. Delta keeps the metadata for 30 days.
        """
        found: Replaced | None = None
        for entry in _list_commits(self.warehouse, self.name):
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


def write_estimates(
    packed: DataFrame, plan: EstimatingPlan, table: FileTable, schema: pa.Schema, constants: dict[str, Any]
) -> list[PartFile]:
    """Let tasks estimate the rows of packets and write them; return the files, which no commit names yet.

    Args:
        packed: the packets, those of a bucket in one partition.
        plan: how to estimate them.
        table: that takes the files.
        schema: of the table's rows.
        constants: values of columns that the plan does not give.
    """
    estimates = build_estimator(plan)

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return (build_table_batch(found, schema, constants) for found in estimates(batches))

    return write_files(packed, rows, table).parts


def list_history_runs(warehouse: Tables, table: str) -> list[HistoryRun]:
    """Return the runs that have written to a table, the last one first, as far as Delta's history tells."""
    found = (entry.detail for entry in _list_commits(warehouse, table))
    marks = [HistoryRun(**{name: one[name] for name in HistoryRun._fields}) for one in found if "run" in one]
    return list({one.run: one for one in marks}.values())


def _list_commits(warehouse: Tables, table: str) -> list[LogEntry]:
    """Return the commits that Delta's history has, the newest first."""
    return warehouse.read_log_entries(table) if warehouse.exists(table) else []


class ReplacedPart(NamedTuple):
    """What one commit replaces: an interval of event time for some slices of the keys."""

    slices: Slices
    interval: Interval

    @property
    def rows(self) -> Filter:
        """Return the filter of its rows."""
        bounds: list[tuple[str, str, Any]] = [
            ("batch_id", ">=", self.slices.first),
            ("batch_id", "<", self.slices.stop),
        ]
        for compare, at in zip((">=", "<"), self.interval, strict=True):
            if at is not None:
                bounds.append(("event_time", compare, convert_time(at)))
        return [bounds]


def _build_detail(run: HistoryRun, part: ReplacedPart) -> dict[str, Any]:
    """Return what a commit's metadata says of a part that a run has written."""
    return {**run._asdict(), "slices": list(part.slices), "interval": part.interval.data}


def _meet(one: Interval, other: Interval) -> bool:
    """Tell if two intervals have a time in common."""
    starts = one.first is None or other.last is None or one.first < other.last
    return starts and (one.last is None or other.first is None or other.first < one.last)
