"""Client of Airflow's API with the rights of a user."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

PATIENCE = 180.0
HARMLESS = ("GET", "PATCH")
"""Methods that are safe to repeat: PATCH pauses a DAG, or unpauses it."""


class Api:
    """A user's client of a running Airflow.

    Args:
        address: URL of its page.
        password: returns the user's password; called at first use, since Airflow makes it when it starts.
        user: name of the user.
    """

    def __init__(self, address: str, password: Callable[[], str], user: str = "admin") -> None:
        self.address, self._password, self._token, self._user = address, password, "", user

    def call(self, path: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
        """Call `/api/v2` + path and return its answer."""
        self._log_in()
        return self._ask(f"/api/v2{path}", body, method or ("GET" if body is None else "POST"))

    def page(self, path: str) -> str:
        """Return a page of Airflow for the logged-in user."""
        self._log_in()
        request = urllib.request.Request(self.address + path)
        request.add_header("Authorization", f"Bearer {self._token}")
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read().decode()

    def _log_in(self) -> None:
        if not self._token:
            login = {"username": self._user, "password": self._password()}
            self._token = self._ask("/auth/token", login, "POST")["access_token"]

    def switch(self, dag_id: str, on: bool = True) -> None:
        """Unpause a DAG, or pause it."""
        self.call(f"/dags/{dag_id}?update_mask=is_paused", {"is_paused": not on}, "PATCH")

    def run(self, dag_id: str, conf: dict[str, Any] | None = None, seconds: float = 240) -> None:
        """Switch a DAG on and run it to its end; it must succeed."""
        self.switch(dag_id)
        path = f"/dags/{dag_id}/dagRuns"
        run = self.call(path, {"logical_date": None, "conf": conf or {}})["dag_run_id"]
        state = wait_for(lambda: self._ended(f"{path}/{run}"), seconds, f"the end of {dag_id}")
        assert state == "success", self.logs(f"{path}/{run}")

    def logs(self, run: str) -> str:
        """Return the logs of a run's tasks."""
        tasks = self.call(f"{run}/taskInstances")["task_instances"]
        said = [self.call(f"{run}/taskInstances/{one['task_id']}/logs/{one['try_number']}") for one in tasks]
        return json.dumps(said, indent=1)[-8000:]

    def _ended(self, run: str) -> str | None:
        state = self.call(run)["state"]
        return state if state in ("success", "failed") else None

    def _ask(self, path: str, body: dict[str, Any] | None, method: str) -> Any:
        request = urllib.request.Request(
            self.address + path, None if body is None else json.dumps(body).encode(), method=method
        )
        request.add_header("Content-Type", "application/json")
        request.add_header("Accept", "application/json")
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return json.loads(answer.read() or b"null")
            except urllib.error.HTTPError:
                raise
            except OSError:  # busy, or killed and not yet restarted: a safe request is sent again
                if method not in HARMLESS or time.monotonic() > deadline:
                    raise
                time.sleep(1)


def wait_for(ask: Callable[[], T | None], seconds: float, what: str) -> T:
    """Call `ask` until its result is true."""
    end = time.monotonic() + seconds
    while not (answer := ask()):
        assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}"
        time.sleep(1)
    return answer
