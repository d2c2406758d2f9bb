"""Duplicates found by row id, on Spark: pretrain, stream, export and filter count each row once, across snapshots."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pytest

from jobs import export, ingest
from jobs import filter as offline
from jobs.lineage.live import live_estimates
from jobs.snapshots.manifests import find
from tests.jobs.landing.test_kafka import topic_spec
from tests.jobs.lineage.test_inputs import forget_the_last_commit
from tests.jobs.streaming.test_event_time_stream import between, delayed, newest
from tests.jobs.support.feeds import Feed, Message, as_json, spread
from tests.jobs.support.pipeline import (
    Pipeline,
    assert_bit_equal,
    ordered,
    random_rows,
    random_walk_spec,
    since,
)

pytestmark = pytest.mark.spark

WITHIN = pd.Timedelta("6h")
BY_ID: dict[str, Any] = {"duplicates": {"id": "message", "within": "6h"}}


def numbered(days: list[pd.DataFrame], text: bool) -> list[pd.DataFrame]:
    """Return rows with ids that restart every 50 rows, like those of a device with a counter."""
    frames = []
    for day in days:
        message = np.arange(len(day)) % 50
        frames.append(day.assign(message=[f"m{one}" for one in message] if text else message))
    return frames


def again(rows: pd.DataFrame, seed: int, earliest: int = -60) -> pd.DataFrame:
    """Return a third of the rows as duplicates: the same id, another time, other values."""
    some = rows.sample(frac=0.3, random_state=seed)
    rng = np.random.default_rng(seed)
    moved = pd.to_timedelta(rng.integers(earliest, 5 * 60, len(some)), "min")
    return some.assign(at=(some["at"] + moved).dt.as_unit("us"), a=some["a"] + 100.0)


def counted(rows: pd.DataFrame) -> set[tuple[str, Any]]:
    """Return key and time of the rows that count, found row by row."""
    seen: dict[tuple[str, str], Any] = {}
    kept = set()
    for row in rows.sort_values(["at", "a", "b"]).to_dict("records"):
        key, at, message = str(row["id"]), row["at"].tz_localize(None), row["message"]
        last = None if message is None else seen.get((key, str(message)))
        if last is None or at - last > WITHIN:
            kept.add((key, at))
        if message is not None:
            seen[key, str(message)] = at
    return kept


def pairs(estimates: pd.DataFrame) -> set[tuple[str, Any]]:
    return set(zip(estimates["key"], estimates["event_time"], strict=True))


def remembered(pipeline: Pipeline, snapshot: str) -> pd.DataFrame:
    rows = pipeline.warehouse.read("remembered_ids").filter(f"snapshot_id = '{snapshot}'").toPandas()
    rows = rows.drop(columns=["snapshot_id", "model"])
    return rows.sort_values(list(rows.columns), ignore_index=True)


@pytest.mark.slow
def test_with_strict_a_row_counts_once_across_snapshots(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec(**BY_ID, order={"kind": "strict", "delay": "8h"}))
    days = numbered(random_rows(4, keys=20, rows=100, text=True), text=True)
    days[1].loc[::9, "message"] = None
    sent = [pd.concat([day, again(day, seed)], ignore_index=True) for seed, day in enumerate(days)]
    parts = delayed(sent, 7)
    pipeline.land(*parts[:2])
    first = pipeline.pretrain().data["snapshot"]
    start = newest(*parts[:2]) - pd.Timedelta("8h")
    held = remembered(pipeline, first)
    assert held["event_time"].min() >= start - WITHIN and held["event_time"].max() < start

    pipeline.land(*parts[2:4])
    done = pipeline.stream().data
    assert done["duplicates"] > 0 and done["late"] == 0
    exported = export.run(pipeline.settings, "walk").data
    same = pipeline.pretrain(to_version=exported["version"]).data["snapshot"]
    pd.testing.assert_frame_equal(remembered(pipeline, exported["snapshot"]), remembered(pipeline, same))
    waiting = pipeline.warehouse.read("waiting").drop("model").toPandas()
    left, right = (
        waiting.loc[waiting["snapshot_id"] == one].sort_values(
            ["key", "event_time", "row_id"], ignore_index=True
        )
        for one in (exported["snapshot"], same)
    )
    assert left["row_id"].equals(right["row_id"]) and len(left) == done["waiting"]

    pipeline.land(*parts[4:])
    adopted = pipeline.stream(adopt=exported["snapshot"]).data
    assert adopted["began"] and adopted["duplicates"] > 0
    end = newest(*parts) - pd.Timedelta("8h")
    found = ordered(live_estimates(pipeline.warehouse, "walk").toPandas())
    assert_bit_equal(found, between(pipeline.batch(), start, end))
    expected = {pair for pair in counted(pd.concat(sent)) if start <= pair[1] < end}
    assert pairs(found) == expected
    # A waiting duplicate is reported when the watermark passes it: each row of the parts is accounted for.
    quarantined = pipeline.warehouse.read("quarantine").toPandas()
    assert set(quarantined["reason"]) == {"duplicate: of the same key and id as another row"}
    assert len(quarantined) == done["duplicates"] + adopted["duplicates"]
    payloads = [json.loads(one) for one in quarantined["payload"]]
    assert {one["message"] for one in payloads} <= set(days[0]["message"])


@pytest.mark.slow
def test_with_as_arrived_a_row_counts_once_though_the_last_micro_batch_is_repeated(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec(**BY_ID))
    days = numbered(random_rows(3, keys=20, rows=120), text=False)
    # Duplicates come later, some after the end of their day.
    sent = [
        pd.concat([day, again(day, seed, earliest=1)], ignore_index=True) for seed, day in enumerate(days)
    ]
    rows = pd.concat(sent, ignore_index=True).sort_values("at", kind="stable", ignore_index=True)
    # as-arrived orders rows of one time by arrival, so they must arrive together.
    edges = [0, *(int(rows["at"].searchsorted(rows["at"][at])) for at in (150, 300, 390)), len(rows)]
    parts = [rows.iloc[a:b].reset_index(drop=True) for a, b in zip(edges, edges[1:], strict=False)]
    pipeline.land(parts[0])
    manifest = find(pipeline.warehouse, pipeline.pretrain().data["snapshot"])
    assert manifest is not None and manifest.waiting is not None and manifest.waiting["ids"]["rows"] > 0
    pipeline.land(parts[1])
    pipeline.stream()
    pipeline.land(*parts[2:])
    forget_the_last_commit(pipeline)
    pipeline.stream()
    done = pipeline.estimates()
    cut = parts[1]["at"].min().tz_localize(None)
    batch = pipeline.batch()
    assert_bit_equal(done, batch.loc[batch["event_time"] >= cut].reset_index(drop=True))
    assert pairs(done) == {pair for pair in counted(rows) if pair[1] >= cut}
    refused = pipeline.warehouse.read("quarantine").toPandas()
    assert set(refused["reason"]) == {"duplicate: of the same key and id as another row"}
    assert len(refused) == (rows["at"].dt.tz_localize(None) >= cut).sum() - len(done)

    # The offline command finds the same duplicates.
    source, target = tmp_path / "all.csv", tmp_path / "out.parquet"
    rows.assign(at=rows["at"].map(lambda at: at.isoformat())).to_csv(source, index=False)
    said = offline.run(pipeline.settings, "walk", str(source), str(target)).data
    assert said["rejected_by_reason"] == {
        "duplicate: of the same key and id as another row": len(rows) - len(batch)
    }
    alone: Any = pd.read_parquet(target)
    alone = alone[alone["mean"].notna()].rename(columns={"id": "key", "at": "event_time"})
    alone["event_time"] = alone["event_time"].dt.tz_localize(None)
    compared = ("key", "event_time", "mean", "covariance", "log_likelihood", "nis")
    assert_bit_equal(ordered(alone.astype({"key": str})), batch, compared)


@pytest.mark.slow
def test_repeated_messages_of_a_topic_count_once(feed: Feed, tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, topic_spec("resent", source={"max_offsets_per_batch": 90}, **BY_ID))
    feed.make("resent")
    days = numbered(random_rows(3, keys=20, rows=100, text=True), text=True)
    feed.send("resent", as_json(days[0], spread(days[0])))
    landed(pipeline, "resent")
    pipeline.pretrain()
    sent = len(days[0])
    resent = 0
    for number in (1, 2):
        # A producer that was cut off repeats its last messages: some with the same moment written differently, some
        # with a new time and value.
        last = days[number - 1].tail(20)
        stamped = last.assign(at=last["at"] + pd.Timedelta("20s"), a=last["a"].fillna(0.0) + 5.0)
        elsewhere = [*as_json(last, spread(last))]
        moved = [Message(written_otherwise(one.value), one.partition) for one in elsewhere]
        feed.send("resent", [*moved, *as_json(stamped, spread(stamped))])
        feed.send("resent", as_json(days[number], spread(days[number])))
        done = pipeline.stream().data
        assert (done["rows"], done["late"], done["rejected"]) == (len(days[number]), 0, 0)
        assert done["duplicates"] == 40
        resent += 40
        sent += len(days[number]) + 40
    assert landed(pipeline, "resent") == sent - len(days[0])
    assert_bit_equal(pipeline.estimates(), since(pipeline.batch(), days[1]))
    told = pipeline.warehouse.read("quarantine").toPandas()
    assert len(told) == resent and told["reason"].str.startswith("duplicate:").all()


def landed(pipeline: Pipeline, topic: str) -> int:
    return ingest.run(pipeline.settings, topic).data["rows"]


def written_otherwise(value: bytes | None) -> bytes:
    """Return a message whose time is the same moment in another zone."""
    row = json.loads(value or b"")
    at = datetime.fromisoformat(row["at"]).astimezone(ZoneInfo("Asia/Kolkata"))
    return json.dumps({**row, "at": at.isoformat()}).encode()
