"""Arrow batches of measurement rows become packets by bucket, and these the ordered rows of their keys. No Spark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from jobs.state.encoding.keys import KeyKind
from jobs.state.encoding.packets import RowPacket, join_records
from jobs.state.encoding.routing import compute_buckets, compute_identities, compute_routes, make_routing
from jobs.state.encoding.rows import (
    RowFormat,
    RowId,
    build_row_packer,
    group_by_bucket,
    select_ids,
    unpack_rows,
)

INTEGER = KeyKind(("id",), ("bigint",), True)
TEXT = KeyKind(("id",), ("string",), False)
KEYS = [7, -2, 7, 40, -2, 7, 11, 40]
TIMES = [50, 20, 30, 10, 5, 30, 1, 2]
FIRST = [1.5, None, 3.5, -4.0, 5.0, 2.5, 7.0, np.nan]
SECOND = [None, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0]
CONTROL = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]


def batch_of(kind: KeyKind, ids: list[Any] | None = None) -> pa.RecordBatch:
    columns: dict[str, Any] = {
        "identity": pa.array(KEYS, pa.int64()),
        "time": pa.array(TIMES, pa.timestamp("us")),
        "n0": pa.array(FIRST, pa.float64(), from_pandas=False),
        "n1": pa.array(SECOND, pa.float64()),
        "n2": pa.array(CONTROL, pa.float64()),
    }
    if not kind.integer:
        columns |= {
            "check": pa.array([3 * key for key in KEYS], pa.int64()),
            "text": pa.array([f"k{key}" for key in KEYS]),
        }
    if ids is not None and any(isinstance(one, str) for one in ids):
        numbers = [None if one is None else len(one) for one in ids]
        columns |= {"_row_id": pa.array(numbers, pa.int64()), "_row_id_check": pa.array(numbers, pa.int64())}
        columns |= {"_row_id_text": pa.array(ids, pa.string())}
    elif ids is not None:
        columns |= {"_row_id": pa.array(ids, pa.int64())}
    return pa.RecordBatch.from_pydict(columns)


def packets(fmt: RowFormat, batch: pa.RecordBatch, buckets: int) -> dict[int, list[bytes]]:
    """The packets of a bucket's label, as a partition gets them."""
    routing = make_routing(buckets, 1)
    out = list(build_row_packer(fmt, routing)(iter([batch.slice(0, 0), batch.slice(0, 5), batch.slice(5)])))
    assert len(out) == 2  # of a batch without rows nothing
    held: dict[int, list[bytes]] = {}
    for part in out:
        found = list(group_by_bucket(iter([part])))
        labels = sorted(set(part.column("bucket").to_pylist()))
        assert len(found) == len(labels) == part.num_rows
        for label, payloads in zip(labels, found, strict=True):
            held.setdefault(label, []).extend(payloads)
    return held


@pytest.mark.parametrize("kind", [INTEGER, TEXT])
@pytest.mark.parametrize("buckets", [1, 3])
def test_rows_come_in_their_bucket_and_in_the_order_in_which_they_are_applied(
    kind: KeyKind, buckets: int
) -> None:
    fmt = RowFormat(kind, "at", ("a", "b"), ("c",))
    held = packets(fmt, batch_of(kind), buckets)
    labels = make_routing(buckets, 1).labels
    place = dict(zip(KEYS, compute_buckets(compute_routes(np.array(KEYS)), buckets).tolist(), strict=True))
    assert set(held) == {labels[place[key]] for key in KEYS}
    for bucket, label in enumerate(labels):
        if label not in held:
            continue
        keyed = unpack_rows(held[label], fmt)
        mine = compute_identities(keyed.keys.arrays["route"]).tolist()
        assert mine == sorted(set(mine), key=lambda key: int(compute_routes(np.array([key]))[0]))
        assert all(place[key] == bucket for key in mine) and keyed.ids is None
        if not kind.integer:
            assert keyed.keys.text is not None and keyed.keys.text.to_pylist() == [f"k{key}" for key in mine]
            assert keyed.keys.arrays["check"].tolist() == [3 * key for key in mine]
        at = [i for key in mine for i in _applied(key)]
        rows = keyed.rows
        assert [mine[code] for code in rows.key.tolist()] == [KEYS[i] for i in at]
        assert rows.time.tolist() == [TIMES[i] for i in at]
        expected = [[np.nan if values[i] is None else values[i] for i in at] for values in (FIRST, SECOND)]
        np.testing.assert_array_equal(rows.y, expected)
        np.testing.assert_array_equal(rows.u, [[CONTROL[i] for i in at]])


def _applied(key: int) -> Iterator[int]:
    """Yield the places of a key's rows by time, then by the first measurement, missing last."""
    mine = [i for i, one in enumerate(KEYS) if one == key]
    yield from sorted(mine, key=lambda i: (TIMES[i], FIRST[i] is None, FIRST[i] or 0.0))


@pytest.mark.parametrize(
    ("ids", "integer"),
    [
        ([5, None, 0, 2**60, -1, 3, None, 8], True),
        (["a", None, "", "a longer one", "b", "c", None, "é"], False),
    ],
)
def test_ids_come_back_with_their_rows(ids: list[Any], integer: bool) -> None:
    fmt = RowFormat(TEXT, "at", ("a", "b"), ("c",), row_id=RowId("id", integer, 10))
    (held,) = packets(fmt, batch_of(TEXT, ids), 1).values()
    keyed = unpack_rows(held, fmt)
    at = [i for key in compute_identities(keyed.keys.arrays["route"]).tolist() for i in _applied(key)]
    assert keyed.ids is not None and select_ids(keyed.ids).to_pylist() == [ids[i] for i in at]
    whole = join_records([fmt.layout.decode(payload) for payload in held])
    assert select_ids(whole).to_pylist() == ids
    assert whole.arrays["named"].tolist() == [one is not None for one in ids]
    assert whole.arrays["id"].shape == ((1 if integer else 2), 8)
    bare = packets(fmt.bare, batch_of(TEXT, ids), 1)
    assert unpack_rows(next(iter(bare.values())), fmt.bare).ids is None


def test_typed_packets_say_that_they_hold_rows() -> None:
    fmt = RowFormat(INTEGER, "at", ("a", "b"), ("c",))
    for buckets in (1, 3):
        (part,) = build_row_packer(fmt, make_routing(buckets, 1), typed=True)(iter([batch_of(INTEGER)]))
        assert set(part.column("kind").to_pylist()) == {RowPacket.ROWS}
        assert part.schema.names == ["bucket", "kind", "payload"]


def test_a_bucket_without_packets_has_no_rows() -> None:
    for fmt in (RowFormat(INTEGER, "at", ("a",), ()), RowFormat(TEXT, "at", ("a", "b"), ("c",))):
        keyed = unpack_rows([], fmt)
        assert keyed.keys.size == 0 and keyed.rows.y.shape == (len(fmt.measurement), 0)
        assert keyed.rows.u.shape == (len(fmt.control), 0)
