"""Packets, keys, routes and state blocks: what is packed comes back, and no two keys are ever merged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.state.block_format import StateMismatch, build_state_format
from jobs.state.encoding.keys import CHECK, ROUTE, KeyKind, group, match
from jobs.state.encoding.packets import Layout, PacketColumn, Records, join_records
from jobs.state.encoding.routing import (
    compute_blocks,
    compute_buckets,
    compute_identities,
    compute_routes,
    count_blocks,
    make_routing,
)
from jobs.state.encoding.row_order import order_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LAYOUT = Layout(
    (PacketColumn("a", "<i8"), PacketColumn("m", "<f8", 3), PacketColumn("flag", "|u1")), text=True
)


def records(size: int, seed: int = 0) -> Records:
    rng = np.random.default_rng(seed)
    arrays = {
        "a": rng.integers(-(2**62), 2**62, size),
        "m": rng.normal(size=(3, size)),
        "flag": rng.integers(0, 255, size).astype(np.uint8),
    }
    return Records(arrays, pa.array([f"key-{'é' * (i % 5)}{i}" for i in range(size)], pa.string()))


def same(one: Records, other: Records) -> None:
    assert set(one.arrays) == set(other.arrays)
    for name, array in one.arrays.items():
        np.testing.assert_array_equal(array, other.arrays[name])
    assert (one.text is None) == (other.text is None)
    if one.text is not None and other.text is not None:
        assert one.text.to_pylist() == other.text.to_pylist()


@pytest.mark.parametrize("size", [0, 1, 2, 7, 8, 1000])
def test_a_packet_comes_back_as_it_was(size: int) -> None:
    given_ = records(size)
    same(LAYOUT.decode(LAYOUT.encode(given_)), given_)


def test_slices_and_selections_are_packed_as_what_they_show() -> None:
    whole = records(50)
    packet = LAYOUT.encode(whole.slice(7, 31).take(np.array([3, 1, 1, 20])))
    same(LAYOUT.decode(packet), whole.take(np.array([10, 8, 8, 27])))


def test_packets_join_end_to_end() -> None:
    whole = records(20)
    parts = [LAYOUT.decode(LAYOUT.encode(whole.slice(a, b))) for a, b in ((0, 5), (5, 5), (5, 20))]
    same(join_records(parts), whole)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=50))
def test_routes_lose_nothing(identities: list[int]) -> None:
    array = np.array(identities, np.int64)
    np.testing.assert_array_equal(compute_identities(compute_routes(array)), array)


def test_blocks_follow_the_order_of_routes_and_buckets_are_even() -> None:
    route = np.sort(compute_routes(np.arange(100_000)))
    block = compute_blocks(route, 37)
    assert (np.diff(block) >= 0).all()
    assert set(block) == set(range(37))
    counts = np.bincount(compute_buckets(route, 8), minlength=8)
    assert counts.min() > 12_000
    for bucket in range(8):  # the bucket says nothing of the block
        inside = np.bincount(block[compute_buckets(route, 8) == bucket], minlength=37)
        assert inside.min() > 200


def keyed(route: list[int], check: list[int]) -> Records:
    texts = pa.array([f"{r}/{c}" for r, c in zip(route, check, strict=True)], pa.string())
    return Records({"route": np.array(route, np.uint64), "check": np.array(check, np.int64)}, texts)


def test_two_keys_that_share_a_route_stay_two() -> None:
    rows = keyed([5, 9, 5, 9, 5, 1], [1, 7, 2, 7, 1, 0])
    time = np.array([30, 10, 20, 5, 10, 1])
    y = np.zeros((1, 6))
    grouped = group(rows, lambda code: order_rows(code, time, y))
    texts = rows.take(grouped.order).text
    assert texts is not None
    runs: dict[int, set[str]] = {}
    for code, text in zip(grouped.code.tolist(), texts.to_pylist(), strict=True):
        runs.setdefault(code, set()).add(text)
    assert sorted(runs.values(), key=sorted) == [{"1/0"}, {"5/1"}, {"5/2"}, {"9/7"}]
    for code in runs:
        ordered = time[grouped.order][grouped.code == code]
        assert (np.diff(ordered) >= 0).all()
    assert len(grouped.first) == 4


def test_keys_are_found_among_others_that_share_their_route() -> None:
    known = keyed([1, 5, 5, 5, 9], [0, 3, 1, 2, 7])
    np.testing.assert_array_equal(
        match(known, keyed([1, 5, 5, 5, 7, 9], [0, 1, 2, 8, 0, 7])), [0, 2, 3, -1, -1, 4]
    )
    np.testing.assert_array_equal(match(known.slice(0, 0), keyed([1], [0])), [-1])


def state_of(model: str = "m", version: int = 1, states: list[str] | None = None):  # noqa: ANN201
    kind = KeyKind(("k",), ("string",), False)
    return build_state_format(
        model, version, states or ["level"], {"mean": (1,), "covariance": (1,)}, kind, 2
    )


def test_a_block_says_whose_states_it_holds() -> None:
    format_ = state_of()
    assert format_.layout.columns[:2] == (ROUTE, CHECK)
    empty = format_.layout.empty()
    same(format_.decode(format_.encode(empty)), empty)
    for other, word in (
        (state_of(model="n"), "model"),
        (state_of(version=2), "version"),
        (state_of(states=["slope"]), "states"),
    ):
        with pytest.raises(StateMismatch, match=word):
            other.decode(format_.encode(empty))


@pytest.mark.parametrize("integer", [True, False])
@pytest.mark.parametrize("dtype", ["<f8", "<f4"])
def test_a_block_gives_back_its_states_and_those_of_earlier_releases_too(integer: bool, dtype: str) -> None:
    kind = KeyKind(("k",), ("bigint" if integer else "string",), integer)
    format_ = build_state_format("m", 1, ["level"], {"mean": (1,), "covariance": (1,)}, kind, 2, dtype)
    rng = np.random.default_rng(3)
    for size in (0, 1, 300):
        arrays = {
            column.name: rng.normal(size=(column.width or 1, size)).astype(column.dtype)
            if "f" in column.dtype
            else rng.integers(0, 2**62, size).astype(column.dtype)
            for column in format_.layout.columns
        }
        arrays["log_likelihood"] = arrays["log_likelihood"][0]
        text = None if integer else pa.array([f"key {'é' * (i % 3)}{i}" for i in range(size)], pa.string())
        states = Records(arrays, text)
        block = format_.encode(states)
        same(format_.decode(block), states)
        header, packet = block[4 : 8 + len(format_.header)], format_.layout.encode(states)
        same(format_.decode(b"KSB1" + header + packet), states)
        numbers = 8 * size * (6 if dtype == "<f8" else 4) + (0 if integer else 8 * size)
        apart = np.frombuffer(packet, np.uint8, numbers, 16).reshape(-1, 8).T.tobytes()
        earlier = b"KSB2" + header + packet[:16] + apart + packet[16 + numbers :]
        same(format_.decode(earlier), states)
        same(format_.decode_all([block, earlier, block]), join_records([states] * 3))


@pytest.mark.parametrize("damage", [b"", b"XXXX", b"KSB0" + bytes(60)])
def test_a_damaged_block_is_refused(damage: bytes) -> None:
    with pytest.raises(StateMismatch):
        state_of().decode(damage)


@pytest.mark.spark
@pytest.mark.parametrize("buckets", [1, 2, 7, 200])
def test_each_bucket_has_a_spark_partition_of_its_own(spark: SparkSession, buckets: int) -> None:
    from pyspark.sql import functions as F

    routing = make_routing(buckets, 1)
    frame = spark.createDataFrame([(label,) for label in routing.labels], "bucket int")
    where = frame.select(F.pmod(F.hash("bucket"), F.lit(buckets)).alias("partition")).collect()
    assert [row["partition"] for row in where] == list(range(buckets))


@pytest.mark.parametrize(
    ("keys", "blocks"),
    [(0, 1), (1, 1), (29, 1), (30, 1), (31, 2), (60, 2), (61, 3), (3000, 100), (3001, 101)],
)
def test_a_block_has_no_more_than_the_wanted_number_of_keys(keys: int, blocks: int) -> None:
    assert count_blocks(keys, buckets=3, keys_per_block=10) == blocks
