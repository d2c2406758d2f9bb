"""Locate the warehouse, the specs and the pages from the environment.

This module does not import Airflow, so that the pages in the API server can use it too.
"""

from __future__ import annotations

import os
from pathlib import Path

from jobs.core.settings import parse_warehouse_root

ROOT = Path(__file__).resolve().parents[2]
"""The folder that contains `dags/`. Relative settings start here, because a worker's current folder is arbitrary."""

PAGES = "/kalman"
"""The path of the plugin's pages below the address of Airflow's API server."""


def find_warehouse_root() -> str:
    """Return the root of the warehouse, as the verbs do; by default a folder beside `dags/`.

    Raises:
        UserError: KALMAN_WAREHOUSE is not a possible place for a warehouse.
    """
    return parse_warehouse_root(os.environ.get("KALMAN_WAREHOUSE") or "warehouse", ROOT)


def find_models_path() -> str:
    """Return the folder of the model specs, by default a folder beside `dags/`."""
    return str(ROOT / Path(os.environ.get("KALMAN_MODELS") or "models").expanduser())


def name_dag(verb: str, model: str) -> str:
    """Return the name of a model's DAG."""
    return f"kalman_{verb}__{model}"


def find_model_page(model: str) -> str:
    """Return the path of a model's page, below Airflow's address."""
    return f"{PAGES}/models/{model}"


def report_page(report: str) -> str | None:
    """Return the path at which Airflow shows a report, given the report's path; None if it is not a report page."""
    folder, _, name = report.replace("\\", "/").rpartition("/")
    model = folder.rpartition("/")[2]
    return f"{PAGES}/reports/{model}/{name}" if model and name.endswith(".html") else None
