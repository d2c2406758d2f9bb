"""Bytes of the state as compressed ASCII text: Spark moves that between Java and Python at a fraction of the cost.

Spark's state server pickles what a Python operator reads. It writes bytes as a string of one character each, which it
builds one by one and then encodes as UTF-8: some 30 nanoseconds a byte, most of what a micro-batch's state costs. Text
of ASCII characters takes paths that copy memory (docs/decisions/0019). So values are compressed (LZ4), and every seven
bytes of that become eight characters of seven bits.

Where states are kept as bytes (a checkpoint of release 0.1), they stay so: a checkpoint's types cannot change.
"""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_CODEC = "lz4_raw"
_SIZES = struct.Struct("<II")
_GROUP = 7

# From 56 bits at the low end of eight bytes to seven in each of them, by halves: what stays, what moves up, how far.
_HALVES = tuple(
    (np.uint64(stays), np.uint64(moves), np.uint64(by))
    for stays, moves, by in (
        (0x000000000FFFFFFF, 0x00FFFFFFF0000000, 4),
        (0x00003FFF00003FFF, 0x0FFFC0000FFFC000, 2),
        (0x007F007F007F007F, 0x3F803F803F803F80, 1),
    )
)


class DamagedText(ValueError):
    """A text of the state is none that was written here."""


def to_text(value: bytes) -> str:
    """Return some bytes as compressed text."""
    packed = pa.compress(value, codec=_CODEC, asbytes=True)
    return _spread(b"".join([_SIZES.pack(len(value), len(packed)), packed]))


def of_text(text: str) -> bytes:
    """Return the bytes of a text.

    Raises:
        DamagedText: it is cut short, or not a text of `to_text`.
    """
    try:
        whole = _gathered(text)
        size, packed = _SIZES.unpack_from(whole)
        end = _SIZES.size + packed
        if end > len(whole):
            raise DamagedText(f"a value of the state has {len(whole)} bytes, not {end}: it is cut short")
        return pa.decompress(whole[_SIZES.size : end], size, codec=_CODEC, asbytes=True)
    except (pa.ArrowException, struct.error, UnicodeEncodeError, ValueError) as error:
        if isinstance(error, DamagedText):
            raise
        raise DamagedText(f"a value of the state is damaged: {error}") from error


def stored_bytes(stored: str | bytes) -> bytes:
    """Return the bytes of a value of the state, whichever way it is kept.

    Raises:
        DamagedText: see `of_text`.
    """
    return of_text(stored) if isinstance(stored, str) else bytes(stored)


def _spread(value: bytes) -> str:
    """Return seven bytes as eight characters; the last group is filled up with zeros."""
    groups = -(-len(value) // _GROUP)
    wide = np.zeros((groups, 8), np.uint8)
    padded = value.ljust(groups * _GROUP, b"\0")
    wide[:, :_GROUP] = np.frombuffer(padded, np.uint8).reshape(groups, _GROUP)
    bits: NDArray[np.uint64] = wide.reshape(-1).view("<u8")
    for stays, moves, by in _HALVES:
        bits = (bits & stays) | ((bits & moves) << by)
    return bits.tobytes().decode("ascii")


def _gathered(text: str) -> bytes:
    """Return what `_spread` was given, and the zeros behind it."""
    bits: NDArray[np.uint64] = np.frombuffer(text.encode("ascii"), "<u8")
    for stays, moves, by in reversed(_HALVES):
        bits = (bits & stays) | ((bits >> by) & moves)
    return bits.view(np.uint8).reshape(-1, 8)[:, :_GROUP].tobytes()
