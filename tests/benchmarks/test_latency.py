"""When a stream has caught up with its feed, and which rate it kept up with. No broker, no Spark."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.suites.latency import _latencies, most_sustained, table
from benchmarks.workloads.steady import CALM, Commit, caught_up, commits, keeps_up, lags


def simulated(capacity: float, rate: float, start: float, batches: int) -> list[float]:
    """Return the lags of a stream that starts late and takes all that waits, a fixed cost and so many rows a second."""
    at, taken, found = start, 0.0, []
    for _ in range(batches):
        planned = rate * at
        at += 1.0 + (planned - taken) / capacity
        taken = planned
        found.append(Commit(len(found), at, round(planned - sum(one.rows for one in found))))
    return lags(found, 0.0, rate)


def test_a_lag_is_what_waits_when_estimates_become_visible() -> None:
    visible = [Commit(0, 105.0, 20), Commit(1, 106.0, 30)]
    assert lags(visible, 100.0, 10.0) == [3.0, 1.0]


def test_a_stream_that_still_works_off_its_start_has_not_caught_up() -> None:
    behind = simulated(capacity=2_000, rate=1_000, start=40.0, batches=40)
    steady = 1.0 / (1 - 0.5)  # a micro-batch takes what comes in the one before: s = 1 + s / 2
    assert behind[-1] == pytest.approx(steady, abs=0.01)
    first = next(n for n in range(len(behind)) if caught_up(behind[: n + 1], 10.0))
    assert CALM <= first < 15
    assert max(behind[first - 1 :]) < 1.1 * steady


def test_one_that_cannot_take_the_rate_never_catches_up() -> None:
    behind = simulated(capacity=900, rate=1_000, start=10.0, batches=40)
    assert not any(caught_up(behind[:n], 10.0) for n in range(len(behind)))
    assert not keeps_up(behind, 10.0)
    assert not keeps_up([], 10.0)


def test_commits_are_read_from_the_log(tmp_path: Path) -> None:
    log = tmp_path / "_delta_log"
    log.mkdir()
    made = {"commitInfo": {"operation": "CREATE TABLE"}}
    (log / f"{0:020}.json").write_text(json.dumps(made))
    for number in (0, 1):
        actions = [
            {"commitInfo": {"operationMetrics": {"numOutputRows": str(7 + number)}}},
            {"txn": {"appId": "latency-g0001", "version": 2**32 + number}},
            {"add": {"path": "x"}},
        ]
        (log / f"{number + 1:020}.json").write_text("\n".join(map(json.dumps, actions)))
    assert [(one.batch, one.rows) for one in commits(tmp_path)] == [(0, 7), (1, 8)]
    assert commits(tmp_path / "absent") == []


def test_latencies_are_those_of_the_rows() -> None:
    visible = [Commit(4, 10.0, 2), Commit(5, 12.0, 1)]
    told = _latencies(np.array([9.0, 9.5, 9.0]), np.array([4, 4, 5]), visible)
    assert told == {
        "rows": 3,
        "micro_batches": 2,
        "latency_s": {"p50": 1.0, "p99": pytest.approx(2.96), "max": 3.0},
    }


def test_the_greatest_rate_that_was_kept_up_with_is_told() -> None:
    def one(rate: int, trigger: float, sustained: bool) -> dict:
        return {
            "rate": rate,
            "trigger": trigger,
            "sustained": sustained,
            "warm_up_s": 9.0,
            "last_lags_s": [1.0],
        }

    results = [one(1_000, 1, True), one(5_000, 1, True), one(20_000, 1, False), one(1_000, 0, False)]
    assert most_sustained(results) == {"1": 5_000, "0": None}
    said = table(results)
    assert "With `--trigger 1` the stream kept up with 5,000 messages a second" in said
    assert "With `--trigger 0` the stream kept up with none of these rates" in said
