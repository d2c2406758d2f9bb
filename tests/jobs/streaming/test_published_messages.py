"""What a topic, files and a function receive: a message that comes twice is known by its place in the stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import functions as F

from jobs.spark import kafka
from tests.jobs.support.feeds import Feed
from tests.jobs.support.pipeline import Pipeline, random_rows, random_walk_spec

pytestmark = pytest.mark.spark

SHELF = """
import json, pathlib

here = pathlib.Path(FOLDER)

def take(rows, generation, batch_id):
    with (here / "taken.jsonl").open("a") as file:
        for row in rows.toJSON().collect():
            file.write(row + "\\n")
"""
ESTIMATE = (
    "key string, event_time timestamp, mean array<double>, generation string, batch_id bigint, ordinal bigint"
)

Place = tuple[str, int, int]


def places(rows: list[Any]) -> dict[Place, tuple[Any, ...]]:
    """Return each row's content by its place; there is one row at a place."""
    found = {
        (row["generation"], row["batch_id"], row["ordinal"]): (row["key"], row["event_time"], *row["mean"])
        for row in rows
    }
    assert len(found) == len(rows)
    return found


@pytest.mark.slow
def test_a_reader_drops_messages_that_come_twice_and_no_others(feed: Feed, tmp_path: Path) -> None:
    frames = random_rows(3, keys=30, rows=60, text=True)
    for number in (1, 2):  # rows that are equal, and so are their estimates
        empty = frames[number].iloc[[20, 20, 20]].assign(a=np.nan, b=np.nan)
        frames[number] = pd.concat([frames[number], empty], ignore_index=True)
    sinks = {
        "kafka": {"topic": "doubled"},
        "files": {"folder": "handed", "format": "json"},
        "functions": ["doubled_shelf:take"],
    }
    pipeline = Pipeline(tmp_path, random_walk_spec(sinks=sinks))
    models = tmp_path / "models"
    (models / "doubled_shelf.py").write_text(SHELF.replace("FOLDER", repr(str(models))))
    feed.make("doubled")
    pipeline.land(frames[0])
    pipeline.pretrain()
    pipeline.land(*frames[1:])
    pipeline.stream()
    # As if the driver had been killed after the last sink: nothing says that it has written micro-batch 1.
    warehouse = tmp_path / "warehouse"
    for name in ("1", ".1.crc"):
        (warehouse / "checkpoints" / "walk-g0001" / "commits" / name).unlink(missing_ok=True)
    for note in (warehouse / "_published" / "walk-g0001").iterdir():
        note.write_text(json.dumps({"batch_id": 0}))
    pipeline.stream()

    spark = pipeline.warehouse.spark
    reader = spark.read.format("kafka").option("subscribe", "doubled").options(**kafka.build_spark_options())
    estimate = F.from_json(F.col("value").cast("string"), ESTIMATE)
    messages = reader.load().select(estimate.alias("estimate")).select("estimate.*")
    once = messages.dropDuplicates(["generation", "batch_id", "ordinal"])

    table = pipeline.warehouse.read("estimates/walk").collect()
    contents = sorted((row["key"], row["event_time"], *row["mean"]) for row in table)
    assert messages.count() == len(frames[1]) + 2 * len(frames[2])
    assert messages.distinct().count() == len(table)
    from_topic = places(once.collect())
    assert sorted(from_topic.values()) == contents
    assert len(set(contents)) < len(contents)  # by its content alone, a reader would drop too much
    files = spark.read.schema(ESTIMATE).json(pipeline.warehouse.path("handed"))
    assert places(files.collect()) == from_topic
    taken = spark.read.schema(ESTIMATE).json(str(models / "taken.jsonl"))
    assert taken.count() == messages.count()
    assert places(taken.distinct().collect()) == from_topic  # each time the same
    (line, *_) = (models / "taken.jsonl").read_text().splitlines()
    assert {"generation", "batch_id", "ordinal"} <= set(json.loads(line))
