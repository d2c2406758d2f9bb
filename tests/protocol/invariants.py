"""What must hold after every write, whoever was killed or frozen, and what must hold at the end.

Each invariant reads the tables as they are, not through the code that it judges; only "the live estimates" are by
definition what `jobs.lineage.live.live_estimates` returns.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from jobs.lineage.live import live_estimates
from jobs.snapshots.manifests import GOOD
from tests.protocol import world
from tests.protocol.actors import MODEL, warehouse
from tests.protocol.data_path import STATE_ROWS, measure
from tests.protocol.memory_delta import commit_at, latest
from tests.protocol.memory_files import MemoryFiles
from tests.protocol.memory_frame import Frame
from tests.protocol.memory_state import States, find_names, merge_states, read_states, restore


class Violation(AssertionError):
    """An invariant does not hold."""


def rows_of(table: str) -> list[dict[str, Any]]:
    """Return a table's rows; none if it does not exist."""
    found = latest(f"{world.ROOT}/{table}")
    return [] if found is None else list(found.rows)


def _doubled(names: Iterable[Any]) -> list[Any]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


class Invariants:
    """The invariants of one run; they remember what they have seen."""

    def __init__(self) -> None:
        self.began = any(one["status"] == "live" for one in rows_of("generations"))
        folder = f"{world.ROOT}/checkpoints/"
        names = (path.removeprefix(folder) for path in world.current().files if path.startswith(folder))
        self.planned = {name.split("/")[0] for name in names}
        self._statuses = {one["generation"]: one["status"] for one in rows_of("generations")}
        self._owners = {one["generation"]: one["owner"] for one in rows_of("generations")}
        self._shown = set(live_rows())
        self.checked = 0
        self._reflected: dict[str, list[float]] = {}
        self._remember_snapshots()
        self._by_table: dict[str, list[Callable[[], None]]] = {
            "generations": [
                self.one_live_generation,
                self.only_the_holder_releases,
                self.no_row_goes_by_a_promotion,
                self.no_row_twice_in_live_estimates,
                self.needed_is_kept,
            ],
            f"estimates/{MODEL}": [self.no_row_twice_in_live_estimates, self.no_fenced_commit],
            "quarantine": [self.no_fenced_commit, self.landed_or_held],
            "manifests": [self.manifest_has_its_rows, self.needed_is_kept],
            "snapshots": [self._remember_snapshots, self.manifest_has_its_rows],
            f"measurements/{MODEL}": [self.no_row_lands_twice, self.landed_or_held],
        }

    def watch(self, resource: str) -> None:
        """Check what a write to this resource may have broken."""
        name = resource.removeprefix(f"{world.ROOT}/")
        for check in self._by_table.get(name, ()):
            self.checked += 1
            check()
        if name.startswith("checkpoints/"):
            self._checkpoint(name)

    def _checkpoint(self, name: str) -> None:
        self.checked += 1
        _, generation, *rest = name.split("/")
        if not rest or generation in rest:
            self.needed_is_kept()
        elif rest[0] == "offsets":
            self.planned.add(generation)
        elif rest[0] == "state" and f"{world.ROOT}/{name}" in world.current().files:
            self.no_row_twice_in_a_state(generation, rest[-1])
        elif rest[0] == "commits" and f"{world.ROOT}/{name}" in world.current().files:
            self.micro_batch_is_written(generation, int(rest[1]))

    def _remember_snapshots(self) -> None:
        """Remember which rows a snapshot reflects, as its rows may be removed later."""
        found: dict[str, list[float]] = {}
        for one in rows_of("snapshots"):
            found.setdefault(one["snapshot_id"], []).extend(one["mean"])
        self._reflected.update(found)

    def one_live_generation(self) -> None:
        """At most one generation of a model is live; exactly one since the first began."""
        live = [one["generation"] for one in rows_of("generations") if one["status"] == "live"]
        if len(live) > 1 or self.began and not live:
            raise Violation(f"one live generation: {' and '.join(live) or 'none'} are live")
        self.began = self.began or bool(live)

    def only_the_holder_releases(self) -> None:
        """A lease is released by its holder, or by the command that retires the generation."""
        for one in rows_of("generations"):
            before, statuses = self._owners.get(one["generation"]), self._statuses.get(one["generation"])
            commit = latest(f"{world.ROOT}/generations")
            if before and not one["owner"] and one["status"] == statuses and commit is not None and commit.by:
                host = json.loads(before)["host"]
                if host.startswith("host-") and host != f"host-{commit.by}":
                    raise Violation(f"only its holder releases a lease: {commit.by} released that of {host}")
            self._owners[one["generation"]] = one["owner"]

    def no_row_goes_by_a_promotion(self) -> None:
        """A promotion takes no estimate away from readers."""
        now = {one["generation"]: one["status"] for one in rows_of("generations")}
        promoted = [one for one in now if (self._statuses.get(one), now[one]) == ("shadow", "live")]
        before = self._shown
        self._statuses, self._shown = now, set(live_rows())
        if promoted and before - self._shown:
            raise Violation(f"a promotion takes no estimate away: rows {sorted(before - self._shown)} went")

    def no_row_twice_in_live_estimates(self) -> None:
        """Each accepted row is in the live estimates once at most."""
        rows = live_rows()
        doubled, self._shown = _doubled(rows), set(rows)
        if doubled:
            raise Violation(f"each row once in the live estimates: rows {doubled} are there twice")

    def no_row_twice_in_a_state(self, generation: str, file: str) -> None:
        """Each row is reflected once at most in snapshot + state: here in the version of which a file was written."""
        files, name = MemoryFiles(_checkpoint(generation)), file.rpartition(".")[0]
        version, _, unique = name.partition("_")
        states = merge_states(restore(files, find_names(files, int(version), unique or None)))
        doubled = _doubled(row for state in states.values() for row in state["ids"])
        if doubled:
            raise Violation(
                f"each row once in snapshot + state: {name} of {generation} reflects rows {doubled} twice"
            )

    def micro_batch_is_written(self, generation: str, batch: int) -> None:
        """A committed micro-batch has an estimate of each row that its state took, and of no other; none goes again."""
        if batch == 0:
            return  # its state is that of the snapshot and the micro-batch
        states = read_states(_checkpoint(generation), batch)
        before, after = _rows(read_states(_checkpoint(generation), batch - 1)), _rows(states)
        if before - after:
            raise Violation(
                f"each row once in snapshot + state: after micro-batch {batch} of {generation} rows "
                f"{sorted(before - after)} are gone"
            )
        table = rows_of(f"estimates/{MODEL}")
        mine = [r for r in table if (r["generation"], r["batch_id"]) == (generation, batch)]
        wrote = [row["y"] for row in mine]
        used = {row: version for one in states.values() for row, version in one.get("inputs", {}).items()}
        other = [row["y"] for row in mine if used.get(str(row["y"])) != row["inputs"]]
        if other:
            raise Violation(
                f"a micro-batch uses one version of the inputs: rows {other} had another in the state"
            )
        took = after - before - set(history_rows())
        if sorted(wrote) != sorted(took):
            raise Violation(
                f"a committed micro-batch is written: micro-batch {batch} of {generation} took rows "
                f"{sorted(took)} and its estimates are of {sorted(wrote)}"
            )

    def no_fenced_commit(self) -> None:
        """Once a later driver has committed under a name, no earlier driver's commit under that name counts."""
        for table in (f"estimates/{MODEL}", "quarantine"):
            path = f"{world.ROOT}/{table}"
            last = latest(path)
            newest: dict[str, int] = {}
            for version in range(0 if last is None else last.version + 1):
                commit = commit_at(path, version)
                name = commit.application
                if name is None or not name.endswith("by-epoch"):
                    continue
                epoch = (commit.transactions[name] + 1) // 2**32
                if commit.added and epoch < newest.get(name, 0):
                    raise Violation(
                        f"a fenced driver's commit never counts: version {version} of {table} is of epoch {epoch}, "
                        f"after one of epoch {newest[name]}"
                    )
                newest[name] = max(newest.get(name, 0), epoch)

    def manifest_has_its_rows(self) -> None:
        """A good manifest implies its rows."""
        states = rows_of("snapshots")
        for one in rows_of("manifests"):
            if one["status"] == GOOD:
                mine = [row for row in states if row["snapshot_id"] == one["snapshot_id"]]
                count, checksum, _ = measure(Frame(None, mine, STATE_ROWS))
                if (count, checksum) != (one["key_count"], one["checksum"]):
                    raise Violation(
                        f"a manifest implies its rows: {one['snapshot_id']} has {count} keys of its rows"
                    )

    def needed_is_kept(self) -> None:
        """What a generation needs that may be started, or rolled back to, is there."""
        good = {one["snapshot_id"] for one in rows_of("manifests") if one["status"] == GOOD}
        files = world.current().files
        for one in rows_of("generations"):
            if one["status"] not in ("live", "shadow", "retired"):
                continue
            folder = f"{world.ROOT}/checkpoints/{one['generation']}/"
            began = one["generation"] in self.planned
            if began and not any(path.startswith(folder) for path in files):
                raise Violation(
                    f"what a startable generation needs is kept: {one['generation']} ({one['status']}) has no "
                    f"checkpoint"
                )
            if not began and one["snapshot_id"] not in good:
                raise Violation(
                    f"what a startable generation needs is kept: snapshot {one['snapshot_id']} of "
                    f"{one['generation']} ({one['status']}) is removed"
                )

    def no_row_lands_twice(self) -> None:
        """A row lands once: copies of late rows, which only their own generations read, apart."""
        doubled = _doubled(landed_rows())
        if doubled:
            raise Violation(f"each row lands once: rows {doubled} are in the measurements twice")

    def landed_or_held(self) -> None:
        """A row of a file is in the measurements or held in quarantine, not both."""
        held = [one for one in rows_of("quarantine") if one["generation"] is None and one["status"] is None]
        both = set(landed_rows()) & {_row_of(one["payload"]) for one in held}
        if both:
            raise Violation(f"quarantined + accepted = landed: rows {sorted(both)} are in both")

    def at_the_end(self, skips: bool = False, state: bool = True) -> None:
        """After every process has ended and the stream has caught up, each row is there exactly once.

        skips: rows that the live generation's snapshot reflects need no estimate; state: no state was given up.
        """
        live = [one for one in rows_of("generations") if one["status"] == "live"]
        if not live:
            return
        late = [_row_of(one["payload"]) for one in rows_of("quarantine") if one["generation"] is not None]
        self.late_behind_another(late)
        expected, estimated = sorted(set(landed_rows())), live_rows()
        before, doubled = self._reflected[_root(live[0])], _doubled(estimated)
        without = self._reflected[live[0]["snapshot_id"]] if skips else []
        missing = sorted(set(expected) - {*before, *late, *estimated, *without, *history_rows()})
        if missing or doubled:
            raise Violation(
                f"each row once in the live estimates: rows {missing} are missing and {doubled} are there twice"
            )
        if state:
            self._state_at_the_end(live[0], set(expected), set(late))

    def late_behind_another(self, late: list[float | None]) -> None:
        """A row is refused as late only behind another row of its key: else the state reflected the row itself."""
        rows = {one["y"]: one for one in rows_of(f"measurements/{MODEL}")}
        for name in late:
            mine = rows[name]
            if not any(
                one["k"] == mine["k"] and one["t"] >= mine["t"] and other != name
                for other, one in rows.items()
            ):
                raise Violation(f"each row once in snapshot + state: row {name} was refused behind itself")

    def _state_at_the_end(self, live: dict[str, Any], expected: set[float], late: set[float | None]) -> None:
        generation = live["generation"]
        folder = f"{_checkpoint(generation)}/commits/"
        numbers = [
            int(path.removeprefix(folder)) for path in world.current().files if path.startswith(folder)
        ]
        state = set(self._reflected[live["snapshot_id"]])
        if numbers:
            state = _rows(read_states(_checkpoint(generation), max(numbers)))
        # A key whose rows came before the states that were offered keeps its own state.
        if not expected - late - set(history_rows()) <= state <= expected:
            raise Violation(
                f"each row once in snapshot + state: {generation} reflects {sorted(state)} of {sorted(expected)}"
            )


def live_rows() -> list[float]:
    """Return the rows of the live estimates."""
    if latest(f"{world.ROOT}/estimates/{MODEL}") is None:
        return []
    return [row["y"] for row in live_estimates(warehouse(), MODEL).collect()]


def landed_rows() -> list[float]:
    """Return the rows of the measurements, without copies of late ones."""
    table = rows_of(f"measurements/{MODEL}")
    return [one["y"] for one in table if not (one.get("_origin") or "").startswith("late:")]


def history_rows() -> list[float]:
    """Return the rows that landed as history of new keys: a stream imports what follows from them."""
    table = rows_of(f"measurements/{MODEL}")
    return [one["y"] for one in table if (one.get("_origin") or "").startswith("history:")]


def _row_of(payload: str) -> float | None:
    value = json.loads(payload).get("y")
    return None if value is None else float(value)


def _checkpoint(generation: str) -> str:
    return f"{world.ROOT}/checkpoints/{generation}"


def _rows(states: States) -> set[float]:
    return {row for state in states.values() for row in state["ids"]}


def _root(generation: dict[str, Any]) -> str:
    """Return the snapshot from which the first generation of a chain began."""
    known = {one["generation"]: one for one in rows_of("generations")}
    while generation["parent"] is not None:
        generation = known[generation["parent"]]
    return generation["snapshot_id"]
