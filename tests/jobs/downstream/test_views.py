"""The monitor and the forecast skill count each row once, also if a new generation estimates it again."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from jobs import monitor, skill
from jobs.downstream.views import SeenPosition, View, ViewPart, follow_view, settle_view, switch_view
from jobs.lineage.generations import LineageSegment
from tests.jobs.downstream.test_forecast_skill import FORECAST, readings
from tests.jobs.support.pipeline import Pipeline, random_walk_spec

WATCHED = {
    "watermark": "60d",
    "windows": [{"size": "1d"}],
    "rules": [{"name": "high", "kind": "level", "state": "level", "at_least": 0.3, "readings": 1}],
}


def spec(files: int) -> dict[str, Any]:
    stream = {"max_files_per_batch": files, "partitions": 2, "keys_per_block": 8}
    return random_walk_spec(stream=stream, outputs={"measured": True}, forecast=FORECAST, monitor=WATCHED)


def forget_the_last_commits(pipeline: Pipeline) -> None:
    """Undo the commit of each query's last micro-batch, as if it had been killed between its sink and the commit."""
    for pattern in ("monitor-*", "skill-*"):
        for folder in Path(pipeline.settings.warehouse, "checkpoints").glob(pattern):
            last = max(int(path.name) for path in (folder / "commits").iterdir() if path.name.isdigit())
            (folder / "commits" / str(last)).unlink()
            (folder / "commits" / f".{last}.crc").unlink()


def assert_each_row_once(pipeline: Pipeline, days: list[pd.DataFrame]) -> None:
    """Check windows and pairs against these rows, from the first one on."""
    rows = pd.concat(days)
    windows = pipeline.warehouse.read("windows/walk").toPandas().set_index("window_start")
    assert (
        windows["rows"].to_dict() == rows["at"].dt.tz_localize(None).dt.floor("1d").value_counts().to_dict()
    )
    assert windows["late"].sum() == 0
    table = pipeline.warehouse.read("alerts/walk").toPandas()
    happened = Counter(zip(table["key"], table["event_time"], table["status"], strict=True))
    assert happened and max(happened.values()) == 1
    table = pipeline.warehouse.read("forecast_skill/walk").toPandas()
    names = ["key", "measurement", "horizon", "made_at", "event_time"]
    found = Counter(table[names].itertuples(index=False, name=None))
    assert found == pairs(rows)


def pairs(rows: pd.DataFrame) -> Counter[tuple[Any, ...]]:
    """Return each pair of a row and a later measurement, one at a time."""
    wanted: Counter[tuple[Any, ...]] = Counter()
    for key, mine in rows.assign(at=rows["at"].dt.tz_localize(None)).groupby("id"):
        for made in mine["at"]:
            for horizon in FORECAST["horizons"]:
                away = (mine["at"] - made - pd.Timedelta(horizon)).abs()
                near: Any = mine[away <= pd.Timedelta(FORECAST["tolerance"])]
                for later in near.to_dict("records"):
                    for name in "ab":
                        if not pd.isna(later[name]):
                            wanted[str(key), name, horizon, made, later["at"]] += 1
    return wanted


@pytest.mark.spark
@pytest.mark.slow
def test_rows_that_are_estimated_again_are_counted_once(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, spec(1))
    days = readings(5, keys=4)
    pipeline.land(days[0])
    pipeline.pretrain()
    pipeline.land(days[1])
    older = pipeline.pretrain().data["snapshot"]
    (first,) = [one for one in snapshots(pipeline) if one != older]
    pipeline.land(*days[2:4])
    pipeline.stream(adopt=first)
    monitor.run(pipeline.settings, "walk")
    skill.run(pipeline.settings, "walk")
    assert_each_row_once(pipeline, days[1:4])
    forget_the_last_commits(pipeline)  # planned under one lineage, run again under another

    # The new generation estimates days 2 and 3 again, and in the same micro-batch for the first time day 4.
    pipeline.write_spec(spec(3))
    pipeline.land(days[4])
    pipeline.stream(adopt=older)
    monitor.run(pipeline.settings, "walk")
    skill.run(pipeline.settings, "walk")
    assert_each_row_once(pipeline, days[1:])


def snapshots(pipeline: Pipeline) -> list[str]:
    return [row["snapshot_id"] for row in pipeline.warehouse.read("manifests").collect()]


# Without Spark


@pytest.mark.parametrize("adopting", [0.0, 0.4])
@pytest.mark.parametrize("seed", range(50))
def test_a_view_counts_each_row_once_over_switches(seed: int, adopting: float) -> None:
    """Made-up histories: generations estimate rows 0, 1, 2, ... in micro-batches; a query reads after some of them."""
    rng = random.Random(seed)
    ends: dict[str, list[int]] = {"g1": []}  # of each generation the row after each micro-batch
    starts = {"g1": 0}
    chain = [LineageSegment("g1", None)]
    view = View(tuple(chain), (ViewPart("g1"),))
    read: dict[str, int] = {}
    counted: Counter[int] = Counter()
    for _ in range(rng.randint(3, 12)):
        live = chain[0].generation
        for _ in range(rng.randint(0, 4)):
            at = (ends[live] or [starts[live]])[-1]
            ends[live].append(at + rng.randint(1, 5))
        if rng.random() < 0.7:
            take(view, starts, ends, read, counted)
        if rng.random() < 0.6:
            place = rng.randrange(len(ends[live]) + 1)
            name = f"g{len(starts) + 1}"
            starts[name] = ([starts[live], *ends[live]])[place]
            ends[name] = []
            chain = [LineageSegment(name, None), LineageSegment(live, place - 1), *chain[1:]]
            seen = {
                one: SeenPosition(last, range_of(view, starts, ends, one, last)) for one, last in read.items()
            }
            view = switch_view(view, tuple(chain), seen)
        else:
            seen = {
                one: SeenPosition(last, range_of(view, starts, ends, one, last)) for one, last in read.items()
            }
            view = settle_view(view, seen)
        if rng.random() < adopting:  # by a query of other rules, which reads the estimates from the first on
            seen = {
                one: SeenPosition(last, range_of(view, starts, ends, one, last)) for one, last in read.items()
            }
            view, read = follow_view(view, tuple(chain), seen), {}
            take(view, starts, ends, read, counted)
    take(view, starts, ends, read, counted)
    newest = max((end for some in ends.values() for end in some), default=0)
    assert all(count == 1 for count in counted.values())
    assert set(counted) >= set(range((ends[chain[0].generation] or [0])[-1])) and set(counted) <= set(
        range(newest)
    )


def bounds(starts: dict[str, int], ends: dict[str, list[int]], name: str, batch: int) -> tuple[int, int]:
    return ([starts[name], *ends[name]])[batch], ends[name][batch]


def range_of(
    view: View, starts: dict[str, int], ends: dict[str, list[int]], name: str, last: int
) -> dict[str, dict[str, int]] | None:
    """Return the range of the last micro-batch that a query has read of a generation and counted."""
    for batch in range(last, -1, -1):
        start, end = bounds(starts, ends, name, batch)
        if any(counts(one, name, batch, end) for one in view.parts):
            return {"from": {"version": start}, "to": {"version": end}}
    return None


def counts(part: ViewPart, name: str, batch: int, end: int) -> bool:
    """Tell if a micro-batch counts, as the conditions on columns do."""
    mine = part.generation == name and batch > part.after and (part.last is None or batch <= part.last)
    return mine and (part.since is None or end > part.since["version"])


def take(
    view: View,
    starts: dict[str, int],
    ends: dict[str, list[int]],
    read: dict[str, int],
    counted: Counter[int],
) -> None:
    """Let a query read what is there; of a micro-batch on both sides of `since` it counts rows that are new to it."""
    for name in ends:
        for batch in range(read.get(name, -1) + 1, len(ends[name])):
            start, end = bounds(starts, ends, name, batch)
            for part in view.parts:
                if counts(part, name, batch, end):
                    split = part.since is not None and start < part.since["version"]
                    for row in range(start, end):
                        if not (split and counted[row]):
                            counted[row] += 1
        if ends[name]:
            read[name] = len(ends[name]) - 1
