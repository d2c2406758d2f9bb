"""Check that the contenders that filter give the same estimates, before anything is timed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from benchmarks.contenders.contenders import Contender
from benchmarks.workloads.data import FILES, batch, fill
from benchmarks.workloads.work import Work

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOLERANCE = 1e-9
COLUMNS = ("mean", "covariance", "log_likelihood", "nis")


def largest_difference(
    spark: SparkSession, work: Work, contenders: tuple[Contender, ...], folder: Path
) -> dict[str, float]:
    """Return each contender's largest difference of estimates from the first contender's, over three micro-batches.

    Raises:
        AssertionError: rows are missing or differ by more than `TOLERANCE`.
    """
    small = work._replace(keys=200)
    source = folder / "source"
    fill(small, source)
    batch(small, source, 1)
    batch(small, source, 2)
    found = [_estimates(spark, small, contender, source, folder / contender.name) for contender in contenders]
    shutil.rmtree(folder)
    wanted = found[0]
    differences = {}
    for contender, frame in zip(contenders[1:], found[1:], strict=True):
        assert len(frame) == len(wanted) == small.keys + 2 * small.batch_rows, contender.name
        assert (frame["id"] == wanted["id"]).all(), contender.name
        assert (frame["event_time"] == wanted["event_time"]).all(), contender.name
        difference = max(
            float(np.max(np.abs(_matrix(frame, name) - _matrix(wanted, name)))) for name in COLUMNS
        )
        assert difference < TOLERANCE, f"{contender.name} differs by {difference}"
        differences[contender.name] = difference
    return differences


def _matrix(frame: pd.DataFrame, name: str) -> np.ndarray:
    return np.array(frame[name].tolist())


def _estimates(
    spark: SparkSession, work: Work, contender: Contender, source: Path, folder: Path
) -> pd.DataFrame:
    schema = spark.read.parquet(str(source)).schema
    frame = spark.readStream.schema(schema).option("maxFilesPerTrigger", FILES).parquet(str(source))
    columns = ("id", "event_time", *COLUMNS)
    writer = contender.build(frame, work).select(*columns).writeStream.format("parquet")
    writer = writer.option("path", str(folder / "out")).option(
        "checkpointLocation", str(folder / "checkpoint")
    )
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    rows = spark.read.parquet(str(folder / "out")).toPandas()
    return rows.sort_values(["id", "event_time"], ignore_index=True)
