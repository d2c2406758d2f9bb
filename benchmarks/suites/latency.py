"""Measure end to end: from a message's creation, just before it is sent to Kafka, to its estimate being visible.

`python -m benchmarks.suites.latency` starts a broker, lands and pretrains one row a key, starts the stream as users
do, and sends messages at a steady rate. Messages that pile up while the stream starts do not count: measuring begins
when the stream has caught up with its feed (`benchmarks.workloads.steady`). Of several rates the greatest that the
stream kept up with is reported. An estimate is visible after its Delta commit. With `--topic` the stream also publishes
its estimates to a topic, and the time until the broker has each of them (its own clock, when it appends the message) is
measured beside that of the commit. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pandas as pd

from benchmarks.results import RESULTS, machine
from benchmarks.workloads.steady import CALM, Commit, caught_up, commits, keeps_up, lags
from benchmarks.workloads.verbs import Verbs, sleep_beside
from demo.broker import Broker
from demo.delta_log import files_of

MODEL = "latency"
KEYS = 10_000
PATIENCE = 300.0
POLL_SECONDS = 0.25
LATE_SECONDS = 1.0
"""A feed with a longer delay misses its rate, and the measurement is invalid."""
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
TOPIC = "latency_estimates"
PUBLISHED = f"sinks: {{kafka: {{topic: {TOPIC}}}}}\n"


def message(key: int, at: float) -> bytes:
    """Return a measurement with the current time."""
    return json.dumps({"id": key, "at": datetime.fromtimestamp(at, UTC).isoformat(), "a": 1.0}).encode()


class Feed(AbstractContextManager["Feed"]):
    """Messages sent at a steady rate, in steps of a hundredth of a second, by a thread, until the context is left.

    `began`: due time of the first message (seconds since 1970); `sent`: number of messages; `late`: delay of the last
    messages in seconds.
    """

    def __init__(self, address: str, rate: int) -> None:
        self.address, self.rate = address, rate
        self.began, self.sent, self.late = 0.0, 0, 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Self:
        self.began = time.time()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def _work(self) -> None:
        from confluent_kafka import Producer

        producer = Producer(
            {"bootstrap.servers": self.address, "linger.ms": 5, "queue.buffering.max.messages": 1_000_000}
        )
        while not self._end.wait(0.01):
            due = int((time.time() - self.began) * self.rate)
            for number in range(self.sent, due):
                key = number % KEYS
                producer.produce(MODEL, message(key, time.time()), partition=key % 2)
            self.sent = max(self.sent, due)
            self.late = time.time() - self.began - due / self.rate
            producer.poll(0)
        producer.flush()


def make_topics(address: str) -> None:
    """Make the topics of measurements and of estimates, and send one row a key as history to the first."""
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient, NewTopic  # pyright: ignore[reportPrivateImportUsage] - where its documentation has it

    admin = AdminClient({"bootstrap.servers": address})  # a client without references drops its requests
    by_broker = {"message.timestamp.type": "LogAppendTime"}
    topics = [NewTopic(MODEL, 2, 1), NewTopic(TOPIC, 2, 1, config=by_broker)]
    for made in admin.create_topics(topics).values():
        made.result()
    producer = Producer({"bootstrap.servers": address})
    for key in range(KEYS):
        producer.produce(MODEL, message(key, time.time()), partition=key % 2)
    producer.flush()


def run(
    rate: int, trigger: str, seconds: float, bound: float, warm_up: float, topic: bool = False
) -> dict[str, Any]:
    """Measure one rate with one trigger.

    Args:
        rate: messages a second.
        trigger: seconds from micro-batch to micro-batch; "0": without a pause.
        seconds: duration of the measurement, after the stream has caught up.
        bound: largest lag in seconds of a stream that has caught up.
        warm_up: seconds to catch up.
        topic: whether to publish the estimates to a topic, too, and measure their latency there.

    Returns:
        The result, with latencies in seconds; none if the stream did not catch up.
    """
    folder = Path(tempfile.mkdtemp(prefix="kalman-latency-"))
    try:
        with Broker(folder / "kafka") as broker:
            spec = SPEC + PUBLISHED if topic else SPEC
            verbs = Verbs(folder, MODEL, spec, KALMAN_KAFKA=broker.address)
            warehouse = verbs.warehouse
            make_topics(broker.address)
            verbs.finish("ingest")
            verbs.finish("pretrain")
            with verbs.stream(trigger) as stream:
                with Feed(broker.address, rate) as feed:
                    start = _await_calm(warehouse, feed, stream, bound, warm_up)
                    if start is not None:
                        sleep_beside(stream, seconds)
                    end = time.time()
                if feed.late > LATE_SECONDS:
                    raise RuntimeError(f"this machine cannot send {rate:,} messages a second")
                estimates = None
                if start is not None:
                    estimates = _all_visible(warehouse, feed.sent, stream)
            result = _result(rate, trigger, feed, (start, end), bound, estimates, warehouse)
            if topic and start is not None:
                result["topic_latency_s"] = _topic_latencies(broker.address, start, end)
            return result
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _await_calm(
    warehouse: Path, feed: Feed, stream: subprocess.Popen[bytes], bound: float, warm_up: float
) -> float | None:
    """Wait until the stream has caught up, and return the time; None if it does not catch up in time."""
    while time.time() < feed.began + warm_up:
        if caught_up(lags(commits(_estimates(warehouse)), feed.began, feed.rate), bound):
            return time.time()
        sleep_beside(stream, POLL_SECONDS)
    return None


def _estimates(warehouse: Path) -> Path:
    return warehouse / "estimates" / MODEL


def _all_visible(warehouse: Path, sent: int, stream: subprocess.Popen[bytes]) -> pd.DataFrame:
    """Wait until every message's estimate is visible, and return event times and micro-batches."""
    from pyarrow.dataset import dataset

    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if sum(one.rows for one in commits(_estimates(warehouse))) >= sent:
            files = [str(file) for file in files_of(_estimates(warehouse))]
            return dataset(files).to_table(columns=["event_time", "batch_id"]).to_pandas()
        sleep_beside(stream, POLL_SECONDS)
    raise RuntimeError(f"the stream did not take in the {sent:,} messages that were sent")


def _result(
    rate: int,
    trigger: str,
    feed: Feed,
    between: tuple[float | None, float],
    bound: float,
    estimates: pd.DataFrame | None,
    warehouse: Path,
) -> dict[str, Any]:
    visible = commits(_estimates(warehouse))
    behind = lags(visible, feed.began, rate)
    start, end = between
    result: dict[str, Any] = {"rate": rate, "trigger": float(trigger), "sustained": False}
    if start is None or estimates is None:
        return {**result, "warm_up_s": end - feed.began, "last_lags_s": behind[-CALM:]}
    within = [lag for lag, one in zip(behind, visible, strict=True) if start <= one.at <= end]
    created = estimates["event_time"].to_numpy("datetime64[us]").astype(np.int64) / 1e6
    kept = (created >= start) & (created <= end)
    return {
        **result,
        "sustained": keeps_up(within, bound),
        "warm_up_s": start - feed.began,
        "last_lags_s": within[-CALM:],
        **_latencies(created[kept], estimates["batch_id"].to_numpy()[kept], visible),
        "phases_s": _phases(warehouse, set(estimates["batch_id"][kept].tolist())),
    }


def _topic_latencies(address: str, start: float, end: float) -> dict[str, float]:
    """Return the times from creation to the broker's append, for rows created from `start` to `end`."""
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    consumer = Consumer({"bootstrap.servers": address, "group.id": TOPIC, "enable.auto.commit": False})
    consumer.assign([TopicPartition(TOPIC, number, OFFSET_BEGINNING) for number in range(2)])
    latency: list[float] = []
    try:
        while found := consumer.consume(10_000, 5.0):
            for one in found:
                if one.error() is not None:
                    raise RuntimeError(str(one.error()))
                text = json.loads(one.value() or b"{}")["event_time"]
                created = datetime.fromisoformat(text).timestamp()
                if start <= created <= end:
                    latency.append(one.timestamp()[1] / 1000 - created)
    finally:
        consumer.close()
    return _percentiles(np.array(latency))


def _percentiles(latency: np.ndarray) -> dict[str, float]:
    return {
        name: float(np.percentile(latency, share)) for name, share in (("p50", 50), ("p99", 99), ("max", 100))
    }


def _latencies(created: np.ndarray, batch: np.ndarray, visible: Sequence[Commit]) -> dict[str, Any]:
    """Return the time from creation to visibility of rows (N,) made at `created`, each of a micro-batch."""
    at = {one.batch: one.at for one in visible}
    latency = np.array([at[number] for number in batch.tolist()]) - created
    return {
        "rows": len(created),
        "micro_batches": len(np.unique(batch)),
        "latency_s": _percentiles(latency),
    }


def most_sustained(results: Sequence[dict[str, Any]]) -> dict[str, int | None]:
    """Return, by trigger, the greatest rate that the stream kept up with; None without such a rate."""
    found: dict[str, int | None] = {}
    for one in results:
        name = f"{one['trigger']:g}"
        best = found.setdefault(name, None)
        if one["sustained"]:
            found[name] = max(one["rate"], best or 0)
    return found


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
    """Return the results as a Markdown table, and the greatest rates."""
    lines = [
        "| rows/s | trigger | kept up | warm-up | p50 | p99 | max | micro-batches | longest phases of one, median |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        begun = f"| {one['rate']:,} | {one['trigger']:g} s | {'yes' if one['sustained'] else '**no**'} "
        begun += f"| {one['warm_up_s']:.0f} s "
        if "latency_s" not in one:
            lags_said = ", ".join(f"{lag:.1f}" for lag in one["last_lags_s"])
            lines.append(
                f"{begun}| | | | | never caught up: {lags_said or 'nothing came'} s behind at last |"
            )
            continue
        latency = one["latency_s"]
        phases = {name: value for name, value in one["phases_s"].items() if name != "triggerExecution"}
        longest = sorted(phases.items(), key=lambda item: -item[1])[:3]
        told = ", ".join(f"{name} {value:.2f} s" for name, value in longest)
        lines.append(
            f"{begun}| {latency['p50']:.2f} s | {latency['p99']:.2f} s | {latency['max']:.2f} s "
            f"| {one['micro_batches']} | {told} |"
        )
        if "topic_latency_s" in one:
            there = one["topic_latency_s"]
            lines.append(
                f"| {one['rate']:,}, in the topic | {one['trigger']:g} s | | | {there['p50']:.2f} s "
                f"| {there['p99']:.2f} s | {there['max']:.2f} s | | |"
            )
    for trigger, rate in most_sustained(results).items():
        said = "none of these rates" if rate is None else f"{rate:,} messages a second"
        lines += ["", f"With `--trigger {trigger}` the stream kept up with {said}, of those that were tried."]
    return "\n".join(lines)


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser("python -m benchmarks.suites.latency", description=__doc__)
    parser.add_argument("--rates", type=int, nargs="+", default=[1_000, 20_000], help="messages a second")
    parser.add_argument("--triggers", nargs="+", default=["0", "2"], help="seconds")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each, once the stream has caught up")
    parser.add_argument("--bound", type=float, default=10.0, help="seconds of lag of a stream that keeps up")
    parser.add_argument("--warm-up", type=float, default=180.0, help="seconds that it has to catch up")
    parser.add_argument("--topic", action="store_true", help="publish to a topic too, and measure that")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # broker and stream end with it
    results = []
    for trigger in given.triggers:
        for rate in given.rates:
            results.append(run(rate, trigger, given.seconds, given.bound, given.warm_up, given.topic))
            print(table(results[-1:]), flush=True)
    given.output.mkdir(parents=True, exist_ok=True)
    told = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "bound_s": given.bound,
        "most_sustained": most_sustained(results),
        "results": results,
    }
    name = "latency_topic" if given.topic else "latency"
    (given.output / f"{name}.json").write_text(json.dumps(told, indent=2) + "\n")
    (given.output / f"{name}.md").write_text(f"# Latency\n\n{table(results)}\n")
    print(f"\n{table(results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
