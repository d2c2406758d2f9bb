"""The log store and the checkpoint files of our own, in a Java process with S3's client and without Spark's session."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError

from jobs.spark import jars
from jobs.storage.object_files import build_store_conf
from tests.support import object_store
from tests.support.gateways import JavaProcess, errors_of_any_process
from tests.support.object_store import BUCKET, ObjectStore, Proxy, environment

ROOT = f"s3a://{BUCKET}/java"
_NEEDED = (
    "hadoop-client-",
    "slf4j-api",
    "py4j",
    "ivy-",
    "json4s-",
    "http",
    "netty-",
    "commons-",
    "scala-library",
    "spark-",
    "jackson-",
    "jcl-",
    "log4j-core",
    "log4j-api",
)
"""Spark's jars that are needed here: with all of them the process takes far longer to start."""


class Java:
    """A Java process that reaches a store through a proxy."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        paths = [path for path in jars._list_pyspark_jars() if path.name.startswith(_NEEDED)]
        found = [*map(str, paths), *jars.list_jars(), *jars.fetch_optional_jars("s3")]
        self._process = JavaProcess(found, {**os.environ, **environment(proxy.address)})
        self.jvm: Any = self._process.jvm
        self.conf = self.jvm.org.apache.hadoop.conf.Configuration()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment(proxy.address).items():
                patch.setenv(name, value)
            settings = build_store_conf(ROOT)
        settings |= {
            f"spark.hadoop.fs.s3a.{name}": "1"
            for name in ("attempts.maximum", "retry.limit", "retry.throttle.limit")
        }
        settings |= {"spark.hadoop.fs.s3a.retry.http.5xx.errors": "false"}
        for name, value in settings.items():
            if name.startswith("spark.hadoop."):
                self.conf.set(name.removeprefix("spark.hadoop."), value)
        self.log = self.jvm.kalman.stores.ConditionalLogStore(self.conf)

    def path(self, name: str) -> Any:
        return self.jvm.org.apache.hadoop.fs.Path(f"{ROOT}/{name}")

    def write(self, name: str, lines: list[str], overwrite: bool = False) -> str:
        """Write a commit; return the Java class of the error, or an empty text."""
        actions = self.jvm.java.util.ArrayList()
        for line in lines:
            actions.add(line)
        try:
            self.log.write(self.path(name), actions.iterator(), overwrite, self.conf)
        except Py4JJavaError as error:
            name = error.java_exception.getClass().getName()
            if not name.startswith("java.lang."):
                return name
            raise
        return ""

    def read(self, name: str) -> list[str]:
        return list(_drawn(self.log.read(self.path(name), self.conf)))

    def stop(self) -> None:
        self._process.stop()


def _drawn(iterator: Any) -> Iterator[Any]:
    while iterator.hasNext():
        yield iterator.next()


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Java]:
    if (missing := object_store.missing(java=True)) is not None:
        pytest.skip(missing)
    with (
        ObjectStore(tmp_path_factory.mktemp("store") / "objects") as store,
        Proxy(store.address).running() as proxy,
    ):
        java = Java(proxy)
        try:
            yield java
        finally:
            java.stop()


@pytest.fixture(autouse=True)
def a_good_proxy(java: Java, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    errors_of_any_process(monkeypatch)
    yield
    java.proxy.behave()
    java.proxy.seen.clear()


def version(number: int) -> str:
    return f"log/{number:020d}.json"


def test_of_many_commits_of_a_version_one_wins_and_the_others_are_told(java: Java):
    told: list[tuple[int, int, str]] = []

    def commit(number: int, writer: int) -> None:
        told.append((number, writer, java.write(version(number), [f"writer {writer}", "é"])))

    for number in range(4):
        threads = [threading.Thread(target=commit, args=(number, writer)) for writer in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number in range(4):
        said = {writer: error for one, writer, error in told if one == number}
        (winner,) = [writer for writer, error in said.items() if not error]
        assert sorted(said.values()) == ["", *["java.nio.file.FileAlreadyExistsException"] * 3]
        assert java.read(version(number)) == [f"writer {winner}", "é"]
    names = [
        status.getPath().getName() for status in _drawn(java.log.listFrom(java.path(version(2)), java.conf))
    ]
    assert names == [version(2)[4:], version(3)[4:]]
    assert not java.log.isPartialWriteVisible(java.path(version(0)), java.conf)


def test_a_file_that_may_be_replaced_is(java: Java):
    for text in ("one", "two"):
        assert java.write("log/_last_checkpoint", [text], overwrite=True) == ""
        assert java.read("log/_last_checkpoint") == [text]


def test_a_commit_whose_answer_is_lost_is_resolved_once(java: Java):
    lost: list[str] = []

    def lose(asked: object_store.Asked) -> bool:
        first = asked[0] == "PUT" and asked[2] and asked[1] not in lost
        lost.extend([asked[1]] * first)
        return first

    java.proxy.lose = lose
    assert java.write("lost/0.json", ["mine"]) == ""
    assert java.write("lost/1.json", ["mine too"]) == ""
    assert len(lost) == 2
    stored = [status for asked, status in java.proxy.seen if asked[0] == "PUT"]
    assert stored.count(200) == 2  # nothing was written twice
    assert java.read("lost/0.json") == ["mine"] and java.read("lost/1.json") == ["mine too"]
    # Another's commit arrives while ours is on the way, and our answer is lost.
    assert java.write("lost/1.json", ["late"]) == "java.nio.file.FileAlreadyExistsException"


def test_a_commit_that_nobody_can_tell_of_fails_and_is_not_tried_again(java: Java):
    java.proxy.refuse = lambda asked: asked[0] == "PUT"
    assert java.write("unknown/0.json", ["mine"]) == "java.io.IOException"
    java.proxy.refuse = lambda asked: False
    assert java.write("unknown/0.json", ["theirs"]) == ""
    assert java.read("unknown/0.json") == ["theirs"]


def test_a_checkpoint_s_file_is_made_by_one_driver_and_a_cancelled_one_is_not(java: Java, tmp_path: Path):
    files = java.jvm.kalman.stores.ConditionalCheckpoints(java.path("checkpoint"), java.conf)
    one, two = (files.createAtomic(java.path("checkpoint/0"), False) for _ in range(2))
    for stream in (one, two):
        stream.write(bytearray(b"plan"))
    one.close()
    with pytest.raises(Py4JJavaError) as refused:
        two.close()
    assert (
        refused.value.java_exception.getClass().getName() == "org.apache.hadoop.fs.FileAlreadyExistsException"
    )
    for overwrite in (False, True):
        cancelled = files.createAtomic(java.path("checkpoint/1"), overwrite)
        cancelled.write(bytearray(b"half"))
        cancelled.cancel()
        cancelled.close()
        assert not files.exists(java.path("checkpoint/1"))
    for _ in range(2):
        replaced = files.createAtomic(java.path("checkpoint/2"), True)
        replaced.write(bytearray(b"state"))
        replaced.close()
    assert sorted(one.getPath().getName() for one in files.list(java.path("checkpoint"))) == ["0", "2"]
    here = java.jvm.org.apache.hadoop.fs.Path(tmp_path.as_uri())
    local = java.jvm.kalman.stores.ConditionalCheckpoints(here, java.conf)
    made = local.createAtomic(java.jvm.org.apache.hadoop.fs.Path(here, "a"), False)
    made.write(bytearray(b"plan"))
    made.close()
    assert (tmp_path / "a").read_bytes() == b"plan"
