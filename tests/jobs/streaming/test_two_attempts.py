"""Two attempts of one micro-batch write different values to the state, and only those of one are ever read.

An attempt with a local copy writes changes, one without writes blocks. Each history has real drivers: one is killed or
frozen between its states and its commit, in the sparse micro-batch after a dense one.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs import export, verify
from jobs.core.errors import ALREADY_RUNNING
from jobs.lineage import generations
from jobs.lineage.live import live_estimates
from jobs.streaming.micro_batch import MicroBatchWriter
from tests.conftest import ROOT
from tests.fixtures.make_format1 import KEYS, QUICK, days, walks
from tests.jobs.support.former_driver import AT_ONCE, BEHIND, former_code, let_both_drive, name_jars
from tests.jobs.support.pipeline import (
    Pipeline,
    assert_bit_equal,
    landed,
    random_rows,
    random_walk_spec,
    reflected,
    since,
    streaming,
)
from tests.jobs.support.processes import Driver, files

pytestmark = pytest.mark.spark

STRUCK = 10
"""The micro-batch after the dense one."""
RARE = "pyspark-shell"
"""Spark's default: a driver that ends within a minute uploads nothing."""
APART = """
import sys
if "jobs.cli" in sys.orig_argv:
    from contextlib import nullcontext

    from jobs.lineage import leases
    from jobs.spark.warehouse import Warehouse

    # As if the drivers ran on different machines: a stopped process does not let go of its locks.
    leases.stream_lock = lambda *_, **__: nullcontext()
    Warehouse.lock = lambda *_: nullcontext()
"""


class Histories:
    """A stream, and the drivers that meet in its micro-batch `STRUCK`."""

    def __init__(self, folder: Path) -> None:
        self.pipeline = Pipeline(folder, walks("hurt"))
        frames = days(15)
        self.pipeline.land(frames[0])
        self.pipeline.pretrain()
        self.pipeline.land(*frames[1:])
        (folder / "sitecustomize.py").write_text(APART)
        self.checkpoint = Path(self.pipeline.settings.warehouse, "checkpoints", "hurt-g0001")
        self.state = self.checkpoint / "state" / "0" / "0"

    def driver(self, host: str, code: Path = ROOT, uploads: str = QUICK) -> Driver:
        """Start a driver as if on a machine of its own, with the code of a folder; uploads: when it uploads states."""
        path = os.pathsep.join([str(self.pipeline.folder), str(code)])
        given = {"KALMAN_HOST": host, "KALMAN_LEASE_SECONDS": "6", "PYTHONPATH": path, **name_jars(code)}
        return Driver(self.pipeline, "stream", "--model", "hurt", PYSPARK_SUBMIT_ARGS=uploads, **given)

    def takes_over(self, host: str) -> Driver:
        """Run a driver to its end, once the lease of the one before has expired."""
        while True:
            one = self.driver(host)
            if one.finish() != ALREADY_RUNNING:
                assert one.process.returncode == 0, one.said()
                return one

    def written(self, suffix: str) -> set[str]:
        """Return the files of the states after the micro-batch, of all attempts."""
        names = (name for name in files(self.state) if name.endswith(suffix))
        return {name for name in names if name.split(".")[0].split("_")[0] == str(STRUCK + 1)}

    def committed(self) -> bool:
        return str(STRUCK) in files(self.checkpoint / "commits")

    def stopped(self, when: Callable[[], object], java: bool, code: Path = ROOT) -> Driver:
        """Start a driver and stop it, with Java or alone, at a moment before the micro-batch is committed."""
        driver = self.driver("one", code)
        driver.wait_for(lambda: when() or self.committed())
        os.killpg(driver.process.pid, signal.SIGSTOP) if java else driver.process.send_signal(signal.SIGSTOP)
        assert not self.committed(), "the driver was stopped too late"
        return driver

    def wakes(self, driver: Driver) -> None:
        """Let a frozen driver go on: it writes what it had begun, then it finds that another has taken over."""
        os.killpg(driver.process.pid, signal.SIGCONT)
        assert driver.finish() != 0, driver.said()

    def check(self) -> None:
        """Check that each row is reflected once in the states and in the estimates, counted and recomputed."""
        pipeline = self.pipeline
        exported = export.run(pipeline.settings, "hurt").data["snapshot"]
        assert reflected(pipeline, exported) == landed(pipeline)
        estimates = live_estimates(pipeline.warehouse, "hurt")
        assert estimates.count() == estimates.select("key", "event_time").distinct().count()
        assert estimates.count() == sum(landed(pipeline).values()) - KEYS
        assert verify.run(pipeline.settings, "hurt", share="1").data["outcome"] == "equal"


@pytest.fixture
def world(tmp_path: Path) -> Histories:
    """A stream that nobody has driven yet."""
    return Histories(tmp_path)


@pytest.mark.slow
def test_a_driver_hangs_while_java_uploads_its_states_and_is_killed(world: Histories) -> None:
    driver = world.stopped(lambda: world.written(".changelog"), java=False)
    deadline = time.monotonic() + 60.0
    while not world.written(".zip") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert world.written(".zip")
    driver.kill()
    again = world.driver("one", uploads=RARE)
    assert again.finish() == 0, again.said()
    world.check()


def test_a_micro_batch_that_a_woken_driver_commits_first_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former driver froze behind its last check of the fence: its commit is whole, and the next one goes on."""
    frames = random_rows(3)
    pipeline = streaming(tmp_path, *frames[:2])
    commits = Path(pipeline.settings.warehouse, "checkpoints", "walk-g0001", "commits")
    kept = {commits / name: (commits / name).read_bytes() for name in ("0", ".0.crc")}
    for file in kept:
        file.unlink()  # as if that driver were frozen before it
    pipeline.land(frames[2])
    write = MicroBatchWriter.__call__

    def written(writer: MicroBatchWriter, *arguments: Any) -> None:
        write(writer, *arguments)
        for file, content in kept.items():
            file.write_bytes(content)  # it wakes up
        kept.clear()

    monkeypatch.setattr(MicroBatchWriter, "__call__", written)
    assert pipeline.stream().data["batches"] == 1
    assert not kept and files(commits) == {"0", "1"}
    assert_bit_equal(pipeline.estimates(), since(pipeline.batch(), frames[1]))
    assert verify.run(pipeline.settings, "walk", share="1").data["outcome"] == "equal"


@pytest.mark.slow
def test_a_driver_frozen_before_its_commit_wakes_and_uploads_its_states(world: Histories) -> None:
    driver = world.stopped(lambda: world.written(".changelog"), java=True)
    world.takes_over("two")
    world.wakes(driver)
    world.check()


@pytest.mark.slow
def test_a_driver_frozen_before_its_states_wakes_and_writes_them(world: Histories) -> None:
    driver = world.stopped(lambda: str(STRUCK) in files(world.checkpoint / "offsets"), java=True)
    world.takes_over("two")
    world.wakes(driver)
    world.check()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "frozen before its states", "frozen before its commit"])
def test_a_driver_of_the_former_release_is_struck_and_this_one_goes_on(
    world: Histories, tmp_path: Path, how: str
) -> None:
    code = former_code(tmp_path / "former")
    planned, wrote = (
        lambda: str(STRUCK) in files(world.checkpoint / "offsets"),
        lambda: world.written(".changelog"),
    )
    driver = world.stopped(
        planned if how == "frozen before its states" else wrote, java=how != "killed", code=code
    )
    if how == "killed":
        driver.kill()
    taken = world.takes_over("two")
    assert "hurt-g0002 continues them" in taken.said()
    if how != "killed":
        world.wakes(driver)
    live = generations.find_live(world.pipeline.warehouse, "hurt")
    assert live is not None and (live.generation, live.parent_batch) == ("hurt-g0002", STRUCK - 1)
    world.check()


@pytest.mark.slow
@pytest.mark.parametrize("start", [AT_ONCE, BEHIND])
def test_of_drivers_of_both_releases_one_drives_and_nothing_is_lost(tmp_path: Path, start: str) -> None:
    pipeline = Pipeline(tmp_path / "stream", random_walk_spec())
    let_both_drive(pipeline, former_code(tmp_path / "former"), start)
