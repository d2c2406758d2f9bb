"""The measurement of control verbs: the verbs exist, each run starts from the same files, the table says where."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.suites.control_verbs import VERBS, Place, places, table
from jobs.cli import VERBS as ALL
from tests.support import object_store


def test_every_measured_verb_is_one_of_the_command_line() -> None:
    assert {words[0] for words in VERBS.values()} <= set(ALL)


def test_each_run_finds_the_warehouse_as_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place("folder", str(tmp_path / "warehouse"), tmp_path / "warehouse", {})
    (tmp_path / "warehouse-as-made").mkdir()
    (tmp_path / "warehouse-as-made" / "row").write_text("made")
    place.files.mkdir()
    monkeypatch.setitem(VERBS, "unknown", ("unknown",))
    for _ in range(2):
        (place.files / "row").write_text("changed")
        seconds, code = place.run("unknown", tmp_path)
        assert seconds > 0 and code == 2
        assert (place.files / "row").read_text() == "made"


def test_an_error_that_is_no_refusal_ends_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place("folder", str(tmp_path / "warehouse"), tmp_path / "warehouse", {})
    (tmp_path / "warehouse-as-made").mkdir()
    place.files.mkdir()
    monkeypatch.setattr(sys, "executable", str(_failing(tmp_path)))
    with pytest.raises(RuntimeError, match="folder, status"):
        place.run("status", tmp_path)


def _failing(folder: Path) -> Path:
    program = folder / "program"
    program.write_text("#!/bin/sh\necho Traceback\n")
    program.chmod(0o755)
    return program


def test_without_the_server_the_store_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(object_store, "missing", lambda java: "no server")
    with ExitStack() as stack:
        assert [one.name for one in places(tmp_path, stack)] == ["folder"]
    assert capsys.readouterr().out == "S3: not run: no server\n"


def test_the_table_has_a_row_a_verb_and_place() -> None:
    took = {"min": 1.0, "median": 2.0, "max": 3.0}
    found = [{"verb": "stop", "place": "S3", "seconds": took, "exit_codes": [0]}]
    assert table(found).splitlines()[2] == "| `stop` | S3 | 2.00 (1.00 to 3.00) | 0 |"
