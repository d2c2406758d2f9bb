"""The client of a warehouse's store: looked for before Spark starts, fetched, or named in one sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jobs.core.errors import INPUT_ERROR, UserError
from jobs.core.settings import Settings
from jobs.spark import jars
from jobs.spark.jars import OPTIONAL, fetch_jars, store_jars
from jobs.spark.session import spark_session
from jobs.storage import object_files
from jobs.storage.files import open_files
from jobs.storage.object_files import ObjectFiles

HERE = Path(__file__).resolve().parents[3]
CASES = [
    ("s3a://bucket/dir", "s3", "S3"),
    ("abfss://box@account.dfs.core.windows.net/dir", "azure", "Azure's store"),
    ("abfs://box@account.dfs.core.windows.net/dir", "azure", "Azure's store"),
    ("gs://bucket/dir", "google", "Google's store"),
]


@pytest.fixture
def without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the jars of every job alone, and a repository that cannot be reached."""
    folder = tmp_path / "jars"
    monkeypatch.setenv("KALMAN_JARS", str(folder))
    monkeypatch.delenv("KALMAN_KAFKA_JARS", raising=False)
    known = jars.read_known_digests()

    def ivy(command: list[str]) -> tuple[str, bool]:
        pattern = Path(command[command.index("-retrieve") + 1])
        (pattern.parent / "delta-1.0.jar").write_bytes(b"jar")
        return "", False

    monkeypatch.setattr(jars, "_run", ivy)
    monkeypatch.setattr(jars, "compile_jar", lambda jar, class_path: jar.write_bytes(b"jar"))
    monkeypatch.setattr(jars, "find_java_problem", lambda: "")
    monkeypatch.setattr(
        jars,
        "read_known_digests",
        lambda: {**known, "delta-1.0.jar": jars._hash_file(folder / "delta-1.0.jar")},
    )
    monkeypatch.setattr(jars, "_check_jars", lambda folder, names: [str(folder / name) for name in names])
    fetch_jars()
    monkeypatch.setattr(jars, "_run", lambda command: ("java.net.UnknownHostException: repository", True))
    return folder


@pytest.mark.parametrize(("root", "part", "store"), CASES)
def test_a_store_whose_client_cannot_be_had_is_one_sentence_before_spark_starts(
    without_network: Path, monkeypatch: pytest.MonkeyPatch, root: str, part: str, store: str
):
    """Nothing is asked of the store either: this machine could not use it."""
    monkeypatch.setattr(
        "jobs.spark.session.SparkSession", None
    )  # whoever came so far would fail with another error
    monkeypatch.setattr("jobs.spark.session.ensure_probed", lambda root: pytest.fail("the store was asked"))
    with pytest.raises(UserError) as caught:
        spark_session(Settings.load(warehouse=root), "test")
    said = caught.value.message
    assert caught.value.exit_code == INPUT_ERROR and len(said.splitlines()) == 1
    assert f"a warehouse at {root} needs Spark's client of {store}" in said
    assert f"`python -m jobs.spark.jars {part}`" in said and "docs/deploy.md" in said
    assert "no connection to the Maven repository" in said


@pytest.mark.parametrize("root", ["/folder", "file:///folder"])
def test_a_folder_needs_no_client_besides_spark(without_network: Path, root: str):
    assert store_jars(root) == []


@pytest.mark.parametrize(("root", "part", "store"), CASES)
def test_the_client_of_each_store_is_a_set_of_jars(
    monkeypatch: pytest.MonkeyPatch, root: str, part: str, store: str
):
    monkeypatch.setattr("jobs.spark.jars.fetch_optional_jars", lambda name: [f"{name}.jar"])
    assert part in OPTIONAL and store_jars(root) == [f"{part}.jar"]


def test_s3_without_its_package_is_one_sentence_before_spark_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jobs.spark.session.store_jars", lambda root: [])
    monkeypatch.setattr("jobs.spark.session.SparkSession", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)  # as if it were not installed
    object_files._open_client.cache_clear()
    with pytest.raises(
        UserError, match=r"needs the package obstore: pip install 'kalman-pipeline\[s3\]'"
    ) as it:
        spark_session(Settings.load(warehouse="s3a://bucket/dir"), "test")
    assert it.value.exit_code == INPUT_ERROR


@pytest.mark.parametrize(
    "root", ["gs://bucket/dir", "abfss://box@account.dfs.core.windows.net/dir", "s3a://bucket/dir"]
)
def test_a_process_without_spark_names_the_package_that_it_needs(monkeypatch: pytest.MonkeyPatch, root: str):
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    object_files._open_client.cache_clear()
    with pytest.raises(UserError, match="needs the package obstore: pip install") as caught:
        open_files(f"{root}/_drivers/walk")
    assert caught.value.exit_code == INPUT_ERROR


@pytest.mark.parametrize("root", ["gs://bucket/dir", "abfss://box@account.dfs.core.windows.net/dir"])
def test_each_store_has_a_client_for_small_files(root: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    object_files._open_client.cache_clear()
    files = open_files(f"{root}/_drivers/walk")
    assert isinstance(files, ObjectFiles) and files._path("a.json") == "dir/_drivers/walk/a.json"
