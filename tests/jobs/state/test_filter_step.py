"""The step that batch and stream share: however rows are cut and split, every bit of the result is the same."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

import kalman
from jobs.snapshots.state_rows import build_state_rows
from jobs.state.block_format import StateMismatch, build_state_format, build_state_layout
from jobs.state.encoding.estimates import (
    EstimateFormat,
    locate_packed_diagonal,
    locate_packed_full,
    pack_estimates,
)
from jobs.state.encoding.keys import KeyKind
from jobs.state.encoding.packets import Records
from jobs.state.encoding.routing import compute_routes
from jobs.state.encoding.rows import KeyedRows, RowFormat, unpack_rows
from jobs.state.filter_step import filter_step
from jobs.state.row_filter import RowFilter
from kalman.evaluation.diagnostics import innovations
from kalman.filters.rounded import find_storage_dtype

UNIT = 1e6
DEFINITION = {
    "filter": "linear",
    "states": ["level", "slope"],
    "measurement": ["a", "b"],
    "control": [],
    "process": {"kind": "local_linear_trend", "level_variance": 0.5, "slope_variance": 0.1},
    "observation": {"H": [[1.0, 0.0], [0.5, 1.0]], "R": [[1.0, 0.2], [0.2, 2.0]]},
    "initial": {"mean": [0.0, 0.0], "covariance": [[10.0, 0.0], [0.0, 1.0]]},
    "learn": None,
}
INTEGER = RowFormat(KeyKind(("id",), ("bigint",), True), "at", ("a", "b"), ())
TEXT = RowFormat(KeyKind(("id",), ("string",), False), "at", ("a", "b"), ())


def packet(fmt: RowFormat, keys: np.ndarray, time: np.ndarray, y: np.ndarray) -> bytes:
    arrays = {"route": compute_routes(keys), "time": time, "y": y}
    text = None
    if not fmt.kind.integer:
        arrays["check"] = keys * 7
        text = pa.array([f"k{key}" for key in keys], pa.string())
    return fmt.layout.encode(Records(arrays, text))


def some_rows(size: int = 400, keys: int = 30, seed: int = 1):  # noqa: ANN201
    rng = np.random.default_rng(seed)
    y = rng.normal(size=(2, size))
    y[rng.random((2, size)) < 0.2] = np.nan
    time = np.sort(rng.integers(0, 50, size)) * 1_000_000  # many rows of one time
    return rng.integers(0, keys, size), time, y


@pytest.mark.parametrize("fmt", [INTEGER, TEXT], ids=["integer keys", "text keys"])
def test_any_cut_into_batches_and_packets_gives_the_same_bits(fmt: RowFormat) -> None:
    kernel = kalman.build(DEFINITION)
    layout = build_state_layout(fmt.kind, kernel.size)
    keys, time, y = some_rows()
    whole = filter_step(
        RowFilter(kernel, UNIT), layout, layout.empty(), unpack_rows([packet(fmt, keys, time, y)], fmt)
    )

    rng = np.random.default_rng(2)
    known = layout.empty()
    # Cut where the time changes: rows of one key and one time have to come together to be ordered.
    for low, high in ((-1, 9), (9, 10), (10, 33), (33, 60)):
        inside = np.flatnonzero((time > low * 1_000_000) & (time <= high * 1_000_000))
        inside = rng.permutation(inside)
        packets = [
            packet(fmt, keys[part], time[part], y[:, part]) for part in np.array_split(inside, 3) if len(part)
        ]
        known = filter_step(RowFilter(kernel, UNIT), layout, known, unpack_rows(packets, fmt)).records
        known = layout.decode(layout.encode(known))
    for name, array in whole.records.arrays.items():
        np.testing.assert_array_equal(known.arrays[name], array, err_msg=name)
    assert (np.diff(known.arrays["route"].astype(object)) > 0).all()


def test_innovations_are_those_of_the_filter_however_the_rows_are_cut() -> None:
    kernel = kalman.build(DEFINITION)
    layout = build_state_layout(INTEGER.kind, kernel.size)
    keys, time, y = some_rows()
    keyed = unpack_rows([packet(INTEGER, keys, time, y)], INTEGER)
    watching = RowFilter(kernel, UNIT, ("innovation",))
    whole = filter_step(watching, layout, layout.empty(), keyed)
    plain = filter_step(RowFilter(kernel, UNIT), layout, layout.empty(), keyed)
    assert "innovation" not in plain.outputs.extra
    np.testing.assert_array_equal(whole.outputs.mean, plain.outputs.mean)
    states = kalman.initial_states(kernel, len(keyed.keys.arrays["route"]))
    _, _, wanted = innovations(kernel, states, keyed.rows, UNIT)
    np.testing.assert_array_equal(whole.outputs.extra["innovation"], wanted)
    # Their squares add up to the filter's own value for the whole row.
    seen = np.isfinite(whole.outputs.nis)
    np.testing.assert_allclose(
        np.nansum(wanted[:, seen] ** 2, axis=0), whole.outputs.nis[seen], rtol=1e-9, atol=1e-12
    )
    found, known = [], layout.empty()
    for part in (time < 20_000_000, time >= 20_000_000):
        rows = unpack_rows([packet(INTEGER, keys[part], time[part], y[:, part])], INTEGER)
        result = filter_step(watching, layout, known, rows)
        known = result.records
        found.append(result.outputs.extra["innovation"])
    joined = np.concatenate(found, axis=1)
    np.testing.assert_array_equal(np.sort(joined, axis=1), np.sort(wanted, axis=1))


def test_the_index_of_a_row_counts_the_rows_in_its_keys_state_however_they_are_cut() -> None:
    kernel = kalman.build(DEFINITION)
    layout = build_state_layout(INTEGER.kind, kernel.size)
    keys, time, y = some_rows()
    y[0, 50:60] = np.inf  # flagged
    watching = RowFilter(kernel, UNIT, ("state_index",))
    keyed = unpack_rows([packet(INTEGER, keys, time, y)], INTEGER)
    whole = filter_step(watching, layout, layout.empty(), keyed)
    counts = dict.fromkeys(range(30), 0)
    wanted = []
    for key, bad in zip(keyed.rows.key, whole.outputs.flag != 0, strict=True):
        counts[int(key)] += not bad
        wanted.append(counts[int(key)])
    assert whole.outputs.flag.any() and whole.outputs.extra["state_index"][0].tolist() == wanted
    known, found = layout.empty(), {}
    for part in (time < 20_000_000, time >= 20_000_000, time < 5_000_000):  # the last ones are late
        rows = unpack_rows([packet(INTEGER, keys[part], time[part], y[:, part])], INTEGER)
        result = filter_step(watching, layout, known, rows)
        known = layout.decode(layout.encode(result.records))
        index, late = result.outputs.extra["state_index"][0], result.outputs.late
        assert np.isnan(index[late]).all() and not np.isnan(index[~late]).any()
        route = rows.keys.arrays["route"][rows.rows.key]
        for one, number, well in zip(route, index, (result.outputs.flag == 0) & ~late, strict=True):
            if well:
                found.setdefault(int(one), []).append(number)
    for key, numbers in found.items():
        assert numbers == list(range(1, len(numbers) + 1)), key


def test_a_late_row_is_refused_or_taken_as_the_policy_says() -> None:
    kernel = kalman.build(DEFINITION)
    layout = build_state_layout(INTEGER.kind, kernel.size)
    one = np.zeros(1, np.int64)
    y = np.ones((2, 1))
    first = filter_step(
        RowFilter(kernel, UNIT),
        layout,
        layout.empty(),
        unpack_rows([packet(INTEGER, one, one + 5_000_000, y)], INTEGER),
    )
    late = unpack_rows([packet(INTEGER, one, one + 4_000_000, y)], INTEGER)
    refused = filter_step(RowFilter(kernel, UNIT), layout, first.records, late)
    assert refused.outputs.late.all()
    np.testing.assert_array_equal(refused.records.arrays["values"], first.records.arrays["values"])
    taken = filter_step(RowFilter(kernel, UNIT), layout, first.records, late, apply_late=True)
    assert not taken.outputs.late.any()
    assert taken.records.arrays["count"][0] == 2
    assert taken.records.arrays["event_time"][0] == 5_000_000
    at_once = unpack_rows([packet(INTEGER, one, one + 5_000_000, y)], INTEGER)
    expected = filter_step(RowFilter(kernel, UNIT), layout, first.records, at_once)
    np.testing.assert_array_equal(taken.records.arrays["values"], expected.records.arrays["values"])


def test_a_key_whose_only_row_was_refused_gets_no_state() -> None:
    kernel = kalman.build(DEFINITION)
    layout = build_state_layout(INTEGER.kind, kernel.size)
    keys, time = np.array([1, 2]), np.zeros(2, np.int64)
    y = np.array([[np.inf, 1.0], [1.0, 1.0]])
    result = filter_step(
        RowFilter(kernel, UNIT),
        layout,
        layout.empty(),
        unpack_rows([packet(INTEGER, keys, time, y)], INTEGER),
    )
    np.testing.assert_array_equal(result.records.arrays["route"], compute_routes(np.array([2])))
    assert sorted(result.outputs.flag.tolist())[0] == 0
    assert sorted(result.outputs.flag.tolist())[1] > 0


def test_estimates_are_packed_for_accepted_rows_alone() -> None:
    kernel = kalman.build(DEFINITION)
    layout = build_state_layout(TEXT.kind, kernel.size)
    one = np.zeros(1, np.int64)
    y = np.ones((2, 1))
    first = filter_step(
        RowFilter(kernel, UNIT),
        layout,
        layout.empty(),
        unpack_rows([packet(TEXT, one, one + 5_000_000, y)], TEXT),
    )
    keys, time = np.array([0, 0, 3]), np.array([4_000_000, 6_000_000, 1_000_000])
    rows = unpack_rows([packet(TEXT, keys, time, np.ones((2, 3)))], TEXT)
    result = filter_step(RowFilter(kernel, UNIT), layout, first.records, rows)
    fmt = EstimateFormat(TEXT.kind, 2, diagonal=True, extra=())
    ((count, payload),) = pack_estimates(fmt, rows, result.outputs)
    read = fmt.layout.decode(payload)
    assert count == read.size == 2
    assert read.text is not None
    assert sorted(read.text.to_pylist()) == ["k0", "k3"]
    assert sorted(read.arrays["time"].tolist()) == [1_000_000, 6_000_000]
    kept = np.flatnonzero(~result.outputs.late)
    np.testing.assert_array_equal(read.arrays["covariance"], result.outputs.covariance[[0, 2]][:, kept])


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_packed_triangles_unfold(n: int) -> None:
    full = np.arange(n * n).reshape(n, n)
    full = full + full.T
    packed = full[np.tril_indices(n)]
    np.testing.assert_array_equal(packed[locate_packed_full(n)].reshape(n, n), full)
    np.testing.assert_array_equal(packed[locate_packed_diagonal(n)], np.diag(full))


def test_states_of_32_bits_go_through_blocks_and_snapshots_without_a_further_loss() -> None:
    """Cut into calls with a block stored between them, it is one call: what is stored is what the filter had."""
    definition = {
        "states": ["level"],
        "measurement": ["y"],
        "process": {"kind": "random_walk", "variance": 1.0},
        "observation": {"R": [[2.0]]},
        "initial": {"mean": [0.1], "covariance": [[3.3]]},
        "storage": {"dtype": "float32"},
    }
    kernel = kalman.build(definition)
    kind = KeyKind(("k",), ("string",), False)
    stored = build_state_format(
        "m", 1, ["level"], kernel.fields, kind, kernel.size, find_storage_dtype(kernel)
    )
    wide = build_state_format("m", 1, ["level"], kernel.fields, kind, kernel.size)
    rng = np.random.default_rng(2)

    def rows(numbers: list[int], times: list[int]) -> KeyedRows:
        route = np.array(numbers, np.uint64) << np.uint64(33)
        arrays = {"route": route, "check": np.zeros(len(numbers), np.int64)}
        keys = Records(arrays, pa.array([f"key {n}" for n in numbers]))
        key, time = np.repeat(np.arange(len(numbers)), len(times)), np.tile(np.array(times), len(numbers))
        return KeyedRows(
            keys, kalman.SortedRows(key, time, rng.normal(size=(1, len(key))), np.empty((0, len(key))))
        )

    parts = [rows([1, 2, 5], [0, 1, 2]), rows([1, 3, 5], [3, 4])]
    known = stored.layout.empty()
    advanced = filter_step(RowFilter(kernel, 1.0), stored.layout, known, parts[0])
    for part in parts:
        advanced = filter_step(RowFilter(kernel, 1.0), stored.layout, known, part)
        block = stored.encode(advanced.records)
        assert len(block) < len(wide.encode(advanced.records))
        known = stored.decode(block)
        assert known.arrays["values"].dtype == np.float32
        np.testing.assert_array_equal(known.arrays["values"], advanced.records.arrays["values"])
    for number in (1, 3, 5):
        mine = [(p, p.keys.arrays["route"] == np.uint64(number) << np.uint64(33)) for p in parts]
        masks = [here[p.rows.key] for p, here in mine]
        y = np.concatenate([p.rows.y[:, mask] for (p, _), mask in zip(mine, masks, strict=True)], axis=1)
        time = np.concatenate([p.rows.time[mask] for (p, _), mask in zip(mine, masks, strict=True)])
        whole = kalman.SortedRows(np.zeros(len(time), np.int64), time, y, np.empty((0, len(time))))
        final, _ = kalman.run(kernel, kalman.initial_states(kernel, 1), whole, 1.0)
        at = known.arrays["route"] == np.uint64(number) << np.uint64(33)
        np.testing.assert_array_equal(known.arrays["values"][:, at], final.values)
    with pytest.raises(StateMismatch, match="numbers"):
        stored.decode(wide.encode(advanced.records))
    (snapshot,) = build_state_rows(kernel, known)
    assert snapshot.column("mean")[0].as_py() == known.arrays["values"][:1, 0].tolist()
