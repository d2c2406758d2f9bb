"""Files with secrets: which are read; and that no secret is in what a command prints or keeps."""

from __future__ import annotations

import io
import os
import tempfile
from pathlib import Path

import pytest

from jobs.core.errors import RUN_FAILED, UserError, show
from jobs.core.input_files import UnfitFile, read_secret_file
from jobs.spark.kafka import read_client_properties

CANARY = "c4n4ry-9f2e"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KALMAN_KAFKA", "localhost:9092")
    (tmp_path / "given").mkdir()
    return tmp_path / "given"


def read(path: Path | str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("KALMAN_KAFKA_PROPERTIES", str(path))
    return read_client_properties()


def test_a_file_and_a_link_within_its_folder_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As Kubernetes mounts a secret: a link to a folder that is replaced as a whole.
    (folder / "..data_1").mkdir()
    (folder / "..data_1" / "kafka.properties").write_text(f"ssl.key.password={CANARY}\n# a comment\n")
    (folder / "..data").symlink_to("..data_1")
    (folder / "kafka.properties").symlink_to("..data/kafka.properties")
    found = read(folder / "kafka.properties", monkeypatch)
    assert found == {"ssl.key.password": CANARY, "bootstrap.servers": "localhost:9092"}


def test_what_is_no_file_of_secrets_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = folder.parent / "outside"
    outside.write_text(f"stolen={CANARY}")
    (folder / "out").symlink_to(outside)
    (folder / "up").symlink_to("../outside")
    (folder / "ring").symlink_to("ring")
    (folder / "zero").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe")
    (folder / "large").write_bytes(b"#" * 1_000_000)
    (folder / "bytes").write_bytes(b"a=\xff\n")
    said = {
        "out": "leads out of its folder",
        "up": "leads out of its folder",
        "ring": "Too many levels of symbolic links",
        "zero": "leads out of its folder",
        "pipe": "is no regular file",
        ".": "is no regular file",
        "large": "is larger than 65,536 bytes",
        "bytes": "is not UTF-8 text",
        "absent": "No such file",
        "x" * 300: "File name too long",
    }
    for name, why in said.items():
        with pytest.raises(UserError) as refused:
            read(folder / name, monkeypatch)
        assert why in refused.value.message, name
        assert CANARY not in refused.value.message and len(refused.value.message) < 400
    with pytest.raises(UnfitFile):
        read_secret_file(folder / "a\0b", 10)


def test_no_secret_is_printed_or_kept(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    jaas = f'org.apache.kafka.PlainLoginModule required username="us" password="{CANARY}-jaas";'
    (folder / "kafka.properties").write_text(f"sasl.jaas.config={jaas}\nssl.key.password={CANARY}-key\n")
    read(folder / "kafka.properties", monkeypatch)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{CANARY}-store")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    secrets = f"{CANARY}-jaas and {CANARY}-key and {CANARY}-store"
    for error in (UserError(secrets, RUN_FAILED), RuntimeError(secrets), ValueError(jaas)):
        for debug in (True, False):
            out = io.StringIO()
            show(error, debug, out)
            assert CANARY not in out.getvalue() and "***" in out.getvalue()
    kept = "".join(path.read_text() for path in tmp_path.glob("kalman-pipeline-*.log"))
    assert "Error" in kept and CANARY not in kept
