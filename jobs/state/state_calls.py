"""Many calls of a map in Spark's state without waiting for each answer.

Every call of the state's client is a message over a socket, and waits for the answer: with some hundreds of blocks a
micro-batch, most of the time is spent changing between the two processes. The server answers in the order of the
questions, so here they are sent together, and then the answers are read.

This speaks the protocol of the pinned PySpark (`pyspark.sql.streaming.map_state_client`), below its public interface.
A map without such a client (the one of PySpark's tester, of another release) is called one by one.
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
"""Questions sent before answers are read. Of a kind that is answered at length they are short, of one that is asked at
length the answers are: so many never fill the socket's buffers in both directions, when each side would wait."""

_ANSWERED, _EMPTY = 0, b""


def get_all(state: MapState, keys: Iterable[int]) -> Iterator[Any]:
    """Yield the values of a map of one integer to one column, None where there is none, in the order of the keys."""
    client = client_of(state)
    if client is None:
        for key in keys:
            value = state.getValue((key,))
            yield None if value is None else value[0]
        return
    pickled = client.pickleSer
    questions = ({"getValue": messages.GetValue(userKey=pickled.dumps((key,)))} for key in keys)
    for answer in _ask(client, state, questions):
        yield None if answer == _EMPTY else pickled.loads(answer)[0]


def put_all(state: MapState, values: Iterable[tuple[int, Any]]) -> None:
    """Set values of a map of one integer to one column."""
    client = client_of(state)
    if client is None:
        for key, value in values:
            state.updateValue((key,), (value,))
        return
    dumps = client.pickleSer.dumps
    questions = (
        {"updateValue": messages.UpdateValue(userKey=dumps((key,)), value=dumps((value,)))}
        for key, value in values
    )
    for _ in _ask(client, state, questions):
        pass


def client_of(state: MapState) -> Any:
    """Return the client that a map asks, None where it has none that is known here."""
    client = getattr(getattr(state, "_mapStateClient", None), "_stateful_processor_api_client", None)
    known = ("sockfile", "pickleSer", "_receive_proto_message")
    return client if all(hasattr(client, name) for name in known) else None


def _ask(client: Any, state: MapState, questions: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    """Yield the answers to calls of a map.

    Raises:
        PySparkRuntimeError: the server says that a call failed.
    """
    while together := list(islice(questions, AT_ONCE)):
        for one in together:
            call = messages.MapStateCall(stateName=state._stateName, **one)  # type: ignore[attr-defined]
            variable = messages.StateVariableRequest(mapStateCall=call)
            message = messages.StateRequest(stateVariableRequest=variable).SerializeToString()
            write_int(0, client.sockfile)  # the version of the protocol
            write_int(len(message), client.sockfile)
            client.sockfile.write(message)
        client.sockfile.flush()
        # All are read before any is used: whoever stops half way must not leave answers to another's question.
        answers = [client._receive_proto_message() for _ in together]
        for status, error, value in answers:
            if status != _ANSWERED:
                raise PySparkRuntimeError(f"the state's server refused a call: {error}")
            yield value
