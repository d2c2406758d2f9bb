"""Streams of a release that kept states in format 1: they are compared, and handed over before anything is written.

The warehouse was made by that release (`tests/fixtures/make_format1.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from jobs import export, upgrade, verify
from jobs.core.errors import UserError
from jobs.lineage import generations
from jobs.lineage.generations import DeployedModel, read_origin_manifest
from jobs.lineage.live import live_estimates
from jobs.snapshots import manifests, store
from jobs.spark import session
from jobs.spark.conf import STATE_FORMAT, build_spark_conf
from jobs.storage.checkpoints import Checkpoint
from jobs.streaming.exporting import find_missing_rows, read_states
from tests.fixtures.make_format1 import TARGET
from tests.jobs.support.pipeline import (
    Pipeline,
    assert_bit_equal,
    landed,
    random_rows,
    random_walk_spec,
    reflected,
    since,
    streaming,
)
from tests.jobs.support.processes import files
from tests.jobs.support.released import unpacked

pytestmark = pytest.mark.spark


@pytest.fixture
def folder() -> Iterator[Path]:
    """The folder of the former release's warehouse and specs."""
    with unpacked(TARGET) as place:
        yield place


def pipeline_of(folder: Path, model: str, **changes: Any) -> Pipeline:
    """Return the pipeline of a model in the former release's warehouse."""
    pipeline = Pipeline(
        folder, {**yaml.safe_load((folder / "models" / f"{model}.yaml").read_text()), **changes}
    )
    pipeline.files = 300
    return pipeline


def live_of(pipeline: Pipeline) -> generations.Generation:
    live = generations.find_live(pipeline.warehouse, pipeline.name)
    assert live is not None
    return live


def verdict(pipeline: Pipeline) -> str:
    """Return the outcome of a verification of all keys."""
    return verify.run(pipeline.settings, pipeline.name, share="1").data["outcome"]


@pytest.mark.slow
def test_a_sound_stream_is_handed_over_and_goes_on(folder: Path) -> None:
    pipeline = pipeline_of(folder, "sound")
    former = live_of(pipeline)
    assert Checkpoint(pipeline.warehouse, former.checkpoint).has_states_of_format_1()
    report = pipeline.stream()
    live = live_of(pipeline)
    assert (live.parent, live.parent_batch, live.model_version) == (former.generation, 2, 1)
    assert (live.partitions, live.blocks) == (former.partitions, former.blocks)
    assert report.data["began"] and any("earlier release" in note for note in report.data["notes"])
    assert not Checkpoint(pipeline.warehouse, live.checkpoint).has_states_of_format_1()
    rows = live_estimates(pipeline.warehouse, "sound").count()
    assert rows == sum(landed(pipeline).values()) - 60  # 60 rows were history
    assert verdict(pipeline) == "equal"
    assert pipeline.stream().data["generation"] == live.generation


@pytest.mark.slow
def test_a_hurt_stream_is_computed_anew(folder: Path) -> None:
    pipeline = pipeline_of(folder, "hurt")
    assert pipeline.stream(adopt=live_of(pipeline).snapshot_id).data["began"]
    exported = export.run(pipeline.settings, "hurt").data["snapshot"]
    assert reflected(pipeline, exported) == landed(pipeline)
    assert live_estimates(pipeline.warehouse, "hurt").count() == sum(landed(pipeline).values()) - 4000
    assert verdict(pipeline) == "equal"


def test_a_hurt_stream_is_found_and_goes_on_as_it_is_where_that_is_wanted(folder: Path) -> None:
    pipeline = pipeline_of(folder, "hurt")
    hurt = live_of(pipeline)
    for verb in (pipeline.stream, lambda: export.run(pipeline.settings, "hurt")):
        with pytest.raises(UserError, match="lacks [0-9]+ rows of [0-9]+ keys") as refused:
            verb()
        assert f"stream --model hurt --adopt {hurt.snapshot_id}` computes the state anew" in str(
            refused.value
        )
    assert live_of(pipeline).generation == hurt.generation
    report = pipeline.stream(allow_missing_rows=True)
    assert report.data["began"]
    lacking = sum(landed(pipeline).values()) - sum(reflected(pipeline, report.data["snapshot"]).values())
    assert lacking > 0


@pytest.mark.slow
def test_a_shadow_of_format_1_is_made_anew(folder: Path) -> None:
    pipeline = pipeline_of(folder, "sound")
    with pytest.raises(UserError, match="makes the shadow anew"):
        pipeline.stream(generation="sound-g0002")
    data = upgrade.run(pipeline.settings, "sound", promote=False).data
    assert data["generation"] == "sound-g0003"
    statuses = {
        one.generation: one.status for one in generations.read_generations(pipeline.warehouse, "sound")
    }
    assert statuses == {"sound-g0001": "live", "sound-g0002": "retired", "sound-g0003": "shadow"}


def test_a_hand_over_that_is_killed_again_and_again_is_done_by_the_next_start(folder: Path) -> None:
    """Its inputs are pinned. It is killed before the manifest, before the generation, and after the generation."""
    pipeline = pipeline_of(folder, "gauge")
    begin = generations.begin

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    def begun_and_killed(*arguments: Any, **options: Any) -> None:
        begin(*arguments, **options)
        raise KeyboardInterrupt

    moments = (
        (store, "_commit", killed),
        (generations, "begin", killed),
        (generations, "begin", begun_and_killed),
    )
    for place, name, ends in moments:
        assert live_of(pipeline).generation == "gauge-g0001"
        with mock.patch.object(place, name, ends), pytest.raises(KeyboardInterrupt):
            pipeline.stream()
    assert pipeline.stream().data["rows"] == 80
    live = live_of(pipeline)
    assert (live.generation, live.parent, live.parent_batch) == ("gauge-g0002", "gauge-g0001", 1)
    assert live_estimates(pipeline.warehouse, "gauge").count() == 240


def test_states_of_format_1_are_read_by_a_session_of_format_2(folder: Path) -> None:
    pipeline = pipeline_of(folder, "sound")
    former, warehouse = live_of(pipeline), pipeline.warehouse
    begun, spark = read_origin_manifest(warehouse, former), warehouse.spark

    def states() -> list[tuple[Any, ...]]:
        rows = read_states(DeployedModel(pipeline.spec, warehouse), former, begun, 2).frame
        return sorted(map(tuple, rows.drop("extras").collect()))

    assert spark.conf.get(STATE_FORMAT) == "2"
    found = states()
    spark.conf.set(STATE_FORMAT, "1")
    try:
        assert states() == found and len(found) == 13
    finally:
        spark.conf.set(STATE_FORMAT, "2")


@pytest.mark.slow
def test_files_of_format_1_before_the_first_commit_are_not_read(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec())
    frames = random_rows(4)
    pipeline.land(frames[0])
    pipeline.pretrain()
    pipeline.land(frames[1])
    with mock.patch.object(session, "build_spark_conf", lambda: {**build_spark_conf(), STATE_FORMAT: "1"}):
        pipeline.stream()
    checkpoint = Path(pipeline.settings.warehouse, "checkpoints", "walk-g0001")
    assert "1.changelog" in files(checkpoint / "state" / "0" / "0")
    for name in ("0", ".0.crc"):  # as if the driver had been killed before
        (checkpoint / "commits" / name).unlink()
    pipeline.land(*frames[2:])
    pipeline.stream()
    assert live_of(pipeline).generation == "walk-g0001"
    assert_bit_equal(pipeline.estimates(), since(pipeline.batch(), frames[1]))
    assert verdict(pipeline) == "equal"


@pytest.mark.slow
def test_rows_that_the_filter_left_out_are_not_missing(tmp_path: Path) -> None:
    frames = random_rows(2)
    frames[1].loc[[5, 50], ["a", "b"]] = 1e4
    pipeline = streaming(tmp_path, frames[0], frames[1], robust={"gate": {"probability": 0.99}})
    manifest = manifests.find(pipeline.warehouse, export.run(pipeline.settings, "walk").data["snapshot"])
    assert manifest is not None
    assert pipeline.estimates()["flags"].notna().sum() >= 2
    assert find_missing_rows(pipeline.warehouse, live_of(pipeline), manifest) is None
    lacking = find_missing_rows(
        pipeline.warehouse, live_of(pipeline), replace(manifest, rows=manifest.rows - 1)
    )
    assert lacking is None  # the totals differ, the keys do not
