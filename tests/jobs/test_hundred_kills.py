"""A hundred seeded kills: the processes of every verb killed or frozen, at random and between two commits.

Each kill is made in a *world* (a model's warehouse) that lives through ten of them; after each the verb is run again,
as an operator would, and everything is compared with one batch pass by the filter alone, to the bit.

KALMAN_KILLS (0-99) says which seeds: `37` repeats one kill, after the verbs before it in its world have run unharmed;
`100-199` are others. KALMAN_KILLS_RECORD (var/kills.jsonl) is the file to which each result is appended, a JSON line;
`python -m tests.jobs.soak.results FILE` makes a table of it. KALMAN_KILLS_SECONDS ends a run between two kills.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import traceback
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from tests.jobs.soak import results, strikes
from tests.jobs.soak.kills import FREEZE, IN_A_WORLD, KILL, ROUND, VERBS, Kill, kills_of
from tests.jobs.soak.oracle import Oracle, differences
from tests.jobs.soak.world import MODEL, Act, World
from tests.jobs.support.pipeline import Pipeline, random_rows, random_walk_spec

TRIES = 3
"""How often a random moment that came too late is tried earlier."""


def test_a_hundred_kills_are_spread_over_all_verbs_and_gaps() -> None:
    first = [kill for world in range(ROUND // IN_A_WORLD) for kill in kills_of(world)]
    assert [kill.seed for kill in first] == list(range(ROUND))
    assert Counter(kill.verb for kill in first) == {name: verb.kills for name, verb in VERBS.items()}
    assert sum(kill.point is not None for kill in first) == ROUND // 2
    for name in VERBS:
        mine = [kill for kill in first if kill.verb == name]
        assert {kill.how for kill in mine} == {KILL, FREEZE}
        assert {kill.victim for kill in mine} == {"python", "java", "both"}
        assert {kill.point is None for kill in mine} == {True, False}
    more = [kill for world in range(5 * ROUND // IN_A_WORLD) for kill in kills_of(world)]
    for name, verb in VERBS.items():
        aimed = {kill.gap for kill in more if kill.verb == name and kill.point is not None}
        assert aimed == set(range(len(verb.points))), f"{name}: five rounds reach every gap"


def test_the_comparison_finds_what_is_lost_doubled_or_changed(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec(MODEL))
    oracle = Oracle(pipeline.settings, MODEL, tmp_path, parts=random_rows(4, rows=40))
    oracle.parts = [one.drop_duplicates(["id", "at"], ignore_index=True) for one in oracle.parts]
    whole = oracle.live(4)
    assert differences(whole.sample(frac=1.0, random_state=1), whole) == []
    assert "1 estimates are doubled" in differences(pd.concat([whole, whole.tail(1)]), whole)[0]
    assert f"1 of {len(whole)} estimates are missing" in differences(whole.iloc[1:], whole)[0]
    assert "of rows that nobody sent" in differences(whole, whole.iloc[1:])[0]
    flipped = whole.copy()
    flipped.loc[5, "log_likelihood"] = np.nextafter(flipped.loc[5, "log_likelihood"], 0.0)
    assert (
        "1 of" in differences(flipped, whole)[0]
        and "another log_likelihood" in differences(flipped, whole)[0]
    )
    oracle.continues(2, began=2)  # without state from the third part on
    anew = oracle.live(4)
    assert len(anew) == len(whole) and "another mean" in differences(whole, anew)[0]
    oracle.continues(1, began=0)  # and back to the one pass, from an older snapshot
    assert differences(oracle.live(4), whole) == []


def wanted() -> list[int]:
    """Return the seeds that are asked for."""
    text = os.environ.get("KALMAN_KILLS") or f"0-{ROUND - 1}"
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


@pytest.mark.soak
@pytest.mark.spark
def test_a_hundred_kills_change_nothing(tmp_path: Path) -> None:
    seeds, until = wanted(), time.monotonic() + float(os.environ.get("KALMAN_KILLS_SECONDS") or 1e6)
    found: list[dict[str, Any]] = []
    for number, some in groupby(seeds, lambda seed: seed // IN_A_WORLD):
        found += in_world(tmp_path / f"world-{number}", number, set(some), until)
    bad = [one for one in found if one["verdict"] == strikes.VIOLATED]
    end_java()
    assert not bad, "\n".join(results.summary(found))
    reached = {one.get("seed") for one in found if one["verdict"] == strikes.UNHARMED} - {None}
    assert reached == set(seeds) or time.monotonic() > until, f"never struck: {sorted(set(seeds) - reached)}"


def in_world(folder: Path, number: int, seeds: set[int], until: float) -> list[dict[str, Any]]:
    """Make a world's kills of these seeds, in their order; after a violation the next ones get a new world."""
    found: list[dict[str, Any]] = []
    world, made = None, 0
    for kill in kills_of(number):
        if kill.seed > max(seeds) or time.monotonic() > until:
            break
        if world is None:
            end_java()
            world, made = World(folder / str(made), number), made + 1
        if kill.seed not in seeds:
            unharmed(world, kill)
            continue
        outcomes = attempts(world, kill)
        found += outcomes
        if outcomes[-1]["verdict"] in (strikes.VIOLATED, strikes.BROKEN):
            world = None
    if world is not None:
        found.append(verified(world, number))
    return found


def attempts(world: World, kill: Kill) -> list[dict[str, Any]]:
    """Make a kill; at a random moment that comes too late, again, earlier."""
    seconds = kill.moment * VERBS[kill.verb].seconds
    found: list[dict[str, Any]] = []
    for _ in range(TRIES if kill.point is None else 1):
        try:
            one = strikes.run(world, kill, seconds)
        except Exception as error:  # of the test's own Spark, for one: it says nothing of the kill
            one = {**kill.record(), "verdict": strikes.BROKEN, "problems": [repr(error)[:500]]}
            traceback.print_exc()
        results.write(one)
        print(
            f"{one['seed']:4} {one['verdict']:8} {one['verb']:12} {one['how']} {one['victim']} {one['aim']}"
        )
        found.append(one)
        if one["verdict"] != strikes.MISSED:
            break
        seconds /= 2
    return found


def end_java() -> None:
    """End Spark and its process: each world begins with a new one, as one that lives on for an hour runs full."""
    context = SparkContext._active_spark_context
    gateway: Any = SparkContext._gateway
    with contextlib.suppress(Exception):
        if context is not None:
            context.stop()
    with contextlib.suppress(Exception):
        if gateway is not None:
            gateway.shutdown()
            gateway.proc.stdin.close()
            gateway.proc.wait(timeout=60)
    SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None


def unharmed(world: World, kill: Kill) -> None:
    """Run a verb without a kill, and let the stream catch up where it does so after a kill."""
    act = world.prepared(kill.verb)
    code, said = world.again(act)
    assert code == 0, said
    act.done()
    if act.streams:
        world.catch_up()


def verified(world: World, number: int) -> dict[str, Any]:
    """Let `verify` recompute the world from its lineage, all keys; return what it found, as recorded.

    It leaves out what `maintain` has removed, and says so (exit code 3); it must find nothing that differs.
    """
    world.catch_up()
    code, said = world.again(Act(["verify", "--model", MODEL, "--share", "100%"]))
    equal = re.search(r"([0-9,]+) estimates and ([0-9,]+) states are equal to the bit", said)
    counts = [0, 0] if equal is None else [int(one.replace(",", "")) for one in equal.groups()]
    sound = code in (0, 3) and counts[0] > 0
    one = {
        "world": number,
        "verify": "equal" if code == 0 else "a part was left out",
        "estimates": counts[0],
        "states": counts[1],
        "said": said.splitlines(),
        "verdict": strikes.UNHARMED if sound else strikes.VIOLATED,
    }
    results.write(one)
    print(f"     {one['verdict']} world {number}: verify: {one['verify']}, {counts[0]:,} estimates equal")
    return one
