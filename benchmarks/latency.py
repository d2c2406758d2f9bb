"""Measure end to end: from a message's creation, just before it is sent to Kafka, to its estimate being visible.

`python -m benchmarks.latency` starts a broker, lands and pretrains one row a key, starts the stream as users do, and
sends messages at a steady rate. An estimate is visible once the Delta commit with it is there. Nothing else should run
meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.results import RESULTS, machine
from demo.broker import Broker
from demo.delta_log import commits_of, files_of
from jobs.fencing import batch_of

MODEL = "latency"
KEYS = 10_000
WARM_UP_SECONDS = 20
PATIENCE = 300.0
SPEC = """
name: latency
version: 1
key: [id]
time: at
measurement: [a]
states: [level, slope]
process: {kind: local_linear_trend, level_variance: 0.1, slope_variance: 0.01}
observation: {H: [[1.0, 0.0]], R: [[1.0]]}
initial: {mean: [0.0, 0.0], covariance: [[10.0, 0.0], [0.0, 1.0]]}
source: {kind: kafka, topic: latency, whole_keys: [id]}
stream: {partitions: 2}
"""


def message(key: int, at: float) -> bytes:
    """Return a measurement of now."""
    return json.dumps({"id": key, "at": datetime.fromtimestamp(at, UTC).isoformat(), "a": 1.0}).encode()


def send(address: str, rate: int, seconds: float) -> int:
    """Send so many messages a second, in steps of a hundredth of one, and return how many."""
    from confluent_kafka import Producer

    producer = Producer(
        {"bootstrap.servers": address, "linger.ms": 5, "queue.buffering.max.messages": 1_000_000}
    )
    sent, began = 0, time.time()
    while (now := time.time()) < began + seconds:
        for number in range(sent, int((now - began) * rate)):
            key = number % KEYS
            producer.produce(MODEL, message(key, time.time()), partition=key % 2)
        sent = max(sent, int((now - began) * rate))
        producer.poll(0)
        time.sleep(0.01)
    producer.flush()
    return sent


def make_topic(address: str) -> None:
    """Make the topic, and send it one row a key as history."""
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient, NewTopic  # pyright: ignore[reportPrivateImportUsage] - where its documentation has it

    admin = AdminClient(
        {"bootstrap.servers": address}
    )  # a client that nothing refers to gives up what it was asked
    for made in admin.create_topics([NewTopic(MODEL, 2, 1)]).values():
        made.result()
    producer = Producer({"bootstrap.servers": address})
    for key in range(KEYS):
        producer.produce(MODEL, message(key, time.time()), partition=key % 2)
    producer.flush()


def committed(warehouse: Path) -> dict[int, float]:
    """Return when each micro-batch's estimates became visible, in seconds since 1970."""
    return {
        batch_of(action["txn"]["version"]): at
        for at, actions in commits_of(warehouse / "estimates" / MODEL)
        for action in actions
        if "txn" in action
    }


def run(rate: int, trigger: str, seconds: float) -> dict[str, Any]:
    """Measure one rate with one trigger.

    Args:
        rate: messages a second.
        trigger: seconds from micro-batch to micro-batch; "0": as soon as the one before has ended.
        seconds: how long to send, beside the warm-up.

    Returns:
        The result, with latencies in seconds.
    """
    folder = Path(tempfile.mkdtemp(prefix="kalman-latency-"))
    try:
        with Broker(folder / "kafka") as broker:
            (folder / "models").mkdir()
            (folder / "models" / f"{MODEL}.yaml").write_text(SPEC)
            environment = {
                **os.environ,
                "KALMAN_KAFKA": broker.address,
                "KALMAN_MODELS": str(folder / "models"),
                "KALMAN_WAREHOUSE": str(folder / "warehouse"),
            }

            def verb(*words: str) -> subprocess.Popen[bytes]:
                with (folder / f"{words[0]}.log").open("wb") as log:
                    return subprocess.Popen(
                        [sys.executable, "-m", "jobs.cli", *words, "--model", MODEL],
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )

            make_topic(broker.address)
            for words in (("ingest",), ("pretrain",)):
                if verb(*words).wait():
                    raise RuntimeError((folder / f"{words[0]}.log").read_text())
            stream = verb("stream", "--trigger", trigger)
            try:
                sent = send(broker.address, rate, WARM_UP_SECONDS + seconds)
                estimates = _all_visible(folder / "warehouse", sent, stream)
            finally:
                stream.terminate()
                stream.wait()
        return _result(rate, trigger, estimates, committed(folder / "warehouse"), folder / "warehouse")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _all_visible(warehouse: Path, sent: int, stream: subprocess.Popen[bytes]) -> pd.DataFrame:
    """Wait until every message's estimate is there, and return event times and micro-batches."""
    from pyarrow.dataset import dataset

    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and stream.poll() is None:
        files = files_of(warehouse / "estimates" / MODEL)
        if files:
            table = dataset([str(file) for file in files]).to_table(columns=["event_time", "batch_id"])
            if len(table) >= sent:
                return table.to_pandas()
        time.sleep(2)
    raise RuntimeError("the stream did not take in what was sent")


def _result(
    rate: int, trigger: str, estimates: pd.DataFrame, visible: dict[int, float], warehouse: Path
) -> dict[str, Any]:
    created = estimates["event_time"].to_numpy("datetime64[us]").astype(np.int64) / 1e6
    kept = created >= created.min() + WARM_UP_SECONDS
    seen = np.array([visible[batch] for batch in estimates["batch_id"].tolist()])
    latency = (seen - created)[kept]
    batches = np.unique(estimates["batch_id"].to_numpy()[kept])
    return {
        "rate": rate,
        "trigger": float(trigger),
        "rows": int(kept.sum()),
        "micro_batches": len(batches),
        "latency_s": {
            name: float(np.percentile(latency, share))
            for name, share in (("p50", 50), ("p99", 99), ("max", 100))
        },
        "phases_s": _phases(warehouse, {int(one) for one in batches}),
    }


def _phases(warehouse: Path, batches: set[int]) -> dict[str, float]:
    """Return the median seconds that a micro-batch spends in each of Spark's phases."""
    records = [
        json.loads(line)
        for path in (warehouse / "_progress" / MODEL).rglob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    phases = pd.DataFrame([one["durations"] for one in records if one.get("batch_id") in batches])
    return {str(name): float(phases[name].median()) / 1000 for name in phases.columns}


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| rows/s | trigger | p50 | p99 | max | micro-batches | longest phases of one, median |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in results:
        latency = one["latency_s"]
        phases = {name: value for name, value in one["phases_s"].items() if name != "triggerExecution"}
        longest = sorted(phases.items(), key=lambda item: -item[1])[:3]
        told = ", ".join(f"{name} {value:.2f} s" for name, value in longest)
        lines.append(
            f"| {one['rate']:,} | {one['trigger']:g} s | {latency['p50']:.2f} s | {latency['p99']:.2f} s "
            f"| {latency['max']:.2f} s | {one['micro_batches']} | {told} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser("python -m benchmarks.latency", description=__doc__)
    parser.add_argument("--rates", type=int, nargs="+", default=[1_000, 20_000], help="messages a second")
    parser.add_argument("--triggers", nargs="+", default=["0", "2"], help="seconds")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each, beside the warm-up")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    results = [run(rate, trigger, given.seconds) for trigger in given.triggers for rate in given.rates]
    given.output.mkdir(parents=True, exist_ok=True)
    about = machine()
    told = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "machine": about, "results": results}
    (given.output / "latency.json").write_text(json.dumps(told, indent=2) + "\n")
    (given.output / "latency.md").write_text(f"# Latency\n\n{table(results)}\n")
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
