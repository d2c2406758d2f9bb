"""Run pipelines on a warehouse in a store, in a separate process: Spark needs the store's jars from its start.

    python -m tests.support.in_store FOLDER PART ...

PART is one of PARTS, on S3: the store and a proxy before it run in this process. The code of the former release is in
FOLDER/former. Each step prints its result as a line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from jobs import (
    estimate,
    export,
    forecast,
    maintain,
    monitor,
    quarantine,
    report,
    status,
    upgrade,
    verify,
)
from jobs.core.errors import ALREADY_RUNNING, RUN_FAILED, UserError
from jobs.lineage import generations
from jobs.lineage.live import live_estimates, live_latest
from jobs.supervision.driver_log import DriverLog
from tests.conftest import ROOT as HERE
from tests.jobs.lineage.test_frozen_drivers import FREEZES
from tests.jobs.lineage.test_inputs import GAUGES, KEYS, put, readings, table_of
from tests.jobs.support import processes
from tests.jobs.support.former_driver import AT_ONCE, BEHIND, let_both_drive
from tests.jobs.support.pipeline import (
    Pipeline,
    assert_bit_equal,
    ordered,
    random_rows,
    random_walk_spec,
    since,
)
from tests.jobs.support.processes import Driver
from tests.support.object_store import BUCKET, Asked, ObjectStore, Proxy, environment

S3 = f"s3a://{BUCKET}"
EACH = 4
DAYS = 8
SECONDS = 900.0
"""Seconds that a driver may take to reach an awaited moment: each of its requests uses a network."""
STREAM = ("stream", "--model", "walk")


def main(folder: Path, parts: list[str]) -> None:
    """Run the parts."""
    processes.PATIENCE = SECONDS
    with ObjectStore(folder / "objects") as objects, Proxy(objects.address).running() as proxy:
        os.environ.update(environment(proxy.address))
        store = Store(S3, proxy)
        for part in parts:
            PARTS[part](folder / part, store)


def tell(step: str, **found: Any) -> None:
    """Print the result of a step."""
    print("FOUND", json.dumps({"step": step, **found}), flush=True)


@dataclass
class Store:
    """A store by the URI of a folder in it, and the proxy that can lose answers."""

    root: str
    proxy: Proxy | None

    def pipeline(self, folder: Path, name: str) -> Pipeline:
        """Return a pipeline whose warehouse is in the store."""
        pipeline = Pipeline(folder / name, random_walk_spec())
        pipeline.settings = replace(pipeline.settings, warehouse=f"{self.root}/{name}")
        return pipeline

    def lose_first_answers(self) -> None:
        """Lose the first answer to each creation from now on, if there is a proxy."""
        if self.proxy is not None:
            self.proxy.lose = first_answers()

    def behave(self) -> None:
        """Lose nothing from now on."""
        if self.proxy is not None:
            self.proxy.behave()

    def lost(self) -> dict[str, int]:
        """Return the number of lost answers."""
        return {} if self.proxy is None else counted(self.proxy.lost)


def commits(folder: Path, store: Store) -> None:
    """Let Spark and delta-rs write one table, and lose answers to commits."""
    assert store.proxy is not None
    store.pipeline(folder, "commits").warehouse  # noqa: B018 - starts Spark
    writers()
    lost_commits(store.proxy)


def streams(folder: Path, store: Store) -> None:
    """Land, pretrain and stream in a store and in a folder; the second stream loses every first answer."""
    days = random_rows(5)
    here, there = Pipeline(folder / "folder", random_walk_spec()), store.pipeline(folder, "streams")
    there.land(*days[:2])
    there.pretrain()
    there.land(days[2])
    there.stream()
    store.lose_first_answers()
    there.land(*days[3:])
    done = there.stream()
    store.behave()
    here.land(*days[:2])
    here.pretrain()
    here.land(*days[2:])
    here.stream()
    assert_bit_equal(there.estimates(), here.estimates())
    assert_bit_equal(there.estimates(), since(there.batch(), days[2]))
    tell("streams", rows=len(here.estimates()), began=done.data["began"], lost=store.lost())


def first_answers() -> Callable[[Asked], bool]:
    """Return a rule that loses the first answer to each creation."""
    lost: set[str] = set()

    def lose(asked: Asked) -> bool:
        if asked[0] != "PUT" or not asked[2] or asked[1] in lost:
            return False
        lost.add(asked[1])
        return True

    return lose


def counted(paths: list[str]) -> dict[str, int]:
    """Count paths by kind: commits of Delta's log by table, files of Spark's checkpoints, others."""
    found: dict[str, int] = {}
    for path in paths:
        parts = path.split("?")[0].strip("/").split("/")[2:]
        if "_delta_log" in parts:
            kind = "commits of " + "/".join(parts[: parts.index("_delta_log")])
        else:
            kind = "checkpoints" if parts[:1] == ["checkpoints"] else "others"
        found[kind] = found.get(kind, 0) + 1
    return found


def writers() -> None:
    """Append to one table by Spark and by delta-rs at the same time."""
    spark = SparkSession.getActiveSession()
    assert spark is not None
    table = f"{S3}/writers/both"
    spark.range(1).write.format("delta").save(table)
    failed: list[str] = []

    def by_spark(number: int) -> None:
        for i in range(EACH):
            value = 100 * number + i
            spark.range(value, value + 1).coalesce(1).write.format("delta").mode("append").save(table)

    def by_rust(number: int) -> None:
        for i in range(EACH):
            rows = pa.table({"id": pa.array([100 * number + i], pa.int64())})
            write_deltalake(table.replace("s3a:", "s3:"), rows, mode="append")

    def run(write: Callable[[int], None], number: int) -> None:
        try:
            write(number)
        except Exception as error:
            failed.append(str(error)[:300])

    threads = [threading.Thread(target=run, args=(by_spark, n)) for n in (1, 2)]
    threads += [threading.Thread(target=run, args=(by_rust, n)) for n in (3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = sorted(row["id"] for row in spark.read.format("delta").load(table).collect())
    tell("writers", failed=failed, rows=found, version=DeltaTable(table.replace("s3a:", "s3:")).version())


def lost_commits(proxy: Proxy) -> None:
    """Append while every first answer to a commit is lost."""
    spark = SparkSession.getActiveSession()
    assert spark is not None
    table = f"{S3}/lost/table"
    spark.range(1).write.format("delta").save(table)
    proxy.lost.clear()
    proxy.lose = first_answers()
    for i in range(1, 5):
        spark.range(i, i + 1).coalesce(1).write.format("delta").mode("append").save(table)
    proxy.behave()
    found = sorted(row["id"] for row in spark.read.format("delta").load(table).collect())
    version = DeltaTable(table.replace("s3a:", "s3:")).version()
    names = [path.split("?")[0].rpartition("/")[2] for path in proxy.lost]
    tell("lost", rows=found, lost=sorted(names), version=version)


def verbs(folder: Path, store: Store) -> None:
    """Run the verbs in S3 and in a folder: there the store answers 503 and is slow from the first stream on."""
    proxy = store.proxy
    assert proxy is not None
    days = random_rows(4, rows=80)
    damaged = days[2].astype({"a": "string"})
    damaged.loc[:4, "a"] = "many"
    told, tables = [], []
    for pipeline in (store.pipeline(folder, "verbs"), Pipeline(folder / "folder", random_walk_spec())):
        remote = pipeline.settings.warehouse.startswith(S3)
        settings = pipeline.settings
        pipeline.land(days[0])
        pipeline.pretrain()
        pipeline.land(days[1])
        if remote:
            proxy.refuse, proxy.delay = every(15), lambda asked: 0.1 if asked[2] else 0.0
        pipeline.stream()
        pipeline.land(damaged, suffix=".csv")
        rejected = quarantine.list_(settings, "walk").data
        pipeline.write_spec(random_walk_spec(version=2))
        upgraded = upgrade.run(settings, "walk", mode="stop-start").data
        pipeline.land(days[3])
        streamed = pipeline.stream().data["rows"]
        exported = export.run(settings, "walk").data
        maintained = maintain.run(settings, "walk").data
        checked = verify.run(settings, "walk", share="100%").data
        (shown,) = status.run(settings, "walk").data["models"]
        proxy.behave()
        tables.append(ordered(live_estimates(pipeline.warehouse, "walk").toPandas()))
        tables.append(since(pipeline.batch(), days[1]))
        told.append(
            {
                "quarantined": rejected["rows"],
                "generation": upgraded["generation"],
                "rows": streamed,
                "keys": exported["keys"],
                "maintained": maintained["generations"],
                "verified": [checked["outcome"], checked["compared"], checked["differences"]],
                "status": sorted(shown),
            }
        )
        tell("told", remote=remote, **told[-1])
    for other in tables[1:]:
        assert_bit_equal(tables[0], other)
    tell(
        "verbs",
        rows=len(tables[0]),
        same=told[0] == told[1],
        refused=len(proxy.refused),
        delayed=len(proxy.delayed),
    )


QUERIED: dict[str, Any] = {
    "name": "gauge",
    "outputs": {"measured": True},
    "monitor": {
        "watermark": "1min",
        "windows": [{"size": "1h"}],
        "rules": [
            {"name": "high", "kind": "level", "at_least": 0.5, "readings": 1, "clear_readings": 1},
            {"name": "silent", "kind": "silence", "after": "3h"},
        ],
    },
    "sinks": {"latest": True},
}
"""Extra settings of the gauges model in the tests of inputs."""


def queries(folder: Path, store: Store) -> None:
    """Run the readers and followers of estimates, in S3 and in a folder, for a model with key inputs from a table. In
    S3 the first answer to each creation is lost.
    """
    told, tables = [], []
    for place in (store, None):
        pipeline = Pipeline(folder / ("store" if place else "folder"), {**GAUGES, **QUERIED})
        if place is not None:
            pipeline.settings = replace(pipeline.settings, warehouse=f"{place.root}/queries")
            place.lose_first_answers()
        root, settings = pipeline.settings.warehouse, pipeline.settings
        published = f"{root}/published"
        sinks = {"latest": True, "files": {"folder": published, "format": "parquet"}}
        pipeline.write_spec({**GAUGES, **QUERIED, "sinks": sinks})
        days = [readings(day, KEYS) for day in range(3)]
        pipeline.land(days[0])
        put(pipeline, table_of(KEYS[:-1], 1))
        pipeline.pretrain()
        pipeline.land(days[1])
        pipeline.stream()
        put(pipeline, table_of(KEYS, 2))
        pipeline.land(days[2])
        pipeline.stream()
        watched = monitor.run(settings, "gauge").data
        checked = verify.run(settings, "gauge", share="100%").data
        estimate.run(settings, "gauge")
        predicted = forecast.run(settings, "gauge", steps=2, every="1h").data
        exported = export.run(settings, "gauge").data
        health = health_of(pipeline)
        kept = maintain.run(settings, "gauge").data
        (shown,) = status.run(settings, "gauge").data["models"]
        store.behave()
        spark = pipeline.warehouse.spark
        tables.append(
            {
                "estimates": ordered(live_estimates(pipeline.warehouse, "gauge").toPandas()),
                "published": ordered(spark.read.parquet(published).toPandas()),
                "latest": ordered(live_latest(pipeline.warehouse, "gauge").toPandas()),
            }
        )
        told.append(
            {
                "windows": watched["window_rows"],
                "alerts": alerts_of(pipeline),
                "verified": [checked["outcome"], checked["compared"], checked["differences"]],
                "forecasts": predicted["forecasts"],
                "exported": exported["keys"],
                "status": sorted(shown),
                "kept": sorted(kept),
            }
        )
        tell("asked", remote=place is not None, health=health, **told[-1])
    for name, table in tables[0].items():
        assert_bit_equal(table, tables[1][name])
    tell("queries", same=told[0] == told[1], rows=len(tables[0]["estimates"]), lost=store.lost())


def health_of(pipeline: Pipeline) -> str:
    """Return the content of the model's health report, which reads tables without Spark, in a folder only."""
    try:
        return report.run(pipeline.settings, "gauge").lines[0]
    except UserError as error:
        return error.message


def alerts_of(pipeline: Pipeline) -> list[list[str]]:
    """Return the alerts of the model, in order."""
    frame = pipeline.warehouse.read("alerts/gauge").toPandas()
    columns = ["event_time", "key", "rule", "status"]
    return sorted([str(value) for value in row] for row in frame[columns].to_numpy())


def every(number: int) -> Callable[[Asked], bool]:
    """Return a rule that is true for every `number`-th request."""
    seen = [0]

    def rule(asked: Asked) -> bool:
        seen[0] += 1
        return seen[0] % number == 0

    return rule


def drivers(folder: Path, store: Store) -> None:
    """Run drivers of one stream as processes: frozen right before a commit, killed, two at once; compare in the end."""
    days = random_rows(DAYS)
    pipeline = store.pipeline(folder, "drivers")
    pipeline.land(days[0])
    pipeline.pretrain()
    pipeline.land(*days[1:4])
    frozen_drivers(pipeline)
    store.lose_first_answers()
    for number, day in enumerate(days[4:6]):
        pipeline.land(day)
        killed_driver(pipeline, batch=3 + number, whole_group=number == 0)
    tell("killed", lost=store.lost())
    store.behave()
    pipeline.land(*days[6:])
    two_drivers(pipeline, last=DAYS - 2)
    assert_bit_equal(pipeline.estimates(), since(pipeline.batch(), days[1]))
    (live,) = generations.read_generations(pipeline.warehouse, "walk")
    log = DriverLog.at(pipeline.warehouse.root, "walk")
    ends = [one.how for one in log.history("walk-g0001")]
    tell("drivers", rows=len(pipeline.estimates()), epoch=live.epoch, ends=ends)


def both_releases(start: str, folder: Path, store: Store) -> None:
    """Let drivers of the former release and of this one want one stream."""
    pipeline = store.pipeline(folder, start.replace(" ", "-"))
    let_both_drive(pipeline, folder.parent / "former", start)
    tell(start, rows=live_estimates(pipeline.warehouse, "walk").count())


def started(pipeline: Pipeline, *more: str, **given: str) -> Driver:
    """Start a driver of the stream."""
    return Driver(pipeline, *STREAM, *more, **given)


def batches(pipeline: Pipeline, folder: str) -> list[int]:
    """Return the micro-batches that have a file in a folder of the stream's checkpoint, read by Spark's file system."""
    files = pipeline.warehouse.files("checkpoints/walk-g0001")
    return [int(name) for name in files.names(folder) if name.isdigit()]


def frozen_drivers(pipeline: Pipeline) -> None:
    """Freeze a driver right before its commit of micro-batch 1, let another take over, and resume the first."""
    (pipeline.folder / "sitecustomize.py").write_text(FREEZES)
    path = os.pathsep.join([str(pipeline.folder), str(HERE)])
    frozen = pipeline.folder / "frozen"
    given = {"PYTHONPATH": path, "KALMAN_LEASE_SECONDS": "6", "FREEZE": str(frozen)}
    old = started(pipeline, KALMAN_HOST="one", **given)
    old.wait_for(frozen.exists)
    while (new := started(pipeline, KALMAN_HOST="two", **given)).finish() == ALREADY_RUNNING:
        pass  # until the lease has expired
    assert new.process.returncode == 0, new.said()
    os.killpg(old.process.pid, signal.SIGCONT)
    assert old.finish() == RUN_FAILED, old.said()
    tell("frozen", woken=old.process.returncode)


def killed_driver(pipeline: Pipeline, batch: int, whole_group: bool) -> None:
    """Kill a driver while it processes a micro-batch."""
    driver = started(pipeline)
    driver.wait_for(lambda: batch in batches(pipeline, "offsets"))
    driver.kill(whole_group=whole_group)


def two_drivers(pipeline: Pipeline, last: int) -> None:
    """Start two drivers at once without a shared lock: one ends, the other one processes all rows."""
    both = [started(pipeline, "--trigger", "1") for _ in range(2)]
    deadline = time.monotonic() + SECONDS
    while all(one.process.poll() is None for one in both) and time.monotonic() < deadline:
        time.sleep(0.1)
    ended = [one for one in both if one.process.poll() is not None]
    assert [one.process.returncode for one in ended] == [ALREADY_RUNNING], [one.said() for one in both]
    running = next(one for one in both if one not in ended)
    running.wait_for(lambda: last in batches(pipeline, "commits"))
    assert running.interrupt() == 0, running.said()
    tell("two", refused=len(ended))


PARTS: dict[str, Callable[[Path, Store], None]] = {
    **{part.__name__: part for part in (streams, commits, verbs, queries, drivers)},
    **{start: partial(both_releases, start) for start in (AT_ONCE, BEHIND)},
}

if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2:])
    finally:
        Driver.end_all()
