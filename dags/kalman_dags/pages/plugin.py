"""The Airflow plugin. Every process of Airflow loads this module, so it imports the pages only on request."""

from __future__ import annotations

from typing import Any

from airflow.configuration import conf
from airflow.plugins_manager import AirflowPlugin

from dags.kalman_dags.places import PAGES


class KalmanPages(AirflowPlugin):
    """Pages of the models and their reports in Airflow's address and menu, with Airflow's log-in and rights."""

    name = "kalman_pages"
    external_views = [
        {
            "name": "Kalman models",
            "href": f"{PAGES}/",
            "destination": "nav",
            "category": "browse",
            "url_route": "kalman-models",
        }
    ]

    @property
    def fastapi_apps(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the application that serves the pages."""
        from dags.kalman_dags.pages.app import app

        return [{"app": app, "url_prefix": PAGES, "name": "Kalman models"}]

    @property
    def fastapi_root_middlewares(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the middleware that an API server on SQLite needs."""
        from dags.kalman_dags.pages.turns import WriteTurns

        on_sqlite = (conf.get("database", "sql_alchemy_conn") or "").startswith("sqlite")
        return [{"middleware": WriteTurns, "name": "Writes in turn"}] if on_sqlite else []
