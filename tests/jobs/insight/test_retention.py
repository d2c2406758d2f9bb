"""The retention plan, over plain records, without Spark."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.insight.retention_plan import RetentionPlan, list_lineages, plan_retention
from jobs.lineage.generations import FAILED, LIVE, REMOVED, RETIRED, SHADOW, Generation
from jobs.snapshots.manifests import GOOD, Manifest
from jobs.snapshots.manifests import REMOVED as GONE
from jobs.specs.retention import Kept, KeptGenerations, Retention

NOW = datetime(2026, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)
NONE = Retention(snapshots=Kept(newest=0, age="1d"), generations=KeptGenerations(newest=0, age="1d"))


def generation(number: int, status: str, **changes: Any) -> Generation:
    values: dict[str, Any] = {
        "generation": f"m-g{number:04d}",
        "model": "m",
        "model_version": 1,
        "fingerprint": "v1",
        "snapshot_id": "s0",
        "checkpoint": f"checkpoints/m-g{number:04d}",
        "start_position": {"source": "delta", "table": "measurements/m", "version": number},
        "partitions": 2,
        "blocks": 1,
        "status": status,
        "created_at": NOW - 100 * DAY + number * DAY,
        "retired_at": None if status in (LIVE, SHADOW) else NOW - 90 * DAY + number * DAY,
        **changes,
    }
    return Generation(**values)


def manifest(number: int, **changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "snapshot_id": f"s{number}",
        "model": "m",
        "model_version": 1,
        "fingerprint": "v1",
        "parameters": {},
        "position": {"source": "delta", "table": "measurements/m", "version": number},
        "key_count": 1,
        "checksum": "",
        "rows": 1,
        "snapshots_version": number,
        "spec": "{}",
        "committed_at": NOW - 100 * DAY + number * DAY,
        **changes,
    }
    return Manifest(**values)


def decided(
    generations: list[Generation], manifests: list[Manifest], rules: Retention = NONE, **options: Any
) -> RetentionPlan:
    return plan_retention(generations, manifests, rules, NOW, options.pop("deployed", "v1"), **options)


def test_live_shadow_driven_and_roll_back_generations_are_kept() -> None:
    known = [
        generation(1, RETIRED),
        generation(2, RETIRED, parent="m-g0001"),
        generation(3, LIVE, parent="m-g0002"),
        generation(4, SHADOW, parent="m-g0003"),
        generation(5, RETIRED),
        generation(6, FAILED),
    ]
    made = decided(known, [], driven={"m-g0005"})
    assert made.generations == ["m-g0001", "m-g0006"]
    assert made.why_generations == {
        "m-g0003": "it is live",
        "m-g0004": "it is a shadow",
        "m-g0005": "a driver still holds it",
        "m-g0002": "rollback goes back to it",
    }
    # The estimates of the first are read as the live ones before those of the second.
    assert made.estimates == ["m-g0006"]


def test_the_newest_and_the_young_are_kept_by_the_spec() -> None:
    rules = Retention(snapshots=Kept(newest=2, age="95d"), generations=KeptGenerations(newest=1, age="86d"))
    known = [generation(number, RETIRED) for number in range(1, 8)] + [generation(8, LIVE)]
    made = decided(known, [manifest(number) for number in range(10)], rules)
    # Retired 90 days ago less their number: the newest, and those of less than 86 days.
    assert made.generations == ["m-g0001", "m-g0002", "m-g0003", "m-g0004"]
    assert made.why_generations["m-g0007"] == "one of the 1 newest"
    assert made.why_generations["m-g0005"] == "younger than 86d"
    assert made.snapshots == ["s1", "s2", "s3", "s4", "s5"]
    assert made.why_snapshots == {
        "s0": "m-g0008 started from it",
        "s9": "the last good one",
        "s8": "one of the 2 newest",
        "s7": "younger than 95d",
        "s6": "younger than 95d",
    }


def test_a_model_without_a_live_generation_keeps_its_newest() -> None:
    made = decided([generation(1, RETIRED), generation(2, RETIRED)], [])
    assert made.generations == ["m-g0001"]


def test_the_last_good_snapshot_is_one_that_a_stream_can_start_from() -> None:
    # History only, of another version, already gone, and damaged: none of them stands in for a good one.
    manifests = [
        manifest(1),
        manifest(2, fingerprint="v2", model_version=2),
        manifest(3, cut=NOW),
        manifest(4, status=GONE),
        manifest(5, cut=NOW),
    ]
    made = decided([generation(1, LIVE, snapshot_id="s9")], manifests, deployed="v2")
    assert made.snapshots == ["s3"]
    assert set(made.why_snapshots) == {"s1", "s2", "s5"}


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Generation], list[Manifest], Retention, set[str]]:
    """Draw generations, snapshots, rules and what is driven, as they could come about."""
    count = draw(st.integers(0, 8))
    snapshots = draw(st.integers(0, 10))
    manifests = [
        manifest(
            number,
            fingerprint=draw(st.sampled_from(["v1", "v2", "v3"])),
            position={"source": "delta", "table": "t", "version": draw(st.integers(0, 20))},
            cut=draw(st.sampled_from([None, None, NOW])),
            status=draw(st.sampled_from([GOOD, GOOD, GONE])),
            committed_at=NOW - draw(st.integers(0, 100)) * DAY,
        )
        for number in range(snapshots)
    ]
    live = draw(st.integers(0, count)) if count else 0
    known = [
        generation(
            number,
            LIVE if number == live else draw(st.sampled_from([RETIRED, RETIRED, FAILED, SHADOW, REMOVED])),
            fingerprint=draw(st.sampled_from(["v1", "v2", "v3"])),
            snapshot_id=f"s{draw(st.integers(0, 10))}",
            parent=draw(st.sampled_from([None, *(f"m-g{n:04d}" for n in range(1, number))])),
            created_at=NOW - (100 - number) * DAY,
            retired_at=None if number == live else NOW - draw(st.integers(0, 100)) * DAY,
        )
        for number in range(1, count + 1)
    ]
    ages = st.integers(1, 120).map(lambda days: f"{days}d")
    kept = st.builds(Kept, newest=st.integers(0, 4), age=ages)
    driven = draw(st.sets(st.sampled_from([one.generation for one in known]))) if known else set()
    return (
        known,
        manifests,
        Retention(snapshots=draw(kept), generations=KeptGenerations(**draw(kept).model_dump())),
        driven,
    )


@given(histories())
@settings(max_examples=100, deadline=None)
def test_nothing_needed_is_removed(history: Any) -> None:
    known, manifests, rules, driven = history
    made = decided(known, manifests, rules, driven=driven)
    by_name = {one.generation: one for one in known}
    going = set(made.generations)
    live = next((one for one in known if one.status == LIVE), None)
    assert (
        not {name for name in going if by_name[name].status in (LIVE, SHADOW, REMOVED)} and not going & driven
    )
    if live is not None and live.parent is not None:
        assert live.parent not in going
    stay = [one for one in known if one.status != REMOVED and one.generation not in going]
    begun_from = {one.snapshot_id for one in stay}
    assert not begun_from & set(made.snapshots)
    for meaning in (None, "v1", *(one.fingerprint for one in stay)):
        startable = [
            one
            for one in manifests
            if one.status == GOOD and one.cut is None and meaning in (None, one.fingerprint)
        ]
        if startable:
            last = max(one.version for one in startable)
            assert any(one.version == last and one.snapshot_id not in made.snapshots for one in startable), (
                meaning
            )
    # Estimates that are read now, or after a roll-back to anything that stays, stay.
    for one in stay:
        assert not list_lineages(known, [one]) & set(made.estimates)


@given(histories())
@settings(max_examples=100, deadline=None)
def test_an_applied_plan_leaves_nothing_to_remove(history: Any) -> None:
    """Applied at once or in two halves."""
    from dataclasses import replace

    known, manifests, rules, driven = history
    made = decided(known, manifests, rules, driven=driven)
    generations = [
        replace(one, status=REMOVED) if one.generation in made.generations else one for one in known
    ]
    half = decided(generations, manifests, rules, driven=driven)  # killed before the snapshots
    assert (half.generations, half.snapshots, half.estimates) == ([], made.snapshots, made.estimates)
    left = [replace(one, status=GONE) if one.snapshot_id in made.snapshots else one for one in manifests]
    again = decided(generations, left, rules, driven=driven)
    assert (again.generations, again.snapshots) == ([], [])
    assert again.estimates == made.estimates
    assert again.why_generations == made.why_generations and again.why_snapshots == made.why_snapshots


@given(histories(), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_a_more_generous_retention_removes_less(history: Any, more: int) -> None:
    known, manifests, rules, driven = history
    generous = Retention(
        snapshots=Kept(newest=rules.snapshots.newest + more, age=rules.snapshots.age),
        generations=KeptGenerations(newest=rules.generations.newest + more, age=rules.generations.age),
    )
    less, all_ = (decided(known, manifests, one, driven=driven) for one in (generous, rules))
    assert set(less.generations) <= set(all_.generations)
    assert set(less.snapshots) <= set(all_.snapshots)


@pytest.mark.parametrize("age", ["3h", "soon", "0d"])
def test_an_age_under_a_day_is_refused(age: str) -> None:
    with pytest.raises(ValueError, match="less than a day|duration"):
        Kept(newest=1, age=age)
