"""Real flights that arrive late, twice, broken or of aircraft never seen: every row sent is accounted for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import yaml

from demo.flights import COLUMNS, STREAM_FROM, load_flights, with_times
from jobs import filter as offline
from tests.conftest import ROOT
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, ordered
from tests.jobs.support.processes import Driver, files

MODEL = "aircraft_delay"
DELAY = pd.Timedelta("24h")
HISTORY_DAYS, FEED_DAYS = 10, 8
KEY = "tailnum"
MEASURED = ["dep_delay", "arr_delay"]
LATE, REPEATED, BROKEN, UNKNOWN = 0.01, 0.01, 0.005, 0.002
BEYOND = pd.Timedelta("40h")
"""How late the latest are: most of the late rows keep within the model's delay, some do not."""

UNREADABLE = {"at": "the day before", "dep_delay": "early", "arr_delay": "inf"}


class Faulty(NamedTuple):
    """Rows as text, in the order of their arrival, a frame a day; and the numbers of those made unreadable."""

    days: list[pd.DataFrame]
    broken: set[int]


def flights_of(first: int, last: int) -> pd.DataFrame:
    """Return the flights of so many days from the hand-over, as text, with their instant."""
    flights = with_times(load_flights())
    day = pd.to_datetime(flights["day"])
    inside = (day >= pd.Timestamp(STREAM_FROM) + pd.Timedelta(days=first)) & (
        day < pd.Timestamp(STREAM_FROM) + pd.Timedelta(days=last)
    )
    rows = flights.loc[inside, list(COLUMNS[MODEL])].convert_dtypes().astype("string")
    return rows.sort_values("at", kind="stable", ignore_index=True)


def faulty(rows: pd.DataFrame, seed: int) -> Faulty:
    """Let some of the rows be late, come again, be unreadable or of an unknown aircraft."""
    rng = np.random.default_rng(seed)
    rows = rows.copy()
    fate = rng.random(len(rows))
    rows.loc[fate < UNKNOWN, KEY] = [f"X{n:05d}" for n in range(int((fate < UNKNOWN).sum()))]
    again = rows.sample(frac=REPEATED, random_state=seed)
    rows = pd.concat([rows, again], ignore_index=True)

    wait = pd.Series(0.0, rows.index)
    late = rng.random(len(rows)) < LATE
    wait[late] = rng.uniform(0, BEYOND.total_seconds(), late.sum())
    wait[len(rows) - len(again) :] += rng.uniform(0, 3600, len(again))
    arrival = pd.to_datetime(rows["at"]) + pd.to_timedelta(wait, "s")

    broken = np.flatnonzero(rng.random(len(rows)) < BROKEN)
    columns = rng.choice(list(UNREADABLE), len(broken))
    for name in UNREADABLE:
        rows.loc[broken[columns == name], name] = UNREADABLE[name]
    day = arrival.dt.floor("D")
    order = np.argsort(arrival.to_numpy(), kind="stable")
    rows, day = rows.iloc[order], day.iloc[order]
    return Faulty([frame for _, frame in rows.groupby(day, sort=True)], set(broken.tolist()))


def sorted_out(history: pd.DataFrame, feed: Faulty) -> tuple[pd.DataFrame, dict[str, int]]:
    """Say which rows count, and how many sent to the stream do not for which reason, by a look at each day in turn."""
    count = {"unreadable": 0, "no key": 0, "late": 0}
    newest = pd.to_datetime(history["at"]).max()
    start = newest - DELAY
    taken = [history]
    for day in feed.days:
        lost = day[KEY].isna()
        unreadable = pd.Series([number in feed.broken for number in day.index], day.index) & ~lost
        count["no key"] += int(lost.sum())
        count["unreadable"] += int(unreadable.sum())
        day = day.loc[~lost & ~unreadable]
        at = pd.to_datetime(day["at"])
        late = at < newest - DELAY
        count["late"] += int(late.sum())
        taken.append(day.loc[~late])
        newest = max(newest, at.max())
    rows = pd.concat(taken, ignore_index=True)
    rows[MEASURED] = rows[MEASURED].astype("Float64")
    rows = rows.sort_values([KEY, "at", *MEASURED], ignore_index=True)  # of repetitions the least one counts
    repeated = rows.duplicated([KEY, "at"])
    count["duplicate"] = int((repeated & (pd.to_datetime(rows["at"]) >= start)).sum())
    return rows.loc[~repeated], count


def spec() -> dict[str, Any]:
    """Return the demo's model, with its numbers as they are and rows in the order of their times."""
    given = yaml.safe_load((ROOT / "models" / f"{MODEL}.yaml").read_text())
    del given["learn"], given["airflow"]
    return {
        **given,
        "order": {"kind": "strict", "delay": "24h"},
        "duplicates": {},
        "stream": {"max_files_per_batch": 1, "partitions": 2},
    }


@pytest.mark.spark
@pytest.mark.slow
def test_accepted_and_quarantined_rows_are_those_sent(tmp_path: Path) -> None:
    history, feed = flights_of(-HISTORY_DAYS, 0), faulty(flights_of(0, FEED_DAYS), seed=11)
    history = history.dropna(subset=[KEY])
    last = pd.DataFrame(
        {KEY: ["the last"], "at": ["2014-01-01T00:00:00Z"]}
    )  # moves the watermark past all others
    feed.days.append(last.reindex(columns=history.columns).set_index(pd.Index([-1])))
    pipeline = Pipeline(tmp_path, spec())
    pipeline.land(history, suffix=".csv")
    pipeline.pretrain()
    pipeline.land(*feed.days, suffix=".csv")

    checkpoint = Path(pipeline.settings.warehouse, "checkpoints", f"{MODEL}-g0001")
    for batch in (2, 5):
        driver = Driver(pipeline, "stream", "--model", MODEL)
        driver.wait_for(lambda batch=batch: str(batch) in files(checkpoint / "offsets"))
        driver.kill()
    assert pipeline.stream().data["waiting"] == 1

    accepted, refused = sorted_out(history, feed)
    assert min(refused.values()) > 10
    reasons = pipeline.warehouse.read("quarantine").groupBy("reason").count().toPandas()
    assert reasons["count"].groupby(reasons["reason"].map(kind_of)).sum().to_dict() == refused
    at = pd.to_datetime(history["at"])
    start = at.max() - DELAY
    sent = int((at >= start).sum()) + sum(len(day) for day in feed.days)
    found = pipeline.estimates()
    assert len(found) + sum(refused.values()) + 1 == sent

    rows, out = tmp_path / "accepted.csv", tmp_path / "out.parquet"
    accepted.to_csv(rows, index=False)
    offline.run(pipeline.settings, MODEL, str(rows), str(out))
    expected = pd.read_parquet(out).rename(columns={KEY: "key", "at": "event_time", "flag": "flags"})
    times = expected["event_time"]
    streamed = expected.loc[(times >= start) & (times < times.max())]
    assert_bit_equal(found, ordered(streamed.assign(event_time=streamed["event_time"].dt.tz_localize(None))))


def kind_of(reason: str) -> str:
    """Return which of the reasons it is."""
    for kind, word in {"late": "late:", "duplicate": "duplicate:", "no key": KEY}.items():
        if word in reason:
            return kind
    return "unreadable"
