"""The jars' folder: found, checked, refused; and fetched, with a stand-in for Ivy instead of a network."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.core.errors import UserError
from jobs.spark import jars
from jobs.spark.conf import build_archive_conf, find_archive
from jobs.spark.jars import (
    COORDINATES,
    OPTIONAL,
    Coordinate,
    compute_source_digest,
    fetch_jars,
    fetch_optional_jars,
    find_jar_folder,
    list_jars,
    main,
)

JAR = hashlib.sha256(b"jar").hexdigest()
OWN = f"kalman-stores-{compute_source_digest()}.jar"
"""The jar of our own classes, which is compiled and not fetched."""
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KALMAN_JARS", str(tmp_path / "jars"))
    return tmp_path / "jars"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stand in for Ivy, which leaves one jar, and for the compiler; this list holds the commands of Ivy."""
    commands: list[list[str]] = []

    def ivy(command: list[str]) -> tuple[str, bool]:
        commands.append(command)
        pattern = Path(command[command.index("-retrieve") + 1])
        (pattern.parent / "delta-1.0.jar").write_bytes(b"jar")
        return "", False

    def compiler(jar: Path, class_path: list[Path]) -> None:
        assert class_path
        jar.write_bytes(b"jar")

    monkeypatch.setattr(jars, "_run", ivy)
    monkeypatch.setattr(jars, "compile_jar", compiler)
    monkeypatch.setattr(jars, "find_java_problem", lambda: "")
    monkeypatch.setattr(jars, "read_known_digests", lambda: {"delta-1.0.jar": JAR, OWN: JAR})
    return commands


def test_the_folder_is_in_the_python_environment_unless_set(folder: Path, monkeypatch: pytest.MonkeyPatch):
    assert find_jar_folder() == folder
    monkeypatch.delenv("KALMAN_JARS")
    assert find_jar_folder().parts[-3:] == ("share", "kalman-pipeline", "jars")


def test_missing_jars_name_the_command(folder: Path):
    with pytest.raises(UserError, match="make setup"):
        list_jars()


def test_fetched_once_and_found(folder: Path, asked: list[list[str]]):
    assert fetch_jars() is True
    assert list_jars() == [str(folder / "delta-1.0.jar"), str(folder / OWN)]
    assert fetch_jars() is False
    assert len(asked) == 1
    assert sorted(path.name for path in folder.parent.iterdir()) == ["jars"]


def test_a_changed_jar_is_fetched_again(folder: Path, asked: list[list[str]]):
    fetch_jars()
    (folder / "delta-1.0.jar").write_bytes(b"half")
    assert fetch_jars() is True
    assert (folder / "delta-1.0.jar").read_bytes() == b"jar"


def test_a_jar_with_other_content_is_not_started_with(folder: Path, asked: list[list[str]]):
    fetch_jars()
    # Whoever exchanges the jar can write its digest into the folder's own list as well.
    (folder / "delta-1.0.jar").write_bytes(b"evil")
    manifest = json.loads((folder / jars.MANIFEST).read_text())
    manifest["jars"]["delta-1.0.jar"] = hashlib.sha256(b"evil").hexdigest()
    (folder / jars.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="delta-1.0.jar is not the jar that this release was tested with"):
        list_jars()


def test_a_jar_that_somebody_puts_beside_the_checked_ones_is_not_on_the_class_path(
    folder: Path, asked: list[list[str]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("KALMAN_CLASS_ARCHIVE", raising=False)
    fetch_jars()
    find_archive().write_bytes(b"classes")
    (folder / "a-first.jar").write_bytes(b"evil")
    conf = build_archive_conf("")
    assert conf["spark.driver.extraClassPath"].split(os.pathsep) == list_jars()
    assert not any("a-first" in value for value in conf.values())


FOREIGN = 4_321
"""A user who is neither root nor the one of these tests."""


@pytest.mark.parametrize(
    ("what", "mode", "owner"),
    [
        ("archive", 0o646, None),
        ("archive", 0o664, None),
        ("folder", 0o775, None),
        ("folder", 0o777, None),
        ("archive", 0o644, FOREIGN),
        ("folder", 0o755, FOREIGN),
        ("link", 0o644, None),
    ],
)
def test_an_archive_that_others_could_write_is_not_used(
    folder: Path,
    asked: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    mode: int,
    owner: int | None,
):
    monkeypatch.delenv("KALMAN_CLASS_ARCHIVE", raising=False)
    fetch_jars()
    find_archive().write_bytes(b"classes")
    find_archive().chmod(0o644)
    assert "SharedArchiveFile" in build_archive_conf("")["spark.driver.extraJavaOptions"]
    if what == "link":
        elsewhere = folder.parent / "classes.jsa"
        find_archive().rename(elsewhere)
        find_archive().symlink_to(elsewhere)
    else:
        place = folder if what == "folder" else find_archive()
        place.chmod(mode)
        if owner is not None:
            if os.geteuid() != 0:
                pytest.skip("only root can give a file away")
            os.chown(place, owner, -1)
    assert build_archive_conf("-Dx=y") == {"spark.driver.extraJavaOptions": "-Dx=y"}


def test_the_folder_is_its_owner_s_alone_whatever_the_mask(folder: Path, asked: list[list[str]]):
    before = os.umask(0)
    try:
        fetch_jars()
    finally:
        os.umask(before)
    assert not folder.stat().st_mode & 0o022


@pytest.mark.parametrize("known", [{}, {"delta-1.0.jar": "0" * 64}], ids=["unknown", "other content"])
def test_a_jar_that_is_not_known_is_not_taken(
    folder: Path, asked: list[list[str]], monkeypatch: pytest.MonkeyPatch, known: dict[str, str]
):
    monkeypatch.setattr(jars, "read_known_digests", lambda: known)
    with pytest.raises(UserError, match=r"delta-1.0.jar is not the jar .*jars.sha256"):
        fetch_jars()
    assert not folder.exists()


def test_the_digest_of_every_fetched_jar_is_in_the_repository():
    known = jars.read_known_digests()
    there = sorted(find_jar_folder().rglob("*.jar"))
    assert there and all(known[path.name] == hashlib.sha256(path.read_bytes()).hexdigest() for path in there)
    assert all(len(digest) == 64 for digest in known.values())
    named = {
        coordinate.artifact
        for coordinate in (*COORDINATES, *(one for some in OPTIONAL.values() for one in some))
    }
    assert all(any(name.startswith(f"{artifact}-") for name in known) for artifact in named)


def test_jars_of_another_release_are_not_used(folder: Path, asked: list[list[str]]):
    fetch_jars([Coordinate("io.delta", "delta", "0.9")])
    with pytest.raises(UserError, match="not those of this release"):
        list_jars()
    assert fetch_jars() is True
    assert list_jars()


def test_a_folder_with_other_content_is_refused(folder: Path, asked: list[list[str]]):
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="something other"):
        fetch_jars()
    assert (folder / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("java.net.UnknownHostException: x", "no connection"),
        ("javax.net.ssl.SSLHandshakeException: PKIX path building failed", "certificate"),
        (
            ":: io.delta#delta-spark_4.2_2.13;9.9: not found",
            "io.delta:delta-spark_4.2_2.13:9.9 was not found",
        ),
    ],
)
def test_failure_is_one_sentence_and_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, asked: list, said: str, sentence: str
):
    monkeypatch.setattr(jars, "_run", lambda command: (said, True))
    with pytest.raises(UserError, match=sentence) as caught:
        fetch_jars()
    assert len(caught.value.message.splitlines()) == 1
    assert list(folder.parent.iterdir()) == []


def test_proxy_of_the_environment_reaches_java(
    folder: Path, asked: list[list[str]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    fetch_jars()
    assert {"-Dhttps.proxyHost=proxy.example", "-Dhttps.proxyPort=3128"} <= set(asked[0])


def test_manifest_can_be_checked_by_others(folder: Path, asked: list[list[str]]):
    fetch_jars()
    manifest = json.loads((folder / jars.MANIFEST).read_text())
    assert manifest["jars"] == {"delta-1.0.jar": JAR, OWN: JAR}
    assert [name.split(" ")[0] for name in manifest["coordinates"]] == list(map(str, COORDINATES))


def test_an_optional_set_is_fetched_by_its_first_use(folder: Path, asked: list[list[str]]):
    with pytest.raises(UserError, match="make setup"):
        fetch_optional_jars("kafka")
    fetch_jars()
    for _ in range(2):
        assert fetch_optional_jars("kafka") == [str(folder / "kafka" / "delta-1.0.jar")]
    assert len(asked) == 2
    assert list_jars() == [str(folder / "delta-1.0.jar"), str(folder / OWN)]  # the others see nothing of it


def test_sets_are_fetched_beforehand_by_name(
    folder: Path, asked: list[list[str]], capsys: pytest.CaptureFixture[str]
):
    assert main(list(OPTIONAL)) == 0
    assert len(asked) == 1 + len(OPTIONAL)
    assert main(["zookeeper"]) == 2
    assert "give kafka or broker" in capsys.readouterr().err


def test_the_deprecated_name_still_works_and_says_so():
    command = [sys.executable, "-m", "jobs.jars", "nonsense"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    notice, error = done.stderr.splitlines()
    assert done.returncode == 2 and "deprecated: run `python -m jobs.spark.jars`" in notice
    assert error.startswith("error: there is no set of jars 'nonsense'")
