"""A person at Airflow's pages: Chromium, driven by Playwright."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest
from PIL import Image

from tests.support.airflow_api import wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.support.standalone import Airflow

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PICTURES = os.environ.get("KALMAN_BROWSER_PICTURES")
"""Folder for pictures of the pages; none are taken without it."""

DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
# Chromium looks for its maker's hosts at its start, and waits for them, unless told otherwise.
QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
ANSWER_SECONDS = 60
"""Patience for a page on a machine whose processors Spark has; a trigger has its own bound."""


class Visitor:
    """A logged-in person with a window.

    Args:
        page: Playwright's page.
        airflow: the Airflow that is visited.
    """

    def __init__(self, page: Page, airflow: Airflow) -> None:
        self.page, self.airflow = page, airflow

    def log_in(self) -> None:
        """Log in by Airflow's form."""
        self.page.goto("/")
        self.page.get_by_label("Username").fill("admin")
        self.page.locator("input[type=password]").fill(self.airflow.password())
        self.page.get_by_role("button", name="Sign in").click()
        self.page.wait_for_url(f"{self.airflow.address}/")

    def trigger(self, dag_id: str, *switches: str) -> str:
        """Start a DAG by its form, with these switches turned; return the path of the run's page."""
        self.page.goto(f"/dags/{dag_id}")
        self.page.get_by_role("button", name="Trigger").first.click()
        form = self.page.get_by_role("dialog")
        for switch in switches:
            form.locator(f'[id="switch:element_{switch}"]').click()
        form.get_by_role("button", name="Trigger").click()
        self.page.wait_for_url(re.compile(r"/runs/"))
        return self.page.url.removeprefix(self.airflow.address)

    def watch(self, run: str, seconds: float) -> None:
        """Stay on a run's page until the run has succeeded, which the page shows by itself."""
        self.page.goto(run)
        api, path = self.airflow, f"/dags/{run.split('/')[2]}/dagRuns/{run.split('/')[4]}"
        wait_for(lambda: api.call(path)["state"] in ("success", "failed"), seconds, "the end of the run")
        assert api.call(path)["state"] == "success", api.logs(path)
        self.page.get_by_text("Success", exact=True).first.wait_for()

    def open_model_page(self, model: str) -> Page:
        """Open a model's page from the menu's list of models, and return it."""
        self.page.goto("/kalman/")
        self.page.get_by_role("link", name=model, exact=True).click()
        self.page.get_by_role("heading", name=model, exact=True).wait_for()
        return self.page

    def take_picture(self, name: str, width: int, height: int) -> None:
        """Take a picture of the page as it is, with few colours, if the run is to take pictures."""
        if PICTURES:
            path = Path(PICTURES, f"{name}.png")
            self.page.set_viewport_size({"width": width, "height": height})
            self.page.wait_for_timeout(1000)
            self.page.screenshot(path=path)
            Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)
            self.page.set_viewport_size(DESK)  # pyright: ignore[reportArgumentType]


def path_of_task(run: str, task: str) -> str:
    """Return the path of a task's page, given its run's."""
    return f"{run.rstrip('/')}/tasks/{quote(task)}"


@contextmanager
def open_browser(airflow: Airflow) -> Iterator[Visitor]:
    """Open a window on Airflow; skip the test where there is no Chromium or no Playwright."""
    api = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is not installed: run `make test-browser`"
    )
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: apt install chromium")
    with api.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        try:
            page = chromium.new_context(viewport=DESK, base_url=airflow.address).new_page()
            page.set_default_timeout(ANSWER_SECONDS * 1000)
            yield Visitor(page, airflow)
        finally:
            chromium.close()
