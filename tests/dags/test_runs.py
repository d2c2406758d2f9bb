"""Each family's DAG executed for real, on local Spark: land, pretrain, land one more day, stream."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from deltalake import DeltaTable

from demo.delta_log import rows_of
from jobs.supervision.driver_log import DriverLog
from jobs.supervision.driver_status import RUNNING, read_driver_status, request_stop
from kalman_dags.supervision.launchers import Work, build_launcher
from tests.dags.conftest import DAYS, ROWS_A_DAY, SENSORS, Tiny, events, run_dag, write_days
from tests.dags.test_operator import wait_for

pytestmark = [pytest.mark.airflow, pytest.mark.spark]


def test_ingest_lands_what_the_form_names(landed: Tiny) -> None:
    days = {row["at"].date() for row in rows_of(landed.warehouse / "measurements" / "tiny")}
    assert len(days) >= DAYS - 1
    [rejected] = rows_of(landed.warehouse / "quarantine")
    assert "warm" in rejected["payload"]


LAST = DAYS - 1


def lines_of(log: str) -> list[str]:
    """Return the lines of ours in a task's log, after checking that what Java says about itself is not there."""
    ours = [line for line in log.splitlines() if "KalmanHook]" in line or "KalmanOperator]" in line]
    assert not any("WARNING" in line or "Picked up" in line for line in ours), ours
    return ours


@pytest.mark.core
def test_pretrain_makes_a_snapshot_of_what_has_landed(
    landed: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run_dag(landed, "kalman_pretrain__tiny", LAST - 1) == {"pretrain": "success"}
    assert lines_of(capsys.readouterr().out)
    [manifest] = rows_of(landed.warehouse / "manifests")
    # The cut is the end of day three, which is all that has been landed: so a stream may start there.
    assert (manifest["rows"], manifest["key_count"]) == (LAST * ROWS_A_DAY, SENSORS)
    assert manifest["cut"] is None
    made = events("kalman://snapshots/tiny")[-1][0]
    assert (made["snapshot"], made["rows"]) == (manifest["snapshot_id"], LAST * ROWS_A_DAY)


@pytest.fixture
def pretrained(landed: Tiny) -> Tiny:
    """An installation with a snapshot; it has one where the test above has run."""
    if not rows_of(landed.warehouse / "manifests"):
        assert run_dag(landed, "kalman_pretrain__tiny", LAST - 1) == {"pretrain": "success"}
    return landed


def land_last_day(tiny: Tiny) -> None:
    write_days(tiny.landing / "2013-01-04.csv", range(LAST, DAYS))
    assert run_dag(tiny, "kalman_ingest__tiny", LAST) == {"ingest": "success"}  # by the spec's path


@pytest.mark.slow
def test_stream_goes_on_from_the_snapshot(pretrained: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    landed = pretrained
    [manifest] = rows_of(landed.warehouse / "manifests")
    land_last_day(landed)
    # The event that wakes others has what was landed, and that of the interval has which.
    assert events("kalman://measurements/tiny")[-1] == (
        {"version": 2, "rows": ROWS_A_DAY, "quarantined": 0},
        None,
    )
    assert events("kalman://measurements/tiny/by-interval")[-1][1] == "2013-01-04T00:00:00Z"
    capsys.readouterr()
    assert run_dag(landed, "kalman_stream__tiny", LAST) == {"stream": "success"}
    # What the command printed is in the task's log.
    log = capsys.readouterr().out
    assert f"estimated {ROWS_A_DAY} rows" in log and re.search(r"\d rows/(s|min|h)\b", log)
    # The operator's last line is the one that matters, and nothing is left of what Java says about itself.
    ours = lines_of(log)
    assert f"stream: estimated {ROWS_A_DAY} rows" in ours[-1]
    streamed = events("kalman://estimates/tiny")[-1][0]
    assert (streamed["generation"], streamed["rows"]) == ("tiny-g0001", ROWS_A_DAY)
    assert streamed["position"]["version"] == streamed["version"]
    [generation] = rows_of(landed.warehouse / "generations")
    assert (generation["snapshot_id"], generation["status"]) == (manifest["snapshot_id"], "live")
    estimates = rows_of(landed.warehouse / "estimates" / "tiny")
    assert len(estimates) == ROWS_A_DAY
    assert {row["key"] for row in estimates} == {f"s{sensor}" for sensor in range(SENSORS)}


@pytest.mark.slow
def test_estimate_writes_the_rows_of_its_interval_once(landed: Tiny) -> None:
    for day in (1, 0, 1):  # any interval, in any order, cleared and run again
        assert run_dag(landed, "kalman_estimate__tiny", day) == {"estimate": "success"}
    found = rows_of(landed.warehouse / "estimates_history" / "tiny")
    assert Counter(row["event_time"].day for row in found) == {1: ROWS_A_DAY, 2: ROWS_A_DAY}


@pytest.fixture
def streamed(pretrained: Tiny) -> Tiny:
    """An installation with a stream; it has one where the tests above have run."""
    if not rows_of(pretrained.warehouse / "generations"):
        land_last_day(pretrained)
        assert run_dag(pretrained, "kalman_stream__tiny", LAST) == {"stream": "success"}
    return pretrained


@pytest.mark.slow
def test_monitor(streamed: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = streamed.models / "tiny.yaml"
    before = spec.read_text()
    spec.write_text(before + "monitor: {watermark: 1h, windows: [{size: 1d}]}\n")
    try:
        for _ in range(2):  # the second finds nothing new
            assert run_dag(streamed, "kalman_monitor__tiny", DAYS) == {"monitor": "success"}
            [window] = rows_of(streamed.warehouse / "windows" / "tiny")
            assert window["rows"] == ROWS_A_DAY
        log = DriverLog.at(str(streamed.warehouse), "monitor-tiny")
        assert [(one.epoch, one.how) for one in log.history("monitor")] == [
            (1, "caught up"),
            (2, "caught up"),
        ]
        # As Airflow keeps one running: found by its log, and ended by it.
        for name, value in streamed.environment().items():
            monkeypatch.setenv(name, value)
        launched = build_launcher().start(str(streamed.warehouse), Work("tiny", 2.0, "monitor"), "")
        wait_for(lambda: read_driver_status(log).state == RUNNING, 120)
        assert log.list_drivers()[-1].launch == launched.token
        refused = run_dag(streamed, "kalman_monitor__tiny", DAYS)
        assert refused == {"monitor": "skipped"}
        request_stop(log, read_driver_status(log), "a test")
        wait_for(lambda: not read_driver_status(log).driven, 120)
        assert (log.list_drivers()[-1].how, read_driver_status(log).exit_code) == ("stopped", 0)
    finally:
        spec.write_text(before)


@pytest.mark.slow
def test_upgrade_and_roll_back(streamed: Tiny) -> None:
    landed = streamed
    spec = landed.models / "tiny.yaml"
    first = spec.read_text()
    second = first.replace("version: 1", "version: 2").replace("variance: 0.01", "variance: 0.011")
    spec.write_text(second + "upgrade: {automatic: true}\n")
    try:
        preview = run_dag(landed, "kalman_upgrade__tiny", DAYS)
        assert preview["preview"] == "success" and preview["shadow"] == preview["promote"] == "skipped"
        assert [row["status"] for row in rows_of(landed.warehouse / "generations")] == ["live"]

        # No row has come since the shadow began: nothing is promoted on nothing, unless the form says so.
        waits = run_dag(landed, "kalman_upgrade__tiny", DAYS, {"dry_run": False})
        assert waits["shadow"] == "success" and waits["promote"] == "skipped"
        status = {row["generation"]: row["status"] for row in rows_of(landed.warehouse / "generations")}
        assert status == {"tiny-g0001": "live", "tiny-g0002": "shadow"}
        done = run_dag(landed, "kalman_upgrade__tiny", DAYS, {"dry_run": False, "force": True})
        assert done["promote"] == "success" and done["switch_over"] == "skipped"
        status = {row["generation"]: row["status"] for row in rows_of(landed.warehouse / "generations")}
        assert status == {"tiny-g0001": "retired", "tiny-g0002": "live"}
        # The live one is of the deployed version now, so there is nothing to do.
        assert run_dag(landed, "kalman_upgrade__tiny", DAYS)["preview"] == "skipped"

        assert run_dag(landed, "kalman_rollback__tiny", DAYS) == {"rollback": "success"}
        assert run_dag(landed, "kalman_export__tiny", DAYS) == {"export": "success"}
        status = {row["generation"]: row["status"] for row in rows_of(landed.warehouse / "generations")}
        assert status == {"tiny-g0001": "live", "tiny-g0002": "retired"}
    finally:
        spec.write_text(first)


@pytest.mark.slow
def test_skill(streamed: Tiny) -> None:
    spec = streamed.models / "tiny.yaml"
    before = spec.read_text()
    spec.write_text(before + "outputs: {measured: true}\nforecast: {horizons: [6h]}\n")
    try:
        write_days(streamed.landing / "2013-01-05.csv", range(DAYS, DAYS + 1))
        assert run_dag(streamed, "kalman_ingest__tiny", DAYS) == {"ingest": "success"}
        assert run_dag(streamed, "kalman_stream__tiny", DAYS) == {"stream": "success"}
        for _ in range(2):  # the second finds nothing new
            assert run_dag(streamed, "kalman_skill__tiny", DAYS) == {"skill": "success"}
            compared = rows_of(streamed.warehouse / "forecast_skill" / "tiny")
            # A row every six hours, which the estimate before it forecasts; the day before has the first one's.
            matched = [row for row in compared if row["actual"] is not None]
            assert len(matched) == ROWS_A_DAY
            # The day before was estimated without its measurements: no row matches the forecasts within it.
            assert len(compared) - len(matched) == ROWS_A_DAY - SENSORS
        assert run_dag(streamed, "kalman_forecast__tiny", DAYS) == {"forecast": "success"}
        ahead = DeltaTable(streamed.warehouse / "forecasts" / "tiny").to_pyarrow_table().to_pylist()
        keys = {row["sensor"] for row in compared}
        assert {row["sensor"] for row in ahead} == keys and len(ahead) == len(keys)
        assert len({row["run"] for row in ahead}) == 1
        log = DriverLog.at(str(streamed.warehouse), "skill-tiny")
        assert [(one.epoch, one.how) for one in log.history("skill")] == [(1, "caught up"), (2, "caught up")]
    finally:
        spec.write_text(before)
