"""Submit a verb to Spark: the hook, its environment, and the path of a verb's file."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from airflow.sdk import Connection
from airflow.sdk.exceptions import AirflowNotFoundException

from jobs.core.errors import UserError
from jobs.core.settings import DEFAULT_MASTER
from jobs.specs.functions import VARIABLE
from kalman_dags.places import ROOT, find_models_path, find_warehouse_root

CONNECTION = "spark_default"

KUBERNETES_PROVIDER = "apache-airflow-providers-cncf-kubernetes"


NOISE = re.compile(
    r"WARNING: Using incubator modules|WARNING: A terminally deprecated method in |WARNING: sun\.misc\.Unsafe"
    r"|WARNING: Please consider reporting this to the maintainers|Picked up (JAVA_TOOL_OPTIONS|_JAVA_OPTIONS): "
    r"|(OpenJDK|Java HotSpot\(TM\)) 64-Bit Server VM warning: (.*deprecated|Sharing is only supported)"
    r"|:: loading settings :: |WARNING: An illegal reflective access|(Starting )?Streaming TransformWithState|\s*$"
)
"""Lines of Java and Spark about themselves, and empty lines, on which a reader of a task's log cannot act."""


class KalmanHook(SparkSubmitHook):
    """Submit to the connection's master, or without a connection to KALMAN_MASTER, or else to local Spark.

    A driver with local Spark is a process of Python, as on the command line: it starts Java only if its work needs
    Spark. If the driver runs in Kubernetes, its image has the program and the jars, at the same paths as here.

    Args:
        own_session: whether to start spark-submit outside the task's process group, so that the supervisor's signals do
            not reach it.

    Raises:
        UserError: the master is Kubernetes, and the provider's part for Kubernetes is not installed.
    """

    def __init__(self, *, own_session: bool, **kwargs: Any) -> None:
        self._own_session = own_session
        super().__init__(**kwargs)
        if self._jars and self._driver_in_kubernetes:
            self._jars = ",".join(f"local://{jar}" for jar in self._jars.split(","))

    @property
    def _driver_in_kubernetes(self) -> bool:
        return self._is_kubernetes and self._connection["deploy_mode"] == "cluster"

    @classmethod
    def get_connection(cls, conn_id: str) -> Any:
        """Return the connection, or else a connection to local Spark, because the provider would submit to YARN."""
        try:
            return super().get_connection(conn_id)
        except AirflowNotFoundException:
            return Connection(
                conn_id=conn_id, conn_type="spark", host=os.environ.get("KALMAN_MASTER") or DEFAULT_MASTER
            )

    @classmethod
    def is_local(cls) -> bool:
        """Return whether the connection's master is Spark on this machine, whose settings a driver makes itself."""
        return (cls.get_connection(CONNECTION).host or "").startswith("local")

    def _resolve_connection(self) -> dict[str, Any]:
        connection = super()._resolve_connection()
        if "k8s" in connection["master"]:
            _need_kubernetes_provider()
        return connection

    def _build_spark_submit_command(self, application: str) -> list[str]:
        command = super()._build_spark_submit_command(application)
        if self._connection["master"].startswith("local"):
            at = command.index(application)
            self._env = {
                **(self._env or {}),
                "KALMAN_MASTER": self._connection["master"],
                "PYSPARK_SUBMIT_ARGS": shlex.join([*command[1:at], "pyspark-shell"]),
                "PYTHONUNBUFFERED": "YES",
            }
            command = [self._env.get("PYSPARK_DRIVER_PYTHON", sys.executable), *command[at:]]
            self.log.info("Run without spark-submit until the verb needs Spark: %s", self._mask_cmd(command))
        # The provider passes on all variables of this process, so Airflow's private variables are emptied here.
        self._env = {**(self._env or {}), **{name: "" for name in os.environ if is_private(name)}}
        return command

    def submit(self, application: str = "", **kwargs: Any) -> str | None:
        """Run spark-submit to its end in the folder that contains `dags/`, in which relative paths start."""
        if self._driver_in_kubernetes:
            application = f"local://{application}"
        return super().submit(application, start_new_session=self._own_session, cwd=ROOT, **kwargs)

    def _process_spark_submit_log(self, itr: Iterator[Any]) -> None:
        super()._process_spark_submit_log(line for line in itr if not NOISE.match(line))

    @property
    def exit_code(self) -> int | None:
        """Return the exit code of the driver or of spark-submit (the same in client mode); None before the end."""
        if self._driver_in_kubernetes:
            return self._spark_exit_code
        return None if self._submit_sp is None else self._submit_sp.poll()

    @property
    def errors(self) -> str:
        """Return the driver's `error: ...` lines, or an empty text."""
        return "; ".join(line[len("error: ") :] for line in self.lines(("error: ",)))

    def lines(self, beginnings: tuple[str, ...]) -> list[str]:
        """Return those of the driver's last lines that begin with one of these words."""
        return [line for line in self._last_submit_log_lines if line.startswith(beginnings)]

    def stop_driver(self, application: str) -> bool:
        """Send SIGTERM to the Python driver of `application` in client mode; return whether the driver was found."""
        if self._submit_sp is None or self._submit_sp.poll() is not None:
            return False
        try:
            started = psutil.Process(self._submit_sp.pid)
            for process in (started, *started.children()):
                # Python workers are children of the same JVM, but run pyspark.daemon.
                if application in process.cmdline()[1:2]:
                    process.send_signal(signal.SIGTERM)
                    return True
        except psutil.Error:
            return False
        return False


def is_private(variable: str) -> bool:
    """Return whether an environment variable is private to Airflow's processes: settings, connections and keys.

    A driver runs functions of models, and does not need the address and password of Airflow's database.
    """
    return variable.startswith(("AIRFLOW__", "_AIRFLOW", "AIRFLOW_CONN_", "AIRFLOW_VAR_"))


def find_application(verb: str) -> str:
    """Return the path of the program that runs a verb."""
    return str(find_package_folder("jobs") / f"{verb}.py")


def build_spark_environment() -> dict[str, str]:
    """Return a driver's environment variables."""
    return {
        # Workers and driver use Airflow's interpreter, and the Spark installed with it.
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONSAFEPATH": "1",
        "SPARK_HOME": str(find_package_folder("pyspark")),
        "KALMAN_WAREHOUSE": find_warehouse_root(),
        "KALMAN_MODELS": find_models_path(),
        **{name: os.environ[name] for name in (VARIABLE,) if name in os.environ},
    }


def _need_kubernetes_provider() -> None:
    # Without this provider the Spark provider would raise a NameError.
    try:
        version(KUBERNETES_PROVIDER)
    except PackageNotFoundError:
        raise UserError(
            f"Kubernetes needs {KUBERNETES_PROVIDER} beside Airflow: "
            "pip install -c requirements/lock.txt -e '.[kubernetes]'"
        ) from None


def find_package_folder(package: str) -> Path:
    """Return the folder of `package` without importing it."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ImportError(f"package {package} is not installed beside Airflow: run `make setup`")
    return Path(next(iter(found.submodule_search_locations)))
