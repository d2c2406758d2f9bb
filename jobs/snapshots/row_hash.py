"""The 64-bit hash of state rows in NumPy, equal to Spark's `xxhash64`, which earlier releases used.

Spark folds the columns of a row one after the other, and the seed of each column is the hash so far. A null leaves the
hash unchanged. An array is folded element by element, a map key by key and value by value, in their order. One value is
hashed by xxHash64 (Y. Collet, xxHash fast digest algorithm, doc/xxhash_spec.md, "XXH64 algorithm description").
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
Ints = NDArray[np.int64]

SEED = 42
"""The seed with which Spark begins a row."""
_P1, _P2, _P3, _P4, _P5 = (
    np.uint64(prime)
    for prime in (
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x27D4EB2F165667C5,
    )
)
_STRIPE = 32
_NAN = np.uint64(0x7FF8000000000000)


def compute_row_hashes(columns: list[pa.Array], seed: np.uint64 | int = SEED) -> Hashes:
    """Return the hash of each of N rows.

    Args:
        columns: columns (N,) of 64-bit integers, times in microseconds, doubles, texts, lists of doubles, or maps from
            texts to lists of doubles.
        seed: the hash with which a row begins.
    """
    found = np.full(len(columns[0]), seed, np.uint64)
    with np.errstate(over="ignore"):
        for column in columns:
            _fold(found, column, np.arange(len(column)))
    return found


def sum_hashes(columns: list[pa.Array]) -> int:
    """Return the sum, modulo 2^64, of the hashes of N rows."""
    return int(np.sum(compute_row_hashes(columns), dtype=np.uint64))


def wrap_sum(total: int) -> int:
    """Return a sum of hashes as the signed 64-bit integer that it equals modulo 2^64."""
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def format_checksum(total: int) -> str:
    """Return the checksum of rows from the sum of their hashes."""
    return f"{total % (1 << 64):016x}"


def hash_texts(texts: pa.Array, literal: int | None = None) -> pa.Array:
    """Return Spark's `xxhash64` of N texts, or of a literal and texts, as 64-bit integers."""
    return pa.array(
        compute_row_hashes([texts], SEED if literal is None else hash_literal(literal)).view(np.int64)
    )


def hash_literal(value: int) -> np.uint64:
    """Return the hash of a row after an integer literal of 32 bits, which Spark hashes as four bytes."""
    with np.errstate(over="ignore"):
        raw = np.array([value], "<i4").view(np.uint8)
        return _hash_bytes(raw, np.zeros(1, np.int64), 4, np.array([SEED], np.uint64))[0]


def _fold(found: Hashes, column: pa.Array, rows: Ints) -> None:
    """Fold the values of a column into the hashes of the given `rows`; each of these rows has one value."""
    if column.null_count:
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        column, rows = column.filter(pa.array(valid)), rows[valid]
    if not len(rows):
        return
    kind: Any = column.type
    if pa.types.is_map(kind):
        starts, lengths = _find_extents(column)
        for i in range(int(lengths.max())):
            has = np.flatnonzero(lengths > i)
            at = pa.array(starts[has] + i)
            _fold(found, column.keys.take(at), rows[has])
            _fold(found, column.items.take(at), rows[has])
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        _fold_lists(found, column, rows)
    elif pa.types.is_string(kind):
        found[rows] = _hash_texts(column, found[rows])
    else:
        found[rows] = _hash_words(_convert_words(column), found[rows])


def _fold_lists(found: Hashes, column: pa.Array, rows: Ints) -> None:
    """Fold the elements of lists into the hashes, in the order of each list."""
    starts, lengths = _find_extents(column)
    values = column.values
    if values.null_count:
        for i in range(int(lengths.max())):
            has = np.flatnonzero(lengths > i)
            _fold(found, values.take(pa.array(starts[has] + i)), rows[has])
        return
    words, so_far = _convert_words(values), found[rows]
    shortest = int(lengths.min())
    for i in range(int(lengths.max())):
        if i < shortest:
            so_far = _hash_words(words[starts + i], so_far)
        else:
            has = np.flatnonzero(lengths > i)
            so_far[has] = _hash_words(words[starts[has] + i], so_far[has])
    found[rows] = so_far


def _find_extents(column: pa.Array) -> tuple[Ints, Ints]:
    """Return the first place of each list or map in the column's values, and the number of its elements."""
    offsets = column.offsets.to_numpy().astype(np.int64)
    return offsets[:-1], np.diff(offsets)


def _convert_words(column: pa.Array) -> Hashes:
    """Return values, without nulls, as the 64-bit words that Spark hashes."""
    if not pa.types.is_floating(column.type):
        return column.cast(pa.int64()).to_numpy().view(np.uint64)
    numbers = column.to_numpy()
    words = numbers.view(np.uint64)
    # Spark gives both zeros the same hash, and all NaNs the same hash.
    return np.where(numbers == 0, np.uint64(0), np.where(numbers != numbers, _NAN, words))


def _rotate(x: Hashes, bits: int) -> Hashes:
    return (x << np.uint64(bits)) | (x >> np.uint64(64 - bits))


def _round(lane: Hashes, words: Hashes) -> Hashes:
    return _rotate(lane + words * _P2, 31) * _P1


def _hash_words(words: Hashes, seeds: Hashes) -> Hashes:
    """Return the hash of each 8-byte value, which begins with the seed of the value."""
    return _avalanche(_mix_word(seeds + _P5 + np.uint64(8), words))


def _mix_word(x: Hashes, words: Hashes) -> Hashes:
    return _rotate(x ^ _round(np.zeros_like(words), words), 27) * _P1 + _P4


def _avalanche(x: Hashes) -> Hashes:
    x = (x ^ (x >> np.uint64(33))) * _P2
    x = (x ^ (x >> np.uint64(29))) * _P3
    return x ^ (x >> np.uint64(32))


def _hash_texts(texts: pa.Array, seeds: Hashes) -> Hashes:
    """Return the hashes of the bytes of texts; texts of one length are hashed together."""
    _, offsets_buffer, data = texts.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32, len(texts) + 1, texts.offset * 4).astype(np.int64)
    raw = np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    lengths = np.diff(offsets)
    if len(lengths) and lengths.min() == lengths.max():
        return _hash_bytes(raw, offsets[:-1], int(lengths[0]), seeds)
    found = np.empty(len(texts), np.uint64)
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        found[rows] = _hash_bytes(raw, offsets[rows], length, seeds[rows])
    return found


def _hash_bytes(raw: NDArray[np.uint8], starts: Ints, length: int, seeds: Hashes) -> Hashes:
    """Return the hashes (N,) of texts of the same length, which begin at `starts` (N,) in the bytes `raw`."""

    first, count = int(starts[0]), len(starts)
    together = int(starts[-1]) - first == length * (count - 1)

    def read(at: int, kind: str) -> Hashes:
        if together:  # a view with one number per text
            words = np.ndarray((count,), kind, raw, first + at, (length,))
        else:  # a view with one number per byte, because texts begin anywhere
            words = np.ndarray((len(raw) - np.dtype(kind).itemsize + 1,), kind, raw, strides=(1,))
            words = words[starts + at]
        return words.astype(np.uint64)

    at = length // _STRIPE * _STRIPE
    if at:
        lanes = [seeds + _P1 + _P2, seeds + _P2, seeds.copy(), seeds - _P1]
        for i in range(0, at, _STRIPE):
            lanes = [_round(lane, read(i + 8 * j, "<u8")) for j, lane in enumerate(lanes)]
        one, two, three, four = lanes
        x = _rotate(one, 1) + _rotate(two, 7) + _rotate(three, 12) + _rotate(four, 18)
        for lane in lanes:
            x = (x ^ _round(np.zeros(len(starts), np.uint64), lane)) * _P1 + _P4
    else:
        x = seeds + _P5
    x = x + np.uint64(length)
    for i in range(at, length - 7, 8):
        x = _mix_word(x, read(i, "<u8"))
    at = length // 8 * 8
    if length - at >= 4:
        x = _rotate(x ^ (read(at, "<u4") * _P1), 23) * _P2 + _P3
        at += 4
    for i in range(at, length):
        x = _rotate(x ^ (read(i, "u1") * _P5), 11) * _P1
    return _avalanche(x)
