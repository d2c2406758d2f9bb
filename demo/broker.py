"""Run a real Kafka broker on this machine: one node in KRaft mode, with Java alone.

Its jars are fetched on first use (`python -m jobs.spark.jars broker` fetches them beforehand). It listens on the
loopback address only, keeps everything in one folder, and can be killed and restarted there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from demo.ports import HOST, free_ports, listens
from demo.service import Service, end
from jobs.core.errors import RUN_FAILED, UserError
from jobs.spark.doctor import find_java
from jobs.spark.jars import fetch_optional_jars

START_SECONDS = 90.0
_CLUSTER = "a2FsbWFuLXBpcGVsaW5lMQ"  # any 16 bytes, in Kafka's encoding


class Broker(Service):
    """A broker whose data is in `folder`; `address` is its advertised address."""

    def __init__(self, folder: Path, partitions: int = 2) -> None:
        self.folder = folder
        self.port, self.controller = free_ports(2)
        self.address = f"{HOST}:{self.port}"
        self.log = folder / "broker.log"
        self._settings = folder / "server.properties"
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._settings.write_text(
            "\n".join(f"{name}={value}" for name, value in self._properties(partitions).items()) + "\n"
        )
        self._run("kafka.tools.StorageTool", "format", "-t", _CLUSTER, "-c", str(self._settings))

    def start(self) -> None:
        """Start the broker, and return once it accepts connections.

        Raises:
            UserError: the broker ended, or did not come up in time.
        """
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*_java(), "-Xmx256m", "kafka.Kafka", str(self._settings)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while not listens(self.port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise UserError(f"the Kafka broker did not start; {self.log} says why", RUN_FAILED)
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill the broker (SIGKILL), to simulate a crash."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Stop the broker gracefully."""
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            end(process, 30, how)

    def _properties(self, partitions: int) -> dict[str, str | int | Path]:
        return {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@{HOST}:{self.controller}",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"PLAINTEXT://{HOST}:{self.port},CONTROLLER://{HOST}:{self.controller}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": self.folder / "data",
            "num.partitions": partitions,
            "offsets.topic.replication.factor": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "broker.session.timeout.ms": 3000,  # so that a killed broker is detected sooner
            "broker.heartbeat.interval.ms": 500,
            "group.initial.rebalance.delay.ms": 0,
            "log.retention.check.interval.ms": 500,
            "log.initial.task.delay.ms": 500,
            "log.segment.delete.delay.ms": 100,
            "log.cleaner.backoff.ms": 500,
        }

    def _run(self, program: str, *arguments: str) -> None:
        with self.log.open("ab") as log:
            done = subprocess.run([*_java(), program, *arguments], stdout=log, stderr=subprocess.STDOUT)
        if done.returncode:
            raise UserError(f"the Kafka broker could not be set up; {self.log} says why", RUN_FAILED)


def _java() -> list[str]:
    quiet = Path(__file__).with_name("broker-log4j2.properties")
    return [
        find_java(),
        "-XX:TieredStopAtLevel=1",
        "-XX:+UseSerialGC",
        f"-Dlog4j2.configurationFile={quiet.as_uri()}",
        "-cp",
        os.pathsep.join(fetch_optional_jars("broker")),
    ]


def main() -> int:
    """Run a broker until Ctrl-C or SIGTERM, and print its address."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "var/kafka")
    with Broker(folder) as broker:
        # Signals are blocked only now, since the broker would inherit the block. Unblocked, SIGTERM would end this
        # process and leave the broker running.
        ends = {signal.SIGINT, signal.SIGTERM}
        signal.pthread_sigmask(signal.SIG_BLOCK, ends)
        print(f"Kafka at {broker.address}: export KALMAN_KAFKA={broker.address}", flush=True)
        signal.sigwait(ends)
    return 0


if __name__ == "__main__":
    sys.exit(main())
