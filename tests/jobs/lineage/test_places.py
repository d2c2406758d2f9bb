"""After which micro-batch a new generation continues: places in sources, and the search for the one that fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from jobs.lineage import start_point
from jobs.lineage.generations import LIVE, RETIRED, Generation, find_predecessor
from jobs.snapshots.manifests import Manifest
from jobs.spark.warehouse import Warehouse
from jobs.storage.measurements_table import count_rows_between
from jobs.storage.positions import (
    build_delta_position,
    build_topic_position,
    convert_offset,
    convert_position,
    find_furthest,
    includes,
    is_same_source,
)
from jobs.storage.tables import GENERATIONS

offsets = st.dictionaries(st.sampled_from("012"), st.integers(0, 9))


@given(offsets, offsets)
def test_a_cut_of_a_topic_includes_another_in_every_partition_or_not_at_all(
    one: dict[str, int], other: dict[str, int]
) -> None:
    every = all(one.get(number, 0) >= other.get(number, 0) for number in "012")
    assert includes(one, other) is every
    both = find_furthest([one, other])
    assert both is not None and includes(both, one) and includes(both, other)


def test_two_cuts_with_one_sum_of_offsets_are_two_places() -> None:
    one, other = ({"source": "kafka", "topic": "t", "offsets": {"0": a, "1": 9 - a}} for a in (3, 6))
    assert not includes(convert_position(one), convert_position(other))
    assert not includes(convert_position(other), convert_position(one))


def test_places_within_a_version_are_ordered_by_files() -> None:
    def offset(version: int, index: int) -> dict[str, int]:
        return convert_offset({"reservoirId": "x", "reservoirVersion": version, "index": index})

    whole, first, second, following = offset(5, -1), offset(5, 0), offset(5, 1), offset(6, -1)
    assert whole == offset(5, -100) == {"version": 4}
    in_order = [whole, first, second, following]
    assert [[includes(a, b) for b in in_order] for a in in_order] == [
        [j <= i for j in range(4)] for i in range(4)
    ]
    assert following == convert_position(build_delta_position("measurements/walk", 5))


def test_positions_of_a_recreated_source_do_not_compare() -> None:
    table = build_delta_position("measurements/walk", 3, "a")
    assert is_same_source(
        table, build_delta_position("measurements/walk", 4)
    )  # an earlier release wrote no id
    assert not is_same_source(table, build_delta_position("measurements/walk", 3, "b"))
    topic = build_topic_position("t", {0: 1})
    assert not is_same_source(table, topic)
    assert not is_same_source({**topic, "topic_id": "a"}, {**topic, "topic_id": "b"})


class Batch(NamedTuple):
    """A micro-batch of made-up estimates; without `ends` an earlier release wrote it."""

    generation: str
    batch: int
    starts: dict[str, int]
    ends: dict[str, int] | None


def generation(
    number: int, status: str, start: dict[str, int], parent: tuple[int, int] | None
) -> dict[str, Any]:
    position = build_topic_position("t", {int(name): offset for name, offset in start.items()})
    return {
        **{field: None for field in Generation.__dataclass_fields__ if field != "numerics"},
        **{"generation": f"walk-g{number:04d}", "model": "walk", "model_version": 1, "fingerprint": "f"},
        **{
            "snapshot_id": "s",
            "checkpoint": f"checkpoints/{number}",
            "partitions": 1,
            "blocks": 1,
            "epoch": 1,
        },
        "start_position": json.dumps(position),
        "status": status,
        "parent": parent and f"walk-g{parent[0]:04d}",
        "parent_batch": parent and parent[1],
    }


def snapshot(**offsets: int) -> Manifest:
    place = build_topic_position("t", {int(name[1:]): offset for name, offset in offsets.items()})
    return Manifest(
        snapshot_id="x",
        model="walk",
        model_version=1,
        fingerprint="f",
        parameters={},
        position=place,
        key_count=1,
        checksum="",
        rows=1,
        snapshots_version=0,
        spec="{}",
    )


@pytest.mark.slow
@pytest.mark.spark
def test_a_topic_s_snapshot_continues_where_every_partition_fits(spark: SparkSession, tmp_path: Path) -> None:
    warehouse = Warehouse(spark, str(tmp_path / "warehouse"))
    rows = [
        generation(1, RETIRED, {"0": 0, "1": 0}, None),
        generation(2, LIVE, {"0": 20, "1": 20}, (1, 1)),
    ]
    warehouse.append(spark.createDataFrame(rows, GENERATIONS), "generations")
    batches = [
        Batch("walk-g0001", 0, {"0": 0, "1": 0}, {"0": 10, "1": 5}),
        Batch("walk-g0001", 1, {"0": 10, "1": 5}, {"0": 20, "1": 20}),
        Batch("walk-g0001", 2, {"0": 20, "1": 20}, {"0": 99, "1": 99}),
        Batch("walk-g0002", 0, {"0": 20, "1": 20}, {"0": 30, "1": 25}),
        # Of micro-batch 1 every message was refused, so that it left no estimates.
        Batch("walk-g0002", 2, {"0": 30, "1": 30}, {"0": 40, "1": 40}),
    ]
    table = [(one.generation, one.batch, json.dumps({"from": one.starts, "to": one.ends})) for one in batches]
    frame = spark.createDataFrame(table, "generation string, batch_id bigint, source_range string")
    warehouse.append(frame.withColumn("key", F.lit("k")), "estimates/walk")

    def found(**offsets: int) -> tuple[str | None, int | None, int | None]:
        made = start_point.find_continuation(warehouse, snapshot(**offsets))
        assert bool(made.why) is (made.missing != 0)
        return made.parent and made.parent[-1], made.batch, made.missing

    assert found(p0=10, p1=5) == ("1", 0, 0)
    assert found(p0=5, p1=10) == ("1", -1, 15)  # the same sum as micro-batch 0, within two micro-batches
    assert found(p0=20, p1=20) == ("2", -1, 0)
    assert found(p0=30, p1=25) == found(p0=30, p1=28) == found(p0=30, p1=30) == ("2", 0, 0)
    assert found(p0=35, p1=30) == ("2", 0, 5)
    assert found(p0=40, p1=40) == ("2", 2, 0)
    assert found(p0=40, p1=47) == ("2", 2, 7)


def test_messages_between_two_cuts_are_counted_by_partition() -> None:
    warehouse: Any = None  # a topic's messages are counted without it
    assert count_rows_between(warehouse, "", {"0": 5, "1": 9}, {"0": 7, "1": 3, "2": 4}) == 6


def test_the_generation_before_the_live_one_is_the_one_that_it_replaced() -> None:
    values = {"owner": None, "start_position": {}, "created_at": 1, "retired_at": None}

    def one(number: int, **changes: Any) -> Generation:
        made = {**generation(number, RETIRED, {}, None), **values, **changes}
        return Generation(**made)

    first, second = one(1, retired_at=2), one(2, created_at=2, retired_at=3)
    live = one(3, created_at=3, status=LIVE, parent="walk-g0001", parent_batch=0)
    assert find_predecessor([first, second, live], live) == "walk-g0002"
    promoted = one(3, created_at=2.5, status=LIVE, parent="walk-g0001", parent_batch=0)
    assert find_predecessor([first, second, promoted], promoted) == "walk-g0001"
