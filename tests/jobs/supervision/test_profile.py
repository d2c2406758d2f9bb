"""`--profile` on real streams and verbs, and the labels of their jobs in Spark's UI."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from pyspark.accumulators import _accumulatorRegistry

from jobs import export, migrate
from jobs.core.stopwatch import (
    KALMAN,
    PACK,
    PACK_ESTIMATES,
    STATE_READ,
    STATE_WRITE,
    UNPACK,
    UNPACK_ESTIMATES,
)
from jobs.supervision.batch_profile import (
    COMMIT,
    COMMIT_LOG,
    COMMIT_STATE,
    DELTA,
    PLANNING,
    READ,
    SHUFFLE,
    WAL,
    WRITE,
    Job,
    JobTimes,
)
from jobs.supervision.progress import progress_of
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, random_rows, random_walk_spec, since

pytestmark = [pytest.mark.spark, pytest.mark.slow]

DRIVER = {PLANNING, WAL, COMMIT, COMMIT_LOG}
TASKS = {READ, PACK, SHUFFLE, UNPACK, STATE_READ, KALMAN, STATE_WRITE, PACK_ESTIMATES, COMMIT_STATE}
SINK = {UNPACK_ESTIMATES, WRITE}
MOST_REST = 0.25
"""Limit on the unmeasured share of a micro-batch. On an idle machine it is below one per cent."""


def begun(folder: Path, **changes: Any) -> tuple[Pipeline, list[Any]]:
    """Return a pipeline with a snapshot and two micro-batches to process, and the landed rows."""
    frames = random_rows(3)
    pipeline = Pipeline(folder, random_walk_spec(**changes))
    pipeline.land(frames[0])
    pipeline.pretrain()
    pipeline.land(*frames[1:])
    return pipeline, frames


def adds_up(profile: dict[str, Any]) -> None:
    """Check that a profile's steps add up to the wall time but for a small rest."""
    for one in (*profile["micro_batches"], profile["mean"]):
        assert all(seconds >= -0.002 for seconds in one["steps"].values()), (
            one
        )  # Spark's clock has milliseconds
        assert sum(one["steps"].values()) + one["rest"] == pytest.approx(one["seconds"])
        assert -0.01 <= one["rest"] <= MOST_REST * one["seconds"], one


def test_a_stream_reports_where_the_time_of_its_micro_batches_went(tmp_path: Path) -> None:
    pipeline, frames = begun(tmp_path)
    report = pipeline.stream(profile=True)
    profile = report.data["profile"]
    assert profile["count"] == report.data["batches"] == 2
    assert [one["rows"] for one in profile["micro_batches"]] == [len(frame) for frame in frames[1:]]
    adds_up(profile)
    for one in profile["micro_batches"]:
        assert {*DRIVER, *TASKS, *SINK} <= set(one["steps"])
        # Spark tells the driver's steps in whole milliseconds: its two small files take less than one
        assert all(
            one["steps"][name] > 0 for name in (PLANNING, KALMAN, UNPACK, PACK, UNPACK_ESTIMATES, WRITE)
        ), one
    # the wall time is that of Spark's progress
    recorded = {row["batch_id"]: row["seconds"] for row in progress_of(pipeline.warehouse, "walk").collect()}
    assert {one["batch_id"]: one["seconds"] for one in profile["micro_batches"]} == pytest.approx(recorded)
    shown = StringIO()
    report.show(stream=shown)
    assert (
        "estimated" in shown.getvalue() and "rest" in shown.getvalue() and "state write" in shown.getvalue()
    )
    # the profile changes no estimate
    assert_bit_equal(pipeline.estimates(), since(pipeline.batch(), frames[1]))


def test_an_event_time_stream_and_its_quarantine_are_profiled_too(tmp_path: Path) -> None:
    pipeline, frames = begun(tmp_path, order={"kind": "replay", "rows": 3})
    late = frames[0].head(3)
    pipeline.land(late)
    report = pipeline.stream(profile=True)
    profile = report.data["profile"]
    adds_up(profile)
    assert {*DRIVER, *TASKS, *SINK} <= set(profile["mean"]["steps"])
    assert report.data["late"] and profile["micro_batches"][-1]["steps"]["refused rows to quarantine"] > 0


def test_without_profile_there_is_no_accumulator_and_no_table(tmp_path: Path) -> None:
    pipeline, _ = begun(tmp_path)
    before = set(_accumulatorRegistry)
    report = pipeline.stream()
    assert set(_accumulatorRegistry) == before
    assert "profile" not in report.data and not report.tables


def test_verbs_that_run_once_report_the_time_of_their_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.batch.file_rows.FEW_ROWS", 0)  # even few rows are Spark's jobs
    frames = random_rows(3)
    pipeline = Pipeline(tmp_path, random_walk_spec())
    pipeline.land(frames[0])
    reports = [pipeline.pretrain(profile=True)]
    pipeline.land(frames[1])
    pipeline.stream()
    reports.append(export.run(pipeline.settings, "walk", profile=True))
    pipeline.write_spec(random_walk_spec(version=2))
    reports.append(migrate.run(pipeline.settings, "walk", profile=True))
    expected = (
        {"filter and write the snapshot"},
        {"read the state, write the snapshot"},
        {"write the snapshot"},
    )
    for report, names in zip(reports, expected, strict=True):
        profile = report.data["profile"]
        steps = {one["name"]: one for one in profile["steps"]}
        assert names <= set(steps)
        assert all(steps[name]["jobs"] and steps[name]["task_seconds"] > 0 for name in names)
        assert sum(one["seconds"] for one in profile["steps"]) == pytest.approx(profile["seconds"])
        assert len(report.tables) == 1


def test_every_job_of_a_stream_has_a_label(tmp_path: Path) -> None:
    pipeline, frames = begun(tmp_path)
    pipeline.land(frames[0].head(3))  # late: to quarantine
    times = JobTimes(pipeline.warehouse.spark.sparkContext)
    pipeline.stream()
    jobs = times.fresh()
    unlabelled = [job for job in jobs if not _labelled(job)]
    assert unlabelled == []
    assert not any(stage.name.startswith("save at") for job in jobs for stage in job.stages)
    labels = {job.description for job in jobs}
    for number in range(3):
        assert f"walk-g0001: micro-batch {number}, filter" in labels
    for number in range(2):  # a micro-batch that refuses no row is one job
        mine = [job.description for job in jobs if f"micro-batch {number}," in job.description]
        assert mine == [f"walk-g0001: micro-batch {number}, filter"]
    assert "walk-g0001: micro-batch 2, refused rows to quarantine" in labels


def _labelled(job: Job) -> bool:
    """Tell if a job has our label, or that of Delta or Spark with the name of our query."""
    return (
        job.description.startswith(("stream walk", "walk-g0001", DELTA, "walk walk-g0001"))
        and "walk" in job.description
    )
