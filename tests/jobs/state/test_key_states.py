"""States read and written by the key: whatever is lost on the way, they are those that blocks alone would hold."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pytest

from jobs.state import key_states, local_copy
from jobs.state.block_format import StateFormat, StateMismatch, build_state_format
from jobs.state.block_store import Blocks
from jobs.state.encoding import sorted_run
from jobs.state.encoding.keys import KeyKind
from jobs.state.encoding.packets import Records, merge_records
from jobs.state.encoding.routing import compute_blocks, compute_routes
from jobs.state.key_states import CHANGES_FROM, MARK, BucketStates, Entries, Mark
from jobs.state.local_copy import LocalCopy

SIZE = 5
KINDS = {"integer": KeyKind(("id",), ("bigint",), True), "text": KeyKind(("id",), ("string",), False)}


class Memory:
    """A store in memory that counts what is asked of it."""

    def __init__(self, values: dict[int, bytes] | None = None) -> None:
        self.values = dict(values or {})
        self.read = self.written = 0

    def get(self, number: int) -> bytes | None:
        value = self.values.get(number)
        self.read += len(value or b"")
        return value

    def put(self, number: int, value: bytes) -> None:
        self.written += len(value)
        self.values[number] = value

    def get_all(self, numbers: Sequence[int]) -> Iterable[bytes | None]:
        return [self.get(number) for number in numbers]

    def put_all(self, values: Iterable[tuple[int, bytes]]) -> None:
        for number, value in values:
            self.put(number, value)

    def remove(self, number: int) -> None:
        del self.values[number]

    def items(self) -> Iterator[tuple[int, bytes]]:
        for number, value in list(self.values.items()):
            self.read += len(value)
            yield number, value


def form(kind: KeyKind) -> StateFormat:
    return build_state_format("m", 1, ["a"], {"mean": (1,)}, kind, SIZE)


def records(kind: KeyKind, keys: np.ndarray, stamp: int) -> Records:
    """States of distinct keys at a stamp, ordered by route. Every 50th text key shares its route with the next one."""
    route = compute_routes(keys)
    arrays = {
        "event_time": np.full(len(keys), stamp),
        "count": keys % 7 + stamp,
        "log_likelihood": keys / 3 - stamp,
        "values": np.arange(SIZE)[:, None] + keys * 1.5 + stamp,
    }
    text = None
    if not kind.integer:
        route = compute_routes(np.where(keys % 50 == 1, keys - 1, keys))
        arrays["check"] = keys * 31
        text = pa.array([f"key {key}" * (key % 3 + 1) for key in keys.tolist()], pa.string())
    found = Records({"route": route, **arrays}, text)
    return found.take(np.argsort(route, kind="stable"))


def by_key(found: Records) -> dict[tuple, tuple]:
    """Return all that is known of each key."""
    arrays = {name: array.tolist() for name, array in found.arrays.items() if array.ndim == 1}
    texts = [None] * found.size if found.text is None else found.text.to_pylist()
    check = arrays.get("check", arrays["route"])
    values = found.arrays["values"].T.tolist()
    rows = zip(
        arrays["route"], check, arrays["event_time"], arrays["count"], arrays["log_likelihood"], values, texts,
        strict=True,
    )  # fmt: skip
    return {(row[0], row[1]): (*row[2:5], tuple(row[5]), row[6]) for row in rows}


def opened(store: Memory, state: StateFormat, blocks: int, folder: Path | None = None) -> BucketStates:
    return BucketStates(store, state, blocks, lambda: folder)


def apply(states: BucketStates, new: Records) -> None:
    """Do what a micro-batch does: load, replace or add the records of some keys, save."""
    present, known = states.load(new.arrays["route"])
    kept = by_key(known)
    wanted = by_key(new)
    rest = np.array([key not in wanted for key in kept], bool)
    joined = merge_records(known.take(np.flatnonzero(rest)), new) if rest.any() else new
    states.save(present, joined)


def folded(store: Memory, state: StateFormat) -> dict[tuple, tuple]:
    return by_key(Entries.of(store.items()).states(state))


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> KeyKind:
    return KINDS[request.param]


@pytest.mark.parametrize("seed", range(3))
def test_any_history_of_micro_batches_losses_and_retries_leaves_the_states_of_blocks_alone(
    kind: KeyKind, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_states, "FEW", 8)
    monkeypatch.setattr(key_states, "MOST_CHANGES", 12)
    monkeypatch.setattr(key_states, "JOINED", 6)
    monkeypatch.setattr(local_copy, "SMALL_RUN", 40)
    rng = np.random.default_rng(seed)
    state, blocks = form(kind), int(rng.integers(1, 40))
    store, folders = Memory(), [tmp_path / "q" / "0", tmp_path / "q" / "other executor"]
    truth: dict[tuple, tuple] = {}
    # As a new driver and an initial state do: some keys are there before the first micro-batch.
    first = records(kind, np.arange(1500), 0)
    Blocks(store, state, blocks).add(first)
    truth.update(by_key(first))
    kept_changes, whole = 0, 0
    for stamp in range(1, 150):
        dense = rng.random() < 0.08
        count = 1200 if dense else int(rng.integers(1, 30))
        keys = rng.choice(1500 + 8 * stamp, count, replace=False)  # new keys come too
        new = records(kind, np.sort(keys), stamp)
        folder = folders[int(rng.random() < 0.1)]
        if rng.random() < 0.1:  # an attempt that fails: nothing that it wrote to Spark's state counts
            attempt = Memory(store.values)
            apply(opened(attempt, state, blocks, folder), new)
        if rng.random() < 0.05:  # one without a copy: a machine without room for it
            apply(opened(store, state, blocks), new)
        else:
            apply(opened(store, state, blocks, folder), new)
        truth.update(by_key(new))
        kept_changes = max(kept_changes, sum(number >= CHANGES_FROM for number in store.values))
        whole += not any(number >= CHANGES_FROM for number in store.values)
        if stamp % 10 == 0:
            assert folded(store, state) == truth
    assert folded(store, state) == truth
    assert 1 < kept_changes <= 12
    assert whole > 3
    wanted = records(kind, np.arange(1500 + 8 * 149), 0).arrays["route"]
    _, found = opened(store, state, blocks, folders[0]).load(wanted)
    assert by_key(found) == truth


def test_a_sparse_micro_batch_reads_and_writes_its_own_keys(kind: KeyKind, tmp_path: Path) -> None:
    state, blocks, keys = form(kind), 80, 20_000
    store = Memory()
    Blocks(store, state, blocks).add(records(kind, np.arange(keys), 0))
    raw = np.dtype(sorted_run.build_row_type(state.layout)).itemsize + 8 + (15 if not kind.integer else 0)
    rng = np.random.default_rng(1)
    changed, costs = 100, []
    for stamp in range(1, 150):
        states = opened(store, state, blocks, tmp_path / "q" / "0")
        store.read = store.written = 0
        apply(states, records(kind, np.sort(rng.choice(keys, changed, replace=False)), stamp))
        costs.append((store.read, store.written))
    read, written = np.median(np.array(costs[10:]), axis=0)
    assert read <= 100  # the mark alone
    assert written <= 4.5 * changed * raw
    assert np.mean([one for _, one in costs[10:]]) <= 4.5 * changed * raw
    held = sum(len(value) for number, value in store.values.items() if number >= CHANGES_FROM)
    assert held <= 1.1 * keys * raw
    # Without a copy every key costs its block.
    alone = Memory({number: value for number, value in store.values.items() if 0 <= number < blocks})
    apply(opened(alone, state, blocks), records(kind, np.arange(changed) * 7, 1000))
    assert alone.read > 20 * changed * raw


@pytest.mark.parametrize("harm", ["cut", "gone", "erased", "other token", "rows gone"])
def test_a_copy_that_does_not_belong_to_the_state_is_made_anew(
    kind: KeyKind, harm: str, tmp_path: Path
) -> None:
    state, blocks = form(kind), 16
    folder = tmp_path / "q" / "0"
    store, truth = begun(kind, state, blocks)
    for stamp in range(1, 30):
        new = records(kind, np.arange(stamp, 4000, 97), stamp)
        apply(opened(store, state, blocks, folder), new)
        truth.update(by_key(new))
    assert Mark.decode(store.values[MARK]).kept > 0
    header = folder / "header"
    if harm == "cut":
        header.write_bytes(header.read_bytes()[:40])
    elif harm == "gone":
        header.unlink()
    elif harm == "erased":
        header.write_bytes(bytes(16) + header.read_bytes()[16:])
    elif harm == "other token":
        header.write_bytes(os.urandom(16) + header.read_bytes()[16:])
    else:
        for path in folder.glob("base-*.rows"):
            path.unlink()
    new = records(kind, np.arange(0, 4000, 91), 50)
    apply(opened(store, state, blocks, folder), new)
    truth.update(by_key(new))
    assert folded(store, state) == truth
    store.read = 0
    _, found = opened(store, state, blocks, folder).load(new.arrays["route"])
    assert store.read < 100  # it has a copy again
    assert {key: truth[key] for key in by_key(found)} == by_key(found)


def test_while_another_task_has_the_copy_a_micro_batch_does_without(kind: KeyKind, tmp_path: Path) -> None:
    state, blocks = form(kind), 16
    folder = tmp_path / "q" / "0"
    store, truth = begun(kind, state, blocks)

    def run(stamp: int) -> None:
        new = records(kind, np.arange(stamp, 4000, 97), stamp)
        apply(opened(store, state, blocks, folder), new)
        truth.update(by_key(new))

    for stamp in range(1, 20):
        run(stamp)
    with open(folder / "header", "r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        run(20)
        run(21)
        assert Mark.decode(store.values[MARK]).kept == 0  # written to blocks, with all changes
    assert folded(store, state) == truth
    run(22)
    assert folded(store, state) == truth


def begun(
    kind: KeyKind, state: StateFormat, blocks: int, keys: int = 4000
) -> tuple[Memory, dict[tuple, tuple]]:
    """Return a store with the blocks of so many keys, and the records that it has."""
    store, known = Memory(), records(kind, np.arange(keys), 0)
    Blocks(store, state, blocks).add(known)
    return store, by_key(known)


def test_a_full_disk_costs_the_copy_alone(
    kind: KeyKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, blocks = form(kind), 16
    folder = tmp_path / "q" / "0"
    store, truth = begun(kind, state, blocks)
    for stamp in range(1, 20):
        new = records(kind, np.arange(stamp, 4000, 97), stamp)
        apply(opened(store, state, blocks, folder), new)
        truth.update(by_key(new))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sorted_run, "_allocate", full)
    for stamp in range(20, 25):  # new keys need new files
        new = records(kind, np.arange(3990, 4000 + 10 * stamp), stamp)
        apply(opened(store, state, blocks, folder), new)
        truth.update(by_key(new))
    assert folded(store, state) == truth


def test_a_disk_that_is_full_before_the_first_change_loses_no_key_of_a_block(
    kind: KeyKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, blocks = form(kind), 16
    folder = tmp_path / "q" / "0"
    store, truth = begun(kind, state, blocks)
    allocate, made = sorted_run._allocate, []

    def full_later(file: BinaryIO, size: int) -> None:
        """Let the copy be made, and nothing more."""
        made.append(size)
        if len(made) > 4:
            raise OSError(28, "No space left on device")
        allocate(file, size)

    monkeypatch.setattr(sorted_run, "_allocate", full_later)
    new = records(kind, np.arange(0, 4100, 41), 1)  # some keys of each block, and new ones
    apply(opened(store, state, blocks, folder), new)
    truth.update(by_key(new))
    assert len(made) == 5
    assert folded(store, state) == truth


def test_few_reads_of_many_blocks_make_no_copy(tmp_path: Path) -> None:
    kind = KINDS["integer"]
    state, blocks = form(kind), 200
    store, folder = Memory(), tmp_path / "q" / "0"
    Blocks(store, state, blocks).add(records(kind, np.arange(20_000), 0))
    for stamp in range(1, 5):
        apply(opened(store, state, blocks, folder), records(kind, np.arange(40) * stamp, stamp))
    assert MARK not in store.values
    assert not (folder / "header").exists()
    for stamp in range(5, 9):
        apply(opened(store, state, blocks, folder), records(kind, np.arange(40) * stamp, stamp))
    assert MARK in store.values
    assert (folder / "header").exists()


def test_offered_keys_are_absent_only_if_neither_blocks_nor_changes_have_them(tmp_path: Path) -> None:
    kind = KINDS["text"]
    state, blocks = form(kind), 16
    store, folder = Memory(), tmp_path / "q" / "0"
    Blocks(store, state, blocks).add(records(kind, np.arange(4000), 0))
    for stamp in range(1, 20):
        apply(
            opened(store, state, blocks, folder),
            records(kind, np.arange(3990, 4000 + stamp), stamp),
        )
    states = opened(store, state, blocks, folder)
    offered = records(kind, np.arange(3950, 4100), 30)
    new = states.absent(offered)
    assert new.text is not None
    assert offered.text is not None
    assert sorted(new.text.to_pylist()) == sorted(
        text
        for text, key in zip(offered.text.to_pylist(), offered.arrays["check"] // 31, strict=True)
        if key >= 4019
    )
    states.add(new)
    assert len(folded(store, state)) == 4100
    assert states.absent(offered).size == 0


def test_copies_of_queries_that_ended_long_ago_are_removed(tmp_path: Path) -> None:
    old, young = tmp_path / "old" / "0", tmp_path / "young" / "0"
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "header").write_bytes(b"")
    long_ago = (old / "header").stat().st_mtime - 2 * local_copy.ABANDONED_SECONDS
    os.utime(old / "header", (long_ago, long_ago))
    local_copy.remove_abandoned(tmp_path)
    assert not old.exists()
    assert young.exists()


def test_the_bounds_of_blocks_are_those_of_the_routing() -> None:
    rng = np.random.default_rng(3)
    route = np.sort(rng.integers(0, 2**64, 5000, dtype=np.uint64))
    route[0], route[-1] = 0, 2**64 - 1
    for blocks in (1, 2, 3, 7, 256, 9767, 2**31):
        found = compute_blocks(route, blocks)
        low = sorted_run._compute_lowest_route(found, blocks)
        high = sorted_run._compute_lowest_route(found + 1, blocks) - np.uint64(1)
        assert (low <= route).all()
        assert (route <= high).all()
        np.testing.assert_array_equal(compute_blocks(low, blocks), found)
        np.testing.assert_array_equal(compute_blocks(high, blocks), found)


def test_a_damaged_block_is_told_and_leaves_the_copy_to_the_next_task(tmp_path: Path):
    kind = KINDS["integer"]
    state, folder = form(kind), tmp_path / "q" / "0"
    store = Memory()
    apply(opened(store, state, 8), records(kind, np.arange(400), 1))
    whole = dict(store.values)
    last = max(number for number in whole if number < CHANGES_FROM)
    for damaged in (whole[last][:6], b"KSB0" + whole[last][4:]):
        store.values = {**whole, last: damaged}
        states = opened(store, state, 8, folder)
        with pytest.raises(StateMismatch):
            for _ in range(3):  # until it pays to make the copy
                states.load(records(kind, np.arange(400), 2).arrays["route"])
    store.values = whole
    states = opened(store, state, 8, folder)
    apply(states, records(kind, np.arange(400), 2))
    assert LocalCopy.open(folder, state.layout, 8, Mark.decode(store.values[MARK]).token) is not None
    assert folded(store, state) == by_key(records(kind, np.arange(400), 2))


def test_a_copy_that_is_made_of_many_pieces_has_every_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sorted_run, "PIECE", 7)
    monkeypatch.setattr(key_states, "DECODED", 3)
    for name, kind in KINDS.items():
        state, store = form(kind), Memory()
        all_of_them = records(kind, np.arange(500), 1)
        apply(opened(store, state, 16, tmp_path / name / "first"), all_of_them)  # written anew in pieces
        states = opened(store, state, 16, tmp_path / name / "second")  # made from blocks, some at a time
        _, found = states.load(all_of_them.arrays["route"])
        states.close()
        assert by_key(found) == by_key(all_of_them) == folded(store, state)
