"""A driver in a YARN cluster: submitted by the launcher, killed there, followed by the next, stopped by request.

The cluster is real, with one node, and its parts are threads of one process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.spark.jars import fetch_optional_jars
from tests.support.in_cluster import ClusterStream, set_environment

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.slow]

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
        classpath=os.pathsep.join([*fetch_optional_jars("yarn"), *map(str, own)]),
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
    walk = ClusterStream(tmp_path)
    connection = {"conn_type": "spark", "host": "yarn", "extra": json.dumps({"deploy-mode": "cluster"})}
    set_environment(monkeypatch, walk.pipeline, connection, HADOOP_CONF_DIR=str(yarn))
    assert walk.start().driven
    walk.take_in(3)
    walk.kill(60)
    walk.land_rest()
    assert walk.start().driven
    walk.take_in(5)
    walk.stop()
    walk.compare()
