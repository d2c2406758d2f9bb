"""Which kills the soak of the states makes: each is known by its seed, and aimed at a file of one micro-batch.

A round takes each moment with each kind of strike once; the next one gives the strikes of the drivers with a local copy
to those without, and the other way round. Ten strikes make a world, and the worlds have the layouts in turn.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product
from typing import Any

from tests.jobs.soak.kills import BOTH, FREEZE, HANG, IN_A_WORLD, JAVA, KILL, PYTHON, Kill

SPARSE, MIXED, DENSE = "sparse", "mixed", "dense"

_OFFSETS, _COMMITS, _STATE = "offsets", "commits", "state/0/{partition}"
_CHANGELOG, _SNAPSHOT = r"(\d+)(?:_[0-9a-f-]+)?\.changelog", r"(\d+)(?:_[0-9a-f-]+)?\.zip"


def _or_begun(name: str) -> str:
    """Return the pattern of a file's name and of the one under which Spark writes it before it renames it."""
    return rf"\.?{name}(?:\.[0-9a-f-]+(?:\.TID\d+)?\.tmp)?"


FILES = {
    "offsets begun": (_OFFSETS, _or_begun(r"(\d+)")),
    "offsets": (_OFFSETS, r"(\d+)"),
    "changelog begun": (_STATE, _or_begun(_CHANGELOG)),
    "changelog": (_STATE, _CHANGELOG),
    "snapshot begun": (_STATE, _or_begun(_SNAPSHOT)),
    "snapshot": (_STATE, _SNAPSHOT),
    "commit": (_COMMITS, r"(\d+)"),
}
"""At which files strikes are aimed: the folder in the checkpoint, and a pattern of names with their number."""
BEFORE_COMMIT = "before commit"
"""The estimates are written, and Spark has not noted the micro-batch yet."""
MOMENTS = (*FILES, BEFORE_COMMIT)
KINDS = (
    (KILL, BOTH),
    (KILL, PYTHON),
    (KILL, JAVA),
    (FREEZE, BOTH),
    (FREEZE, PYTHON),
    (FREEZE, JAVA),
    (HANG, PYTHON),
)
STATE_ROUND = len(MOMENTS) * len(KINDS)

ARRIVED, STRICT, REPLAY = "as-arrived", "strict", "replay"
LAYOUTS = (
    (ARRIVED, 1),
    (ARRIVED, 2),
    (STRICT, 2),
    (ARRIVED, 1),
    (ARRIVED, 2),
    (REPLAY, 1),
    (ARRIVED, 1),
    (ARRIVED, 2),
    (STRICT, 1),
    (REPLAY, 2),
)
"""The order of the rows, and the state partitions, of the worlds in turn."""

LEADS = (*[(DENSE,)] * 3, (SPARSE, DENSE), (DENSE, SPARSE, SPARSE), (SPARSE,) * 4)
"""Micro-batches of the struck driver before the one that is aimed at, from which it has a copy then.

Behind a dense one, which leaves no changes, a driver without a copy makes none.
"""
FOLLOWING = (*[(SPARSE,) * 3] * 4, (MIXED, SPARSE, SPARSE), (SPARSE, DENSE, SPARSE))
"""Micro-batches of the driver that takes over; a dense one writes all blocks anew, and with them what was lost."""


@dataclass(frozen=True)
class StateKill(Kill):
    """A strike at a moment of one micro-batch.

    copy: whether the struck driver has a local copy when the micro-batch begins; kept: whether the copies of the driver
    that takes over are left to it. lead, target, following: which keys the micro-batches have. partition: the one at
    whose files is aimed, or * for the first.
    """

    moment_name: str = BEFORE_COMMIT
    copy: bool = True
    kept: bool = False
    lead: tuple[str, ...] = ()
    target: str = SPARSE
    following: tuple[str, ...] = ()
    partition: str = "*"

    @property
    def at_random(self) -> bool:
        return False

    @property
    def layout(self) -> tuple[str, int]:
        """The order of the rows and the state partitions of its world."""
        return LAYOUTS[self.world % len(LAYOUTS)]

    def aim(self) -> str:
        return self.moment_name

    def record(self) -> dict[str, Any]:
        order, partitions = self.layout
        return {
            **super().record(),
            "order": order,
            "partitions": partitions,
            "copy": self.copy,
            "kept": self.kept,
            "target": self.target,
            "days": [*self.lead, f"[{self.target}]", *self.following],
            "partition": self.partition,
        }


def state_kills_of(world: int) -> list[StateKill]:
    """Return the strikes that a world lives through, in their order."""
    return [_state_kill(seed) for seed in range(world * IN_A_WORLD, (world + 1) * IN_A_WORLD)]


def _state_kill(seed: int) -> StateKill:
    number, place = divmod(seed, STATE_ROUND)
    order = list(enumerate(product(MOMENTS, KINDS)))
    random.Random(number).shuffle(order)
    index, (moment, (how, victim)) = order[place]
    chance = random.Random(seed)
    copy = (index + index // len(KINDS) + number) % 2 == 0
    lead = chance.choice(LEADS) if copy else ()
    return StateKill(
        seed,
        "stream",
        victim,
        how,
        point="micro-batch written" if moment == BEFORE_COMMIT else None,
        nth=len(lead) + 1,
        edge="before",
        wake_after=chance.choice([None, round(chance.uniform(0.5, 4.0), 1)]) if how == FREEZE else None,
        moment_name=moment,
        copy=copy,
        kept=chance.random() < (0.25 if copy else 0.75),  # most often one of the two drivers has a copy
        lead=lead,
        target=chance.choice([*[SPARSE] * 4, MIXED, DENSE]),
        following=chance.choice(FOLLOWING),
        partition=chance.choice(["*", "0", str(LAYOUTS[seed // IN_A_WORLD % len(LAYOUTS)][1] - 1)]),
    )
