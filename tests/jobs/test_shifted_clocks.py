"""Drivers whose machines' clocks differ by an hour, in both directions: one at a time, and nothing lost or doubled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobs.core.errors import ALREADY_RUNNING
from jobs.lineage import generations
from jobs.storage.tables import measurements
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, random_rows, random_walk_spec, since
from tests.jobs.support.processes import Driver, files

HOUR = 3600


@pytest.fixture
def shim(tmp_path: Path) -> str:
    """The library that shifts the time of day of a process, for Python and for Java."""
    if sys.platform != "linux" or shutil.which("gcc") is None:
        pytest.skip("the clock of a process is shifted on Linux alone, by a library that gcc makes")
    library = tmp_path / "shifted_clock.so"
    source = Path(__file__).parent / "support" / "shifted_clock.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return str(library)


def shifted(shim: str, seconds: int) -> dict[str, str]:
    return {"LD_PRELOAD": shim, "CLOCK_SHIFT": str(seconds)}


def test_the_library_shifts_the_time_of_day_alone(shim: str) -> None:
    code = "import time; print(time.time(), time.monotonic())"
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **shifted(shim, -HOUR)},
        capture_output=True,
        check=True,
    ).stdout.split()
    assert float(out[0]) == pytest.approx(time.time() - HOUR, abs=60)
    assert float(out[1]) == pytest.approx(time.monotonic(), abs=60)


@pytest.mark.slow
@pytest.mark.spark
def test_clocks_an_hour_off_lose_and_double_nothing(shim: str, tmp_path: Path) -> None:
    frames = random_rows(5, rows=60)
    pipeline = Pipeline(tmp_path / "p", random_walk_spec())
    pipeline.land(frames[0])
    pipeline.pretrain()
    commits = Path(pipeline.settings.warehouse, "checkpoints", "walk-g0001", "commits")

    def run(seconds: int, *command: str) -> Driver:
        return Driver(pipeline, *command, "--model", "walk", **shifted(shim, seconds))

    # Each commit of the measurements is an hour before the last one or after it, and so is each driver.
    for number, seconds in enumerate((HOUR, -HOUR, 2 * HOUR)):
        file = pipeline.file_of(frames[number + 1])
        landed = run(seconds, "ingest", "--input", str(file))
        assert landed.finish() == 0, landed.said()
        driver = run(-seconds, "stream", "--trigger", "1")
        driver.wait_for(lambda number=number: str(number) in files(commits))
        # A second driver whose clock is two hours or more from the first one's.
        second = run(seconds, "stream")
        assert second.finish() == ALREADY_RUNNING, second.said()
        if number == 1:
            driver.kill()  # no end is recorded, and its sign of life is of another time
        else:
            assert driver.interrupt() == 0, driver.said()
    pipeline.land(frames[4])
    pipeline.stream()
    assert pipeline.tables.row_count(measurements("walk")) == 300
    assert_bit_equal(pipeline.estimates(), since(pipeline.batch(), frames[1]))
    (lineage,) = generations.read_generations(pipeline.warehouse, "walk")
    assert (lineage.status, lineage.owner, lineage.last_error) == ("live", None, None)
