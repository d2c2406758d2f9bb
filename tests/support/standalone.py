"""Airflow as started by `make airflow`, with all of its parts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.dags.conftest import ROOT
from tests.support.airflow_api import Api, wait_for

SCRIPT = [sys.executable, str(ROOT / "scripts" / "airflow-standalone")]


class Airflow(Api):
    """A running Airflow and its API."""

    def __init__(self, environment: dict[str, str], home: Path, script: subprocess.Popen[bytes]) -> None:
        super().__init__(f"http://127.0.0.1:{environment['KALMAN_AIRFLOW_PORT']}", self.password)
        self.environment, self.home, self.script = environment, home, script

    def password(self, user: str = "admin") -> str:
        """Return the password that Airflow has made for a user."""
        made = self.home / "simple_auth_manager_passwords.json.generated"
        return json.loads(made.read_text())[user]

    def as_user(self, user: str) -> Api:
        """Return the same Airflow for another user."""
        return Api(self.address, lambda: self.password(user), user)

    def said(self) -> str:
        """Return the script's output."""
        return (self.home / "said.txt").read_text()

    def command(self, *words: str) -> str:
        """Run an airflow command in the same environment."""
        done = subprocess.run([*SCRIPT, *words], env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def processes(self) -> dict[int, str]:
        """Return the commands of all running processes that this Airflow started."""
        found = {}
        for one in psutil.process_iter(["pid", "status", "cmdline"]):
            try:
                ours = one.environ().get("KALMAN_AIRFLOW_HOME") == str(self.home)
            except psutil.Error:
                continue
            if ours and one.pid != self.script.pid and one.info["status"] != psutil.STATUS_ZOMBIE:
                found[one.pid] = " ".join(one.info["cmdline"] or [])[:200]
        return found


@contextmanager
def standalone(home: Path, environment: Mapping[str, str]) -> Iterator[Airflow]:
    """Start Airflow by the script, in `home`, and stop it by SIGTERM."""
    # Neither the settings of the tests' other Airflow nor a user's may reach this one.
    given = {
        **os.environ,
        **environment,
        "KALMAN_AIRFLOW_HOME": str(home),
        "KALMAN_AIRFLOW_PORT": str(_free_ports(5)),
    }
    with (home / "said.txt").open("w") as out:
        process = subprocess.Popen(SCRIPT, env=given, stdout=out, stderr=subprocess.STDOUT)
    airflow = Airflow(given, home, process)
    try:

        def ready() -> bool:
            assert process.poll() is None, airflow.said()
            return "Ctrl-C stops Airflow" in airflow.said()

        wait_for(ready, 400, "Airflow")
        yield airflow
    finally:
        process.terminate()
        process.wait(60)


def _free_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports."""
    for first in range(18080, 30000, count):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for offset, one in enumerate(sockets):
                one.bind(("127.0.0.1", first + offset))
            return first
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
    raise AssertionError("no free ports")
