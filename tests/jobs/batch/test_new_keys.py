"""Keys pretrained while the stream runs: the stream imports each state once, and counts no row twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from jobs.batch import new_keys
from jobs.core.errors import UserError
from jobs.state.block_store import Blocks, decode_offered
from jobs.state.encoding.packets import Records
from jobs.state.encoding.routing import compute_routes
from tests.jobs.support.event_time import DictStore, plan_of
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, random_rows, random_walk_spec
from tests.jobs.support.processes import Driver, files

pytestmark = pytest.mark.spark

SHIFT = 1000
"""The offset from the numbers of known keys to those of new keys."""


def spec(**changes: Any) -> dict[str, Any]:
    plain = random_walk_spec(**changes)
    return {**plain, "stream": {**plain["stream"], "new_keys": "pretrained"}}


def of_new_keys(days: list[pd.DataFrame]) -> list[pd.DataFrame]:
    return [day.assign(id=day["id"] + SHIFT) for day in days]


def newcomers(estimates: pd.DataFrame) -> pd.DataFrame:
    return estimates.loc[estimates["key"].astype(int) >= SHIFT].reset_index(drop=True)


def after(estimates: pd.DataFrame, *rows: pd.DataFrame) -> pd.DataFrame:
    """Return the estimates of these rows alone."""
    wanted = pd.concat(rows)
    pairs = set(zip(wanted["id"].astype(str), wanted["at"].dt.tz_localize(None), strict=True))
    mine = [pair in pairs for pair in zip(estimates["key"], estimates["event_time"], strict=True)]
    return estimates.loc[mine].reset_index(drop=True)


def test_of_the_offered_states_the_latest_of_each_unknown_key_are_imported() -> None:
    plan = plan_of()
    layout, size = plan.state.layout, plan.kernel.size

    def states(keys: list[int], counts: list[int], value: float) -> Records:
        n = len(keys)
        arrays = {
            "route": compute_routes(np.array(keys, np.int64)),
            "event_time": np.array(counts, np.int64),
            "count": np.array(counts, np.int64),
            "log_likelihood": np.zeros(n),
            "values": np.full((size, n), value),
        }
        return Records(arrays, None)

    blocks = Blocks(DictStore(), plan.state, plan.blocks)
    blocks.add(states([1, 2], [7, 7], 1.0))
    packets = [layout.encode(states([2, 3, 4], [9, 1, 1], 2.0)), layout.encode(states([3, 5], [2, 1], 3.0))]
    offered = decode_offered(layout, packets)
    assert offered.size == 4
    new = blocks.absent(offered)
    by_route = dict(zip(new.arrays["route"].tolist(), new.arrays["values"][0].tolist(), strict=True))
    assert by_route == dict(zip(compute_routes(np.array([3, 4, 5])).tolist(), [3.0, 2.0, 3.0], strict=True))


def begun(folder: Path, days: list[pd.DataFrame], **changes: Any) -> Pipeline:
    """Return a pipeline whose stream has processed the second day."""
    pipeline = Pipeline(folder, spec(**changes))
    pipeline.land(days[0])
    pipeline.pretrain()
    pipeline.land(days[1])
    assert pipeline.stream().data["keys_taken"] == 0
    return pipeline


def test_history_is_offered_after_few_rows_were_pretrained_without_spark(tmp_path: Path) -> None:
    level = {
        "states": ["level"],
        "process": {"kind": "random_walk", "variance": 0.5},
        "observation": {"H": [[1.0], [1.0]], "R": [[1.0, 0.0], [0.0, 2.0]]},
        "initial": {"mean": [0.0], "covariance": [[10.0]]},
        "learn": {"parameters": ["variance"], "scope": "key"},
    }
    pipeline = Pipeline(tmp_path, spec(**level))
    days = random_rows(2, keys=6, rows=60)
    pipeline.land(days[0])
    pipeline.pretrain()
    pipeline.land(*of_new_keys(days), history=True)
    assert pipeline.pretrain().data["snapshot"]
    offered = pipeline.warehouse.read("new_keys/walk").select("key").distinct().count()
    assert offered == pd.concat(days)["id"].nunique()


@pytest.mark.slow
def test_a_stream_imports_keys_that_are_pretrained_beside_it(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, spec())
    days = random_rows(2, keys=20, rows=60)
    fresh = of_new_keys(days)
    pipeline.land(days[0])
    pipeline.pretrain()
    keys = fresh[0]["id"].nunique()
    assert "rows of history" in pipeline.land(fresh[0], history=True).lines[0]
    offered = pipeline.pretrain(history=True).data
    assert (offered["keys"], offered["keys_offered"], offered["rows"]) == (keys, keys, len(fresh[0]))
    pipeline.land(pd.concat([days[1], fresh[1]], ignore_index=True))
    done = pipeline.stream().data
    assert (done["keys_taken"], done["keys_held"], done["late"]) == (keys, 0, 0)
    # As if the stream had processed their whole history, with estimates of the later rows alone.
    assert_bit_equal(pipeline.estimates(), after(pipeline.batch(), days[1], fresh[1]))


@pytest.mark.slow
def test_a_key_with_a_state_keeps_it(tmp_path: Path) -> None:
    days = random_rows(4, keys=20, rows=60)
    fresh = of_new_keys(days)
    pipeline = begun(tmp_path, days)
    with pytest.raises(UserError, match="no history of new keys has landed for walk"):
        pipeline.pretrain(history=True)
    pipeline.land(days[2], fresh[2])
    assert pipeline.stream().data["keys_taken"] == 0
    pipeline.land(fresh[0], history=True)
    made = pipeline.pretrain().data  # it offers them too
    keys, has = set(fresh[0]["id"]), set(fresh[2]["id"])
    assert made["keys_offered"] == len(keys)
    assert pipeline.pretrain(history=True).data["keys_offered"] == 0
    pipeline.land(days[3])
    done = pipeline.stream().data
    assert (done["keys_held"], done["keys_taken"]) == (len(keys & has), len(keys - has)) and keys & has
    found = pipeline.estimates()
    assert_bit_equal(after(found, days[3]), after(pipeline.batch(), days[3]))

    # More history of a key is another offer. What begins behind all of it has it from its snapshot.
    pipeline.land(fresh[1], history=True)
    again = pipeline.pretrain().data
    assert again["keys_offered"] == fresh[1]["id"].nunique()
    pipeline.land(fresh[3])
    done = pipeline.stream(adopt=again["snapshot"]).data
    assert done["keys_taken"] == 0 and done["keys_held"] > 0
    assert_bit_equal(pipeline.estimates(done["generation"]), after(pipeline.batch(), fresh[3]))


@pytest.mark.slow
def test_after_a_kill_between_snapshot_and_offer_the_next_call_makes_the_offer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    days = random_rows(2, keys=20, rows=60)
    pipeline = begun(tmp_path, days)
    pipeline.land(of_new_keys(days)[0], history=True)

    def killed(*arguments: Any) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(new_keys, "_append", killed)
        pipeline.pretrain(history=True)
    assert pipeline.warehouse.read("new_keys/walk").isEmpty()
    assert pipeline.pretrain(history=True).data["keys_offered"] == days[0]["id"].nunique()
    assert pipeline.pretrain(history=True).data["keys_offered"] == 0
    assert pipeline.warehouse.read("new_keys/walk").count() == days[0]["id"].nunique()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, {"order": {"kind": "strict", "delay": "1h"}}], ids=["plain", "strict"]
)
def test_a_running_stream_that_is_killed_while_importing_keys_imports_them_once(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    pipeline = Pipeline(tmp_path, spec(**changes))
    days = random_rows(5, keys=20, rows=60, text=False)
    fresh = of_new_keys(days)
    pipeline.land(days[0])
    pipeline.pretrain()
    pipeline.land(days[1])
    checkpoint = Path(pipeline.settings.warehouse, "checkpoints", "walk-g0001")

    def place(batch: str) -> str:
        """Return a micro-batch's offset of the second source; empty while its file is being written."""
        return "".join((checkpoint / "offsets" / batch).read_text().splitlines()[3:])

    def taking() -> str | None:
        """Return the first micro-batch with a later offset there than micro-batch 0, which had no offers."""
        planned = sorted(files(checkpoint / "offsets"), key=int)
        return next((name for name in planned if place(name) not in ("", place("0"))), None)

    driver = Driver(pipeline, "stream", "--model", "walk", "--trigger", "1")
    driver.wait_for(lambda: files(checkpoint / "commits"))
    pipeline.land(fresh[0], fresh[1], history=True)
    assert pipeline.pretrain(history=True).data["keys_offered"] > 0
    driver.wait_for(taking)
    driver.kill()
    assert taking() not in files(checkpoint / "commits"), "the driver was killed too late for this test"

    driver = Driver(pipeline, "stream", "--model", "walk", "--trigger", "1")
    driver.wait_for(lambda: taking() in files(checkpoint / "commits"))
    before = len(files(checkpoint / "commits"))
    pipeline.land(pd.concat([days[2], fresh[2]]))  # in one file, so that with `strict` no rows are late
    driver.wait_for(lambda: len(files(checkpoint / "commits")) > before)
    assert driver.terminate() == 0, driver.said()
    assert "newly pretrained keys" in driver.said()
    pipeline.land(pd.concat([days[3], fresh[3], days[4]]))  # the last day moves the watermark past the others
    assert pipeline.stream().data["keys_taken"] == 0
    found, batch = pipeline.estimates(), pipeline.batch()
    compared = (fresh[2], fresh[3])
    assert_bit_equal(after(newcomers(found), *compared), after(batch, *compared))
    assert len(newcomers(found)) == sum(map(len, compared))
    assert not pipeline.warehouse.exists("quarantine")
