"""Remove what the retention plan allows, and compact and vacuum the tables. Every step is idempotent.

Each step first reads from the tables, without Spark, what it has to do. A dry run stops after this reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from delta import exceptions
from delta.tables import DeltaTable
from deltalake.exceptions import DeltaError
from pyspark.errors import PySparkException

from jobs.core import times
from jobs.core.errors import RUN_FAILED, UserError, extract_first_line
from jobs.downstream.queries import list_downstream_tables
from jobs.downstream.retention import DownstreamCleanup, find_largest_lag, format_cleanup
from jobs.insight.index import report_files
from jobs.insight.retention_plan import plan_retention
from jobs.lineage import generations, live_rows
from jobs.lineage.generations import LIVE, SHADOW, DeployedModel
from jobs.snapshots import manifests, store
from jobs.spark.warehouse import Warehouse
from jobs.specs.retention import parse_span
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.dictionary import estimate_comments
from jobs.storage.files import remove_folder
from jobs.storage.quarantine import DISCARDED, REPLAYED, TABLE
from jobs.storage.row_changes import delete_rows, describe_columns
from jobs.storage.table_rows import measure_files, open_log
from jobs.storage.tables import archive, estimates, estimates_history, forecasts, latest, list_history_tables
from jobs.storage.warehouse import Tables
from jobs.supervision.driver_log import DriverLog
from jobs.supervision.progress import ProgressLog, format_table_name

if TYPE_CHECKING:
    from jobs.insight.retention_plan import RetentionPlan
    from jobs.lineage.generations import Generation
    from jobs.storage.table_rows import Filter

CHECKPOINTS = "checkpoints/"
SHARED = ("manifests", "quarantine", "late_copies")
OF_SNAPSHOTS = ("snapshots", "waiting", "remembered_ids", "learned")
_CONFLICTS = tuple(
    one
    for one in vars(exceptions).values()
    if isinstance(one, type) and issubclass(one, PySparkException) and one is not PySparkException
)
"""Delta's Java exceptions for a commit that lost to a concurrent one. In Python they have no common base class."""


@dataclass
class Maintenance:
    """One run of maintenance for one model; `result` lists what the run has removed or, if `dry`, would remove."""

    model: DeployedModel[Warehouse]
    dry: bool
    with_estimates: bool
    on_progress: Callable[[str], None] = lambda text: None
    result: dict[str, Any] = field(
        default_factory=lambda: {"described": [], "optimized": [], "vacuumed": [], "not_vacuumed": {}}
    )

    def run(self) -> None:
        """Run the steps in order: generations are removed before the snapshots from which they started."""
        warehouse, spec = self.model.warehouse, self.model.spec
        known = generations.read_generations(warehouse, spec.name)
        planned = plan_retention(
            known,
            manifests.read_manifests(warehouse, spec.name),
            spec.retention,
            times.now(),
            spec.fingerprint(),
            find_held_generations(warehouse, spec.name),
        )
        self.on_progress("removing what the retention plan allows")
        self._remove_generations(planned, known)
        self._remove_snapshots(planned)
        self._remove_estimates(planned)
        self._remove_resolved_rows(known)
        self._remove_progress()
        self.result["followers"] = DownstreamCleanup(warehouse, spec, self.dry).run()
        if not self.dry:
            self._describe_tables()
        self._compact_and_vacuum()

    def _describe_tables(self) -> None:
        """Update the column comments of tables that earlier releases made, and the table `live`.

        Only tables on a local disk get new comments. On another store nothing is locked, and a change of the schema
        would make a stream's concurrent commit fail.
        """
        live_rows.refresh_live_table(self.model.warehouse, self.model.name)
        known = [
            *list_tables(self.model.warehouse, self.model.name),
            *(one for one in ("generations", *OF_SNAPSHOTS) if self.model.warehouse.exists(one)),
        ]
        if self.model.warehouse.local:
            named = estimate_comments(self.model.spec.states, self.model.spec.key, self.model.spec.version)
            mine = (estimates(self.model.name), estimates_history(self.model.name), latest(self.model.name))
            self.result["described"] = [
                table
                for table in known
                if describe_columns(self.model.warehouse, table, named if table in mine else {})
            ]

    def _compact_and_vacuum(self) -> None:
        """Compact and vacuum the model's tables."""
        names = list_tables(self.model.warehouse, self.model.name)
        self.result["optimized"] = list(filter(None, map(self._compact, names)))
        self.result["not_vacuumed"] = find_unread_files(self.model)
        self.result["vacuumed"] = list(
            filter(None, map(self._vacuum, ("generations", *OF_SNAPSHOTS, *names)))
        )

    def _remove_generations(self, planned: RetentionPlan, known: list[Generation]) -> None:
        self.result["generations"] = planned.generations
        self.result["kept"] = {"generations": planned.why_generations, "snapshots": planned.why_snapshots}
        if not self.dry:
            generations.remove(self.model.warehouse, planned.generations, known)
        gone = [
            one for one in known if one.status == generations.REMOVED or one.generation in planned.generations
        ]
        self.result["checkpoints"] = [
            one.generation for one in gone if self._remove_folder(one.checkpoint, remove=not self.dry)
        ]
        self._remove_reports([one.generation for one in gone])

    def _remove_reports(self, gone: list[str]) -> None:
        """Remove the reports on removed generations."""
        self.result["reports"] = []
        for generation in gone:
            files, names = report_files(self.model.warehouse, self.model.name, generation)
            existing = set(names) & set(files.names(""))
            if existing:
                self.result["reports"].append(generation)
            for name in () if self.dry else existing:
                files.remove(name)

    def _remove_snapshots(self, planned: RetentionPlan) -> None:
        self.result["snapshots"] = planned.snapshots
        if not self.dry:
            store.remove(self.model.warehouse, self.model.name, planned.snapshots)

    def _remove_estimates(self, planned: RetentionPlan) -> None:
        rows = [[("generation", "in", planned.estimates)]]
        wanted = bool(planned.estimates) and self.with_estimates
        self.result["estimates"] = self._delete(estimates(self.model.name), rows) if wanted else 0

    def _remove_resolved_rows(self, known: list[Generation]) -> None:
        """Remove quarantined rows that were replayed or discarded longer ago than `retention.quarantine`."""
        self.result["quarantine"] = 0
        if not self.model.warehouse.exists(TABLE) or "status" not in self.model.warehouse.column_names(TABLE):
            return
        old = [
            ("model", "=", self.model.name),
            ("status", "in", [REPLAYED, DISCARDED]),
            ("resolved_at", "<", times.now() - parse_span(self.model.spec.retention.quarantine)),
        ]
        running = [one for one in known if one.status in (LIVE, SHADOW)]
        rows = [[*old, ("generation", "not in", [one.generation for one in running])]] if running else [old]
        for one in running:
            # The next driver reads from this table whether the rows of its first micro-batch have been written.
            last = Checkpoint(self.model.warehouse, one.checkpoint).find_last_commit()
            done = ("batch_id", "<=", -1 if last is None else last)
            rows.append([*old, ("generation", "=", one.generation), done])
        self.result["quarantine"] = self._delete(TABLE, rows)

    def _remove_progress(self) -> None:
        if not self.dry:
            ProgressLog(self.model.warehouse, self.model.name).compact()
        before = times.now() - parse_span(self.model.spec.retention.progress)
        self.result["progress"] = self._delete(
            format_table_name(self.model.name), [[("started_at", "<", before)]]
        )

    def _delete(self, table: str, rows: Filter) -> int:
        """Delete rows of a table in one commit, and return the number of deleted rows."""
        return delete_rows(self.model.warehouse, table, rows, self.dry)

    def _compact(self, table: str) -> dict[str, Any] | None:
        """Compact a table's small files; return None if it has fewer than two, or if another writer committed first."""
        files = _count_files(self.model.warehouse, table)
        if files < 2 or self.dry:
            return None if files < 2 else {"table": table, "files": files, "files_after": None}
        self.on_progress(f"compacting {table}")
        try:
            with self.model.warehouse.lock(table):
                found = DeltaTable.forPath(self.model.warehouse.spark, self.model.warehouse.path(table))
                found.optimize().executeCompaction()
        except _CONFLICTS:
            return None  # the other writer takes precedence; the next run compacts the table
        return {"table": table, "files": files, "files_after": _count_files(self.model.warehouse, table)}

    def _vacuum(self, table: str) -> dict[str, Any] | None:
        """Remove the files that a table has not needed for the time `retention.files`; a dry run only counts them."""
        if not self.model.warehouse.exists(table) or table in self.result["not_vacuumed"]:
            return None
        hours = parse_span(self.model.spec.retention.files).total_seconds() / 3600
        try:
            if self.dry:
                log = open_log(self.model.warehouse.root, table)
                return {"table": table, "files": len(log.vacuum(int(hours), dry_run=True, full=True))}
            self._vacuum_by_spark(table, hours)
        except (DeltaError, PySparkException) as error:
            raise UserError(
                f"table {table} cannot be vacuumed with retention.files {self.model.spec.retention.files}: "
                f"{extract_first_line(error)}",
                RUN_FAILED,
            ) from error
        return {"table": table, "files": None}

    def _vacuum_by_spark(self, table: str, hours: float) -> None:
        self.on_progress(f"removing unneeded files of {table}")
        spark = self.model.warehouse.spark
        # The log of VACUUM would add two commits a run, which nobody reads.
        spark.conf.set("spark.databricks.delta.vacuum.logging.enabled", "false")
        # By default Spark lists the folders of a table with 10,000 tasks.
        tasks = 4 * spark.sparkContext.defaultParallelism
        spark.conf.set("spark.sql.sources.parallelPartitionDiscovery.parallelism", tasks)
        with _silence_console(self.model.warehouse):
            spark.sql(f"VACUUM delta.`{self.model.warehouse.path(table)}` RETAIN {hours:g} HOURS")

    def _remove_folder(self, name: str, remove: bool) -> bool:
        """Return whether a checkpoint's folder exists, and remove the folder if `remove` is true."""
        if not name.startswith(CHECKPOINTS) or ".." in name:
            raise UserError(
                f"the checkpoint {name} is in no folder of this warehouse, so it is not removed", RUN_FAILED
            )
        return remove_folder(self.model.warehouse, name, remove)


def list_tables(tables: Tables, model: str) -> list[str]:
    """Return the tables that maintenance of a model compacts, including the tables that all models share."""
    own = (estimates(model), archive(model), format_table_name(model), forecasts(model))
    names = (*own, *list_downstream_tables(model), *list_history_tables(model), *SHARED)
    return [table for table in names if tables.exists(table)]


def find_held_generations(tables: Tables, model: str) -> set[str]:
    """Return the generations that a running driver holds, according to the log of drivers."""
    drivers = DriverLog.at(tables.root, model).list_drivers()
    return {one.generation for one in drivers if one.ended_at is None and one.owner.alive(one.beat_at)}


def find_unread_files(model: DeployedModel[Tables]) -> dict[str, str]:
    """Return the tables not to vacuum, with the reason: the monitor or forecast skill has not yet read their files."""
    verb, lag = find_largest_lag(model.warehouse, model.spec)
    if lag < parse_span(model.spec.retention.files):
        return {}
    why = f"the {verb} has not read estimates of {lag.days} days ago: run it, or remove it from the spec"
    return {estimates(model.name): why}


def format_result(model: str, result: Mapping[str, Any], dry: bool) -> list[str]:
    """Return the lines of a report on what maintenance has removed or, if `dry`, would remove."""
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
    lines += format_cleanup(result["followers"], would)
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


@contextmanager
def _silence_console(warehouse: Warehouse) -> Iterator[None]:
    """Discard what VACUUM prints on standard output, because standard output is for the verb's report."""
    jvm: Any = warehouse.spark._jvm
    console = getattr(getattr(jvm.scala, "Console$"), "MODULE$")
    before = console.out()
    console.setOutDirect(jvm.java.io.PrintStream(jvm.java.io.OutputStream.nullOutputStream()))
    try:
        yield
    finally:
        console.setOutDirect(before)


def _count_files(tables: Tables, table: str) -> int:
    sizes = measure_files(tables.root, table)
    return 0 if sizes is None else sizes[0]
