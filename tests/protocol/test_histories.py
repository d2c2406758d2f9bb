"""Long histories of commands, drawn by Hypothesis: one after another, each of them killed somewhere or not at all."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from jobs.lineage import generations
from tests.protocol import actors, world
from tests.protocol.actors import MODEL, spec_of, warehouse
from tests.protocol.explorer import EXPECTED, RECOVERY_SECONDS, printed
from tests.protocol.invariants import Invariants, Violation
from tests.protocol.scenarios import DAYS, FORGETFUL, ONE_BY_ONE
from tests.protocol.scheduler import Deviation, Event, Scheduler
from tests.protocol.world import World

pytestmark = pytest.mark.usefixtures("simulation")

KILLED_AT = st.one_of(st.none(), st.integers(1, 90))
"""The step before which a command is killed, if it is."""


class Operation(RuleBasedStateMachine):
    """What an operator does with one model, with commands that are killed."""

    def __init__(self) -> None:
        super().__init__()
        self.world, self.folder = World(), Path(tempfile.mkdtemp(prefix="kalman-protocol-"))
        self.history: list[Event] = []
        self.rows = self.commands = 0
        self.forgot = False
        self.files: list[str] = []
        self.version = 1
        self.holds: Invariants | None = None

    def _spec(self) -> Any:
        live = generations.find_live(warehouse(), MODEL)
        return spec_of(1 if live is None else live.model_version, f"{FORGETFUL}\n{ONE_BY_ONE}")

    def _run(self, name: str, command: Callable[[], object], killed_at: int | None = None) -> None:
        with world.inhabited(self.world):
            if self.holds is None:
                self.holds = Invariants()
                self.world.watchers.append(self.holds.watch)
            deviations = {} if killed_at is None else {killed_at: Deviation("crash", name)}
            scheduler = Scheduler(self.world, deviations)
            process = scheduler.begin(name, command)
            process.pid += self.commands  # no process is taken for an earlier one
            self.commands += 1
            scheduler.run()
            self.history += scheduler.history
            self.world.clock.seconds += RECOVERY_SECONDS  # the lease of a killed one passes
            error = process.error
            if isinstance(error, Violation):
                raise AssertionError(f"{error}\n{printed(self.history)}")
            if error is not None and not isinstance(error, EXPECTED):
                raise AssertionError(f"{name} failed with {error!r}\n{printed(self.history)}") from error

    @initialize()
    def begin(self) -> None:
        self._land([("a", 1), ("b", 2)], None)
        self._run("pretrain", actors.pretrain)

    def _land(self, rows: list[tuple[str, int]], killed_at: int | None) -> None:
        lines = ["k,t,y"]
        for key, back in rows:
            self.rows += 1
            lines.append(f"{key},{10 * self.rows - back},{self.rows}")
        path = self.folder / f"{len(self.files)}.csv"
        path.write_text("\n".join(lines) + "\n")
        self.files.append(str(path))
        self._run("ingest", lambda: actors.ingest(str(path)), killed_at)

    @rule(
        rows=st.lists(
            st.tuples(st.sampled_from("ab"), st.sampled_from([0, 0, 0, 15])), min_size=1, max_size=4
        ),
        killed_at=KILLED_AT,
    )
    def ingest(self, rows: list[tuple[str, int]], killed_at: int | None) -> None:
        """Land a new file, of which some rows may be older than others before them."""
        self._land(rows, killed_at)

    @rule(place=st.integers(0, 20), killed_at=KILLED_AT)
    def ingest_again(self, place: int, killed_at: int | None) -> None:
        path = self.files[place % len(self.files)]
        self._run("again", lambda: actors.ingest(path), killed_at)

    @rule(killed_at=KILLED_AT)
    def pretrain(self, killed_at: int | None) -> None:
        self._run("pretrain", lambda: actors.pretrain(self._spec()), killed_at)

    @rule(killed_at=KILLED_AT)
    def stream(self, killed_at: int | None) -> None:
        self._run("stream", lambda: actors.stream(self._spec()), killed_at)

    @rule()
    def stopped_stream(self) -> None:
        self._run("stopped", lambda: actors.stopped_stream(self._spec()))

    @rule(mode=st.sampled_from(["stop-start", "blue-green", "retrain", "stateless"]), killed_at=KILLED_AT)
    def upgrade(self, mode: str, killed_at: int | None) -> None:
        """Upgrade to the version after the live one."""
        self.forgot = self.forgot or mode == "stateless"

        def run() -> None:
            live = generations.find_live(warehouse(), MODEL)
            if live is not None:
                actors.upgrade(mode, to=live.model_version + 1)

        self._run(f"upgrade-{mode}", run, killed_at)

    @rule(killed_at=KILLED_AT)
    def export(self, killed_at: int | None) -> None:
        self._run("export", actors.export_state, killed_at)

    @rule(killed_at=KILLED_AT)
    def rollback(self, killed_at: int | None) -> None:
        self._run("rollback", actors.rollback, killed_at)

    @rule(killed_at=KILLED_AT)
    def retire(self, killed_at: int | None) -> None:
        self._run("retire", actors.retire, killed_at)

    @rule(killed_at=KILLED_AT)
    def replay(self, killed_at: int | None) -> None:
        self._run("replay", lambda: actors.replay(self._spec()), killed_at)

    @rule(days=st.sampled_from([1, 40]), killed_at=KILLED_AT)
    def maintain(self, days: int, killed_at: int | None) -> None:
        self.world.clock.seconds += days * DAYS
        self._run("maintain", lambda: actors.maintain(self._spec()), killed_at)

    def teardown(self) -> None:
        """Land everything, let the stream catch up, and count."""
        if self.holds is None:
            return
        for path in self.files:
            self._run("ingest", lambda path=path: actors.ingest(path))
        self._run("stream", lambda: actors.stream(self._spec()))
        self._run("stream", lambda: actors.stream(self._spec()))
        with world.inhabited(self.world):
            try:
                self.holds.at_the_end(state=not self.forgot)
            except Violation as violation:
                raise AssertionError(f"{violation}\n{printed(self.history)}") from None


def histories(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Operation,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=(
                HealthCheck.too_slow,
                HealthCheck.data_too_large,
                HealthCheck.filter_too_much,
            ),
            phases=(Phase.generate,),  # a history is read as it is: to shrink it takes minutes
            report_multiple_bugs=False,
        ),
    )


def test_short_histories() -> None:
    histories(60, 12)


@pytest.mark.soak
def test_long_histories() -> None:
    histories(2000, 40)
