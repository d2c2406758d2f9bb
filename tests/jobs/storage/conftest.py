"""A real store, and a proxy before it, for the tests that need no Spark; they skip where the store is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.storage import object_files, table_rows
from tests.support import object_store
from tests.support.object_store import BUCKET, ObjectStore, Proxy, environment


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    if (missing := object_store.missing()) is not None:
        pytest.skip(missing)
    with ObjectStore(tmp_path_factory.mktemp("store") / "objects") as store:
        yield store


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """delta-rs repeats a request once, at once; by default ten times within minutes."""
    once = {"max_retries": "1", "backoff_config.init_backoff": "1ms", "backoff_config.max_backoff": "1ms"}
    options = table_rows.build_delta_options
    monkeypatch.setattr(table_rows, "build_delta_options", lambda: {**options(), **once})


@pytest.fixture
def proxy(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before the store, which this process reaches through it."""
    with Proxy(store.address).running() as proxy:
        for name, value in environment(proxy.address).items():
            monkeypatch.setenv(name, value)
        object_files._open_client.cache_clear()
        object_files._ensure_probed.cache_clear()
        yield proxy
    object_files._open_client.cache_clear()
    object_files._ensure_probed.cache_clear()


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.slow)])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The root of a warehouse in a folder, and of one in S3."""
    if request.param == "folder":
        return str(tmp_path)
    store: ObjectStore = request.getfixturevalue("store")
    request.getfixturevalue("proxy")
    # Not through the proxy: delta-rs lets no other thread of the process run while it reads a log.
    request.getfixturevalue("monkeypatch").setenv("AWS_ENDPOINT_URL", store.address)
    return f"s3a://{BUCKET}/{tmp_path.name}"
