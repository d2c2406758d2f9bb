"""Continuous streams: their DAG, the events of the trigger, the next step of the operator; drivers are scripts."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException, TaskDeferred

from jobs.core.processes import identify_command, read_start_time
from jobs.supervision.driver_log import (
    LAUNCH_VARIABLE,
    DriverIdentity,
    DriverLog,
    DriverRecord,
    Hold,
    LaunchRecord,
    read_machine_name,
)
from jobs.supervision.driver_status import CrashCounter, read_driver_status, request_stop
from jobs.supervision.launcher import detach
from kalman_dags.supervision import operator as stream_operator
from kalman_dags.supervision.launchers import Work
from kalman_dags.supervision.operator import StreamForeverOperator
from kalman_dags.supervision.trigger import PATH, StreamEvent, StreamTrigger
from tests.dags.conftest import MODELS, ROOT, load_bag
from tests.dags.test_operator import wait_for
from tests.dags.test_policies import HEAVY

pytestmark = pytest.mark.airflow

NOW = datetime.now(UTC)
FOR_EVER = '{schedule: "@continuous", trigger: 2s}'


@pytest.fixture
def for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' model, as a continuous stream."""
    text = (MODELS / "tiny.yaml").read_text()
    (tmp_path / "tiny.yaml").write_text(text.replace('{schedule: "*/10 * * * *"}', FOR_EVER))
    monkeypatch.setenv("KALMAN_MODELS", str(tmp_path))


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DriverLog:
    monkeypatch.setenv("KALMAN_WAREHOUSE", str(tmp_path))
    return DriverLog.at(str(tmp_path), "tiny")


def test_its_dag_takes_the_place_of_the_streams(for_ever: None) -> None:
    dags = load_bag().dags
    assert "kalman_stream__tiny" not in dags
    dag = dags["kalman_stream_forever__tiny"]
    assert type(dag.timetable).__name__ == "ContinuousTimetable"
    (task,) = dag.tasks
    assert task.pool == "kalman_stream__tiny" and task.retries == 5
    assert {outlet.uri for outlet in task.outlets} == {"kalman://estimates/tiny"}
    assert "pause this DAG" in (dag.doc_md or "")
    warden = dags["kalman_stream_warden"]
    assert warden.is_paused_upon_creation is False and warden.max_active_runs == 1


def test_without_one_there_is_no_warden(models: Path) -> None:
    assert not [name for name in load_bag().dags if "forever" in name or "warden" in name]


def test_the_trigger_loads_nothing_heavy() -> None:
    code = f"""
import sys
from airflow.triggers.base import BaseTrigger
before = {{name.split('.')[0] for name in sys.modules}}
import importlib
module, _, name = {PATH!r}.rpartition('.')
assert getattr(importlib.import_module(module), name)
print(*({{name.split('.')[0] for name in sys.modules}} - before) & set({(*HEAVY, "delta", "py4j")!r}))
"""
    # Without the folder of the DAGs, which the triggerer does not have on its path.
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.stdout.strip(), done.returncode) == ("", 0), done.stderr


def driving(epoch: int = 1, **changes: Any) -> DriverRecord:
    """Return what a driver writes that is this very process."""
    at = read_start_time(os.getpid()) or 0.0
    owner = DriverIdentity(read_machine_name(), os.getpid(), at, os.getpid(), at, "t")
    return replace(
        DriverRecord("tiny", "tiny-g0001", epoch, "live", owner, NOW, datetime.now(UTC)), **changes
    )


def test_the_events_of_the_trigger(log: DriverLog, tmp_path: Path) -> None:
    later, before = (NOW + timedelta(hours=1)).isoformat(), (NOW - timedelta(hours=1)).isoformat()
    watch = StreamTrigger(str(tmp_path), "tiny", later)
    assert watch.event() == StreamEvent.GONE
    log.write(driving())
    assert watch.event() is None
    assert StreamTrigger(str(tmp_path), "tiny", before).event() == StreamEvent.WATCHED
    log.write(driving(ended_at=NOW, how="failed"))
    assert watch.event() == StreamEvent.GONE
    assert StreamTrigger(str(tmp_path), "tiny", later, later).event() is None
    due = StreamTrigger(str(tmp_path), "tiny", later, before)
    assert due.event() == StreamEvent.DUE
    log.put_hold(Hold("test", NOW))
    assert due.event() is None
    log.write(driving(2))  # by hand, in spite of the hold
    assert due.event() == StreamEvent.DUE


def test_a_trigger_is_recreated_elsewhere(log: DriverLog, tmp_path: Path) -> None:
    path, arguments = StreamTrigger(str(tmp_path), "tiny", NOW.isoformat(), None, 0.01).serialize()
    assert path == PATH
    former = importlib.import_module(
        "dags.kalman_dags.stream_trigger"
    )  # named by tasks deferred before the move
    assert former.StreamTrigger is importlib.import_module(PATH.rpartition(".")[0]).StreamTrigger
    again = StreamTrigger(**json.loads(json.dumps(arguments)))

    async def first() -> Any:
        async for event in again.run():
            return event.payload

    assert asyncio.run(asyncio.wait_for(first(), 10)) == StreamEvent.GONE
    log.write(driving())
    asyncio.run(again.on_kill())  # somebody has cleared the task
    stop = log.read_stop_request(driving())
    assert stop is not None and "its task was cleared" in stop.reason


class Script:
    """A launcher of scripts that do `what`, and count how often it was asked."""

    def __init__(self, folder: Path, *what: str) -> None:
        self.folder, self.what, self.list_launches = folder, list(what), list[LaunchRecord]()

    def start(self, root: str, work: Work, about: str) -> LaunchRecord:
        what = self.what[min(len(self.list_launches), len(self.what) - 1)]
        command = [sys.executable, "-c", f"import sys, time\n{what}"]
        made = detach(root, work.name, command, os.environ, self.folder / "log", ROOT, about)
        self.list_launches.append(made)
        return made


@pytest.fixture
def clean(log: DriverLog) -> Iterator[None]:
    """Leave no script behind."""
    yield
    for launch in log.list_launches():
        if launch.pid is not None and read_start_time(launch.pid) == launch.started:
            with suppress(ProcessLookupError):  # it may end of itself at this moment
                os.kill(launch.pid, 9)


def operator(
    monkeypatch: pytest.MonkeyPatch, script: Script, give_up_after: int | None = None
) -> StreamForeverOperator:
    monkeypatch.setattr(stream_operator, "build_launcher", lambda: script)
    return StreamForeverOperator(task_id="stream", model="tiny", seconds=2.0, give_up_after=give_up_after)


def deferred(call: Any, *arguments: Any, **more: Any) -> tuple[StreamTrigger, dict[str, Any]]:
    """Return the trigger that a call defers to, and what it is resumed with."""
    with pytest.raises(TaskDeferred) as caught:
        call(*arguments, **more)
    assert isinstance(caught.value.trigger, StreamTrigger) and caught.value.method_name == "resume"
    return caught.value.trigger, dict(caught.value.kwargs or {})


CONTEXT: Any = {"ti": SimpleNamespace()}


def test_one_driver_is_started_and_then_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clean: None
) -> None:
    script = Script(tmp_path, "time.sleep(60)")
    made = operator(monkeypatch, script)
    for _ in range(3):  # a task that was killed, and tried again
        trigger, _ = deferred(made.execute, CONTEXT)
        assert trigger.due is None and trigger.event() is None
    assert len(script.list_launches) == 1
    os.kill(os.getpgid(script.list_launches[0].pid or 0), 9)  # what started it
    deferred(made.execute, CONTEXT)
    assert len(script.list_launches) == 1


def test_a_driver_that_fails_is_restarted_after_a_growing_pause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: DriverLog, clean: None
) -> None:
    script = Script(tmp_path, "print('error: the disk is full', flush=True); sys.exit(1)")
    made = operator(monkeypatch, script)
    trigger, kept = deferred(made.execute, CONTEXT)
    pauses = []
    for failure in range(1, stream_operator.MAX_FAILURES):
        watch = StreamTrigger(str(tmp_path), "tiny", kept["until"])
        wait_for(lambda watch=watch: watch.event() == StreamEvent.GONE)
        waits, kept = deferred(made.resume, CONTEXT, StreamEvent.GONE, **kept)
        assert kept["failures"] == failure and waits.due is not None
        pauses.append((datetime.fromisoformat(waits.due) - datetime.now(UTC)).total_seconds())
        trigger, kept = deferred(made.resume, CONTEXT, StreamEvent.DUE, **kept)
        assert trigger.due is None and len(script.list_launches) == failure + 1
    assert pauses == pytest.approx([5, 10, 20, 40, 80], abs=1)
    wait_for(lambda: trigger.event() == StreamEvent.GONE)
    with pytest.raises(
        AirflowException, match="6 drivers in a row have failed.* exit code 1: the disk is full"
    ):
        made.resume(CONTEXT, StreamEvent.GONE, **kept)


CRASH = "print('error: the checkpoint is damaged', flush=True); sys.exit(2)"


def crash(made: StreamForeverOperator, root: Path, context: Any) -> dict[str, Any]:
    """Run a task until its driver has crashed, and let it see that; return what it is resumed with."""
    trigger, kept = deferred(made.execute, context)
    wait_for(lambda: trigger.event() == StreamEvent.GONE)
    return deferred(made.resume, context, StreamEvent.GONE, **kept)[1]


def test_a_stream_that_keeps_crashing_is_given_up_until_somebody_resumes_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: DriverLog, clean: None
) -> None:
    script = Script(tmp_path, CRASH)
    # Crashes are counted over retries and runs.
    for run in ("first", "second"):
        crash(operator(monkeypatch, script, 3), tmp_path, {"run_id": run})
    made = operator(monkeypatch, script, 3)
    context: Any = {"run_id": "third"}
    trigger, kept = deferred(made.execute, context)
    wait_for(lambda: trigger.event() == StreamEvent.GONE)
    said = (
        "given up: 3 drivers in a row have crashed before a micro-batch was committed, the last: the driver ended with "
        "exit code 2: the checkpoint is damaged; fix the cause, then start it again by "
        "`kalman-pipeline resume --model tiny`"
    )
    with pytest.raises(AirflowFailException, match=re.escape(said)):
        made.resume(context, StreamEvent.GONE, **kept)
    # The next run starts nothing; when its watch is over it fails with the same words.
    waiting = operator(monkeypatch, script, 3)
    trigger, kept = deferred(waiting.execute, {"run_id": "fourth"})
    assert trigger.event() is None and len(script.list_launches) == 3
    with pytest.raises(AirflowFailException, match="3 drivers in a row"):
        waiting.resume({"run_id": "fourth"}, StreamEvent.WATCHED, **kept)  # pyright: ignore[reportArgumentType]
    # The run that gave up is cleared: the first crash after that is one of one.
    crash(made, tmp_path, context)
    assert log.hold() is None and len(script.list_launches) == 4
    counted = log.crashes()
    assert counted is not None and counted.count == 1


@pytest.mark.parametrize("way", ["resume", "clear"])
def test_a_run_that_waits_after_a_give_up_continues_once_resumed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: DriverLog, clean: None, way: str
) -> None:
    script = Script(tmp_path, CRASH, "time.sleep(60)")
    made = operator(monkeypatch, script, 1)
    trigger, kept = deferred(made.execute, {"run_id": "first"})
    wait_for(lambda: trigger.event() == StreamEvent.GONE)
    with pytest.raises(AirflowFailException, match="a driver has crashed before a micro-batch was committed"):
        made.resume({"run_id": "first"}, StreamEvent.GONE, **kept)  # pyright: ignore[reportArgumentType]
    trigger, kept = deferred(made.execute, {"run_id": "second"})
    assert trigger.event() is None
    if way == "resume":
        log.put_hold(None)
    else:
        asyncio.run(trigger.on_kill())
    assert trigger.event() == StreamEvent.DUE and log.crashes() is None
    deferred(made.resume, {"run_id": "second"}, StreamEvent.DUE, **kept)
    assert len(script.list_launches) == 2


def test_a_crash_after_a_committed_micro_batch_resets_the_count(log: DriverLog, tmp_path: Path) -> None:
    commits = tmp_path / "checkpoints" / "tiny-g0001" / "commits"
    crashes = CrashCounter(str(tmp_path), log)
    crashes.record_progress()
    assert [crashes.count("boom") for _ in range(2)] == [1, 2]  # without ever a lease
    log.write(driving(ended_at=NOW))
    crashes.record_progress()
    assert crashes.count("boom") == 1  # it had a lease: that is more than the one before had
    assert crashes.count("boom") == 2
    commits.mkdir(parents=True)
    (commits / "0").touch()
    (commits / ".0.crc").touch()
    assert [crashes.count("boom") for _ in range(2)] == [0, 1]
    assert crashes.count("boom", lived=3601.0) == 0
    # What follows the estimates has checkpoints of other names, one or two.
    log.write(driving(2, generation="monitor", began_at=datetime.now(UTC), rules={"queries": ["a", "b"]}))
    assert crashes.committed() == {"a": -1, "b": -1}


@pytest.mark.parametrize(
    ("what", "failures", "pause"),
    [
        ("sys.exit(0)", 0, None),  # it was stopped by SIGTERM: the next begins at once
        ("sys.exit(2)", 4, 40),
        ("sys.exit(3)", 3, 15),  # another driver has the stream
        ("import os; os.kill(os.getpid(), 9)", 4, 40),
    ],
    ids=["stopped", "refused", "taken", "killed"],
)
def test_what_follows_a_driver(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    clean: None,
    what: str,
    failures: int,
    pause: float | None,
) -> None:
    script = Script(tmp_path, what, "time.sleep(60)")
    made = operator(monkeypatch, script)
    trigger, kept = deferred(made.execute, CONTEXT)
    wait_for(lambda: trigger.event() == StreamEvent.GONE)
    trigger, kept = deferred(made.resume, CONTEXT, StreamEvent.GONE, 3, kept["until"])
    assert kept["failures"] == failures
    if pause is None:
        assert trigger.due is None and len(script.list_launches) == 2
    else:
        assert trigger.due is not None and len(script.list_launches) == 1
        left = (datetime.fromisoformat(trigger.due) - datetime.now(UTC)).total_seconds()
        assert left == pytest.approx(pause, abs=2)


@pytest.mark.parametrize(
    ("how", "failures"), [("failed", 3), (None, 3), ("stopped", 0), ("lost", 0), ("caught up", 0)]
)
def test_what_follows_a_driver_in_a_cluster(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    log: DriverLog,
    clean: None,
    how: str | None,
    failures: int,
) -> None:
    made = operator(monkeypatch, Script(tmp_path, "time.sleep(60)"))
    # Nobody saw its exit code.
    log.write(LaunchRecord("t", "cluster", NOW, about="{}"))
    owner = replace(driving().owner, host="elsewhere")
    then = NOW - timedelta(minutes=5)
    log.write(driving(owner=owner, launch="t", beat_at=then, ended_at=None if how is None else then, how=how))
    _, kept = deferred(made.resume, CONTEXT, StreamEvent.GONE, 2, (NOW + timedelta(hours=1)).isoformat())
    assert kept["failures"] == failures


def test_a_driver_that_was_stopped_while_it_started_has_not_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: DriverLog, clean: None
) -> None:
    script = Script(tmp_path, "time.sleep(60)")
    made = operator(monkeypatch, script)
    trigger, kept = deferred(made.execute, CONTEXT)
    made.on_kill()
    wait_for(lambda: trigger.event() == StreamEvent.GONE)
    _, kept = deferred(made.resume, CONTEXT, StreamEvent.GONE, 2, kept["until"])
    assert kept["failures"] == 0 and len(script.list_launches) == 2


def test_a_hold_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: DriverLog, clean: None
) -> None:
    script = Script(tmp_path, "time.sleep(60)")
    made = operator(monkeypatch, script)
    log.put_hold(Hold("an upgrade", NOW))
    waits, kept = deferred(made.execute, CONTEXT)
    assert waits.event() is None and not script.list_launches
    log.put_hold(None)
    assert waits.event() == StreamEvent.DUE
    deferred(made.resume, CONTEXT, StreamEvent.DUE, **kept)
    assert len(script.list_launches) == 1


@pytest.mark.parametrize("token", ["a1b2c3", None], ids=["ours", "a stranger"])
def test_a_driver_that_hangs_is_killed_if_it_carries_its_launch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: DriverLog, clean: None, token: str | None
) -> None:
    environment = {**os.environ, **({LAUNCH_VARIABLE: token} if token else {})}
    hanging = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment)
    at = read_start_time(hanging.pid) or 0.0
    owner = DriverIdentity(read_machine_name(), hanging.pid, at, hanging.pid, at, "t")
    log.write(LaunchRecord("a1b2c3", read_machine_name(), NOW - timedelta(minutes=9)))
    commands = [identify_command(hanging.pid) or ""] * 2
    before = NOW - timedelta(minutes=5)
    log.write(driving(owner=owner, beat_at=before, launch="a1b2c3", commands=commands))
    script = Script(tmp_path, "time.sleep(60)")
    made = operator(monkeypatch, script)
    try:
        if token:
            deferred(made.execute, CONTEXT)
            assert hanging.wait(10) == -9
        else:
            with pytest.raises(AirflowException, match="nothing proves that Airflow started it: kill it"):
                made.execute(CONTEXT)
            assert hanging.poll() is None
        assert len(script.list_launches) == (1 if token else 0)
    finally:
        hanging.kill()
        hanging.wait()


def test_only_the_log_of_a_launch_is_shown(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    log: DriverLog,
    clean: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KALMAN_LOGS", str(tmp_path / "logs"))
    (tmp_path / "logs" / "tiny").mkdir(parents=True)
    (tmp_path / "logs" / "tiny" / "own.log").write_text("the end of the driver")
    (tmp_path / "secret").write_text("a secret")
    (tmp_path / "logs" / "tiny" / "link.log").symlink_to(tmp_path / "secret")
    made = operator(monkeypatch, Script(tmp_path, "time.sleep(60)"))
    for name, shown in (
        (str(tmp_path / "logs" / "tiny" / "own.log"), "the end of the driver"),
        (str(tmp_path / "logs" / "tiny" / "link.log"), "not shown"),
        ("/proc/self/environ", "not shown"),
        (str(tmp_path / "secret"), "not shown"),
    ):
        log.write(LaunchRecord("t", read_machine_name(), NOW, log=name, exit_code=1, ended_at=NOW))
        deferred(made.resume, CONTEXT, StreamEvent.GONE, 0, (NOW + timedelta(hours=1)).isoformat())
        said = capsys.readouterr().out
        assert shown in said and "a secret" not in said and "PATH=" not in said


def test_the_watch_of_a_run_ends_and_the_driver_continues(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: DriverLog, clean: None
) -> None:
    made = operator(monkeypatch, Script(tmp_path, "time.sleep(60)"))
    _, kept = deferred(made.execute, CONTEXT)
    assert made.resume(CONTEXT, StreamEvent.WATCHED, **kept) is None
    assert read_driver_status(log).driven


def test_only_a_driver_is_asked_once(log: DriverLog) -> None:
    request_stop(log, read_driver_status(log), "nobody is there")
    assert log.files.names("") == []
