"""Convert text in another encoding, or with carriage returns as line ends, to UTF-8 bytes with line feeds."""

from __future__ import annotations

import codecs
import io
from typing import Any

_BLOCK = 1 << 20


def recode_stream(stream: io.BufferedIOBase, encoding: str, by_cr: bool) -> io.BufferedReader:
    """Return a forward-only stream of UTF-8 bytes over a stream of bytes in another encoding.

    Args:
        stream: bytes at their beginning.
        encoding: encoding of the text.
        by_cr: lines end with a carriage return alone.
    """
    return io.BufferedReader(_RecodedText(stream, encoding, by_cr), _BLOCK)


class _RecodedText(io.RawIOBase):
    def __init__(self, stream: io.BufferedIOBase, encoding: str, by_cr: bool) -> None:
        self._stream, self._by_cr = stream, by_cr
        self._decoder = None if encoding == "utf-8" else codecs.getincrementaldecoder(encoding)()
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer with the next bytes and return their number; 0 at the end.

        Raises:
            UnicodeDecodeError: the text is not in the encoding.
        """
        block = b"."
        while block and not self._rest:
            block = self._stream.read(_BLOCK)
            self._rest = block
            if self._decoder is not None:
                self._rest = self._decoder.decode(block, not block).encode("utf-8", "surrogatepass")
            if self._by_cr:
                self._rest = self._rest.replace(b"\r", b"\n")
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count
