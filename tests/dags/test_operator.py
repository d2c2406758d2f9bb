"""The operator: its command, what exit codes mean, how it is killed; Python and spark-submit are a script of ours."""

from __future__ import annotations

import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

from dags.upgrade import REFUSALS
from jobs.specs.migration import Upgrade
from jobs.upgrades.decision import decide, format_refusal
from jobs.upgrades.statistics import Gain
from kalman_dags import submit
from kalman_dags.operator import KalmanOperator

pytestmark = pytest.mark.airflow

Operator = Callable[..., KalmanOperator]


def context(try_number: int = 1, max_tries: int = 3) -> Any:
    """Make what a task sees: which try this is. `max_tries` counts retries, so the last try is one more."""
    return {"ti": SimpleNamespace(try_number=try_number, max_tries=max_tries)}


@pytest.fixture
def operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Operator:
    """Make an operator whose program writes down how it was called and ends with a given code."""
    monkeypatch.setattr("kalman_dags.operator.list_jars", lambda: ["/jars/a.jar", "/jars/b.jar"])
    monkeypatch.setenv("KALMAN_WAREHOUSE", str(tmp_path / "warehouse"))

    def make(code: int = 0, says: str = "", body: str = "", **arguments: Any) -> KalmanOperator:
        submit = tmp_path / "spark-submit"
        submit.write_text(
            f"""#!{sys.executable}
import json, os, pathlib, subprocess, sys
pathlib.Path({str(tmp_path / "called.json")!r}).write_text(json.dumps([sys.argv[1:], dict(os.environ)]))
print({says!r}, flush=True)
{body}
sys.exit({code})
"""
        )
        submit.chmod(0o755)
        options = {"--model": "tiny", "--adopt": "", "--to-version": None, "--trigger": "5"}
        made = KalmanOperator(task_id="go", **{"verb": "stream", "options": options, **arguments})
        made._spark_binary = str(submit)
        made.env_vars["PYSPARK_DRIVER_PYTHON"] = str(submit)
        return made

    return make


def called(tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    """Return arguments and environment that the program was called with."""
    words, environment = json.loads((tmp_path / "called.json").read_text())
    return words, environment


STREAM = str(Path(__file__).resolve().parents[2] / "jobs" / "stream.py")


def connect_to_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = {"conn_type": "spark", "host": "spark://master", "port": 7077}
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(connection))


def test_with_local_spark_the_verb_runs_in_python_which_starts_java_when_it_needs_spark(
    operator: Operator, tmp_path: Path
) -> None:
    operator(conf={"spark.driver.memory": "3g"}).execute(context())
    words, environment = called(tmp_path)
    # Options that are empty are left out.
    assert words == [STREAM, "--model=tiny", "--trigger=5"]
    given = shlex.split(environment["PYSPARK_SUBMIT_ARGS"])
    assert given[:2] == ["--master", "local[2,4]"] and given[-1] == "pyspark-shell"
    # What the driver sets by itself is not there, since it would take the place of the driver's choice.
    assert "spark.driver.memory=3g" in given and not any("extraJavaOptions" in word for word in given)
    assert (environment["KALMAN_MASTER"], environment["PYTHONUNBUFFERED"]) == ("local[2,4]", "YES")
    assert environment["PYSPARK_PYTHON"] == sys.executable
    assert environment["KALMAN_WAREHOUSE"] == str(tmp_path / "warehouse")


def test_the_command_for_a_cluster(
    operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect_to_cluster(monkeypatch)
    operator().execute(context())
    words, environment = called(tmp_path)
    assert words[:2] == ["--master", "spark://master:7077"]
    assert words[words.index("--jars") + 1] == "/jars/a.jar,/jars/b.jar"
    assert "spark.sql.session.timeZone=UTC" in words
    assert words[words.index(STREAM) + 1 :] == ["--model=tiny", "--trigger=5"]
    assert (Path(environment["SPARK_HOME"]) / "bin" / "spark-submit").exists()


def test_a_driver_has_none_of_airflow_s_secrets(
    operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "AIRFLOW__CORE__FERNET_KEY",
        "AIRFLOW_VAR_MINE",
        "AIRFLOW_CONN_OTHER",
        "_AIRFLOW_PROCESS_CONTEXT",
    ):
        monkeypatch.setenv(name, "postgresql://airflow:c4n4ry@host")
    monkeypatch.setenv("AIRFLOW_CTX_DAG_ID", "kept")
    operator().execute(context())
    _, environment = called(tmp_path)
    assert not [name for name, value in environment.items() if "c4n4ry" in value]
    assert not any(value for name, value in environment.items() if name.startswith("AIRFLOW__"))
    assert environment["AIRFLOW_CTX_DAG_ID"] == "kept"


@pytest.mark.parametrize("given", ["file:///ware%20house/", "file:/ware%20house", "/ware house"])
def test_the_warehouse_is_spelled_as_its_verbs_spell_it(
    operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("KALMAN_WAREHOUSE", given)
    operator().execute(context())
    assert called(tmp_path)[1]["KALMAN_WAREHOUSE"] == "/ware house" == submit.find_warehouse_root()


def test_a_model_that_speaks_to_kafka_has_its_connector(
    operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect_to_cluster(monkeypatch)
    monkeypatch.setattr("kalman_dags.operator.fetch_optional_jars", lambda part: [f"/jars/{part}/c.jar"])
    operator(kafka=True).execute(context())
    words, _ = called(tmp_path)
    assert words[words.index("--jars") + 1] == "/jars/a.jar,/jars/b.jar,/jars/kafka/c.jar"


def test_without_a_connection_spark_runs_here(
    operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AIRFLOW_CONN_SPARK_DEFAULT")
    monkeypatch.setenv("KALMAN_MASTER", "local[3]")
    operator().execute(context())
    assert called(tmp_path)[1]["KALMAN_MASTER"] == "local[3]"


def test_the_drivers_lines_are_in_the_log(operator: Operator, capsys: pytest.CaptureFixture[str]) -> None:
    operator(says="estimated 12 rows (3,000 rows/s)").execute(context())
    assert "estimated 12 rows (3,000 rows/s)" in capsys.readouterr().out


def test_the_wanted_lines_are_returned(operator: Operator) -> None:
    says = "12 rows\nanswer: better\nWARN of Spark\nverdict: good"
    assert operator(says=says).execute(context()) is None
    assert operator(says=says, returned=("answer: ", "verdict: ")).execute(context()) == {
        "lines": ["answer: better", "verdict: good"],
        "data": {},
    }


REPORTS = """
report = {"lines": ["resumed from its checkpoint", "estimated 12 rows", "3.1 s"], "data": {"rows": 12, "seconds": 3.1}}
pathlib.Path(os.environ["KALMAN_REPORT_FILE"]).write_text(json.dumps(report))
"""


def test_the_last_line_says_how_it_ended(operator: Operator, capsys: pytest.CaptureFixture[str]) -> None:
    made = operator(says="WARNING: Using incubator modules: jdk.incubator.vector\n\nmore", body=REPORTS)
    made.execute(context())
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert "go: estimated 12 rows" in lines[-1]
    # Of Java's words about itself nobody can make anything.
    assert any("more" in line for line in lines) and not any("incubator" in line for line in lines)
    assert made.outcome.facts == {"rows": 12}


def test_the_report_is_returned(operator: Operator) -> None:
    found = operator(body=REPORTS, returned=("answer: ",)).execute(context())
    assert found is not None and found["data"] == {"rows": 12, "seconds": 3.1}


def test_a_task_has_a_button_for_the_page_that_it_wrote(operator: Operator) -> None:
    wrote = operator(body=REPORTS.replace('"rows": 12', '"report": "/w/reports/tiny/tiny-g0002.html"'))
    wrote.execute(context())
    (link,) = wrote.operator_extra_links
    assert link.name == "Report"
    assert link.get_link(wrote, ti_key=None) == "/kalman/reports/tiny/tiny-g0002.html"  # pyright: ignore
    assert link.get_link(operator(), ti_key=None) == ""  # pyright: ignore


def test_events_carry_the_report_and_the_interval(operator: Operator) -> None:
    from airflow.sdk import Asset
    from airflow.sdk.execution_time.context import OutletEventAccessors

    plain, by_interval = Asset("a", "kalman://a"), Asset("b", "kalman://a/by-interval")
    start = datetime(2013, 1, 1, tzinfo=UTC)
    for end, partitions in ((start + timedelta(days=1), {"2013-01-01T00:00:00Z"}), (start, set())):
        events = OutletEventAccessors()
        run = SimpleNamespace(data_interval_start=start, data_interval_end=end)
        made = operator(body=REPORTS, outlets=[plain, by_interval])
        seen: Any = {**context(), "outlet_events": events, "dag_run": run}
        made.execute(seen)
        assert events[plain].extra == events[by_interval].extra == {"rows": 12}
        # What waits for the asset itself would not be woken by an event of a partition.
        assert (events[plain].partition_keys, events[by_interval].partition_keys) == (set(), partitions)


def test_a_refusal_is_final(operator: Operator) -> None:
    says = "error: tiny-g0002 was not promoted; it predicts worse. It stays in shadow"
    refusals = {" was not promoted; ": "Tick Force"}
    with pytest.raises(AirflowFailException, match=r"^tiny-g0002 was not promoted; .* shadow\. Tick Force$"):
        operator(1, says, refusals=refusals).execute(context())
    with pytest.raises(AirflowException) as caught:
        operator(1, "error: the disk is full", refusals=refusals).execute(context())
    assert type(caught.value) is AirflowException
    # The sentence alone: what the provider raised before it would repeat the log.
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("gain", "reason"),
    [
        (Gain(0, 0, None, None, None, None, None, 10), "there is nothing to compare"),
        (Gain(900, 30, -0.5, -0.6, -0.4, 1.0, 20.0, 0), "it predicts worse"),
        (Gain(900, 30, 0.1, -0.1, 0.3, 1.0, 20.0, 0), "not enough to tell"),
    ],
)
def test_a_refused_promotion_says_what_to_do_in_airflow(operator: Operator, gain: Gain, reason: str) -> None:
    """The sentence is the verb's own, so that a change of its words does not lose the remedy."""
    counts = {"rows": gain.rows, "keys": gain.keys, "keys_worse": 0, "flagged": {"old": 0, "new": 0}}
    outside = dict.fromkeys(("nis_outside", "bias_outside"), {"old": 0.0, "new": 0.0})
    found = decide({"gain": gain._asdict(), **counts, **outside}, Upgrade())
    says = f"error: {format_refusal(found, 'tiny-g0002', 'tiny', 'page.html')}"
    with pytest.raises(
        AirflowFailException, match=rf"^tiny-g0002 was not promoted; {reason}.*\. In Airflow: "
    ):
        operator(1, says, refusals=REFUSALS).execute(context())


def test_what_is_too_early_is_skipped(operator: Operator) -> None:
    says = "error: model tiny has no snapshot that a stream can start from: run pretrain"
    with pytest.raises(AirflowSkipException, match="^too early: model tiny has no snapshot"):
        operator(2, says, too_early=(" has no snapshot that",)).execute(context())


def test_a_driver_that_runs_already_may_do_the_work(operator: Operator) -> None:
    assert operator(3, "error: process 17 drives it", wait_for_other=True).execute(context()) is None


def test_a_form_without_what_it_needs_is_refused_before_spark(operator: Operator, tmp_path: Path) -> None:
    with pytest.raises(AirflowFailException, match="fill in the form's field Input"):
        operator(needs=("", "there is nothing to land: fill in the form's field Input")).execute(context())
    assert not (tmp_path / "called.json").exists()


def test_a_failed_run_is_retried(operator: Operator) -> None:
    with pytest.raises(AirflowException, match="stream ended with exit code 1: the disk is full") as caught:
        operator(1, "error: the disk is full").execute(context())
    assert not isinstance(caught.value, AirflowFailException | AirflowSkipException)


def test_refused_input_is_not(operator: Operator) -> None:
    with pytest.raises(AirflowFailException, match="stream refused its input: there is no model 'tiny'"):
        operator(2, "error: there is no model 'tiny'").execute(context())


def test_jars_that_were_not_fetched_are_not(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    from jobs.core.errors import UserError

    def absent() -> list[str]:
        raise UserError("Spark's jars are not in /jars: run `make setup`")

    connect_to_cluster(monkeypatch)
    made = operator()
    monkeypatch.setattr("kalman_dags.operator.list_jars", absent)
    with pytest.raises(AirflowFailException, match="run `make setup`"):
        made.execute(context())


@pytest.mark.parametrize(
    ("try_number", "ends"),
    [(1, AirflowSkipException), (2, AirflowException), (3, AirflowException), (4, AirflowSkipException)],
)
def test_another_driver(operator: Operator, try_number: int, ends: type[Exception]) -> None:
    # On a retry the other driver may be the one that this task has lost, so it is waited for.
    with pytest.raises(AirflowException) as caught:
        operator(3, "error: process 17 drives it").execute(context(try_number))
    assert type(caught.value) is ends
    assert "process 17 drives it" in str(caught.value)


DRIVER = """
import os, pathlib, signal, sys, time
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
pathlib.Path("{ready}").write_text(str(os.getpid()))
while not stopped:
    time.sleep(0.05)
time.sleep(0.5)  # the micro-batch
pathlib.Path("{finished}").touch()
"""


@pytest.mark.parametrize("finish", [True, False], ids=["a stream finishes", "a batch is killed"])
def test_a_killed_task(operator: Operator, tmp_path: Path, finish: bool) -> None:
    ready, finished, driver = tmp_path / "ready", tmp_path / "finished", tmp_path / "driver.py"
    driver.write_text(DRIVER.format(ready=ready, finished=finished))
    made = operator(body=f"subprocess.run([sys.executable, {str(driver)!r}])", finish_on_kill=finish)
    made.application = str(driver)
    ended: list[BaseException | None] = []

    def work() -> None:
        try:
            made.execute(context())
            ended.append(None)
        except AirflowException as error:
            ended.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    wait_for(ready.exists)
    pid = int(ready.read_text())
    # The supervisor signals the task's process group, so a stream's driver must be in another.
    assert (os.getpgid(pid) == os.getpgid(0)) is not finish
    made.on_kill()
    if not finish:
        os.kill(pid, 9)  # here the supervisor's signal to the group ends it
    thread.join(20)
    assert not thread.is_alive()
    assert finished.exists() is finish
    assert (ended == [None]) is finish


def wait_for(done: Callable[[], object], seconds: float = 20) -> None:
    """Wait until `done` says so."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
