"""Seeded kills and freezes aimed at a stream's state: at each file by which a micro-batch goes into it.

A driver is killed or frozen when Spark writes a micro-batch's offsets, changelog, snapshot or commit, with and without
a local copy of the states, which the next driver may have or not; so two attempts write different values. Afterwards
the stream runs on, and `verify`, a recount of the exported states and the filter alone must find no difference.

KALMAN_KILLS (0-199) says which seeds: `37` makes one strike in a world of its own, `30-37` after those before it in its
world. KALMAN_KILLS_RECORD (var/state-kills.jsonl) is the file to which each result is appended, a JSON line;
`python -m tests.jobs.soak.results FILE` makes a table of it. KALMAN_KILLS_SECONDS ends a run between two strikes.
With KALMAN_STATE_FORMAT=1 streams write a format that has one name for the files of two attempts: then strikes must be
found to do harm, as by seed 9.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.soak import results, strikes
from tests.jobs.soak.aimed import set_state_format
from tests.jobs.soak.kills import IN_A_WORLD, wanted
from tests.jobs.soak.rounds import end_java, in_world
from tests.jobs.soak.state_kills import (
    ARRIVED,
    DENSE,
    KINDS,
    LAYOUTS,
    MIXED,
    MOMENTS,
    REPLAY,
    SPARSE,
    STATE_ROUND,
    STRICT,
    state_kills_of,
)
from tests.jobs.soak.state_world import StateWorld

STRIKES = 200


def test_the_strikes_are_spread_over_moments_kinds_copies_and_layouts() -> None:
    made = [kill for world in range(STRIKES // IN_A_WORLD) for kill in state_kills_of(world)]
    assert [kill.seed for kill in made] == list(range(STRIKES))
    first = made[: 2 * STATE_ROUND]
    reached = Counter((kill.aim(), (kill.how, kill.victim), kill.copy) for kill in first)
    assert reached == Counter(product(MOMENTS, KINDS, [True, False])), "two rounds reach each once"
    assert {kill.layout for kill in made} == set(LAYOUTS)
    assert {order for order, _ in LAYOUTS} == {ARRIVED, STRICT, REPLAY}
    kinds = {(kill.target, kill.copy) for kill in made}
    assert kinds == set(product([SPARSE, MIXED, DENSE], [True, False]))
    assert {(kill.copy, kill.kept) for kill in made} == set(product([True, False], repeat=2))


@pytest.mark.soak
@pytest.mark.spark
def test_two_hundred_strikes_at_the_state_change_nothing(tmp_path: Path) -> None:
    seeds, until = (
        wanted(range(STRIKES)),
        time.monotonic() + float(os.environ.get("KALMAN_KILLS_SECONDS") or 1e6),
    )
    set_state_format()
    found: list[dict[str, Any]] = []
    for number, some in groupby(seeds, lambda seed: seed // IN_A_WORLD):
        order, partitions = LAYOUTS[number % len(LAYOUTS)]
        make = partial(StateWorld, seed=number, order=order, partitions=partitions)
        mine = set(some)
        kills = [kill for kill in state_kills_of(number) if kill.seed in mine]
        found += in_world(make, tmp_path / f"world-{number}", kills, mine, until)
    end_java()
    bad = [one for one in found if one["verdict"] == strikes.VIOLATED]
    assert not bad, "\n".join(results.summary(found))
    reached = {one["seed"] for one in found if one["verdict"] == strikes.UNHARMED}
    assert reached == set(seeds) or time.monotonic() > until, f"never struck: {sorted(set(seeds) - reached)}"
