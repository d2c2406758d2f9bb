"""What files, functions and the latest states hold when another generation has taken the stream over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.sql.types import LongType

from jobs import export, rollback, upgrade
from jobs.api import is_live, live_estimates, live_latest
from tests.jobs.support.pipeline import (
    Pipeline,
    assert_bit_equal,
    ordered,
    random_rows,
    random_walk_spec,
    since,
)

pytestmark = [pytest.mark.spark, pytest.mark.slow]

PLACE = ["generation", "batch_id", "ordinal"]
SHELF = """
import pathlib

def take(rows, generation, batch_id):
    with pathlib.Path(FILE).open("a") as file:
        for row in rows.toJSON().collect():
            file.write(row + "\\n")
"""


def spec(**changes: Any) -> dict[str, Any]:
    sinks = {
        "latest": True,
        "files": {"folder": "handed", "format": "json"},
        "functions": ["hand_over_shelf:take"],
    }
    return random_walk_spec(sinks=sinks, outputs={"covariance": "diagonal"}, **changes)


def check(pipeline: Pipeline, generation: str) -> None:
    """Check that every sink has what the live estimates have, once a reader keeps the rows that are live."""
    warehouse = pipeline.warehouse
    live = ordered(live_estimates(warehouse, "walk").toPandas())
    assert live["generation"].iloc[live["event_time"].argmax()] == generation
    schema = warehouse.read("estimates/walk").schema.add("ordinal", LongType())
    taken = str(pipeline.folder / "models" / "taken.jsonl")
    for place in (warehouse.path("handed"), taken):
        rows = warehouse.spark.read.schema(schema).json(place)
        once = rows.filter(is_live(warehouse, "walk")).dropDuplicates(PLACE)
        found = ordered(once.toPandas())
        assert_bit_equal(found, live)
        for name in ("generation", "batch_id"):
            assert found[name].to_list() == live[name].to_list()
    handed = warehouse.spark.read.schema(schema).json(warehouse.path("handed"))
    assert handed.count() == handed.dropDuplicates(PLACE).count()  # files have no row twice

    latest = live_latest(warehouse, "walk").toPandas()
    assert set(latest["generation"]) == {generation} and latest["key"].is_unique
    newest = live.groupby("key")["event_time"].max()
    states = latest.set_index("key")["event_time"]
    assert (states.loc[newest.index] == newest).all()


def test_every_sink_has_the_live_estimates_after_each_hand_over(tmp_path: Path) -> None:
    days = random_rows(8, keys=30, rows=60)
    pipeline = Pipeline(tmp_path, spec())
    models = tmp_path / "models"
    (models / "hand_over_shelf.py").write_text(SHELF.replace("FILE", repr(str(models / "taken.jsonl"))))
    pipeline.land(days[0])
    pipeline.pretrain()

    def stream(day: pd.DataFrame, generation: str, **options: Any) -> None:
        pipeline.land(day)
        assert pipeline.stream(**options).data["generation"] == generation
        check(pipeline, generation)

    stream(days[1], "walk-g0001")
    stream(days[2], "walk-g0001")  # restarted
    # Blue-green: both generations read a day, and the old one publishes it before it is replaced.
    pipeline.write_spec(spec(version=2))
    upgrade.run(pipeline.settings, "walk", promote=False)
    stream(days[3], "walk-g0001")
    assert upgrade.run(pipeline.settings, "walk").data["promoted"]
    stream(days[4], "walk-g0002")
    assert_bit_equal(
        ordered(live_estimates(pipeline.warehouse, "walk").toPandas()), since(pipeline.batch(), days[1])
    )
    rollback.run(pipeline.settings, "walk")
    stream(days[5], "walk-g0001")
    pipeline.write_spec(spec(stream={"max_files_per_batch": 1, "partitions": 3, "keys_per_block": 8}))
    upgrade.run(pipeline.settings, "walk", mode="repartition")
    stream(days[6], "walk-g0003")
    snapshot = export.run(pipeline.settings, "walk").data["snapshot"]
    stream(days[7], "walk-g0004", adopt=snapshot)
    pipeline.write_spec(
        spec(version=3, stream={"max_files_per_batch": 1, "partitions": 3, "keys_per_block": 8})
    )
    upgrade.run(pipeline.settings, "walk", mode="retrain")
    stream(random_rows(9, keys=30, rows=60)[8], "walk-g0005")
    assert_bit_equal(
        ordered(live_estimates(pipeline.warehouse, "walk").toPandas()),
        since(pipeline.batch(), days[1]),
        ("key", "event_time"),
    )
