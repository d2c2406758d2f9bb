"""Java processes of a test, beside Spark's."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

import py4j.java_gateway
import py4j.protocol
import pytest
from py4j.java_gateway import GatewayParameters, JavaGateway

from jobs.spark.doctor import find_java


class JavaProcess(AbstractContextManager["JavaProcess"]):
    """A Java process with these jars on its class path; `jvm` reaches its classes."""

    def __init__(self, jars: Sequence[str], environment: Mapping[str, str]) -> None:
        java = shutil.which(find_java())
        assert java is not None
        options = ["-Xmx256m", "-XX:TieredStopAtLevel=1", "-cp", os.pathsep.join(jars)]
        self.process = subprocess.Popen(
            [java, *options, "py4j.GatewayServer", "--die-on-broken-pipe", "0"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(environment),
        )
        assert self.process.stdout is not None
        port = int(self.process.stdout.readline())
        self._gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port))
        self.jvm: Any = self._gateway.jvm

    def stop(self) -> None:
        """End it."""
        self._gateway.shutdown()
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def errors_of_any_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let errors of every Java process arrive as `Py4JJavaError`, also after a session of Spark in this process.

    PySpark replaces Py4J's reading of answers, for all gateways: it asks Spark's Java process for the class of an
    error's object. For an error of another process, that object number belongs to another object of Spark's.
    """
    monkeypatch.setattr(py4j.java_gateway, "get_return_value", py4j.protocol.get_return_value)
