"""Warehouses on a real S3 store: the same bits as in a folder, every commit once, whatever is lost, late or killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs.core.errors import RUN_FAILED
from tests.conftest import ROOT, cli_environment
from tests.jobs.support.former_driver import AT_ONCE, BEHIND, former_code
from tests.support import object_store

pytestmark = [pytest.mark.spark, pytest.mark.slow]
EACH = 4
"""As in `tests.support.in_store`, which needs Spark's packages at its start."""


def found_in(folder: Path, part: str) -> dict[str, Any]:
    """Run a part in a process of its own, and return what each of its steps has found."""
    if (missing := object_store.missing(java=True)) is not None:
        pytest.skip(missing)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.in_store", str(folder), part],
        cwd=ROOT,
        env=cli_environment(folder / "unused", {"KALMAN_KAFKA_JARS": None}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = [line.removeprefix("FOUND ") for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return {step["step"]: step for step in map(json.loads, told)}


def test_a_stream_whose_answers_are_lost_is_that_of_a_folder(tmp_path: Path):
    """Of each creation the first answer is lost."""
    found = found_in(tmp_path, "streams")
    assert found["streams"]["rows"] > 0 and not found["streams"]["began"]
    lost = found["streams"]["lost"]
    # Two micro-batches: each plans, estimates and is done; the lease is taken and given back.
    assert lost["commits of estimates/walk"] >= 2 and lost["checkpoints"] >= 4
    assert lost["commits of generations"] >= 2


def test_commits_of_spark_and_delta_rs_agree_and_a_lost_answer_is_resolved(tmp_path: Path):
    """Two threads of each append to one table at once; then the first answer to each of Spark's commits is lost."""
    found = found_in(tmp_path, "commits")
    both = [0, *(100 * writer + i for writer in (1, 2, 3, 4) for i in range(EACH))]
    assert found["writers"]["failed"] == []
    assert found["writers"]["rows"] == both  # none is lost and none is there twice
    assert found["writers"]["version"] == len(both) - 1
    assert found["lost"]["rows"] == [0, 1, 2, 3, 4] and found["lost"]["version"] == 4
    # Beside each commit Delta creates its checksums on the same condition.
    endings = ("crc", "json")
    assert found["lost"]["lost"] == [
        f"{version:020d}.{ending}" for version in range(1, 5) for ending in endings
    ]


def test_the_verbs_give_in_a_store_what_they_give_in_a_folder(tmp_path: Path):
    """The store answers 503 to one of fifteen requests, and each creation is late."""
    found = found_in(tmp_path, "verbs")["verbs"]
    assert found["same"] and found["rows"] > 0
    assert found["refused"] > 10 and found["delayed"] > 10


def test_what_reads_and_follows_estimates_finds_in_a_store_what_it_finds_in_a_folder(tmp_path: Path):
    """Joined inputs, sinks, the monitor, verify, history, forecasts and an export; each first answer is lost."""
    found = found_in(tmp_path, "queries")["queries"]
    assert found["same"] and found["rows"] > 0
    assert found["lost"]["checkpoints"] >= 4


def test_drivers_killed_two_at_once_and_frozen_lose_and_double_nothing(tmp_path: Path):
    """Drivers are processes of one stream; while some are killed, the first answer to each creation is lost."""
    found = found_in(tmp_path, "drivers")
    assert found["frozen"]["woken"] == RUN_FAILED
    assert found["killed"]["lost"]["checkpoints"] >= 2
    assert found["two"]["refused"] == 1
    assert found["drivers"]["rows"] > 0
    assert found["drivers"]["ends"][:2] == ["lost", "caught up"]


@pytest.mark.parametrize("start", [AT_ONCE, BEHIND])
def test_of_drivers_of_both_releases_one_drives_and_nothing_is_lost(tmp_path: Path, start: str):
    former_code(tmp_path / "former")
    assert found_in(tmp_path, start)[start]["rows"] > 0
