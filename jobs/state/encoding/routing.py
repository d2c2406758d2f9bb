"""Route keys to buckets (state partitions) and to blocks (state rows) by a 64-bit identity.

The **route** of a key is a 64-bit number whose low half decides its bucket, and whose high half decides its block. So
the keys of a block, and the blocks of a bucket, are in the order of the routes. If the state of a bucket is read block
by block, it needs no sort.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_SHIFTS = (30, 27, 31)
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_INVERSES = tuple(pow(factor, -1, 1 << 64) for factor in _FACTORS)
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


class Routing(NamedTuple):
    """The group label of each bucket, and the number of blocks per bucket.

    Spark's hash partitioning sends each label to a different partition, so every task gets exactly one bucket.
    """

    labels: tuple[int, ...]
    blocks: int

    @property
    def buckets(self) -> int:
        """Return the number of buckets."""
        return len(self.labels)


def compute_routes(identity: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Mix 64-bit identities by the finaliser of SplitMix64, a bijection, so that all bits of an identity count.

    References:
        Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (variant 13 of Stafford).
    """
    z = identity.astype(np.int64, copy=False).view(np.uint64)
    z = (z ^ (z >> np.uint64(_SHIFTS[0]))) * np.uint64(_FACTORS[0])
    z = (z ^ (z >> np.uint64(_SHIFTS[1]))) * np.uint64(_FACTORS[1])
    return z ^ (z >> np.uint64(_SHIFTS[2]))


def compute_identities(route: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the identities of routes (the inverse of `compute_routes`)."""
    z = _unxorshift(route, _SHIFTS[2])
    z = _unxorshift(z * np.uint64(_INVERSES[1]), _SHIFTS[1])
    z = _unxorshift(z * np.uint64(_INVERSES[0]), _SHIFTS[0])
    return z.view(np.int64)


def _unxorshift(z: NDArray[np.uint64], shift: int) -> NDArray[np.uint64]:
    """Return the inverse of z ^ (z >> shift) for 22 <= shift < 64."""
    result = z
    for _ in range(63 // shift):
        result = z ^ (result >> np.uint64(shift))
    return result


def compute_buckets(route: NDArray[np.uint64], buckets: int) -> NDArray[np.int64]:
    """Return the bucket, 0 <= bucket < buckets, of each route."""
    return (((route & _LOW) * np.uint64(buckets)) >> _HALF).astype(np.int64)


def compute_blocks(route: NDArray[np.uint64], blocks: int) -> NDArray[np.int64]:
    """Return the block, 0 <= block < blocks, of each route in its bucket; a higher route never has a lower block."""
    return (((route >> _HALF) * np.uint64(blocks)) >> _HALF).astype(np.int64)


def count_blocks(keys: int, buckets: int, keys_per_block: int) -> int:
    """Return the number of blocks per bucket for which each block has about `keys_per_block` keys."""
    return max(1, -(-max(keys, 1) // (buckets * keys_per_block)))


def make_routing(buckets: int, blocks: int) -> Routing:
    """Return a routing with one group label for each of the `buckets` partitions of Spark's hash partitioning."""
    labels: dict[int, int] = {}
    label = 0
    while len(labels) < buckets:
        labels.setdefault(compute_partition(label, buckets), label)
        label += 1
    return Routing(tuple(labels[partition] for partition in range(buckets)), blocks)


def compute_partition(label: int, partitions: int) -> int:
    """Return the partition to which Spark sends a row with the integer grouping key `label`.

    Spark partitions by 32-bit MurmurHash3 of the key with seed 42.

    References:
        Appleby, MurmurHash3 (x86, 32 bits), for one block of four bytes.
    """
    mask = 0xFFFFFFFF
    k = _rotate(label * 0xCC9E2D51 & mask, 15) * 0x1B873593 & mask
    h = (_rotate(42 ^ k, 13) * 5 + 0xE6546B64) & mask
    h ^= 4
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    h ^= h >> 16
    signed = h - (1 << 32) if h >> 31 else h
    return signed % partitions


def _rotate(value: int, bits: int) -> int:
    """Rotate 32 bits to the left."""
    return (value << bits | value >> (32 - bits)) & 0xFFFFFFFF
