"""A landing wakes pretrain and stream, through a real scheduler; the model's page shows what is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from demo.delta_log import rows_of
from tests.dags.conftest import DAYS, FIRST_DAY, ROWS_A_DAY, Tiny, write_days
from tests.support.airflow_api import wait_for
from tests.support.standalone import Airflow, standalone

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.soak]


@pytest.fixture(scope="module")
def tiny(landed: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """An installation without measurements, whose pretrain and stream wait for some."""
    folder = tmp_path_factory.mktemp("landing")
    shutil.copytree(landed.models, folder / "models")
    own = landed._replace(models=folder / "models", landing=folder / "files", warehouse=folder / "warehouse")
    own.landing.mkdir()
    spec = own.models / "tiny.yaml"
    text = spec.read_text().replace(str(landed.landing), str(own.landing))
    text = text.replace('pretrain: {schedule: "@daily"}', "pretrain: {schedule: on-landing}")
    spec.write_text(text.replace('stream: {schedule: "*/10 * * * *"}', "stream: {schedule: on-landing}"))
    return own


@pytest.fixture(scope="module")
def airflow(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    """Airflow with these DAGs."""
    with standalone(tmp_path_factory.mktemp("airflow"), tiny.environment()) as running:
        yield running


def runs(airflow: Airflow, verb: str) -> list[dict[str, Any]]:
    """Return the runs of a DAG that have ended, oldest first."""
    found = airflow.call(f"/dags/kalman_{verb}__tiny/dagRuns?order_by=id")["dag_runs"]
    return [one for one in found if one["state"] in ("success", "failed")]


def land(airflow: Airflow, tiny: Tiny, day: int) -> None:
    """Land a day as the schedule would."""
    write_days(tiny.landing / f"{(FIRST_DAY + timedelta(days=day)).date()}.csv", range(day, day + 1))
    body = {"logical_date": (FIRST_DAY + timedelta(days=day + 1)).isoformat()}
    run = airflow.call("/dags/kalman_ingest__tiny/dagRuns", body)["dag_run_id"]
    path = f"/dags/kalman_ingest__tiny/dagRuns/{run}"
    wait_for(lambda: airflow.call(path)["state"] in ("success", "failed"), 600, "the landing")
    assert airflow.call(path)["state"] == "success", airflow.logs(path)


def test_a_landing_wakes_pretrain_and_the_stream(airflow: Airflow, tiny: Tiny) -> None:
    for verb in ("pretrain", "stream"):
        airflow.switch(f"kalman_{verb}__tiny")
    airflow.call("/dags/kalman_ingest__tiny?update_mask=is_paused", {"is_paused": False}, "PATCH")
    land(airflow, tiny, 0)
    wait_for(lambda: runs(airflow, "pretrain"), 600, "a run of pretrain")
    # The stream was woken by the landing, before there was a snapshot, and by the snapshot.
    wait_for(lambda: len(runs(airflow, "stream")) >= 2, 600, "two runs of the stream")
    assert {one["state"] for verb in ("pretrain", "stream") for one in runs(airflow, verb)} == {"success"}
    assert {one["run_type"] for one in runs(airflow, "stream")} == {"asset_triggered"}
    [manifest] = rows_of(tiny.warehouse / "manifests")
    assert manifest["rows"] == ROWS_A_DAY

    land(airflow, tiny, DAYS)
    wait_for(lambda: len(rows_of(tiny.warehouse / "estimates" / "tiny")) == ROWS_A_DAY, 600, "estimates")
    wait_for(lambda: len(runs(airflow, "pretrain")) == 2, 600, "another run of pretrain")
    assert sorted(row["rows"] for row in rows_of(tiny.warehouse / "manifests")) == [
        ROWS_A_DAY,
        2 * ROWS_A_DAY,
    ]
    page = airflow.page("/kalman/models/tiny")
    assert f"<b>{DAYS - 1} missing</b>: <code>2013-01-02T00:00:00Z</code>" in page, page
