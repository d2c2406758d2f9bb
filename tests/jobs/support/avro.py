"""Avro's binary encoding (specification 1.11) of the few types that the tests send."""

from __future__ import annotations


def encoded_long(value: int) -> bytes:
    """Return an int or a long: zigzag, seven bits a byte."""
    zigzag, out = (value << 1) ^ (value >> 63), bytearray()
    while zigzag > 0x7F:
        out.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    return bytes([*out, zigzag])


def encoded_text(text: str) -> bytes:
    """Return a string: its length in bytes, then its bytes."""
    data = text.encode()
    return encoded_long(len(data)) + data
