"""Read text in another encoding, or with carriage returns as line ends, as the bytes of UTF-8 with line feeds."""

from __future__ import annotations

import codecs
import io

_BLOCK = 1 << 20


class RecodedText(io.BufferedIOBase):
    """A stream of UTF-8 bytes over a stream of bytes in another encoding; it can be read forward only.

    Args:
        stream: at its beginning.
        encoding: of its text.
        by_cr: lines end with a carriage return alone.
    """

    def __init__(self, stream: io.BufferedIOBase, encoding: str, by_cr: bool) -> None:
        self.stream = stream
        self.decoder = None if encoding == "utf-8" else codecs.getincrementaldecoder(encoding)()
        self.by_cr = by_cr
        self.rest = b""
        self.place = 0

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next `size` bytes, or all that are left.

        Raises:
            UnicodeDecodeError: the text is not in the encoding.
        """
        blocks, found = [self.rest], len(self.rest)
        while (size is None or size < 0 or found < size) and (block := self.stream.read(_BLOCK)):
            blocks.append(self._recoded(block))
            found += len(blocks[-1])
        data = b"".join(blocks)
        if self.decoder is not None and (size is None or size < 0 or found < size):
            data += self.decoder.decode(b"", True).encode()
        cut = len(data) if size is None or size < 0 else size
        self.rest = data[cut:]
        self.place += len(data[:cut])
        return data[:cut]

    def readline(self, size: int | None = -1, /) -> bytes:
        """Return the next line, or its first `size` bytes."""
        line = b""
        while (not line or line[-1:] != b"\n") and (size is None or size < 0 or len(line) < size):
            block = self.read(4096)
            if not block:
                break
            end = block.find(b"\n") + 1 or len(block)
            line, back = line + block[:end], block[end:]
            self.rest = back + self.rest
            self.place -= len(back)
        return line

    def seek(self, place: int, whence: int = 0, /) -> int:
        """Read forward to a place in the UTF-8 bytes."""
        while self.place < place and self.read(min(_BLOCK, place - self.place)):
            pass
        return self.place

    def _recoded(self, block: bytes) -> bytes:
        if self.decoder is not None:
            block = self.decoder.decode(block).encode("utf-8", "surrogatepass")
        return block.replace(b"\r", b"\n") if self.by_cr else block
