"""Pipelined calls of Spark's state server, over a real socket."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.serializers import CPickleSerializer, read_int, write_int
from pyspark.sql.streaming.proto import StateMessage_pb2 as messages
from pyspark.sql.streaming.stateful_processor_api_client import StatefulProcessorApiClient

from jobs.state.spark_values import put_all


def test_the_first_failure_ends_the_calls_as_the_server_answers_no_other() -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    asked: list[bytes] = []

    def serve() -> None:
        """Answer as Spark's server does: the second call fails, and the socket stays open."""
        file = theirs.makefile("rwb")
        for answer in (messages.StateResponse(), messages.StateResponse(statusCode=1, errorMessage="full")):
            read_int(file)
            asked.append(file.read(read_int(file)))
            content = answer.SerializeToString()
            write_int(len(content), file)
            file.write(content)
            file.flush()

    thread = threading.Thread(target=serve)
    thread.start()
    client: Any = object.__new__(StatefulProcessorApiClient)
    client.sockfile, client.pickleSer = ours.makefile("rwb"), CPickleSerializer()
    inner = SimpleNamespace(_stateful_processor_api_client=client)
    state: Any = SimpleNamespace(_mapStateClient=inner, _stateName="states")
    with pytest.raises(PySparkRuntimeError, match="refused a call: full"):
        put_all(state, ((number, b"value") for number in range(100)))
    thread.join()
    assert len(asked) == 2
    for one in (ours, theirs):
        one.close()
