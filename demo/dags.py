"""Run DAGs in separate processes, with the demo's Airflow, and follow the drivers' output."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn, Self

import psutil

from jobs.core.errors import RUN_FAILED, UserError

ROOT = Path(__file__).resolve().parent.parent
POLL_SECONDS = 0.2
RUN_SECONDS = 1800.0
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC"
"""Options of Java. For a minute of work at a time, the optimising compiler does not pay. Without it Java would reserve
48 MB for compiled code, which a stream's driver fills in some minutes; then it would interpret everything."""

_NAMES = re.compile(r"learning [^:]*: ")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Place:
    """The demo's folder (files to land, Airflow, logs, result and report) and the root of its warehouse."""

    root: Path
    warehouse: str

    @property
    def landing(self) -> Path:
        """Return the folder of the files to land."""
        return self.root / "landing"

    @property
    def logs(self) -> Path:
        """Return the log file of a process."""
        return self.root / "logs"

    def database(self, model: str) -> Path:
        """Return Airflow's database for a model's DAG runs: SQLite does not support two runs at the same time."""
        return self.root / "airflow" / f"{model}.db"

    def environment(self, model: str) -> dict[str, str]:
        """Return the environment of a model's DAG runs, without the user's Airflow settings."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW_")}
        path = [str(Path(sys.executable).parent), kept.get("PATH", "")]
        return {
            **kept,
            "PATH": os.pathsep.join(path),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",
            "SPARK_SUBMIT_OPTS": kept.get("SPARK_SUBMIT_OPTS") or JAVA_OPTIONS,
            "NO_COLOR": "1",
            "AIRFLOW_HOME": str(self.root / "airflow"),
            "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__DATABASE__LOAD_DEFAULT_CONNECTIONS": "False",
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{self.database(model)}",
            "KALMAN_WAREHOUSE": self.warehouse,
            "KALMAN_MODELS": str(ROOT / "models"),
        }


class DagRunner:
    """A process that runs one model's DAGs, one after the other."""

    def __init__(self, place: Place, model: str) -> None:
        self.model = model
        self.log = place.logs / f"dags-{model}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "demo.dag_runner"],
                cwd=place.root,
                env=place.environment(model),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.verb = ""
        self._state: str | None = "success"
        self._from = 0

    def start(self, verb: str, conf: dict[str, object]) -> None:
        """Begin a run of the model's DAG for `verb`."""
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None and answers is not None
        self.verb, self._state = verb, None
        self._from = self.log.stat().st_size
        asked.write(json.dumps([f"kalman_{verb}__{self.model}", conf]) + "\n")
        asked.flush()
        threading.Thread(target=self._answer, args=(answers,), daemon=True).start()

    @property
    def running(self) -> bool:
        """Return whether a run is in progress."""
        return self._state is None

    @property
    def failed(self) -> bool:
        """Return whether the last run has failed."""
        return self._state not in (None, "success")

    def told(self) -> str:
        """Return the last progress message of the driver."""
        said = re.compile(rf"{self.verb} {self.model}: (?:0 · )?(.*?)(?: · \d+ s)?(?: +\[airflow\..*)?$")
        lines = tail(self.log, self._from)
        found = next((match for line in reversed(lines) if (match := said.search(line))), None)
        if found is not None:
            return f"{self.model}: {_NAMES.sub('learning: ', found[1])}"
        submitted = any("Spark-Submit cmd" in line for line in lines)
        return f"{self.model}: {'Spark starts' if submitted else 'Airflow starts'}"

    def wait(self, watch: Callable[[], object] = lambda: None) -> None:
        """Wait for the run's end.

        Raises:
            UserError: the run failed, or did not end.
        """
        until = time.monotonic() + RUN_SECONDS
        while self.running:
            watch()
            if time.monotonic() > until:
                raise UserError(
                    f"the {self.verb} DAG of {self.model} does not end: see {self.log}", RUN_FAILED
                )
            time.sleep(POLL_SECONDS)
        if self.failed:
            self.fail()

    def fail(self) -> NoReturn:
        """Raise the run's error from its log.

        Raises:
            UserError: always.
        """
        said = [line.partition("error: ")[2] for line in tail(self.log, self._from) if "error: " in line]
        why = f": {said[-1][:300]}" if said else ""
        raise UserError(f"the {self.verb} DAG of {self.model} failed{why} (see {self.log})", RUN_FAILED)

    def kill(self) -> None:
        """End the process and its descendants, also those in other sessions."""
        kill_tree(self._process)

    def _answer(self, answers: IO[str]) -> None:
        self._state = answers.readline().strip() or "ended"


class AirflowSetup:
    """A process that creates Airflow's databases: `wait` for it, or leave the context and it ends."""

    def __init__(self, place: Place, models: tuple[str, ...]) -> None:
        self.log = place.logs / "airflow-db.log"
        self._databases = [place.database(model) for model in models]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "airflow", "db", "migrate"],
                cwd=place.root,
                env=place.environment(models[0]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        kill_tree(self._process)

    def wait(self) -> None:
        """Wait until each model has its database.

        Raises:
            UserError: Airflow could not create one.
        """
        if self._process.wait() != 0:
            said = next(
                (line.strip() for line in reversed(tail(self.log)) if line.strip()), "it said nothing"
            )
            raise UserError(f"Airflow was not set up: {said} (see {self.log})", RUN_FAILED)
        for other in self._databases[1:]:
            shutil.copyfile(self._databases[0], other)


def kill_tree(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants."""
    if process.poll() is not None:
        return
    try:
        top = psutil.Process(process.pid)
        family = [*top.children(recursive=True), top]
    except psutil.NoSuchProcess:
        return
    for one in family:
        try:
            one.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    process.wait()


def tail(log: Path, first: int = 0, size: int = 32_768) -> list[str]:
    """Return the last lines of a log from byte `first` on, without colours."""
    if not log.exists():
        return []
    with log.open("rb") as stream:
        stream.seek(max(first, log.stat().st_size - size))
        return _COLOURS.sub("", stream.read().decode(errors="replace")).splitlines()
