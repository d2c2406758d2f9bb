"""The flights: two upgrades and a roll-back under a stream that runs and is fed all the while."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from demo.flights import load_flights, with_times, write_csv
from demo.upgrade import SECOND
from jobs import rollback, upgrade
from jobs.lineage import generations
from jobs.lineage.generations import read_live_lineage
from jobs.lineage.live import live_estimates
from jobs.storage.tables import measurements
from jobs.supervision.driver_log import DriverLog
from tests.jobs.support.pipeline import Pipeline
from tests.jobs.support.processes import Driver, files

pytestmark = [pytest.mark.spark, pytest.mark.soak]

MODELS = Path(__file__).resolve().parents[3] / "models"
MODEL = "air_time"
COLUMNS = ("origin", "dest", "at", "air_time")
STREAMED = [date(2013, 10, 1) + timedelta(days=number) for number in range(92)]
FEED_SECONDS = 5.0
HOUR = 60.0

FIRST: dict[str, Any] = {
    **yaml.safe_load((MODELS / f"{MODEL}.yaml").read_text()),
    "initial": {"mean": [150.0], "covariance": [[1.0e4]]},
    "learn": None,  # so that the oracle knows its numbers
    "airflow": {},
}
V2: dict[str, Any] = {**FIRST, **SECOND}  # it is forced: what is good is not the question here
V3: dict[str, Any] = {  # in hours, by another filter
    **V2,
    "version": 3,
    "filter": "unscented",
    "process": {
        "kind": "sum",
        "parts": [
            {"kind": "random_walk", "variance": 1.0 / HOUR**2},
            {"kind": "ornstein_uhlenbeck", "rate": 0.7, "variance": 50.0 / HOUR**2},
        ],
    },
    "observation": {"H": [[HOUR, HOUR]], "R": [[25.0]]},
    "initial": {"mean": [150.0 / HOUR, 0.0], "covariance": [[1.0e4 / HOUR**2, 0.0], [0.0, 36.0 / HOUR**2]]},
    "migrate": {
        "states": {name: {"from": name, "scale": 1.0 / HOUR} for name in ("level", "gust")},
    },
}


class Textbook:
    """One version of the model: a filter of one key at a time, as in any textbook, with rows that may miss."""

    def __init__(self, spec: dict[str, Any], H: list[float], q: float, gust: float | None) -> None:
        self.H, self.R = np.array(H), spec["observation"]["R"][0][0]
        self.m0, self.P0 = np.array(spec["initial"]["mean"]), np.array(spec["initial"]["covariance"])
        self.q, self.gust = q, gust

    def predict(self, m: np.ndarray, P: np.ndarray, days: float) -> tuple[np.ndarray, np.ndarray]:
        if self.gust is None:
            return m, P + self.q * days
        kept = np.exp(-0.7 * days)
        F, Q = np.diag([1.0, kept]), np.diag([self.q * days, self.gust * (1.0 - kept**2)])
        return F @ m, F @ P @ F.T + Q

    def update(self, m: np.ndarray, P: np.ndarray, y: float) -> tuple[np.ndarray, np.ndarray, float]:
        if np.isnan(y):
            return m, P, 0.0
        S = float(self.H @ P @ self.H) + self.R
        e, K = y - float(self.H @ m), P @ self.H / S
        A = np.eye(len(m)) - np.outer(K, self.H)
        return m + K * e, A @ P @ A.T + self.R * np.outer(K, K), -0.5 * (np.log(2.0 * np.pi * S) + e * e / S)


BOOKS = (
    Textbook(FIRST, [1.0], 45.0, None),
    Textbook(V2, [1.0, 1.0], 1.0, 50.0),
    Textbook(V3, [HOUR, HOUR], 1.0 / HOUR**2, 50.0 / HOUR**2),
)
NOTHING = np.zeros((2, 2))
STAGES = ((1, np.eye(1), np.zeros((1, 1))), (2, np.array([[1.0], [0.0]]), np.diag([0.0, 36.0])),
          (3, np.eye(2) / HOUR, NOTHING), (2, np.eye(2) * HOUR, NOTHING))  # fmt: skip
"""The versions in the order in which they are live, and the map of the previous version's state."""


def oracle(rows: pd.DataFrame, cuts: list[int]) -> dict[tuple[str, str, int], tuple[int, Any, Any, float]]:
    """Filter each route alone, mapping its state by hand where its rows pass a cut; return version and estimate a row.

    cuts: first row, in the order of landing, that each of `STAGES` but the first has taken.
    """
    found: dict[tuple[str, str, int], tuple[int, Any, Any, float]] = {}
    rows = rows.assign(number=np.arange(len(rows)))
    for route, mine in rows.groupby(["origin", "dest"]):
        origin, dest = route  # pyright: ignore[reportGeneralTypeIssues]
        state: tuple[np.ndarray, np.ndarray] | None = None
        stage, before = 0, 0
        for number, at, y in zip(mine["number"], mine["time"], mine["air_time"].astype(float), strict=True):
            while stage < len(cuts) and number >= cuts[stage]:
                stage += 1
                if state is not None:
                    m, P = state
                    _, T, N = STAGES[stage]
                    state = T @ m, T @ P @ T.T + N
            version = STAGES[stage][0]
            book = BOOKS[version - 1]
            if state is None:
                state = book.m0, book.P0
            else:
                state = book.predict(*state, (at - before) / 86_400e6)
            m, P, likelihood = book.update(*state, y)
            state, before = (m, P), at
            found[str(origin), str(dest), int(at)] = version, m, P, likelihood
    return found


@contextmanager
def kept_running(pipeline: Pipeline) -> Iterator[None]:
    """Keep a driver on the stream as Airflow does: one that ends is followed by the next, unless there is a hold."""
    log, done = DriverLog.at(pipeline.settings.warehouse, MODEL), threading.Event()
    words = ("stream", "--model", MODEL, "--trigger", "1")
    drivers: list[Driver] = []

    def run() -> None:
        while not done.is_set():
            if (not drivers or drivers[-1].process.poll() is not None) and log.hold() is None:
                drivers.append(Driver(pipeline, *words))
            done.wait(0.5)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if drivers[-1].process.poll() is None:
            drivers[-1].terminate()
    assert len(drivers) >= 4, "each upgrade ends a driver, and so does the roll-back"


@contextmanager
def fed(pipeline: Pipeline, days: list[Path], rows: Callable[[list[Path]], int]) -> Iterator[list[Path]]:
    """Let a day land every few seconds, by a command of its own that watches a folder; yield those that were sent."""
    folder, done = pipeline.folder / "inbox", threading.Event()
    folder.mkdir()
    sent: list[Path] = []

    def run() -> None:
        for day in days:
            day.rename(folder / day.name)
            sent.append(folder / day.name)
            if done.wait(FEED_SECONDS):
                return

    ingest = Driver(pipeline, "ingest", "--model", MODEL, "--input", str(folder), "--trigger", "1")
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield sent
        done.set()
        thread.join()
        ingest.wait_for(lambda: pipeline.warehouse.read(measurements(MODEL)).count() == rows(sent))
    finally:
        done.set()
        thread.join()
        ingest.terminate()


def test_air_time_is_upgraded_twice_and_rolled_back_under_a_running_stream(tmp_path: Path) -> None:
    flights = load_flights()
    flights = with_times(flights[(flights["month"].isin([9, 10, 11, 12])) & (flights["origin"] != "EWR")])
    history = flights[(flights["day"] >= date(2013, 9, 24)) & (flights["day"] < STREAMED[0])]
    by_day = dict(list(flights.groupby("day")))
    days = [write_csv(by_day[day], COLUMNS, tmp_path / "days" / f"{day}.csv") for day in STREAMED]
    pipeline = Pipeline(tmp_path, FIRST)
    pipeline.land_files(write_csv(history, COLUMNS, tmp_path / "history.csv"))
    pipeline.pretrain()
    warehouse, settings = pipeline.warehouse, pipeline.settings

    def wait_for_batches(generation: str, count: int) -> None:
        folder, deadline = (
            Path(settings.warehouse, "checkpoints", generation, "commits"),
            time.monotonic() + 200,
        )
        while len(files(folder)) < count:
            assert time.monotonic() < deadline, f"{generation} does not come on"
            time.sleep(0.5)

    def rows_of(sent: list[Path]) -> int:
        return len(history) + sum(len(by_day[date.fromisoformat(day.stem)]) for day in sent)

    with fed(pipeline, days, rows_of) as sent, kept_running(pipeline):
        wait_for_batches("air_time-g0001", 3)
        pipeline.write_spec(V2)
        done = upgrade.run(settings, MODEL, force=True).data
        assert (done["generation"], done["promoted"]) == ("air_time-g0002", True)
        assert done["comparison"]["rows"] > 0
        more = len(files(Path(settings.warehouse, "checkpoints", "air_time-g0002", "commits")))
        wait_for_batches("air_time-g0002", more + 2)  # by the driver that came after
        pipeline.write_spec(V3)
        done = upgrade.run(settings, MODEL, mode="stop-start", drain=True).data
        assert done["generation"] == "air_time-g0003"
        wait_for_batches("air_time-g0003", 3)
        done = rollback.run(settings, MODEL, last_state=True).data
        assert (done["generation"], done["model_version"]) == ("air_time-g0004", 2)
        wait_for_batches("air_time-g0004", 3)  # while version 3 is deployed
        assert len(sent) < len(days), "it was fed all the while"
    pipeline.stream()

    assert DriverLog.at(settings.warehouse, MODEL).hold() is None
    known = {one.generation: one for one in generations.read_generations(warehouse, MODEL)}
    assert [one.status for one in known.values()] == [*["retired"] * 3, "live"]
    assert [link.generation for link in read_live_lineage(warehouse, MODEL)] == list(known)[::-1]
    landed = [history, *(by_day[date.fromisoformat(day.stem)] for day in sent)]
    rows = pd.concat(landed, ignore_index=True)
    rows["time"] = pd.to_datetime(rows["at"]).astype("datetime64[us, UTC]").astype("int64")
    # A key's rows are taken in the order of their times, file by file.
    rows["file"] = np.repeat(np.arange(len(landed)), [len(one) for one in landed])
    rows = rows.sort_values(["file", "time"], kind="stable", ignore_index=True)
    cuts = [
        warehouse.read(measurements(MODEL), known[f"air_time-g000{number}"].start_version).count()
        for number in (2, 3, 4)
    ]
    assert set(cuts) <= set(itertools.accumulate(len(one) for one in landed))
    assert len(history) < cuts[0] < cuts[1] < cuts[2] < len(rows)

    live = live_estimates(warehouse, MODEL).toPandas()
    assert len(live) == len(rows) - len(history), "no row is lost, none is there twice"
    found = live.assign(
        route=[tuple(json.loads(key)) for key in live["key"]],
        time=live["event_time"].dt.tz_localize("UTC").astype("datetime64[us, UTC]").astype("int64"),
    )
    found = found[
        ~found.duplicated(["key", "time"], keep=False)
    ]  # of two rows of one time it is open which came last
    assert len(found) > 0.9 * len(live)
    wanted = oracle(rows, cuts)
    row: Any
    for row in found.itertuples():
        version, m, P, likelihood = wanted[row.route[0], row.route[1], row.time]
        assert row.model_version == version
        np.testing.assert_allclose(row.mean, m, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(row.covariance, P.ravel(), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(row.log_likelihood, likelihood, rtol=1e-9, atol=1e-9)
    assert sorted(set(found["model_version"])) == [1, 2, 3]
    assert set(found.loc[found["generation"] == "air_time-g0004", "model_version"]) == {2}
