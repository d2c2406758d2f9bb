"""Drivers of the former release and of this one on the same warehouse, at once and one after the other."""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from jobs import export, verify
from jobs.core.errors import ALREADY_RUNNING, RUN_FAILED
from jobs.lineage import generations
from jobs.lineage.generations import trace_live_lineage
from jobs.lineage.live import live_estimates
from jobs.spark import jars
from jobs.storage.tables import estimates
from tests.conftest import ROOT
from tests.jobs.support import processes
from tests.jobs.support.pipeline import (
    Pipeline,
    assert_bit_equal,
    landed,
    ordered,
    random_rows,
    reflected,
    since,
)
from tests.jobs.support.processes import Driver

AT_ONCE, BEHIND = "at once", "one behind the other"
JARS, OWN = "jars-of-its-own", "kalman-stores"
FORMER = "3c2a2e6"
"""The last commit whose streams keep states in format 1."""


def former_code(folder: Path) -> Path:
    """Write the code of the former release to a folder, and return the folder; skip the test if the clone lacks it."""
    packed = subprocess.run(["git", "archive", FORMER], cwd=ROOT, capture_output=True)
    if packed.returncode != 0:
        pytest.skip(f"this clone lacks commit {FORMER}")
    folder.mkdir(parents=True)
    subprocess.run(["tar", "x"], input=packed.stdout, cwd=folder, check=True)
    _give_jars(folder)
    return folder


def name_jars(code: Path) -> dict[str, str]:
    """Return the variable that names the jars of a release, unless it is this one."""
    return {} if code == ROOT else {"KALMAN_JARS": str(code / JARS)}


def _give_jars(code: Path) -> None:
    """Give the former release a folder of jars: those of this release, but with the classes of its own code."""
    present, folder = jars.find_jar_folder(), code / JARS
    folder.mkdir()
    for path in present.iterdir():
        if not path.name.startswith((OWN, jars.MANIFEST)) and path.suffix != ".jsa":
            (folder / path.name).symlink_to(path)
    with mock.patch.object(jars, "SOURCES", code / "jobs" / "spark" / "java"):
        version = jars.compute_source_digest()
        jar = folder / f"{OWN}-{version}.jar"
        jars.compile_jar(jar, [*jars._list_pyspark_jars(), *folder.glob("*.jar")])
    about = json.loads((present / jars.MANIFEST).read_text())
    about["coordinates"] = [
        f"{jars.GROUP}:{OWN}:{version}" if OWN in one else one for one in about["coordinates"]
    ]
    kept = {name: digest for name, digest in about["jars"].items() if not name.startswith(OWN)}
    about["jars"] = {**kept, jar.name: hashlib.sha256(jar.read_bytes()).hexdigest()}
    (folder / jars.MANIFEST).write_text(json.dumps(about))


class Meeting:
    """A stream with a competing driver of each release."""

    def __init__(self, pipeline: Pipeline, former: Path) -> None:
        self.pipeline, self.codes = pipeline, {"former": former, "this": ROOT}
        self.days = iter(random_rows(12))
        self.landed = [next(self.days)]
        pipeline.land(*self.landed)
        pipeline.pretrain()
        self.land(2)

    def start(self, release: str) -> Driver:
        """Start a driver of a release, which waits for rows until it is ended."""
        words = ("stream", "--model", self.pipeline.name, "--trigger", "1")
        code = self.codes[release]
        return Driver(self.pipeline, *words, PYTHONPATH=str(code), **name_jars(code))

    def land(self, number: int) -> None:
        """Land the next days, a micro-batch each."""
        days = [next(self.days) for _ in range(number)]
        self.pipeline.land(*days)
        self.landed += days

    def is_done(self) -> bool:
        """Return whether all rows after the first day have live estimates."""
        warehouse, table = self.pipeline.warehouse, estimates(self.pipeline.name)
        if not warehouse.exists(table):
            return False
        ends = dict(trace_live_lineage(generations.read_generations(warehouse, self.pipeline.name)))
        rows = warehouse.columns(table, ("generation", "batch_id")).to_pylist()
        mine = [one for one in rows if one["generation"] in ends]
        live = [one for one in mine if (end := ends[one["generation"]]) is None or one["batch_id"] <= end]
        return len(live) == sum(map(len, self.landed[1:]))

    def kill_in_a_micro_batch(self, driver: Driver) -> None:
        """Land days, and kill a driver once it has planned the first of them."""
        live = generations.find_live(self.pipeline.warehouse, self.pipeline.name)
        assert live is not None
        checkpoint = self.pipeline.warehouse.files(live.checkpoint)
        before = checkpoint.names("offsets")
        self.land(2)
        driver.wait_for(lambda: checkpoint.names("offsets") != before)
        driver.kill()

    def start_at_once(self) -> tuple[str, Driver]:
        """Start both drivers at once; one is refused. Return the release of the other, and its driver."""
        both = {release: self.start(release) for release in self.codes}
        wait(lambda: any(one.process.poll() is not None for one in both.values()))
        ended = [release for release, one in both.items() if one.process.poll() is not None]
        said = {release: one.said() for release, one in both.items()}
        assert [both[release].process.returncode for release in ended] == [ALREADY_RUNNING], said
        (winner,) = set(both) - set(ended)
        return winner, both[winner]

    def start_behind(self, release: str) -> tuple[str, Driver]:
        """Start a driver of a release, and once it drives, one of the other release, which is refused."""
        driver = self.start(release)
        driver.wait_for(self.is_done, 0.3)
        (other,) = set(self.codes) - {release}
        late = self.start(other)
        assert late.finish() == ALREADY_RUNNING, late.said()
        return release, driver

    def kill_in_turns(self, release: str, driver: Driver) -> None:
        """Kill the driver of a release in a micro-batch, and start one of the other release. This release takes over a
        stream of the former. The former cannot read this release's states, and fails.
        """
        driver.wait_for(self.is_done, 0.3)
        self.kill_in_a_micro_batch(driver)
        if release == "former":
            _, driver = self.start_behind("this")
            self.kill_in_a_micro_batch(driver)
        failed = self.start("former")
        assert failed.finish() == RUN_FAILED, failed.said()
        driver = self.start("this")
        driver.wait_for(self.is_done, 0.3)
        assert driver.interrupt() == 0, driver.said()

    def check(self) -> None:
        """Check that each row is reflected once in the estimates and in the states, with the bits of one batch."""
        pipeline = self.pipeline
        assert pipeline.stream().data["batches"] == 0
        found = ordered(live_estimates(pipeline.warehouse, pipeline.name).toPandas())
        assert_bit_equal(found, since(pipeline.batch(), self.landed[1]))
        assert len(found) == sum(map(len, self.landed[1:]))
        assert verify.run(pipeline.settings, pipeline.name, share="1").data["outcome"] == "equal"
        exported = export.run(pipeline.settings, pipeline.name).data["snapshot"]
        assert reflected(pipeline, exported) == landed(pipeline)


def let_both_drive(pipeline: Pipeline, former: Path, start: str) -> None:
    """Let drivers of both releases compete for one stream, and check their output.

    Args:
        pipeline: a pipeline without rows, before its first driver.
        former: the folder with the former release's code.
        start: `AT_ONCE`, or `BEHIND`: the former release drives before the other one starts.
    """
    meeting = Meeting(pipeline, former)
    meeting.kill_in_turns(*(meeting.start_at_once() if start == AT_ONCE else meeting.start_behind("former")))
    meeting.check()


def wait(what: Callable[[], Any]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + processes.PATIENCE
    while not what():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.05)
