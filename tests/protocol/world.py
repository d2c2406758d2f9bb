"""The simulated world: stored bytes, a clock, and processes that take turns.

All that processes share is here. Every access passes through `World.read` or `World.write`, which let the scheduler
choose who goes on. Code outside a simulated process (set-up, invariants) is never suspended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from tests.protocol.scheduler import Scheduler, Thread

T = TypeVar("T")

ROOT = "s3a://simulated/warehouse"
"""A store that refuses the second of two commits of one version; there nothing is locked."""

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Clock:
    """Time in seconds since the beginning, and how far the time of day was set forward or back."""

    seconds: float = 0.0
    shift: float = 0.0

    def now(self) -> datetime:
        """Return the time of day."""
        return BEGAN + timedelta(seconds=self.seconds + self.shift)

    def monotonic(self) -> float:
        """Return the time that only rises."""
        return self.seconds


@dataclass(frozen=True)
class Stored:
    """One file: its bytes, when it was written, and what the simulation keeps with it (a commit's rows)."""

    content: bytes
    written_at: datetime
    detail: Any = None


@dataclass
class World:
    """Storage and clock; `scheduler` is set while processes run."""

    files: dict[str, Stored] = field(default_factory=dict)
    newest: dict[str, int] = field(default_factory=dict)
    """The last version of each table."""
    parts: dict[str, Stored] = field(default_factory=dict)
    """Files with rows: whoever reads a table sees one only once a commit names it, so to write it is no step."""
    clock: Clock = field(default_factory=Clock)
    scheduler: Scheduler | None = None
    digest: int = 0
    ids: int = 0
    watchers: list[Callable[[str], None]] = field(default_factory=list)
    narrator: Callable[[str], None] = lambda what: None
    """Hears of writes outside simulated processes."""

    def copy(self) -> World:
        """Return a world with the same files and time; files are never changed in place."""
        clock = Clock(self.clock.seconds, self.clock.shift)
        return World(
            dict(self.files), dict(self.newest), dict(self.parts), clock, None, self.digest, self.ids
        )

    @property
    def thread(self) -> Thread | None:
        """Return the simulated thread that runs, or None outside the simulation."""
        return None if self.scheduler is None else self.scheduler.running

    def new_id(self) -> str:
        """Return an id that no other call returns, and that a replay of the same schedule returns again."""
        thread = self.thread
        if thread is None:
            self.ids += 1
            return f"setup{self.ids:04d}"
        thread.process.ids += 1
        return f"{thread.process.name}{thread.process.ids:04d}"

    def read(self, resource: str, what: str, of: Callable[[], T], mark: Callable[[T], Any]) -> T:
        """Read, after the scheduler lets the thread go on; `mark` is what the thread has learned by it."""
        thread = self.thread
        if thread is None:
            return of()
        thread.pause("read", resource, what)
        value = of()
        thread.learned(what, mark(value))
        return value

    def write(
        self, resource: str, what: str, do: Callable[[], T], lost: Callable[[], Exception] = OSError
    ) -> T:
        """Write, after the scheduler lets the thread go on; if the answer is lost, raise after writing."""
        thread = self.thread
        if thread is None:
            self.narrator(what)
            value = do()
            self._changed(resource)
            return value
        fault = thread.pause("write", resource, what)
        value = do()
        thread.learned(what, repr(value)[:80])
        self._changed(resource)
        if fault == "lost":
            thread.learned("lost", resource)
            raise lost()
        return value

    def _changed(self, resource: str) -> None:
        if self.watchers:
            with self.observed():
                for watch in self.watchers:
                    watch(resource)

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """Let code within read the store without taking turns."""
        scheduler, self.scheduler = self.scheduler, None
        try:
            yield
        finally:
            self.scheduler = scheduler

    def put(self, path: str, content: bytes, detail: Any = None) -> None:
        """Store a file; only within `do` of a write."""
        self._forget(path)
        self.files[path] = Stored(content, self.clock.now(), detail)
        self.digest ^= hash((path, content))

    def remove(self, path: str) -> None:
        """Remove a file, if it exists; only within `do` of a write."""
        self._forget(path)
        self.files.pop(path, None)

    def _forget(self, path: str) -> None:
        if path in self.files:
            self.digest ^= hash((path, self.files[path].content))


_current: list[World] = [World()]


def current() -> World:
    """Return the world that the stand-ins act on."""
    return _current[0]


@contextlib.contextmanager
def inhabited(world: World) -> Iterator[World]:
    """Let the stand-ins act on this world."""
    before = _current[0]
    _current[0] = world
    try:
        yield world
    finally:
        _current[0] = before
