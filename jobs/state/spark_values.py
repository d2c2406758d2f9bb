"""Values in Spark's state: pipelined calls of a map, and values as compressed text.

Both use a protocol and a format that are private to Spark (docs/decisions/0052).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.errors import PySparkRuntimeError
from pyspark.serializers import write_int
from pyspark.sql.streaming.proto import StateMessage_pb2 as messages

if TYPE_CHECKING:
    from pyspark.sql.streaming.stateful_processor import MapState


AT_ONCE = 256
"""Number of requests that are sent before their answers are read. Requests or answers are short, so these requests do
not fill the socket's buffers in both directions, which would be a deadlock."""

_OK, _EMPTY = 0, b""


def get_all(state: MapState, keys: Iterable[int]) -> Iterator[Any]:
    """Yield the values of a map from one integer to one column, in the order of `keys`; None for a missing key."""
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
    """Set values of a map from one integer to one column."""
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
    """Return the client of a map; None if the client lacks the expected methods."""
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
        # All answers are read before the first is used, because a consumer that stops early would leave answers behind.
        answers = []
        for _ in batch:
            status, error, value = client._receive_proto_message()
            if status != _OK:  # the server ends with its first failure: it answers none of the other calls
                raise PySparkRuntimeError(f"Spark's state server refused a call: {error}")
            answers.append(value)
        yield from answers


_CODEC = "lz4_raw"
_SIZES = struct.Struct("<II")
_GROUP = 7

# Spread the low 56 bits of eight bytes to seven bits per byte, by halves. Each entry has the mask of the bits that
# stay, the mask of the bits that move up, and the number of places.
_HALVES = tuple(
    (np.uint64(stays), np.uint64(moves), np.uint64(by))
    for stays, moves, by in (
        (0x000000000FFFFFFF, 0x00FFFFFFF0000000, 4),
        (0x00003FFF00003FFF, 0x0FFFC0000FFFC000, 2),
        (0x007F007F007F007F, 0x3F803F803F803F80, 1),
    )
)


class DamagedText(ValueError):
    """Error: a text of the state is damaged, or was not made by `to_text`."""


def to_text(value: bytes) -> str:
    """Return bytes as compressed text."""
    packed = pa.compress(value, codec=_CODEC, asbytes=True)
    return _spread(b"".join([_SIZES.pack(len(value), len(packed)), packed]))


def from_text(text: str) -> bytes:
    """Return the bytes of a text.

    Raises:
        DamagedText: the text is cut short, or was not made by `to_text`.
    """
    try:
        whole = _gather(text)
        size, packed = _SIZES.unpack_from(whole)
        end = _SIZES.size + packed
        if end > len(whole):
            raise DamagedText(f"a value of the state has {len(whole)} bytes, not {end}: it is cut short")
        return pa.decompress(whole[_SIZES.size : end], size, codec=_CODEC, asbytes=True)
    except (pa.ArrowException, struct.error, UnicodeEncodeError, ValueError) as error:
        if isinstance(error, DamagedText):
            raise
        raise DamagedText(f"a value of the state is damaged: {error}") from error


def decode_stored(stored: str | bytes) -> bytes:
    """Return the bytes of a state value that is stored as text or as bytes.

    Raises:
        DamagedText: the text is cut short, or was not made by `to_text`.
    """
    return from_text(stored) if isinstance(stored, str) else bytes(stored)


def _spread(value: bytes) -> str:
    """Return every seven bytes as eight characters; the last group is padded with zeros."""
    groups = -(-len(value) // _GROUP)
    wide = np.zeros((groups, 8), np.uint8)
    padded = value.ljust(groups * _GROUP, b"\0")
    wide[:, :_GROUP] = np.frombuffer(padded, np.uint8).reshape(groups, _GROUP)
    bits: NDArray[np.uint64] = wide.reshape(-1).view("<u8")
    for stays, moves, by in _HALVES:
        bits = (bits & stays) | ((bits & moves) << by)
    return bits.tobytes().decode("ascii")


def _gather(text: str) -> bytes:
    """Return the bytes, with the padding, from which `_spread` made a text."""
    bits: NDArray[np.uint64] = np.frombuffer(text.encode("ascii"), "<u8")
    for stays, moves, by in reversed(_HALVES):
        bits = (bits & stays) | ((bits >> by) & moves)
    return bits.view(np.uint8).reshape(-1, 8)[:, :_GROUP].tobytes()
