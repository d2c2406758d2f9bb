"""Disks, rights and limits that fail around a verb: one sentence with cause and path, and the verb goes on after.

The faults are real: file systems are mounted read-only, rights are dropped, limits are set, small disks are filled.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from jobs import upgrade
from jobs.core.errors import RUN_FAILED
from jobs.lineage import generations
from jobs.lineage.live import live_estimates
from jobs.storage.tables import measurements
from tests.conftest import cli_environment
from tests.jobs.support.pipeline import (
    Pipeline,
    assert_bit_equal,
    ordered,
    random_rows,
    random_walk_spec,
    since,
    streaming,
)

READ_ONLY = "the file system is mounted read-only (Read-only file system): mount it for writing"
FORBIDDEN = "has no right to do this there (Permission denied): give the right to the file and its folders"
FULL = "there is no room left on a disk that it writes to (No space left on device): make room"
TOO_LARGE = (
    "a file would be larger than this process, or the file system, allows (File too large): raise the limit"
)
TOO_MANY = "this process may not open more files (Too many open files): raise its limit of open files"
MISLEADING = (
    *(
        "Traceback",
        "traceback in",
        "Caused by",
        "\tat ",
        "panicked",
        "lock file",
        "remove it",
        "install Java",
    ),
    *("--adopt", "from a copy", "copy it again", "does not exist", "no such file", "is damaged"),
)
_RIGHTS = "-dac_override,-dac_read_search,-fowner"
UNPRIVILEGED = ("setpriv", f"--bounding-set={_RIGHTS}", f"--inh-caps={_RIGHTS}")
"""Root without the capabilities by which root passes permission bits."""
VERBS = {
    "ingest": ("ingest", "--model", "walk", "--input", "new.csv"),
    "init": ("init", "--input", "new.csv", "--output", "models/made.yaml", "--quick"),
    "pretrain": ("pretrain", "--model", "walk"),
    "stream": ("stream", "--model", "walk"),
    "estimate": ("estimate", "--model", "walk"),
    "filter": ("filter", "--model", "walk", "--input", "new.csv", "--output", "out.csv"),
    "status": ("status",),
    "maintain": ("maintain", "--model", "walk"),
    "report": ("report", "--model", "walk"),
    "plot": ("plot", "--model", "walk", "--output", "keys.html"),
    "forecast": (
        "forecast",
        "--model",
        "walk",
        "--input",
        "new.csv",
        "--steps",
        "2",
        "--output",
        "ahead.csv",
    ),
    "list": ("quarantine", "list", "--model", "walk"),
    "quarantine": ("quarantine", "discard", "--model", "walk", "--all"),
    "promote": ("promote", "--model", "walk", "--generation", "walk-g0001"),
    "upgrade": ("upgrade", "--model", "other/walk.yaml", "--mode", "repartition"),
    "verify": ("verify", "--model", "walk", "--share", "100%"),
    "export": ("export", "--model", "walk"),
}
SWITCHES = {
    "promote a shadow": ("promote", "--model", "walk", "--force"),
    "rollback": ("rollback", "--model", "walk"),
}


class Limits(NamedTuple):
    """How a command is started: limits of its process, words before it, and its environment."""

    prefix: tuple[str, ...] = ()
    limits: tuple[tuple[int, int], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


UNLIMITED = Limits()
Fault = Callable[[Pipeline, Path], AbstractContextManager[Limits]]


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Pipeline]:
    """A pipeline with a snapshot, rows that its stream has not read, and rejected rows; made without Spark."""
    days = random_rows(3, rows=60)
    rejected = days[1].astype({"a": "string"})
    rejected.loc[:2, "a"] = "many"
    made = Pipeline(tmp_path / "p", random_walk_spec())
    made.land(days[0])
    made.pretrain()
    made.land(rejected, suffix=".csv")
    days[2].to_csv(made.folder / "new.csv", index=False)
    yield made
    _unmount(tmp_path)


def call(pipeline: Pipeline, verb: str, how: Limits = UNLIMITED) -> subprocess.CompletedProcess[str]:
    """Run a verb as a process in the pipeline's folder."""
    given = {"KALMAN_MODELS": str(pipeline.settings.models), **dict(how.environment)}

    def limit() -> None:
        for kind, most in how.limits:
            resource.setrlimit(kind, (most, most))

    return subprocess.run(
        [*how.prefix, sys.executable, "-m", "jobs.cli", *(VERBS | SWITCHES)[verb]],
        cwd=pipeline.folder,
        env=cli_environment(pipeline.settings.warehouse, given),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        preexec_fn=limit if how.limits else None,
    )


def fails(done: subprocess.CompletedProcess[str], sentence: str, place: str = "") -> bool:
    """Return whether a verb failed; check that it then said one sentence, the fault's, with its place."""
    if done.returncode == 0:
        return False
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (done.returncode, len(errors)) == (RUN_FAILED, 1), done.stderr
    assert sentence in errors[0] and place in errors[0], done.stderr
    assert not any(word in done.stderr for word in MISLEADING), done.stderr
    return True


def _mount(*arguments: str) -> None:
    if subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode:
        pytest.skip("only root can mount")


def _unmount(below: Path) -> None:
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for place in mounted:
        if Path(place).is_relative_to(below):
            subprocess.run(["umount", "-l", place], check=True)


@contextmanager
def read_only(pipeline: Pipeline, place: Path) -> Iterator[Limits]:
    _mount("--bind", str(place), str(place))
    _mount("-o", "remount,ro,bind", str(place))
    try:
        yield Limits()
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@contextmanager
def forbidden(pipeline: Pipeline, place: Path) -> Iterator[Limits]:
    """Take the right to write below a place, or to read a file."""
    if os.geteuid() or shutil.which("setpriv") is None:
        pytest.skip("only root with setpriv can drop rights")
    parts = [place, *place.rglob("*")] if place.is_dir() else [place]
    before = [(part, part.stat().st_mode) for part in parts]
    for part, mode in before:
        part.chmod(mode & 0o555 if place.is_dir() else 0)
    try:
        yield Limits(UNPRIVILEGED)
    finally:
        for part, mode in before:
            part.chmod(mode)


@contextmanager
def small_files(pipeline: Pipeline, place: Path) -> Iterator[Limits]:
    yield Limits(limits=((resource.RLIMIT_FSIZE, 1000),))


def few_files(count: int) -> Fault:
    @contextmanager
    def few(pipeline: Pipeline, place: Path) -> Iterator[Limits]:
        yield Limits(limits=((resource.RLIMIT_NOFILE, count),))

    return few


@contextmanager
def full_temporary_folder(pipeline: Pipeline, place: Path) -> Iterator[Limits]:
    place.mkdir()
    _mount("-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place))
    try:
        with (place / "ballast").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 60 << 10)
        options = f"{os.environ.get('SPARK_SUBMIT_OPTS', '')} -Djava.io.tmpdir={place}"
        names = {"TMPDIR": str(place), "SPARK_LOCAL_DIRS": str(place), "SPARK_SUBMIT_OPTS": options}
        yield Limits(environment=tuple(names.items()))
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize(
    ("fault", "below", "verb", "sentence"),
    [
        pytest.param(read_only, "warehouse", "quarantine", READ_ONLY, id="a read-only warehouse"),
        pytest.param(read_only, "warehouse", "ingest", READ_ONLY, id="a read-only table"),
        pytest.param(forbidden, "warehouse", "ingest", FORBIDDEN, id="a forbidden warehouse"),
        pytest.param(forbidden, "new.csv", "ingest", FORBIDDEN, id="an unreadable file"),
        pytest.param(small_files, "", "ingest", TOO_LARGE, id="a limit of file sizes"),
        pytest.param(few_files(32), "", "status", TOO_MANY, id="a limit of open files"),
    ],
)
def test_a_fault_is_one_sentence_with_its_place(
    pipeline: Pipeline, fault: Fault, below: str, verb: str, sentence: str
) -> None:
    place = pipeline.folder / below
    with fault(pipeline, place) as how:
        assert fails(call(pipeline, verb, how), sentence, str(place) if below else "")
        if verb == "quarantine":
            assert "not a number 3 0 0" in " ".join(call(pipeline, "list", how).stdout.split())
    assert pipeline.land_files(pipeline.folder / "new.csv").data["rows"] == 60
    assert pipeline.tables.row_count(measurements("walk")) == 177
    assert not list(Path(pipeline.settings.warehouse).rglob(".*.part*"))


WRITERS = {
    "ingest",
    "pretrain",
    "stream",
    "estimate",
    "maintain",
    "report",
    "quarantine",
    "upgrade",
    "verify",
    "export",
}


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize(
    ("fault", "below", "sentence", "verbs", "failing"),
    [
        pytest.param(read_only, "warehouse", READ_ONLY, VERBS, WRITERS, id="a read-only warehouse"),
        pytest.param(forbidden, "warehouse", FORBIDDEN, VERBS, WRITERS, id="a forbidden warehouse"),
        pytest.param(
            *(read_only, "warehouse/checkpoints", READ_ONLY),
            *(("stream", "status", "plot", "export"), {"stream", "export"}),
            id="read-only checkpoints",
        ),
        pytest.param(
            *(forbidden, "warehouse/checkpoints/walk-g0001/state", FORBIDDEN),
            *(("stream", "export"), {"stream", "export"}),
            id="a forbidden state",
        ),
        pytest.param(
            *(small_files, "", TOO_LARGE, ("ingest", "pretrain", "stream", "filter", "report", "plot", "estimate")),
            {"ingest", "pretrain", "stream", "filter", "report", "plot", "estimate"},
            id="a limit of file sizes",
        ),
        *(
            pytest.param(
                *(few_files(count), "", TOO_MANY, ("ingest", "stream")),
                {"ingest", "stream"} if count < 64 else {"stream"},
                id=f"{count} open files",
            )
            for count in (32, 128, 320)
        ),
        pytest.param(
            *(full_temporary_folder, "tmp", FULL, ("ingest", "filter", "pretrain", "stream", "verify")),
            {"stream", "verify"},
            id="a full temporary folder",
        ),
    ],
)  # fmt: skip
def test_after_a_fault_every_verb_goes_on_and_nothing_is_lost(
    tmp_path: Path, fault: Fault, below: str, sentence: str, verbs: Sequence[str], failing: set[str]
) -> None:
    days = random_rows(4, rows=60)
    changed = days[2].astype({"a": "string"})
    changed.loc[:2, "a"] = "many"  # rows for quarantine
    pipeline = streaming(tmp_path / "p", days[0], days[1])
    pipeline.land(changed, suffix=".csv")
    days[3].to_csv(pipeline.folder / "new.csv", index=False)
    other = pipeline.folder / "other"
    shutil.copytree(pipeline.settings.models, other)
    pipeline.write_spec(random_walk_spec(stream={"partitions": 3, "keys_per_block": 8}))
    shutil.move(pipeline.settings.models / "walk.yaml", other / "walk.yaml")
    pipeline.write_spec(random_walk_spec())
    place = pipeline.folder / below
    try:
        with fault(pipeline, place) as how:
            where = str(place) if below else ""
            assert {verb for verb in verbs if fails(call(pipeline, verb, how), sentence, where)} == failing
    finally:
        _unmount(tmp_path)
    if pipeline.tables.row_count(measurements("walk")) < 237:
        assert call(pipeline, "ingest").returncode == 0
    pipeline.stream()
    found = pipeline.estimates()
    assert len(found) == 177
    assert_bit_equal(found, since(pipeline.batch(), days[1]))
    done = call(pipeline, "verify")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.spark
def test_after_a_fault_a_generation_is_promoted_and_rolled_back(tmp_path: Path) -> None:
    days = random_rows(3, rows=60)
    pipeline = streaming(tmp_path / "p", days[0], days[1])
    pipeline.write_spec(random_walk_spec(version=2))
    upgrade.run(pipeline.settings, "walk", promote=False, force=True)
    warehouse = Path(pipeline.settings.warehouse)
    for verb, live in zip(SWITCHES, ("walk-g0002", "walk-g0001"), strict=True):
        before = generations.find_live(pipeline.warehouse, "walk")
        for fault, sentence in ((read_only, READ_ONLY), (forbidden, FORBIDDEN)):
            with fault(pipeline, warehouse) as how:
                assert fails(call(pipeline, verb, how), sentence, str(warehouse)), verb
            assert generations.find_live(pipeline.warehouse, "walk") == before
        done = call(pipeline, verb)
        assert done.returncode == 0, done.stderr
        assert generations.read_named(pipeline.warehouse, "walk").generation == live
    pipeline.land(days[2])
    pipeline.stream()
    table = ordered(live_estimates(pipeline.warehouse, "walk").toPandas())
    assert_bit_equal(table, since(pipeline.batch(), days[1]))
