"""Any bytes are the right rows, quarantined rows or a sentence: seeded cases, judged by what is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.__main__ import NAMES

ROOT = Path(__file__).resolve().parents[2]
MOST_MEMORY = 2 << 30
"""Bytes of the process that runs the cases, most of it code of NumPy, Arrow and Airflow's neighbours."""


def run(tmp_path: Path, *options: str, timeout: float) -> dict[str, dict[str, int]]:
    """Run cases in a process of their own: a crash in a library of C is found, and named, too."""
    journal = tmp_path / "journal"
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--journal", str(journal), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    at = journal.read_text() if journal.is_file() else "no case"
    assert done.returncode == 0, f"{done.stderr}\n(the last case was {at}, exit code {done.returncode})"
    print(done.stdout)
    memory = int(done.stdout.rpartition("at most ")[2].partition(" MiB")[0].replace(",", "")) << 20
    assert memory < MOST_MEMORY
    return json.loads(done.stdout.splitlines()[0])


@pytest.mark.slow
def test_a_few_hundred_cases(tmp_path: Path) -> None:
    found = run(tmp_path, "--cases", "20", timeout=600)
    assert set(found) == set(NAMES)
    assert all(sum(outcomes.values()) == 20 and "wrong" not in outcomes for outcomes in found.values())
    # Every outcome is seen, or the cases would be of one sort.
    for kind in ("CSV", "JSON lines", "JSON arrays", "messages"):
        assert found[kind]["quarantined"] >= 5, kind
    for kind in ("specs", "CSV", "gzip", "Parquet"):
        assert found[kind]["clear"] >= 2, kind
    for kind in ("specs", "gzip", "Parquet", "command lines"):
        assert found[kind]["refused"] >= 5, kind


@pytest.mark.soak
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_thousands(tmp_path: Path, seed: int) -> None:
    run(tmp_path, "--cases", "1000", "--seed", str(seed), timeout=7200)
