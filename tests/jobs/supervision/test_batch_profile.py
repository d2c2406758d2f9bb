"""The profile of a micro-batch: steps and rest add up to its wall time, whatever the clocks say. Spark-free."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.supervision.batch_profile import (
    BEFORE,
    BETWEEN,
    DELTAS,
    FILTER,
    MEANING,
    REST,
    TO_DELTA,
    Job,
    Lap,
    Profiled,
    Stage,
    average_profiles,
    build_profile_table,
    compute_covered_seconds,
    compute_profile,
    list_steps,
    share_seconds,
    sort_steps,
)
from tests.conftest import ROOT


def stage(number: int, begin: float, end: float, task: float, **more: float) -> Stage:
    return Stage(number, "stage", (begin, end), 2, task, **more)


def job(number: int, description: str, *stages: Stage) -> Job:
    span = min(one.span[0] for one in stages), max(one.span[1] for one in stages)
    return Job(number, "name", description, "run", span, stages)


def progress(**durations: int) -> dict[str, Any]:
    return {"batchId": 7, "durationMs": durations, "stateOperators": [STORE]}


STORE = {"commitTimeMs": 400, "customMetrics": {"rocksdbLoadLatencyMs": 100, "rocksdbGetCount": 5}}
PHASES = {"latestOffset": 10, "queryPlanning": 90, "walCommit": 30, "commitOffsets": 40}
FILTERING = job(
    1,
    "walk-g0001: micro-batch 7, filter",
    stage(1, 10.0, 10.2, 0.4, shuffle_write=0.1),
    stage(2, 10.25, 11.25, 2.0, shuffle_read=0.2),
)
MARKS = {"pack rows": 0.2, "unpack and sort": 0.2, "filter": 0.6, "state read": 0.1, "state write": 0.2}
LAPS = [Lap(FILTER, (9.95, 11.3), MARKS)]
DELTA_JOBS = [
    job(3, "Delta: Compute snapshot for version: 3", stage(4, 11.6, 11.65, 0.1)),
]
WRITING = Lap(TO_DELTA, (11.3, 11.7), {})


def test_the_time_of_a_stage_is_divided_by_the_work_of_its_tasks() -> None:
    found = compute_profile(progress(triggerExecution=1600, addBatch=1350, **PHASES), 5, LAPS, [FILTERING])
    assert (found.batch_id, found.rows, found.seconds) == (7, 5, 1.6)
    assert found.steps == pytest.approx({
        "planning": 0.1, "WAL": 0.03, "commit log": 0.04,
        "pack rows": 0.1, "read": 0.05,  # of 0.2 s with 0.4 s of tasks: 0.2 packed, 0.1 wrote, the rest read
        "shuffle": 0.05 + 0.1,
        "unpack and sort": 0.1, "filter": 0.3, "state read": 0.05, "state write": 0.1,
        "state load": 0.05, "state commit": 0.2,
        "hand-over": 1.0 - 0.1 - 0.8,
        "scheduling": 1.35 - 1.2,
    })  # fmt: skip
    assert sum(found.steps.values()) + found.rest == pytest.approx(1.6)
    assert found.rest == pytest.approx(0.08)


def test_the_commit_of_the_estimates_is_a_step_of_its_own() -> None:
    whole = progress(triggerExecution=2000, addBatch=1800, **PHASES)
    found = compute_profile(
        whole, 5, [*LAPS, WRITING, Lap("latest states", (11.7, 11.75), {})], [FILTERING, *DELTA_JOBS]
    )
    steps = {name: found.steps[name] for name in ("commit", "latest states")}
    assert steps == pytest.approx({"commit": 0.4, "latest states": 0.05})
    assert found.rest == pytest.approx(2.0 - 0.17 - 1.35 - 0.4 - 0.05)


def test_parts_that_exceed_the_task_leave_no_remainder() -> None:
    laps = [Lap(FILTER, (9.95, 11.3), {name: 10 * seconds for name, seconds in MARKS.items()})]
    found = compute_profile(progress(triggerExecution=1600, addBatch=1350, **PHASES), 5, laps, [FILTERING])
    assert found.steps["hand-over"] == pytest.approx(0.0) and found.steps["read"] == pytest.approx(0.0)
    assert sum(found.steps.values()) == pytest.approx(1.52)


def test_time_of_jobs_that_spark_no_longer_keeps_counts_for_the_driver() -> None:
    found = compute_profile(progress(triggerExecution=1600, addBatch=1350, **PHASES), 5, LAPS, [])
    assert found.steps["scheduling"] == pytest.approx(1.35)
    assert found.rest == pytest.approx(0.08)


def test_what_spark_does_around_the_sink_counts_for_the_driver() -> None:
    found = compute_profile(progress(triggerExecution=1600, addBatch=1410, **PHASES), 5, LAPS, [FILTERING])
    assert found.steps["scheduling"] == pytest.approx(0.15 + 0.06)
    assert found.rest == pytest.approx(0.02)


def test_only_the_stage_that_reads_rows_counts_as_packing() -> None:
    seeds = stage(0, 9.96, 9.99, 0.05)
    begun = FILTERING._replace(stages=(seeds, *FILTERING.stages), span=(9.96, 11.25))
    found = compute_profile(progress(triggerExecution=1600, addBatch=1350), 5, LAPS, [begun])
    assert found.steps["pack rows"] == pytest.approx(0.1)
    assert found.steps["read"] == pytest.approx(0.05 + 0.03)


def test_the_mean_adds_up_too() -> None:
    one = compute_profile(progress(triggerExecution=1600, addBatch=1350, **PHASES), 6, LAPS, [FILTERING])
    other = compute_profile(
        progress(triggerExecution=400, addBatch=200, queryPlanning=100, newPhase=50), 0, [], []
    )
    mean = average_profiles([(one, 2), (other, 1)])
    assert (mean.rows, mean.seconds) == (4, pytest.approx(1.2))
    assert mean.steps["planning"] == pytest.approx((0.1 + 0.1 + 0.1) / 3)
    assert mean.steps["newPhase"] == pytest.approx(0.05 / 3)
    assert sum(mean.steps.values()) + mean.rest == pytest.approx(1.2)


def test_every_step_is_explained_and_the_table_shows_all() -> None:
    whole = progress(triggerExecution=2000, addBatch=1800, **PHASES)
    found = compute_profile(
        whole, 5, [*LAPS, WRITING, Lap("latest states", (11.7, 11.75), {})], [FILTERING, *DELTA_JOBS]
    )
    assert set(found.steps) - set(MEANING) == {"latest states"}
    order = sort_steps(found.steps)
    assert order.index("commit") + 1 == order.index("latest states")
    assert (order[0], order[-1]) == ("planning", "commit log")
    table = build_profile_table(Profiled(1, found, (found,)), "walk")
    names, seconds = (list(column.cells) for column in table.columns[:2])
    assert names == [*order, REST, "micro-batch"]
    assert sum(float(str(one)) for one in seconds[:-1]) == pytest.approx(2.0, abs=0.001 * len(seconds))


def test_the_page_explains_the_steps_in_their_order() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    assert "\n".join(f"| {name} | {meaning} |" for name, meaning in MEANING.items()) in page


def test_overlapping_time_counts_once() -> None:
    assert compute_covered_seconds([(1.0, 2.0), (1.5, 1.7), (3.0, 4.0), (1.8, 2.5)]) == pytest.approx(2.5)
    assert compute_covered_seconds([]) == 0.0
    parallel = [stage(1, 0.0, 2.0, 1.0), stage(2, 1.0, 3.0, 1.0)]
    assert [seconds for _, seconds in share_seconds(parallel)] == pytest.approx([2.0, 1.0])


def test_the_time_of_a_verb_is_that_of_its_jobs_by_label_and_of_its_driver() -> None:
    jobs = [
        job(1, "pretrain walk: learn", stage(1, 12.0, 13.0, 2.0, gc=0.5)),
        job(2, "Delta: Compute snapshot for version: 3", stage(2, 13.5, 14.0, 0.5)),
        job(3, "pretrain walk: learn", stage(3, 14.0, 15.0, 1.0, shuffle_write=0.25)),
        job(4, "pretrain walk", stage(4, 14.5, 15.5, 1.0)),
    ]
    steps = list_steps(jobs, (10.0, 16.0))
    assert [(one.name, one.jobs, one.seconds) for one in steps] == [
        (BEFORE, 0, 2.0),
        ("learn", 2, 2.0),
        (DELTAS, 1, 0.5),
        ("pretrain walk", 1, 0.5),
        (BETWEEN, 0, 1.0),
    ]
    assert (steps[1].task_seconds, steps[1].shuffle_seconds, steps[1].gc_seconds) == (3.0, 0.25, 0.5)
    assert list_steps([], (10.0, 16.0))[0].seconds == 6.0
