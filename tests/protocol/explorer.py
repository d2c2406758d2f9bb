"""Look for a schedule that breaks an invariant: every one with few deviations, then random ones.

A run without deviations lets each process go on until it ends or waits. A deviation is a change to another process, or
a fault. All runs with one deviation come before those with two, so that the first history found is a shortest one. A
state (store, clock, and what each thread has learned) is continued once only.
"""

from __future__ import annotations

import contextlib
import random
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pyspark.errors import PySparkException

from jobs.core.errors import UserError
from tests.protocol import world
from tests.protocol.invariants import Invariants, Violation
from tests.protocol.scheduler import MAINTENANCE, Deviation, Event, Scheduler, Thread, label
from tests.protocol.world import World

RECOVERY_SECONDS = 1000.0
"""After this time no lease of an ended process holds any more."""

FAULTS = ("run", "crash", "freeze", "lost", "upload")
"""Deviations; a frozen process may also wake at any step."""


@dataclass(frozen=True)
class Scenario:
    """Processes that meet, in a world that is made once.

    begin: begins the processes; recover: what an operator runs afterwards, until everything has been done.
    """

    name: str
    world: Callable[[], World]
    begin: Callable[[Scheduler], None]
    recover: Callable[[], None]
    depth: int = 1
    faults: tuple[str, ...] = FAULTS
    skips: bool = False
    """A new snapshot may reflect rows that were never estimated, as that of a retraining does."""
    keeps_lease: bool = False
    """No driver loses its lease unless it froze: nothing else than another driver could take it."""


@dataclass
class Counts:
    """What an exploration has looked at."""

    name: str
    interleavings: int = 0
    states: int = 0
    faults: int = 0
    checks: int = 0
    steps: int = 0
    pruned: int = 0
    depth: str = ""

    def text(self) -> str:
        return (
            f"{self.name}: {self.interleavings:,} interleavings ({self.depth}), {self.states:,} states, "
            f"{self.faults:,} faults, {self.steps:,} steps, {self.checks:,} checks of invariants"
        )


EXPECTED = (UserError, PySparkException, OSError)
"""How a command may end: refused in words, or by an error of Spark or of the store that it could not foresee."""


class Found(AssertionError):
    """A violation with its history."""

    def __init__(self, scenario: str, violation: Violation, history: list[Event]) -> None:
        self.violation, self.history = violation, history
        super().__init__(f"{scenario}: {violation}\n{printed(history)}")


def printed(history: list[Event]) -> str:
    """Return the writes and faults of a history, and the last read before each change of process."""
    lines = []
    for place, event in enumerate(history):
        after = history[place + 1] if place + 1 < len(history) else None
        leaves = after is None or after.who != event.who
        if event.kind in ("write", "fault") or event.kind == "read" and leaves:
            lines.append(f"  {event.step:4d}  {event.who:<16} {event.what}")
    return "\n".join(lines)


class _Pruned(Exception):
    """The run has come to a state that was continued before."""


@dataclass
class _Run:
    """One run, and what else could have been done at each of its steps."""

    scenario: Scenario
    deviations: dict[int, Deviation]
    seen: dict[int, int]
    left: int
    counts: Counts
    shared: set[str]
    touched: dict[str, set[str]]
    written: set[str]
    choices: list[tuple[int, Deviation]] = field(default_factory=list)
    cut: bool = False

    def at_step(self, scheduler: Scheduler) -> None:
        """Note a step's state and choices."""
        after_last = scheduler.step > max(self.deviations, default=-1)
        default = scheduler.next_default(scheduler.ready())
        self._touch(default)
        if after_last:
            state = _state(scheduler)
            if self.seen.get(state, -1) >= self.left:
                self.cut = True
                raise _Pruned
            if state not in self.seen:
                self.counts.states += 1
            self.seen[state] = self.left
            if self.left:
                self.choices += [(scheduler.step, one) for one in self._choices(scheduler, default)]
        self._note_write(default)

    def _touch(self, thread: Thread) -> None:
        pending = thread.pending
        if pending is None or pending.kind == "wait":
            return
        who = self.touched.setdefault(pending.resource, set())
        who.add(thread.process.name)
        if pending.kind == "write":
            self.written.add(pending.resource)
        if len(who) > 1 and pending.resource in self.written:
            self.shared.add(pending.resource)

    def _note_write(self, thread: Thread) -> None:
        if thread.pending is not None and thread.pending.kind == "write":
            thread.process.wrote = True

    def _choices(self, scheduler: Scheduler, default: Thread) -> list[Deviation]:
        pending, process = default.pending, default.process
        writes = pending is not None and pending.kind == "write"
        found: list[Deviation] = []
        ready = scheduler.ready()
        uploading = [one for one in ready if one.name.startswith(MAINTENANCE)]
        others = [one for one in ready if one.process is not process and one not in uploading]
        if pending is None or pending.resource in self.shared or writes:
            if "run" in self.scenario.faults:
                found += [Deviation("run", label(one)) for one in others]
            found += [
                Deviation("wake", one.name) for one in scheduler.processes if one.frozen and not one.dead
            ]
        if process.maintenance_due and "upload" in self.scenario.faults:
            # Only other processes read what is uploaded: it makes no difference after which of the next steps it is.
            process.maintenance_due = False
            found += [Deviation("run", label(one)) for one in uploading if one.process is process]
        if process.wrote and "crash" in self.scenario.faults:
            # Between two writes of a process it makes no difference where it is killed.
            process.wrote = False
            found.append(Deviation("crash", process.name))
        if writes:
            unended = any(not one.ended for one in scheduler.processes if one is not process)
            if unended and "freeze" in self.scenario.faults:
                found.append(Deviation("freeze", process.name))
            if "lost" in self.scenario.faults:
                found.append(Deviation("lost"))
        return found


def _state(scheduler: Scheduler) -> int:
    clock = scheduler.world.clock
    threads = tuple(
        (one.history, one.done, one.deadline, one.process.dead, one.process.frozen)
        for one in scheduler.threads
    )
    last = "" if scheduler.last is None else label(scheduler.last)
    return hash((scheduler.world.digest, clock.seconds, clock.shift, threads, last))


def _play(scenario: Scenario, run: _Run, start: World) -> None:
    """Play one schedule, then recover, and check the end.

    Raises:
        Found: an invariant does not hold.
    """
    here = start.copy()
    with world.inhabited(here):
        invariants = Invariants()
        violations: list[Violation] = []

        def watch(resource: str) -> None:
            try:
                invariants.watch(resource)
            except Violation as violation:
                violations.append(violation)

        here.watchers.append(watch)

        def on_step(scheduler: Scheduler) -> None:
            if violations:
                raise Found(scenario.name, violations[0], scheduler.history)
            run.at_step(scheduler)

        scheduler = Scheduler(here, run.deviations, on_step)
        scenario.begin(scheduler)
        try:
            with contextlib.suppress(_Pruned):
                scheduler.run()
        finally:
            run.counts.steps += scheduler.step
            run.counts.checks += invariants.checked
        if not run.cut:
            _recover(scenario, scheduler, invariants, violations)


def _recover(
    scenario: Scenario, scheduler: Scheduler, invariants: Invariants, violations: list[Violation]
) -> None:
    here, history = scheduler.world, scheduler.history
    for process in scheduler.processes:
        if process.error is not None and not isinstance(process.error, EXPECTED):
            error = process.error
            where = traceback.format_tb(error.__traceback__)[-1].strip()
            violations.append(
                Violation(f"a command is refused in words: {process.name} failed with {error!r}, {where}")
            )
        frozen = any(one == Deviation("freeze", process.name) for one in scheduler.deviations.values())
        lost = any(text in str(process.error) for text in ("lost the lease", "another has taken it over"))
        if scenario.keeps_lease and not frozen and lost:
            violations.append(Violation(f"a driver that runs keeps its lease: {process.name} lost it"))
    if not violations:
        here.clock.seconds += RECOVERY_SECONDS
        history.append(Event(scheduler.step, "***", "all have ended; an operator runs what is left", "fault"))
        here.narrator = lambda what: history.append(Event(scheduler.step, "recovery", what, "write"))
        try:
            scenario.recover()
        except Exception as error:
            violations.append(
                Violation(f"recovery is possible: it failed with {type(error).__name__}: {error}")
            )
        if not violations:
            try:
                invariants.at_the_end(scenario.skips)
            except Violation as violation:
                violations.append(violation)
    if violations:
        raise Found(scenario.name, violations[0], history)


def explore(scenario: Scenario, depth: int | None = None, most: int = 4000) -> Counts:
    """Play all schedules with at most so many deviations, those with fewer first, and at most `most`.

    Raises:
        Found: an invariant does not hold; with as few deviations as can be.
    """
    depth = scenario.depth if depth is None else depth
    counts, start = Counts(scenario.name), scenario.world()
    seen: dict[int, int] = {}
    shared: set[str] = set()
    touched: dict[str, set[str]] = {}
    written: set[str] = set()
    level: list[dict[int, Deviation]] = [{}]
    # A first look, to know what more than one process accesses.
    look = Counts("")
    _play(scenario, _Run(scenario, {}, {}, 0, look, shared, touched, written), start)
    for used in range(depth + 1):
        following: list[dict[int, Deviation]] = []
        for deviations in level:
            if counts.interleavings >= most:
                counts.depth = f"all with up to {used - 1} deviations, and some with {used}"
                return counts
            run = _Run(scenario, deviations, seen, depth - used, counts, shared, touched, written)
            _play(scenario, run, start)
            counts.interleavings += 1
            counts.faults += sum(one.kind != "run" for one in deviations.values())
            following += [{**deviations, step: one} for step, one in run.choices]
        counts.depth = f"all with up to {used} deviation{'' if used == 1 else 's'}"
        level = following
    return counts


def wander(scenario: Scenario, seed: int, deviations: int = 6) -> Counts:
    """Play one random schedule.

    Raises:
        Found: an invariant does not hold.
    """
    chance, counts, start = random.Random(seed), Counts(f"{scenario.name}, seed {seed}"), scenario.world()
    plan: dict[int, Deviation] = {}
    run = _Run(scenario, plan, {}, 0, counts, set(), {}, set())
    at = sorted(chance.sample(range(1, 150), deviations))

    def decide(scheduler: Scheduler) -> None:
        if at and scheduler.step >= at[0]:
            at.pop(0)
            default = scheduler.next_default(scheduler.ready())
            default.process.wrote = True
            choices = run._choices(scheduler, default)
            choices.append(Deviation("clock", str(chance.choice((-7200, -60, 60, 7200)))))
            plan[scheduler.step] = chance.choice(choices)
            counts.faults += plan[scheduler.step].kind != "run"

    run.at_step = decide  # type: ignore[method-assign]
    # A clock that is set may make a lease look old.
    _play(replace(scenario, keeps_lease=False), run, start)
    counts.interleavings = 1
    return counts


@dataclass(frozen=True)
class Turn:
    """Before the next access of a thread that this pattern finds, a deviation."""

    who: str
    access: str
    instead: Deviation


def follow(scenario: Scenario, turns: list[Turn]) -> None:
    """Play one schedule, which deviates at these accesses in this order.

    Raises:
        Found: an invariant does not hold.
    """
    plan: dict[int, Deviation] = {}
    run, left = _Run(scenario, plan, {}, 0, Counts(scenario.name), set(), {}, set()), list(turns)

    def decide(scheduler: Scheduler) -> None:
        default = scheduler.next_default(scheduler.ready())
        what = default.pending.what if default.pending else ""
        if left and label(default) == left[0].who and re.search(left[0].access, what):
            plan[scheduler.step] = left.pop(0).instead

    run.at_step = decide  # type: ignore[method-assign]
    _play(scenario, run, scenario.world())
    assert not left, f"the schedule never came to {left[0]}"
