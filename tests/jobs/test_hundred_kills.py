"""A hundred seeded kills: the processes of every verb killed or frozen, at random and between two commits.

Each kill is made in a *world* (a model's warehouse) that lives through ten of them; after each the verb is run again,
as an operator would, everything is compared with one batch pass by the filter alone, to the bit, and `verify`
recomputes it from the lineage.

KALMAN_KILLS (0-99) says which seeds: `37` repeats one kill, after the verbs before it in its world have run unharmed;
`100-199` are others. KALMAN_KILLS_RECORD (var/kills.jsonl) is the file to which each result is appended, a JSON line;
`python -m tests.jobs.soak.results FILE` makes a table of it. KALMAN_KILLS_SECONDS ends a run between two kills.
With KALMAN_KILLS_STORE=s3 the warehouses are in an S3 store (versitygw); the seeds are then 110-139, among which every
verb is struck.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.jobs.soak import results, strikes
from tests.jobs.soak.kills import FREEZE, IN_A_WORLD, KILL, KINDS, ROUND, VERBS, kills_of, wanted
from tests.jobs.soak.oracle import Oracle, differences
from tests.jobs.soak.rounds import end_java, in_world
from tests.jobs.soak.world import MODEL, World
from tests.jobs.support.pipeline import Pipeline, random_rows, random_walk_spec
from tests.support import object_store

STORE = "KALMAN_KILLS_STORE"
IN_S3 = range(110, 140)
"""Three worlds in which every verb is struck, killed and frozen."""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str | None]:
    """The folder of the store in which the warehouses are made, None: they are made in folders."""
    if not os.environ.get(STORE):
        yield None
        return
    if (missing := object_store.missing(java=True)) is not None:
        pytest.skip(missing)
    with object_store.ObjectStore(tmp_path / "objects") as running:
        for name, value in object_store.environment(running.address).items():
            monkeypatch.setenv(name, value)
        yield f"s3a://{object_store.BUCKET}"


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
    in_s3 = [more[seed] for seed in IN_S3]
    assert {kill.verb for kill in in_s3} == set(VERBS)
    assert {(kill.how, kill.victim) for kill in in_s3} == {(how, victim) for how, victim in KINDS}
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


@pytest.mark.soak
@pytest.mark.spark
def test_a_hundred_kills_change_nothing(tmp_path: Path, store: str | None) -> None:
    until = time.monotonic() + float(os.environ.get("KALMAN_KILLS_SECONDS") or 1e6)
    seeds = wanted(range(ROUND) if store is None else IN_S3)
    found: list[dict[str, Any]] = []
    for number, some in groupby(seeds, lambda seed: seed // IN_A_WORLD):
        make = partial(World, seed=number, store=store)
        found += in_world(make, tmp_path / f"world-{number}", kills_of(number), set(some), until)
    bad = [one for one in found if one["verdict"] == strikes.VIOLATED]
    end_java()
    assert not bad, "\n".join(results.summary(found))
    reached = {one.get("seed") for one in found if one["verdict"] == strikes.UNHARMED} - {None}
    assert reached == set(seeds) or time.monotonic() > until, f"never struck: {sorted(set(seeds) - reached)}"
