"""`filter` says so when steps are not equal for a process that takes one a row, and when keys stop being filtered."""

from __future__ import annotations

import math
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pytest

from jobs.core.report import Report
from jobs.core.settings import Settings
from jobs.filter import run
from jobs.offline.row_faults import Gaps, count_gaps, find_lost, list_row_step_kinds
from jobs.state.row_filter import RowFilter
from kalman import flags
from kalman.run import KeyStates, Outputs, SortedRows
from kalman.smoothers.pieces import Smoothed

HEAD = "name: m\nversion: 1\nkey: [site]\ntime: at\ntime_unit: day\nmeasurement: [y]\n"
DUMMY = f"""{HEAD}
states: [level, s1, s2, s3, s4, s5, s6]
process:
  kind: sum
  parts:
    - {{name: level, kind: random_walk, variance: 0.1}}
    - {{name: week, kind: seasonal_dummy, period: 7, variance: 0.01}}
observation: {{R: [[1.0]]}}
initial: {{diffuse: true}}
"""
GATED = f"""{HEAD}
states: [level]
process: {{kind: random_walk, variance: 0.01}}
observation: {{R: [[1.0]]}}
initial: {{mean: [0.0], covariance: [[1.0]]}}
robust: {{gate: {{threshold: 9.0}}}}
"""


YEAR = f"""{HEAD}
states: [level, wave_a, turn_a, wave_b, turn_b]
process:
  kind: sum
  parts:
    - {{name: level, kind: random_walk, variance: 0.01}}
    - {{name: year, kind: seasonal_trigonometric, period: 365.25, harmonics: 2, variance: 0.00001}}
observation: {{R: [[1.0]]}}
initial: {{diffuse: true}}
"""


def filtered(folder: Path, spec: str, rows: list[tuple[str, int, float]], smooth: bool = False) -> Report:
    first = date(2024, 1, 1)
    (folder / "m.yaml").write_text(spec)
    lines = [f"{site},{first + timedelta(days=day)},{y}" for site, day, y in rows]
    (folder / "rows.csv").write_text("\n".join(["site,at,y", *lines]) + "\n")
    settings = Settings.load(models=folder)
    return run(settings, "m", str(folder / "rows.csv"), str(folder / "out.csv"), smooth=smooth)


def week(day: int) -> float:
    return 10.0 * math.sin(2.0 * math.pi * day / 7.0)


def said(report: Report, start: str) -> list[str]:
    return [line for line in report.lines if line.startswith(start)]


def test_days_without_a_row_shift_a_season_that_takes_one_step_a_row(tmp_path: Path) -> None:
    whole = [(site, day, week(day)) for site in "abc" for day in range(70)]
    report = filtered(tmp_path, DUMMY, whole)
    assert said(report, "note:") == [] and report.data["gaps"] == 0
    absent = [row for row in whole if not (row[0] in "ab" and row[1] in (20, 40, 41))]
    report = filtered(tmp_path, DUMMY, absent)
    (line,) = said(report, "note: seasonal_dummy takes one step a row")
    assert "4 of 201 steps (2 keys)" in line and "choose seasonal_trigonometric" in line
    assert report.data["gaps"] == 4
    waves = DUMMY.replace("seasonal_dummy, period: 7", "seasonal_trigonometric, harmonics: 3, period: 7")
    report = filtered(tmp_path, waves, absent)
    assert said(report, "note:") == [] and report.data["gaps"] is None


def test_gaps_are_counted_by_key_and_months_are_none() -> None:
    months = np.cumsum([0, 31, 29, 31, 30, 31, 30])
    key = np.repeat([0, 1, 2], [7, 7, 1])
    time = np.concatenate([months, np.array([0, 1, 2, 2, 3, 6, 7]), [5]])
    assert count_gaps(key, time) == Gaps(2, 12, 1)  # a time that is there twice, and two that are not
    none = np.empty(0, np.int64)
    assert count_gaps(none, none) == count_gaps(none + 0, none) == Gaps(0, 0, 0)


def test_coefficients_that_stand_still_take_no_steps() -> None:
    still = {"kind": "explicit", "F": [[1.0, 0.0], [0.0, 1.0]], "Q": [[0.0, 0.0], [0.0, 0.0]]}
    moving = {**still, "Q": [[0.0, 0.0], [0.0, 1.0]]}
    by_column = {"kind": "explicit", "F": [["f"]], "Q": [[0.0]]}
    assert list_row_step_kinds({"process": still}) == []
    assert (
        list_row_step_kinds({"process": moving})
        == list_row_step_kinds({"process": by_column})
        == ["explicit"]
    )
    parts = {"kind": "sum", "parts": [{"kind": "seasonal_dummy"}, moving, {"kind": "random_walk"}]}
    assert list_row_step_kinds({"modes": [{"process": parts}]}) == ["explicit", "seasonal_dummy"]


def test_a_key_whose_rows_are_flagged_from_some_row_on_is_named(tmp_path: Path) -> None:
    moved = [("moved", day, 0.1 if day < 7 else 100.0) for day in range(100)]
    good = [("good", day, 0.1 if day % 10 else 50.0) for day in range(100)]  # gated now and then
    report = filtered(tmp_path, GATED, moved + good)
    (line,) = said(report, "warning:")
    assert line.startswith(
        "warning: moved: all of its 93 rows after row 7 are flagged (gated), and the estimate"
    )
    assert "give robust.gate a limit" in line
    assert (report.data["keys_lost"], report.data["flagged"]) == (1, 103)
    worse = [("worse", day, 100.0) for day in range(200)]
    (line,) = said(filtered(tmp_path, GATED, moved + good + worse), "warning:")
    assert "2 of 3 keys" in line and "293 rows, such as worse with 200 from the first on (gated)" in line
    limited = GATED.replace("threshold: 9.0", "threshold: 9.0, limit: 3")
    report = filtered(tmp_path, limited, moved + worse)
    assert said(report, "warning:") == [] and report.data["keys_lost"] == 0


@pytest.mark.parametrize(
    ("flag", "lost"),
    [
        ([3, 0, 0, 0, 0, 0], None),
        ([0, 3, 3, 3, 3], None),  # too few
        ([0, 0, 0, 0, 0, 0, 3, 3, 3, 3, 3], None),  # less than half
        ([0, 3, 3, 3, 3, 3], (5, 1)),
        ([3, 3, 3, 3, 3], (5, 0)),
    ],
)
def test_a_key_is_lost_when_half_of_its_rows_are_flagged_at_its_end(
    flag: list[int], lost: tuple[int, int] | None
) -> None:
    codes = np.array([0, 0, *flag, 0], np.uint8)
    key = np.array([0, 0, *[1] * len(flag), 2])
    found = find_lost(key, codes)
    assert (None if found is None else (found.its_rows, found.after)) == lost
    if found is not None:
        names = {flags.FLAGS[3]: found.rows}
        assert (found.keys, found.of, found.worst, found.flags) == (1, 3, 1, names)


def test_a_yearly_season_is_filtered_and_smoothed_from_a_diffuse_start(tmp_path: Path) -> None:
    rows = [("a", day, 10.0 * math.sin(2.0 * math.pi * day / 365.25)) for day in range(1095)]
    report = filtered(tmp_path, YEAR, rows, smooth=True)
    assert report.data["flagged"] == 0 and said(report, "warning:") == []


def test_rows_that_cannot_be_smoothed_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smooth = RowFilter.smoothed

    def lossy(self: RowFilter, states: KeyStates, rows: SortedRows) -> tuple[Outputs, Smoothed]:
        outputs, found = smooth(self, states, rows)
        found.mean[:, :3] = np.nan
        return outputs, found

    monkeypatch.setattr(RowFilter, "smoothed", lossy)
    report = filtered(tmp_path, GATED, [("a", day, 0.1 * day) for day in range(10)], smooth=True)
    (warning,) = said(report, "warning:")
    assert warning.startswith("warning: 3 rows cannot be smoothed")
