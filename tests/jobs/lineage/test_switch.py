"""A change of the generations is refused if another has come in between, whenever it came."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from jobs.core.errors import ALREADY_RUNNING, UserError
from jobs.lineage import generations
from jobs.lineage.generations import (
    LIVE,
    RETIRED,
    SHADOW,
    Generation,
    build_generation_row,
    read_generations,
    switch,
)
from jobs.snapshots.manifests import Manifest
from jobs.spark.warehouse import Warehouse
from jobs.storage.tables import GENERATIONS
from kalman import NUMERICS

pytestmark = pytest.mark.spark


def test_the_commit_compares_the_statuses_that_were_seen(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warehouse = Warehouse(spark, str(tmp_path))
    warehouse.create("generations", GENERATIONS)
    schema = warehouse.read("generations").schema
    for number, status in enumerate((RETIRED, LIVE, SHADOW), start=1):
        one = Generation(
            f"m-g{number:04d}", "m", 1, "f", "s", "c", {"source": "delta", "version": 0}, 1, 1, status
        )
        warehouse.append(spark.createDataFrame([build_generation_row(one)], schema), "generations")
    seen = read_generations(warehouse, "m")
    rolled_back = switch(warehouse, "m", seen[0], seen)
    assert rolled_back.generation == "m-g0001"

    # Where nothing is locked, the other command may commit right after this one has compared.
    monkeypatch.setattr(generations, "read_generations", lambda *arguments: seen)
    with pytest.raises(UserError, match="another command has just changed") as refused:
        switch(warehouse, "m", seen[2], seen)
    assert refused.value.exit_code == ALREADY_RUNNING
    snapshot = Manifest(
        snapshot_id="s", model="m", model_version=1, fingerprint="f", parameters={}, position=seen[0].start_position,
        key_count=0, checksum="", rows=0, snapshots_version=0, spec="",
    )  # fmt: skip
    with pytest.raises(UserError, match="another command has just changed"):
        generations.begin(warehouse, snapshot, 1, 1, seen[1], numerics=NUMERICS)
    monkeypatch.undo()
    statuses = {one.generation: one.status for one in read_generations(warehouse, "m")}
    assert statuses == {"m-g0001": LIVE, "m-g0002": RETIRED, "m-g0003": SHADOW}
    with pytest.raises(UserError, match="another command has just changed"):
        generations.begin(
            warehouse, snapshot, 1, 1, seen[2], numerics=NUMERICS
        )  # which was live when a frozen command decided
    generations.begin(warehouse, snapshot, 1, 1, seen[0], numerics=NUMERICS)
    assert [one.status for one in read_generations(warehouse, "m")] == [RETIRED, RETIRED, SHADOW, LIVE]
