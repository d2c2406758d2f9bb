"""The probe and the small files in S3, on a real store and behind a proxy that loses answers."""

from __future__ import annotations

import os
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from demo.ports import HOST, free_ports
from jobs.core.errors import UserError
from jobs.core.settings import Settings, parse_warehouse_root
from jobs.doctor import run as doctor
from jobs.storage import object_files
from jobs.storage.object_files import ObjectFiles
from tests.support import object_store
from tests.support.object_store import BUCKET, Proxy, environment

ROOT = f"s3a://{BUCKET}/warehouse"
COMPOSE = Path(__file__).resolve().parents[3] / "docker-compose.s3.yml"


def test_a_store_that_honours_the_condition_passes_and_keeps_a_note(proxy: Proxy, tmp_path: Path):
    assert object_files.ensure_probed(f"{ROOT}/fine")
    created = [status for (method, _, condition), status in proxy.seen if method == "PUT" and condition]
    assert created.count(200) == object_files.ROUNDS  # each of the writers has asked, and one of them got it
    assert len(created) == object_files.ROUNDS * object_files.WRITERS
    object_files._ensure_probed.cache_clear()
    proxy.seen.clear()
    assert not object_files.ensure_probed(f"{ROOT}/fine")
    assert [asked[0] for asked, _ in proxy.seen] == ["GET"]  # the note is read, and nothing else is done
    assert ObjectFiles(f"{ROOT}/fine").names("_store") == ["probed.json"]
    assert not object_files.ensure_probed(str(tmp_path))  # a folder has no store


def test_a_store_without_the_condition_is_refused(proxy: Proxy):
    proxy.without_condition = True
    with pytest.raises(UserError, match=r"8 of 8 writers created the same object .*If-None-Match") as refused:
        object_files.ensure_probed(f"{ROOT}/broken")
    assert "kalman-pipeline doctor --warehouse" in refused.value.message
    assert ObjectFiles(f"{ROOT}/broken").names("_store") == []  # neither a note nor what the probe wrote
    with pytest.raises(UserError, match="8 of 8 writers"):
        doctor(Settings.load(warehouse=f"{ROOT}/broken"))


def test_a_store_whose_listings_lag_is_refused(proxy: Proxy, monkeypatch: pytest.MonkeyPatch):
    names = ObjectFiles.names
    monkeypatch.setattr(ObjectFiles, "names", lambda files, folder: names(files, folder)[1:])
    with pytest.raises(UserError, match="an object that had been created was not listed, .*lists .*later"):
        object_files.ensure_probed(f"{ROOT}/lagging")
    monkeypatch.undo()
    assert ObjectFiles(f"{ROOT}/lagging").names("_store") == []


def test_a_writer_that_cannot_start_ends_the_probe(monkeypatch: pytest.MonkeyPatch):
    begin, begun = threading.Thread.start, iter(range(9))

    def start(thread: threading.Thread) -> None:
        if next(begun) == 5:
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    files = SimpleNamespace(create=lambda name, content: True)
    with pytest.raises(RuntimeError, match="can't start"):
        object_files._round(files, "x")  # type: ignore[arg-type]


def test_a_file_is_created_by_one_of_many(proxy: Proxy):
    files = ObjectFiles(f"{ROOT}/race")
    won: list[int] = []

    def create(number: int) -> None:
        if files.create("a/b.json", str(number).encode()):
            won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert files.read("a/b.json") == str(won[0]).encode()


def test_a_creation_whose_answer_is_lost_is_resolved_once(proxy: Proxy):
    files = ObjectFiles(f"{ROOT}/lost")
    proxy.lose = lambda asked: asked[0] == "PUT" and asked[1].endswith("mine.json")
    assert files.create("mine.json", b"mine")  # each answer is lost, the first of them that it was created
    assert files.read("mine.json") == b"mine"
    stored = [status for asked, status in proxy.seen if asked[0] == "PUT"]
    assert stored.count(200) == 1 and set(stored[1:]) <= {412}
    proxy.lose = lambda asked: False
    assert files.create("theirs.json", b"theirs")
    proxy.lose = lambda asked: asked[0] == "PUT"
    assert not files.create("theirs.json", b"mine")
    assert files.read("theirs.json") == b"theirs"


def test_an_outcome_that_nobody_knows_is_said_and_not_tried_again(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(object_files, "_PAUSE_SECONDS", 0.01)
    proxy.refuse = lambda asked: True
    with pytest.raises(UserError, match="nobody can tell whether the store has created it"):
        ObjectFiles(f"{ROOT}/unknown").create("a.json", b"a")
    proxy.refuse = lambda asked: False
    assert ObjectFiles(f"{ROOT}/unknown").names("") == []


def test_files_behave_as_those_of_a_folder(proxy: Proxy):
    files = ObjectFiles(f"{ROOT}/folder")
    assert files.read("a") is None and files.read_first_line("a") is None and not files.exists("a")
    assert files.names("") == [] and files.remove_tree("nothing")
    files.write("one/a.json", b"1\n2")
    files.write("one/two/b.json", b"b")
    files.write("one/.hidden", b"")
    files.write("one/a.json", b"3\n4")
    assert files.read("one/a.json") == b"3\n4" and files.read_first_line("one/a.json") == b"3"
    assert files.names("one") == ["a.json", "two"] and files.names("") == ["one"]
    assert files.exists("one") and files.exists("one/a.json") and not files.exists("one/a")
    assert files.rename("one/two", "three") and files.names("three") == ["b.json"]
    assert files.rename("three/b.json", "four/c.json") and files.read("four/c.json") == b"b"
    assert not files.exists("one/two") and not files.exists("three")
    files.remove("four/c.json")
    files.remove("four/c.json")
    assert files.remove_tree("one") and not files.exists("one")


def test_hadoop_s_marks_of_folders_are_no_files(proxy: Proxy):
    files = ObjectFiles(f"{ROOT}/marks")
    for folder in ("a", "a/b", "a/empty"):
        object_store.mark_folder(proxy.address, f"warehouse/marks/{folder}")
    assert not files.exists("a")  # `remove_tree` leaves marks
    assert not files.exists("a/empty") and files.names("a/empty") == []
    files.write("a/b/one.json", b"1")
    files.write("a/b/none", b"")
    assert files.names("a/b") == ["none", "one.json"] and files.exists("a/b") and files.names("") == ["a"]
    assert files.rename("a", "c") and files.names("c/b") == ["none", "one.json"]
    assert not files.exists("a/b") and files.names("a/b") == []
    assert files.remove_tree("c") and not files.exists("c/b")


def test_secrets_are_in_no_message(proxy: Proxy, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret-than-the-stores")
    object_files._open_client.cache_clear()
    with pytest.raises(UserError, match="the store refused the request") as refused:
        ObjectFiles(ROOT).read("a")
    assert "another-secret" not in refused.value.message and object_store.KEY not in refused.value.message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("s3://bucket/dir", "is written s3a://bucket/folder"),
        ("s3n://bucket/dir", "is written s3a://bucket/folder"),
        ("s3a://bucket", "is a folder of a bucket"),
        ("s3a://key:secret@bucket/dir", "is a folder of a bucket"),
        ("wasb://a/b", "a warehouse cannot be at"),
    ],
)
def test_other_spellings_are_refused_by_name(text: str, said: str):
    with pytest.raises(UserError, match=said):
        parse_warehouse_root(text)


def test_a_folder_of_a_bucket_is_a_warehouse():
    assert parse_warehouse_root("S3A://bucket/a/b/") == "s3a://bucket/a/b"


def test_the_store_of_the_compose_file_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The service `store` as a process, with the file's own command and health check, and the probe on it."""
    if (missing := object_store.missing()) is not None:
        pytest.skip(missing)
    service = yaml.safe_load(COMPOSE.read_text())["services"]["store"]
    for folder in (f"data/{BUCKET}", "users"):
        (tmp_path / folder).mkdir(parents=True)
    port = free_ports(1)[0]
    here = {":7070": f"{HOST}:{port}", "/data": str(tmp_path / "data"), "/users": str(tmp_path / "users")}
    program = object_store.program()
    assert program is not None
    command = [program, *(here.get(word, word) for word in service["command"])]
    secrets = {"ROOT_ACCESS_KEY": object_store.KEY, "ROOT_SECRET_KEY": object_store.SECRET}
    assert set(service["environment"]) == set(secrets)
    process = subprocess.Popen(command, env={**os.environ, **secrets}, stdout=subprocess.DEVNULL)
    try:
        (health,) = [word for word in service["healthcheck"]["test"] if word.startswith("http://")]
        health = health.replace("localhost:7070", f"{HOST}:{port}")
        assert answer(health) == 200
        for name, value in environment(f"http://{HOST}:{port}").items():
            monkeypatch.setenv(name, value)
        object_files._open_client.cache_clear()
        object_files.probe_store(f"{ROOT}/compose")  # raises no error
    finally:
        process.kill()
        process.wait()
        object_files._open_client.cache_clear()


def answer(address: str) -> int:
    """Return the status with which a service answers, once it listens."""
    deadline = time.monotonic() + object_store.START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(address, timeout=5) as found:
                return found.status
        except urllib.error.URLError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
