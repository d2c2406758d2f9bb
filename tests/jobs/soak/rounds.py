"""Make the kills of one world after the other, each in a Spark of its own, and record what was found."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pyspark import SparkContext
from pyspark.sql import SparkSession

from tests.jobs.soak import results, strikes
from tests.jobs.soak.kills import VERBS, Kill
from tests.jobs.soak.world import World

TRIES = 3
"""How often a random moment that came too late is tried earlier."""


def in_world(
    make: Callable[[Path], World], folder: Path, kills: Sequence[Kill], seeds: set[int], until: float
) -> list[dict[str, Any]]:
    """Make a world's kills of these seeds, in their order, and return what was found.

    After a violation the next ones get a new world.
    """
    found: list[dict[str, Any]] = []
    world, made = None, 0
    for kill in kills:
        if kill.seed > max(seeds) or time.monotonic() > until:
            break
        if world is None:
            end_java()
            world, made = make(folder / str(made)), made + 1
        if kill.seed not in seeds:
            unharmed(world, kill)
            continue
        outcomes = attempts(world, kill)
        found += outcomes
        if outcomes[-1]["verdict"] in (strikes.VIOLATED, strikes.BROKEN):
            world = None
    return found


def attempts(world: World, kill: Kill) -> list[dict[str, Any]]:
    """Make a kill; at a random moment that comes too late, again, earlier."""
    seconds = kill.moment * VERBS[kill.verb].seconds
    found: list[dict[str, Any]] = []
    for _ in range(TRIES if kill.at_random else 1):
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
    act = world.prepared(kill)
    code, said = world.again(act)
    assert code == 0, said
    act.done()
    if act.streams:
        world.catch_up()
