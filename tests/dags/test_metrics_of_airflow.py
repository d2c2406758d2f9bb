"""Airflow's own metrics beside ours: exported by OpenTelemetry with the settings that the guide names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from tests.dags.conftest import ROOT

pytestmark = pytest.mark.airflow

SEND = """
from airflow._shared.observability.metrics import stats
from airflow.observability.metrics import stats_utils
stats.initialize(factory=stats_utils.get_stats_factory(), export_legacy_names=False)
stats.incr("ti_failures", tags={"dag_id": "kalman_stream__tiny"})
stats.gauge("pool.open_slots", 1, tags={"pool_name": "kalman_stream__tiny"})
from opentelemetry import metrics
metrics.get_meter_provider().force_flush()
"""


def documented(address: str) -> dict[str, str]:
    """Return the variables of the guide, with another address."""
    text = (ROOT / "docs" / "airflow.md").read_text()
    found = dict(re.findall(r"^export ((?:AIRFLOW__METRICS__OTEL|OTEL_)\w+)=(\S+)", text, re.MULTILINE))
    assert set(found) == {
        "AIRFLOW__METRICS__OTEL_ON",
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
        "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL",
    }
    return {**found, "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"{address}/api/v1/otlp/v1/metrics"}


def test_they_arrive_at_an_address_like_that_of_prometheus() -> None:
    got: list[tuple[str, bytes]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        settings = documented(f"http://127.0.0.1:{server.server_port}")
        done = subprocess.run(
            [sys.executable, "-c", SEND],
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
    finally:
        server.shutdown()
        server.server_close()
    assert {path for path, _ in got} == {"/api/v1/otlp/v1/metrics"}
    names = {
        metric.name
        for _, body in got
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert {"airflow.ti_failures", "airflow.pool.open_slots"} <= names
