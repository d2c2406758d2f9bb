"""A continuous stream through a real scheduler: a backfill beside it, and upgrades after which it resumes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from demo.delta_log import rows_of
from jobs.supervision.driver_log import DriverLog
from jobs.supervision.driver_status import RUNNING, read_driver_status
from tests.dags.conftest import DAYS, FIRST_DAY, ROWS_A_DAY, Tiny, write_days
from tests.dags.test_approval import UPGRADE, command, statuses
from tests.dags.test_scheduler import (
    Airflow,
    airflow,  # noqa: F401 - a fixture
    all_succeeded,
    wait_for,
)

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.soak]

FOR_EVER = "kalman_stream_forever__tiny"


@pytest.fixture(scope="module")
def tiny(landed: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    """The measurements of the first days in a warehouse of this module's own, and a continuous stream."""
    folder = tmp_path_factory.mktemp("forever")
    shutil.copytree(landed.first_days, folder / "warehouse")
    shutil.copytree(landed.models, folder / "models")
    own = landed._replace(
        models=folder / "models", landing=folder / "landing", warehouse=folder / "warehouse"
    )
    own.landing.mkdir()
    spec = own.models / "tiny.yaml"
    text = spec.read_text().replace('{schedule: "*/10 * * * *"}', '{schedule: "@continuous", trigger: 1s}')
    spec.write_text(text + "upgrade: {automatic: true}\n")
    yield own
    command(own, "stop", "--wait", "2min")  # whatever has failed, no driver is left behind


def land(tiny: Tiny, day: int) -> None:
    file = tiny.landing / f"{day}.csv"
    write_days(file, range(day, day + 1))
    command(tiny, "ingest", "--input", str(file))


def estimated(tiny: Tiny, generation: str) -> int:
    rows = rows_of(tiny.warehouse / "estimates" / "tiny")
    return sum(row["generation"] == generation for row in rows)


def upgraded(airflow: Airflow, **form: Any) -> dict[str, str]:  # noqa: F811
    """Run the DAG with a form, and return the state that each task ended in."""
    body = {"logical_date": None, "conf": {"dry_run": False, **form}}
    run = f"{UPGRADE}/dagRuns/{airflow.call(f'{UPGRADE}/dagRuns', body)['dag_run_id']}"
    wait_for(lambda: airflow.call(run)["state"] in ("success", "failed"), 600, "the run's end")
    found = airflow.call(f"{run}/taskInstances")["task_instances"]
    return {one["task_id"]: str(one["state"]) for one in found}


@pytest.fixture(scope="module")
def log(airflow: Airflow, tiny: Tiny) -> DriverLog:  # noqa: F811
    """The log of drivers of a stream that runs, and has taken in a day."""
    command(tiny, "pretrain")
    land(tiny, DAYS - 1)
    airflow.switch(FOR_EVER)
    wait_for(lambda: estimated(tiny, "tiny-g0001") == ROWS_A_DAY, 300, "the first driver's estimates")
    return DriverLog.at(str(tiny.warehouse), "tiny")


def test_a_backfill_beside_it_does_not_disturb_it(airflow: Airflow, tiny: Tiny, log: DriverLog) -> None:  # noqa: F811
    before, known = read_driver_status(log), rows_of(tiny.warehouse / "manifests")
    day = FIRST_DAY.date().isoformat()
    words = (
        "--dag-id",
        "kalman_pretrain__tiny",
        "--max-active-runs",
        "1",
        "--from-date",
        day,
        "--to-date",
        day,
    )
    airflow.command("backfill", "create", *words)
    airflow.switch("kalman_pretrain__tiny")
    wait_for(lambda: all_succeeded(airflow, 1), 400, "the backfill")
    cuts = {str(row["cut"])[:10] for row in rows_of(tiny.warehouse / "manifests") if row not in known}
    assert (FIRST_DAY + timedelta(days=1)).date().isoformat() in cuts

    land(tiny, DAYS)
    wait_for(lambda: estimated(tiny, "tiny-g0001") == 2 * ROWS_A_DAY, 120, "the same driver's estimates")
    after = read_driver_status(log)
    assert before.driver is not None and after.driver is not None
    assert (after.state, after.driver.name, after.driver.owner) == (
        RUNNING,
        before.driver.name,
        before.driver.owner,
    )
    assert statuses(tiny) == {"tiny-g0001": "live"}
    rows = rows_of(tiny.warehouse / "estimates" / "tiny")
    assert len({(row["key"], row["event_time"]) for row in rows}) == len(rows)


def test_it_is_upgraded_in_each_mode_and_resumes(airflow: Airflow, tiny: Tiny, log: DriverLog) -> None:  # noqa: F811
    def drives(generation: str) -> bool:
        sight = read_driver_status(log)
        return sight.state == RUNNING and sight.driver is not None and sight.driver.generation == generation

    airflow.switch("kalman_upgrade__tiny")
    first = read_driver_status(log).driver

    spec = tiny.models / "tiny.yaml"
    spec.write_text(spec.read_text().replace("version: 1", "version: 2").replace("0.01", "0.011"))
    done = upgraded(airflow, mode="stop-start")
    assert (done["switch_over"], done["promote"]) == ("success", "skipped"), done
    assert statuses(tiny) == {"tiny-g0001": "retired", "tiny-g0002": "live"}
    assert log.hold() is None
    ended = next(one for one in log.list_drivers() if first is not None and one.name == first.name)
    assert ended.how == "stopped", "it finished its micro-batch, and was not robbed of its lease"
    wait_for(lambda: drives("tiny-g0002"), 300, "the next driver")
    land(tiny, DAYS + 1)
    wait_for(lambda: estimated(tiny, "tiny-g0002") == ROWS_A_DAY, 120, "its estimates")

    done = upgraded(airflow, mode="repartition", partitions=3)
    assert (done["switch_over"], done["promote"]) == ("success", "skipped"), done
    assert statuses(tiny) == {"tiny-g0001": "retired", "tiny-g0002": "retired", "tiny-g0003": "live"}
    laid_out = {row["generation"]: row["partitions"] for row in rows_of(tiny.warehouse / "generations")}
    assert laid_out["tiny-g0003"] == 3 != laid_out["tiny-g0002"]

    # Beside the stream, which runs on until it is replaced.
    wait_for(lambda: drives("tiny-g0003"), 300, "the next driver")
    spec.write_text(spec.read_text().replace("version: 2", "version: 3").replace("0.011", "0.012"))
    done = upgraded(airflow, mode="blue-green", force=True)
    assert (done["promote"], done["switch_over"]) == ("success", "skipped"), done
    wait_for(lambda: drives("tiny-g0004"), 300, "the next driver")
    land(tiny, DAYS + 2)
    wait_for(lambda: estimated(tiny, "tiny-g0004") == ROWS_A_DAY, 120, "its estimates")
