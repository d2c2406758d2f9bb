"""What a verification leaves behind: exit code, alarm, metrics."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import kalman
from jobs import verify
from jobs.core.errors import UserError
from jobs.insight.status import find_alarms
from jobs.lineage.generations import DeployedModel
from jobs.supervision.metrics import write_verification
from jobs.verification.runs import (
    COUNTS,
    DIFFERENT,
    EQUAL,
    NOT_VERIFIED,
    NOTHING,
    Findings,
    VerificationRun,
    sum_findings,
)
from jobs.verification.verifier import Options, Verifier, choose_exit_code

FIRST = {
    "key": "7",
    "event_time": "2024-03-01T00:00:00+00:00",
    "batch": 3,
    "generation": "walk-g0001",
    "what": "mean[0] is 1.0, and recomputed 2.0",
}
NOW = datetime(2024, 3, 2, tzinfo=UTC)


def test_only_equality_is_a_success_and_a_difference_is_not_retried() -> None:
    assert [choose_exit_code(one) for one in (EQUAL, DIFFERENT, NOTHING, NOT_VERIFIED)] == [0, 2, 3, 3]


def test_an_alarm_names_the_first_difference() -> None:
    last: dict[str, Any] = {
        "run_id": "r1",
        "outcome": DIFFERENT,
        "differences": 3,
        "first_difference": json.dumps(FIRST),
        "recorded_at": NOW,
    }
    model = {"model": "walk", "generations": [], "followers": [], "given_up": [], "verification": last}
    assert find_alarms([model], 600.0, NOW) == [
        "walk: verification r1 found 3 differences at 2024-03-02 00:00:00 UTC: key 7, row of "
        "2024-03-01T00:00:00+00:00, micro-batch 3 of walk-g0001: mean[0] is 1.0, and recomputed 2.0"
    ]
    assert find_alarms([{**model, "verification": {**last, "outcome": EQUAL}}], 600.0, NOW) == []
    assert find_alarms([{**model, "verification": None}], 600.0, NOW) == []


def test_findings_add_up() -> None:
    one = Findings({**dict.fromkeys(COUNTS, 0), "missing": 1, "equal": 5}, [FIRST] * 4)
    total = sum_findings([one, one])
    assert (total.differences, total.compared, len(total.firsts)) == (2, 10, 5)


def test_what_other_numerics_explain_is_told_of_each_generation_and_snapshot() -> None:
    none: Any = None  # neither a warehouse nor a spec is asked
    verifier = Verifier(DeployedModel(none, none), Options())
    few = Findings({**dict.fromkeys(COUNTS, 0), "numerics": 1_200, "states_numerics": 3})
    state = Findings({**dict.fromkeys(COUNTS, 0), "states_numerics": 7})
    parts = {f"rows of m-g0001 to micro-batch 5, {chunk} of 2": few for chunk in (1, 2)}
    run = VerificationRun(
        "r1", "m", {}, {**parts, "rows of m-g0002 to micro-batch 9, 1 of 1": Findings(), "snapshot s1": state}
    )
    for name in ("m-g0001", "m-g0002", "snapshot s1", "snapshot s2"):
        verifier._tell_numerics(run, name)
    generation, snapshot = verifier.reasons
    assert generation.startswith(
        "other numerics: 2,400 estimates and 6 states of m-g0001 differ from those of "
    )
    assert f"with numerics {kalman.NUMERICS}, and it was begun with others" in generation
    assert snapshot.startswith(
        "other numerics: 0 estimates and 7 states of snapshot s1 differ from those of "
    )
    assert (run.findings.differences, run.findings.compared) == (0, 0)


def test_the_outcome_as_metrics(tmp_path: Path) -> None:
    file = tmp_path / "verify.prom"
    write_verification(str(file), "walk", EQUAL, {"rows": 12, "compared": 9}, 0)
    text = file.read_text()
    assert 'kalman_verify_rows{model="walk"} 12.0' in text
    assert 'kalman_verify_differences{model="walk"} 0.0' in text
    assert 'kalman_verify_outcome{model="walk",outcome="equal"} 1.0' in text
    with pytest.raises(UserError, match="--metrics-file"):
        write_verification(str(tmp_path / "none" / "x"), "walk", EQUAL, {"rows": 0, "compared": 0}, 0)


@pytest.mark.parametrize(("text", "share"), [("1%", 10_000), ("100%", 1_000_000), ("0.5", 500_000)])
def test_a_share_of_the_keys(text: str, share: int) -> None:
    assert verify.parse_share(text) == share


@pytest.mark.parametrize("text", ["0%", "101%", "-1%", "all", ""])
def test_no_share_of_the_keys(text: str) -> None:
    with pytest.raises(UserError, match="--share"):
        verify.parse_share(text)
