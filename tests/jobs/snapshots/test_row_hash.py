"""The hash of state rows in NumPy against Spark's own, row by row."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from jobs.snapshots.row_hash import compute_row_hashes
from jobs.snapshots.state_rows import STATE_COLUMNS

pytestmark = [pytest.mark.spark, pytest.mark.core]

FIELDS = [pa.field("key", pa.string()), *STATE_COLUMNS]
SPECIAL = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 5e-324, 1.7976931348623157e308]


def some_rows(count: int, seed: int) -> pa.Table:
    """Return state rows of every shape that a snapshot's column can have, and of some that it never has."""
    draw = random.Random(seed)

    def number() -> float:
        return draw.choice(SPECIAL) if draw.random() < 0.2 else draw.gauss(0, 1e3)

    def numbers(most: int) -> list[Any] | None:
        if draw.random() < 0.1:
            return None
        return [None if draw.random() < 0.05 else number() for _ in range(draw.randint(0, most))]

    def extras() -> Any:
        names = draw.sample(
            ["", "gate", "a longer name of a field, of more than 32 bytes", "ü"], draw.randint(0, 3)
        )
        return None if draw.random() < 0.3 else [(name, numbers(4)) for name in names]

    def key(i: int) -> str:
        return "".join(draw.choice("abc-é✓𝄞") for _ in range(i % 80))

    rows = [
        {
            "key": key(i),
            "state_index": draw.choice([0, 1, -1, 2**63 - 1, -(2**63), draw.getrandbits(40)]),
            "event_time": None if draw.random() < 0.1 else draw.randint(-(10**15), 10**16),
            "mean": numbers(5),
            "covariance": numbers(9),
            "log_likelihood": number(),
            "extras": extras(),
        }
        for i in range(count)
    ]
    return pa.Table.from_pylist(rows, pa.schema(FIELDS))


@pytest.mark.parametrize("seed", range(3))
def test_numpy_hashes_rows_as_spark_does(spark: SparkSession, seed: int) -> None:
    table = some_rows(700, seed)
    frame = spark.createDataFrame(table).withColumn("event_time", F.timestamp_micros("event_time"))
    columns = ["key", "state_index", "event_time", "mean", "covariance", "log_likelihood"]
    hashed = F.xxhash64(*columns, F.map_entries("extras"))  # as earlier releases computed it
    expected = [row["hash"] for row in frame.select(hashed.alias("hash")).collect()]
    batches = table.combine_chunks().to_batches()
    pieces = [piece for batch in batches for piece in (batch.slice(0, 99), batch.slice(99))]
    found = np.concatenate([compute_row_hashes(piece.columns) for piece in pieces]).view(np.int64)
    assert found.tolist() == expected
