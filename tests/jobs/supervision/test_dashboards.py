"""The dashboard and the alert rules name metrics that are exported, with labels that these have; and they work."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from jobs.supervision.metrics import Metrics, write_verification
from jobs.supervision.progress import Lag, record
from scripts import grafana_dashboard
from tests.jobs.supervision.test_progress import progress

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
RULES = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"][0]["rules"]
OURS = re.compile(r"\bkalman_[a-z_]+")
LABELS = re.compile(r"(kalman_[a-z_]+)\{([^}]*)\}")


def records(batches: int) -> list[dict[str, Any]]:
    counts = {"estimated": 90, "quarantined": 9, "late": 4, "bad_state": 0, "expired": 0}
    return [
        record(progress(batch), counts, Lag(5, 2.0), "nile", "nile-g0001", "r1") for batch in range(batches)
    ]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Name and labels of every metric that a stream and a verification export."""
    folder = tmp_path_factory.mktemp("metrics")
    stream, verified = folder / "stream.prom", folder / "verify.prom"
    Metrics("nile", "nile-g0001", file=str(stream)).take(records(2))
    write_verification(str(verified), "nile", "equal", {"compared": 3, "rows": 3}, 0)
    return {
        sample.name: set(sample.labels)
        for file in (stream, verified)
        for family in text_string_to_metric_families(file.read_text())
        for sample in family.samples
    }


def expressions() -> list[str]:
    """Return every query of the dashboard and of the rules."""
    board = json.loads((DEPLOY / "grafana" / "kalman.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [one["expr"] for one in board["annotations"]["list"]]
    queries += [one["definition"] for one in board["templating"]["list"] if "definition" in one]
    return [*queries, *(rule["expr"] for rule in RULES)]


def test_every_metric_that_is_named_is_exported(exported: dict[str, set[str]]) -> None:
    named = {name for expr in expressions() for name in OURS.findall(expr)}
    assert named - exported.keys() == set() and len(named) >= 12
    for expr in expressions():
        for name, labels in LABELS.findall(expr):
            assert set(re.findall(r"(\w+)\s*=~?", labels)) <= exported[name], expr


def test_every_metric_is_on_the_dashboard(exported: dict[str, set[str]]) -> None:
    shown = {name for expr in expressions() for name in OURS.findall(expr)}
    assert exported.keys() - shown <= {
        "kalman_verify_compared",
        "kalman_verify_rows",
        "kalman_verify_outcome",
    }


def test_the_dashboard_is_what_the_script_writes() -> None:
    assert grafana_dashboard.TARGET.read_text() == grafana_dashboard.text()


def test_an_alert_says_what_to_do_and_is_on_the_page() -> None:
    page = (ROOT / "docs" / "alerts.md").read_text()
    for rule in RULES:
        assert set(rule["annotations"]) == {"summary", "action"} and rule["labels"]["severity"] in (
            "page",
            "ticket",
        )
        assert f"## {rule['alert']}\n" in page and " ".join(rule["expr"].split()) in " ".join(page.split())
    verbs = {
        verb for rule in RULES for verb in re.findall(r"kalman-pipeline (\w+)", rule["annotations"]["action"])
    }
    assert verbs <= {"status", "stream", "quarantine", "report", "verify"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (apt install prometheus)")
def test_the_rules_fire_and_rest_as_they_should() -> None:
    for command in (
        ["check", "rules", "rules.yml"],
        ["test", "rules", "rules_test.yml"],
        ["check", "config", "prometheus.yml"],
    ):
        done = subprocess.run(
            ["promtool", *command], cwd=DEPLOY / "prometheus", capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    tested = (DEPLOY / "prometheus" / "rules_test.yml").read_text()
    assert all(rule["alert"] in tested for rule in RULES)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """A real Prometheus with our rules that scrapes a port each second: its address, and that port."""
    scraped, port = free_port(), free_port()
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DEPLOY / "prometheus" / "rules.yml")]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"localhost:{scraped}"]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        "prometheus",
        f"--config.file={tmp_path}/prometheus.yml",
        f"--storage.tsdb.path={tmp_path}/data",
    ]
    process = subprocess.Popen(
        [*command, f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"], stderr=subprocess.DEVNULL
    )
    try:
        yield f"http://127.0.0.1:{port}", scraped
    finally:
        process.terminate()
        process.wait(20)


def answered(address: str, expr: str) -> list[dict[str, Any]]:
    """Return what a query answers, as Grafana asks it: its variables filled in."""
    filled = (
        expr.replace("$__rate_interval", "4s")
        .replace("$model", ".*")
        .replace("5m]", "4s]")
        .replace("15m]", "4s]")
    )
    with urlopen(f"{address}/api/v1/query?{urlencode({'query': filled})}", timeout=10) as answer:
        return json.load(answer)["data"]["result"]


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus (apt install prometheus)")
def test_a_real_prometheus_answers_every_panel(prometheus: tuple[str, int]) -> None:
    address, port = prometheus
    metrics = Metrics("nile", "nile-g0001", port=port)
    panels = [target[0] for panel in grafana_dashboard.PANELS for target in panel.queries]
    of_stream = [expr for expr in panels if "verify" not in expr]
    empty, until = of_stream, time.monotonic() + 60
    try:
        while empty and time.monotonic() < until:
            metrics.take(records(1))
            time.sleep(1.0)
            try:
                empty = [expr for expr in of_stream if not answered(address, expr)]
            except OSError:
                continue  # it starts
        assert empty == []
        # The records are of 2024: rows wait, and nothing has ended since.
        assert answered(address, 'ALERTS{alertname="KalmanStreamStuck"}')
    finally:
        metrics.close()
