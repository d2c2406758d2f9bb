"""A disk that is full while something is written: said in a sentence, nothing half visible, and it goes on after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from jobs import export, upgrade
from jobs.core.errors import RUN_FAILED
from jobs.lineage.live import live_estimates
from jobs.snapshots import manifests, store
from jobs.storage.tables import measurements
from tests.jobs.support.pipeline import (
    Pipeline,
    assert_bit_equal,
    ordered,
    random_rows,
    random_walk_spec,
    since,
)
from tests.jobs.support.processes import Driver
from tests.support.small_disks import Ballast, small_disk

FULL = (
    "there is no room left on a disk that it writes to (No space left on device): make room and run the command again; "
    "no reader sees what was half written, and nothing is lost"
)
DISK = 24 * 2**20
ROOM = (0, 12_288, 40_960)
"""Bytes that are left, in the order in which a verb is tried with them: it fails at another write with each."""
OTHER_ROOM = (4_096, 24_576, 65_536)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    with small_disk(tmp_path / "disk", DISK) as place:
        yield place


def fails_for_want_of_room(pipeline: Pipeline, *command: str, **environment: str) -> str:
    """Run a verb as a process of its own; return the one sentence with which it failed, or "" if it did its work."""
    driver = Driver(pipeline, *command, **environment)
    code, said = driver.finish(), driver.said()
    if code == 0:
        return ""
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert (code, len(lines)) == (RUN_FAILED, 1), said
    assert FULL in lines[0] and "Traceback" not in said, said
    return lines[0]


@pytest.fixture(scope="module")
def two_thousand(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pipeline, pd.DataFrame]:
    """A stream of 2,000 keys that has run once and has two files before it, and what an undisturbed run estimates."""
    spec = random_walk_spec(stream={"partitions": 2, "keys_per_block": 64, "max_files_per_batch": 1})
    pipeline = Pipeline(tmp_path_factory.mktemp("keys") / "pipeline", spec)
    days = [one_row_a_key(day) for day in range(4)]
    pipeline.land(days[0])
    pipeline.pretrain()
    pipeline.land(days[1])
    pipeline.stream()
    pipeline.land(*days[2:])
    undisturbed = pipeline.copied(tmp_path_factory.mktemp("undisturbed") / "pipeline")
    undisturbed.stream()
    return pipeline, undisturbed.estimates()


def one_row_a_key(day: int, keys: int = 2000) -> pd.DataFrame:
    values = np.random.default_rng(day).normal(size=(2, keys))
    minutes = day * 24 * 60 + np.arange(keys) % (24 * 60)
    at = pd.Timestamp("2024-03-01", tz="UTC") + pd.to_timedelta(minutes, "min")
    return pd.DataFrame({"id": np.arange(keys), "at": at.as_unit("us"), "a": values[0], "b": values[1]})


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize(
    ("place", "room"),
    [
        pytest.param("warehouse/checkpoints", 0, id="the plan of a micro-batch"),
        pytest.param("warehouse/checkpoints", 80_000, id="the changes of the state"),
        pytest.param("warehouse/checkpoints", 130_000, id="the commit of a micro-batch"),
        pytest.param("warehouse/estimates", 0, id="the first estimates"),
        pytest.param("warehouse/estimates/walk/_delta_log", 0, id="the commit of the estimates"),
        pytest.param("local", 0, id="the temporary folder of Spark"),
        pytest.param("local", 9_760_000, id="the local blocks of Spark"),
        pytest.param("local", 9_900_000, id="the local copy of the state"),
    ],
)
def test_a_stream_whose_disk_fills_up_ends_and_goes_on_after(
    two_thousand: tuple[Pipeline, pd.DataFrame], tmp_path: Path, place: str, room: int
) -> None:
    prepared, expected = two_thousand
    pipeline = prepared.copied(tmp_path / "pipeline")
    local = pipeline.folder / "local"
    with small_disk(pipeline.folder / place, DISK) as disk:
        ballast = Ballast(disk)
        ballast.leave(room)
        said = fails_for_want_of_room(pipeline, "stream", "--model", "walk", SPARK_LOCAL_DIRS=str(local))
        assert str(disk).removesuffix("/_delta_log") in said  # a failed commit names its table
        ballast.clear()
        pipeline.stream()
        assert_bit_equal(pipeline.estimates(), expected)


@pytest.mark.soak
@pytest.mark.spark
def test_a_disk_that_is_full_at_any_step_loses_nothing(disk: Path, tmp_path: Path) -> None:
    days = random_rows(4, rows=60)
    folder = tmp_path / "pipeline"
    folder.mkdir()
    (disk / "warehouse").mkdir()
    (folder / "warehouse").symlink_to(disk / "warehouse")  # what tests write for themselves is elsewhere
    pipeline = Pipeline(folder, random_walk_spec())
    ballast = Ballast(disk)
    failed: set[str] = set()

    def tried(*command: str, at_last: Callable[[], object], rooms: Sequence[int] = ROOM) -> None:
        """Run a verb with ever more room until there is enough, at last in this process."""
        for room in rooms:
            ballast.leave(room)
            if not fails_for_want_of_room(pipeline, *command, "--model", "walk"):
                ballast.clear()
                return
            failed.add(command[0])
        ballast.clear()
        at_last()

    def live() -> pd.DataFrame:
        return ordered(live_estimates(pipeline.warehouse, "walk").toPandas())

    pipeline.land(days[0])
    file = folder / "day.csv"
    days[1].to_csv(file, index=False)
    tried("ingest", "--input", str(file), at_last=lambda: pipeline.land_files(file))
    assert pipeline.warehouse.read(measurements("walk")).count() == len(days[0]) + len(days[1])
    tried("pretrain", "--to-version", "1", at_last=lambda: pipeline.pretrain(to_version=1))
    (manifest,) = manifests.read_manifests(pipeline.warehouse)
    store.verify(pipeline.warehouse, manifest)
    for day, rooms in zip(days[2:], (ROOM, OTHER_ROOM), strict=True):
        pipeline.land(day)
        tried("stream", at_last=pipeline.stream, rooms=rooms)
    tried("export", at_last=lambda: export.run(pipeline.settings, "walk"))
    expected = since(pipeline.batch(), days[1])
    assert_bit_equal(live(), expected)
    pipeline.write_spec(random_walk_spec(stream={"partitions": 3, "keys_per_block": 8}))
    tried(
        *("upgrade", "--mode", "repartition"),
        at_last=lambda: upgrade.run(pipeline.settings, "walk", mode="repartition"),
    )
    pipeline.stream()
    assert_bit_equal(live(), expected)
    assert failed == {"ingest", "pretrain", "stream", "export", "upgrade"}
