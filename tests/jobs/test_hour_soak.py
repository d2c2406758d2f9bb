"""A stream at a steady rate for an hour, with a fixed set of keys: its memory, state, lag and micro-batches stay flat.

KALMAN_SOAK_SECONDS (3600) says how long, KALMAN_SOAK_RATE (1000) how many rows a second, KALMAN_SOAK_KEYS (5000) of how
many keys, KALMAN_SOAK_RECORD names a file for what was measured, from which `python scripts/pictures.py soak` draws.

What is flat is judged by the second half. A process is still warming up in its first half hour, so the memory of a
shorter run is recorded and not judged. Two things would rise for hours before they stay as they are. Java's heap grows
to its limit whatever is alive in it: it has its whole size from the beginning, and what is alive is judged by what its
collections leave. RocksDB's cache of blocks fills up: it has 1 MB a store here instead of 8.
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest

from benchmarks.results import commit, machine
from jobs.supervision.progress import progress_of
from tests.jobs.support.pipeline import Pipeline, random_walk_spec
from tests.jobs.support.processes import Driver

SECONDS = float(os.environ.get("KALMAN_SOAK_SECONDS") or 3600)
RATE = int(os.environ.get("KALMAN_SOAK_RATE") or 1000)
KEYS = int(os.environ.get("KALMAN_SOAK_KEYS") or 5000)
TRIGGER = 2.0
STEP = 5.0
"""Seconds between two files that land, and between two looks at the processes."""
WARM = 1800.0
"""A run of so many seconds has its memory judged."""
GROWTH = 0.05
"""By what part of its average the memory may grow over the second half, as a straight line through it says."""
WINDOWS = 12
"""Parts of a run, in each of which the heap comes down once at least to about what is alive in it."""
BEGIN = pd.Timestamp("2024-03-01", tz="UTC")
COLLECTED = re.compile(r"\[([\d.]+)s\].*?(\d+)M->(\d+)M\(")

Floats = np.ndarray[Any, np.dtype[np.float64]]


class Feeder:
    """Lands the next rows: each key in its turn, a minute of event time from one turn to the next."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline, self.sent = pipeline, 0
        self.rng = np.random.default_rng(8)

    def land(self, rows: int) -> None:
        number = self.sent + np.arange(rows)
        at = BEGIN + pd.to_timedelta(number // KEYS, "min")
        values = self.rng.normal(size=(2, rows))
        frame = pd.DataFrame({"id": number % KEYS, "at": at.as_unit("us"), "a": values[0], "b": values[1]})
        self.pipeline.land(frame)
        self.sent += rows


def resident(driver: Driver) -> dict[str, int]:
    """Return the bytes that the Python driver, Spark's process and the Python workers hold."""
    held = {"driver": 0, "spark": 0, "workers": 0}
    root = psutil.Process(driver.process.pid)
    for one in (root, *root.children(recursive=True)):
        try:
            name = "driver" if one == root else "spark" if one.name() == "java" else "workers"
            held[name] += one.memory_info().rss
        except psutil.NoSuchProcess:  # a worker that has just ended
            continue
    return held


def growth(at: Floats, value: Floats) -> float:
    """Return by what part of its average a line through the second half rises over it."""
    late = at >= at[0] + (at[-1] - at[0]) / 2
    x, y = at[late], value[late]
    slope = np.polyfit(x - x.mean(), y, 1)[0]
    return float(slope * (x[-1] - x[0]) / max(y.mean(), 1e-9))


def heap_of(log: Path) -> tuple[Floats, Floats]:
    """Return when Java collected garbage, in seconds since it began, and the bytes that were left each time."""
    found = COLLECTED.findall(log.read_text())
    return np.array([float(at) for at, _, _ in found]), np.array([int(left) << 20 for _, _, left in found])


def lows(at: Floats, value: Floats) -> tuple[Floats, Floats]:
    """Return the least value of each window, and its middle."""
    edges = np.linspace(at[0], at[-1] + 1e-6, WINDOWS + 1)
    parts = [(at >= first) & (at < last) for first, last in zip(edges, edges[1:], strict=False)]
    kept = [part for part in parts if part.any()]
    return np.array([at[part].mean() for part in kept]), np.array([value[part].min() for part in kept])


@pytest.mark.soak
@pytest.mark.spark
def test_a_steady_stream_stays_as_it_is(tmp_path: Path) -> None:
    plain = random_walk_spec()
    del plain["stream"]["max_files_per_batch"]
    pipeline = Pipeline(tmp_path, {**plain, "stream": {**plain["stream"], "keys_per_block": 256}})
    feeder = Feeder(pipeline)
    feeder.land(KEYS)  # every key is there from the beginning
    pipeline.pretrain()
    feeder.land(KEYS)
    checkpoint = Path(pipeline.settings.warehouse, "checkpoints", "walk-g0001", "commits")
    driver = Driver(
        pipeline,
        *("stream", "--model", "walk", "--trigger", f"{TRIGGER:g}"),
        SPARK_SUBMIT_OPTS=(
            "-Dspark.ui.enabled=false -Dspark.sql.streaming.stateStore.rocksdb.blockCacheSizeMB=1 "
            "-Xms1g -XX:+AlwaysPreTouch"
        ),  # as users run it, compiled
        # Behind the pipeline's own options, which silence Java's log.
        _JAVA_OPTIONS=f"-Xlog:gc:file={tmp_path}/collections-%p.log:uptime",
        SPARK_DRIVER_MEMORY="1g",
    )
    driver.wait_for(checkpoint.is_dir)
    began = time.time()
    looks: list[dict[str, float]] = []
    step = 0
    while time.time() - began < SECONDS:
        feeder.land(round(RATE * STEP))
        assert driver.process.poll() is None, driver.said()
        looks.append({"at": time.time() - began, **resident(driver)})
        step += 1
        time.sleep(max(0.0, began + step * STEP - time.time()))
    kept_up = time.time() - began < (step + 2) * STEP
    driver.wait_for(lambda: pipeline.warehouse.read("estimates/walk").count() == feeder.sent - KEYS)
    assert driver.terminate() == 0, driver.said()

    progress = progress_of(pipeline.warehouse, "walk").orderBy("batch_id").toPandas()
    rows = progress.loc[progress["rows"] > 0]
    at = (rows["started_at"] - pd.Timestamp(began, unit="s")).dt.total_seconds().to_numpy()
    columns = ("seconds", "state_rows", "state_bytes", "lag_seconds", "lag_rows")
    batches = {"at": at, **{name: rows[name].to_numpy(np.float64) for name in columns}}
    running = (at > 0) & (at < SECONDS)
    batches = {name: values[running] for name, values in batches.items()}
    memory = {name: np.array([one[name] for one in looks]) for name in looks[0]}
    logs = sorted(tmp_path.glob("collections-*.log"), key=lambda file: file.stat().st_size)
    heap: dict[str, Any] = dict(
        zip(("at", "left"), heap_of(logs[-1]), strict=True)
    )  # Spark's launcher has one too
    record(batches, memory, heap, feeder.sent)

    assert kept_up, "the rows could not be landed at this rate: give a lower KALMAN_SOAK_RATE"
    assert rows["estimated"].sum() == feeder.sent - KEYS and rows["late"].sum() == 0
    # A fixed set of keys is a fixed number of blocks, and of bytes but for what the store has not compacted.
    second = batches["at"] >= SECONDS / 2
    assert len(set(batches["state_rows"][second])) == 1
    assert growth(batches["at"], batches["state_bytes"]) < 0.25
    for name in ("seconds", "lag_seconds"):
        halves = [np.median(batches[name][part]) for part in (~second, second)]
        assert halves[1] < 1.5 * halves[0] + 0.5, f"{name} rose from {halves[0]:.2f} to {halves[1]:.2f}"
    if SECONDS >= WARM:
        grown = {name: growth(memory["at"], memory[name]) for name in ("driver", "spark", "workers")}
        assert all(value < GROWTH for value in grown.values()), grown
        assert growth(*lows(heap["at"], heap["left"])) < 2 * GROWTH


def record(batches: dict[str, Any], memory: dict[str, Any], heap: dict[str, Any], sent: int) -> None:
    """Write down what was measured, where it is asked for."""
    path = os.environ.get("KALMAN_SOAK_RECORD")
    if not path:
        return
    digits = {"at": 1, "seconds": 3, "lag_seconds": 3}

    def plain(columns: dict[str, Any]) -> dict[str, list[float]]:
        return {
            name: [round(float(v), digits.get(name, 0)) for v in values] for name, values in columns.items()
        }

    document = {
        "commit": commit(),
        "machine": machine(),
        "seconds": SECONDS,
        "rate": RATE,
        "keys": KEYS,
        "rows": sent,
        "trigger": TRIGGER,
        "memory": plain(memory),
        "heap": plain(heap),
        "batches": plain(batches),
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(document) + "\n")
