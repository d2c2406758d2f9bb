"""A continuous stream that keeps crashing at once, under a real scheduler: given up, until somebody resumes it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException

from demo.delta_log import rows_of
from jobs import resume, status, stop
from jobs.supervision.driver_log import DriverLog
from jobs.supervision.driver_status import read_driver_status
from kalman_dags.supervision.operator import StreamForeverOperator
from kalman_dags.supervision.trigger import StreamEvent
from tests.dags.test_stream_forever import deferred
from tests.dags.test_supervisor import DAG, GENERATION, PATIENCE, Stream, running, whole
from tests.jobs.support.pipeline import assert_as_the_filter_alone, random_rows, streaming
from tests.support.airflow_api import wait_for

pytestmark = [pytest.mark.airflow, pytest.mark.spark]

CRASHES = 2
QUIET_SECONDS = 45.0
"""Longer than any pause before the next driver, would there be one."""
TASK = "stream"


def runs(stream: Stream) -> list[dict[str, Any]]:
    """Return the DAG's runs, the newest first."""
    return stream.airflow.call(f"/dags/{DAG}/dagRuns?order_by=-run_after&limit=100")["dag_runs"]


def task_of(stream: Stream, run: str) -> dict[str, Any]:
    return stream.airflow.call(f"/dags/{DAG}/dagRuns/{run}/taskInstances/{TASK}")


def given_up(stream: Stream) -> str:
    """Wait until a run has given up and the next one waits; return the failed one."""

    def found() -> str | None:
        newest = runs(stream)
        if len(newest) < 2 or newest[1]["state"] != "failed" or stream.log.hold() is None:
            return None
        return newest[1]["dag_run_id"] if stream.task()["state"] == "deferred" else None

    return wait_for(found, PATIENCE, "a run that has given up, and one that waits")


def damage(warehouse: str) -> tuple[Path, bytes]:
    """Damage what the next driver goes on from; return the file and what it was."""
    folder = Path(warehouse, "checkpoints", GENERATION, "offsets")
    newest = max((path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    before = newest.read_bytes()
    newest.write_bytes(before[: len(before) // 2])
    newest.with_name(f".{newest.name}.crc").unlink(missing_ok=True)
    return newest, before


@pytest.mark.slow
def test_drivers_that_find_a_damaged_checkpoint_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real drivers, with the task's steps made here instead of by a scheduler."""
    pipeline = streaming(tmp_path, *random_rows(3)[:2])
    settings = pipeline.settings
    for name, value in {
        "KALMAN_MODELS": str(settings.models),
        "KALMAN_WAREHOUSE": settings.warehouse,
        "KALMAN_LOGS": str(tmp_path / "logs"),
        "KALMAN_SHUFFLE_PARTITIONS": "2",
    }.items():
        monkeypatch.setenv(name, value)
    log = DriverLog.at(settings.warehouse, "walk")
    file, content = damage(settings.warehouse)

    def operator() -> StreamForeverOperator:
        return StreamForeverOperator(task_id=TASK, model="walk", seconds=2.0, give_up_after=CRASHES)

    for run in range(1, CRASHES + 1):
        context: Any = {"run_id": f"run {run}"}
        trigger, kept = deferred(operator().execute, context)
        wait_for(lambda trigger=trigger: trigger.event() == StreamEvent.GONE, PATIENCE, "the driver's end")
        if run < CRASHES:
            deferred(operator().resume, context, StreamEvent.GONE, **kept)
    with pytest.raises(
        AirflowFailException, match=r"given up: 2 drivers in a row .* the checkpoint of walk-g0001"
    ):
        operator().resume(context, StreamEvent.GONE, **kept)
    (alarm,) = status.run(settings, "walk", alarm_after="1d").errors[-1:]
    assert "its stream was given up" in alarm and "kalman-pipeline resume --model walk" in alarm
    file.write_bytes(content)
    assert resume.run(settings, "walk").data["held"]
    pipeline.land(random_rows(3)[2])
    trigger, _ = deferred(operator().execute, {"run_id": "after"})
    estimates = Path(settings.warehouse, "estimates", "walk")
    wait_for(lambda: len(rows_of(estimates)) == 300, PATIENCE, "300 estimates")
    assert stop.run(settings, "walk", hold="1h").data["stopped"]
    assert len(log.list_launches()) == CRASHES + 1
    assert_as_the_filter_alone(pipeline, rows_of(estimates), random_rows(3))


@pytest.mark.soak
def test_a_damaged_checkpoint_is_given_up_and_resumed(tmp_path: Path) -> None:
    with running(tmp_path, give_up_after=CRASHES) as stream:
        settings = stream.pipeline.settings
        for way in ("clear", "resume"):
            stream.kill_driver(whole)
            file, content = damage(settings.warehouse)
            failed = given_up(stream)
            assert task_of(stream, failed)["state"] == "failed"  # for good: it has retries, and makes none
            log = stream.airflow.logs(f"/dags/{DAG}/dagRuns/{failed}")
            assert f"given up: {CRASHES} drivers in a row have crashed" in log
            assert "the checkpoint" in log and "exit code" in log, log
            (alarm,) = status.run(settings, "walk", alarm_after="1d").errors[-1:]
            assert "its stream was given up" in alarm and "kalman-pipeline resume --model walk" in alarm
            launches, waiting = len(stream.log.list_launches()), stream.task()["id"]
            time.sleep(QUIET_SECONDS)
            assert len(stream.log.list_launches()) == launches and not read_driver_status(stream.log).driven
            assert stream.task()["id"] == waiting  # no run after another that would fail at once
            file.write_bytes(content)
            if way == "clear":
                begin_anew(stream)
            else:
                assert resume.run(settings, "walk").data["held"]
            stream.goes_on()
            assert stream.log.hold() is None
        stream.feed.stop()
        landed = stream.feed.frames[: stream.feed.landed]
        count = stream.rows(len(landed))
        wait_for(lambda: stream.estimated() >= count, PATIENCE, f"{count} estimates")
        stream.airflow.switch(DAG, on=False)
        wait_for(lambda: stream.log.history(GENERATION)[-1].ended_at, PATIENCE, "the driver's end")
    estimates = rows_of(Path(settings.warehouse, "estimates", "walk"))
    assert_as_the_filter_alone(stream.pipeline, estimates, landed)


def begin_anew(stream: Stream) -> None:
    """Clear the task of the run that waits."""
    body = {
        "dry_run": False,
        "dag_run_id": runs(stream)[0]["dag_run_id"],
        "task_ids": [TASK],
        "only_failed": False,
        "reset_dag_runs": True,
    }
    cleared = stream.airflow.call(f"/dags/{DAG}/clearTaskInstances", body)
    assert cleared["total_entries"] == 1, json.dumps(cleared)
