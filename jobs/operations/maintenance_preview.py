"""Tell what maintenance would remove and compact, without Spark, for a warehouse that is local."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake.exceptions import DeltaError

from jobs.core import clock
from jobs.core.errors import RUN_FAILED, UserError, first_line
from jobs.downstream.queries import tables_of
from jobs.downstream.retention import former_queries, kept_spans, largest_lag, lines_of
from jobs.lineage import generations
from jobs.lineage.generations import LIVE, SHADOW
from jobs.observability.progress_log import table_of
from jobs.operations.retention_plan import plan
from jobs.snapshots import manifests
from jobs.specs.model_spec import ModelSpec
from jobs.specs.retention import span_of
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.files import Folder
from jobs.storage.positions import to_micros
from jobs.storage.quarantine import DISCARDED, REPLAYED, TABLE
from jobs.storage.table_rows import file_sizes, open_log, parts_of
from jobs.storage.tables import archive, estimates, forecasts, history_tables
from jobs.storage.warehouse import Tables
from jobs.supervision.driver_log import DriverLog
from jobs.upgrades.comparison.report_files import report_files

if TYPE_CHECKING:
    from jobs.lineage.generations import Generation

SHARED = ("manifests", "quarantine", "late_copies")

OF_SNAPSHOTS = ("snapshots", "waiting", "remembered_ids", "learned")


def preview(tables: Tables, spec: ModelSpec, with_estimates: bool) -> dict[str, Any]:
    """Return what maintenance would do for one model: what a dry run of `Maintenance` has as its result."""
    known = generations.all_of(tables, spec.name)
    planned = plan(
        known,
        manifests.all_of(tables, spec.name),
        spec.retention,
        clock.now(),
        spec.fingerprint(),
        held_generations(tables, spec.name),
    )
    gone = [
        one.generation
        for one in known
        if one.status == generations.REMOVED or one.generation in planned.generations
    ]
    checkpoints = {one.generation: one.checkpoint for one in known}
    found = _Counts(tables, spec)
    unread = unread_files(tables, spec)
    names = tables_of_model(tables, spec.name)
    return {
        "generations": planned.generations,
        "kept": {"generations": planned.why_generations, "snapshots": planned.why_snapshots},
        "checkpoints": [one for one in gone if Folder(tables, checkpoints[one]).exists()],
        "reports": [one for one in gone if _has_report(tables, spec.name, one)],
        "snapshots": planned.snapshots,
        "estimates": found.estimates(planned.estimates) if with_estimates else 0,
        "quarantine": found.resolved_rows(known),
        "progress": found.before(table_of(spec.name), "started_at", found.cut(spec.retention.progress)),
        "followers": found.followers(),
        "described": [],
        "optimized": [one for one in (_to_compact(tables, name) for name in names) if one is not None],
        "not_vacuumed": unread,
        "vacuumed": [
            {"table": name, "files": _unneeded_files(tables, name, spec)}
            for name in ("generations", *OF_SNAPSHOTS, *names)
            if name not in unread and tables.exists(name)
        ],
    }


def tables_of_model(tables: Tables, model: str) -> list[str]:
    """Return the tables that maintenance of a model compacts, those of all models included."""
    own = (estimates(model), archive(model), table_of(model), forecasts(model))
    names = (*own, *tables_of(model), *history_tables(model), *SHARED)
    return [table for table in names if tables.exists(table)]


def held_generations(tables: Tables, model: str) -> set[str]:
    """Return the generations that a driver holds, from the log of drivers."""
    drivers = DriverLog.of(tables, model).drivers()
    return {one.generation for one in drivers if one.ended_at is None and one.owner.alive(one.beat_at)}


def unread_files(tables: Tables, spec: ModelSpec) -> dict[str, str]:
    """Return the tables not to vacuum, with the reason: the monitor or forecast skill has yet to read their files."""
    verb, lag = largest_lag(tables, spec)
    if lag < span_of(spec.retention.files):
        return {}
    why = f"the {verb} has not read estimates of {lag.days} days ago: run it, or remove it from the spec"
    return {estimates(spec.name): why}


def result_lines(model: str, result: Mapping[str, Any], dry: bool) -> list[str]:
    """Return what maintenance has removed, or, if `dry`, would remove, as lines of a report."""
    would = "would remove" if dry else "removed"
    lines = [f"{model}: dry run, nothing was changed"] if dry else []
    for what in ("generations", "snapshots"):
        names = result[what]
        lines.append(f"{would} {len(names)} {what}{': ' if names else ''}{', '.join(names)}")
    if result["checkpoints"]:
        lines.append(f"{would} the checkpoints of {', '.join(result['checkpoints'])}")
    if result["reports"]:
        lines.append(f"{would} the reports on {', '.join(result['reports'])}")
    for what, text in (
        ("estimates", "estimates of removed generations"),
        ("quarantine", "quarantined rows that were replayed or discarded"),
        ("progress", "records of micro-batches"),
    ):
        lines.append(f"{would} {result[what]:,} {text}")
    lines += lines_of(result["followers"], would)
    if result["described"]:
        lines.append(f"explained the columns of {', '.join(result['described'])}")
    for one in result["optimized"]:
        now = f", now {one['files_after']}" if one["files_after"] is not None else ""
        lines.append(f"{'would compact' if dry else 'compacted'} {one['table']}: {one['files']} files{now}")
    files = [one for one in result["vacuumed"] if one["files"]]
    if dry and files:
        counts = ", ".join(f"{one['files']} of {one['table']}" for one in files)
        lines.append(f"would remove files that no table needs: {counts}")
    elif not dry:
        lines.append(f"vacuumed {', '.join(one['table'] for one in result['vacuumed']) or 'nothing'}")
    lines += [f"did not vacuum {table}: {why}" for table, why in result["not_vacuumed"].items()]
    kept = {**result["kept"]["generations"], **result["kept"]["snapshots"]}
    return [*lines, *(f"kept {name}: {why}" for name, why in kept.items())]


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counts of the rows that maintenance would delete, file by file."""

    tables: Tables
    spec: ModelSpec

    def cut(self, kept: str) -> int:
        """Return the time before which rows are old, in microseconds."""
        return to_micros(clock.now() - span_of(kept))

    def before(self, table: str, column: str, cut: int) -> int:
        """Return the number of rows of a table whose time is before `cut`."""
        return sum(int(np.count_nonzero(at < cut)) for at in self._times(table, column))

    def estimates(self, removed: Sequence[str]) -> int:
        """Return the number of estimates of removed generations."""
        return self._among(estimates(self.spec.name), "generation", removed) if removed else 0

    def followers(self) -> dict[str, Any]:
        """Return the former definitions of the monitor and of forecast skill, and rows to delete by table."""
        former, rows = former_queries(self.tables, self.spec), dict[str, int]()
        for query in former:
            count = self._among(query.table, "definition", [query.definition])
            rows[query.table] = rows.get(query.table, 0) + count
        for table, column, span_us in kept_spans(self.spec):
            newest = max((int(at.max()) for at in self._times(table, column) if len(at)), default=None)
            if newest is not None:
                rows[table] = rows.get(table, 0) + self.before(table, column, newest - span_us)
        return {
            "definitions": sorted(query.name for query in former),
            "rows": {table: count for table, count in rows.items() if count},
        }

    def resolved_rows(self, known: Sequence[Generation]) -> int:
        """Return the number of old quarantined rows that were replayed or discarded, and that no driver looks up."""
        last = {
            one.generation: Checkpoint(self.tables, one.checkpoint).last_commit()
            for one in known
            if one.status in (LIVE, SHADOW)
        }
        cut, count = self.cut(self.spec.retention.quarantine), 0
        columns = ["model", "status", "resolved_at", "generation", "batch_id"]
        for part in parts_of(self.tables.root, TABLE, columns):
            if not {"status", "resolved_at"} <= set(part.column_names):
                continue
            done = pc.is_in(part["status"].cast(pa.string()), pa.array([REPLAYED, DISCARDED]))  # type: ignore[attr-defined]
            mine = part.filter(pc.and_(pc.equal(part["model"], self.spec.name), done))  # type: ignore[attr-defined]
            for row in mine.filter(pa.array(_times_of(mine["resolved_at"]) < cut)).to_pylist():
                generation, batch = row.get("generation"), row.get("batch_id")
                at = last.get(generation, np.inf)
                # The next driver looks up in the table whether its first micro-batch has been written.
                count += not (batch is not None and batch > (-1 if at is None else at))
        return count

    def _among(self, table: str, column: str, values: Sequence[str]) -> int:
        parts = parts_of(self.tables.root, table, [column], among=(column, values))
        return sum(part.num_rows for part in parts)

    def _times(self, table: str, column: str) -> Any:
        for part in parts_of(self.tables.root, table, [column]):
            if column in part.column_names:
                yield _times_of(part[column].drop_null())


def _times_of(column: Any) -> Any:
    """Return times in microseconds (N,); one that is missing is later than all."""
    micros = column.cast(pa.timestamp("us")).cast(pa.int64())
    return pc.fill_null(micros, np.iinfo(np.int64).max).to_numpy()


def _has_report(tables: Tables, model: str, generation: str) -> bool:
    files, names = report_files(tables, model, generation)
    return bool(set(names) & set(files.names("")))


def _to_compact(tables: Tables, table: str) -> dict[str, Any] | None:
    found = file_sizes(tables.root, table)
    files = 0 if found is None else found[0]
    return {"table": table, "files": files, "files_after": None} if files > 1 else None


def _unneeded_files(tables: Tables, table: str, spec: ModelSpec) -> int:
    """Return the number of files that a table has not needed for `retention.files`.

    Raises:
        UserError: the table keeps its files for longer.
    """
    hours = int(span_of(spec.retention.files).total_seconds() // 3600)
    try:
        return len(open_log(tables.root, table).vacuum(hours, dry_run=True, full=True))
    except DeltaError as error:
        raise UserError(
            f"table {table} cannot be vacuumed with retention.files {spec.retention.files}: {first_line(error)}",
            RUN_FAILED,
        ) from error
