"""A store that fails, is slow, cuts its answers or is away: a verb goes on or says so, and each row lands once."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.core.errors import RUN_FAILED
from jobs.storage.warehouse import Tables
from tests.conftest import ROOT, cli_environment
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, ordered, random_rows, random_walk_spec
from tests.support.object_store import BUCKET, Asked, ObjectStore, Proxy, environment, missing

pytestmark = pytest.mark.slow


def every(count: int, method: str | None = None) -> Callable[[Asked], bool]:
    """Return a rule for one of `count` requests."""
    numbers = itertools.count(1)
    return lambda asked: (method is None or asked[0] == method) and next(numbers) % count == 0


def run(root: str, address: str, pipeline: Pipeline, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a verb by a process that reaches the store through a proxy of this process."""
    given = {
        **environment(address),
        "KALMAN_WAREHOUSE": root,
        "KALMAN_MODELS": str(pipeline.settings.models),
    }
    return subprocess.run(
        [sys.executable, "-m", "jobs.cli", *command, "--model", "walk"],
        cwd=ROOT,
        env=cli_environment(Path("unused"), given),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def ingest(root: str, address: str, pipeline: Pipeline, file: Path) -> subprocess.CompletedProcess[str]:
    """Land a file by such a process."""
    return run(root, address, pipeline, "ingest", "--input", str(file))


def says_so(done: subprocess.CompletedProcess[str], root: str) -> bool:
    """Return whether a command failed; check that it then said one sentence about the store."""
    if done.returncode == 0:
        return False
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (done.returncode, len(errors)) == (RUN_FAILED, 1), done.stderr
    assert "the store did not do it (" in errors[0] and "nothing is lost" in errors[0], done.stderr
    assert "Traceback" not in done.stderr and "panicked" not in done.stderr, done.stderr
    return True


def test_each_row_lands_once_whatever_the_store_does(
    store: ObjectStore, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, root = Pipeline(tmp_path, random_walk_spec()), f"s3a://{BUCKET}/faulty"
    frames = random_rows(4, rows=50)
    files = [pipeline.file_of(frame, ".csv") for frame in frames]
    assert not says_so(ingest(root, proxy.address, pipeline, files[0]), root)
    proxy.codes, proxy.delay = (500, 503), lambda asked: 0.05
    proxy.refuse = every(5)
    assert not says_so(ingest(root, proxy.address, pipeline, files[1]), root)  # its client tries again
    proxy.refuse, proxy.cut = lambda asked: False, every(29)
    tries = 0
    while says_so(ingest(root, proxy.address, pipeline, files[2]), root):
        tries += 1  # delta-rs does not repeat a read whose answer was cut
        assert tries < 20
    assert proxy.refused and proxy.halved
    # The store is away, and then it takes no writes.
    for refuse in (lambda asked: True, lambda asked: asked[0] in ("PUT", "POST")):
        proxy.behave()
        proxy.refuse = refuse
        assert says_so(ingest(root, proxy.address, pipeline, files[3]), root)
    proxy.behave()
    for _ in range(2):  # the second finds the file landed
        assert not says_so(ingest(root, proxy.address, pipeline, files[3]), root)
    # Not through the proxy: delta-rs lets no other thread of this process run while it reads a log.
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.address)
    found = Tables(root).columns("measurements/walk", ["id", "at"]).to_pylist()
    wanted = [(int(key), at) for frame in frames for key, at in zip(frame["id"], frame["at"], strict=True)]
    assert Counter((int(row["id"]), row["at"]) for row in found) == Counter(wanted)


@pytest.mark.spark
def test_a_stream_whose_answers_are_cut_is_that_of_a_folder(
    store: ObjectStore, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three answers are cut in their middle. A run that ends at one says so, and the next run goes on."""
    if (lacking := missing(java=True)) is not None:
        pytest.skip(lacking)
    days = random_rows(3, rows=60)
    here, root = Pipeline(tmp_path / "folder", random_walk_spec()), f"s3a://{BUCKET}/cut"
    here.land(days[0])
    assert not says_so(ingest(root, proxy.address, here, here.file_of(days[0], ".csv")), root)
    here.pretrain()
    assert not says_so(run(root, proxy.address, here, "pretrain"), root)
    for day in days[1:]:
        here.land(day)
        assert not says_so(ingest(root, proxy.address, here, here.file_of(day, ".csv")), root)
    numbers = itertools.count(1)
    proxy.cut = lambda asked: asked[0] == "GET" and next(numbers) in (10, 60, 150)
    ended = 0
    while says_so(run(root, proxy.address, here, "stream"), root):
        ended += 1
        assert ended <= 3
    assert len(proxy.halved) == 3, (ended, next(numbers))
    proxy.behave()
    here.stream()
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.address)
    found, expected = (
        ordered(Tables(place).columns("estimates/walk").to_pandas())
        for place in (root, here.settings.warehouse)
    )
    assert_bit_equal(found, expected)
    assert len(found) == 120
