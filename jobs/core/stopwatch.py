"""Measure the time of the steps in a Spark task, such as packing, the filter and state access. No Spark is needed.

Functions whose time matters are marked (`@step("state read")`, `with step("filter")`). The marks have no effect unless
the task runs under a stopwatch, as with `stream --profile`. The time of a nested step does not count for the outer
step, so the seconds of all steps add up to the whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

T = TypeVar("T")
Seconds = dict[str, float]

PACK, UNPACK, STATE_READ, KALMAN, STATE_WRITE, PACK_ESTIMATES, UNPACK_ESTIMATES, WRITE = (
    "pack rows", "unpack and sort", "state read", "filter", "state write", "pack estimates", "unpack estimates",
    "write",
)  # fmt: skip
"""Names of the steps in Python workers."""
WAITING = "waiting for rows"
"""Name of the time during which a step waits for rows. This time belongs to the producer of the rows."""


class Into(Protocol):
    """The receiver of the seconds of a task: a Spark accumulator."""

    def add(self, term: Seconds) -> None:
        """Add seconds, by step, to the seconds received so far."""
        ...


class Stopwatch:
    """The seconds of each step, without the seconds of nested steps."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: Seconds = {}
        self._clock, self._open, self._since = clock, list[str](), 0.0

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Measure the time of a `with` block as a step, and pause the outer step."""
        self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def each(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, and measure the time of their production; the time of their consumer does not count."""
        global _running
        items = iter(items)
        while True:
            before, _running = _running, self
            try:
                with self.step(name):
                    item = next(items)
            except StopIteration:
                return
            finally:
                _running = before
            yield item

    def _count(self) -> None:
        now = self._clock()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now


_running: Stopwatch | None = None
"""The stopwatch of the task in this process, if the task has one. A Python worker runs one task at a time."""


@contextmanager
def step(name: str) -> Iterator[None]:
    """Time a `with` block, or each call of a decorated function, as a step of the task's stopwatch, if it has one."""
    if _running is None:
        yield
    else:
        with _running.step(name):
            yield


def time_items(name: str, items: Iterable[T]) -> Iterable[T]:
    """Return the items; if the task has a stopwatch, their production is timed as a step."""
    return items if _running is None else _running.each(name, items)


def time_batches(
    function: Callable[[Iterator[T]], Iterator[T]], name: str, into: Into
) -> Callable[[Iterator[T]], Iterator[T]]:
    """Time a function from batches to batches; its seconds, except the time of waiting for batches, go to `into`."""

    def work(batches: Iterator[T]) -> Iterator[T]:
        watch = Stopwatch()
        try:
            yield from watch.each(name, function(watch.each(WAITING, batches)))
        finally:
            watch.seconds.pop(WAITING, None)
            into.add(watch.seconds)

    return work


def add_seconds(one: Seconds, other: Seconds) -> Seconds:
    """Return the sum of the seconds of each step."""
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {**one, **other}}
