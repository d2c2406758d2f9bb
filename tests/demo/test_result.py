"""What result.json says is wrong: differences, rows that do not add up."""

from __future__ import annotations

import math
from typing import Any

import pytest

from demo.result import problems_of, summary


def result(**changes: Any) -> dict[str, Any]:
    return {
        "max_abs_difference": 0.0,
        "keys": 10,
        "rows_sent": 100,
        "rows_estimated": 97,
        "rows_quarantined": 3,
        "driver_kills": 2,
        "rows_per_second": 10.0,
        "batch_rows_per_second": 100.0,
        "seconds": 12.3,
        "report": "var/demo/report.html",
        "models": {"air_time": {"problems": []}},
        **changes,
    }


def test_a_good_result_has_no_problems() -> None:
    assert problems_of(result()) == []
    assert problems_of(result(max_abs_difference=9e-10)) == []
    assert "var/demo/report.html" in summary(result())[-1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_abs_difference": 2e-9}, "differs by 2e-09"),
        ({"max_abs_difference": math.inf}, "does not match"),
        ({"max_abs_difference": math.nan}, "differs by nan"),
        ({"rows_estimated": 96}, "100 rows were sent, but 96 were estimated and 3 quarantined"),
        ({"models": {"air_time": {"problems": ["1 keys are missing"]}}}, "air_time: 1 keys are missing"),
    ],
)
def test_problems_are_sentences(changes: dict[str, Any], said: str) -> None:
    (problem,) = problems_of(result(**changes))
    assert said in problem
