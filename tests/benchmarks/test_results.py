"""The results of the benchmark as files: ratios within a run, and what could not be run with its reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import run
from benchmarks.results import begun, results_of, write
from benchmarks.suites import in_s3
from benchmarks.workloads.work import S3

REASON = "the server is not installed"


def test_a_work_in_a_store_is_compared_with_the_limit_there_and_with_a_folder() -> None:
    ours, limit, folder = results_of(S3.name, {"ours": [10.0], "limit": [20.0], "folder": [40.0]}, {})
    assert (ours["vs_limit"], ours["vs_folder"]) == (0.5, 0.25)
    assert (limit["vs_folder"], folder["vs_limit"]) == (0.5, 2.0)


def test_a_work_that_cannot_run_is_told_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(in_s3, "missing", lambda: REASON)
    assert run.missed(["dense_20k_x5"]) == {}
    assert run.missed(run.names_of(quick=True)) == {}
    assert run.missed(run.names_of(quick=False)) == {S3.name: REASON}
    assert capsys.readouterr().out == f"{S3.name}: not run: {REASON}\n"


def test_the_page_has_what_was_not_run_until_it_is(tmp_path: Path) -> None:
    other = results_of("dense_20k_x5", {"ours": [1.0]}, {})
    page = write(other, begun(0.0), False, tmp_path, not_run={S3.name: REASON})
    assert f"{S3.name}: not run: {REASON}." in page.read_text()
    page = write(other, begun(0.0), False, tmp_path, keep=True)
    assert f"{S3.name}: not run: {REASON}." in page.read_text()
    page = write(results_of(S3.name, {"ours": [1.0]}, {}), begun(0.0), False, tmp_path, keep=True)
    assert "not run" not in page.read_text()
    assert json.loads(page.with_suffix(".json").read_text())["not_run"] == {}
