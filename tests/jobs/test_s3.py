"""A warehouse in an S3-compatible store: a real endpoint over HTTP, which refuses to create an object that is there."""

from __future__ import annotations

import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from demo.delta_log import rows_of
from demo.ports import free_ports, listens
from jobs.errors import ALREADY_RUNNING
from jobs.lease_log import CAUGHT_UP, STOPPED, LeaseLog
from tests.jobs.pipeline import Pipeline, assert_as_the_filter_alone, random_rows, random_walk_spec
from tests.jobs.processes import Driver

SERVER = shutil.which("moto_server")
pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.skipif(
        SERVER is None, reason="needs moto_server on the path: pip install 'moto[server]' anywhere"
    ),
]
NAMES = {"s3": "http://s3.amazonaws.com/doc/2006-03-01/"}


class Store:
    """A running store with one bucket."""

    def __init__(self, address: str, log: Path) -> None:
        self.address, self.bucket, self.log = address, f"{address}/kalman", log

    def objects(self, prefix: str) -> list[str]:
        """Return the names of the objects that begin so."""
        found, after = [], ""
        while True:
            query = urllib.parse.urlencode({"list-type": 2, "prefix": prefix, "start-after": after})
            with urllib.request.urlopen(f"{self.bucket}?{query}") as answer:
                tree = ElementTree.parse(answer)
            names = [one.text or "" for one in tree.iterfind(".//s3:Contents/s3:Key", NAMES)]
            found += names
            if not names:
                return found
            after = names[-1]

    def copy(self, prefix: str, target: Path) -> Path:
        """Copy what begins so to a folder."""
        for name in self.objects(f"{prefix}/"):
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not name.endswith("/"):
                with urllib.request.urlopen(f"{self.bucket}/{urllib.parse.quote(name)}") as answer:
                    path.write_bytes(answer.read())
        return target / prefix


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store that lives in a process of its own."""
    assert SERVER is not None
    (port,) = free_ports(1)
    log = tmp_path / "store.log"
    with log.open("w") as out:
        process = subprocess.Popen([SERVER, "-H", "127.0.0.1", "-p", str(port)], stdout=out, stderr=out)
    try:
        while not listens(port):
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        made = Store(f"http://127.0.0.1:{port}", log)
        urllib.request.urlopen(urllib.request.Request(made.bucket, method="PUT")).close()
        yield made
    finally:
        process.kill()
        process.wait()


def test_a_pipeline_in_a_store(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = random_rows(8, rows=60)
    local = Pipeline(tmp_path, random_walk_spec())
    environment = {
        "AWS_ENDPOINT_URL": store.address,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "KALMAN_WAREHOUSE": "s3a://kalman/warehouse",
    }

    def written(name: str, frame: Any) -> list[str]:
        path = tmp_path / f"{name}.parquet"
        frame.to_parquet(path, index=False)
        return ["--input", str(path)]

    def run(verb: str, *words: str) -> Driver:
        return Driver(local, verb, "--model", "walk", *words, **environment)

    def done(*drivers: Driver) -> None:
        for one in drivers:
            assert one.finish() == 0, one.said()

    done(run("ingest", *written("history", frames[0])))
    done(run("pretrain"))
    # Two processes commit to one table at the same time, one the even keys, one the odd: their order does not matter.
    halves = []
    for half in range(2):
        parts = [frame[frame["id"] % 2 == half] for frame in frames[1:]]
        halves.append([word for day, part in enumerate(parts) for word in written(f"{half}-{day}", part)])
    done(*[run("ingest", *half) for half in halves])
    first = run("stream")
    first.wait_for(lambda: len(store.objects("warehouse/checkpoints/walk-g0001/offsets/")) >= 3)
    first.kill()
    done(run("stream"))
    drivers = [run("stream", "--trigger", "1") for _ in range(2)]
    deadline = time.monotonic() + 120
    while all(one.process.poll() is None for one in drivers) and time.monotonic() < deadline:
        time.sleep(0.2)
    refused = [one for one in drivers if one.process.poll() is not None]
    assert [one.process.returncode for one in refused] == [ALREADY_RUNNING], [one.said() for one in drivers]
    (running,) = (one for one in drivers if one not in refused)
    assert running.terminate() == 0, running.said()
    done(run("status"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    drivers_known = LeaseLog.at(environment["KALMAN_WAREHOUSE"], "walk").history(
        "walk-g0001"
    )  # without Spark
    assert [one.how for one in drivers_known] == [None, CAUGHT_UP, STOPPED]

    estimates = rows_of(store.copy("warehouse/estimates/walk", tmp_path / "copy"))
    assert_as_the_filter_alone(local, estimates, frames)
    assert " 412 " in store.log.read_text()
