"""An auth manager of Airflow with rights by DAG: a user may read the DAGs of the model in its name."""

from __future__ import annotations

from typing import Any

from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager


class RightsByDag(SimpleAuthManager):
    """The simple auth manager, where a user `<model>_reader` may read only the DAGs of that model."""

    def is_authorized_dag(
        self, *, method: Any, user: Any, access_entity: Any = None, details: Any = None
    ) -> bool:
        """Return whether the user is the reader of the DAG's model, or an admin."""
        if user.username.endswith("_reader"):
            model = (details.id if details and details.id else "").partition("__")[2]
            return method == "GET" and model == user.username.removesuffix("_reader")
        return super().is_authorized_dag(
            method=method, user=user, access_entity=access_entity, details=details
        )
