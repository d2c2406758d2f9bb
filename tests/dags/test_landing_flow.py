"""Runs of the ingest DAG whose driver is a script of ours: what its events carry, and which days are missing."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dags.kalman_dags.pages.missing import find_landed_intervals
from jobs.specs.loading import load_spec
from tests.dags.conftest import FIRST_DAY, MODELS, events, load_bag

pytestmark = pytest.mark.airflow

DRIVER = """#!{python}
import json, os, pathlib
data = dict(rows=12, quarantined=1, version=4, reasons={{}}, seconds=1.0)
report = dict(lines=["landed 12 rows of 1 file for daily", "quarantined 1 row"], data=data)
pathlib.Path(os.environ["KALMAN_REPORT_FILE"]).write_text(json.dumps(report))
"""


def test_each_interval_is_a_partition_and_what_is_missing_shows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "daily.yaml").write_text(
        (MODELS / "tiny.yaml").read_text().replace("name: tiny", "name: daily")
    )
    driver = tmp_path / "python"
    driver.write_text(DRIVER.format(python=sys.executable))
    driver.chmod(0o755)
    monkeypatch.setenv("KALMAN_MODELS", str(tmp_path))
    for day in (0, 3):
        dag: Any = load_bag().dags["kalman_ingest__daily"]
        dag.get_task("ingest").env_vars["PYSPARK_DRIVER_PYTHON"] = str(driver)
        run = dag.test(logical_date=FIRST_DAY + timedelta(days=day + 1))
        assert [str(one.state) for one in run.get_task_instances()] == ["success"]
    told = {"version": 4, "rows": 12, "quarantined": 1}
    # What waits for the landing itself is woken by events without a partition.
    assert events("kalman://measurements/daily") == [(told, None)] * 2
    days = ["2013-01-01T00:00:00Z", "2013-01-04T00:00:00Z"]
    assert events("kalman://measurements/daily/by-interval") == [(told, day) for day in days]
    found = find_landed_intervals(load_spec("daily", tmp_path))
    assert found is not None and found.missing == ["2013-01-02T00:00:00Z", "2013-01-03T00:00:00Z"]
