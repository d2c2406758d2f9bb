"""Processes and threads as coroutines, and the scheduler that says who goes on and what goes wrong.

Real, synchronous code runs in greenlets. A greenlet is suspended before each read and write of the store, so that the
scheduler can let another go on, or end a process there. A killed process is never resumed: its code ends with `Killed`
at its next access, which no `except Exception` catches, so that no `finally` of it writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from greenlet import GreenletExit, greenlet

from tests.protocol.world import World

FREEZE_SECONDS = 100.0
"""How long a frozen process sleeps at least: longer than the lease (`driver_identity.LEASE_SECONDS`)."""

MAX_STEPS = 4000

MAINTENANCE = "maintenance"
"""Name of the threads that upload snapshots of states, in a process whose other threads go on meanwhile."""


class Killed(BaseException):
    """The process was killed: its code ends without another read or write."""


@dataclass
class Process:
    """One process, on a machine of its own unless said otherwise."""

    name: str
    host: str
    pid: int
    dead: bool = False
    frozen: bool = False
    ids: int = 0
    wrote: bool = False
    """It has written since it could last have been killed with another outcome."""
    maintenance_due: bool = False
    """There is another snapshot to upload than when it could last have been uploaded."""
    error: BaseException | None = None
    ended: bool = False


@dataclass
class Pending:
    """The access that a thread is about to make: read, write or wait."""

    kind: str
    resource: str
    what: str


class Thread:
    """A thread of a process."""

    def __init__(self, scheduler: Scheduler, process: Process, name: str, target: Callable[[], Any]) -> None:
        self.scheduler, self.process, self.name = scheduler, process, name
        self.pending: Pending | None = None
        self.until: Callable[[], bool] | None = None
        self.deadline: float | None = None
        self.history = hash((process.name, name))
        self.done = False
        self._fault: str | None = None
        self._build_target = target
        self.greenlet = greenlet(self._run, scheduler.home)

    def _run(self) -> None:
        try:
            self._build_target()
        except (Killed, GreenletExit):
            pass
        except BaseException as error:
            if self.name == "main":
                self.process.error = error
            else:
                self.learned("failed", repr(error))
        finally:
            self.done = True
            if self.name == "main":
                self.process.ended = True

    def pause(self, kind: str, resource: str, what: str) -> str | None:
        """Suspend before an access; return the fault that the scheduler wants it to meet."""
        if self.process.dead:
            raise Killed
        self.pending = Pending(kind, resource, what)
        self.scheduler.home.switch()
        if self.process.dead:
            raise Killed
        self.pending, fault, self._fault = None, self._fault, None
        return fault

    def wait(self, until: Callable[[], bool], seconds: float | None) -> bool:
        """Suspend until a condition holds or time has passed; return whether it holds."""
        if self.process.dead:
            raise Killed
        self.until = until
        self.deadline = None if seconds is None else self.scheduler.world.clock.seconds + seconds
        self.pending = Pending("wait", "", "wait")
        self.scheduler.home.switch()
        if self.process.dead:
            raise Killed
        self.until = self.deadline = self.pending = None
        held = until()
        self.learned("waited", held)
        return held

    def learned(self, what: str, value: Any) -> None:
        """Add to what the thread has seen, on which alone its next steps depend."""
        self.history = hash((self.history, what, value))

    def ready(self) -> bool:
        """Tell if the thread could go on now."""
        if self.done or self.process.dead or self.process.frozen:
            return False
        if self.until is None or self.until():
            return True
        return self.deadline is not None and self.deadline <= self.scheduler.world.clock.seconds + 1e-9

    def meet(self, fault: str) -> None:
        """Let the pending access meet a fault."""
        self._fault = fault


@dataclass(frozen=True)
class Deviation:
    """At a step, something else than the default: another thread, or a fault."""

    kind: str  # "run", "crash", "freeze", "wake", "lost", "clock"
    who: str = ""

    def text(self) -> str:
        names = {
            "run": f"{self.who} goes on instead",
            "crash": f"{self.who} is killed",
            "freeze": f"{self.who} freezes, past its lease",
            "wake": f"{self.who} wakes",
            "lost": "the answer to this write is lost",
            "clock": f"the time of day is set by {self.who} s",
        }
        return names[self.kind]


@dataclass
class Event:
    """One line of a history."""

    step: int
    who: str
    what: str
    kind: str


@dataclass
class Scheduler:
    """One run: threads in turn, with deviations at given steps."""

    world: World
    deviations: dict[int, Deviation]
    on_step: Callable[[Scheduler], None] = lambda scheduler: None
    threads: list[Thread] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    running: Thread | None = None
    step: int = 0
    history: list[Event] = field(default_factory=list)
    last: Thread | None = None

    def __post_init__(self) -> None:
        self.home = greenlet.getcurrent()

    def begin(self, name: str, target: Callable[[], Any], host: str | None = None) -> Process:
        """Begin a process with a main thread."""
        process = Process(name, host or f"host-{name}", 1000 + len(self.processes))
        self.processes.append(process)
        self.thread(process, "main", target)
        return process

    def thread(self, process: Process, name: str, target: Callable[[], Any]) -> Thread:
        """Begin a thread of a process."""
        mine = sum(one.process is process and one.name.startswith(name) for one in self.threads)
        made = Thread(self, process, name if not mine else f"{name}{mine + 1}", target)
        self.threads.append(made)
        return made

    def ready(self) -> list[Thread]:
        """Return the threads that could go on, in a fixed order."""
        return [one for one in self.threads if one.ready()]

    def next_default(self, ready: list[Thread]) -> Thread:
        """Return who goes on without a deviation: the last one, as long as it can."""
        if self.last in ready:
            return self.last
        mine = [one for one in ready if self.last is not None and one.process is self.last.process]
        return (mine or ready)[0]

    def run(self) -> None:
        """Run until nothing can go on."""
        self.world.scheduler = self
        try:
            while self.step < MAX_STEPS:
                ready = self.ready()
                if not ready:
                    if not self._wake():
                        return
                    continue
                self.on_step(self)
                chosen = self._apply(self.deviations.get(self.step), self.next_default(ready))
                self.step += 1
                if chosen is None:
                    continue
                self.last = self.running = chosen
                self._note(chosen)
                chosen.greenlet.switch()
                self.running = None
            raise AssertionError(f"no end after {MAX_STEPS} steps")
        finally:
            self._clear()

    def _apply(self, deviation: Deviation | None, default: Thread) -> Thread | None:
        if deviation is None:
            return default
        self.history.append(Event(self.step, "***", deviation.text(), "fault"))
        if deviation.kind == "run":
            return next(one for one in self.ready() if label(one) == deviation.who)
        if deviation.kind == "lost":
            default.meet("lost")
            return default
        if deviation.kind == "clock":
            self.world.clock.shift += float(deviation.who)
            return default
        process = next(one for one in self.processes if one.name == deviation.who)
        if deviation.kind == "crash":
            process.dead = process.ended = True
        elif deviation.kind == "wake":
            process.frozen = False
            self.last = next(
                one for one in self.threads if one.process is process and one.pending is not None
            )
        else:
            process.frozen = True
            self.world.clock.seconds += FREEZE_SECONDS
        return None

    def _wake(self) -> bool:
        """Let time pass until a thread can go on; when all others have ended, wake the frozen ones."""
        waiting = [
            one.deadline
            for one in self.threads
            if not one.done and not one.process.dead and not one.process.frozen and one.deadline is not None
        ]
        if waiting:
            self.world.clock.seconds = max(self.world.clock.seconds, min(waiting))
            return True
        frozen = [one for one in self.processes if one.frozen]
        for one in frozen:
            one.frozen = False
            self.history.append(Event(self.step, "***", f"{one.name} wakes", "fault"))
        return bool(frozen)

    def _note(self, thread: Thread) -> None:
        if thread.pending is None:
            self.history.append(Event(self.step, label(thread), "begins", "begin"))
        elif thread.pending.kind != "wait":
            self.history.append(Event(self.step, label(thread), thread.pending.what, thread.pending.kind))

    def _clear(self) -> None:
        """End what is left without letting it access anything."""
        for process in self.processes:
            process.dead = True
        for thread in self.threads:
            if not thread.done and thread.greenlet:
                self.running = thread
                thread.greenlet.throw(Killed)
        self.running = None
        self.world.scheduler = None


def label(thread: Thread) -> str:
    """Return a thread's name in a history."""
    return thread.process.name if thread.name == "main" else f"{thread.process.name}/{thread.name}"
