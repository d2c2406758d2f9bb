"""The root of a warehouse: one spelling, local locks wherever it is a folder, and no store that is not known."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from jobs.core.errors import UserError
from jobs.core.settings import Settings
from jobs.lineage.leases import stream_lock
from jobs.spark.warehouse import Warehouse
from jobs.supervision.driver_log import FOLDER, Crashes, DriverLog


def spellings(folder: Path) -> list[str]:
    """Return ways to write a folder, of which the last is relative to the working directory."""
    encoded = str(folder).replace(" ", "%20")
    return [
        str(folder),
        f"{folder}/",
        f"file:{encoded}",
        f"file://{encoded}",
        f"file://{encoded}/",
        f"FILE://{encoded}",
        f"file://localhost{encoded}",
        f"~/{folder.name}",
        folder.name,
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "ware house"


def test_every_spelling_of_a_folder_is_one_root(folder: Path) -> None:
    for text in spellings(folder):
        assert Settings.load(warehouse=text).warehouse == str(folder), text


@pytest.mark.parametrize("name", ["a%20b", "a\\b", "a%2fb"])
def test_a_folder_that_a_library_takes_for_another_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="a warehouse cannot be at .*: a backslash, and a percent sign"):
        Settings.load(warehouse=str(tmp_path / name))
    assert Settings.load(warehouse=str(tmp_path / "100%")).warehouse.endswith("100%")


def test_every_spelling_of_a_folder_has_the_same_locks(folder: Path) -> None:
    with stream_lock(Settings.load(warehouse=str(folder)).warehouse, "m"):
        for text in [*spellings(folder), f"file://{folder.parent}/ware%20house"]:
            root = Settings.load(warehouse=text).warehouse
            with pytest.raises(UserError, match="already has a driver"), stream_lock(root, "m"):
                pass
    for root in (str(folder), f"file://{folder.parent}/ware%20house"):  # also one that came past the settings
        with Warehouse(None, root).lock("t"), (folder / "_locks" / "t.lock").open("a") as other:  # pyright: ignore
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_every_spelling_of_a_folder_has_the_same_log_of_drivers(folder: Path) -> None:
    written = Crashes(1, {}, "x")
    DriverLog.at(Settings.load(warehouse=str(folder)).warehouse, "m").put_crashes(written)
    for text in spellings(folder)[2:7]:
        assert DriverLog.at(text, "m").crashes() == written, text
    assert (folder / FOLDER / "m").is_dir()


@pytest.mark.parametrize(
    ("text", "root"),
    [
        ("gs://bucket/dir/", "gs://bucket/dir"),
        ("GS://bucket/dir", "gs://bucket/dir"),
        ("abfss://container@account.dfs.core.windows.net/dir", None),
        ("gs://bucket/dir", None),
    ],
)
def test_a_store_is_allowed_by_name(text: str, root: str | None) -> None:
    assert Settings.load(warehouse=text).warehouse == (root or text)


@pytest.mark.parametrize(
    "text", ["http://host/dir", "memory://dir", "dbfs:/dir", "wasbs://c@a/dir", "C:/dir"]
)
def test_any_other_store_is_refused_with_those_that_are_allowed(text: str) -> None:
    with pytest.raises(UserError, match=f"a warehouse cannot be at {text}: use a folder .* s3a://, abfs://"):
        Settings.load(warehouse=text)


@pytest.mark.parametrize("text", ["hdfs://name/dir", "hdfs:/dir", "HDFS:///dir", "hdfs:dir"])
def test_hdfs_is_refused_with_the_reason(text: str) -> None:
    with pytest.raises(UserError, match=f"a warehouse cannot be at {text}: the library .* may wait for ever"):
        Settings.load(warehouse=text)


@pytest.mark.parametrize("text", ["file:dir", "file://host/dir"])
def test_a_file_uri_that_names_no_folder_of_this_machine_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=f"the warehouse {text} is not understood: write a folder as a path"):
        Settings.load(warehouse=text)
