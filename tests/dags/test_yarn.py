"""A driver in a YARN cluster: submitted by the launcher, killed there, followed by the next, stopped by request.

The cluster is real, with one node, and its parts are threads of one process.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.delta_log import rows_of
from jobs.jars import optional_jars
from jobs.lease_log import STOPPED, LeaseLog
from jobs.stop import ask
from jobs.watch import look, processes
from kalman_dags.launchers import ClusterLauncher, Work, about, launcher
from tests.airflow_api import wait_for
from tests.dags.conftest import ROOT
from tests.jobs.pipeline import Pipeline, assert_as_the_filter_alone, random_rows, random_walk_spec

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.slow]

PATIENCE = 300.0
SETTINGS = {
    "yarn.resourcemanager.scheduler.class": (
        "org.apache.hadoop.yarn.server.resourcemanager.scheduler.fifo.FifoScheduler"
    ),
    "yarn.minicluster.yarn.nodemanager.resource.memory-mb": "6144",
    "yarn.scheduler.minimum-allocation-mb": "256",
    "yarn.nodemanager.vmem-check-enabled": "false",
    "yarn.nodemanager.disk-health-checker.max-disk-utilization-per-disk-percentage": "99.9",
}


@pytest.fixture
def yarn(tmp_path: Path) -> Iterator[Path]:
    """A cluster; what it gives is the folder of its settings."""
    import pyspark
    from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

    own = sorted((Path(pyspark.__file__).parent / "jars").glob("*.jar"))
    py4j = next(str(jar) for jar in own if jar.name.startswith("py4j"))
    folder = tmp_path / "yarn"
    folder.mkdir()
    said = (folder / "said.txt").open("w")  # open as long as the process writes: it would stop at a full pipe
    port = launch_gateway(
        jarpath=py4j,
        classpath=os.pathsep.join([*optional_jars("yarn"), *map(str, own)]),
        javaopts=["-Xmx1g"],
        die_on_exit=True,
        redirect_stdout=said,
        redirect_stderr=said,
        cwd=str(folder),
    )
    gateway = JavaGateway(gateway_parameters=GatewayParameters(port=int(port)))  # pyright: ignore[reportArgumentType]
    jvm: Any = gateway.jvm
    settings = jvm.org.apache.hadoop.yarn.conf.YarnConfiguration()
    for name, value in SETTINGS.items():
        settings.set(name, value)
    cluster = jvm.org.apache.hadoop.yarn.server.MiniYARNCluster("kalman", 1, 1, 1)
    cluster.init(settings)
    cluster.start()
    try:
        out = jvm.java.io.FileOutputStream(str(folder / "yarn-site.xml"))
        cluster.getConfig().writeXml(out)
        out.close()
        yield folder
    finally:
        cluster.stop()
        gateway.shutdown()
        said.close()


def test_a_driver_in_yarn(tmp_path: Path, yarn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = random_rows(5)
    pipeline = Pipeline(tmp_path, random_walk_spec())
    pipeline.land(frames[0])
    pipeline.pretrain()
    pipeline.land(*frames[1:3])
    root = pipeline.settings.warehouse
    for name, value in {
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps(
            {"conn_type": "spark", "host": "yarn", "extra": json.dumps({"deploy-mode": "cluster"})}
        ),
        "HADOOP_CONF_DIR": str(yarn),
        "KALMAN_WAREHOUSE": root,
        "KALMAN_MODELS": str(pipeline.settings.models),
        "PYTHONPATH": str(ROOT),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SPARK_SUBMIT_OPTS", raising=False)
    log = LeaseLog.at(root, "walk")
    estimates = Path(root, "estimates", "walk")

    def start_and_take_in(days: int) -> None:
        chosen = launcher()
        assert isinstance(chosen, ClusterLauncher)
        chosen.start(root, Work("walk", 2.0), about(seconds=2.0))
        assert look(log).driven
        count = sum(len(frame) for frame in frames[1:days])
        wait_for(lambda: len(rows_of(estimates)) >= count, PATIENCE, f"{count} estimates")

    start_and_take_in(3)
    (first,) = log.history("walk-g0001")
    for pid in processes(first.owner):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not look(log).driven, 60, "its end being seen")
    pipeline.land(*frames[3:])
    start_and_take_in(5)
    ask(log, look(log), "by the test")
    wait_for(lambda: log.history("walk-g0001")[-1].ended_at, PATIENCE, "the driver's end")
    assert [one.how for one in log.history("walk-g0001")] == [None, STOPPED]
    assert_as_the_filter_alone(pipeline, rows_of(estimates), frames)
