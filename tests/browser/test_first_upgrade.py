"""A person's way through Airflow in a real browser, from the first log-in to an approved upgrade and its picture."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import yaml

from tests.dags.conftest import ROOT
from tests.support.airflow_api import wait_for
from tests.support.browser import DESK, PHONE, Visitor, open_browser, path_of_task
from tests.support.standalone import standalone

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.slow]

MODEL = "rooms"
ROOMS, DAYS, A_DAY = 6, 9, 24
FIRST: dict[str, Any] = {
    "name": MODEL,
    "version": 1,
    "description": "Temperature of each room.",
    "key": ["room"],
    "time": "at",
    "time_unit": "hour",
    "measurement": ["temperature"],
    "states": ["level"],
    "process": {"kind": "random_walk", "variance": 0.3},
    "observation": {"R": [[0.04]]},
    "initial": {"mean": [20.0], "covariance": [[25.0]]},
    "upgrade": {"rows": 50, "keys": 2},
    "stream": {"partitions": 2},
}
SECOND: dict[str, Any] = {
    **FIRST,
    "version": 2,
    "states": ["level", "slope"],
    "process": {"kind": "local_linear_trend", "level_variance": 0.01, "slope_variance": 0.003},
    "initial": {"mean": [20.0, 0.0], "covariance": [[25.0, 0.0], [0.0, 0.25]]},
    "migrate": {"states": {"slope": {"initial": True}}},
}
RUN_SECONDS, UPGRADE_SECONDS = 300, 600


class Rooms(NamedTuple):
    """A small installation of one model: its specs, warehouse, and files of three days each."""

    models: Path
    warehouse: Path
    files: list[Path]

    def environment(self) -> dict[str, str]:
        """Return the variables that make it the one in use."""
        return {"KALMAN_MODELS": str(self.models), "KALMAN_WAREHOUSE": str(self.warehouse)}

    def write_spec(self, spec: dict[str, Any]) -> None:
        """Deploy a spec."""
        (self.models / f"{MODEL}.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))

    def command(self, *words: str) -> str:
        """Run a verb in a shell, as a person does, and return what it says."""
        done = subprocess.run(
            [sys.executable, "-m", "jobs.cli", *words, "--model", MODEL],
            cwd=self.models.parent,
            env={**os.environ, **self.environment(), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def rooms(tmp_path_factory: pytest.TempPathFactory) -> Rooms:
    """Rooms whose temperature has a slope, which version 1 lacks and version 2 has; history has landed."""
    folder = tmp_path_factory.mktemp("rooms")
    rng = np.random.default_rng(7)
    at = pd.date_range("2024-03-01", periods=DAYS * A_DAY, freq="h", tz="UTC")
    found = []
    for room in range(ROOMS):
        wave = 3 * np.sin(2 * np.pi * (np.arange(len(at)) / 48 + room / ROOMS)) + rng.normal(0, 0.2, len(at))
        found.append(pd.DataFrame({"room": f"room {room}", "at": at, "temperature": 18 + room + wave}))
    rows = pd.concat(found).sort_values("at", kind="stable").round(2)
    files = []
    for part in range(3):
        files.append(folder / f"part-{part}.csv")
        inside = (rows["at"] >= at[part * 3 * A_DAY]) & (rows["at"] <= at[(part + 1) * 3 * A_DAY - 1])
        rows[inside].to_csv(files[-1], index=False)
    (folder / "models").mkdir()
    made = Rooms(folder / "models", folder / "warehouse", files)
    made.write_spec(FIRST)
    made.command("ingest", "--input", str(files[0]))
    return made


@pytest.fixture(scope="module")
def visitor(rooms: Rooms, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visitor]:
    """A person before Airflow, which has just been started."""
    with (
        standalone(tmp_path_factory.mktemp("airflow"), rooms.environment()) as airflow,
        open_browser(airflow) as opened,
    ):
        yield opened


def start_from_the_form(visitor: Visitor) -> None:
    visitor.log_in()
    dag = f"kalman_pretrain__{MODEL}"
    visitor.airflow.switch(dag, on=False)
    run = visitor.trigger(dag)
    visitor.watch(run, RUN_SECONDS)
    assert visitor.airflow.call(f"/dags/{dag}")["is_paused"] is False


def read_the_live_version(visitor: Visitor, rooms: Rooms) -> None:
    rooms.command("ingest", "--input", str(rooms.files[1]))
    visitor.watch(visitor.trigger(f"kalman_stream__{MODEL}"), RUN_SECONDS)
    page = visitor.open_model_page(MODEL)
    assert live_version(page) == 1


def read_the_report_and_approve(visitor: Visitor, rooms: Rooms) -> None:
    page, dag = visitor.page, f"kalman_upgrade__{MODEL}"
    rooms.command("ingest", "--input", str(rooms.files[2]))
    rooms.write_spec(SECOND)
    wait_for(lambda: "version 2" in visitor.airflow.call(f"/dags/{dag}")["description"], 180, "version 2")
    assert live_version(visitor.open_model_page(MODEL)) == 1

    run = visitor.trigger(dag, "dry_run")
    question = page.get_by_role("link", name=f"Let version 2 of {MODEL} take over?")

    def asked() -> bool:
        page.goto("/required_actions")
        page.get_by_text("Required Action").first.wait_for()
        page.wait_for_timeout(2000)
        return question.count() > 0

    wait_for(asked, UPGRADE_SECONDS, "the approval")

    page.goto(f"{path_of_task(run, 'shadow')}/details")
    page.get_by_role("link", name="Report", exact=True).click()
    # Airflow opens some links in a tab of their own.
    report = wait_for(
        lambda: next((one for one in page.context.pages if "/reports/" in one.url), None), 60, "it"
    )
    report.get_by_text("the new version may become live").wait_for()

    page.goto("/required_actions")
    question.click()
    page.get_by_text("Verdict: good").wait_for()
    visitor.take_picture("airflow-approval", 1280, 1500)
    page.get_by_role("button", name="Approve").click()
    visitor.watch(run, UPGRADE_SECONDS)

    page = visitor.open_model_page(MODEL)
    assert live_version(page) == 2
    visitor.take_picture("model-page", 1280, 1060)
    visitor.take_picture("model-page-phone", 390, 1060)
    fits = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    page.set_viewport_size(PHONE)  # pyright: ignore[reportArgumentType]
    assert page.evaluate(fits), "the page is wider than a phone"
    page.set_viewport_size(DESK)  # pyright: ignore[reportArgumentType]


def draw_the_new_version(visitor: Visitor, rooms: Rooms) -> None:
    picture = rooms.models.parent / "live.html"
    rooms.command("plot", "--output", str(picture))
    context = visitor.page.context.browser.new_context()  # pyright: ignore[reportOptionalMemberAccess]
    page = context.new_page()
    page.goto(picture.as_uri())
    assert "v2" in page.inner_text("body") and page.locator("img, svg").count()


def test_a_person_upgrades_a_model(visitor: Visitor, rooms: Rooms) -> None:
    start_from_the_form(visitor)
    read_the_live_version(visitor, rooms)
    read_the_report_and_approve(visitor, rooms)
    draw_the_new_version(visitor, rooms)


def live_version(page: Any) -> int:
    """Return the live version that a model's page names."""
    found = re.search(r"^live\s+version (\d+)\b", page.inner_text("body"), re.MULTILINE)
    assert found, page.inner_text("body")[:400]
    return int(found[1])
