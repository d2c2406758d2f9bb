"""Launchers of drivers that outlive their task: as a process on this machine, or as an application in a cluster."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from airflow.sdk.exceptions import AirflowException

from jobs.core.errors import RUN_FAILED
from jobs.spark.conf import build_spark_conf
from jobs.spark.jars import fetch_optional_jars, list_jars, store_jars
from jobs.storage.object_files import build_store_conf, store_variables
from jobs.supervision.driver_log import DriverLog, LaunchRecord
from jobs.supervision.driver_status import format_log_name
from jobs.supervision.launcher import LAUNCH_VARIABLE, detach, make_token
from kalman_dags.submit import (
    CONNECTION,
    ROOT,
    KalmanHook,
    build_spark_environment,
    find_application,
    is_private,
)


class Work(NamedTuple):
    """The work of a driver: a verb for a model, and the seconds between micro-batches.

    kafka: whether the driver needs Spark's connector for Kafka (`ModelSpec.speaks_to_kafka`).
    """

    model: str
    seconds: float
    verb: str = "stream"
    kafka: bool = False

    @property
    def name(self) -> str:
        """Return the driver's name in the log of drivers."""
        return format_log_name(self.verb, self.model)


def build_launcher() -> ProcessLauncher | ClusterLauncher:
    """Return the launcher for the connection `spark_default`.

    If the connection's extra is `{"deploy-mode": "cluster"}`, the driver runs in the cluster.
    """
    connection = KalmanHook.get_connection(CONNECTION)
    if (connection.extra_dejson or {}).get("deploy-mode") == "cluster":
        return ClusterLauncher()
    host, port = connection.host or "local", connection.port
    return ProcessLauncher(f"{host}:{port}" if port else host)


@dataclass(frozen=True)
class ProcessLauncher:
    """Launcher of a process on this machine; `master` decides where the process's executors run."""

    master: str

    def start(self, root: str, work: Work, about: str) -> LaunchRecord:
        """Start `kalman-pipeline VERB` detached from the task; the command finds its jars itself.

        The driver is in the log of drivers on return; the launch record stores `about`.
        """
        environment = {**os.environ, **build_spark_environment(), "KALMAN_MASTER": self.master}
        # The driver is not one of Airflow's processes, so it does not get their private variables.
        environment = {name: value for name, value in environment.items() if not is_private(name)}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "jobs.cli", "--quiet", f"--warehouse={root}", work.verb]
        command += [f"--model={work.model}", f"--trigger={work.seconds:g}"]
        return detach(root, work.name, command, environment, name_log_file(work.name), ROOT, about)


class ClusterLauncher:
    """Launcher of an application whose driver runs in YARN or Kubernetes, submitted by the Spark provider.

    `spark-submit` ends as soon as the application is accepted. From then on the application writes to the log of
    drivers, and reads stop requests from this log.
    """

    def start(self, root: str, work: Work, about: str) -> LaunchRecord:
        """Submit the driver and record its launch."""
        token = make_token()
        log = DriverLog.at(root, work.name)
        hook = self.hook(root, work, token)
        launch = LaunchRecord(token, "cluster", log.compute_next_time(), about=about)
        log.write(launch)
        try:
            hook.submit(find_application(work.verb))
        except AirflowException:
            error = "it could not be submitted: see the task's log"
            log.write(replace(launch, exit_code=RUN_FAILED, ended_at=log.compute_next_time(), error=error))
            raise
        return launch

    def hook(self, root: str, work: Work, token: str) -> KalmanHook:
        """Return the provider's hook with all settings of a driver in the cluster."""
        variables = {
            **{
                name: value for name, value in build_spark_environment().items() if name.startswith("KALMAN_")
            },
            **({"PYTHONPATH": os.environ["PYTHONPATH"]} if os.environ.get("PYTHONPATH") else {}),
            **store_variables(root),
            LAUNCH_VARIABLE: token,
        }
        words = [f"--warehouse={root}", "--quiet", f"--model={work.model}", f"--trigger={work.seconds:g}"]
        jars = [*list_jars(), *(fetch_optional_jars("kafka") if work.kafka else []), *store_jars(root)]
        return KalmanHook(
            own_session=False,
            conn_id=CONNECTION,
            conf={**build_spark_conf(), **build_store_conf(root), **build_cluster_conf(variables)},
            jars=",".join(jars),
            name=f"kalman-{work.verb}-{work.model}",
            application_args=words,
            spark_binary=str(Path(build_spark_environment()["SPARK_HOME"]) / "bin" / "spark-submit"),
            # Otherwise the provider looks for a driver's exit code in Kubernetes, and treats a missing code as a
            # failure.
            track_driver_via_k8s_api=True,
        )


def build_cluster_conf(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that pass variables to a driver in YARN or Kubernetes and end its submission at once.

    The cluster must not retry the application, because this task does so with the help of the lease.
    """
    return {
        "spark.yarn.submit.waitAppCompletion": "false",
        "spark.yarn.maxAppAttempts": "1",
        "spark.kubernetes.submission.waitAppCompletion": "false",
        # Spark has the same path in the cluster; without this setting all of Spark would be sent with each submission.
        "spark.yarn.jars": f"local:{build_spark_environment()['SPARK_HOME']}/jars/*",
        **{f"spark.yarn.appMasterEnv.{name}": value for name, value in variables.items()},
        **{f"spark.kubernetes.driverEnv.{name}": value for name, value in variables.items()},
    }


def name_log_file(name: str) -> Path:
    """Return the log file of a new driver: below KALMAN_LOGS, or else below Airflow's logs."""
    home = os.environ.get("AIRFLOW_HOME") or str(ROOT / "var" / "airflow")
    folder = Path(os.environ.get("KALMAN_LOGS") or Path(home) / "logs" / "kalman_drivers")
    return folder / name / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}.log"


def format_settings(**settings: Any) -> str:
    """Return a driver's settings as text, which is later compared with a new driver's settings."""
    return json.dumps(settings, sort_keys=True)
