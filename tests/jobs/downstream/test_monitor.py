"""Monitoring of estimates: windows like those of the notebook's racks and alerts by rules, each exactly once."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from jobs import monitor
from jobs.core.errors import UserError
from jobs.downstream.rule_operator import KIND, RulePlan, build_rules, update_bucket
from jobs.downstream.rules import apply_rules, build_empty_states
from jobs.downstream.windows import align_readings
from jobs.specs.model_spec import ModelSpec
from jobs.specs.monitor import Monitor
from jobs.state.encoding.packets import Records
from jobs.state.encoding.routing import compute_routes
from jobs.state.encoding.rows import RowFormat
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.tables import estimates
from tests.jobs.specs.test_spec import NILE, refused
from tests.jobs.support.feeds import Feed
from tests.jobs.support.pipeline import Pipeline, random_rows, random_walk_spec

# The racks of the example: a reading of each every five minutes. An estimate is the reading itself (R = 0).
RACKS: dict[str, Any] = {
    "name": "rack",
    "version": 1,
    "key": ["rack"],
    "time": "at",
    "time_unit": "minute",
    "measurement": ["temperature"],
    "states": ["temperature"],
    "process": {"kind": "random_walk", "variance": 1.0},
    "observation": {"R": [[0.0]]},
    "initial": {"mean": [0.0], "covariance": [[1.0e4]]},
    "stream": {"partitions": 2},
    "monitor": {
        "watermark": "10min",
        "by": ["rack"],
        "windows": [{"size": "10min", "slide": "5min"}, {"size": "1h"}],
        "rules": [
            {"name": "warm", "kind": "level", "at_least": 100.0, "readings": 3},
            {"name": "climbing", "kind": "level", "at_least": 100.0, "readings": 3, "rising": True},
            {"name": "silent", "kind": "silence", "after": "30min"},
            {"name": "odd", "kind": "nis", "at_least": 20.0, "readings": 1, "clear_readings": 2},
        ],
    },
}
READINGS = {
    "rack1": [("08:01:01", 99.5), ("08:06:02", 100.5), ("08:11:03", 101.0), ("08:16:04", 102.0)],
    "rack2": [("08:01:02", 99.5), ("08:06:04", 105.5), ("08:11:06", 104.0), ("08:16:08", 108.0)],
}
# Spark's own sliding average of these readings by rack: the windows that start at 07:55, 08:00, ...
AVERAGES = {"rack1": [99.5, 100.0, 100.75, 101.5, 102.0], "rack2": [99.5, 102.5, 104.75, 106.0, 108.0]}


def at(clock: str) -> datetime:
    return datetime.fromisoformat(f"2017-06-02T{clock}+00:00")


def readings(rows: dict[str, list[tuple[str, float]]]) -> pd.DataFrame:
    flat = [(rack, at(clock), value) for rack, some in rows.items() for clock, value in some]
    frame = pd.DataFrame.from_records(flat, columns=["rack", "at", "temperature"])
    return frame.assign(at=frame["at"].dt.as_unit("us"))


def seen(pipeline: Pipeline) -> list[tuple[str, str, str, str]]:
    """Return the alerts as (rack, rule, status, time of the day), except those of the rule `odd`."""
    table = pipeline.warehouse.read("alerts/rack").filter("rule != 'odd'")
    frame = table.orderBy("event_time", "rack", "rule").toPandas()
    times = frame["event_time"].dt.strftime("%H:%M:%S")
    return list(zip(frame["rack"], frame["rule"], frame["status"], times, strict=True))


def add_column(pipeline: Pipeline, name: str) -> None:
    """Add a column to the estimates, as another release does."""
    path = pipeline.warehouse.path(estimates("rack"))
    pipeline.warehouse.spark.sql(f"ALTER TABLE delta.`{path}` ADD COLUMN {name} double")


def forget_the_last_commit(pipeline: Pipeline) -> int:
    """Undo the commit of each query's last micro-batch, as if the monitor had crashed just before."""
    undone = 0
    for folder in Path(pipeline.settings.warehouse, "checkpoints").glob("monitor-*"):
        last = max(int(path.name) for path in (folder / "commits").iterdir() if path.name.isdigit())
        (folder / "commits" / str(last)).unlink()
        (folder / "commits" / f".{last}.crc").unlink(missing_ok=True)
        undone += 1
    return undone


@pytest.mark.spark
@pytest.mark.parametrize(
    "former", [False, pytest.param(True, marks=pytest.mark.slow, id="checkpoints of a former release")]
)
def test_the_racks(tmp_path: Path, former: bool) -> None:
    pipeline = Pipeline(tmp_path, RACKS)
    pipeline.land(readings({"rack0": [("07:00:00", 90.0)]}))
    with pytest.raises(UserError, match="model rack has no live estimates in .*: make them with"):
        monitor.run(pipeline.settings, "rack")
    pipeline.pretrain()
    pipeline.land(readings(READINGS))
    pipeline.stream()
    with mock.patch.object(Checkpoint, "has_states_of_format_1", lambda checkpoint: former):
        done = monitor.run(pipeline.settings, "rack").data
    assert (done["window_rows"], done["late"]) == (24, 0)
    folders = [path.name for path in Path(pipeline.settings.warehouse, "checkpoints").glob("monitor-*")]
    begun = [Checkpoint(pipeline.warehouse, f"checkpoints/{one}") for one in folders]
    assert [one.has_states_of_format_1() for one in begun] == [former, former]
    table = pipeline.warehouse.read("windows/rack").toPandas()
    of_ten = table["size"] == "10min"
    sliding = table.loc[of_ten].sort_values(["rack", "window_start"])
    assert {rack: [float(m[0]) for m in some["mean"]] for rack, some in sliding.groupby("rack")} == AVERAGES
    assert sliding["window_start"].min() == pd.Timestamp("2017-06-02 07:55")
    assert set(table.loc[table["size"] == "1h", "rows"]) == {4}
    warm = [
        ("rack1", "climbing", "raised", "08:16:04"),
        ("rack1", "warm", "raised", "08:16:04"),
        ("rack2", "warm", "raised", "08:16:08"),
    ]
    assert seen(pipeline) == warm

    # After a crash before the commit of its last micro-batches it repeats them, which is idempotent. The estimates have
    # a column more. A rack cools down, another is silent, and a reading of a third is after one of its windows' end.
    add_column(pipeline, "of_another_release")
    pipeline.land(
        readings(
            {
                "rack1": [("08:21:05", 98.0), ("08:51:00", 99.0), ("09:15:00", 99.0)],
                "rack2": [("09:16:00", 90.0)],
                "rack3": [("08:02:00", 90.0), ("09:16:00", 90.0)],
            }
        )
    )
    pipeline.stream()
    assert forget_the_last_commit(pipeline) == 2
    done = monitor.run(pipeline.settings, "rack").data
    again = pipeline.warehouse.read("windows/rack").toPandas()
    order, ended = ["size", "rack", "window_start"], pd.Timestamp("2017-06-02 08:20")
    before, after = (
        one.loc[(one["window_end"] <= ended) & (one["rack"] != "rack3")].sort_values(order, ignore_index=True)
        for one in (table, again)
    )
    pd.testing.assert_frame_equal(after, before)
    assert set(again.loc[again["size"] == "1h", "rows"]) == {4, 6, 1}
    # 08:16:08 less ten minutes is after the first of the two sliding windows of 08:02.
    assert done["late"] == 1
    assert seen(pipeline) == [
        *warm,
        ("rack1", "climbing", "cleared", "08:21:05"),
        ("rack1", "warm", "cleared", "08:21:05"),
        ("rack3", "silent", "raised", "08:32:00"),
        ("rack2", "silent", "raised", "08:46:08"),
        ("rack2", "silent", "cleared", "09:16:00"),
        ("rack2", "warm", "cleared", "09:16:00"),
        ("rack3", "silent", "cleared", "09:16:00"),
    ]


@pytest.mark.spark
@pytest.mark.slow
def test_alerts_are_sent_to_a_topic_at_least_once(feed: Feed, tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, {**RACKS, "monitor": {**RACKS["monitor"], "kafka": {"topic": "alarms"}}})
    pipeline.land(readings({"rack0": [("07:00:00", 90.0)]}))
    pipeline.pretrain()
    pipeline.land(readings(READINGS))
    pipeline.stream()
    with pytest.raises(UserError, match="alarms"):  # there is no such topic yet
        monitor.run(pipeline.settings, "rack")
    feed.make("alarms")

    def sent() -> list[tuple[str, str, str, str]]:
        messages = feed.read("alarms")
        values = [json.loads(value) for value in messages["value"]]
        assert list(messages["key"]) == [value["rack"] for value in values]
        of_rules = [value for value in values if value["rule"] != "odd"]
        found = [(one["rack"], one["rule"], one["status"], one["event_time"][11:19]) for one in of_rules]
        return sorted(found, key=lambda one: (one[3], one[0], one[1]))

    monitor.run(pipeline.settings, "rack")
    assert sent() == seen(pipeline) != []

    # After a crash before the micro-batch's commit the alert is in the table once, and in the topic again.
    once = seen(pipeline)
    assert forget_the_last_commit(pipeline) == 2
    monitor.run(pipeline.settings, "rack")
    assert seen(pipeline) == once
    assert sent() == [one for one in once for _ in range(2)]
    values = [json.loads(value) for value in feed.read("alarms")["value"]]
    known = {(one["query"], one["batch_id"], one["ordinal"]): one for one in values}
    assert 2 * len(known) == len(values) and all(one in known.values() for one in values)


@pytest.mark.spark
@pytest.mark.slow
def test_windows_equal_those_of_all_estimates_at_once(tmp_path: Path) -> None:
    watched = {"watermark": "60d", "windows": [{"size": "6h", "slide": "2h"}]}
    pipeline = Pipeline(tmp_path, random_walk_spec(monitor=watched, robust={"gate": {"probability": 0.8}}))
    days = random_rows(3)
    pipeline.land(days[0])
    pipeline.pretrain()
    for day in days[1:]:
        pipeline.land(day)
        pipeline.stream()
        monitor.run(pipeline.settings, "walk")
    rows = pipeline.estimates()
    found = pipeline.warehouse.read("windows/walk").toPandas().set_index("window_start").sort_index()
    hours = rows["event_time"].dt.floor("2h")
    expected = pd.concat([rows.assign(start=hours - pd.Timedelta(hours=h)) for h in (0, 2, 4)])
    groups = expected.groupby("start")
    assert found["rows"].to_dict() == groups.size().to_dict()
    assert (
        found["gated"].to_dict() == (expected["flags"] == "gated").groupby(expected["start"]).sum().to_dict()
    )
    assert found["gated"].sum() > 0
    np.testing.assert_allclose(found["mean_nis"], groups["nis"].mean(), rtol=1e-12)
    means = np.array(found["mean"].to_list())
    stacked = pd.DataFrame(expected["mean"].to_list()).groupby(expected["start"].to_numpy()).mean()
    np.testing.assert_allclose(means, stacked, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(found["share_gated"], found["gated"] / found["rows"], rtol=1e-15)


# Without Spark


@pytest.mark.spark
def test_a_rule_reads_no_other_state_of_the_live_version(spark: SparkSession) -> None:
    # Version 1 with a level and a slope is live, and version 2 with level, wave and turn is deployed.
    level, wave = "local_linear_trend", "seasonal_trigonometric"
    old = {**RACKS, "states": ["level", "slope"], "monitor": None,
           "process": {"kind": level, "level_variance": 1.0, "slope_variance": 1.0},
           "initial": {"mean": [0.0] * 2, "covariance": np.eye(2).tolist()}}  # fmt: skip
    parts = [{"name": "level", "kind": "random_walk", "variance": 1.0},
             {"name": "day", "kind": wave, "period": 24.0, "variance": 1.0}]  # fmt: skip
    new = {**old, "version": 2, "states": ["level", "wave", "turn"], "process": {"kind": "sum", "parts": parts},
           "initial": {"mean": [0.0] * 3, "covariance": np.eye(3).tolist()}}  # fmt: skip
    made_by = {f"g{one['version']}": ModelSpec.model_validate(one) for one in (old, new)}
    rows = [("g1", [1.0, 7.0], [0.1, 0.7, 0.7, 0.9]), ("g2", [2.0, 5.0, 6.0], [float(at) for at in range(9)])]
    estimates = spark.createDataFrame(rows, "generation string, mean array<double>, covariance array<double>")
    found = align_readings(estimates, made_by["g2"], made_by).orderBy("generation").collect()
    assert [row["mean"] for row in found] == [[1.0, None, None], [2.0, 5.0, 6.0]]
    assert [[row["covariance"][at] for at in (0, 4, 8)] for row in found] == [
        [0.1, None, None],
        [0.0, 4.0, 8.0],
    ]
    assert align_readings(estimates, made_by["g1"], {"g1": made_by["g1"]}) is estimates
    # The plan has one case for each column and layout, whatever the number of generations.
    many = {f"h{at}": made_by["g1"] for at in range(40)} | made_by
    aligned: Any = align_readings(estimates, made_by["g2"], many)
    plan = aligned._jdf.queryExecution().analyzed().toString()
    assert (plan.count("CASE WHEN"), plan.count("Project")) == (2, 1)


def test_a_buckets_states_do_not_depend_on_when_keys_appear() -> None:
    """Readings in packets over several micro-batches with new keys give the result of one pass over all."""
    rule = {"name": "up", "kind": "level", "at_least": 1.0, "clear_below": 0.5, "readings": 2}
    rules = build_rules(Monitor.model_validate({"rules": [rule]}))
    fmt = RowFormat(KIND, "event_time", ("r0",), ())
    plan = RulePlan(rules, fmt)
    rng = np.random.default_rng(0)
    names = np.array([f"k{number}" for number in range(30)])
    routes = compute_routes(rng.integers(-(2**62), 2**62, 30))
    number = rng.integers(0, 30, 600)
    time, value = np.arange(600), rng.normal(0.5, 1.0, 600)
    known, events = plan.layout.empty(), []
    for start in range(0, 600, 50):
        some = slice(start, start + 50)
        code = number[some]
        arrays = {"route": routes[code], "check": code, "time": time[some], "y": value[None, some]}
        rows = Records(arrays, pa.array(names[code]))
        parts = [fmt.layout.encode(rows.slice(a, b)) for a, b in ((0, 20), (20, 50))]
        known, found = update_bucket(plan, known, parts, 0)
        assert known.text is not None
        texts = known.text.to_pylist()
        events += [
            (texts[k], bool(r), int(t)) for k, r, t in zip(found.key, found.raised, found.time, strict=True)
        ]
    order = np.lexsort((time, number))
    _, whole = apply_rules(
        rules, build_empty_states(rules, 30), number[order], time[order], value[None, order]
    )
    expected = [
        (names[k], bool(r), int(t)) for k, r, t in zip(whole.key, whole.raised, whole.time, strict=True)
    ]
    assert len(expected) > 50 and sorted(events) == sorted(expected)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({}, "monitor: watches nothing; give windows, rules, or both"),
        ({"windows": [{"size": "10 parsecs"}]}, "monitor.windows[0].size: '10 parsecs' is not a duration"),
        (
            {"windows": [{"size": "5min", "slide": "1h"}]},
            "monitor.windows[0].slide: is longer than the window",
        ),
        ({"windows": [{"size": "5min"}], "by": ["lake"]}, "monitor.by[0]: 'lake' is not a column of a row"),
        (
            {"windows": [{"size": "5min"}], "by": ["volume"]},
            "monitor.by[0]: needs the column measured beside the estimates; add outputs: {measured: true}",
        ),
        ({"rules": [{"name": "a", "kind": "level"}]}, "monitor.rules[0]: has no bound"),
        ({"rules": [{"name": "a", "kind": "silence"}]}, "monitor.rules[0].after: is missing"),
        (
            {"rules": [{"name": "a", "kind": "nis", "at_least": 9.0, "state": "level"}]},
            "state: is for kind: level",
        ),
        (
            {"rules": [{"name": "a", "kind": "level", "at_least": 9.0, "state": "slope"}]},
            "'slope' is not a state",
        ),
        (
            {"rules": [{"name": "a", "kind": "level", "at_least": 9.0, "clear_below": 10.0}]},
            "is not within at_least",
        ),
        (
            {"rules": [{"name": "a", "kind": "level", "at_most": 9.0, "rising": True}]},
            "rising: needs at_least",
        ),
        (
            {"rules": [{"name": "a", "kind": "nis", "at_least": 1.0}] * 2},
            "monitor.rules[1].name: 'a' is named twice",
        ),
    ],
)
def test_an_invalid_section_is_refused(tmp_path: Path, section: dict[str, Any], said: str) -> None:
    assert said in refused(tmp_path, {**NILE, "monitor": section})


def test_windows_and_rules_have_separate_definitions() -> None:
    one = ModelSpec.model_validate(RACKS).monitor
    assert one is not None
    other = one.model_copy(update={"watermark": "20min"})
    assert one.definition("windows") != other.definition("windows")
    assert one.definition("rules") == other.definition("rules")
