"""Which kills the soak makes: each is known by its seed, and a hundred of them are spread over all verbs and gaps.

A *gap* is what lies between two commit points of a verb; half of the kills are aimed at one, right after a commit or
right before the next, and the others come at a random moment. Every further hundred takes the next gaps of each verb.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any, NamedTuple

KILL, FREEZE = "kill", "freeze"
HANG = "hang"
"""Stopped while Java runs on, then killed with it."""
PYTHON, JAVA, BOTH = "python", "java", "both"
ROUND = 100
IN_A_WORLD = 10


class Point(NamedTuple):
    """A commit point, as `tests.jobs.soak.aimed` names it, and which call of that name it is."""

    name: str
    nth: int = 1


class Verb(NamedTuple):
    """How often a verb is struck among a hundred, and aimed so; its seconds of work; its commit points in order."""

    kills: int
    aimed: int
    seconds: float
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Kill:
    """One strike: whose process, how, and at a commit point or at a part (0 to 1) of the time that the verb works.

    gap: the number of the commit point after which the gap begins.
    wake_after: seconds from the start of the next run at which frozen processes wake up; None: when it has ended.
    """

    seed: int
    verb: str
    victim: str
    how: str
    point: str | None = None
    nth: int = 1
    edge: str = "after"
    moment: float = 0.0
    gap: int | None = None
    wake_after: float | None = None

    @property
    def world(self) -> int:
        """The number of the world in which it is made."""
        return self.seed // IN_A_WORLD

    @property
    def at_random(self) -> bool:
        """Whether the moment is a time, which may come too late."""
        return self.point is None

    def aim(self) -> str:
        """Say in words at what it is aimed."""
        if self.point is None:
            return "a random moment"
        return f"{self.edge} `{self.point}`" + (f", call {self.nth}" if self.nth > 1 else "")

    def record(self) -> dict[str, Any]:
        """Return it as part of a record of results."""
        return {
            "seed": self.seed,
            "world": self.world,
            "verb": self.verb,
            "victim": self.victim,
            "how": self.how,
            "aim": self.aim(),
            "wake_after": self.wake_after,
        }


def _points(*names: str) -> tuple[Point, ...]:
    """Return commit points in the order of their calls, each with the number of its call."""
    return tuple(Point(name, names[: place + 1].count(name)) for place, name in enumerate(names))


_SNAPSHOT = ("append snapshots", "merge into manifests")
_BEGIN = ("merge into generations",)
_SWITCH = (*_BEGIN, "append live")
_REPORT = ("write reports/walk/walk.json", "write reports/walk/walk.html")
_MAINTAIN = (
    "merge into generations",
    "remove checkpoints/walk",
    "merge into manifests",
    "append snapshots",
    "append estimates/walk",
    "append quarantine",
    "append progress/walk",
    "remove _progress/walk/fold-N",
    "compact estimates/walk",
    "vacuum generations",
    "vacuum snapshots",
    "vacuum estimates/walk",
    "vacuum manifests",
    "vacuum quarantine",
)
_TAKE = ("merge into generations", "write _leases/walk/walk/N.json")
_BATCH = (
    "micro-batch planned",
    "write checkpoints/walk/reached/N.json",
    "append estimates/walk",
    "merge into latest/walk",
    "micro-batch written",
)
_FIRST = ("append latest/walk", *_BATCH)

VERBS = {
    "stream": Verb(18, 8, 16.0, _points(*_TAKE, *3 * _BATCH, *_TAKE)),
    "blue-green": Verb(
        12, 6, 28.0, _points(*2 * _SNAPSHOT, *_BEGIN, *_TAKE, *_FIRST, *_TAKE, *_REPORT, *_SWITCH)
    ),
    "stop-start": Verb(8, 4, 14.0, _points(*2 * _SNAPSHOT, *_SWITCH)),
    "retrain": Verb(7, 4, 14.0, _points(*_SNAPSHOT, *_SWITCH)),
    "stateless": Verb(7, 3, 13.0, _points("merge into manifests", *_SWITCH)),
    "repartition": Verb(8, 4, 12.0, _points(*_SNAPSHOT, *_SWITCH)),
    "pretrain": Verb(8, 3, 9.0, _points(*_SNAPSHOT)),
    "ingest": Verb(8, 4, 5.0, _points("append quarantine", "append measurements/walk")),
    "maintain": Verb(9, 6, 30.0, _points(*_MAINTAIN)),
    "adopt": Verb(8, 4, 24.0, _points(*_BEGIN, *_TAKE, "append live", *_FIRST)),
    "replay": Verb(
        7, 4, 6.0, _points("merge into quarantine", "append measurements/walk", "update quarantine")
    ),
}
KINDS = (
    (KILL, BOTH),
    (FREEZE, PYTHON),
    (KILL, JAVA),
    (KILL, PYTHON),
    (FREEZE, BOTH),
    (KILL, BOTH),
    (KILL, JAVA),
    (FREEZE, JAVA),
    (KILL, PYTHON),
)


def wanted(default: range) -> list[int]:
    """Return the seeds that KALMAN_KILLS asks for."""
    asked, found = os.environ.get("KALMAN_KILLS"), list[int]()
    for part in asked.split(",") if asked else ():
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found or list(default)


def kills_of(world: int) -> list[Kill]:
    """Return the kills that a world lives through, in their order."""
    place = world % (ROUND // IN_A_WORLD) * IN_A_WORLD
    return hundred(world * IN_A_WORLD // ROUND)[place : place + IN_A_WORLD]


def hundred(number: int) -> list[Kill]:
    """Return a hundred kills, the first one's seed being a hundred times their number."""
    chance = random.Random(number)
    made: list[Kill] = []
    for name, verb in VERBS.items():
        aimed = [True] * verb.aimed + [False] * (verb.kills - verb.aimed)
        chance.shuffle(aimed)
        gaps = _gaps(verb, number)
        kinds = [KINDS[(number + place) % len(KINDS)] for place in range(verb.kills)]
        for (how, victim), at_a_point in zip(kinds, aimed, strict=True):
            wake = chance.choice([None, round(chance.uniform(0.2, 4.0), 1)]) if how == FREEZE else None
            one = Kill(0, name, victim, how, wake_after=wake)
            made.append(_at(one, verb, next(gaps), chance) if at_a_point else _any(one, chance))
    chance.shuffle(made)
    return [replace(one, seed=number * ROUND + place) for place, one in enumerate(made)]


def _gaps(verb: Verb, number: int) -> Iterator[int]:
    """Return a verb's gaps in an order of their own, from where the hundred before has ended."""
    order = list(range(len(verb.points)))
    random.Random(len(order)).shuffle(order)
    return islice(cycle(order), number * verb.aimed, None)


def _at(kill: Kill, verb: Verb, gap: int, chance: random.Random) -> Kill:
    """Aim a kill into a gap: at its beginning, right after a commit, or at its end, right before the next."""
    after = gap + 1 == len(verb.points) or chance.random() < 0.5
    point = verb.points[gap if after else gap + 1]
    return replace(kill, point=point.name, nth=point.nth, edge="after" if after else "before", gap=gap)


def _any(kill: Kill, chance: random.Random) -> Kill:
    return replace(kill, moment=round(chance.uniform(0.02, 0.95), 3))
