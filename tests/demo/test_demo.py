"""The whole demo, as `make demo` runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KEYS = {
    "max_abs_difference",
    "keys",
    "rows_sent",
    "rows_estimated",
    "rows_quarantined",
    "driver_kills",
    "rows_per_second",
    "seconds",
    "report",
}


def demo(folder: Path, *options: str) -> tuple[dict, str]:
    done = subprocess.run(
        [sys.executable, "-m", "demo.run", "--folder", str(folder), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((folder / "result.json").read_text()), done.stdout


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_on_other_days_it_is_still_one_batch_pass(tmp_path: Path, seed: int) -> None:
    result, _ = demo(tmp_path / "demo", "--seed", str(seed), "--days", "10")
    assert result["max_abs_difference"] <= 1e-9
    assert result["driver_kills"] == 2


@pytest.mark.soak
def test_the_demo(tmp_path: Path) -> None:
    result, said = demo(tmp_path / "demo")
    assert result.keys() >= KEYS
    assert result["max_abs_difference"] <= 1e-9
    assert result["rows_sent"] == 2 * 56_157
    assert result["rows_quarantined"] == 82 + 73  # flights of October and November without a tail number
    assert result["rows_estimated"] == result["rows_sent"] - result["rows_quarantined"]
    assert result["driver_kills"] == 2
    assert result["problems"] == []
    assert result["upgrade"]["rolled_back"] and result["upgrade"]["rows_compared"] > 500
    assert result["upgrade"]["live_rows"] == result["upgrade"]["live_rows_expected"]
    assert Path(result["report"]).read_text().startswith("<!doctype html>")
    assert "largest absolute difference" in said


def test_a_slice_that_is_too_short_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "demo.run", "--days", "4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "--days must be from 8 to 61" in done.stderr
    assert "Traceback" not in done.stderr
