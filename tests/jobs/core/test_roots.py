"""The root of a warehouse: one spelling, local locks wherever it is a folder, and no store that is not known."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from urllib.parse import quote

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


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a%20b", "%20"),
        ("a%41b", "%41"),
        ("%2e%2e", "%2e"),
        ("a%2fb", "%2f"),
        ("100%00", "%00"),
        ("a\\b", "\\"),
        ("a\nb", "\\n"),
        ("a\tb", "\\t"),
        ("\x1b[31m", "\\x1b"),
        ("a\x7f", "\\x7f"),
        (os.fsdecode(b"caf\xe9"), "UTF-8"),
    ],
)
def test_a_folder_that_a_library_takes_for_another_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, shown: str
) -> None:
    folder = tmp_path / name / "warehouse"
    says = re.escape(shown) if shown == "UTF-8" else re.escape(shown).join("''")
    for text in (str(folder), f"file://{quote(os.fsencode(folder))}", f"../{name}/warehouse"):
        (tmp_path / "there").mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / "there")
        with pytest.raises(UserError, match=f"a warehouse cannot be at .*{says}.*rename the folder") as told:
            Settings.load(warehouse=text)
        assert "\n" not in told.value.message and "\x1b" not in told.value.message
    assert sorted(tmp_path.iterdir()) == [tmp_path / "there"], "nothing is made"
    folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder.parent)
    with pytest.raises(UserError, match=f"{tmp_path}/link/warehouse, which is "):
        Settings.load(warehouse=str(tmp_path / "link" / "warehouse"))


def test_the_decoded_folder_is_named_if_it_is_there(tmp_path: Path) -> None:
    (tmp_path / "my data").mkdir()
    with pytest.raises(UserError, match=rf"\(if {tmp_path}/my data is meant, write that\)$"):
        Settings.load(warehouse=f"{tmp_path}/my%20data")
    with pytest.raises(UserError, match="choose another one$"):
        Settings.load(warehouse=f"{tmp_path}/our%20data")


def test_a_link_with_such_a_name_may_lead_to_a_folder_without(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "a%20b").symlink_to(tmp_path / "plain")
    assert Settings.load(warehouse=f"{tmp_path}/a%20b").warehouse == f"{tmp_path}/a%20b"


@pytest.mark.parametrize(
    "text", ["{}//w", "/{}/w", "///{}/w", "{}/x/../w", "{}/link/../w", "../{name}/w", "./w"]
)
def test_dots_and_slashes_do_not_lead_java_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "x")
    monkeypatch.chdir(tmp_path)
    folder = text.replace("{}", str(tmp_path)).replace("{name}", tmp_path.name)
    assert Settings.load(warehouse=folder).warehouse == f"{tmp_path}/w"


def test_the_folder_before_dots_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "far" / "x").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "x")
    assert Settings.load(warehouse=f"{tmp_path}/link/../w").warehouse == f"{tmp_path}/far/w"


@pytest.mark.parametrize(
    "name", ["~nobody-has-this-name", "~nobody-has-this-name/w", "a:b", "100%", "%zz", "a b", "#", "?"]
)
def test_a_folder_may_have_odd_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert Settings.load(warehouse=name).warehouse == f"{tmp_path}/{name}"
    assert str(Settings.load(models=name).models) == f"{tmp_path}/{name}"


@pytest.mark.parametrize(
    "rest", ["a%20b", "a?b", "a#b", "a//b", "a/../b", "a/./b", "..", "a/..", "a\nb", "a\\b"]
)
@pytest.mark.parametrize("store", ["s3a://bucket", "gs://bucket", "abfss://box@account.dfs.core.windows.net"])
def test_a_name_that_clients_of_a_store_read_differently_is_refused(store: str, rest: str) -> None:
    with pytest.raises(
        UserError, match="a warehouse cannot be at .*: its URI has '.+' in it, .* choose a name"
    ):
        Settings.load(warehouse=f"{store}/{rest}")
    assert Settings.load(warehouse=f"{store}/a b.c/..d/ü%").warehouse == f"{store}/a b.c/..d/ü%"
