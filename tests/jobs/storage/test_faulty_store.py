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
from tests.jobs.support.pipeline import Pipeline, random_rows, random_walk_spec
from tests.support.object_store import BUCKET, Asked, ObjectStore, Proxy, environment

pytestmark = pytest.mark.slow


def every(count: int, method: str | None = None) -> Callable[[Asked], bool]:
    """Return a rule for one of `count` requests."""
    numbers = itertools.count(1)
    return lambda asked: (method is None or asked[0] == method) and next(numbers) % count == 0


def ingest(root: str, address: str, pipeline: Pipeline, file: Path) -> subprocess.CompletedProcess[str]:
    """Land a file by a process that reaches the store through a proxy of this process."""
    command = ["ingest", "--model", "walk", "--input", str(file)]
    return subprocess.run(
        [sys.executable, "-m", "jobs.cli", *command],
        cwd=ROOT,
        env=cli_environment(
            Path("unused"),
            {
                **environment(address),
                "KALMAN_WAREHOUSE": root,
                "KALMAN_MODELS": str(pipeline.settings.models),
            },
        ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


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
