"""Run a Spark standalone cluster on this machine: a master and workers as processes, from the installed package.

`python -m demo.cluster` (or `make cluster`) runs one until Ctrl-C and prints its address. An application gets
`spark.cores.max` cores, else `cores_per_application`. Without a limit the first application would take all cores, and
every other stream would wait for ever.

Only a client with the cluster's secret can run anything on it. The secret is new for each cluster, and stored in a
`spark-defaults.conf` that only its owner can read; master, workers and drivers get the folder of that file in
`SPARK_CONF_DIR`. The master's HTTP server for submissions, which needs no secret, is off.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from urllib.request import urlopen

import psutil

from demo.ports import HOST, free_ports, listens
from demo.service import Service
from jobs.core.errors import RUN_FAILED, Terminated, UserError, show

START_SECONDS = 60.0
WORKER_MEMORY = "4g"
_DEPLOY = "org.apache.spark.deploy"


class Cluster(Service):
    """A master and its workers, whose logs and work are in `folder`; applications connect to `address`.

    Args:
        folder: folder of logs, work and settings.
        cores: cores of each worker.
        memory: memory of each worker.
        cores_per_application: cores of an application without a setting.
        port: port of the master.
        encrypt: whether to encrypt traffic between processes and their local files.
    """

    def __init__(
        self,
        folder: Path,
        cores: int = 2,
        memory: str = WORKER_MEMORY,
        cores_per_application: int = 2,
        port: int | None = None,
        encrypt: bool = False,
    ) -> None:
        self.folder = folder
        self.cores, self.memory = cores, memory
        self.cores_per_application = cores_per_application
        self.port, self._page = free_ports(2)
        self.port = port or self.port
        self.page = f"http://{HOST}:{self._page}"
        self.address = f"spark://{HOST}:{self.port}"
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.master: subprocess.Popen[bytes] | None = None
        self.settings = folder / "conf" / "spark-defaults.conf"
        self.environment = {"KALMAN_MASTER": self.address, "SPARK_CONF_DIR": str(self.settings.parent)}
        self._encrypt = encrypt
        self._started = self._restarts = 0
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, workers: int = 2) -> None:
        """Start the master and its workers, and return once the workers are registered.

        Raises:
            UserError: a process ended, or did not come up in time.
        """
        shutil.rmtree(self._recovery, ignore_errors=True)  # the file of an earlier cluster
        self._write_settings()
        self._start_master("master")
        for _ in range(workers):
            self.add_worker()

    def kill_master(self) -> None:
        """Kill the master (SIGKILL). Workers and applications continue with their executors."""
        assert self.master is not None
        _kill_family(self.master)
        self.master = None

    def restart_master(self) -> None:
        """Start the master again, and return once its workers are registered with it.

        Raises:
            UserError: the master ended, or a worker did not register in time.
        """
        self._restarts += 1
        name = f"master-{self._restarts}"
        master = self._start_master(name)
        self._await(name, master, lambda: len(self._alive()) == len(self.workers))

    @property
    def _recovery(self) -> Path:
        """Return the folder in which the master stores its workers and applications for its successor."""
        return self.folder / "recovery"

    def _write_settings(self) -> None:
        """Write the settings of master, workers and drivers, with a new secret, into a private file."""
        yes = str(self._encrypt).lower()
        given = {
            "spark.authenticate": "true",
            "spark.authenticate.secret": secrets.token_hex(32),
            "spark.master.rest.enabled": "false",
            "spark.ui.killEnabled": "false",
            "spark.network.crypto.enabled": yes,
            "spark.io.encryption.enabled": yes,
        }
        self.settings.parent.mkdir(mode=0o700, exist_ok=True)
        self.settings.unlink(missing_ok=True)
        with open(os.open(self.settings, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.writelines(f"{name} {value}\n" for name, value in given.items())

    def _start_master(self, name: str) -> subprocess.Popen[bytes]:
        options = {
            "spark.deploy.defaultCores": self.cores_per_application,
            "spark.deploy.recoveryMode": "FILESYSTEM",
            "spark.deploy.recoveryDirectory": self._recovery,
        }
        self.master = self._run(
            name, "master.Master", "--host", HOST, "--port", str(self.port), "--webui-port", str(self._page),
            SPARK_MASTER_OPTS=" ".join(f"-D{key}={value}" for key, value in options.items()),
        )  # fmt: skip
        self._await(name, self.master, lambda: listens(self.port) and listens(self._page))
        return self.master

    def add_worker(self, host: str = HOST) -> str:
        """Start another worker at an address of this machine, and return its name once it is registered.

        Raises:
            UserError: it ended, or did not come up in time.
        """
        self._started += 1
        name = f"worker-{self._started}"
        port, page = free_ports(2)
        process = self._run(
            name, "worker.Worker", self.address, "--host", host, "--port", str(port), "--webui-port", str(page),
            "--cores", str(self.cores), "--memory", self.memory, "--work-dir", str(self.folder / name),
            SPARK_LOCAL_IP=host,
        )  # fmt: skip
        self.workers[name] = process
        self._await(name, process, lambda: any(one["port"] == port for one in self._alive()))
        return name

    def kill_worker(self, name: str) -> None:
        """Kill a worker and its executors (SIGKILL), as the loss of a machine would."""
        _kill_family(self.workers.pop(name))

    def stop(self) -> None:
        """End the workers and the master."""
        for name in list(self.workers):
            self.kill_worker(name)
        if self.master is not None:
            _kill_family(self.master)
            self.master = None

    def log(self, name: str) -> Path:
        """Return the log file of a process."""
        return self.folder / f"{name}.log"

    def _run(self, name: str, program: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        from pyspark.find_spark_home import _find_spark_home

        home = _find_spark_home()
        java = {
            "SPARK_HOME": home,
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "SPARK_LOCAL_IP": HOST,
            "SPARK_CONF_DIR": str(self.settings.parent),
        }
        with self.log(name).open("wb") as log:
            return subprocess.Popen(
                [str(Path(home) / "bin" / "spark-class"), f"{_DEPLOY}.{program}", *arguments],
                env={**os.environ, **java, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _alive(self) -> list[dict[str, Any]]:
        """Return the workers that are registered with the master."""
        try:
            with urlopen(f"{self.page}/json/", timeout=5) as answer:
                return [one for one in json.load(answer)["workers"] if one["state"] == "ALIVE"]
        except (OSError, ValueError):  # the page, and then its content, come up a little later than the port
            return []

    def _await(self, name: str, process: subprocess.Popen[bytes], ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise UserError(f"the cluster's {name} did not start; {self.log(name)} says why", RUN_FAILED)
            time.sleep(0.1)


def _kill_family(process: subprocess.Popen[bytes]) -> None:
    """End a process and its descendants, which may lead separate process groups."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    process.kill()
    for one in family:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            pass
    process.wait()


def _terminate(number: int, frame: object) -> NoReturn:
    raise Terminated


def main() -> int:
    """Run a cluster until Ctrl-C or SIGTERM, and print its address."""
    parser = argparse.ArgumentParser(
        "python -m demo.cluster", description="Run a Spark cluster on this machine."
    )
    parser.add_argument("--folder", type=Path, default=Path("var/cluster"), help="of logs and work")
    parser.add_argument("--port", type=int, default=7077, help="of the master")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cores", type=int, default=2, help="of each worker")
    parser.add_argument("--memory", default=WORKER_MEMORY, help="of each worker")
    parser.add_argument("--encrypt", action="store_true", help="what Spark's processes send each other")
    options = parser.parse_args()
    folder = options.folder.absolute()
    cluster = Cluster(folder, options.cores, options.memory, port=options.port, encrypt=options.encrypt)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        cluster.start(options.workers)
        print(
            f"{options.workers} workers of {options.cores} cores at {cluster.address}, page at {cluster.page}\n"
            f"  export KALMAN_MASTER={cluster.address} SPARK_CONF_DIR={cluster.settings.parent}\n"
            f"or: make demo MASTER={cluster.address} SPARK_CONF_DIR={cluster.settings.parent}\n"
            f"Only who can read {cluster.settings} can run anything on it. Ctrl-C ends it",
            flush=True,
        )
        while True:
            signal.pause()
    except (KeyboardInterrupt, Terminated):
        return 0
    except UserError as error:
        return show(error)
    finally:
        cluster.stop()


if __name__ == "__main__":
    sys.exit(main())
