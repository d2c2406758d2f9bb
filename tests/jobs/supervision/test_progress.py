"""Records of micro-batches, the lag of a stream, and alarms. Spark-free."""

from __future__ import annotations

import json
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast
from urllib.request import urlopen

import pytest

from jobs.core.errors import UserError
from jobs.insight.status import find_alarms
from jobs.lineage.generations import Generation
from jobs.storage.warehouse import Tables
from jobs.streaming.micro_batch import StreamTotals
from jobs.streaming.recorder import Recorder
from jobs.supervision.metrics import Metrics
from jobs.supervision.progress import (
    COLUMNS,
    Lag,
    TableLag,
    count_offsets_behind,
    has_executed,
    measure_table_lag,
    parse_end_time,
    record,
)

NOW = datetime(2024, 5, 1, 12, 0, tzinfo=UTC)


def progress(batch: int, seconds: float = 2.0, **changes: Any) -> dict[str, Any]:
    """Return progress as Spark reports it."""
    return {
        "id": "b0",
        "batchId": batch,
        "timestamp": "2024-05-01T11:59:00.500Z",
        "numInputRows": 99,
        "durationMs": {"addBatch": 1500, "triggerExecution": int(seconds * 1000)},
        "eventTime": {"watermark": "1970-01-01T00:00:00.000Z"},
        "stateOperators": [{"numRowsTotal": 12, "memoryUsedBytes": 4096}],
        "sources": [
            {
                "description": "DeltaSource[file:/w]",
                "endOffset": {"reservoirVersion": 5, "index": -1},
                "latestOffset": None,
            }
        ],
        **changes,
    }


def test_a_record_counts_the_rows_by_outcome() -> None:
    counts = {"estimated": 180, "quarantined": 20, "late": 15, "bad_state": 5}
    one = record(progress(7), counts, Lag(1000, 30.5), "walk", "walk-g0001", "3")
    assert tuple(one) == COLUMNS
    assert (one["rows"], one["estimated"], one["quarantined"], one["late"], one["expired"]) == (
        200,
        180,
        20,
        15,
        0,
    )
    assert (one["seconds"], one["rows_per_second"]) == (2.0, 100.0)
    assert (one["state_rows"], one["state_bytes"], one["lag_rows"], one["lag_seconds"]) == (
        12,
        4096,
        1000,
        30.5,
    )
    assert one["watermark"] is None  # 1970 is none
    assert json.loads(one["position"])["reservoirVersion"] == 5
    assert parse_end_time(one) == datetime(2024, 5, 1, 11, 59, 2, 500000, UTC)
    unknown = record(progress(8), {}, Lag(), "walk", "walk-g0001", "3")
    assert (unknown["rows"], unknown["estimated"], unknown["late"]) == (99, None, None)


def test_an_idle_trigger_is_not_a_micro_batch() -> None:
    assert has_executed(progress(1))
    assert not has_executed(progress(2, durationMs={"latestOffset": 3, "triggerExecution": 4}))


def test_messages_behind_are_summed_over_partitions() -> None:
    source = {
        "latestOffset": {"t": {"0": 10, "1": 7}, "s": {"0": 5}},
        "endOffset": {"t": {"0": 4, "1": 7}},
    }
    assert count_offsets_behind(source) == 6  # a topic that has just come is not guessed at
    assert (
        count_offsets_behind({"latestOffset": None, "endOffset": {"reservoirVersion": 5, "index": -1}})
        is None
    )


def commit(rows: int, at: float, operation: str = "WRITE") -> str:
    info = {
        "timestamp": int(at * 1000),
        "operation": operation,
        "operationMetrics": {"numOutputRows": str(rows)},
    }
    return "\n".join(json.dumps(line) for line in ({"commitInfo": info}, {"add": {"path": "x"}})) + "\n"


def test_rows_behind_are_those_of_later_versions_each_read_once() -> None:
    log = {4: commit(10, 100), 5: commit(20, 200), 6: commit(7, 250, "OPTIMIZE"), 7: commit(30, 300)}
    asked: list[int] = []

    def read(version: int) -> str | None:
        asked.append(version)
        return log.get(version)

    table = TableLag(read, now=lambda: 1000.0)
    assert table.measure(4) == Lag(50, 800.0)
    assert table.measure(5) == Lag(30, 700.0)
    log[8] = commit(1, 900)
    assert table.measure(7) == Lag(1, 100.0)
    assert table.measure(8) == Lag(0, 0.0)
    assert [asked.count(version) for version in (5, 6, 7)] == [1, 1, 1]
    assert TableLag(read, now=lambda: 1000.0, most=2).measure(3).rows == 30


def test_rows_that_a_query_never_reads_do_not_count_as_behind(tmp_path: Path) -> None:
    log = tmp_path / "estimates" / "walk" / "_delta_log"
    log.mkdir(parents=True)
    for version, generation in enumerate(["walk-g0001", "walk-g0001", "walk-g0002", "walk-g0001"]):
        name = {"txn": {"appId": f"{generation}/estimates/walk/rows", "version": version}}
        text = commit(720, 100 * version) + json.dumps(name, separators=(",", ":")) + "\n"
        (log / f"{version:020d}.json").write_text(text)
    tables = Tables(str(tmp_path))
    assert measure_table_lag(tables, "estimates/walk", 1).rows == 1440
    assert measure_table_lag(tables, "estimates/walk", 1, {"walk-g0002"}).rows == 720, (
        "a shadow's rows are not"
    )


def stream(**changes: Any) -> dict[str, Any]:
    return {
        "generation": "walk-g0001",
        "status": "live",
        "driver": {"host": "a", "pid": 7},
        "driver_lost": False,
        "last_error": None,
        "rows_behind": 0,
        "seconds_behind": 0.0,
        "last_batch_at": NOW - timedelta(hours=5),
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),  # nothing to do for hours is no alarm
        ({"rows_behind": 5, "seconds_behind": 599.0}, None),  # it has had something to do for less than ten minutes
        ({"rows_behind": 5, "seconds_behind": 9999.0, "last_batch_at": NOW - timedelta(seconds=500)}, None),
        (
            {"rows_behind": 5000, "seconds_behind": 9999.0, "last_batch_at": NOW - timedelta(minutes=25)},
            "walk: walk-g0001 makes no progress: 5,000 rows have waited for 25 min; its last micro-batch "
            "ended 2024-05-01 11:35:00 UTC; process 7 on a runs it",
        ),
        (
            {"rows_behind": 5, "seconds_behind": 601.0, "last_batch_at": None, "driver": None},
            "walk: walk-g0001 makes no progress: 5 rows have waited for 10 min; it has committed no micro-batch "
            "yet; no driver runs it",
        ),
        (
            {"rows_behind": 5, "seconds_behind": 9e5, "driver": None, "driver_lost": True},
            "walk: walk-g0001 makes no progress: 5 rows have waited for 5 h; its last micro-batch ended "
            "2024-05-01 07:00:00 UTC; its driver is lost",
        ),
        ({"driver": None, "last_error": "boom"}, "walk: the driver of walk-g0001 ended with an error: boom"),
        ({"last_error": "boom"}, None),  # one runs again
        ({"status": "retired", "driver": None, "last_error": "boom"}, None),
    ],
)  # fmt: skip
def test_an_alarm_needs_waiting_rows_or_an_error(changes: dict[str, Any], said: str | None) -> None:
    models = [{"model": "walk", "generations": [stream(**changes)], "followers": [], "given_up": []}]
    assert find_alarms(models, 600.0, NOW) == ([] if said is None else [said])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"rows_behind": 5, "seconds_behind": 599.0}, None),
        ({"rows_behind": 5, "seconds_behind": 9e5, "last_batch_at": NOW - timedelta(seconds=500)}, None),
        (
            {"rows_behind": 5000, "seconds_behind": 1500.0},
            "walk: its skill makes no progress: 5,000 estimates have waited for 25 min; its last micro-batch ended "
            "2024-05-01 07:00:00 UTC; process 7 on a runs it",
        ),
        (
            {"rows_behind": 5, "seconds_behind": 9e5, "driver": None, "driver_lost": True},
            "walk: its skill makes no progress: 5 estimates have waited for 5 h; its last micro-batch ended "
            "2024-05-01 07:00:00 UTC; its driver is lost",
        ),
        ({"driver": None, "last_error": "boom"}, "walk: its skill ended with an error: boom"),
        ({"last_error": "boom"}, None),  # one runs again
        ({"rows_behind": None, "seconds_behind": None, "last_batch_at": None}, None),  # it has not begun
    ],
)
def test_an_alarm_of_what_follows_the_estimates(changes: dict[str, Any], said: str | None) -> None:
    follower = {**stream(), "follower": "skill", **changes}
    models = [{"model": "walk", "generations": [], "followers": [follower], "given_up": []}]
    assert find_alarms(models, 600.0, NOW) == ([] if said is None else [said])
    models = [{"model": "walk", "generations": [], "followers": [], "given_up": ["its stream was given up"]}]
    assert find_alarms(models, 600.0, NOW) == ["walk: its stream was given up"]


def records(*batches: int) -> list[dict[str, Any]]:
    counts = {"estimated": 90, "quarantined": 10, "late": 10}
    return [record(progress(one), counts, Lag(3, 1.5), "walk", "walk-g0001", "1") for one in batches]


def test_metrics_are_served_and_written(tmp_path: Path) -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    file = tmp_path / "walk.prom"
    metrics = Metrics("walk", "walk-g0001", port, str(file))
    try:
        metrics.take(records(0))
        metrics.take(records(1, 2))
        served = urlopen(f"http://localhost:{port}/metrics", timeout=10).read().decode()
        assert "_created" not in served
        # Nobody else's machine can ask for them, unless the command says so.
        with pytest.raises(OSError), socket.create_connection(("127.0.0.2", port), timeout=5):
            pass
        with pytest.raises(UserError, match="--metrics-port"):
            Metrics("walk", "walk-g0002", port)
    finally:
        metrics.close()
    everywhere = Metrics("walk", "walk-g0001", port, host="0.0.0.0")
    try:
        socket.create_connection(("127.0.0.2", port), timeout=5).close()
    finally:
        everywhere.close()
    for text in (served, file.read_text()):
        lines = text.splitlines()
        assert 'kalman_batches_total{generation="walk-g0001",model="walk"} 3.0' in lines
        assert 'kalman_rows_total{generation="walk-g0001",model="walk",outcome="estimated"} 270.0' in lines
        assert 'kalman_rows_total{generation="walk-g0001",model="walk",outcome="late"} 30.0' in lines
        assert 'kalman_batch_id{generation="walk-g0001",model="walk"} 2.0' in lines
        assert 'kalman_lag_rows{generation="walk-g0001",model="walk"} 3.0' in lines
    with pytest.raises(UserError, match="--metrics-file .*absent"):
        Metrics("walk", "walk-g0001", file=str(tmp_path / "absent" / "walk.prom"))


class Report:
    """A progress record of Spark's JVM."""

    def __init__(self, said: dict[str, Any]) -> None:
        self.said = said

    def batchId(self) -> int:  # noqa: N802
        return self.said["batchId"]

    def json(self) -> str:
        return json.dumps(self.said)


class Query:
    """A query whose progress the test sets."""

    def __init__(self) -> None:
        self.recent: list[Report] = []
        self._jsq = self

    def recentProgress(self) -> list[Report]:  # noqa: N802
        return self.recent


def recorder(query: Query, totals: StreamTotals, *outlets: Any, lag: Any = lambda source: Lag()) -> Recorder:
    made = Generation("walk-g0001", "walk", 1, "f", "s", "c", {"version": 1}, 1, 1, "live", epoch=4)
    return Recorder(cast(Any, query), totals, made, lag, list(outlets))


def ran(query: Query, totals: StreamTotals, batch: int) -> None:
    totals.batches += 1
    totals.of_batch[batch] = {"estimated": batch, "quarantined": 0}
    query.recent.append(Report(progress(batch)))


def test_each_micro_batch_is_recorded_once() -> None:
    query, totals = Query(), StreamTotals()
    found: list[dict[str, Any]] = []
    one = recorder(query, totals, found.extend)
    one.take()
    for batch in range(3):
        ran(query, totals, batch)
    one.take()
    query.recent.append(Report(progress(3, durationMs={"triggerExecution": 1})))  # an idle trigger
    one.take()
    totals.batches += 1  # the sink is ahead of Spark's progress
    one.take()
    query.recent.append(Report(progress(3)))
    one.take()
    one.take()
    assert [(row["batch_id"], row["estimated"]) for row in found] == [(0, 0), (1, 1), (2, 2), (3, None)]
    assert {row["run"] for row in found} == {"4"}
    assert totals.of_batch == {}


def test_a_failing_outlet_does_not_reach_the_query() -> None:
    query, totals = Query(), StreamTotals()
    found: list[dict[str, Any]] = []

    def full(records: list[dict[str, Any]]) -> None:
        raise OSError("no space left on device")

    def broken(source: dict[str, Any]) -> Lag:
        raise ValueError("no such log")

    ran(query, totals, 0)
    with recorder(query, totals, full, found.extend, lag=broken) as one:
        pass
    assert one.problem == "no space left on device"
    assert [row["batch_id"] for row in found] == [0]  # the other outlets got the record


def test_a_disk_that_hangs_does_not_delay_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.streaming.recorder.FINISH_SECONDS", 0.2)
    query, totals, release = Query(), StreamTotals(), threading.Event()
    ran(query, totals, 0)
    before = time.monotonic()
    with recorder(query, totals, lambda records: release.wait(60)) as one:
        pass
    assert time.monotonic() - before < 30
    assert "not recorded within" in (one.problem or "")
    release.set()
