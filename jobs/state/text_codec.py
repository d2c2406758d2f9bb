"""State values as compressed ASCII text. Private format of the state: see docs/decisions/0052.

Spark's state server pickles the values that a Python operator reads. It turns bytes into a string of characters, which
it encodes as UTF-8: some 30 nanoseconds per byte, most of the cost of a micro-batch's state. It copies ASCII text as
memory. So values are compressed with LZ4, and every seven bytes become eight characters of seven bits.

A checkpoint of release 0.1 keeps its states as bytes: the types of a checkpoint cannot change.
"""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_CODEC = "lz4_raw"
_SIZES = struct.Struct("<II")
_GROUP = 7

# Spread the 56 low bits of eight bytes to seven bits per byte, by halves: mask of the bits that stay, mask of the bits
# that move up, and the number of places.
_HALVES = tuple(
    (np.uint64(stays), np.uint64(moves), np.uint64(by))
    for stays, moves, by in (
        (0x000000000FFFFFFF, 0x00FFFFFFF0000000, 4),
        (0x00003FFF00003FFF, 0x0FFFC0000FFFC000, 2),
        (0x007F007F007F007F, 0x3F803F803F803F80, 1),
    )
)


class DamagedText(ValueError):
    """A text of the state is damaged, or was not made by `to_text`."""


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
    """Return the bytes of a value of the state, stored as text or as bytes.

    Raises:
        DamagedText: see `from_text`.
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
    """Invert `_spread`; return the bytes with the padding."""
    bits: NDArray[np.uint64] = np.frombuffer(text.encode("ascii"), "<u8")
    for stays, moves, by in reversed(_HALVES):
        bits = (bits & stays) | ((bits >> by) & moves)
    return bits.view(np.uint8).reshape(-1, 8)[:, :_GROUP].tobytes()
