"""The local copy of a bucket's states proves what it is: a damaged one counts as none."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jobs.state import key_states, local_copy
from jobs.state.block_store import Blocks
from jobs.state.encoding.keys import KeyKind
from jobs.state.encoding.packets import Records, merge_records
from jobs.state.key_states import MARK, Mark
from jobs.state.local_copy import LocalCopy
from tests.jobs.state.test_key_states import (
    KINDS,
    Memory,
    apply,
    begun,
    by_key,
    folded,
    form,
    opened,
    records,
)

KEYS = 800


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> KeyKind:
    return KINDS[request.param]


def flip_a_bit(folder: Path, rng: np.random.Generator) -> str:
    """Flip a random bit of a random file of a copy, and return which."""
    files = sorted(path for path in folder.iterdir() if path.stat().st_size)
    path = files[rng.integers(len(files))]
    at, bit = int(rng.integers(path.stat().st_size)), int(rng.integers(8))
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
    return f"bit {bit} of byte {at} of {path.name}"


@pytest.mark.parametrize("seed", range(6))
def test_a_flipped_bit_anywhere_in_a_copy_changes_no_state_and_adds_or_loses_no_key(
    kind: KeyKind, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_states, "FEW", 8)
    rng, state, blocks = np.random.default_rng(seed), form(kind), 16
    folder = tmp_path / "q" / "0"
    store = Memory()
    Blocks(store, state, blocks).add(records(kind, np.arange(KEYS), 0))
    alone = Memory(store.values)  # the oracle: blocks alone
    every = records(kind, np.arange(2 * KEYS), 0).arrays["route"]
    flips = []
    for stamp in range(1, 22):
        keys = np.unique(np.append(rng.choice(KEYS, 40), rng.integers(KEYS, KEYS + 20 * stamp, 5)))
        new = records(kind, keys, stamp)
        flip = stamp > 5 and rng.random() < 0.7
        before = rng.random() < 0.5
        if flip and before:
            flips.append(flip_a_bit(folder, rng))
        states = opened(store, state, blocks, folder)
        present, known = states.load(new.arrays["route"])
        if flip and not before:
            flips.append(f"after reading, {flip_a_bit(folder, rng)}")
        states.save(present, _replaced(known, new))
        apply(opened(alone, state, blocks), new)
        if stamp % 3 == 0:
            assert folded(store, state) == folded(alone, state), flips
            reader = opened(store, state, blocks, folder)
            _, found = reader.load(every)
            reader.close()
            assert by_key(found) == folded(alone, state), flips
    assert len(flips) > 5


def _replaced(known: Records, new: Records) -> Records:
    """Return known records with those of some keys replaced or added."""
    wanted = by_key(new)
    rest = np.array([key not in wanted for key in by_key(known)], bool)
    return merge_records(known.take(np.flatnonzero(rest)), new) if rest.any() else new


def test_a_copy_in_which_many_bytes_are_wrong_is_made_anew(kind: KeyKind, tmp_path: Path) -> None:
    state, blocks, folder = form(kind), 16, tmp_path / "q" / "0"
    rng = np.random.default_rng(5)
    store, truth = begun(kind, state, blocks)
    for stamp in range(1, 30):
        if stamp > 5:
            files = sorted(path for path in folder.iterdir() if path.stat().st_size)
            path = files[stamp % len(files)]
            if stamp % 2:  # a page that was never written
                with path.open("r+b") as file:
                    file.seek(int(rng.integers(path.stat().st_size)) // 512 * 512)
                    file.write(bytes(min(512, path.stat().st_size - file.tell())))
            else:
                path.write_bytes(rng.bytes(path.stat().st_size))
        new = records(kind, np.arange(stamp, 4000 + stamp, 97), stamp)
        apply(opened(store, state, blocks, folder), new)
        truth.update(by_key(new))
        assert folded(store, state) == truth


def test_states_with_the_same_token_are_the_same(
    kind: KeyKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_states, "FEW", 8)
    monkeypatch.setattr(key_states, "MOST_CHANGES", 6)
    monkeypatch.setattr(key_states, "JOINED", 3)
    rng, state, blocks = np.random.default_rng(3), form(kind), 16
    store, _ = begun(kind, state, blocks, keys=1000)
    known: dict[bytes, dict[int, bytes]] = {}
    repeated = 0
    folders = [tmp_path / name / "q" / "0" for name in ("a", "b")]
    for stamp in range(1, 30):
        new = records(kind, np.unique(rng.choice(1100, 300 if rng.random() < 0.1 else 30)), stamp)
        attempts = []
        for folder in (
            folders[0],
            folders[0],
            folders[1],
            None,
            None,
        ):  # with a copy, with one that is ahead, ...
            attempt = Memory(store.values)
            apply(opened(attempt, state, blocks, folder), new)
            attempts.append(attempt)
            if MARK in attempt.values:
                token = Mark.decode(attempt.values[MARK]).token
                repeated += token in known
                assert known.setdefault(token, attempt.values) == attempt.values
        reached = [folded(one, state) for one in attempts]
        assert all(one == reached[0] for one in reached)
        store = attempts[rng.integers(5)]
    assert repeated >= 29  # at least the two without a copy


def test_states_that_differ_before_the_first_mark_have_tokens_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_states, "FEW", 0)
    kind = KINDS["integer"]
    state, tokens = form(kind), []
    for first in (1, 2):
        store = Memory()
        Blocks(store, state, 4).add(records(kind, np.arange(0, 400), first))
        apply(opened(store, state, 4, tmp_path / str(first) / "q" / "0"), records(kind, np.arange(40), 9))
        tokens.append(Mark.decode(store.values[MARK]).token)
    assert tokens[0] != tokens[1]


COPIES = """
import os, signal, sys
from pathlib import Path
import numpy as np
from jobs.state.local_copy import LocalCopy
from tests.jobs.state.test_key_states import KINDS, form, records
if os.fork() == 0:  # a worker of an executor, which is its parent
    kind = KINDS["integer"]
    found = records(kind, np.arange(100), 1)
    copy = LocalCopy.create(Path(sys.argv[1]), form(kind).layout, 4, 100, [found])
    copy.seal(b"1" * 16)
    print("made", flush=True)
    sys.stdin.read()  # has the copy until then
    os._exit(0)
signal.pause()
"""


def executor(folder: Path) -> subprocess.Popen[str]:
    """Start a process whose child makes a copy, and has it as long as its input is open."""
    process = subprocess.Popen(
        [sys.executable, "-c", COPIES, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "made\n"
    return process


def test_the_next_copy_removes_those_of_killed_executors_and_no_others(tmp_path: Path) -> None:
    names = ("killed", "alive", "elsewhere", "unknown")
    folders = {name: tmp_path / f"blockmgr-{name}" / "kalman-states" / "q" / "0" for name in names}
    killed, alive = executor(folders["killed"]), executor(folders["alive"])
    folders["long ago"] = tmp_path / "blockmgr-long-ago" / "kalman-states" / "q" / "0"
    for name in ("elsewhere", "unknown", "long ago"):
        folders[name].mkdir(parents=True)
        (folders[name] / "header").write_bytes(b"")
    (folders["unknown"].parents[1] / "owner").write_text("5")
    os.utime(folders["long ago"] / "header", (0, 0))
    (folders["elsewhere"].parents[1] / "owner").write_text('["another machine", "pid:[1]", 1, 1.0]')
    own = tmp_path / "blockmgr-own" / "kalman-states" / "q" / "0"

    def make() -> None:
        kind = KINDS["integer"]
        copy = LocalCopy.create(own, form(kind).layout, 4, 100, [records(kind, np.arange(100), 1)])
        assert copy is not None
        copy.close()

    killed.send_signal(signal.SIGKILL)
    killed.wait()
    make()
    assert folders["killed"].exists()  # its worker lives, and has the copy
    assert killed.stdin is not None
    killed.stdin.close()
    header = folders["killed"] / "header"
    wait_until(lambda: is_free(header))
    make()
    assert not folders["killed"].parents[1].exists()
    assert not folders["long ago"].exists()
    assert all((folders[name] / "header").exists() for name in names[1:])
    alive.kill()
    alive.wait()


def test_folders_that_others_could_have_made_are_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    (precious / "q" / "0").mkdir(parents=True)
    (precious / "q" / "0" / "header").write_bytes(b"")
    os.utime(precious / "q" / "0" / "header", (0, 0))
    copies = tmp_path / "local" / "blockmgr-own" / "kalman-states"
    copies.mkdir(parents=True)
    trap = tmp_path / "local" / "blockmgr-trap"
    trap.mkdir()
    (trap / "kalman-states").symlink_to(precious)
    (tmp_path / "local" / "blockmgr-link").symlink_to(trap)
    local_copy.remove_abandoned(copies)
    assert (precious / "q" / "0" / "header").exists()


def wait_until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_free(header: Path) -> bool:
    with header.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_a_bit_of_the_header_that_is_flipped_makes_the_copy_one_of_none(tmp_path: Path) -> None:
    kind = KINDS["integer"]
    state, blocks, folder = form(kind), 16, tmp_path / "q" / "0"
    store, _ = begun(kind, state, blocks)
    for stamp in range(1, 8):
        apply(opened(store, state, blocks, folder), records(kind, np.arange(stamp, 4000, 97), stamp))
    mark, path = Mark.decode(store.values[MARK]), folder / "header"
    assert mark.kept > 0
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert LocalCopy.open(folder, state.layout, blocks, mark.token) is None
    path.write_bytes(whole)
    copy = LocalCopy.open(folder, state.layout, blocks, mark.token)
    assert copy is not None
    copy.close()
