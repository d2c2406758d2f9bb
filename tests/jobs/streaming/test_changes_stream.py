"""Sparse micro-batches write changes beside blocks: estimates, exports and restarts have the bits of one batch.

By event time, too, and from a checkpoint of an earlier release, which holds blocks alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from jobs import export
from jobs.lineage import generations
from jobs.lineage.live import latest_corrections, live_estimates
from jobs.state.encoding.packets import StateVariable
from jobs.state.key_states import CHANGES_FROM
from jobs.streaming import exporting
from tests.fixtures.make_event_time import ORDERS, TARGET, sparse_days
from tests.jobs.lineage.test_inputs import forget_the_last_commit
from tests.jobs.streaming.test_event_time_stream import between, newest
from tests.jobs.streaming.test_export import same_states
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, ordered, random_walk_spec, since
from tests.jobs.support.processes import Driver, files
from tests.jobs.support.released import unpacked

pytestmark = pytest.mark.spark

KEYS, SPARSE = 2000, 60
LAYOUT = {"max_files_per_batch": 1, "partitions": 2, "keys_per_block": 64}


def sparse_rows(days: int) -> list[pd.DataFrame]:
    """Return a row of every key, then days with rows of some keys, among them new ones."""
    rng = np.random.default_rng(7)
    frames = []
    for day in range(days):
        number = np.arange(KEYS) if day == 0 else rng.choice(KEYS + 20 * day, SPARSE)
        minute = np.sort(rng.integers(0, 1440, len(number)))
        at = pd.Timestamp("2024-03-01", tz="UTC") + pd.to_timedelta(day * 1440 + minute, "min")
        values = rng.normal(size=(2, len(number)))
        ids = np.array([f"key {one} ü" for one in number])
        frames.append(pd.DataFrame({"id": ids, "at": at.as_unit("us"), "a": values[0], "b": values[1]}))
    return frames


def changes_in(pipeline: Pipeline) -> int:
    """Return how many changes the live generation's state holds after its last micro-batch."""
    live = generations.find_live(pipeline.warehouse, pipeline.name)
    assert live is not None
    last = max(
        int(one)
        for one in files(Path(pipeline.settings.warehouse, live.checkpoint, "commits"))
        if one.isdigit()
    )
    values = exporting.read_state_variable(
        pipeline.warehouse, live.generation, live.checkpoint, StateVariable.STATES, last
    )
    return values.filter(values["user_map_key.block"] >= CHANGES_FROM).count()


@pytest.mark.core
def test_a_stream_of_sparse_micro_batches_that_is_killed_is_one_batch(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec(stream=LAYOUT))
    frames = sparse_rows(4)
    pipeline.land(frames[0])
    pipeline.pretrain()
    pipeline.land(*frames[1:])
    pipeline.stream()
    forget_the_last_commit(pipeline)
    pipeline.stream()
    assert changes_in(pipeline) > 1
    exported = export.run(pipeline.settings, "walk").data
    same_states(pipeline, exported["snapshot"], pipeline.pretrain(to_version=4).data["snapshot"])
    assert_bit_equal(pipeline.estimates(), since(pipeline.batch(), frames[1]))


@pytest.mark.parametrize("model", ORDERS)
@pytest.mark.slow
def test_an_event_time_stream_goes_on_from_blocks_alone_and_is_one_batch_after_a_kill(model: str) -> None:
    with unpacked(TARGET) as folder:
        pipeline = Pipeline(folder, yaml.safe_load((folder / "models" / f"{model}.yaml").read_text()))
        assert changes_in(pipeline) == 0
        driver = Driver(pipeline, "stream", "--model", model)
        checkpoint = Path(pipeline.settings.warehouse, "checkpoints", f"{model}-g0001")
        driver.wait_for(lambda: "4" in files(checkpoint / "offsets"))
        driver.kill()
        assert not pipeline.stream().data["began"]
        assert changes_in(pipeline) > 0
        days = sparse_days(7)
        expected = since(pipeline.batch(), days[1])  # the state of `replay` has all rows of the history
        if model == "strict":
            delay = pd.Timedelta(ORDERS[model]["delay"])
            expected = between(pipeline.batch(), newest(days[0]) - delay, newest(*days) - delay)
        found = latest_corrections(live_estimates(pipeline.warehouse, model))
        assert_bit_equal(ordered(found.toPandas()), expected)
        exported = export.run(pipeline.settings, model).data
        again = pipeline.pretrain(to_version=exported["version"]).data
        same_states(pipeline, exported["snapshot"], again["snapshot"])
