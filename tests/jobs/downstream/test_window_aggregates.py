"""Windows by a column of the rows, with aggregates, growing or final: live in portions, after a crash, over history."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from jobs import estimate, monitor
from jobs.specs.model_spec import ModelSpec
from tests.jobs.downstream.test_monitor import RACKS, forget_the_last_commit
from tests.jobs.specs.test_spec import NILE, refused
from tests.jobs.support.feeds import Feed
from tests.jobs.support.pipeline import Pipeline

MINUTE: Any = pd.Timedelta("1min")
HOUR: Any = pd.Timedelta("1h").as_unit("us")
BEGAN = pd.Timestamp("2017-06-02T08:00:00Z")
FUNCTION = "def span(values, start):\n    return values[start[1:] - 1] - values[start[:-1]]\n"
OF = "measured.temperature"
WATCHED: dict[str, Any] = {
    "watermark": "10min",
    "by": ["load"],
    "windows": [{"size": "10min", "slide": "5min"}, {"size": "1h", "when": "final"}],
    "aggregates": [
        *(
            {"name": kind, "of": OF, "kind": kind}
            for kind in ("count", "min", "max", "sum", "mean", "stddev")
        ),
        {"name": "high", "of": OF, "kind": "quantile", "level": 0.9},
        {"name": "span", "of": OF, "kind": "function", "function": "spans:span"},
        {"name": "fit", "of": "nis", "kind": "variance"},
    ],
}
PLACE = ["size", "load", "window_start"]


def loaded(**monitored: Any) -> dict[str, Any]:
    """Return the model of racks with a control, by which the noise is scaled."""
    return {
        **RACKS,
        "control": ["load"],
        "observation": {"R": [[0.5]], "noise_scale": "load"},
        "outputs": {"measured": True, "control": True},
        "monitor": {**WATCHED, **monitored},
    }


def some_rows(count: int) -> Any:
    rng = np.random.default_rng(4)
    at = BEGAN + pd.to_timedelta(60_000 * np.arange(count) + rng.integers(0, 60_000, count), unit="ms")
    value = np.where(rng.random(count) < 0.1, np.nan, rng.normal(100.0, 7.0, count))
    frame = pd.DataFrame(
        {
            "rack": rng.choice(["a", "b", "c"], count),
            "at": at,
            "temperature": value,
            "load": rng.choice([1.0, 2.0], count),
        }
    )
    return frame.assign(at=frame["at"].dt.as_unit("us"))


def expected(rows: pd.DataFrame) -> dict[tuple[str, float, pd.Timestamp], dict[str, float]]:
    """Return the aggregates of the readings by window and load, from their definitions."""
    found: dict[Any, Any] = {}
    at = rows["at"].dt.tz_convert(None)
    parts = [rows.assign(size="1h", start=at.dt.floor("1h"))]
    parts += [rows.assign(size="10min", start=at.dt.floor("5min") - MINUTE * back) for back in (0, 5)]
    for place, some in pd.concat(parts).groupby(["size", "load", "start"]):
        values = np.sort(some["temperature"].dropna().to_numpy())
        n = len(values)
        found[place] = {
            "rows": len(some),
            "count": n,
            "sum": math.fsum(values),
            **({"min": values[0], "max": values[-1], "span": values[-1] - values[0]} if n else {}),
            **({"high": float(np.quantile(values, 0.9))} if n else {}),
        }
    return found


def table(pipeline: Pipeline, name: str) -> pd.DataFrame:
    rows: Any = pipeline.warehouse.read(f"{name}/rack").toPandas().sort_values(PLACE, ignore_index=True)
    return rows[[*PLACE, "window_end", "rows", "late", "gated", "flagged", "nis_rows", "aggregates"]]


@pytest.mark.spark
@pytest.mark.slow
def test_windows_by_a_control_with_aggregates(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, loaded(aggregates=[]))
    (Path(pipeline.settings.models) / "spans.py").write_text(FUNCTION)
    rows = some_rows(150)
    before = rows[:1].assign(at=rows["at"][:1] - HOUR)
    pipeline.land(before)
    pipeline.pretrain()
    pipeline.land(rows[:40])
    pipeline.stream()
    monitor.run(pipeline.settings, "rack")  # another definition, whose rows the same tables have
    pipeline.write_spec(loaded())
    for start, stop in ((40, 90), (90, 150)):
        monitor.run(pipeline.settings, "rack")
        pipeline.land(rows[start:stop])
        pipeline.stream()
    monitor.run(pipeline.settings, "rack")
    forget_the_last_commit(pipeline)
    monitor.run(pipeline.settings, "rack")

    section = ModelSpec.model_validate(loaded()).monitor
    assert section is not None
    mine = f"definition = '{section.definition('windows')}'"
    found, still = (
        pipeline.warehouse.read(f"{name}/rack").filter(mine).toPandas()
        for name in ("windows", "windows_open")
    )
    wanted = expected(rows)
    last = (rows["at"].max() - pd.Timedelta("10min")).tz_convert(None)
    ended = {place for place in wanted if place[0] == "10min" or place[2] + pd.Timedelta("1h") <= last}
    assert {tuple(one) for one in found[PLACE].to_numpy()} == {(size, load, at) for size, load, at in ended}
    assert len(still) == len(wanted) - len(ended) > 0
    assert set(found["size"]) == {"10min", "1h"} and found["late"].sum() == 0
    for one in found.to_dict("records"):
        exact = wanted[one["size"], one["load"], one["window_start"]]
        told = dict(one["aggregates"])
        assert one["rows"] == exact["rows"]
        for name in set(exact) - {"rows"}:
            assert told[name] == exact[name], (name, one)
        if exact["count"] > 1:
            assert told["mean"] == pytest.approx(exact["sum"] / exact["count"], rel=1e-15)

    estimate.run(pipeline.settings, "rack")
    monitor.run(pipeline.settings, "rack", history=True)
    live = found.sort_values(PLACE, ignore_index=True)
    ours = table(pipeline, "windows_history")
    ours = ours[ours["window_start"] >= live["window_start"].min()].reset_index(drop=True)
    pd.testing.assert_frame_equal(
        ours.drop(columns="aggregates"), live[ours.columns].drop(columns="aggregates")
    )
    assert [dict(one) for one in ours["aggregates"]] == [dict(one) for one in live["aggregates"]]


@pytest.mark.spark
@pytest.mark.slow
def test_windows_are_sent_to_a_topic(feed: Feed, tmp_path: Path) -> None:
    feed.make("panes")
    few = [{"name": "mean", "of": OF, "kind": "mean"}]
    pipeline = Pipeline(tmp_path, loaded(aggregates=few, windows_kafka={"topic": "panes"}))
    rows = some_rows(90)
    pipeline.land(rows[:1].assign(at=rows["at"][:1] - HOUR))
    pipeline.pretrain()
    pipeline.land(rows)
    pipeline.stream()
    monitor.run(pipeline.settings, "rack")
    sent = [json.loads(value) for value in feed.read("panes")["value"]]
    there = pipeline.warehouse.read("windows/rack").toPandas()
    assert len(sent) == len(there) and {one["size"] for one in sent} == {"10min", "1h"}
    by_place = {(one["size"], one["load"], one["window_start"][:19]): one["aggregates"] for one in sent}
    for one in there.to_dict("records"):
        key = (one["size"], one["load"], one["window_start"].isoformat())
        assert by_place[key].get("mean") == dict(one["aggregates"])["mean"]


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"aggregates": [{"name": "a", "of": "nis", "kind": "mean"}]}, "monitor.aggregates: needs windows"),
        ({"aggregates": [{"name": "a", "of": "nis", "kind": "quantile"}]}, "aggregates[0].level: is missing"),
        ({"aggregates": [{"name": "a", "of": "nis", "kind": "mean", "level": 0.1}]}, "is for kind: quantile"),
        ({"aggregates": [{"name": "a", "of": "nits", "kind": "mean"}]}, "did you mean 'nis'?"),
        ({"aggregates": [{"name": "a", "of": "nis", "kind": "mean"}] * 2}, "'a' is named twice"),
        ({"windows": [{"size": "1h"}, {"size": "1h", "when": "final"}]}, "monitor.windows[1].when: differs"),
    ],
)
def test_an_unsound_section_is_refused(tmp_path: Path, section: dict[str, Any], said: str) -> None:
    rules = [{"name": "a", "kind": "nis", "at_least": 9.0}]
    windows = {} if "needs windows" in said else {"windows": [{"size": "1h"}]}
    assert said in refused(tmp_path, {**NILE, "monitor": {**windows, "rules": rules, **section}})
