"""OpenLineage's events of the operator, written by its file transport."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kalman_dags.outcome import VerbOutcome
from tests.dags.conftest import DAYS, ROOT, Tiny, write_days

pytest.importorskip("airflow.providers.openlineage", reason="the extra `lineage` is not installed")

pytestmark = pytest.mark.airflow

TRANSPORT = "AIRFLOW__OPENLINEAGE__TRANSPORT"


def test_a_verbs_tables_and_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from openlineage.client.client import OpenLineageClient
    from openlineage.client.event_v2 import Job, Run, RunEvent, RunState
    from openlineage.client.transport.file import FileConfig, FileTransport

    from kalman_dags.lineage_facets import build_lineage

    monkeypatch.setenv("KALMAN_WAREHOUSE", str(tmp_path / "warehouse"))
    report = {"rows": 12, "version": 4, "snapshot": "tiny-1", "log_likelihood": -3.5, "seconds": 9.0}
    found = build_lineage(
        "pretrain", {"--model": "tiny"}, VerbOutcome(["snapshot tiny-1: 3 keys", "9.0 s"], report)
    )
    written = tmp_path / "events"
    client = OpenLineageClient(transport=FileTransport(FileConfig(str(written), append=True)))
    run = Run("01a2097b-b938-74a4-80d1-708d48a51d90", facets=found.run_facets)
    client.emit(
        RunEvent(
            eventType=RunState.COMPLETE,
            eventTime="2026-01-01T00:00:00Z",
            run=run,
            job=Job("kalman", "pretrain"),
            inputs=[*found.inputs],
            outputs=[*found.outputs],
        )
    )
    (event,) = [json.loads(line) for line in written.read_text().splitlines()]
    (read,), (wrote,) = event["inputs"], event["outputs"]
    assert (read["namespace"], read["name"]) == ("file", f"{tmp_path}/warehouse/measurements/tiny")
    assert read["facets"]["version"]["datasetVersion"] == "4"
    assert wrote["name"] == f"{tmp_path}/warehouse/snapshots"
    assert wrote["outputFacets"]["outputStatistics"]["rowCount"] == 12
    told = event["run"]["facets"]["kalman"]
    assert (told["verb"], told["model"], told["summary"]) == ("pretrain", "tiny", "snapshot tiny-1: 3 keys")
    assert told["facts"] == {"rows": 12, "version": 4, "snapshot": "tiny-1", "log_likelihood": -3.5}


@pytest.mark.spark
@pytest.mark.slow
def test_airflow_emits_them(landed: Tiny, tmp_path: Path) -> None:
    file, written = tmp_path / "day.csv", tmp_path / "events"
    write_days(file, range(DAYS, DAYS + 1))
    transport = json.dumps({"type": "file", "log_file_path": str(written), "append": True})
    path = os.environ.get("PYTHONPATH", str(ROOT))
    words = ("dags", "test", "kalman_ingest__tiny", "--conf", json.dumps({"input": str(file)}))
    done = subprocess.run(
        [sys.executable, "-m", "airflow", *words],
        env={**os.environ, **landed.environment(), TRANSPORT: transport, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    events: list[dict[str, Any]] = [json.loads(line) for line in written.read_text().splitlines()]
    (event,) = [
        one for one in events if one["eventType"] == "COMPLETE" and one["job"]["name"].endswith(".ingest")
    ]
    (table,) = event["outputs"]
    assert table["name"] == f"{landed.warehouse}/measurements/tiny"
    assert table["outputFacets"]["outputStatistics"]["rowCount"] > 0
    assert [one["name"] for one in event["inputs"]] == [str(file)]
    assert event["run"]["facets"]["kalman"]["summary"].startswith("landed ")
