"""Pipelined calls of a map in Spark's state. Private protocol: see docs/decisions/0052.

Each call of the state's client sends a message over a socket and waits for the answer. With some hundreds of blocks per
micro-batch, most of the time goes into switching between the two processes. The server answers requests in their order,
so this module sends many requests and then reads the answers.

It uses the protocol of the pinned PySpark (`pyspark.sql.streaming.map_state_client`) below its public interface. A map
without such a client (of PySpark's tester, or of another release) gets single calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkRuntimeError
from pyspark.serializers import write_int
from pyspark.sql.streaming.proto import StateMessage_pb2 as messages

if TYPE_CHECKING:
    from pyspark.sql.streaming.stateful_processor import MapState

AT_ONCE = 256
"""Number of requests that are sent before answers are read. Requests or answers are short, so this number does not fill
the socket's buffers in both directions, which would be a deadlock."""

_OK, _EMPTY = 0, b""


def get_all(state: MapState, keys: Iterable[int]) -> Iterator[Any]:
    """Yield values of a map of one integer to one column in the order of `keys`, None for a missing key."""
    client = find_client(state)
    if client is None:
        for key in keys:
            value = state.getValue((key,))
            yield None if value is None else value[0]
        return
    pickled = client.pickleSer
    requests = ({"getValue": messages.GetValue(userKey=pickled.dumps((key,)))} for key in keys)
    for answer in _ask(client, state, requests):
        yield None if answer == _EMPTY else pickled.loads(answer)[0]


def put_all(state: MapState, values: Iterable[tuple[int, Any]]) -> None:
    """Set values of a map of one integer to one column."""
    client = find_client(state)
    if client is None:
        for key, value in values:
            state.updateValue((key,), (value,))
        return
    dumps = client.pickleSer.dumps
    requests = (
        {"updateValue": messages.UpdateValue(userKey=dumps((key,)), value=dumps((value,)))}
        for key, value in values
    )
    for _ in _ask(client, state, requests):
        pass


def find_client(state: MapState) -> Any:
    """Return the client of a map, or None if it lacks the expected methods."""
    client = getattr(getattr(state, "_mapStateClient", None), "_stateful_processor_api_client", None)
    known = ("sockfile", "pickleSer", "_receive_proto_message")
    return client if all(hasattr(client, name) for name in known) else None


def _ask(client: Any, state: MapState, requests: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    """Yield the answers to calls of a map.

    Raises:
        PySparkRuntimeError: a call failed on the server.
    """
    while batch := list(islice(requests, AT_ONCE)):
        for one in batch:
            call = messages.MapStateCall(stateName=state._stateName, **one)  # type: ignore[attr-defined]
            variable = messages.StateVariableRequest(mapStateCall=call)
            message = messages.StateRequest(stateVariableRequest=variable).SerializeToString()
            write_int(0, client.sockfile)  # the version of the protocol
            write_int(len(message), client.sockfile)
            client.sockfile.write(message)
        client.sockfile.flush()
        # All answers are read before any is used: a consumer that stops early must not leave answers in the socket.
        answers = [client._receive_proto_message() for _ in batch]
        for status, error, value in answers:
            if status != _OK:
                raise PySparkRuntimeError(f"Spark's state server refused a call: {error}")
            yield value
