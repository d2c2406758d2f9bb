"""Damage bytes as disks, transfers, editors and people do."""

from __future__ import annotations

import random

PIECES = [
    *(
        b"\x00",
        b"\xff",
        b"\xfe\xff",
        b"\xed\xa0\x80",
        b"\xef\xbb\xbf",
        b"\r",
        b"\n",
        b"\r\n",
        b'"',
        b"'",
        b",",
    ),
    *(b";", b"\t", b"{", b"}", b"[", b"]", b":", b"\\", b"\\u0000", b"\\ud800", b"null", b"NaN", b"Infinity"),
    *(
        b"-",
        b"1e999",
        b"1e-999",
        b"0x1p3",
        b"9" * 400,
        b"-0.0",
        b"true",
        b"  ",
        b"\xe2\x80\xae",
        b"=1+1",
        b"<!--",
    ),
    *(
        b"2024-13-45T99:99:99Z",
        b"0000-00-00",
        b"1e400",
        b"[" * 200,
        b"{" * 200,
        b'{"a":' * 50,
        b"\x1f\x8b\x08",
    ),
]


def damaged(data: bytes, chance: random.Random, most: int = 4) -> bytes:
    """Return bytes with a few changes: flipped, removed, doubled, inserted, cut off."""
    text = bytearray(data)
    for _ in range(chance.randint(1, most)):
        place, how = chance.randint(0, len(text)), chance.randint(0, 6)
        if how == 0:
            text[place:place] = chance.choice(PIECES)
        elif how == 1:
            del text[place : place + chance.randint(1, 8)]
        elif how == 2 and text:
            text[min(place, len(text) - 1)] ^= 1 << chance.randint(0, 7)
        elif how == 3:
            text[place:place] = chance.randbytes(chance.randint(1, 8))
        elif how == 4 and text:
            other = chance.randint(0, len(text))
            text[place:place] = text[min(place, other) : max(place, other)][:200]
        elif how == 5:
            text[place:] = b""
        elif text:
            text[min(place, len(text) - 1)] = chance.randint(0, 255)
    return bytes(text)
