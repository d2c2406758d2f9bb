"""Stand-in for Spark's state store (RocksDB with changelogs), and for the values that `BucketStates` puts there.

The state of a partition is a map of numbered values. Version N + 1 is that after micro-batch N; version 0 is empty. An
attempt at a micro-batch loads a version and writes, as the changelog of the next one, what it puts and removes. A
maintenance thread uploads snapshots. A restore reads the newest snapshot and the changelogs after it.

Format 1 has one name a version (`3.changelog`, `3.zip`): the last writer wins. In format 2 the names have an id of the
attempt (`3_<id>.changelog`). The commit of the micro-batch says which id counts, and each changelog names the files of
all versions before it.

What an attempt puts depends on who makes it (`jobs.state.key_states`). With a local copy of the states it is a change,
and the block that has waited longest for its changes. Without one it is whole blocks; all changes are removed, and the
next change gets a number that another attempt may have used.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from pyspark.errors import PySparkException

from jobs.spark.conf import STATE_FORMAT
from jobs.state.key_states import CHANGES_FROM, MARK
from tests.protocol import world
from tests.protocol.memory_files import MemoryFiles

States = dict[str, dict[str, Any]]
"""The state of each key: event time of its last row (microseconds), and the rows that it reflects."""

Values = dict[int, dict[str, Any]]
"""What a store holds: blocks and changes, each the states of some keys, and the mark."""

FORMER = ContextVar("FORMER", default=False)
"""Whether the thread that runs is a driver of a release before 0.3.0, which knows no format but 1."""

FOLDER = "state/0/0"

KEYS_A_BLOCK = 2


def read_format(session: Any) -> int:
    """Return the format in which a session's queries write states; 1 is Spark's own."""
    return int(session.conf.get(STATE_FORMAT, 1))


def read_states(checkpoint: str, batch: int) -> States:
    """Read the states after a committed micro-batch.

    Raises:
        PySparkException: they are gone.
    """
    files = MemoryFiles(checkpoint)
    return merge_states(restore(files, find_names(files, batch + 1, read_committed_id(files, batch))))


def read_committed_id(files: MemoryFiles, batch: int) -> str | None:
    """Return the id of the state that counts after a micro-batch; None in format 1, and before the first."""
    content = None if batch < 0 else files.read(f"commits/{batch}")
    ids = {} if content is None else json.loads(content.splitlines()[1])
    return ids["stateUniqueIds"]["0"][0][0] if ids else None


def find_names(files: MemoryFiles, version: int, unique: str | None) -> list[str]:
    """Return the names of the files of all versions until this one, without their endings."""
    if unique is None:
        return [str(number) for number in range(1, version + 1)]
    return _read(files, f"{version}_{unique}.changelog")["names"]


def restore(files: MemoryFiles, names: list[str]) -> Values:
    """Return the values of the last of these versions: those of its newest snapshot, and all changes after it."""
    there = set(files.names(FOLDER))
    start = max((place for place, name in enumerate(names, 1) if f"{name}.zip" in there), default=0)
    values = _parse_numbers(_read(files, f"{names[start - 1]}.zip")) if start else {}
    for name in names[start:]:
        written = _read(files, f"{name}.changelog")
        _apply(values, _parse_numbers(written["puts"]), written["removes"])
    return values


def _read(files: MemoryFiles, name: str) -> dict[str, Any]:
    content = files.read(f"{FOLDER}/{name}")
    if content is None:
        raise PySparkException(f"CANNOT_LOAD_STATE_STORE: {files.root}/{FOLDER}/{name} is missing")
    return json.loads(content)


def _parse_numbers(values: dict[str, Any]) -> Values:
    return {int(number): value for number, value in values.items()}


def _apply(values: Values, puts: Values, removes: Iterable[int]) -> None:
    for number in removes:
        values.pop(number, None)
    values.update(puts)


def merge_states(values: Values) -> States:
    """Return the state of each key: that of the last change that has it, else that of its block."""
    return {
        key: dict(state)
        for number in sorted(values)
        if number != MARK
        for key, state in values[number].items()
    }


def block_of(key: str) -> int:
    return (ord(key[0]) - ord("a")) // KEYS_A_BLOCK


@dataclass
class LocalCopy:
    """The states of a partition beside the process that writes them; it counts only with the token of the mark.

    lacking: blocks that lack changes, and the first of these.
    """

    token: str | None
    states: States
    lacking: dict[int, int]


@dataclass
class QueryState:
    """The state of a query in one process: the store that it has loaded, and the local copy."""

    checkpoint: str
    format: int
    due: bool = False
    """The version that was last written or loaded has no snapshot of this process."""
    _names: list[str] | None = None
    _values: Values = field(default_factory=dict)
    _before: States = field(default_factory=dict)
    _copy: LocalCopy | None = None
    _loads: int = 0

    def __post_init__(self) -> None:
        self._files = MemoryFiles(self.checkpoint)

    def load(self, batch: int) -> States:
        """Return the states before a micro-batch.

        Raises:
            PySparkException: they are gone, or of the other format.
        """
        if self._names is None or len(self._names) != batch:
            unique = read_committed_id(self._files, batch - 1)
            if batch and self.format != (1 if unique is None else 2):
                raise PySparkException(f"the state of {self.checkpoint} is not of format {self.format}")
            self._names = find_names(self._files, batch, unique)
            self._values = restore(self._files, self._names)
            self._set_due(bool(batch))
        self._copy = self._open_copy()
        self._loads += 1
        self._before = merge_states(self._values) if self._copy is None else self._copy.states
        return {key: dict(state) for key, state in self._before.items()}

    def save(self, states: States) -> None:
        """Write the changelog of the next version."""
        assert self._names is not None
        changed = {key: state for key, state in states.items() if self._before.get(key) != state}
        if self._copy is None:
            puts, removes = self._whole_blocks(changed, states)
        else:
            puts, removes = self._change(self._copy, changed, states)
        name = str(len(self._names) + 1)
        if self.format == 2:
            name += f"_{world.current().new_id()}"
        names = [*self._names, name]
        written = {"names": names, "puts": puts, "removes": removes}
        self._files.write(f"{FOLDER}/{name}.changelog", json.dumps(written, sort_keys=True).encode())
        self._names = names
        _apply(self._values, puts, removes)
        self._set_due(True)

    def commit(self) -> bytes:
        """Return what the commit of a micro-batch says."""
        assert self._names is not None
        if self.format == 1:
            return b"v1\n{}"
        unique = self._names[-1].partition("_")[2]
        return f"v2\n{json.dumps({'stateUniqueIds': {'0': [[unique]]}})}".encode()

    def upload(self) -> None:
        """Upload a snapshot of the version that was last written or loaded, over what has its name."""
        assert self._names is not None
        self.due = False
        self._files.write(
            f"{FOLDER}/{self._names[-1]}.zip", json.dumps(self._values, sort_keys=True).encode()
        )

    def _set_due(self, due: bool) -> None:
        self.due = due
        thread = world.current().thread
        if thread is not None:
            thread.process.maintenance_due = due

    def _open_copy(self) -> LocalCopy | None:
        """Return the copy that has the token of the mark, or make one; a process's first micro-batch has none."""
        token = self._values[MARK]["token"] if MARK in self._values else None
        if self._copy is not None and token is not None and self._copy.token == token:
            return self._copy
        if not self._loads:
            return None
        lacking: dict[int, int] = {}
        for number in sorted(number for number in self._values if number >= CHANGES_FROM):
            for key in self._values[number]:
                lacking.setdefault(block_of(key), number)
        return LocalCopy(token, merge_states(self._values), lacking)

    def _whole_blocks(self, changed: States, states: States) -> tuple[Values, list[int]]:
        """Return what an attempt without a copy writes."""
        changes = [number for number in self._values if number >= CHANGES_FROM]
        puts = _take_blocks(
            {block_of(key) for number in changes for key in self._values[number]} | _find_blocks(changed),
            states,
        )
        if MARK in self._values:
            puts[MARK] = {**self._values[MARK], "token": world.current().new_id()}
        return puts, changes

    def _change(self, copy: LocalCopy, changed: States, states: States) -> tuple[Values, list[int]]:
        """Return what an attempt with a copy writes; bring the copy up to date."""
        following = self._values[MARK]["next"] if MARK in self._values else CHANGES_FROM
        touched = _find_blocks(changed) | set(copy.lacking)
        if sum(block_of(key) in touched for key in states) <= len(changed):  # dense
            puts, lacking = _take_blocks(touched, states), {}
        else:
            swept = min(copy.lacking, key=copy.lacking.__getitem__, default=None)
            puts = {following: changed} | _take_blocks(set() if swept is None else {swept}, states)
            lacking = {block: copy.lacking.get(block, following) for block in touched if block != swept}
            following += 1
        oldest = min(lacking.values(), default=following)
        removes = [number for number in {*self._values, *puts} if CHANGES_FROM <= number < oldest]
        puts = {number: value for number, value in puts.items() if number not in removes}
        copy.token, copy.states, copy.lacking = world.current().new_id(), states, lacking
        puts[MARK] = {"token": copy.token, "next": following}
        return puts, removes


def _find_blocks(states: States) -> set[int]:
    return {block_of(key) for key in states}


def _take_blocks(numbers: set[int], states: States) -> Values:
    return {
        number: {key: state for key, state in states.items() if block_of(key) == number}
        for number in sorted(numbers)
    }
