"""The table of a history's estimates: each commit replaces an interval of event time for some slices of the keys.

After every commit, a row of the measurements has at most one estimate in the table: the estimate of the last run over
the row. The metadata of each commit describes the part that it replaced, so a killed run can continue after its last
commit.
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
"""Columns of which Delta stores the minimum and maximum in each file, by which it finds the rows to replace."""
STATISTICS_SETTING = "delta.dataSkippingStatsColumns"
_SETTINGS = {STATISTICS_SETTING: STATISTICS}
_NO_CHANGE = ("OPTIMIZE", "VACUUM START", "VACUUM END", "SET TBLPROPERTIES", "CREATE TABLE", "ADD COLUMNS")


class Slices(NamedTuple):
    """The slices of keys from `first` (included) to `stop` (excluded)."""

    first: int
    stop: int

    def within(self, covered: Iterable[Slices]) -> bool:
        """Return whether other slices, in any order, cover all of these slices."""
        at = self.first
        for one in sorted(covered):
            if one.first <= at < one.stop:
                at = one.stop
        return at >= self.stop


class HistoryRun(NamedTuple):
    """The description of a run in the metadata of its commits.

    run: the id of the run.
    question: the digest of the request, without the version of the rows.
    version: the version of the rows.
    snapshot: the snapshot whose parameters the run took; None means the spec's values.
    model_version, fingerprint: those of the spec.
    """

    run: str
    question: str
    version: int | None
    snapshot: str | None
    model_version: int
    fingerprint: str


class Replaced(NamedTuple):
    """The part of the table that a run has replaced: the version of the rows, and slices in order of commits.

    None as version means that the rows come from files.
    """

    run: str
    version: int | None
    slices: list[Slices]


class HistoryTable(NamedTuple):
    """The table of one model's history."""

    warehouse: Warehouse
    name: str

    def ready(self, columns: str, schema: pa.Schema) -> ReplacingTable:
        """Return the table, ready for new files; create the table or add missing columns if needed.

        Args:
            columns: the columns of the files, as DDL.
            schema: the same columns as an Arrow schema.

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
        """Replace a part of the table by files with new rows, in one commit; return the number of new rows.

        An old file that also has rows outside the part is written again without the rows of the part.

        Raises:
            UserError: other runs kept writing rows of the part at the same time, or the commit failed.
        """
        detail, rows = {"userMetadata": json.dumps(_build_detail(run, part))}, part.rows
        try:
            table.replace_rows(parts, rows, keep_rows(self.warehouse, table, rows), detail)
        except Overtaken as error:
            remove(table.path, parts)
            raise UserError(
                f"{table.path}: another run has written estimates of the same rows meanwhile; run it again",
                RUN_FAILED,
            ) from error
        return sum(one.rows for one in parts)

    def find_unfinished_part(self, question: str, whole: Interval) -> Replaced | None:
        """Return the part that the last run over an interval has replaced, if the run had the same question.

        None means that the last run had another question, or that nothing is known of it: Delta keeps the metadata of
        commits for 30 days.
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
    """Let tasks estimate the rows of packets and write files; return the files, which no commit contains yet.

    Args:
        packed: the packets, with all packets of a bucket in one partition.
        plan: the settings for the estimates.
        table: the table that takes the files.
        schema: the schema of the table's rows.
        constants: values of the columns that the plan does not compute.
    """
    estimates = build_estimator(plan)

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return (build_table_batch(found, schema, constants) for found in estimates(batches))

    return write_files(packed, rows, table).parts


def list_history_runs(warehouse: Tables, table: str) -> list[HistoryRun]:
    """Return the runs that have written to a table, the last one first, from Delta's history."""
    found = (entry.detail for entry in _list_commits(warehouse, table))
    marks = [HistoryRun(**{name: one[name] for name in HistoryRun._fields}) for one in found if "run" in one]
    return list({one.run: one for one in marks}.values())


def _list_commits(warehouse: Tables, table: str) -> list[LogEntry]:
    """Return the commits in Delta's history, the newest first."""
    return warehouse.read_log_entries(table) if warehouse.exists(table) else []


class ReplacedPart(NamedTuple):
    """The part of the table that one commit replaces: an interval of event time for some slices of the keys."""

    slices: Slices
    interval: Interval

    @property
    def rows(self) -> Filter:
        """Return the filter of the part's rows."""
        bounds: list[tuple[str, str, Any]] = [
            ("batch_id", ">=", self.slices.first),
            ("batch_id", "<", self.slices.stop),
        ]
        for compare, at in zip((">=", "<"), self.interval, strict=True):
            if at is not None:
                bounds.append(("event_time", compare, convert_time(at)))
        return [bounds]


def _build_detail(run: HistoryRun, part: ReplacedPart) -> dict[str, Any]:
    """Return the metadata of a commit of a part that a run has written."""
    return {**run._asdict(), "slices": list(part.slices), "interval": part.interval.data}


def _meet(one: Interval, other: Interval) -> bool:
    """Return whether two intervals have a time in common."""
    starts = one.first is None or other.last is None or one.first < other.last
    return starts and (one.last is None or other.first is None or other.first < one.last)
