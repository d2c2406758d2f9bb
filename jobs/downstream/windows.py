"""Add each micro-batch of estimates to event-time windows and their aggregates, exactly once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from delta.tables import DeltaTable
from pyspark.sql import functions as F
from pyspark.sql.functions import arrow_udf

from jobs.core.times import parse_duration_us
from jobs.downstream.aggregates import WindowAggregate, accumulate, compute_aggregates, merge_accumulators
from jobs.downstream.queries import open_monitor_files
from jobs.lineage.live import combine_conditions
from jobs.snapshots.model_runtime import ship_named
from jobs.spark.warehouse import Warehouse, format_ddl, set_transaction
from jobs.specs.model_spec import ModelSpec
from jobs.specs.monitor import Monitor, Reading, Window
from jobs.storage.row_changes import delete_rows
from jobs.storage.table_rows import convert_time
from jobs.storage.tables import windows, windows_open
from jobs.streaming.publishing import TopicSink, add_ordinals, write_to_sink
from kalman.models.named import Named

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def build_reading_column(spec: ModelSpec, name: str) -> Column:
    """Return the column of a reading; it is null in an estimate that has no such reading."""
    found = spec.readings.by_name[name]
    column = F.col(found.column)
    return column if found.index is None else F.get(column, found.index)


def align_readings(estimates: DataFrame, spec: ModelSpec, specs: Mapping[str, ModelSpec]) -> DataFrame:
    """Return estimates whose readings stand where a spec has them, null where the generation's spec lacks a reading.

    Rules and windows name readings of the deployed spec, and another version with other states may be live.

    Args:
        estimates: estimates with the column generation.
        spec: the deployed spec.
        specs: the spec of each generation.
    """
    wanted, nothing = spec.readings.by_name, F.lit(None).cast("double")
    others: dict[tuple[tuple[str, Reading], ...], list[str]] = {}
    for generation, made_by in specs.items():
        if made_by.readings.by_name != wanted:
            others.setdefault(tuple(made_by.readings.by_name.items()), []).append(generation)
    aligned: dict[str, Column] = {}
    for column in {one.column for one in wanted.values() if one.index is not None} & {*estimates.columns}:
        names = {one.index: name for name, one in wanted.items() if one.column == column}
        cases: Any = F
        for layout, made in others.items():
            place = dict(layout)
            parts = (place.get(names.get(at, "")) for at in range(1 + max(at or 0 for at in names)))
            values = F.array(*(nothing if one is None else F.get(column, F.lit(one.index)) for one in parts))
            cases = cases.when(F.col("generation").isin(made), values)
        if others:
            aligned[column] = cases.otherwise(F.col(column))
    return estimates.withColumns(aligned) if aligned else estimates


ACCUMULATORS, AGGREGATES = "accumulators", "aggregates"
"""Two columns of the windows table: the accumulators of each reading, and the aggregates by name."""
SHARES = 32
"""Number of parts into which the keys of a window and group are split for the first step of the aggregation."""


class Aggregated(NamedTuple):
    """The aggregates of one reading."""

    reading: str
    aggregates: tuple[WindowAggregate, ...]

    @property
    def keep(self) -> bool:
        """Return whether any of these aggregates needs the readings themselves, not only sums."""
        return any(one.needs_values for one in self.aggregates)


def list_aggregated(spec: ModelSpec, monitor: Monitor) -> list[Aggregated]:
    """Return the aggregates of a spec, grouped by reading."""
    by_reading: dict[str, list[WindowAggregate]] = {}
    for one in monitor.aggregates:
        function = None if one.function is None else Named(one.function, spec.functions_folder)
        by_reading.setdefault(one.of, []).append(WindowAggregate(one.name, one.kind, one.level, function))
    return [Aggregated(name, tuple(some)) for name, some in by_reading.items()]


def list_group_readings(spec: ModelSpec, monitor: Monitor) -> dict[str, str]:
    """Return the readings of grouping columns that estimates store in arrays: measurements, controls and inputs."""
    kinds = {
        **dict.fromkeys(spec.measurement, "measured"),
        **dict.fromkeys([*spec.control, *spec.input_names], "control"),
    }
    return {name: f"{kinds[name]}.{name}" for name in monitor.by if name not in spec.key}


def assign_windows(estimates: DataFrame, window: Window, watermark: int | None) -> DataFrame:
    """Return each row once for each of its windows, with the window (`_window`) and whether it had ended (`_late`)."""
    size, slide = parse_duration_us(window.size), parse_duration_us(window.slide_or_size)
    marked = estimates.withColumn(
        "_window", F.window("event_time", f"{size} microseconds", f"{slide} microseconds")
    )
    ended = F.lit(False) if watermark is None else F.unix_micros(F.col("_window.end")) <= watermark
    return marked.withColumn("_late", ended)


def build_place_columns(monitor: Monitor, window: Window) -> list[Column]:
    """Return the columns that identify the window and the group in rows of `assign_windows`."""
    return [
        F.lit(monitor.definition("windows")).alias("definition"),
        F.lit(window.size).alias("size"),
        F.lit(window.slide_or_size).alias("slide"),
        F.col("_window.start").alias("window_start"),
        F.col("_window.end").alias("window_end"),
        *(F.col(f"`{name}`") for name in monitor.by),
    ]


def accumulate_rows(
    spec: ModelSpec, monitor: Monitor, estimates: DataFrame, watermark: int | None
) -> DataFrame:
    """Return the accumulators of the rows that are not late, by window and group.

    estimates: estimates that have the grouping columns.
    """
    several, parts = list_aggregated(spec, monitor), []
    share = F.pmod(F.xxhash64("key"), F.lit(SHARES))
    for window in monitor.windows:
        rows = assign_windows(estimates, window, watermark).filter(~F.col("_late"))
        values = [build_reading_column(spec, one.reading) for one in several]
        read = [
            F.when(~F.isnan(one) & (F.abs(one) < F.lit(float("inf"))), one).alias(f"_v{i}")
            for i, one in enumerate(values)
        ]
        parts.append(rows.select(*build_place_columns(monitor, window), share.alias("_share"), *read))
    whole = reduce(lambda one, other: one.unionByName(other), parts)
    place = [name for name in whole.columns if not name.startswith("_")]
    lists = whole.groupBy(*map(_quote_name, place), "_share").agg(
        *(F.collect_list(f"_v{i}").alias(f"_v{i}") for i in range(len(several)))
    )
    packets = [_build_accumulator(one.keep)(F.col(f"_v{i}")).alias(f"_v{i}") for i, one in enumerate(several)]
    shares = lists.select(*map(_quote_name, place), *packets)
    lists = shares.groupBy(*map(_quote_name, place)).agg(
        *(F.collect_list(f"_v{i}").alias(f"_v{i}") for i in range(len(several)))
    )
    found = [_build_merger(one.keep)(F.col(f"_v{i}")) for i, one in enumerate(several)]
    return lists.select(*map(_quote_name, place), F.array(*found).alias(ACCUMULATORS))


def add_accumulators(several: list[Aggregated], old: str, new: str) -> Column:
    """Return the sum of two columns of accumulators, each of which may be null."""
    parts = []
    for i, one in enumerate(several):
        pair = F.array_compact(F.array(F.get(F.col(old), i), F.get(F.col(new), i)))
        parts.append(_build_merger(one.keep)(pair))
    return F.array(*parts)


def compute_figures(several: list[Aggregated], accumulators: Column) -> Column:
    """Return the aggregates by name; an undefined aggregate is null."""
    names = F.array(*(F.lit(one.name) for some in several for one in some.aggregates))
    found = F.concat(*(_build_finisher(one)(F.get(accumulators, i)) for i, one in enumerate(several)))
    return F.map_from_arrays(names, F.transform(found, lambda one: F.when(~F.isnan(one), one)))


def _build_accumulator(keep: bool) -> Callable[[Column], Column]:
    @arrow_udf("binary")  # type: ignore[call-overload]
    def of(values: pa.Array) -> pa.Array:
        offsets = values.offsets.to_numpy()
        flat = values.flatten().to_numpy(zero_copy_only=False).astype(float)
        return pa.array(accumulate(flat, (offsets - offsets[0]).astype(np.int64), keep), pa.binary())

    return of


def _build_merger(keep: bool) -> Callable[[Column], Column]:
    @arrow_udf("binary")  # type: ignore[call-overload]
    def of(parts: pa.Array) -> pa.Array:
        empty = accumulate(np.zeros(0), np.zeros(2, np.int64), keep)
        return pa.array([merge_accumulators(some or empty, keep) for some in parts.to_pylist()], pa.binary())

    return of


def _build_finisher(one: Aggregated) -> Callable[[Column], Column]:
    aggregates, keep = one.aggregates, one.keep

    @arrow_udf("array<double>")  # type: ignore[call-overload]
    def of(accumulators: pa.Array) -> pa.Array:
        found = compute_aggregates(accumulators.to_pylist(), aggregates, keep)
        flat = np.stack([found[some.name] for some in aggregates], 1).ravel()
        offsets = np.arange(0, len(flat) + 1, len(aggregates), dtype=np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))

    return of


def _quote_name(name: str) -> str:
    return f"`{name}`"


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

    def __post_init__(self) -> None:
        functions = [one.function for one in self.monitor.aggregates if one.function is not None]
        ship_named(self.warehouse.spark, functions, self.spec.functions_folder)

    def __call__(self, estimates: DataFrame, batch_id: int) -> None:
        """Add a micro-batch to its windows. A repeated call changes nothing."""
        estimates = self._add_group_columns(estimates).persist()
        delay = parse_duration_us(self.monitor.watermark)
        try:
            newest = estimates.agg(F.max(F.unix_micros("event_time")).alias("newest")).first()
            assert newest is not None
            before = self._before(batch_id)
            if newest["newest"] is not None:
                watermark = None if before is None else before - delay
                sums = self.sums(estimates, watermark).persist()
                self._add_all(sums, estimates, watermark, batch_id)
                counts = sums.agg(F.sum("rows").alias("rows"), F.sum("late").alias("late")).first()
                assert counts is not None
                self.rows += counts["rows"] or 0
                self.late += counts["late"] or 0
                sums.unpersist()
            after = max((one for one in (before, newest["newest"]) if one is not None), default=None)
            if after is not None:
                self._close(after - delay, batch_id)
            detail = {"batch": batch_id, "before": before, "after": after}
            files = open_monitor_files(self.warehouse, self.spec.name)
            files.write(self._file, json.dumps(detail).encode())
        finally:
            estimates.unpersist()

    def sums(self, estimates: DataFrame, watermark: int | None) -> DataFrame:
        """Return the sums of a micro-batch: a row for each window and group."""
        parts = []
        n, m = len(self.spec.states), len(self.spec.measurement)
        biased = "innovation" in estimates.columns
        for window in self.monitor.windows:
            marked = assign_windows(estimates, window, watermark)
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
                    *build_place_columns(self.monitor, window),
                    *COUNTS,
                    *("nis_sum", "mean_sum", "innovation_sum"),
                )
            )
        return reduce(lambda one, other: one.unionByName(other), parts)

    def complete(self, estimates: DataFrame) -> DataFrame:
        """Return the rows of all windows of a history; of a window that appears when final, only the final row."""
        rows = self._add_group_columns(estimates)
        sums = self.sums(rows, None)
        if self._several:
            sums = self._add_aggregates(sums, accumulate_rows(self.spec, self.monitor, rows, None), None)
        final = self._of("final")
        if final is not None:
            newest = estimates.agg(F.max(F.unix_micros("event_time")).alias("newest")).first()
            assert newest is not None
            cut = (newest["newest"] or 0) - parse_duration_us(self.monitor.watermark)
            sums = sums.filter(~final | (F.unix_micros("window_end") <= cut))
        return add_means(sums)

    @property
    def _several(self) -> list[Aggregated]:
        return list_aggregated(self.spec, self.monitor)

    def _add_group_columns(self, estimates: DataFrame) -> DataFrame:
        """Return estimates with the grouping columns of windows."""
        groups = list_group_readings(self.spec, self.monitor).items()
        return estimates.withColumns({name: build_reading_column(self.spec, of) for name, of in groups})

    def _of(self, when: str) -> Column | None:
        """Return the condition for rows of the windows that appear at `when`; None if no window does."""
        some = [one for one in self.monitor.windows if one.when == when]
        if not some:
            return None
        return combine_conditions(
            (F.col("size") == one.size) & (F.col("slide") == one.slide_or_size) for one in some
        )

    def _add_all(self, sums: DataFrame, estimates: DataFrame, watermark: int | None, batch_id: int) -> None:
        several = self._several
        more = accumulate_rows(self.spec, self.monitor, estimates, watermark) if several else None
        growing, final = self._of("growing"), self._of("final")
        if growing is not None:
            rows, table = sums.filter(growing), windows(self.spec.name)
            self._add(rows if more is None else self._add_aggregates(rows, more, table), table, batch_id)
            if self.monitor.windows_kafka is not None:
                self._send(
                    self._join_windows(self._mine(table), rows.select(*self._place), "left_semi"), batch_id
                )
        if final is not None:  # a row that is too late for a published window is not added to the window
            rows, table = sums.filter(final & (F.col("rows") > 0)), windows_open(self.spec.name)
            self._add(rows if more is None else self._add_aggregates(rows, more, table), table, batch_id)

    @property
    def _place(self) -> list[str]:
        return [*PLACE, *self.monitor.by]

    def _mine(self, table: str) -> DataFrame:
        return self.warehouse.read(table).filter(F.col("definition") == self.monitor.definition("windows"))

    def _join_windows(self, rows: DataFrame, others: DataFrame, how: str) -> DataFrame:
        """Join rows that have the same window and group."""
        renamed = others.withColumnsRenamed({name: f"_{name}" for name in self._place})
        same = F.lit(True)
        for name in self._place:
            same = same & rows[f"`{name}`"].eqNullSafe(renamed[f"`_{name}`"])
        return rows.join(renamed, same, how).drop(*(f"_{name}" for name in self._place))

    def _add_aggregates(self, sums: DataFrame, more: DataFrame, table: str | None) -> DataFrame:
        """Return the sums with the accumulators merged with those in a table of windows, and with the aggregates."""
        several, warehouse = self._several, self.warehouse
        rows = self._join_windows(sums, more.withColumnRenamed(ACCUMULATORS, "_new"), "left")
        there = (
            table is not None and warehouse.exists(table) and ACCUMULATORS in warehouse.read(table).columns
        )
        if table is not None and there:
            kept = self._mine(table).select(*self._place, F.col(ACCUMULATORS).alias("_old"))
            rows = self._join_windows(rows, kept, "left")
        else:
            rows = rows.withColumn("_old", F.lit(None).cast("array<binary>"))
        rows = rows.withColumn(ACCUMULATORS, add_accumulators(several, "_old", "_new")).drop("_old", "_new")
        return rows.withColumn(AGGREGATES, compute_figures(several, F.col(ACCUMULATORS)))

    def _close(self, cut: int, batch_id: int) -> None:
        """Publish the windows that ended by `cut` (microseconds), because no later estimate can be added to them."""
        table, warehouse = windows_open(self.spec.name), self.warehouse
        if self._of("final") is None or not warehouse.exists(table):
            return
        ended = F.unix_micros("window_end") <= cut
        rows = self._mine(table).filter(ended).persist()
        if not rows.isEmpty():
            target = windows(self.spec.name)
            self._create(target, rows)
            # A separate transaction: the same micro-batch may have changed growing windows of this table.
            transaction = (f"{self.application}-final", batch_id)
            warehouse.append(rows.coalesce(1), target, transaction, more_columns=True)
            self._send(rows, batch_id)
            mine = ("definition", "=", self.monitor.definition("windows"))
            delete_rows(warehouse, table, [[mine, ("window_end", "<=", convert_time(cut))]])
        rows.unpersist()

    def _send(self, rows: DataFrame, batch_id: int) -> None:
        """Send the rows of windows to the topic, if any, at least once."""
        if self.monitor.windows_kafka is None:
            return
        topic, by = TopicSink(self.monitor.windows_kafka.topic), self.monitor.by
        groups = [F.col(f"`{name}`").cast("string") for name in by]
        key = F.concat_ws("/", "size", "slide") if not by else groups[0]
        rows = rows.drop(ACCUMULATORS).withColumn("key", F.to_json(F.array(*groups)) if len(by) > 1 else key)
        numbers = {"query": F.lit(self.application), "batch_id": F.lit(batch_id).cast("bigint")}
        messages = add_ordinals(rows.coalesce(1).sort(*map(F.col, PLACE), "key")).withColumns(numbers)
        write_to_sink(topic.name, batch_id, lambda: topic.send(messages))

    def _create(self, table: str, rows: DataFrame) -> None:
        self.warehouse.create(table, format_ddl(rows.schema))

    def _add(self, sums: DataFrame, table: str, batch_id: int) -> None:
        warehouse = self.warehouse
        more = [name for name in (ACCUMULATORS, AGGREGATES) if name in sums.columns]
        if not warehouse.exists(table):
            empty = add_means(sums.select(*PLACE, *self.monitor.by, *COUNTS, *_SUMS))
            types = {name: sums.schema[name].dataType for name in more}
            empty = empty.withColumns({name: F.lit(None).cast(kind) for name, kind in types.items()})
            self._create(table, empty)
        sums = sums.persist() if more else sums  # computed once, because a merge reads its rows twice
        session = sums.sparkSession
        place = self._place
        # The definition is a constant in the condition, so that the merge does not read windows of other definitions.
        same = " AND ".join(f"t.`{name}` <=> s.`{name}`" for name in place[1:])
        same = f"t.definition = '{self.monitor.definition('windows')}' AND {same}"
        added: dict[str, Any] = {
            name: F.col(f"t.{name}") + F.col(f"s.{name}") for name in (*COUNTS, "nis_sum")
        }
        for name in ("mean_sum", "innovation_sum"):
            added[name] = F.zip_with(F.col(f"t.{name}"), F.col(f"s.{name}"), lambda a, b: a + b)
        added |= {name: F.col(f"s.{name}") for name in more}
        fresh: dict[str, Any] = {name: F.col(f"s.`{name}`") for name in (*place, *COUNTS, *_SUMS, *more)}
        target = DeltaTable.forPath(session, warehouse.path(table)).alias("t")
        merge = target.merge(sums.alias("s"), same).withSchemaEvolution()
        merge = merge.whenMatchedUpdate(set={**added, **_compute_means(added)})
        merge = merge.whenNotMatchedInsert(values={**fresh, **_compute_means(fresh)})
        with warehouse.lock(table), set_transaction(session, self.application, batch_id):
            merge.execute()
        if more:
            sums.unpersist()

    def _before(self, batch_id: int) -> int | None:
        """Return the newest event time (us) of the earlier micro-batches; None in the first micro-batch."""
        kept = open_monitor_files(self.warehouse, self.spec.name).read(self._file)
        if kept is None:
            return None
        detail = json.loads(kept)
        return detail["before"] if detail["batch"] == batch_id else detail["after"]

    @property
    def _file(self) -> str:
        return f"watermark-{self.monitor.definition('windows')}.json"


_SUMS = ("nis_sum", "mean_sum", "innovation_sum")


def _compute_means(sums: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that are derived from sums and counts."""

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


def add_means(rows: DataFrame) -> DataFrame:
    """Add the columns that are derived from sums and counts."""
    return rows.withColumns(_compute_means({name: F.col(name) for name in (*COUNTS, *_SUMS)}))
