"""Each guard matters: without it, the simulation finds a history that breaks the promise, and prints it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest

from jobs.landing.file_landing import FileLanding
from jobs.lineage import generations, leases, promotion, start_point
from jobs.lineage.fencing import Fence
from jobs.lineage.inputs_table import PROPERTY, InputPins
from jobs.snapshots import store
from jobs.state.encoding.packets import OutputPacket
from jobs.storage import table_log
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.part_files import PartFile
from jobs.storage.row_changes import delete_rows
from jobs.storage.table_log import FileTable
from jobs.streaming import exporting
from jobs.streaming.micro_batch import MicroBatchWriter
from jobs.streaming.written_files import WrittenPart
from tests.protocol import actors, memory_delta, memory_log, memory_state, scenarios, world
from tests.protocol.data_path import measure
from tests.protocol.explorer import Found, Scenario, explore
from tests.protocol.memory_files import MemoryFiles

pytestmark = pytest.mark.usefixtures("simulation")


@dataclass(frozen=True)
class Guard:
    """A guard, how it is taken out, the scenario that shows it, and the invariant that breaks."""

    name: str
    without: Callable[[], contextlib.AbstractContextManager[Any]]
    scenario: Scenario
    breaks: str
    depth: int = 1
    faults: tuple[str, ...] | None = None


def _patched(target: Any, name: str, instead: Any) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    return lambda: mock.patch.object(target, name, instead)


def _nothing(*arguments: Any, **options: Any) -> None:
    return None


@contextlib.contextmanager
def _without_transactions(prefix: str) -> Iterator[None]:
    """Commit rows whether or not the table has their transaction, of those with this prefix."""
    commit, is_due = FileTable.commit, FileTable.is_due

    def plain(self: FileTable, parts: Any, transaction: Any, *more: Any) -> Any:
        kept = None if transaction and transaction[0].startswith(prefix) else transaction
        return commit(self, parts, kept, *more)

    def due(self: FileTable, transaction: Any) -> bool:
        return transaction[0].startswith(prefix) or is_due(self, transaction)

    with mock.patch.object(FileTable, "commit", plain), mock.patch.object(FileTable, "is_due", due):
        yield


@contextlib.contextmanager
def _without_transactions_of_files() -> Iterator[None]:
    """Commit the rows of a file whether or not the table has its transaction."""

    def plain(self: FileTable, parts: Any, transactions: Any, *more: Any) -> Any:
        return self.commit(parts, None, *more)

    with mock.patch.object(FileTable, "commit_for_all", plain):
        yield


@contextlib.contextmanager
def _dead_files() -> Iterator[None]:
    """Commit every file of a micro-batch's estimates, those of tasks whose driver has died among them."""
    added = MicroBatchWriter._add_files

    def all_there(self: Any, parts: Any, packets: Any, batch_id: int) -> Any:
        folder, wanted = self.files.table.path, (self.generation.generation, batch_id)
        found = {
            path.removeprefix(f"{folder}/"): len(kept.detail)
            for path, kept in world.current().parts.items()
            if path.startswith(f"{folder}/")
            and {(row["generation"], row["batch_id"]) for row in kept.detail} == {wanted}
        }
        files = [PartFile(name, 0, rows, 0, "{}") for name, rows in found.items()]
        return added(
            self, [WrittenPart(OutputPacket.ESTIMATES_FILE, 0, one) for one in files], packets, batch_id
        )

    with mock.patch.object(MicroBatchWriter, "_add_files", all_there):
        yield


@contextlib.contextmanager
def _any_epoch() -> Iterator[None]:
    """Let the lease's conditions hold whatever the epoch is."""
    update = leases.update

    def without(warehouse: Any, rows: dict[str, Any], values: dict[str, Any]) -> None:
        update(warehouse, {name: one for name, one in rows.items() if name != "epoch"}, values)

    with mock.patch.object(leases, "update", without):
        yield


@contextlib.contextmanager
def _any_release() -> Iterator[None]:
    """Let a driver release the lease of its generation whoever holds it."""

    def release(warehouse: Any, lease: Any, how: str, error: str | None = None) -> None:
        leases.update(warehouse, {"generation": lease.generation.generation}, {"owner": None})

    with mock.patch.object(leases, "release", release):
        yield


@contextlib.contextmanager
def _any_version() -> Iterator[None]:
    """Let a commit be made on top of whatever others have committed since the rows were seen."""
    properties = table_log._build_properties

    def patient(*arguments: Any) -> Any:
        return replace(properties(*arguments), max_commit_retries=15)

    with mock.patch.object(table_log, "_build_properties", patient):
        yield


@contextlib.contextmanager
def _without_the_last_commit() -> Iterator[None]:
    """Write checkpoints of a log that lack the commit that they are named after."""

    def create_checkpoint(self: Any) -> None:
        before = memory_delta.commit_at(self.path, self.base.version - 1)
        memory_log.put_checkpoint(self.path, replace(before, version=self.base.version))

    with (
        mock.patch.object(memory_log.MemoryLog, "create_checkpoint", create_checkpoint),
        mock.patch.object(table_log, "_read_checkpoint_interval", lambda log: 1),
    ):
        yield


@contextlib.contextmanager
def _lagging_listing() -> Iterator[None]:
    """Let a store list a file of a checkpoint only when a later one is there."""
    names = MemoryFiles.names

    def late(self: MemoryFiles, folder: str) -> list[str]:
        found = names(self, folder)
        return found[:-1] or found if folder in ("commits", "offsets") else found

    with mock.patch.object(MemoryFiles, "names", late):
        yield


@contextlib.contextmanager
def _never_driven() -> Iterator[None]:
    """Let a driver take a lease that another one holds and renews."""
    with (
        mock.patch.object(leases, "refuse_if_driven", _nothing),
        mock.patch("jobs.supervision.driver_log.DriverIdentity.is_alive_after_waiting", lambda *_: False),
    ):
        yield


@contextlib.contextmanager
def _manifest_first() -> Iterator[None]:
    """Commit a snapshot's manifest before its rows."""

    def write(warehouse: Any, manifest: Any, states: Any, held: Any = None, learned: Any = None) -> Any:
        count, checksum, total = measure(states)
        version = warehouse.latest_version("snapshots") + 1 if warehouse.exists("snapshots") else 1
        found = {"key_count": count, "checksum": checksum, "rows": total, "snapshots_version": version}
        made = store._commit(warehouse, dataclasses.replace(manifest, **found))
        store.write_states(warehouse, manifest, states)
        return made

    with mock.patch("jobs.batch.pretraining.write", write):
        yield


@contextlib.contextmanager
def _rows_go_first() -> Iterator[None]:
    """Remove a snapshot's rows before its manifest is marked."""

    def remove(warehouse: Any, model: str, names: list[str]) -> None:
        if names:
            delete_rows(warehouse, "snapshots", [[("snapshot_id", "in", names)]])
        remove_marked(warehouse, model, names)

    remove_marked = store.remove
    with mock.patch.object(store, "remove", remove):
        yield


@contextlib.contextmanager
def _marks_again() -> Iterator[None]:
    """Let a replay mark rows that another replay has marked already."""
    merge = memory_log.MemoryLog.merge

    def always(self: Any, source: Any, predicate: str, **more: Any) -> Any:
        return merge(self, source, predicate.removesuffix(" AND t.status IS NULL"), **more)

    with mock.patch.object(memory_log.MemoryLog, "merge", always):
        yield


@contextlib.contextmanager
def _endless_parents() -> Iterator[None]:
    """Let all micro-batches of a parent count, also those after its successor began."""
    known = generations.read_live_lineage

    def whole(warehouse: Any, model: str) -> Any:
        return [one._replace(last_batch=None) for one in known(warehouse, model)]

    with mock.patch.object(generations, "read_live_lineage", whole):
        yield


def _only_the_last(generation: Any, before: Any) -> int:
    """Suspect the last driver alone of being frozen."""
    return 0 if before is None or before.ended_at is not None else before.epoch


def _unpinned(self: InputPins, batch: int) -> Any:
    """Let a micro-batch use the newest inputs, whatever it used before."""
    version = self._table.newest()
    self._spark.sparkContext.setLocalProperty(PROPERTY, f"{self._files.root}/{self._packet(version)}")
    return version


@contextlib.contextmanager
def _any_copy() -> Iterator[None]:
    """Read a local copy whatever state it belongs to."""
    open_copy = memory_state.QueryState._open_copy
    with mock.patch.object(memory_state.QueryState, "_open_copy", lambda self: self._copy or open_copy(self)):
        yield


GUARDS = (
    Guard(
        "the fence that a later driver raises",
        _patched(Fence, "_raise_fence", _nothing),
        scenarios.TAKE_OVER,
        "each row once in the live estimates",
        depth=2,
        faults=("freeze",),
    ),
    Guard(
        "the number of a transaction, which a commit compares",
        _patched(memory_log.MemoryLog, "transaction_version", _nothing),
        scenarios.TAKE_OVER,
        "each row once in the live estimates",
        depth=2,
        faults=("freeze",),
    ),
    Guard(
        "the names of the files whose rows have reached the driver",
        _dead_files,
        scenarios.TAKE_OVER,
        "each row once in the live estimates",
        depth=2,
    ),
    Guard(
        "the check of the fence after a write",
        _patched(Fence, "check", _nothing),
        scenarios.TAKE_OVER,
        "each row once in the live estimates",
        depth=2,
        faults=("freeze", "crash"),
    ),
    Guard(
        "the look-up of a micro-batch that an earlier driver may have written",
        _patched(Fence, "_has_matching_rows", lambda *arguments: False),
        scenarios.TAKE_OVER,
        "each row once in the live estimates",
    ),
    Guard(
        "the fence behind a driver that ended cleanly",
        _patched(leases, "_find_suspect_epoch", _only_the_last),
        scenarios.STOPPED_BETWEEN,
        "each row once in the live estimates",
        depth=2,
    ),
    Guard(
        "the content of a landed file",
        _patched(FileLanding, "_find_starts", lambda *arguments: (0, 0)),
        scenarios.GROWN,
        "each row lands once",
    ),
    Guard(
        "the transaction of a landed file",
        _without_transactions_of_files,
        scenarios.INGEST,
        "each row lands once",
    ),
    Guard(
        "the transaction of a replay",
        lambda: _without_transactions("replay-"),
        scenarios.REPLAY,
        "each row lands once",
    ),
    Guard(
        "a replay marks only what no other has marked",
        _marks_again,
        scenarios.REPLAY,
        "each row lands once",
    ),
    Guard(
        "a replay marks rows right after the version that it has seen",
        _any_version,
        scenarios.REPLAY,
        "each row lands once",
    ),
    Guard(
        "the epoch in the conditions of a lease",
        _any_epoch,
        scenarios.TAKE_OVER,
        "only its holder releases a lease",
        depth=2,
    ),
    Guard(
        "the epoch that a release compares",
        _any_release,
        scenarios.TAKE_OVER,
        "only its holder releases a lease",
        depth=2,
        faults=("freeze", "run"),
    ),
    Guard(
        "a driver is refused while another gives signs of life",
        _never_driven,
        scenarios.TAKE_OVER,
        "a driver that runs keeps its lease",
    ),
    Guard(
        "the comparison of statuses inside a change of the generations",
        _patched(generations, "_check_unchanged", _nothing),
        scenarios.SWITCHES,
        "one live generation",
    ),
    Guard(
        "a change of rows is committed right after the version that it has seen",
        _any_version,
        scenarios.SWITCHES,
        "one live generation",
    ),
    Guard(
        "the identity of a commit, by which it is known again",
        _patched(table_log.FileTable, "_made", lambda *arguments: True),
        scenarios.BLUE_GREEN,
        "a promotion takes no estimate away",
    ),
    Guard(
        "the commit that a checkpoint of a log is named after",
        _without_the_last_commit,
        scenarios.SWITCHES,
        "one live generation",
    ),
    Guard(
        "a listing that shows what was written",
        _lagging_listing,
        scenarios.TAKE_OVER,
        "recovery is possible",
    ),
    Guard(
        "the refusal of a shadow that lags",
        _patched(promotion, "has_reached", lambda *arguments: True),
        scenarios.LAGGING,
        "a promotion takes no estimate away",
    ),
    Guard(
        "the last micro-batch of a parent",
        _endless_parents,
        scenarios.BLUE_GREEN,
        "each row once in the live estimates",
    ),
    Guard(
        "the refusal of a damaged checkpoint",
        _patched(start_point, "refuse_damaged", _nothing),
        scenarios.DAMAGED,
        "each row once in the live estimates",
    ),
    Guard(
        "the pin of a micro-batch's inputs",
        _patched(InputPins, "take", _unpinned),
        scenarios.PINNED,
        "a micro-batch uses one version of the inputs",
    ),
    Guard(
        "a snapshot's rows before its manifest",
        _manifest_first,
        scenarios.PRETRAIN,
        "a manifest implies its rows",
    ),
    Guard(
        "a generation is marked as removed before its checkpoint goes",
        _patched(generations, "remove", _nothing),
        scenarios.MAINTAIN,
        "what a startable generation needs is kept",
    ),
    Guard(
        "a snapshot's manifest is marked as removed before its rows go",
        _rows_go_first,
        scenarios.MAINTAIN,
        "a manifest implies its rows",
    ),
    Guard(
        "the names of a state's files, which no other attempt has",
        _patched(actors, "stream", actors.former_stream),
        scenarios.STATES,
        "each row once in snapshot + state",
        depth=2,
    ),
    Guard(
        "the token of a local copy of the states",
        _any_copy,
        scenarios.STATES,
        "a committed micro-batch is written",
    ),
    Guard(
        "the format of states in the settings of every session",
        _patched(actors, "session_settings", dict),
        scenarios.FIRST_START,
        "its states would be of format 1",
    ),
    Guard(
        "the hand-over of a generation whose state has format 1",
        _patched(Checkpoint, "has_states_of_format_1", lambda checkpoint: False),
        scenarios.TAKEN_UP,
        "recovery is possible",
    ),
    Guard(
        "the comparison of a state of format 1 with its estimates",
        _patched(exporting, "refuse_missing_rows", _nothing),
        scenarios.HURT,
        "each row once in snapshot + state",
    ),
)


LONG = "the fence behind a driver that ended cleanly"
"""A guard whose history is found after many seconds."""


@pytest.mark.parametrize(
    "guard",
    [pytest.param(one, marks=pytest.mark.slow if one.name == LONG else []) for one in GUARDS],
    ids=[one.name.replace(" ", "-") for one in GUARDS],
)
def test_without_it_the_promise_breaks(guard: Guard, record_property: Callable[[str, object], None]) -> None:
    scenario = replace(guard.scenario, faults=guard.faults or guard.scenario.faults)
    with guard.without(), pytest.raises(Found) as found:
        explore(scenario, guard.depth, 3000)
    print(f"\nwithout {guard.name}:\n{found.value}")
    assert guard.breaks in str(found.value.violation)
    record_property("protocol", f"guard taken out, and missed: {guard.name}")
