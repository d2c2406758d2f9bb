"""The seconds of steps within a task: each excludes the steps within it; without a stopwatch marks do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jobs.core import stopwatch
from jobs.core.stopwatch import Seconds, Stopwatch, add_seconds, step, time_batches, time_items


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Sum:
    """An accumulator."""

    def __init__(self) -> None:
        self.seconds: Seconds = {}

    def add(self, term: Seconds) -> None:
        self.seconds = add_seconds(self.seconds, term)


def test_the_seconds_of_a_step_exclude_the_steps_within_it() -> None:
    clock = Clock()
    watch = Stopwatch(clock)

    @step("inner")
    def inner(seconds: float) -> float:
        clock.now += seconds
        return seconds

    def outer(items: Iterator[int]) -> Iterator[int]:
        for item in items:
            clock.now += 1.0
            inner(0.25)
            with step("other"):
                clock.now += 4.0
            for part in time_items("parts", iter([item, item])):
                clock.now += 8.0
                yield part

    def given() -> Iterator[int]:
        for item in range(2):
            clock.now += 16.0
            yield item

    for _ in watch.each("outer", outer(watch.each("waiting", given()))):
        clock.now += 1000.0  # whoever takes what comes out
    assert watch.seconds == {
        "outer": 2 * 1.0 + 4 * 8.0,
        "inner": 0.5,
        "other": 8.0,
        "parts": 0.0,
        "waiting": 32.0,
    }
    assert stopwatch._running is None


def test_marks_do_nothing_without_a_stopwatch() -> None:
    items = iter([1])
    assert time_items("step", items) is items

    @step("step")
    def work(number: int, *, more: int = 0) -> int:
        """Return a sum."""
        return number + more

    assert work(1, more=2) == 3
    assert (work.__name__, work.__doc__) == ("work", "Return a sum.")
    with step("step"):
        pass


def test_a_watched_function_adds_its_seconds_even_when_it_fails() -> None:
    total = Sum()

    def pack(batches: Iterator[int]) -> Iterator[int]:
        for batch in batches:
            with step("sort"):
                if batch == 2:
                    raise ValueError("no such batch")
            yield -batch

    work = time_batches(pack, "pack", total)
    assert list(work(iter([0, 1]))) == [0, -1]
    with pytest.raises(ValueError, match="no such batch"):
        list(work(iter([2])))
    assert set(total.seconds) == {"pack", "sort"}  # what it waited for its batches is not its own
    assert all(seconds > 0 for seconds in total.seconds.values())
    assert stopwatch._running is None


def test_seconds_are_added_by_step() -> None:
    one: dict[str, Any] = {"a": 1.0}
    assert add_seconds(one, {"a": 2.0, "b": 4.0}) == {"a": 3.0, "b": 4.0}
    assert one == {"a": 1.0}  # the old value stays: somebody may be reading it
