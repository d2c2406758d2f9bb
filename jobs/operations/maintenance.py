"""Delete what the retention plan lets go, compact and vacuum the tables; every step is idempotent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from delta.exceptions import DeltaConcurrentModificationException
from delta.tables import DeltaTable
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from jobs.core.errors import RUN_FAILED, UserError, first_line
from jobs.downstream.queries import tables_of
from jobs.downstream.retention import DownstreamCleanup, largest_lag, lines_of
from jobs.lineage import generations
from jobs.lineage.generations import LIVE, SHADOW
from jobs.observability.progress_log import ProgressLog, table_of
from jobs.operations.retention_plan import plan
from jobs.snapshots import manifests, store
from jobs.specs.model_spec import ModelSpec
from jobs.specs.retention import span_of
from jobs.supervision.driver_log import DriverLog
from jobs.upgrades.comparison.report import files_of
from jobs.warehouse.checkpoints import Checkpoint
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.files import Folder
from jobs.warehouse.quarantine import DISCARDED, REPLAYED, TABLE
from jobs.warehouse.tables import archive, estimates

if TYPE_CHECKING:
    from pyspark.sql import Column

    from jobs.lineage.generations import Generation
    from jobs.operations.retention_plan import Plan

CHECKPOINTS = "checkpoints/"

SHARED = ("manifests", "quarantine", "late_copies")

OF_SNAPSHOTS = ("snapshots", "waiting", "remembered_ids")


@dataclass
class Maintenance:
    """One run; `found` says what has gone, or would."""

    warehouse: Warehouse
    spec: ModelSpec
    dry: bool
    with_estimates: bool
    told: Callable[[str], None] = lambda text: None
    found: dict[str, Any] = field(
        default_factory=lambda: {"optimized": [], "vacuumed": [], "not_vacuumed": {}}
    )

    def run(self) -> None:
        """Take the steps in their order: generations before the snapshots that they began from."""
        model = self.spec.name
        known = generations.all_of(self.warehouse, model)
        made = plan(
            known,
            manifests.all_of(self.warehouse, model),
            self.spec.retention,
            datetime.now(UTC),
            self.spec.fingerprint(),
            self._driven(),
        )
        self.told("removing what is not needed")
        self._generations(made, known)
        self._snapshots(made)
        self._estimates(made)
        self._quarantine(known)
        self._progress()
        self.found["followers"] = DownstreamCleanup(self.warehouse, self.spec, self.dry).run()
        self._tidy()

    def _tidy(self) -> None:
        """Compact and vacuum the tables."""
        self.found["optimized"] = [
            one for one in (self._optimize(table) for table in self._tables()) if one is not None
        ]
        self._spare()
        self.found["vacuumed"] = [
            one
            for one in (self._vacuum(table) for table in ("generations", *OF_SNAPSHOTS, *self._tables()))
            if one is not None
        ]

    def _spare(self) -> None:
        """Leave files of the estimates alone that a monitor, or forecast skill, has still to read."""
        verb, behind = largest_lag(self.warehouse, self.spec)
        if behind >= span_of(self.spec.retention.files):
            self.found["not_vacuumed"][estimates(self.spec.name)] = (
                f"the {verb} has not read estimates of {behind.days} days ago: run it, or take it out of the spec"
            )

    def lines(self) -> list[str]:
        """Say what has gone, or would."""
        would = "would remove" if self.dry else "removed"
        lines = [f"{self.spec.name}: dry run, nothing was changed"] if self.dry else []
        for what in ("generations", "snapshots"):
            names = self.found[what]
            lines.append(f"{would} {len(names)} {what}{': ' if names else ''}{', '.join(names)}")
        if self.found["checkpoints"]:
            lines.append(f"{would} the checkpoints of {', '.join(self.found['checkpoints'])}")
        if self.found["reports"]:
            lines.append(f"{would} the reports on {', '.join(self.found['reports'])}")
        for what, text in (
            ("estimates", "estimates of removed generations"),
            ("quarantine", "quarantined rows that were replayed or discarded"),
            ("progress", "records of micro-batches"),
        ):
            lines.append(f"{would} {self.found[what]:,} {text}")
        lines += lines_of(self.found["followers"], would)
        for one in self.found["optimized"]:
            now = f", now {one['files_after']}" if one["files_after"] is not None else ""
            lines.append(
                f"{'would compact' if self.dry else 'compacted'} {one['table']}: {one['files']} files{now}"
            )
        files = [one for one in self.found["vacuumed"] if one["files"]]
        if self.dry and files:
            said = ", ".join(f"{one['files']} of {one['table']}" for one in files)
            lines.append(f"would remove files that no table needs: {said}")
        elif not self.dry:
            lines.append(f"vacuumed {', '.join(one['table'] for one in self.found['vacuumed']) or 'nothing'}")
        lines += [f"did not vacuum {table}: {why}" for table, why in self.found["not_vacuumed"].items()]
        kept = {**self.found["kept"]["generations"], **self.found["kept"]["snapshots"]}
        return [*lines, *(f"kept {name}: {why}" for name, why in kept.items())]

    def _generations(self, made: Plan, known: list[Generation]) -> None:
        self.found["generations"] = made.generations
        self.found["kept"] = {"generations": made.why_generations, "snapshots": made.why_snapshots}
        if not self.dry:
            generations.remove(self.warehouse, made.generations, known)
        gone = [
            one for one in known if one.status == generations.REMOVED or one.generation in made.generations
        ]
        self.found["checkpoints"] = [
            one.generation for one in gone if self._folder(one.checkpoint, remove=not self.dry)
        ]
        self._reports([one.generation for one in gone])

    def _reports(self, gone: list[str]) -> None:
        """Remove the reports on generations that are gone."""
        self.found["reports"] = []
        for generation in gone:
            files, names = files_of(self.warehouse, self.spec.name, generation)
            there = set(names) & set(files.names(""))
            if there:
                self.found["reports"].append(generation)
            for name in () if self.dry else there:
                files.remove(name)

    def _snapshots(self, made: Plan) -> None:
        self.found["snapshots"] = made.snapshots
        if not self.dry:
            store.remove(self.warehouse, self.spec.name, made.snapshots)

    def _estimates(self, made: Plan) -> None:
        mine = F.col("generation").isin(made.estimates)
        wanted = bool(made.estimates) and self.with_estimates
        self.found["estimates"] = self._delete(estimates(self.spec.name), mine) if wanted else 0

    def _quarantine(self, known: list[Generation]) -> None:
        """Let rows go that were replayed or discarded long ago."""

        self.found["quarantine"] = 0
        if not self.warehouse.exists(TABLE) or "status" not in self.warehouse.read(TABLE).columns:
            return
        old = (
            (F.col("model") == self.spec.name)
            & F.col("status").isin(REPLAYED, DISCARDED)
            & (F.col("resolved_at") < F.lit(datetime.now(UTC) - span_of(self.spec.retention.quarantine)))
        )
        for one in known:
            if one.status in (LIVE, SHADOW):
                # The next driver asks the table whether the micro-batch that it begins with has been written.
                last = Checkpoint(self.warehouse, one.checkpoint).last_commit()
                pending = (F.col("generation") == one.generation) & (
                    F.col("batch_id") > F.lit(-1 if last is None else last)
                )
                old = old & ~F.coalesce(pending, F.lit(False))
        self.found["quarantine"] = self._delete(TABLE, old)

    def _progress(self) -> None:

        if not self.dry:
            ProgressLog(self.warehouse, self.spec.name).compact()
        before = datetime.now(UTC) - span_of(self.spec.retention.progress)
        self.found["progress"] = self._delete(table_of(self.spec.name), F.col("started_at") < F.lit(before))

    def _delete(self, table: str, rows: Column) -> int:
        """Delete rows of a table in one commit, and return how many they are."""
        return self.warehouse.delete(table, rows, self.dry)

    def _tables(self) -> list[str]:
        name = self.spec.name
        own = (estimates(name), archive(name), table_of(name), *tables_of(name))
        return [table for table in (*own, *SHARED) if self.warehouse.exists(table)]

    def _optimize(self, table: str) -> dict[str, Any] | None:
        """Put a table's small files together; None where there is one at most, or another command is at it."""
        self.told(f"compacting {table}")
        found = DeltaTable.forPath(self.warehouse.spark, self.warehouse.path(table))
        files = _files(found)
        if files < 2 or self.dry:
            return None if files < 2 else {"table": table, "files": files, "files_after": None}
        try:
            with self.warehouse.lock(table):
                found.optimize().executeCompaction()
        except DeltaConcurrentModificationException:
            return None  # a writer came first, which is what the table is for; the next run compacts it
        return {"table": table, "files": files, "files_after": _files(found)}

    def _vacuum(self, table: str) -> dict[str, Any] | None:
        """Remove the files that a table has not needed for `retention.files`; return how many would go in a dry run."""
        if not self.warehouse.exists(table) or table in self.found["not_vacuumed"]:
            return None
        self.told(f"removing unneeded files of {table}")
        spark = self.warehouse.spark
        # It would write two commits a time, which say nothing that anybody reads.
        spark.conf.set("spark.databricks.delta.vacuum.logging.enabled", "false")
        # By default each table's folders are listed by 10,000 tasks.
        tasks = 4 * spark.sparkContext.defaultParallelism
        spark.conf.set("spark.sql.sources.parallelPartitionDiscovery.parallelism", tasks)
        hours = span_of(self.spec.retention.files).total_seconds() / 3600
        words = f"VACUUM delta.`{self.warehouse.path(table)}` RETAIN {hours:g} HOURS"
        try:
            with _silent(self.warehouse):
                if self.dry:
                    return {"table": table, "files": spark.sql(f"{words} DRY RUN").count()}
                spark.sql(words)
        except PySparkException as error:
            raise UserError(
                f"table {table} cannot be vacuumed with retention.files {self.spec.retention.files}: "
                f"{first_line(error)}",
                RUN_FAILED,
            ) from error
        return {"table": table, "files": None}

    def _driven(self) -> set[str]:
        """Return the generations that a driver holds, by the log of drivers."""
        log = DriverLog.of(self.warehouse, self.spec.name)
        return {
            one.generation for one in log.drives() if one.ended_at is None and one.owner.alive(one.beat_at)
        }

    def _folder(self, name: str, remove: bool) -> bool:
        """Tell if a checkpoint's folder is there, and remove it."""
        if not name.startswith(CHECKPOINTS) or ".." in name:
            raise UserError(
                f"the checkpoint {name} is in no folder of this warehouse: it is left alone", RUN_FAILED
            )
        return Folder(self.warehouse, name).remove(remove)


@contextmanager
def _silent(warehouse: Warehouse) -> Iterator[None]:
    """Keep what VACUUM prints off standard output, where the report goes."""
    jvm: Any = warehouse.spark._jvm
    console = getattr(getattr(jvm.scala, "Console$"), "MODULE$")
    before = console.out()
    console.setOutDirect(jvm.java.io.PrintStream(jvm.java.io.OutputStream.nullOutputStream()))
    try:
        yield
    finally:
        console.setOutDirect(before)


def _files(table: Any) -> int:
    return int(table.detail().select("numFiles").first()[0])
