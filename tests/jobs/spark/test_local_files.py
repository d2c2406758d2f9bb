"""Hadoop's local file system without other processes: what Spark's checkpoints and Delta's commits are written by."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError

from jobs.spark import jars
from jobs.spark.conf import build_spark_conf
from tests.support.gateways import JavaProcess, errors_of_any_process
from tests.support.small_disks import small_disk

_NEEDED = ("hadoop-client-", "slf4j-api", "py4j", "commons-", "log4j-", "scala-library", "jcl-")
_IMPLEMENTATION = "fs.AbstractFileSystem.file.impl"
PRESENT = "org.apache.hadoop.fs.FileAlreadyExistsException"


class Files:
    """The file system in a Java process that finds no program: `chmod` and `readlink` cannot be run."""

    def __init__(self, process: JavaProcess, ours: bool = True) -> None:
        self.jvm = process.jvm
        conf = self.jvm.org.apache.hadoop.conf.Configuration()
        if ours:
            conf.set(_IMPLEMENTATION, build_spark_conf()[f"spark.hadoop.{_IMPLEMENTATION}"])
        root = self.jvm.java.net.URI("file:///")
        self._context: Any = self.jvm.org.apache.hadoop.fs.FileContext.getFileContext(root, conf)
        self.files: Any = self._context.getDefaultFileSystem()
        self._flags = self.jvm.java.util.EnumSet.of(self.jvm.org.apache.hadoop.fs.CreateFlag.CREATE)
        self._options: Any = process._gateway.new_array(
            getattr(self.jvm.org.apache.hadoop.fs, "Options$CreateOpts"), 0
        )

    def path(self, path: Path) -> Any:
        return self.jvm.org.apache.hadoop.fs.Path(self.jvm.java.net.URI(path.as_uri()))

    def write(self, path: Path, content: bytes) -> None:
        stream = self._context.create(self.path(path), self._flags, self._options)
        stream.write(bytearray(content))
        stream.close()

    def read(self, path: Path) -> bytes:
        stream = self.files.open(self.path(path))
        try:
            return bytes(stream.readAllBytes())
        finally:
            stream.close()

    def verified(self, path: Path) -> bytes:
        """Read a file by Hadoop's other interface, which compares the sums."""
        conf = self.jvm.org.apache.hadoop.conf.Configuration()
        stream = self.path(path).getFileSystem(conf).open(self.path(path))
        try:
            return bytes(stream.readAllBytes())
        finally:
            stream.close()

    def rename(self, source: Path, target: Path, overwrite: bool) -> str:
        """Rename a file; return the Java class of the error, or an empty text."""
        try:
            self.files.renameInternal(self.path(source), self.path(target), overwrite)
        except Py4JJavaError as error:
            return str(error.java_exception.getClass().getName())
        return ""


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JavaProcess]:
    own = [str(path) for path in jars._list_pyspark_jars() if path.name.startswith(_NEEDED)]
    nowhere = tmp_path_factory.mktemp("nowhere")
    with JavaProcess([*own, *jars.list_jars()], {"PATH": str(nowhere), "LC_ALL": "C.UTF-8"}) as process:
        yield process


@pytest.fixture
def files(process: JavaProcess, monkeypatch: pytest.MonkeyPatch) -> Files:
    errors_of_any_process(monkeypatch)
    return Files(process)


def test_no_process_is_needed(process: JavaProcess, files: Files, tmp_path: Path):
    files.write(tmp_path / "a", b"one")
    assert files.rename(tmp_path / "a", tmp_path / "b", overwrite=False) == ""
    assert files.read(tmp_path / "b") == b"one"
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o644
    hadoop = Files(process, ours=False)
    with pytest.raises(Py4JJavaError, match="chmod"):
        hadoop.write(tmp_path / "c", b"two")


def test_a_name_that_is_taken_is_refused_and_nothing_changes(files: Files, tmp_path: Path):
    for name in ("a", "b"):
        files.write(tmp_path / name, name.encode())
    assert files.rename(tmp_path / "a", tmp_path / "b", overwrite=False) == PRESENT
    assert files.read(tmp_path / "a") == b"a" and files.read(tmp_path / "b") == b"b"


def test_of_many_renames_to_a_new_name_one_wins(files: Files, tmp_path: Path):
    for version in range(20):
        target = tmp_path / f"{version}.json"
        told: dict[int, str] = {}

        def rename(writer: int, to: Path, into: dict[int, str]) -> None:
            source = tmp_path / f"{to.name}.{writer}"
            files.write(source, f"writer {writer}".encode())
            into[writer] = files.rename(source, to, overwrite=False)

        threads = [threading.Thread(target=rename, args=(writer, target, told)) for writer in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = [writer for writer, error in told.items() if not error]
        assert sorted(told.values()) == ["", *[PRESENT] * 5]
        assert files.read(target) == f"writer {winner}".encode()


def test_a_file_is_replaced_in_one_step_with_its_sums(files: Files, tmp_path: Path):
    files.write(tmp_path / "state", b"old")
    held = (tmp_path / "state").open("rb")
    files.write(tmp_path / "new", b"new content")
    assert files.rename(tmp_path / "new", tmp_path / "state", overwrite=True) == ""
    assert files.read(tmp_path / "state") == b"new content"
    assert held.read() == b"old"  # it was not written into
    assert sorted(path.name for path in tmp_path.iterdir()) == [".state.crc", "state"]


def test_a_changed_byte_is_seen_by_the_sums_beside_the_file(files: Files, tmp_path: Path):
    files.write(tmp_path / "a", b"content")
    files.rename(tmp_path / "a", tmp_path / "b", overwrite=False)
    assert files.verified(tmp_path / "b") == b"content"
    (tmp_path / "b").write_bytes(b"c0ntent")
    with pytest.raises(Py4JJavaError, match="ChecksumException"):
        files.verified(tmp_path / "b")


def test_folders_links_and_what_is_missing_are_as_in_hadoop(files: Files, tmp_path: Path):
    (tmp_path / "folder").mkdir()
    assert files.rename(tmp_path / "folder", tmp_path / "moved", overwrite=False) == ""
    assert (tmp_path / "moved").is_dir()
    files.write(tmp_path / "a", b"one")
    assert files.rename(tmp_path / "a", tmp_path / "moved", overwrite=True) != ""
    assert files.read(tmp_path / "a") == b"one"
    assert files.rename(tmp_path / "a", tmp_path / "absent" / "a", overwrite=False).endswith(
        "FileNotFoundException"
    )
    assert files.rename(tmp_path / "nothing", tmp_path / "b", overwrite=False).endswith(
        "FileNotFoundException"
    )
    assert not files.files.getFileLinkStatus(files.path(tmp_path / "a")).isSymlink()


def test_names_of_any_kind(files: Files, tmp_path: Path):
    for name in ("with space", "per%20cent", "ü", "#1"):
        files.write(tmp_path / f"{name}.tmp", b"x")
        assert files.rename(tmp_path / f"{name}.tmp", tmp_path / name, overwrite=False) == ""
        assert (tmp_path / name).read_bytes() == b"x"


def test_a_full_disk_is_an_exception_that_names_the_file(files: Files, tmp_path: Path):
    with small_disk(tmp_path / "disk", 64 * 1024) as disk, pytest.raises(Py4JJavaError) as caught:
        files.write(disk / "a", bytes(300_000))
    assert caught.value.java_exception.getClass().getName() == "java.io.IOException"
    assert f"{disk}/a: No space left on device" in str(caught.value)
