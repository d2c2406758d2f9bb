"""A warehouse in HDFS, on a cluster of one node: the same bits as in a folder, whatever drivers do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError

from jobs.core.errors import RUN_FAILED
from tests.jobs.stores.test_s3_warehouse import found_in
from tests.support.gateways import errors_of_any_process
from tests.support.hdfs import HdfsCluster

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def test_what_delta_s_commits_rely_on_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file is neither renamed onto another one nor created again."""
    errors_of_any_process(monkeypatch)
    with HdfsCluster(tmp_path / "hdfs") as cluster:
        files: Any = cluster.files()
        for name in ("/a", "/b"):
            stream = files.create(cluster.path(name), False)
            stream.write(bytearray(name.encode()))
            stream.close()
        assert not files.rename(cluster.path("/a"), cluster.path("/b"))
        with pytest.raises(Py4JJavaError) as refused:
            files.create(cluster.path("/b"), False)
        told = refused.value.java_exception.getClass().getName()
        assert told == "org.apache.hadoop.fs.FileAlreadyExistsException"
        assert files.exists(cluster.path("/a"))


def test_drivers_killed_two_at_once_and_frozen_lose_and_double_nothing(tmp_path: Path):
    found = found_in(tmp_path, "hdfs")
    assert found["streams"]["rows"] > 0 and not found["streams"]["began"]
    assert found["frozen"]["woken"] == RUN_FAILED
    assert found["two"]["refused"] == 1
    assert found["drivers"]["rows"] > 0
    assert found["drivers"]["ends"][:2] == ["lost", "caught up"]
