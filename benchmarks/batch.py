"""Batch filtering as pretrain does it, next to a shuffle by key through Python of the same rows."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.contenders import PARTITIONS, limit
from benchmarks.data import batch, fill
from benchmarks.work import Work

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def compare(
    spark: SparkSession, work: Work, batches: int, rounds: int, folder: Path
) -> dict[str, list[float]]:
    """Return rows a second, by contender, of filtering `batches` micro-batches' rows to each key's latest state."""
    import kalman
    from jobs.history import Batch, bucket_rows, final_states
    from jobs.keys import key_kind
    from jobs.packed_rows import row_format

    rows = fill(work, folder) + sum(batch(work, folder, number) for number in range(1, batches + 1))
    frame = spark.read.parquet(str(folder))
    spec = work.spec
    kernel = kalman.build(spec.definition(), {})
    fmt = row_format(spec, key_kind(spec.key, frame.schema))

    def ours() -> DataFrame:
        return final_states(bucket_rows(frame, fmt, rows), kernel, Batch(fmt, spec.unit_us))

    ways: dict[str, Callable[[], DataFrame]] = {"ours": ours, "limit": lambda: limit(frame, work)}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    spark.conf.set("spark.sql.shuffle.partitions", PARTITIONS)
    for attempt in range(rounds + 1):  # the first warms up
        for name, way in ways.items():
            began = time.perf_counter()
            way().write.format("noop").mode("overwrite").save()
            if attempt:
                rates[name].append(rows / (time.perf_counter() - began))
    shutil.rmtree(folder)
    return rates
