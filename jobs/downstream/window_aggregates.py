"""Aggregate windows in Spark with a column of accumulators in the windows table; micro-batches add to it.

Each aggregated reading has one accumulator per window and group (`jobs.downstream.aggregates`). The rows of a
micro-batch are first combined by window, group and share of the keys, so that no task holds a whole window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as F
from pyspark.sql.functions import arrow_udf

from jobs.core.times import parse_duration_us
from jobs.downstream.aggregates import WindowAggregate, accumulate, compute_aggregates, merge_accumulators
from jobs.downstream.readings import build_reading_column
from jobs.specs.model_spec import ModelSpec
from jobs.specs.monitor import Monitor, Window
from kalman.models.named import Named

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

ACCUMULATORS, AGGREGATES = "accumulators", "aggregates"
"""Columns of the windows table: the accumulators by reading, and the aggregates by name."""
SHARES = 32
"""Number of shares of the keys by which the rows of a window and group are first combined."""


class Aggregated(NamedTuple):
    """Aggregates of one reading; keep: whether they need the readings themselves."""

    reading: str
    aggregates: tuple[WindowAggregate, ...]

    @property
    def keep(self) -> bool:
        """Return whether an aggregate needs the readings themselves, not only sums."""
        return any(one.needs_values for one in self.aggregates)


def list_aggregated(spec: ModelSpec, monitor: Monitor) -> list[Aggregated]:
    """Return a spec's aggregates by reading."""
    by_reading: dict[str, list[WindowAggregate]] = {}
    for one in monitor.aggregates:
        function = None if one.function is None else Named(one.function, spec.folder)
        by_reading.setdefault(one.of, []).append(WindowAggregate(one.name, one.kind, one.level, function))
    return [Aggregated(name, tuple(some)) for name, some in by_reading.items()]


def group_columns(spec: ModelSpec, monitor: Monitor) -> dict[str, Column]:
    """Return the grouping columns that estimates store in arrays: measurements, controls and inputs."""
    kinds = {
        **dict.fromkeys(spec.measurement, "measured"),
        **dict.fromkeys([*spec.control, *spec.input_names], "control"),
    }
    return {
        name: build_reading_column(spec, f"{kinds[name]}.{name}")
        for name in monitor.by
        if name not in spec.key
    }


def assign_windows(estimates: DataFrame, window: Window, watermark: int | None) -> DataFrame:
    """Return each row once per window, with the window (`_window`) and whether it had ended (`_late`)."""
    size, slide = parse_duration_us(window.size), parse_duration_us(window.slide_or_size)
    marked = estimates.withColumn(
        "_window", F.window("event_time", f"{size} microseconds", f"{slide} microseconds")
    )
    ended = F.lit(False) if watermark is None else F.unix_micros(F.col("_window.end")) <= watermark
    return marked.withColumn("_late", ended)


def build_place_columns(monitor: Monitor, window: Window) -> list[Column]:
    """Return the columns that identify window and group in rows of `assign_windows`."""
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
    """Return the accumulators of rows that are not late, by window and group.

    estimates: estimates with the columns of groups.
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
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.unionByName(part)
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
    """Add two columns of accumulators, each of which may be null."""
    parts = []
    for i, one in enumerate(several):
        pair = F.array_compact(F.array(F.get(F.col(old), i), F.get(F.col(new), i)))
        parts.append(_build_merger(one.keep)(pair))
    return F.array(*parts)


def compute_figures(several: list[Aggregated], accumulators: Column) -> Column:
    """Return the aggregates by name; null where an aggregate is undefined."""
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
