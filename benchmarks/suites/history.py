"""Estimates of every row in batch, as `estimate` makes them, compared with a shuffle of the same rows through Python.

Without a sink, what is measured is the packing, the shuffle, the filter and the rows of estimates. Into Delta it is the
whole of the verb's work in a running session: finding the state, counting the rows, and the commit.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.contenders.contenders import PARTITIONS, limit
from benchmarks.workloads.data import batch
from benchmarks.workloads.work import Work
from jobs.lineage.generations import DeployedModel
from jobs.spark.conf import set_codegen_for

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def compare(spark: SparkSession, work: Work, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Return rows a second, by contender, of a work whose sink is `noop` (smoothing too) or `delta`."""
    source = folder / "rows"
    rows = batch(work, source, 1)
    frame = spark.read.parquet(str(source))
    if work.sink == "delta":
        contenders = {
            "ours": lambda number: _into_delta(spark, work, source, folder / f"ours-{number}"),
            "limit": lambda number: _save(limit(frame, work), "delta", folder / f"limit-{number}"),
        }
    else:
        contenders: dict[str, Callable[[int], object]] = {
            "ours": lambda number: _save(estimates(frame, work, rows, smooth=False)),
            "smoothing": lambda number: _save(estimates(frame, work, rows, smooth=True)),
            "limit": lambda number: _save(limit(frame, work)),
        }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    spark.conf.set("spark.sql.shuffle.partitions", PARTITIONS)
    set_codegen_for(spark, rows)
    for attempt in range(rounds + 1):  # the first warms up
        for name, run in contenders.items():
            began = time.perf_counter()
            run(attempt)
            if attempt:
                rates[name].append(rows / (time.perf_counter() - began))
    shutil.rmtree(folder)
    return rates


def estimates(frame: DataFrame, work: Work, rows: int, smooth: bool) -> DataFrame:
    """Return the estimates of rows as `estimate` makes them, from each key's first row on."""
    from jobs.batch.bucket_estimates import EstimatingPlan, build_estimator, list_smoothed_widths
    from jobs.batch.estimating import choose_layout
    from jobs.snapshots.model_runtime import ModelRuntime
    from jobs.state.block_format import build_state_layout
    from jobs.state.encoding.estimates import estimate_schema
    from jobs.state.encoding.packets import TYPED_ROW_PACKETS
    from jobs.state.encoding.rows import build_row_packer, select_columns

    runtime, layout = ModelRuntime(work.spec, {}, frame.schema), choose_layout(rows)
    kernel, fmt, out = runtime.kernel, runtime.rows, runtime.estimates
    if smooth:
        out = out._replace(extra=(*out.extra, *list_smoothed_widths(kernel)))
    plan = EstimatingPlan(
        kernel,
        work.spec.unit_us,
        fmt,
        build_state_layout(fmt.kind, kernel.size),
        out,
        smooth=smooth,
        only_own=True,
    )
    packer = build_row_packer(fmt, layout.routing(), typed=True)
    packed = select_columns(frame, fmt).mapInArrow(packer, TYPED_ROW_PACKETS)
    packed = packed.repartition(layout.buckets, "bucket")
    return packed.mapInArrow(build_estimator(plan), estimate_schema(out, batch_id=True))


def _into_delta(spark: SparkSession, work: Work, source: Path, folder: Path) -> None:
    from jobs.batch.batch_filter import Interval
    from jobs.batch.estimating import EstimateRequest, estimate
    from jobs.spark.warehouse import Warehouse

    request = EstimateRequest(Interval(None, None), input=str(source))
    estimate(DeployedModel(work.spec, Warehouse(spark, str(folder))), request, _silent)


def _save(rows: DataFrame, form: str = "noop", path: Path | None = None) -> None:
    writer = rows.write.format(form).mode("overwrite")
    writer.save() if path is None else writer.save(str(path))


def _silent(line: str) -> None:
    """Discard a line of progress."""
