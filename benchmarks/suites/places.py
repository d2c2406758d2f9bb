"""Measure what a micro-batch pays to know its place in the source: `python -m benchmarks.suites.places`.

A stream notes the commit of the measurements that a micro-batch reaches, gives its estimates the range that it has
read, and, if it reads a topic, asks the brokers for the topic's id. Each call is timed in a stream of small
micro-batches, in which it weighs most, beside the whole micro-batch of the same run.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.workloads.verbs import Verbs
from demo.broker import Broker
from jobs import ingest, stream
from jobs.core.settings import Settings
from jobs.lineage.generation_checkpoint import ReachedCommits
from jobs.lineage.source_ranges import RangeWriter
from jobs.spark.kafka import SERVERS, TopicWatch
from jobs.streaming.micro_batch import MicroBatchWriter

BATCHES, ROWS, WARM_UP = 25, 500, 5
WHOLE = "micro-batch"
TIMED: dict[str, tuple[type, str]] = {
    WHOLE: (MicroBatchWriter, "__call__"),
    "note of the commit": (ReachedCommits, "take"),
    "range": (RangeWriter, "of"),
    "id of the topic": (TopicWatch, "check"),
}
SPEC = """
name: NAME
version: 1
key: [id]
time: at
measurement: [a]
states: [level]
process: {kind: random_walk, variance: 1.0}
observation: {H: [[1.0]], R: [[1.0]]}
initial: {mean: [0.0], covariance: [[10.0]]}
"""
OF_TABLE = SPEC.replace("NAME", "table") + "stream: {partitions: 2, max_files_per_batch: 1}\n"
OF_TOPIC = (
    SPEC.replace("NAME", "topic")
    + f"stream: {{partitions: 2}}\nsource: {{kind: kafka, topic: places, max_offsets_per_batch: {ROWS}}}\n"
)


def timed(seconds: dict[str, list[float]]) -> None:
    """Let each call of `TIMED` append its duration."""
    for name, (kind, method) in TIMED.items():
        inner = getattr(kind, method)

        @functools.wraps(inner)
        def wrapped(*given: Any, inner: Any = inner, name: str = name) -> Any:
            began = time.perf_counter()
            try:
                return inner(*given)
            finally:
                seconds[name].append(time.perf_counter() - began)

        setattr(kind, method, wrapped)


def rows_of(batch: int) -> list[dict[str, Any]]:
    """Return the rows of a micro-batch."""
    return [
        {"id": key, "at": f"2024-01-{1 + batch // 24:02d}T{batch % 24:02d}:00:00Z", "a": float(key % 7)}
        for key in range(ROWS)
    ]


def of_table(folder: Path) -> None:
    """Stream files that land one by one, a commit each: several at once would make one commit and one micro-batch."""
    verbs = Verbs(folder, "table", OF_TABLE)
    files = folder / "files"
    files.mkdir()
    for batch in range(BATCHES + 1):
        lines = [f"{row['id']},{row['at']},{row['a']}\n" for row in rows_of(batch)]
        (files / f"{batch:03d}.csv").write_text("id,at,a\n" + "".join(lines))
    verbs.finish("ingest", "--input", str(files / "000.csv"))
    verbs.finish("pretrain")
    settings = settings_of(verbs)
    for batch in range(1, BATCHES + 1):
        ingest.run(settings, "table", [str(files / f"{batch:03d}.csv")])
    stream.run(settings, ["table"])


def of_topic(folder: Path) -> None:
    """Stream the messages of a topic."""
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient, NewTopic  # pyright: ignore[reportPrivateImportUsage] - where its documentation has it

    with Broker(folder / "kafka") as broker:
        os.environ[SERVERS] = broker.address
        verbs = Verbs(folder, "topic", OF_TOPIC, **{SERVERS: broker.address})
        admin = AdminClient({"bootstrap.servers": broker.address})
        for made in admin.create_topics([NewTopic("places", 1, 1)]).values():
            made.result()
        producer = Producer({"bootstrap.servers": broker.address})
        for batch in range(BATCHES + 1):
            for row in rows_of(batch):
                producer.produce("places", json.dumps(row).encode(), partition=0)
            if batch == 0:
                producer.flush()
                verbs.finish("ingest")
                verbs.finish("pretrain")
        producer.flush()
        stream.run(settings_of(verbs), ["topic"])


def settings_of(verbs: Verbs) -> Settings:
    """Return the settings of a model's verbs, for one in this process."""
    return Settings.load(warehouse=str(verbs.warehouse), models=verbs.folder / "models", quiet=True)


def main() -> int:
    seconds: dict[str, list[float]] = defaultdict(list)
    timed(seconds)
    for what in (of_topic, of_table):  # a session that began without Kafka's client cannot load it
        seconds.clear()
        with tempfile.TemporaryDirectory() as folder:
            what(Path(folder))
        found = {name: each[WARM_UP:] for name, each in seconds.items()}
        whole = statistics.median(found[WHOLE])
        print(f"{what.__name__}: {len(found[WHOLE])} micro-batches, {1e3 * whole:.0f} ms in the median")
        for name, each in found.items():
            if name != WHOLE and each:
                median = statistics.median(each)
                print(f"  {name}: {1e3 * median:.2f} ms, {median / whole:.2%} of a micro-batch")
    return 0


if __name__ == "__main__":
    sys.exit(main())
