"""Records ordered by route in memory-mapped files, with checksums that are compared at each read.

Each record has a checksum of its route, its row and its text, which is compared when the record is read. This checksum
does not prove that a search has found every record, because a damaged route may mislead a search. So each `GROUP` of
routes also has a checksum, and each search compares the groups on both sides of the place where it ends. If these
routes are unchanged, then the search has ended at the right place, because routes are ordered.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.state.encoding.keys import match
from jobs.state.encoding.packets import Layout, Records
from jobs.state.encoding.routing import compute_routes
from jobs.state.encoding.row_order import find_starts

PIECE = 1 << 16
"""Number of records that are converted to rows at once."""
GROUP = 16
"""Number of routes per checksum: two cache lines of a processor, which the last steps of a search read anyway."""

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]

_NONE = np.zeros(0, np.int64)
_SEED = np.uint64(0x9E3779B97F4A7C15)


class Damaged(OSError):
    """Error: the content of a file has changed since it was written."""


class SortedRun:
    """N records ordered by route.

    route: (N,). rows: (N, W) words, which are the bytes of `build_row_type` and a checksum. text: texts of the keys;
        None if the keys are integers.
    """

    def __init__(self, path: Path, layout: Layout, size: int) -> None:
        self.path, self.layout, self.size = path, layout, size
        self.route: Words = np.zeros(0, np.uint64)
        self.rows: Words = np.zeros((0, _count_words(layout)), np.uint64)
        self.text: pa.LargeStringArray | None = pa.array([], pa.large_string()) if layout.text else None
        self._groups: Words = np.zeros((0, GROUP), np.uint64)
        self._sums: Words = np.zeros(0, np.uint64)
        self._offsets: Ints = np.zeros(1, np.int64)
        self._length = 0
        self._last: tuple[Words, Ints, Records] | None = None

    @classmethod
    def open(cls, path: Path, layout: Layout, size: int) -> SortedRun:
        """Map the files of a run of `size` records.

        Raises:
            OSError, ValueError: a file is missing, or has another size.
        """
        run = cls(path, layout, size)
        if size == 0:
            return run
        run._groups, run._sums, run.rows = (
            _map_file(file, shape) for file, shape in _list_files(path, layout, size)
        )
        run.route = run._groups.reshape(-1)[:size]
        if layout.text:
            run._offsets = _map_file(path.with_suffix(".offsets"), (size + 1,)).view(np.int64)
            length = run._length = path.with_suffix(".text").stat().st_size
            data = np.memmap(path.with_suffix(".text"), np.uint8, "r", shape=(length,)) if length else b""
            run.text = pa.LargeStringArray.from_buffers(size, pa.py_buffer(run._offsets), pa.py_buffer(data))
        return run

    @classmethod
    def write(cls, path: Path, layout: Layout, size: int, parts: Iterable[Records]) -> SortedRun:
        """Write the `size` records of parts to files, and map the files; the parts are ordered by route.

        Raises:
            OSError: the disk is full.
        """
        groups, sums, rows = _create_files(path, layout, size)
        route = groups.reshape(-1)

        def placed() -> Iterator[pa.Array | None]:
            at = 0
            for part in parts:
                into = slice(at, at + part.size)
                route[into] = part.arrays["route"]
                rows[into] = pack_rows(layout, part)
                at += part.size
                yield part.text

        if layout.text:
            _write_texts(path, placed())
        else:
            for _ in placed():
                pass
        sums[:] = _sum_groups(groups, np.arange(len(groups)))
        return cls.open(path, layout, size)

    @classmethod
    def write_merged(cls, path: Path, base: SortedRun, new: Records) -> SortedRun:
        """Write the records of a run, and the records of other keys, to files, and map the files.

        Raises:
            OSError: the disk is full, or the routes of the run are damaged.
        """
        if base.size == 0:
            return cls.write(path, base.layout, new.size, split_records(new))
        base._check_groups(np.arange(len(base._groups)))
        size = base.size + new.size
        groups, sums, rows = _create_files(path, base.layout, size)
        route = groups.reshape(-1)[:size]
        at = np.searchsorted(base.route, new.arrays["route"]) + np.arange(new.size)
        held = np.ones(size, bool)
        held[at] = False
        route[at], route[held] = new.arrays["route"], base.route
        # Copies checksums even if they are wrong.
        rows[at] = pack_rows(base.layout, new)
        rows[held] = base.rows
        if base.text is not None and new.text is not None:
            base._check_offsets(base._offsets[:-1], base._offsets[1:])
            order = np.empty(size, np.int64)
            order[held], order[at] = np.arange(base.size), base.size + np.arange(new.size)
            joined = pa.concat_arrays([base.text, new.text.cast(pa.large_string())])
            _write_texts(path, [joined.take(pa.array(order))])
        sums[:] = _sum_groups(groups, np.arange(len(groups)))
        return cls.open(path, base.layout, size)

    def find(self, route: Words) -> Records:
        """Return the records of the given routes, which are ordered."""
        return self._find_at(route)[1]

    def find_in_blocks(self, numbers: Ints, blocks: int) -> Ints:
        """Return the positions of the records in the blocks with these ordered numbers."""
        if self.size == 0 or len(numbers) == 0:
            return _NONE
        if len(numbers) == blocks:
            return np.arange(self.size)
        start = np.searchsorted(self.route, _compute_lowest_route(numbers, blocks))
        # After the last block, 0 - 1 gives a number with all bits set.
        highest = _compute_lowest_route(numbers + 1, blocks) - np.uint64(1)
        stop = np.searchsorted(self.route, highest, "right")
        self._check_ends(start, stop)
        return _join_ranges(start, stop)

    def all(self) -> Records:
        """Return all records."""
        return self.at(np.arange(self.size))

    def at(self, index: Ints) -> Records:
        """Return the records at the given positions, which are ordered.

        Raises:
            Damaged: a record has changed since it was written.
        """
        route, words, text = self.route[index], self.rows[index], None
        if self.text is not None:
            self._check_offsets(self._offsets[index], self._offsets[index + 1])
            text = self.text.take(pa.array(index)).cast(pa.string())
        if (_sum_rows(route, words, text) != words[:, -1]).any():
            raise Damaged(self.path)
        rows = _view_columns(words, self.layout)
        arrays: dict[str, NDArray] = {"route": np.asarray(route)}
        for column in self.layout.columns[1:]:
            arrays[column.name] = np.ascontiguousarray(rows[column.name].T)
        return Records(arrays, text)

    def replace(self, records: Records) -> Records:
        """Replace the records of known keys, and return the records of other keys; all are ordered by route.

        Raises:
            Damaged: routes are damaged, so the position of a key is unknown.
        """
        if self.size == 0 or records.size == 0:
            return records
        places, known = self._find_at(records.arrays["route"])
        found = match(known, records)
        there = found >= 0
        self.rows[places[found[there]]] = pack_rows(self.layout, records)[there]
        self._last = None
        return records.take(np.flatnonzero(~there))

    def remove(self) -> None:
        """Remove the files; mapped arrays stay readable."""
        for path in self.path.parent.glob(f"{self.path.name}.*"):
            path.unlink(missing_ok=True)

    def _find_at(self, route: Words) -> tuple[Ints, Records]:
        """Return the positions and the records of ordered routes; `replace` uses this result again."""
        if self._last is None or not np.array_equal(route, self._last[0]):
            places = self._places(route[find_starts(route)]) if len(route) else _NONE
            self._last = route, places, self.at(places)
        return self._last[1:]

    def _places(self, wanted: Words) -> Ints:
        """Return the positions of the records of ordered, distinct routes."""
        if self.size == 0:
            return _NONE
        start = np.searchsorted(self.route, wanted)
        stop = start + (self.route[np.minimum(start, self.size - 1)] == wanted) * (start < self.size)
        # Keys that share a route, about two among 10^9 keys, are adjacent.
        more = np.flatnonzero((stop > start) & (self.route[np.minimum(stop, self.size - 1)] == wanted))
        stop[more] = np.searchsorted(self.route, wanted[more], "right")
        self._check_ends(start, stop)
        return _join_ranges(start, stop)

    def _check_ends(self, start: Ints, stop: Ints) -> None:
        """Compare the routes at the ends of ranges, and the routes beside them, with their checksums."""
        ends = np.zeros(len(self._groups), bool)
        ends[np.maximum(start - 1, 0) // GROUP] = True
        ends[np.minimum(stop, self.size - 1) // GROUP] = True
        self._check_groups(np.flatnonzero(ends))

    def _check_groups(self, numbers: Ints) -> None:
        """Compare groups of routes with their checksums.

        Raises:
            Damaged: a checksum is wrong.
        """
        if (_sum_groups(self._groups[numbers], numbers) != self._sums[numbers]).any():
            raise Damaged(self.path)

    def _check_offsets(self, start: Ints, stop: Ints) -> None:
        """Check that texts are inside their file, because a read outside the file would end the process.

        Raises:
            Damaged: a text is outside the file, or the texts together are longer than the file.
        """
        inside = (start >= 0) & (start <= stop) & (stop <= self._length)
        if not inside.all() or (stop - start).sum() > self._length:
            raise Damaged(self.path)


def build_row_type(layout: Layout) -> np.dtype:
    """Return the type of a row, which has all columns of a record except the first column, the route."""
    fields = [
        (c.name, c.dtype) if c.width is None else (c.name, c.dtype, (c.width,)) for c in layout.columns[1:]
    ]
    return np.dtype(fields, align=True)


def split_records(records: Records) -> Iterator[Records]:
    """Yield the records in slices of at most `PIECE` records."""
    for start in range(0, records.size, PIECE):
        yield records.slice(start, start + PIECE)


def pack_rows(layout: Layout, records: Records) -> Words:
    """Return records as rows (N, W) with their checksums."""
    words = np.zeros((records.size, _count_words(layout)), np.uint64)
    rows = _view_columns(words, layout)
    for column in layout.columns[1:]:
        rows[column.name] = records.arrays[column.name].T
    words[:, -1] = _sum_rows(records.arrays["route"], words, records.text)
    return words


def _count_words(layout: Layout) -> int:
    """Return the number of words in a row, including the checksum in the last word."""
    return build_row_type(layout).itemsize // 8 + 1


def _view_columns(words: Words, layout: Layout) -> NDArray[Any]:
    """Return a view of rows of words as structured rows (N,)."""
    return words[:, :-1].view(build_row_type(layout))[:, 0]


def _sum_rows(route: Words, rows: Words, text: pa.Array | None) -> Words:
    """Return the checksums of records, without the last word of each row."""
    factors = np.append(_build_factors(rows.shape[1] - 1), np.uint64(0))
    sums = _fold_words(rows) @ factors + _fold_words(route) * _SEED
    return sums if text is None else sums + _sum_texts(text) * _SEED


def _sum_groups(groups: Words, numbers: Ints) -> Words:
    """Return the checksums of the groups of routes with these numbers."""
    return _fold_words(groups) @ _build_factors(GROUP) + (numbers + 1).astype(np.uint64) * _SEED


def _sum_texts(text: pa.Array) -> Words:
    """Return checksums of texts from their lengths and 8-byte words; the last word of a text is padded with zeros."""
    kind = np.int64 if pa.types.is_large_string(text.type) else np.int32
    _, bounds, content = text.buffers()
    ends = np.frombuffer(bounds, kind)[text.offset : text.offset + len(text) + 1].astype(np.int64)
    data = (b"" if content is None else content[int(ends[0]) : int(ends[-1])].to_pybytes()) + bytes(8)
    words = np.ndarray((len(data) - 7,), np.uint64, data, strides=(1,))  # one word begins at each byte
    start, length = ends[:-1] - ends[0], np.diff(ends)
    sums = length.astype(np.uint64)
    some = np.flatnonzero(length)
    for place, factor in enumerate(_build_factors(-(-int(length.max(initial=0)) // 8))):
        beyond = np.maximum(8 * (place + 1) - length[some], 0).astype(np.uint64)
        sums[some] += _fold_words(words[start[some] + 8 * place] << (beyond * np.uint64(8))) * factor
        some = some[length[some] > 8 * (place + 1)]
    return sums


def _fold_words(words: Words) -> Words:
    """Mix the high half of each word into the low half, because a product loses changes of the highest bits."""
    folded = words >> np.uint64(32)
    folded ^= words
    return folded


@cache
def _build_factors(count: int) -> Words:
    """Return odd factors, with which a sum detects each change of one word, and nearly each change of several words."""
    return compute_routes(np.arange(1, count + 1)) | np.uint64(1)


def _join_ranges(start: Ints, stop: Ints) -> Ints:
    """Return the numbers in all ranges start..stop-1 as one array."""
    lengths = stop - start
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(start - (ends - lengths), lengths)


def _compute_lowest_route(numbers: Ints, blocks: int) -> Words:
    """Return the lowest route of each block (`routing.compute_blocks`); 0 for the number after the last block."""
    first = ((numbers.astype(np.uint64) << np.uint64(32)) + np.uint64(blocks - 1)) // np.uint64(blocks)
    return first << np.uint64(32)


def _list_files(path: Path, layout: Layout, size: int) -> list[tuple[Path, tuple[int, ...]]]:
    """Return the files of the routes, of their checksums, and of the rows, each with its shape in words."""
    groups = -(-size // GROUP)
    shapes = (".route", (groups, GROUP)), (".sums", (groups,)), (".rows", (size, _count_words(layout)))
    return [(path.with_suffix(suffix), shape) for suffix, shape in shapes]


def _map_file(file: Path, shape: tuple[int, ...]) -> Words:
    """Map a file of words, and return the words.

    Raises:
        OSError: the file is missing, or has another size.
    """
    if file.stat().st_size != 8 * np.prod(shape):
        raise Damaged(file)
    return np.memmap(file, np.uint64, "r+", shape=shape)


def _create_files(path: Path, layout: Layout, size: int) -> list[Words]:
    """Create and map the files of the routes, of their checksums, and of the rows."""
    found: list[Words] = []
    for file, shape in _list_files(path, layout, size):
        with open(file, "wb") as opened:
            _allocate(opened, 8 * int(np.prod(shape)))
        found.append(_map_file(file, shape) if size else np.zeros(shape, np.uint64))
    return found


def _allocate(file: BinaryIO, size: int) -> None:
    """Allocate the disk space of a file.

    Raises:
        OSError: the disk is full.
    """
    if size and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    zeros = bytes(1 << 20)
    for at in range(0, size, len(zeros)):
        file.write(zeros[: size - at])


def _write_texts(path: Path, texts: Iterable[pa.Array | None]) -> None:
    """Write texts as offsets and bytes."""
    start = 0
    with open(path.with_suffix(".offsets"), "wb") as offsets, open(path.with_suffix(".text"), "wb") as data:
        offsets.write(np.zeros(1, np.int64).tobytes())
        for text in texts:
            if text is None or len(text) == 0:
                continue
            large = text.cast(pa.large_string())
            _, bounds, content = large.buffers()
            ends = np.frombuffer(bounds, np.int64)[large.offset : large.offset + len(large) + 1]
            offsets.write((ends[1:] - ends[0] + start).tobytes())
            if content is not None:
                data.write(content[int(ends[0]) : int(ends[-1])])
            start += int(ends[-1] - ends[0])
