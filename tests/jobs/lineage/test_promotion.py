"""A shadow that reads a topic is level only if it has read each partition as far as the live generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from jobs.core.errors import UserError
from jobs.lineage import generations, promotion
from jobs.lineage.generations import LIVE, SHADOW, Generation
from jobs.snapshots.manifests import Manifest
from jobs.spark.warehouse import Warehouse
from jobs.storage.positions import build_topic_position
from kalman import NUMERICS

pytestmark = pytest.mark.spark


def snapshot(**changes: Any) -> Manifest:
    facts: dict[str, Any] = {
        "snapshot_id": "walk-v1-0",
        "model": "walk",
        "model_version": 1,
        "fingerprint": "f",
        "parameters": {},
        "position": build_topic_position("walk", {0: 0, 1: 0}),
        "key_count": 0,
        "checksum": "",
        "rows": 0,
        "snapshots_version": 0,
        "spec": "{}",
    }
    return Manifest(**{**facts, **changes})


def advance(warehouse: Warehouse, generation: Generation, batch: int, *offsets: int) -> None:
    """Write a committed micro-batch into a checkpoint, as Spark does."""
    folder = Path(warehouse.path(generation.checkpoint))
    at = json.dumps({"walk": {str(number): offset for number, offset in enumerate(offsets)}})
    for name, lines in (("offsets", ["v1", "{}", at]), ("commits", ["v1", "{}"])):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / str(batch)).write_text("\n".join(lines))


def test_two_cuts_of_the_same_sum_are_not_level(spark: SparkSession, tmp_path: Path) -> None:
    warehouse = Warehouse(spark, str(tmp_path))
    live = generations.begin(warehouse, snapshot(), 2, 8, None, LIVE, numerics=NUMERICS)
    shadow = generations.begin(
        warehouse, snapshot(), 2, 8, live, SHADOW, (live.generation, -1), numerics=NUMERICS
    )
    advance(warehouse, live, 0, 30, 10)
    for batch, offsets in enumerate([(10, 30), (29, 99)]):
        advance(warehouse, shadow, batch, *offsets)
        with pytest.raises(promotion.ShadowLags, match=f"0:{offsets[0]}, 1:{offsets[1]} and walk-g0001"):
            promotion.promote(warehouse, "walk")
    advance(warehouse, shadow, 2, 30, 99)
    promoted, former = promotion.promote(warehouse, "walk")
    assert promoted.generation == shadow.generation and former is not None
    with pytest.raises(UserError, match="no shadow to promote"):
        promotion.promote(warehouse, "walk")
