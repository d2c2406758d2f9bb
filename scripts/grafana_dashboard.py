"""Write deploy/grafana/kalman.json, the dashboard of all streams: `python scripts/grafana_dashboard.py`.

A dashboard's JSON is long and repetitive; this script has its content. A test compares the file with this script.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "deploy" / "grafana" / "kalman.json"
OF = '{model=~"$model"}'


class Panel(NamedTuple):
    """A panel: its title, what it means, its unit in Grafana's words, and its queries with their legends."""

    title: str
    text: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"


GENERATION = "{{generation}}"
PANELS = (
    Panel(
        "Rows by fate",
        "Rows a second by what became of them. Quarantined rows keep their reason in the table quarantine.",
        "rowsps",
        (
            (
                f"sum by (model, outcome) (rate(kalman_rows_total{OF}[$__rate_interval]))",
                "{{model}} {{outcome}}",
            ),
        ),
    ),
    Panel(
        "Share quarantined",
        "Of the rows of the last quarter of an hour.",
        "percentunit",
        (
            (
                'sum by (model) (rate(kalman_rows_total{model=~"$model", outcome="quarantined"}[15m])) / '
                "clamp_min(sum by (model) "
                '(rate(kalman_rows_total{model=~"$model", outcome=~"estimated|quarantined"}[15m])), 1e-9)',
                "{{model}}",
            ),
        ),
    ),
    Panel(
        "Rows that wait",
        "In the source, when the last micro-batch ended.",
        "short",
        ((f"kalman_lag_rows{OF}", GENERATION),),
    ),
    Panel("Lag", "Since when the first of them has waited.", "s", ((f"kalman_lag_seconds{OF}", GENERATION),)),
    Panel(
        "Time since the last micro-batch",
        "It grows while there is nothing to do, too: look at the rows that wait beside it.",
        "s",
        ((f"time() - kalman_last_batch_timestamp_seconds{OF}", GENERATION),),
    ),
    Panel("Duration of a micro-batch", "Of the last one.", "s", ((f"kalman_batch_seconds{OF}", GENERATION),)),
    Panel(
        "Throughput",
        "Rows a second within the last micro-batch.",
        "rowsps",
        ((f"kalman_rows_per_second{OF}", GENERATION),),
    ),
    Panel(
        "Micro-batches",
        "Committed a minute.",
        "short",
        ((f"60 * rate(kalman_batches_total{OF}[5m])", GENERATION),),
    ),
    Panel(
        "Memory of the state store", "Of all partitions.", "bytes", ((f"kalman_state_bytes{OF}", GENERATION),)
    ),
    Panel("Blocks of keys", "Rows of the state store.", "short", ((f"kalman_state_rows{OF}", GENERATION),)),
    Panel(
        "Verification",
        "Differences that the last run of verify found; anything but 0 is an incident.",
        "short",
        ((f"kalman_verify_differences{OF}", "{{model}}"),),
        "stat",
    ),
    Panel(
        "Age of the verification",
        "Since the last run of verify ended.",
        "s",
        ((f"time() - kalman_verify_timestamp_seconds{OF}", "{{model}}"),),
        "stat",
    ),
)
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """Return the dashboard in Grafana's import format."""
    return {
        "title": "Kalman streams",
        "uid": "kalman-streams",
        "tags": ["kalman"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "utc",
        "templating": {"list": [_datasource(), _model()]},
        "annotations": {"list": [_hand_overs()]},
        "panels": [_panel(place, one) for place, one in enumerate(PANELS)],
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _model() -> dict[str, Any]:
    query = "label_values(kalman_batch_id, model)"
    return {
        "name": "model",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": "models"},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _hand_overs() -> dict[str, Any]:
    """Return marks at the times when another generation begins to commit micro-batches."""
    return {
        "name": "another generation",
        "datasource": SOURCE,
        "enable": True,
        "iconColor": "orange",
        "expr": f"kalman_batch_id{OF} unless kalman_batch_id{OF} offset 1m",
        "titleFormat": "{{generation}}",
    }


def _panel(place: int, one: Panel) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + at), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
        for at, (expr, legend) in enumerate(one.queries)
    ]
    return {
        "id": place + 1,
        "type": one.kind,
        "title": one.title,
        "description": one.text,
        "datasource": SOURCE,
        "gridPos": {"h": 7, "w": 12, "x": 12 * (place % 2), "y": 7 * (place // 2)},
        "fieldConfig": {"defaults": {"unit": one.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def text() -> str:
    """Return the file's content."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
    print(TARGET, file=sys.stderr)
