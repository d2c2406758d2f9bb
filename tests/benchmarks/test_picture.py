"""The picture of the benchmark: what is drawn is what was measured, and what was not measured is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.picture import Point, draw, points, short
from benchmarks.results import RESULTS, results_of
from benchmarks.workloads.work import DENSE, SCALE


def document(*works: str) -> dict[str, Any]:
    rates = {"ours": [90.0, 120.0, 130.0], "limit": [300.0]}
    return {"results": [one for work in works for one in results_of(work, rates, {})]}


def test_points_are_the_measured_works_by_their_keys() -> None:
    measured = document("dense_200k_x5", "dense_20k_x5", "scale_10k")
    assert points(measured, DENSE, "ours") == [
        Point(20_000, 5, 90.0, 120.0, 130.0),
        Point(200_000, 5, 90.0, 120.0, 130.0),
    ]
    assert [one.keys for one in points(measured, SCALE, "ours")] == [10_000]
    assert points(measured, DENSE, "per_key_row") == []


@pytest.mark.parametrize(
    ("number", "said"),
    [(1_214, "1.2 k"), (11_825, "12 k"), (999_000, "999 k"), (1_714_388, "1.7 M"), (2e6, "2 M")],
)
def test_numbers_are_short(number: float, said: str) -> None:
    assert short(number) == said


def test_the_recorded_results_can_be_drawn(tmp_path: Path) -> None:
    draw(json.loads((RESULTS / "latest.json").read_text()), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_results_without_any_of_the_works_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dense_20k_x5.* was measured"):
        draw(document("scale_10k"), tmp_path / "picture.png")
