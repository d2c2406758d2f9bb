"""Windows over event time: each micro-batch of estimates is added to the windows of its rows, exactly once.

A window has a row from its first estimate on, which is updated. The watermark is the newest event time of all earlier
micro-batches less the spec's delay; an estimate for a window that ended before it is counted as late and not added.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delta.tables import DeltaTable
from pyspark.sql import functions as F

from jobs.core.times import duration_us
from jobs.specs.model_spec import ModelSpec
from jobs.specs.monitor import Monitor
from jobs.warehouse.delta import Warehouse, of_transaction
from jobs.warehouse.files import hadoop_files
from jobs.warehouse.tables import windows

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

COUNTS = ("rows", "late", "gated", "flagged", "nis_rows")
PLACE = ("definition", "size", "slide", "window_start", "window_end")


@dataclass
class Windows:
    """The `foreachBatch` function that adds live estimates to windows."""

    warehouse: Warehouse
    spec: ModelSpec
    monitor: Monitor
    application: str
    rows: int = 0
    late: int = 0

    def __call__(self, estimates: DataFrame, batch_id: int) -> None:
        """Add a micro-batch to its windows. Idempotent."""
        estimates = estimates.persist()
        try:
            newest = estimates.agg(F.max(F.unix_micros("event_time")).alias("newest")).first()
            assert newest is not None
            before = self._before(batch_id)
            if newest["newest"] is not None:
                delay = duration_us(self.monitor.watermark)
                sums = self.sums(estimates, None if before is None else before - delay).persist()
                self._add(sums, batch_id)
                counts = sums.agg(F.sum("rows").alias("rows"), F.sum("late").alias("late")).first()
                assert counts is not None
                self.rows += counts["rows"] or 0
                self.late += counts["late"] or 0
                sums.unpersist()
            after = max((one for one in (before, newest["newest"]) if one is not None), default=None)
            detail = {"batch": batch_id, "before": before, "after": after}
            self._files.write(self._file, json.dumps(detail).encode())
        finally:
            estimates.unpersist()

    def sums(self, estimates: DataFrame, watermark: int | None) -> DataFrame:
        """Return the sums of a micro-batch: a row for each window and group."""
        definition, parts = self.monitor.definition("windows"), []
        n, m = len(self.spec.states), len(self.spec.measurement)
        biased = "innovation" in estimates.columns
        for window in self.monitor.windows:
            size, slide = duration_us(window.size), duration_us(window.slide_or_size)
            taken = F.window("event_time", f"{size} microseconds", f"{slide} microseconds")
            marked = estimates.withColumn("_window", taken)
            ended = F.lit(False) if watermark is None else F.unix_micros(F.col("_window.end")) <= watermark
            marked = marked.withColumn("_late", ended)
            here = ~F.col("_late")

            def total(values: Column, here: Column = here) -> Column:
                return F.coalesce(F.sum(F.when(here, values)), F.lit(0.0))

            def each(name: str, count: int, here: Column = here) -> Column:
                return F.array(*(total(F.get(F.col(name), i), here) for i in range(count)))

            parts.append(
                marked.groupBy("_window", *(F.col(f"`{name}`") for name in self.monitor.by))
                .agg(
                    F.count_if(here).alias("rows"),
                    F.count_if("_late").alias("late"),
                    F.count_if(here & (F.col("flags") == "gated")).alias("gated"),
                    F.count_if(here & F.col("flags").isNotNull()).alias("flagged"),
                    F.count_if(here & F.col("nis").isNotNull()).alias("nis_rows"),
                    total(F.col("nis")).alias("nis_sum"),
                    each("mean", n).alias("mean_sum"),
                    (each("innovation", m) if biased else F.lit(None).cast("array<double>")).alias(
                        "innovation_sum"
                    ),
                )
                .select(
                    F.lit(definition).alias("definition"),
                    F.lit(window.size).alias("size"),
                    F.lit(window.slide_or_size).alias("slide"),
                    F.col("_window.start").alias("window_start"),
                    F.col("_window.end").alias("window_end"),
                    *(F.col(f"`{name}`") for name in self.monitor.by),
                    *COUNTS,
                    *("nis_sum", "mean_sum", "innovation_sum"),
                )
            )
        whole = parts[0]
        for part in parts[1:]:
            whole = whole.unionByName(part)
        return whole

    def _add(self, sums: DataFrame, batch_id: int) -> None:
        table, warehouse = windows(self.spec.name), self.warehouse
        if not warehouse.exists(table):
            empty = with_means(sums.select(*PLACE, *self.monitor.by, *COUNTS, *_SUMS))
            columns = ", ".join(f"`{f.name}` {f.dataType.simpleString()}" for f in empty.schema.fields)
            warehouse.create(table, columns)
        session = sums.sparkSession
        place = [*PLACE, *self.monitor.by]
        # With the definition as a constant, windows of other definitions are not read.
        same = " AND ".join(f"t.`{name}` <=> s.`{name}`" for name in place[1:])
        same = f"t.definition = '{self.monitor.definition('windows')}' AND {same}"
        added: dict[str, Any] = {
            name: F.col(f"t.{name}") + F.col(f"s.{name}") for name in (*COUNTS, "nis_sum")
        }
        for name in ("mean_sum", "innovation_sum"):
            added[name] = F.zip_with(F.col(f"t.{name}"), F.col(f"s.{name}"), lambda a, b: a + b)
        fresh: dict[str, Any] = {name: F.col(f"s.`{name}`") for name in (*place, *COUNTS, *_SUMS)}
        target = DeltaTable.forPath(session, warehouse.path(table)).alias("t")
        merge = target.merge(sums.alias("s"), same).withSchemaEvolution()
        merge = merge.whenMatchedUpdate(set={**added, **_means(added)})
        merge = merge.whenNotMatchedInsert(values={**fresh, **_means(fresh)})
        with warehouse.lock(table), of_transaction(session, self.application, batch_id):
            merge.execute()

    def _before(self, batch_id: int) -> int | None:
        """Return the newest event time (us) of earlier micro-batches, None in the first."""
        kept = self._files.read(self._file)
        if kept is None:
            return None
        detail = json.loads(kept)
        return detail["before"] if detail["batch"] == batch_id else detail["after"]

    @property
    def _files(self) -> Any:
        return hadoop_files(self.warehouse, f"_monitor/{self.spec.name}")

    @property
    def _file(self) -> str:
        return f"watermark-{self.monitor.definition('windows')}.json"


_SUMS = ("nis_sum", "mean_sum", "innovation_sum")


def _means(sums: dict[str, Any]) -> dict[str, Any]:
    """Return the columns derived from sums and counts."""

    def share(count: Any) -> Any:
        return F.try_divide(count, sums["rows"])

    def mean(values: Any, count: Any) -> Any:
        return F.when(count > 0, F.transform(values, lambda one: one / count))

    return {
        "mean_nis": F.try_divide(sums["nis_sum"], sums["nis_rows"]),
        "share_gated": share(sums["gated"]),
        "share_flagged": share(sums["flagged"]),
        "mean": mean(sums["mean_sum"], sums["rows"]),
        "bias": mean(sums["innovation_sum"], sums["nis_rows"]),
    }


def with_means(rows: DataFrame) -> DataFrame:
    """Return sums with the columns that are derived from them."""
    return rows.withColumns(_means({name: F.col(name) for name in (*COUNTS, *_SUMS)}))
