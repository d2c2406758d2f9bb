"""Run the services of docker-compose.yml as processes of this machine, with the same commands and settings.

Their container's surroundings are replaced: a host name becomes the loopback address with a free port, a volume becomes
a folder, and `.env` is filled in. PostgreSQL is Debian's, Kafka is the broker of the demo.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

from demo.ports import free_ports
from scripts.private_postgres import find_programs
from tests.support.folders import open_to_others

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 240.0
PORTS = ("postgres", "api", "scheduler", "master", "master_page", "logs")


class Services:
    """The services, each a process with a log in `folder`; `models`: the mounted folder."""

    password = "a password of one's own"

    def __init__(self, folder: Path, models: Path, kafka: str) -> None:
        self.folder = folder
        self.warehouse = folder / "warehouse"
        self.ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        self.address = f"http://127.0.0.1:{self.ports['api']}"
        self.home = folder / "airflow"
        self._processes: list[subprocess.Popen[bytes]] = []
        for made in (self.warehouse, folder / "logs", self.home):
            made.mkdir(parents=True)
        secrets = {
            "POSTGRES_PASSWORD": "secret",
            "AIRFLOW_JWT_SECRET": "0123456789abcdef" * 4,
            "AIRFLOW_FERNET_KEY": "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=",
            "AIRFLOW_ADDRESS": self.address,
            "AIRFLOW_PASSWORD": self.password,
            "SPARK_SECRET": "fedcba9876543210" * 4,
            "SPARK_ENCRYPTION": '"true"',  # Compose fills values in after it has parsed the file
        }
        text = re.sub(
            r"(?<!\$)\$\{([A-Z_]+)[^}]*\}",
            lambda match: secrets[match[1]],
            (ROOT / "docker-compose.yml").read_text(),
        )
        here = {
            "@postgres/": f"@127.0.0.1:{self.ports['postgres']}/",
            "api-server:8080": f"127.0.0.1:{self.ports['api']}",
            "localhost:8080": f"127.0.0.1:{self.ports['api']}",
            "('localhost', 8793)": f"('127.0.0.1', {self.ports['logs']})",
            'host, 0.0.0.0, --port, "8793"': f'host, 127.0.0.1, --port, "{self.ports["logs"]}"',
            "KALMAN_LOG_HOST: log-server": "KALMAN_LOG_HOST: 127.0.0.1",
            'TRIGGER_LOG_SERVER_PORT: "8793"': f'TRIGGER_LOG_SERVER_PORT: "{self.ports["logs"]}"',
            "localhost:8974": f"127.0.0.1:{self.ports['scheduler']}",
            "localhost:8081": f"127.0.0.1:{self.ports['master_page']}",
            '--port, "8080"': f'--port, "{self.ports["api"]}"',
            "spark://spark-master:7077": f"spark://127.0.0.1:{self.ports['master']}",
            'spark-master", "port": 7077': f'127.0.0.1", "port": {self.ports["master"]}',
            '--host, spark-master, --port, "7077", --webui-port, "8081"': (
                f'--host, 127.0.0.1, --port, "{self.ports["master"]}", --webui-port, "{self.ports["master_page"]}"'
            ),
            "kafka:9092": kafka,
            "/tmp/pools.json": str(folder / "pools.json"),
            "/tmp/spark": str(folder / "spark"),
            "SPARK_LOCAL_HOSTNAME: scheduler": "SPARK_LOCAL_HOSTNAME: 127.0.0.1",
            "/home/kalman/airflow/passwords.json": str(self.home / "passwords.json"),
            "FOLDER: /logs": f"FOLDER: {folder / 'logs'}",
        }
        for word, instead in here.items():
            assert word in text, word
            text = text.replace(word, instead)
        self.services: dict[str, Any] = yaml.safe_load(text)["services"]
        # Variables from the image's ENV and from the volumes.
        self.image = {
            "AIRFLOW_HOME": str(self.home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
            "AIRFLOW__CORE__PLUGINS_FOLDER": str(ROOT / "plugins"),
            "KALMAN_WAREHOUSE": str(self.warehouse),
            "KALMAN_MODELS": str(models),
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            # Every container has private copies of these.
            "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_SERVER_PORT": str(self.ports["scheduler"]),
            "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(self.ports["logs"]),
            "SPARK_LOCAL_IP": "127.0.0.1",
        }

    def start(self) -> None:
        """Start the services in the order of the file, and wait for each one's health check."""
        self._start_postgres()
        self._run("prepare").wait(PATIENCE)
        assert self._processes[-1].returncode == 0, self.log("prepare")
        airflow = ("api-server", "scheduler", "dag-processor", "triggerer", "log-server")
        for name in ("spark-master", "spark-worker", *airflow):
            for _ in range(self.services[name].get("deploy", {}).get("replicas", 1)):
                process = self._run(name)
            # In containers the worker's page and the master's have the same port.
            if name != "spark-worker":
                self._await_health(name, process)

    def stop(self) -> None:
        """Stop all services."""
        for process in reversed(self._processes):
            if process.poll() is None:
                family = psutil.Process(process.pid).children(recursive=True)
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                for one in family:
                    try:
                        one.kill()
                    except psutil.NoSuchProcess:
                        continue
                process.wait()

    def log(self, name: str) -> str:
        """Return a service's log."""
        return (self.folder / f"{name}.log").read_text(errors="replace")[-5000:]

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment of a service, without this machine's Airflow settings."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("AIRFLOW", "KALMAN"))}
        return {**kept, **self.services[name].get("environment", {}), **self.image}

    def _start_postgres(self) -> None:
        programs = find_programs()
        assert programs is not None
        data = self.folder / "postgres"
        data.mkdir()
        user: list[str] = []
        if os.geteuid() == 0:  # the server refuses to run as root
            user = ["runuser", "-u", "postgres", "--"]
            shutil.chown(data, "postgres")
            open_to_others(data.parent)
        create = [*user, programs / "initdb", "-D", data, "-U", "airflow", "--auth", "trust"]
        subprocess.run(create, check=True, capture_output=True, cwd="/")
        port = str(self.ports["postgres"])
        server = [
            *user,
            str(programs / "postgres"),
            "-D",
            str(data),
            "-p",
            port,
            "-h",
            "127.0.0.1",
            "-k",
            str(data),
        ]
        self._spawn("postgres", server, dict(os.environ), "/")
        self._await(
            "postgres",
            self._processes[-1],
            lambda: _succeeds(
                [str(programs / "pg_isready"), "-h", "127.0.0.1", "-p", port], dict(os.environ)
            ),
        )
        address = ["-h", "127.0.0.1", "-p", port, "-U", "airflow", "airflow"]
        subprocess.run([programs / "createdb", *address], check=True)

    def _run(self, name: str) -> subprocess.Popen[bytes]:
        entry = [str(ROOT / "scripts" / "entrypoint"), *self.services[name]["command"]]
        return self._spawn(name, entry, self.environment(name), ROOT)

    def _spawn(
        self, name: str, command: list[str], environment: dict[str, str], where: Path | str
    ) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=where, env=environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
        return process

    def _await_health(self, name: str, process: subprocess.Popen[bytes]) -> None:
        kind, *command = self.services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        self._await(name, process, lambda: _succeeds(command, self.environment(name)))

    def _await(self, name: str, process: subprocess.Popen[bytes], healthy: Any) -> None:
        deadline = time.monotonic() + PATIENCE
        while not healthy():
            assert process.poll() is None, f"{name} ended: {self.log(name)}"
            assert time.monotonic() < deadline, f"{name} is not healthy: {self.log(name)}"
            time.sleep(1)


def _succeeds(command: list[str], environment: dict[str, str]) -> bool:
    done = subprocess.run(command, env=environment, capture_output=True, stdin=subprocess.DEVNULL)
    return done.returncode == 0
