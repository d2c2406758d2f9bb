"""Run pipelines on a warehouse in S3, in a process of its own: Spark has the store's jars from its start.

    python -m tests.support.in_s3 FOLDER PART ...

PART is `streams`, `verbs` or `drivers`. The store and a proxy before it run in this process; what was found is printed
as a line of JSON for each step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from jobs import export, maintain, quarantine, status, upgrade, verify
from jobs.core.errors import ALREADY_RUNNING, RUN_FAILED
from jobs.lineage import generations
from jobs.lineage.live import live_estimates
from jobs.supervision.driver_log import DriverLog
from tests.conftest import ROOT as HERE
from tests.jobs.lineage.test_frozen_drivers import FREEZES
from tests.jobs.support.pipeline import (
    Pipeline,
    assert_bit_equal,
    ordered,
    random_rows,
    random_walk_spec,
    since,
)
from tests.jobs.support.processes import PATIENCE, Driver, files
from tests.support.object_store import BUCKET, Asked, ObjectStore, Proxy, environment

ROOT = f"s3a://{BUCKET}"
EACH = 4
DAYS = 8
STREAM = ("stream", "--model", "walk")


def main(folder: Path, parts: list[str]) -> None:
    """Run the parts."""
    with ObjectStore(folder / "objects") as store, Proxy(store.address).running() as proxy:
        os.environ.update(environment(proxy.address))
        for part in parts:
            {"streams": streams, "verbs": verbs, "drivers": drivers}[part](folder / part, proxy)


def tell(step: str, **found: Any) -> None:
    """Print what a step has found."""
    print("FOUND", json.dumps({"step": step, **found}), flush=True)


def in_store(folder: Path, name: str) -> Pipeline:
    """Return a pipeline whose warehouse is in the store."""
    pipeline = Pipeline(folder / name, random_walk_spec())
    pipeline.settings = replace(pipeline.settings, warehouse=f"{ROOT}/{name}")
    return pipeline


def streams(folder: Path, proxy: Proxy) -> None:
    """Land, pretrain and stream in S3 and in a folder; of the second stream's creations each first answer is lost."""
    days = random_rows(5)
    here, there = Pipeline(folder / "folder", random_walk_spec()), in_store(folder, "streams")
    there.land(*days[:2])
    there.pretrain()
    there.land(days[2])
    there.stream()
    proxy.lose = first_answers()
    there.land(*days[3:])
    done = there.stream()
    proxy.behave()
    here.land(*days[:2])
    here.pretrain()
    here.land(*days[2:])
    here.stream()
    assert_bit_equal(there.estimates(), here.estimates())
    assert_bit_equal(there.estimates(), since(there.batch(), days[2]))
    tell("streams", rows=len(here.estimates()), began=done.data["began"], lost=counted(proxy.lost))
    writers()
    lost_commits(proxy)


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
    """Count paths by what they are: commits of Delta's log by table, files of Spark's checkpoints, others."""
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
    table = f"{ROOT}/writers/both"
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
    table = f"{ROOT}/lost/table"
    spark.range(1).write.format("delta").save(table)
    proxy.lost.clear()
    proxy.lose = first_answers()
    for i in range(1, 5):
        spark.range(i, i + 1).coalesce(1).write.format("delta").mode("append").save(table)
    proxy.behave()
    found = sorted(row["id"] for row in spark.read.format("delta").load(table).collect())
    version = DeltaTable(table.replace("s3a:", "s3:")).version()
    tell("lost", rows=found, lost=len(proxy.lost), version=version)


def verbs(folder: Path, proxy: Proxy) -> None:
    """Run the verbs in S3 and in a folder: there the store answers 503 and is slow from the first stream on."""
    days = random_rows(4, rows=80)
    damaged = days[2].astype({"a": "string"})
    damaged.loc[:4, "a"] = "many"
    told, tables = [], []
    for pipeline in (in_store(folder, "verbs"), Pipeline(folder / "folder", random_walk_spec())):
        remote = pipeline.settings.warehouse.startswith(ROOT)
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


def every(number: int) -> Callable[[Asked], bool]:
    """Return a rule that holds for each request whose turn it is."""
    seen = [0]

    def rule(asked: Asked) -> bool:
        seen[0] += 1
        return seen[0] % number == 0

    return rule


def drivers(folder: Path, proxy: Proxy) -> None:
    """Run drivers of one stream as processes: frozen right before a commit, killed, two at once; compare in the end."""
    days = random_rows(DAYS)
    pipeline = in_store(folder, "drivers")
    pipeline.land(days[0])
    pipeline.pretrain()
    pipeline.land(*days[1:4])
    frozen_drivers(pipeline)
    proxy.lose = first_answers()
    for number, day in enumerate(days[4:6]):
        pipeline.land(day)
        killed_driver(pipeline, batch=3 + number, whole_group=number == 0)
    tell("killed", lost=counted(proxy.lost))
    proxy.behave()
    pipeline.land(*days[6:])
    two_drivers(pipeline, last=DAYS - 2)
    assert_bit_equal(pipeline.estimates(), since(pipeline.batch(), days[1]))
    (live,) = generations.all_of(pipeline.warehouse, "walk")
    log = DriverLog.at(pipeline.settings.warehouse, "walk")
    ends = [one.how for one in log.history("walk-g0001")]
    tell("drivers", rows=len(pipeline.estimates()), epoch=live.epoch, ends=ends)


def started(pipeline: Pipeline, *more: str, **given: str) -> Driver:
    """Start a driver of the stream."""
    return Driver(pipeline, *STREAM, *more, KALMAN_WAREHOUSE=pipeline.settings.warehouse, **given)


def checkpoint(pipeline: Pipeline) -> Path:
    """Return the folder of the store in which the stream's checkpoint is."""
    name = pipeline.settings.warehouse.removeprefix(f"{ROOT}/")
    return pipeline.folder.parent.parent / "objects" / BUCKET / name / "checkpoints" / "walk-g0001"


def frozen_drivers(pipeline: Pipeline) -> None:
    """Freeze a driver right before its commit of micro-batch 1, let another take over, and wake the first one up."""
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
    driver.wait_for(lambda: str(batch) in files(checkpoint(pipeline) / "offsets"))
    driver.kill(whole_group=whole_group)


def two_drivers(pipeline: Pipeline, last: int) -> None:
    """Start two drivers at once, which share no lock: one ends, the other one processes what there is."""
    both = [started(pipeline, "--trigger", "1") for _ in range(2)]
    deadline = time.monotonic() + PATIENCE
    while all(one.process.poll() is None for one in both) and time.monotonic() < deadline:
        time.sleep(0.1)
    ended = [one for one in both if one.process.poll() is not None]
    assert [one.process.returncode for one in ended] == [ALREADY_RUNNING], [one.said() for one in both]
    running = next(one for one in both if one not in ended)
    running.wait_for(lambda: str(last) in files(checkpoint(pipeline) / "commits"))
    assert running.interrupt() == 0, running.said()
    tell("two", refused=len(ended))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2:])
    finally:
        Driver.end_all()
