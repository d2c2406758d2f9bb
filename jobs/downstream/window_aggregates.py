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

from jobs.core.times import duration_us
from jobs.downstream.aggregates import Aggregate, accumulate, merged, results
from jobs.downstream.readings import column_of
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
    aggregates: tuple[Aggregate, ...]

    @property
    def keep(self) -> bool:
        """Return whether an aggregate needs the readings themselves, not only sums."""
        return any(one.needs_values for one in self.aggregates)


def aggregated_of(spec: ModelSpec, monitor: Monitor) -> list[Aggregated]:
    """Return a spec's aggregates by reading."""
    by_reading: dict[str, list[Aggregate]] = {}
    for one in monitor.aggregates:
        function = None if one.function is None else Named(one.function, spec.folder)
        by_reading.setdefault(one.of, []).append(Aggregate(one.name, one.kind, one.level, function))
    return [Aggregated(name, tuple(some)) for name, some in by_reading.items()]


def group_columns(spec: ModelSpec, monitor: Monitor) -> dict[str, Column]:
    """Return the grouping columns that estimates store in arrays: measurements, controls and inputs."""
    kinds = {
        **dict.fromkeys(spec.measurement, "measured"),
        **dict.fromkeys([*spec.control, *spec.input_names], "control"),
    }
    return {name: column_of(spec, f"{kinds[name]}.{name}") for name in monitor.by if name not in spec.key}


def in_window(estimates: DataFrame, window: Window, watermark: int | None) -> DataFrame:
    """Return each row once per window, with the window (`_window`) and whether it had ended (`_late`)."""
    size, slide = duration_us(window.size), duration_us(window.slide_or_size)
    marked = estimates.withColumn(
        "_window", F.window("event_time", f"{size} microseconds", f"{slide} microseconds")
    )
    ended = F.lit(False) if watermark is None else F.unix_micros(F.col("_window.end")) <= watermark
    return marked.withColumn("_late", ended)


def place_of(monitor: Monitor, window: Window) -> list[Column]:
    """Return the columns that identify window and group in rows of `in_window`."""
    return [
        F.lit(monitor.definition("windows")).alias("definition"),
        F.lit(window.size).alias("size"),
        F.lit(window.slide_or_size).alias("slide"),
        F.col("_window.start").alias("window_start"),
        F.col("_window.end").alias("window_end"),
        *(F.col(f"`{name}`") for name in monitor.by),
    ]


def accumulated(spec: ModelSpec, monitor: Monitor, estimates: DataFrame, watermark: int | None) -> DataFrame:
    """Return the accumulators of rows that are not late, by window and group.

    estimates: estimates with the columns of groups.
    """
    several, parts = aggregated_of(spec, monitor), []
    share = F.pmod(F.xxhash64("key"), F.lit(SHARES))
    for window in monitor.windows:
        rows = in_window(estimates, window, watermark).filter(~F.col("_late"))
        values = [column_of(spec, one.reading) for one in several]
        read = [
            F.when(~F.isnan(one) & (F.abs(one) < F.lit(float("inf"))), one).alias(f"_v{i}")
            for i, one in enumerate(values)
        ]
        parts.append(rows.select(*place_of(monitor, window), share.alias("_share"), *read))
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.unionByName(part)
    place = [name for name in whole.columns if not name.startswith("_")]
    lists = whole.groupBy(*map(_quoted, place), "_share").agg(
        *(F.collect_list(f"_v{i}").alias(f"_v{i}") for i in range(len(several)))
    )
    packets = [_accumulator(one.keep)(F.col(f"_v{i}")).alias(f"_v{i}") for i, one in enumerate(several)]
    shares = lists.select(*map(_quoted, place), *packets)
    lists = shares.groupBy(*map(_quoted, place)).agg(
        *(F.collect_list(f"_v{i}").alias(f"_v{i}") for i in range(len(several)))
    )
    found = [_merger(one.keep)(F.col(f"_v{i}")) for i, one in enumerate(several)]
    return lists.select(*map(_quoted, place), F.array(*found).alias(ACCUMULATORS))


def both(several: list[Aggregated], old: str, new: str) -> Column:
    """Add two columns of accumulators, each of which may be null."""
    parts = []
    for i, one in enumerate(several):
        pair = F.array_compact(F.array(F.get(F.col(old), i), F.get(F.col(new), i)))
        parts.append(_merger(one.keep)(pair))
    return F.array(*parts)


def figures(several: list[Aggregated], accumulators: Column) -> Column:
    """Return the aggregates by name; null where an aggregate is undefined."""
    names = F.array(*(F.lit(one.name) for some in several for one in some.aggregates))
    found = F.concat(*(_finisher(one)(F.get(accumulators, i)) for i, one in enumerate(several)))
    return F.map_from_arrays(names, F.transform(found, lambda one: F.when(~F.isnan(one), one)))


def _accumulator(keep: bool) -> Callable[[Column], Column]:
    @arrow_udf("binary")  # type: ignore[call-overload]
    def of(values: pa.Array) -> pa.Array:
        offsets = values.offsets.to_numpy()
        flat = values.flatten().to_numpy(zero_copy_only=False).astype(float)
        return pa.array(accumulate(flat, (offsets - offsets[0]).astype(np.int64), keep), pa.binary())

    return of


def _merger(keep: bool) -> Callable[[Column], Column]:
    @arrow_udf("binary")  # type: ignore[call-overload]
    def of(parts: pa.Array) -> pa.Array:
        empty = accumulate(np.zeros(0), np.zeros(2, np.int64), keep)
        return pa.array([merged(some or empty, keep) for some in parts.to_pylist()], pa.binary())

    return of


def _finisher(one: Aggregated) -> Callable[[Column], Column]:
    aggregates, keep = one.aggregates, one.keep

    @arrow_udf("array<double>")  # type: ignore[call-overload]
    def of(accumulators: pa.Array) -> pa.Array:
        found = results(accumulators.to_pylist(), aggregates, keep)
        flat = np.stack([found[some.name] for some in aggregates], 1).ravel()
        offsets = np.arange(0, len(flat) + 1, len(aggregates), dtype=np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))

    return of


def _quoted(name: str) -> str:
    return f"`{name}`"
