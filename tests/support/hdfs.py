"""A cluster of HDFS: a name node and one data node, as threads of one Java process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyspark
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

from demo.service import Service
from jobs.spark.jars import optional_jars


class HdfsCluster(Service):
    """A cluster whose blocks and settings are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = ""
        self._cluster: Any = None
        self._gateway: JavaGateway | None = None
        folder.mkdir(parents=True)

    def start(self) -> None:
        """Start it, and write the settings of its clients."""
        own = sorted((Path(pyspark.__file__).parent / "jars").glob("*.jar"))
        self._said = (self.folder / "said.txt").open("w")  # the process would stop at a full pipe
        port = launch_gateway(
            jarpath=next(str(jar) for jar in own if jar.name.startswith("py4j")),
            classpath=os.pathsep.join([*optional_jars("yarn"), *map(str, own)]),
            javaopts=["-Xmx1g", f"-Dtest.build.data={self.folder / 'data'}"],
            die_on_exit=True,
            redirect_stdout=self._said,
            redirect_stderr=self._said,
            cwd=str(self.folder),
        )
        self._gateway = JavaGateway(
            gateway_parameters=GatewayParameters(port=int(port))  # pyright: ignore[reportArgumentType]
        )
        jvm: Any = self._gateway.jvm
        settings = jvm.org.apache.hadoop.hdfs.HdfsConfiguration()
        settings.set("hdfs.minidfs.basedir", str(self.folder / "data"))
        builder = getattr(jvm.org.apache.hadoop.hdfs, "MiniDFSCluster$Builder")(settings)
        self._cluster = builder.numDataNodes(1).build()
        self._cluster.waitActive()
        self.address = f"hdfs://127.0.0.1:{self._cluster.getNameNodePort()}"
        setting = f"<property><name>fs.defaultFS</name><value>{self.address}</value></property>"
        (self.folder / "core-site.xml").write_text(f"<configuration>{setting}</configuration>")

    def files(self) -> Any:
        """Return Hadoop's file system."""
        return self._cluster.getFileSystem()

    def path(self, name: str) -> Any:
        """Return Hadoop's path of a name."""
        assert self._gateway is not None
        jvm: Any = self._gateway.jvm
        return jvm.org.apache.hadoop.fs.Path(name)

    def environment(self) -> dict[str, str]:
        """Return the variables with which a command reaches it."""
        return {"HADOOP_CONF_DIR": str(self.folder)}

    def stop(self) -> None:
        """End it."""
        if self._cluster is not None:
            self._cluster.shutdown()
        if self._gateway is not None:
            self._gateway.shutdown()
            self._said.close()
