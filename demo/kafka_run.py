"""The Kafka demo, `python -m demo.kafka_run`: feed -> topic -> stream -> estimates -> topic, with a broker that dies.

A real broker runs on this machine. History is fed to a topic, landed and pretrained; then the stream reads the topic
while further messages are sent, its two partitions out of step, with poison among the messages; meanwhile the broker is
killed and restarted. At the end every message must be accounted for, and every estimate equal to one batch pass.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demo.broker import Broker
from demo.display import Display
from jobs.core.errors import RUN_FAILED, Terminated, UserError, show
from jobs.core.settings import DEFAULT_MASTER, Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from demo.kafka_feed import Chunk

ROOT = Path(__file__).resolve().parents[1]
MODEL, TOPIC, OUTPUT = "readings", "readings", "estimates"
SPEC = f"""\
name: {MODEL}
version: 1
key: [device]
time: at
time_unit: minute
measurement: [value]
states: [level]
process: {{kind: random_walk, variance: 0.25}}
observation: {{R: [[1.0]]}}
initial: {{mean: [20.0], covariance: [[100.0]]}}
source: {{kind: kafka, topic: {TOPIC}, max_offsets_per_batch: 4000}}
sinks: {{latest: true, kafka: {{topic: {OUTPUT}}}}}
stream: {{partitions: 2}}
"""
HISTORY, STREAMED, MINUTES = 2, 6, 20
"""Chunks of history, chunks to stream, minutes in a chunk."""
PATIENCE = 600.0


@dataclass
class KafkaDemo:
    """The demo's state across its phases."""

    folder: Path
    settings: Settings
    broker: Broker
    spark: SparkSession
    display: Display = field(default_factory=lambda: Display(5))
    driver: subprocess.Popen[bytes] | None = None
    chunks: list[Chunk] = field(default_factory=list)
    since: datetime = datetime.max
    landed_before: int = 0
    streamed: int = 0
    poison: int = 0

    def history(self) -> None:
        """Feed history, land it, pretrain."""
        from demo.kafka_feed import START, chunks, make_topic, send
        from jobs import ingest, pretrain

        with self.display.phase("Feed history to the topic, land it, pretrain") as phase:
            make_topic(self.spark, TOPIC)
            make_topic(self.spark, OUTPUT)
            self.chunks = chunks(HISTORY, STREAMED, MINUTES, seed=7)
            sent = sum(send(self.spark, TOPIC, chunk) for chunk in self.chunks[:HISTORY])
            landed = ingest.run(self.settings, MODEL).data
            pretrain.run(self.settings, MODEL)
            self.landed_before = sent
            self.since = START + timedelta(minutes=HISTORY * MINUTES)
            phase.result(f"{landed['rows']:,} readings landed, {landed['quarantined']} quarantined")

    def stream(self) -> None:
        """Feed the remaining chunks while the stream runs, and kill the broker meanwhile."""
        from demo.kafka_feed import send

        with self.display.phase("Stream while the topic is fed; kill the broker; start it again") as phase:
            rest = self.chunks[HISTORY:]
            self.poison = sum(chunk.poison for chunk in rest)
            self._start()
            for number, chunk in enumerate(rest):
                phase.note(lambda: f"{self.streamed:,} sent, {self._taken():,} taken")
                self.streamed += send(self.spark, TOPIC, chunk)
                if number == len(rest) // 2:
                    self._await(lambda: self._taken() > 0)
                    taken = self._taken()
                    self.broker.kill()
                    time.sleep(3.0)
                    self.broker.start()
            phase.result(f"{self.streamed:,} messages; the broker killed when {taken:,} were taken")

    def finish(self) -> None:
        """Wait until the stream has processed everything, and stop it."""
        with self.display.phase("Let the stream catch up, stop it") as phase:
            phase.note(lambda: f"{self._taken():,} of {self.streamed:,} taken")
            self._await(lambda: self._taken() == self.streamed)
            assert self.driver is not None
            self.driver.terminate()
            if self.driver.wait(timeout=PATIENCE):
                raise UserError(f"the stream did not end well: see {self._log}", RUN_FAILED)
            phase.result(f"{len(list((self._checkpoint / 'commits').glob('[0-9]*')))} micro-batches")

    def check(self) -> dict[str, Any]:
        """Account for every message, in and out."""
        from demo.check import check
        from demo.kafka_feed import read
        from jobs import ingest
        from jobs.lineage.live import live_latest
        from jobs.spark.warehouse import Warehouse
        from jobs.specs.loading import load_spec

        with self.display.phase("Check every estimate against one batch pass") as phase:
            ingest.run(self.settings, MODEL)
            warehouse = Warehouse(self.spark, self.settings.warehouse)
            spec, elsewhere = load_spec(MODEL, self.settings.models), str(self.folder / "no files")
            checked = check(warehouse, spec, self.streamed, self.since, elsewhere, phase.note)
            sent = read(self.spark, OUTPUT)
            values = sent["value"].map(json.loads)
            pairs = {(one["key"], one["event_time"]) for one in values}
            phase.result(f"largest difference {checked.worst:.3g}")
        counts = checked.counts
        problems = []
        if counts.quarantined != self.poison or not counts.add_up:
            problems.append(f"{counts} does not account for {self.streamed:,} messages, {self.poison} poison")
        if len(pairs) != counts.estimated or {key for key, _ in pairs} != set(sent["key"]):
            problems.append(f"topic {OUTPUT} has {len(pairs):,} estimates instead of {counts.estimated:,}")
        if checked.worst > 0:
            problems.append(f"estimates differ from one batch pass by up to {checked.worst:.3g}")
        latest = live_latest(warehouse, MODEL).count()
        if latest != checked.states.compared:
            problems.append(f"latest/{MODEL} has {latest} keys instead of {checked.states.compared}")
        return {
            "messages_sent": self.streamed,
            "rows_estimated": counts.estimated,
            "rows_quarantined": counts.quarantined,
            "messages_out": len(sent),
            "messages_out_twice": len(sent) - len(pairs),
            "keys": latest,
            "broker_kills": 1,
            "max_abs_difference": checked.worst,
            "problems": problems,
        }

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self.driver = subprocess.Popen(
                [sys.executable, "-m", "jobs.cli", "stream", "--model", MODEL, "--trigger", "1", "--quiet"],
                cwd=ROOT,
                env={
                    **os.environ,
                    "KALMAN_WAREHOUSE": self.settings.warehouse,
                    "KALMAN_MODELS": str(self.settings.models),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _await(self, what: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE
        while not what():
            assert self.driver is not None
            if self.driver.poll() is not None or time.monotonic() > until:
                raise UserError(f"the stream does not take what is sent: see {self._log}", RUN_FAILED)
            time.sleep(0.2)

    def _taken(self) -> int:
        """Return the number of messages after the snapshot in committed micro-batches."""
        done = [int(path.name) for path in (self._checkpoint / "commits").glob("[0-9]*")]
        if not done:
            return 0
        lines = (self._checkpoint / "offsets" / str(max(done))).read_text().splitlines()
        return sum(json.loads(lines[2])[TOPIC].values()) - self.landed_before

    @property
    def _checkpoint(self) -> Path:
        return Path(self.settings.warehouse, "checkpoints", f"{MODEL}-g0001")

    @property
    def _log(self) -> Path:
        return self.folder / "stream.log"


def run(folder: Path) -> dict[str, Any]:
    """Run the demo in `folder`, which is emptied first, and return its result.

    Raises:
        UserError: a step failed.
    """
    from jobs.spark.session import spark_session

    folder = folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "models").mkdir(parents=True)
    (folder / "models" / f"{MODEL}.yaml").write_text(SPEC)
    settings = Settings.load(str(folder / "warehouse"), folder / "models", DEFAULT_MASTER, quiet=True)
    display = Display(5)
    demo: KafkaDemo | None = None
    with Broker(folder / "broker") as broker:
        os.environ["KALMAN_KAFKA"] = broker.address
        try:
            with display.phase("Start a Kafka broker and Spark") as phase:
                spark = spark_session(settings, "demo", kafka=True)
                phase.result(broker.address)
            demo = KafkaDemo(folder, settings, broker, spark, display)
            demo.history()
            demo.stream()
            demo.finish()
            result = {**demo.check(), "seconds": round(display.total, 1)}
        finally:
            if demo is not None and demo.driver is not None and demo.driver.poll() is None:
                os.killpg(demo.driver.pid, signal.SIGKILL)
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def table(result: dict[str, Any]) -> list[str]:
    """Return the result as the lines of a small table."""
    shown = {
        "messages sent to the stream": f"{result['messages_sent']:,}",
        "estimated": f"{result['rows_estimated']:,}",
        "quarantined (poison)": f"{result['rows_quarantined']:,}",
        f"messages in topic {OUTPUT}": f"{result['messages_out']:,} ({result['messages_out_twice']:,} twice)",
        f"keys in latest/{MODEL}": f"{result['keys']:,}",
        "broker kills": f"{result['broker_kills']}",
        "largest difference to one batch pass": f"{result['max_abs_difference']:g}",
    }
    width = max(map(len, shown))
    return [f"{name:<{width}}  {value}" for name, value in shown.items()]


def _terminate(number: int, frame: Any) -> None:
    raise Terminated


def main() -> int:
    """Run the demo from the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        "python -m demo.kafka_run", description="Feed a topic, stream it, kill the broker."
    )
    folder = ROOT / "var" / "demo-kafka"
    parser.add_argument("--folder", type=Path, default=folder, help="emptied first (default: var/demo-kafka)")
    signal.signal(signal.SIGTERM, _terminate)
    try:
        result = run(parser.parse_args().folder)
    except (Exception, KeyboardInterrupt, Terminated) as error:
        return show(error)
    print("\n" + "\n".join(table(result)))
    for problem in result["problems"]:
        print(f"error: {problem}", file=sys.stderr)
    return RUN_FAILED if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
