"""Run a pipeline on a warehouse in S3, in a process of its own: Spark has the store's jars from its start.

    python -m tests.support.in_s3 FOLDER

The store and a proxy before it run in this process; what was found is printed as a line of JSON for each step.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from tests.support.object_store import BUCKET, Asked, ObjectStore, Proxy, environment

ROOT = f"s3a://{BUCKET}/warehouse"
EACH = 4


def main(folder: Path) -> None:
    """Run all steps."""
    with ObjectStore(folder / "objects") as store, Proxy(store.address).running() as proxy:
        os.environ.update(environment(proxy.address))
        streams(folder, proxy)
        writers()
        lost_commits(proxy)


def tell(step: str, **found: Any) -> None:
    """Print what a step has found."""
    print("FOUND", json.dumps({"step": step, **found}), flush=True)


def streams(folder: Path, proxy: Proxy) -> None:
    """Land, pretrain and stream in S3 and in a folder; of the second stream's creations each first answer is lost."""
    from tests.jobs.support.pipeline import (
        Pipeline,
        assert_bit_equal,
        random_rows,
        random_walk_spec,
        since,
    )

    days = random_rows(5)
    here = Pipeline(folder / "folder", random_walk_spec())
    there = Pipeline(folder / "s3", random_walk_spec())
    there.settings = replace(there.settings, warehouse=ROOT)
    there.land(*days[:2])
    tell("landed", note=there.warehouse.exists(f"measurements/{there.name}"))
    there.pretrain()
    there.land(days[2])
    there.stream()
    tell("streamed", rows=len(there.estimates()))
    lost: set[str] = set()
    proxy.lose = first_answers(lost)
    there.land(*days[3:])
    done = there.stream()
    proxy.lose = lambda asked: False
    tell(
        "resumed",
        began=done.data["began"],
        lost_commits=sum("_delta_log" in path for path in lost),
        lost_checkpoints=sum("/checkpoints/" in path for path in lost),
    )
    here.land(*days[:2])
    here.pretrain()
    here.land(*days[2:])
    here.stream()
    assert_bit_equal(there.estimates(), here.estimates())
    assert_bit_equal(there.estimates(), since(there.batch(), days[2]))
    tell("compared", rows=len(here.estimates()))


def first_answers(lost: set[str]) -> Callable[[Asked], bool]:
    """Return a rule that loses the first answer to each creation, and notes which."""

    def lose(asked: Asked) -> bool:
        if asked[0] != "PUT" or not asked[2] or asked[1] in lost:
            return False
        lost.add(asked[1])
        return True

    return lose


def writers() -> None:
    """Append to one table by Spark and by delta-rs at the same time."""
    from pyspark.sql import SparkSession

    spark = SparkSession.getActiveSession()
    assert spark is not None
    table = f"{ROOT}/both"
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
    tell(
        "writers",
        failed=failed,
        rows=found,
        version=DeltaTable(table.replace("s3a:", "s3:")).version(),
    )


def lost_commits(proxy: Proxy) -> None:
    """Append while every first answer to a commit is lost; and once where no answer comes at all."""
    from pyspark.sql import SparkSession

    spark = SparkSession.getActiveSession()
    assert spark is not None
    table = f"{ROOT}/lost"
    spark.range(1).write.format("delta").save(table)
    lost: set[str] = set()
    proxy.lose = first_answers(lost)
    for i in range(1, 5):
        spark.range(i, i + 1).coalesce(1).write.format("delta").mode("append").save(table)
    proxy.lose = lambda asked: False
    found = sorted(row["id"] for row in spark.read.format("delta").load(table).collect())
    tell("lost", rows=found, lost=len(lost), version=DeltaTable(table.replace("s3a:", "s3:")).version())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
