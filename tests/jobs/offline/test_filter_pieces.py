"""A file is filtered in pieces on several threads: the file and the report are those of one piece."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jobs.core.report import Report
from jobs.core.settings import Settings
from jobs.filter import run
from jobs.offline import filtering

PLAIN = """
name: plain
version: 1
key: [site]
time: at
time_unit: hour
measurement: [a, b]
states: [x, y]
process: {kind: explicit, F: [[1.0, 0.1], [0.0, 0.9]], Q: [[0.5, 0.1], [0.1, 0.4]]}
observation: {H: [[1.0, 0.0], [0.5, 2.0]], R: [[0.5, 0.0], [0.0, 0.3]]}
initial: {mean: [1.0, -1.0], covariance: [[4.0, 1.0], [1.0, 9.0]]}
"""
OPTIONS = [
    "",
    "duplicates: {action: quarantine}\n",
    "robust: {gate: {probability: 0.5}}\noutputs: {innovation: true, residual: true, measured: true}\n",
    "expiry: {after: 5h, clock: event, returns: prior}\noutputs: {covariance: diagonal}\n",
]


def write_rows(path: Path) -> None:
    """Write rows of 60 keys in no order; some repeat a time, some are unusable, and many are far from the others."""
    draws = np.random.default_rng(3)
    lines = ["site,at,a,b"]
    for number in range(2_000):
        a = "wrong" if number % 97 == 0 else f"{draws.normal(scale=10.0):.3f}"
        b = "" if number % 5 == 0 else f"{draws.normal():.3f}"
        hour = int(draws.integers(0, 400))
        lines.append(
            f"s{draws.integers(0, 60) ** 2 // 60},2026-01-{1 + hour // 24:02d}T{hour % 24:02d}:00:00Z,{a},{b}"
        )
    path.write_text("\n".join(lines) + "\n")


def run_filter(folder: Path, name: str, smooth: bool) -> tuple[bytes, Report]:
    output = folder / name
    report = run(
        Settings.load(models=folder),
        str(folder / "m.yaml"),
        str(folder / "in.csv"),
        str(output),
        smooth=smooth,
    )
    return output.read_bytes(), report


@pytest.mark.parametrize("smooth", [False, True], ids=["filtered", "smoothed"])
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "duplicates", "gated", "idle"])
def test_pieces_give_the_file_and_the_report_of_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, smooth: bool
) -> None:
    (tmp_path / "m.yaml").write_text(PLAIN + options)
    write_rows(tmp_path / "in.csv")
    whole, said = run_filter(tmp_path, "whole.csv", smooth)
    for name, size in (("ROWS_A_PIECE", 50), ("KEYS_A_PIECE", 1), ("ROWS_A_GROUP", 400), ("BLOCK", 7)):
        monkeypatch.setattr(filtering, name, size)
    monkeypatch.setattr(filtering, "FEW_KEYS", 1)
    counts = list[int]()
    cut = filtering._cut_by_key  # pyright: ignore[reportPrivateUsage]

    def count_pieces(*given: object) -> list[object]:
        pieces = list(cut(*given))  # type: ignore[arg-type]
        counts.append(len(pieces))
        return [*pieces]

    monkeypatch.setattr(filtering, "_cut_by_key", count_pieces)
    cut_up, told = run_filter(tmp_path, "pieces.csv", smooth)
    assert counts[0] > 3
    assert cut_up == whole
    assert said.data | {"output": "", "seconds": 0} == told.data | {"output": "", "seconds": 0}
    assert said.lines[1:] == told.lines[1:]
