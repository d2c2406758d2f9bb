"""The command line: options anywhere, help at once, every error one clear line and the right exit code."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from typer.testing import CliRunner, Result

from demo.ports import HOST, free_ports
from jobs import cli, resume, status, stop
from jobs.core import errors
from jobs.core.command import Actions, Command, hoist_global_options, name_module
from jobs.core.errors import ALREADY_RUNNING, RUN_FAILED, UserError
from jobs.core.report import Report, convert_to_json, format_count
from jobs.core.settings import DEFAULT_MASTER, Settings
from tests.support.object_store import environment

ROOT = Path(__file__).resolve().parents[3]
NILE = "river,at,volume\nnile,1871-01-01,1120\nnile,1872-01-01,1160\n"


def call(*args: str) -> Result:
    return CliRunner().invoke(cli.app, list(args))


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Settings, dict[str, Any]]]:
    """Put recorders in the place of the verbs' functions; their options stay."""
    calls: list[tuple[str, Settings, dict[str, Any]]] = []

    def recorder(name: str) -> Callable[..., Report]:
        def run(settings: Settings, **options: Any) -> Report:
            calls.append((name, settings, options))
            return Report(lines=[f"did {name}"], data={"verb": name})

        return run

    for name, one in commands().items():
        monkeypatch.setattr(one, "function", recorder(name))
    return calls


def commands() -> dict[str, Command[...]]:
    """Return every command by its words: `status`, `quarantine list`."""
    found: dict[str, Command[...]] = {}
    for name, one in cli.VERBS.items():
        if isinstance(one, Actions):
            found |= {f"{name} {action}": each for action, each in one.actions.items()}
        else:
            found[name] = one
    return found


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(settings: Settings, **options: Any) -> Report:
        raise error

    monkeypatch.setattr(status.run, "function", run)


def test_verbs_get_their_options(verb: list[tuple[str, Settings, dict[str, Any]]]) -> None:
    assert call("ingest", "--model", "m", "--input", "a", "--input", "b*", "--history").exit_code == 0
    assert call("pretrain", "--model", "m", "--to-version", "3", "--learn-from", "2013-01-01").exit_code == 0
    assert (
        call("estimate", "--model", "m", "--from", "2013-01-01", "--smooth", "--output", "t").exit_code == 0
    )
    assert (
        call("stream", "--model", "m", "--trigger", "5", "--metrics-port", "9000", "--profile").exit_code == 0
    )
    assert call("export", "--model", "m", "--batch", "4").exit_code == 0
    states = ("--input", "s.csv", "--to-version", "3", "--dry-run")
    assert call("import", "--model", "m", *states).exit_code == 0
    assert call("migrate", "--model", "m", "--snapshot", "s1", "--to", "2", "--dry-run").exit_code == 0
    assert call("upgrade", "--model", "m", "--mode", "retrain", "--no-promote", "--needed").exit_code == 0
    assert call("promote", "--model", "m", "--generation", "g2", "--behind", "--force").exit_code == 0
    assert call("rollback", "--model", "m", "--last-state", "--dry-run").exit_code == 0
    assert call("retire", "--model", "m", "--generation", "g2").exit_code == 0
    assert call("verify", "--model", "m", "--share", "5%", "--key", "a", "--key", "b").exit_code == 0
    assert call("maintain", "--model", "m", "--dry-run", "--estimates").exit_code == 0
    assert call("report", "--model", "m", "--generation", "g2", "--against", "g1").exit_code == 0
    rows = ("--model", "m", "--input", "a.csv", "--output", "b.csv")
    assert call("filter", *rows, "--snapshot", "s1").exit_code == 0
    assert call("forecast", *rows, "--steps", "2", "--future", "f.csv", "--snapshot", "none").exit_code == 0
    drawn = ("--output", "a.html", "--input", "out.csv", "--measured", "in.csv", "--history", "--keys", "2")
    assert call("plot", "--model", "m", *drawn, "--key", "a", "--key", "b").exit_code == 0
    assert call("skill", "--model", "m", "--snapshot", "s1").exit_code == 0
    assert call("status", "--alarm-after", "10m").exit_code == 0
    assert call("stop", "--model", "m", "--skill", "--hold", "30min").exit_code == 0
    assert call("resume", "--model", "m", "--monitor").exit_code == 0
    assert call("resume", "--model", "m").exit_code == 0
    assert call("quarantine", "list", "--model", "m", "--reason", "late", "--since", "2d").exit_code == 0
    assert call("quarantine", "replay", "--model", "m", "--id", "a", "--edited", "f").exit_code == 0
    assert call("quarantine", "discard", "--model", "m", "--all").exit_code == 0
    assert (
        call("init", "--input", "d", "--key", "k", "--measurement", "y", "--quick", "--force").exit_code == 0
    )
    assert call("compare", "--model", "a,b", "--model", "c", "--keys", "9").exit_code == 0
    assert call("doctor").exit_code == 0
    one = {"model": "m"}
    files = {"input": "a.csv", "output": "b.csv"}
    ahead = {"steps": 2, "until": None, "every": None, "probability": 0.95}
    stream = {
        "adopt": None,
        "allow_missing_estimates": False,
        "allow_missing_rows": False,
        "generation": None,
    }
    stream |= {"metrics_port": None, "metrics_file": None, "metrics_host": "127.0.0.1"}
    assert [(name, options) for name, _, options in verb] == [
        (
            "ingest",
            {
                **one,
                "input": ["a", "b*"],
                "trigger": "available-now",
                "history": True,
                "accept_loss": False,
                "changed": "refuse",
            },
        ),
        (
            "pretrain",
            {
                **one,
                "to_version": 3,
                "as_of": None,
                "learn_from": "2013-01-01",
                "learn_to": None,
                "history": False,
                "estimates": False,
                "profile": False,
            },
        ),
        (
            "estimate",
            {
                **one,
                "since": "2013-01-01",
                "to": None,
                "snapshot": None,
                "smooth": True,
                "input": None,
                "output": "t",
                "to_version": None,
                "profile": False,
            },
        ),
        ("stream", {**stream, "model": ["m"], "trigger": "5", "metrics_port": 9000, "profile": True}),
        (
            "export",
            {**one, "generation": None, "batch": 4, "needed": False, "profile": False, "monitor": False},
        ),
        ("import", {**one, "input": "s.csv", "to_version": 3, "dry_run": True, "profile": False}),
        ("migrate", {**one, "snapshot": "s1", "to": 2, "dry_run": True, "profile": False}),
        (
            "upgrade",
            {
                **one,
                "mode": "retrain",
                "dry_run": False,
                "promote": False,
                "lose_state": False,
                "needed": True,
                "partitions": None,
                "catch_up": False,
                "drain": False,
                "force": False,
            },
        ),
        ("promote", {**one, "generation": "g2", "behind": True, "force": True}),
        ("rollback", {**one, "to": None, "last_state": True, "dry_run": True}),
        ("retire", {**one, "generation": "g2"}),
        (
            "verify",
            {
                **one,
                "share": "5%",
                "keys": ["a", "b"],
                "seed": None,
                "since": None,
                "tolerance": 0.0,
                "run_id": None,
                "metrics_file": None,
                "chunk_rows": 5_000_000,
            },
        ),
        ("maintain", {**one, "dry_run": True, "estimates": True}),
        (
            "report",
            {
                **one,
                "key": None,
                "compare": False,
                "generation": "g2",
                "against": "g1",
                "snapshot": None,
                "history": False,
            },
        ),
        ("filter", {**one, **files, "smooth": False, "inputs": None, "snapshot": "s1"}),
        (
            "forecast",
            {
                **one,
                **files,
                **ahead,
                "future": "f.csv",
                "inputs": None,
                "snapshot": "none",
                "all_columns": False,
                "key": None,
                "run": None,
            },
        ),
        (
            "plot",
            {
                **one,
                "output": "a.html",
                "input": "out.csv",
                "measured": "in.csv",
                "history": True,
                "key": ["a", "b"],
                "keys": 2,
                "quantity": None,
                "rows": None,
            },
        ),
        ("skill", {**one, "trigger": "available-now", "snapshot": "s1", "history": False}),
        ("status", {"model": None, "watch": False, "every": 5.0, "alarm_after": "10m"}),
        (
            "stop",
            {
                **one,
                "hold": "30min",
                "restart": False,
                "wait": "10min",
                "needed": False,
                "monitor": False,
                "skill": True,
            },
        ),
        ("resume", {**one, "monitor": True, "skill": False}),
        ("resume", {**one, "monitor": False, "skill": False}),
        ("quarantine list", {**one, "reason": "late", "since": "2d"}),
        ("quarantine replay", {**one, "reason": None, "since": None, "id": ["a"], "edited": "f"}),
        ("quarantine discard", {**one, "reason": None, "since": None, "id": None, "all": True}),
        (
            "init",
            {
                "input": "d",
                "name": None,
                "output": None,
                "force": True,
                "time": None,
                "time_format": None,
                "time_zone": "UTC",
                "key": ["k"],
                "key_from_name": None,
                "no_key": False,
                "measurement": ["y"],
                "structure": None,
                "keys": 32,
                "rows": 400,
                "quick": True,
                "picture": None,
                "no_picture": False,
            },
        ),
        ("compare", {"model": ["a,b", "c"], "input": None, "keys": 9, "rows": 1000}),
        ("doctor", {}),
    ]


def test_every_query_of_a_model_is_stopped_and_resumed_by_name(tmp_path: Path) -> None:
    settings = Settings.load(warehouse=str(tmp_path), models=ROOT / "models")
    assert resume.run(settings, "nile", skill=True).lines == ["the skill of nile was not held"]
    with pytest.raises(UserError, match="--monitor and --skill name two queries: give one of them"):
        stop.run(settings, "nile", monitor=True, skill=True)


@pytest.mark.parametrize(
    "args",
    [
        ["--json", "--warehouse", "/w", "--master=local[1]", "status", "--model", "m"],
        ["status", "--model", "m", "--warehouse=/w", "--json", "--master", "local[1]"],
        ["--warehouse", "/w", "status", "--json", "--model", "m", "--master", "local[1]"],
    ],
)
def test_global_options_stand_before_or_after_the_verb(
    verb: list[tuple[str, Settings, dict[str, Any]]], args: list[str]
) -> None:
    result = call(*args)
    _, settings, given = verb[0]
    assert (settings.warehouse, settings.master, settings.json) == ("/w", "local[1]", True)
    assert given["model"] == "m"
    assert json.loads(result.stdout) == {"verb": "status"}


@pytest.mark.parametrize(
    ("args", "hoisted"),
    [
        (["status", "--warehouse=/a=b"], ["--warehouse=/a=b", "status"]),
        (["status", "-q", "--model=--json"], ["-q", "status", "--model=--json"]),
        (["status", "--master", "--json"], ["--master", "--json", "status"]),
        (["status", "--models"], ["--models", "status"]),
        (
            ["status", "--debug", "--", "--quiet", "--master", "x"],
            ["--debug", "status", "--", "--quiet", "--master", "x"],
        ),
    ],
)
def test_a_global_option_takes_its_whole_value_along(args: list[str], hoisted: list[str]) -> None:
    assert hoist_global_options(args) == hoisted


def test_settings_come_from_flags_then_environment_then_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WAREHOUSE", "MODELS", "MASTER"):
        monkeypatch.delenv(f"KALMAN_{name}", raising=False)
    own = Settings.load()
    assert (own.warehouse, own.models) == (str(Path.cwd() / "warehouse"), Path.cwd() / "models")
    assert own.master == DEFAULT_MASTER == "local[*,4]" and not own.json
    monkeypatch.setenv("KALMAN_WAREHOUSE", "gs://bucket/dir/")
    monkeypatch.setenv("KALMAN_MODELS", "/m")
    assert Settings.load().warehouse == "gs://bucket/dir" and Settings.load().models == Path("/m")
    assert Settings.load(models="/n").models == Path("/n")


def test_a_warehouse_that_is_not_understood_is_refused_before_anything_else(run_cli: Any) -> None:
    done = run_cli("--warehouse", "s3://bucket/dir", "status")
    assert (done.code, done.stdout) == (2, "")
    assert (
        done.stderr
        == "error: a warehouse in S3 is written s3a://bucket/folder, and this one is s3://bucket/dir\n"
    )


def test_a_store_that_is_not_there_is_one_line(run_cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(f"http://{HOST}:{free_ports(1)[0]}").items():
        monkeypatch.setenv(name, value)
    done = run_cli("--warehouse", "s3a://bucket/dir", "status")
    assert (done.code, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert "the store did not do it" in done.stderr and "check AWS_ENDPOINT_URL" in done.stderr


VERBS_OF_A_MODEL = ("report", "plot", "status", "stop")


@pytest.mark.parametrize(
    ("model", "verbs"),
    [
        *((name, VERBS_OF_A_MODEL) for name in ("\udcff", "../x", "X", "a" * 1600, "a\x1b[31mb")),
        ("a" * 5000, ("stop",)),
    ],
)
def test_a_name_that_no_model_has_is_one_printable_line(
    tmp_path: Path, model: str, verbs: tuple[str, ...]
) -> None:
    """Announced, looked for and refused: what is printed has neither control characters nor the whole of it."""
    for verb in verbs:
        done = call(f"--models={tmp_path}", f"--warehouse={tmp_path / 'w'}", verb, "--model", model)
        lines = done.stderr.splitlines()
        assert done.exit_code == 2 and lines[-1].startswith("error: "), (verb, done.stderr)
        assert all(line.isprintable() and len(line) <= 1500 for line in lines)
        assert "traceback" not in done.stderr


def test_a_warehouse_where_commits_are_not_safe_is_refused(run_cli: Any) -> None:
    done = run_cli("--warehouse", "wasb://bucket/dir", "status")
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: a warehouse cannot be at wasb://bucket/dir: use a folder")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["filtr"], "error: no such command 'filtr'"),
        (["status", "--modle", "m"], "error: no such option: --modle"),
        (["filter", "--model", "m"], "error: missing option '--input'"),
        (["status", "--model"], "error: option '--model' requires an argument"),
        (["--warehouse"], "error: option '--warehouse' requires an argument"),
        (["pretrain", "--model", "m", "--to-version", "x"], "error: invalid value for '--to-version'"),
        (["pretrain", "--model", "m", "--to-version", "-1"], "error: invalid value for '--to-version'"),
        (["status", "extra"], "error: got unexpected extra argument"),
    ],
)
def test_a_mistyped_command_is_one_line(
    verb: list[tuple[str, Settings, dict[str, Any]]], args: list[str], said: str
) -> None:
    result = call(*args)
    assert result.exit_code == 2 and not verb and not result.stdout
    assert result.stderr.startswith(said) and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("there is no table"), 2, "error: there is no table\n"),
        (UserError("one\ntwo"), 2, "error: one\nerror: two\n"),
        (UserError("another driver runs", ALREADY_RUNNING), 3, "error: another driver runs\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
    ],
)
def test_errors_of_a_verb(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    failing(monkeypatch, error)
    result = call("status")
    assert (result.exit_code, result.stderr, result.stdout) == (code, said, "")


def test_a_models_error_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    import kalman

    failing(monkeypatch, kalman.ModelError("process.Q", "is missing", "add it"))
    result = call("status")
    assert (result.exit_code, result.stderr) == (2, "error: process.Q: is missing; add it\n")


def test_an_unexpected_error_is_one_line_and_its_traceback_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(errors.tempfile, "tempdir", str(tmp_path))
    failing(monkeypatch, ZeroDivisionError("division\nby zero"))
    result = call("status")
    (log,) = tmp_path.iterdir()
    expected = f"error: ZeroDivisionError: division (traceback in {log}; --debug shows it)\n"
    assert (result.exit_code, result.stderr) == (RUN_FAILED, expected)
    assert "Traceback (most recent call last)" in log.read_text() and "by zero" in log.read_text()
    assert "Traceback (most recent call last)" in call("status", "--debug").stderr


@pytest.mark.parametrize(
    ("ended", "code", "said"),
    [(KeyboardInterrupt, 130, "interrupted"), (errors.Terminated, 143, "stopped by SIGTERM")],
)
def test_a_signal_is_told_whatever_fails_while_the_command_unwinds(
    ended: type[BaseException], code: int, said: str
) -> None:
    def broken() -> None:
        try:
            try:
                raise ended
            finally:
                raise KeyError("p")  # as Py4J does whose answer was cut off
        except KeyError as error:
            raise RuntimeError("no label") from error

    out = io.StringIO()
    with pytest.raises(RuntimeError) as caught:
        broken()
    assert (errors.show(caught.value, stream=out), out.getvalue()) == (code, f"error: {said}\n")


def test_a_report_is_lines_or_one_json_document(verb: list[tuple[str, Settings, dict[str, Any]]]) -> None:
    assert call("status").stdout == "did status\n"
    assert json.loads(call("status", "--json").stdout) == {"verb": "status"}


def test_what_is_counted_is_said_in_the_right_number() -> None:
    assert [format_count(n, "row") for n in (0, 1, 2000)] == ["0 rows", "1 row", "2,000 rows"]
    assert format_count(2, "micro-batch", "es") == "2 micro-batches"


def test_json_says_what_it_cannot_say_as_null_or_text() -> None:
    import numpy as np

    data = {
        "a": float("nan"),
        "b": np.float64(1.5),
        "c": np.arange(2),
        "d": Path("x"),
        5: (1, None),
        "e": True,
    }
    assert convert_to_json(data) == {"a": None, "b": 1.5, "c": [0, 1], "d": "x", "5": [1, None], "e": True}


def test_filter_and_schema_in_process(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text(NILE)
    out = tmp_path / "out.csv"
    models = ("--models", str(ROOT / "models"))
    result = call(
        "filter", "--model", "nile", "--input", str(tmp_path / "in.csv"), "--output", str(out), *models
    )
    assert result.exit_code == 0 and result.stdout.startswith("nile v1: 2 rows of 1 key in "), result.stderr
    result = call(*models, "filter", "--model", "nil", "--input", "x.csv", "--output", str(out))
    assert result.exit_code == 2 and "there is no model 'nil'; did you mean 'nile'?" in result.stderr
    assert json.loads(call("schema").stdout) == json.loads(call("--json", "schema").stdout)


# As programs


def program(*args: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_help_is_fast_and_loads_no_numerics() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); from jobs.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = ('numpy', 'pyarrow', 'pyspark', 'kalman', 'pydantic')\n"
        "loaded = [name for name in heavy if name in sys.modules]\n"
        "print(loaded, time.process_time(), file=sys.stderr)"
    )
    done = program("-c", code)
    loaded, seconds = done.stderr.strip().rsplit(" ", 1)
    assert loaded == "[]" and "pretrain" in done.stdout
    assert float(seconds) < 1.0  # processor time, with room for a slow machine; 0.3 s here


@pytest.mark.slow
def test_a_verb_is_a_module_and_a_script(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text(NILE)
    args = ["--model", "nile", "--input", str(tmp_path / "in.csv"), "--json"]
    done = program("-m", "jobs.filter", *args, "--output", str(tmp_path / "a.csv"))
    assert done.returncode == 0 and json.loads(done.stdout)["rows"] == 2, done.stderr
    # as spark-submit runs it: jobs/ is the first folder on the path, and the project is installed
    script = str(ROOT / "jobs" / "filter.py")
    options = [*args, "--output", str(tmp_path / "b.csv"), "--models", str(ROOT / "models")]
    done = program(script, *options, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0 and json.loads(done.stdout)["rows"] == 2, done.stderr
    assert (tmp_path / "a.csv").read_text() == (tmp_path / "b.csv").read_text()


@pytest.mark.parametrize(
    "verbs", [("import", "quarantine"), pytest.param(tuple(cli.VERBS), marks=pytest.mark.slow)], ids=len
)
def test_a_verb_is_the_same_however_it_is_started(tmp_path: Path, verbs: tuple[str, ...]) -> None:
    """Each verb as a module and as spark-submit starts its file, beside `kalman-pipeline VERB`."""

    def shown(words: tuple[str, ...]) -> tuple[int, str, str]:
        done = program(*words, "--help", cwd=tmp_path, PYTHONPATH=str(ROOT), COLUMNS="100")
        return done.returncode, done.stdout, done.stderr

    ways = [
        words
        for verb in verbs
        for words in (("-m", f"jobs.{name_module(verb)}"), (str(ROOT / "jobs" / f"{name_module(verb)}.py"),))
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(shown, ways))
    for number, verb in enumerate(verbs):
        expected = CliRunner(env={"COLUMNS": "100"}).invoke(cli.app, [verb, "--help"])
        assert f"kalman-pipeline {verb}" in expected.stdout
        assert found[2 * number : 2 * number + 2] == [(0, expected.stdout, "")] * 2, verb


def test_the_offline_command_needs_neither_pandas_nor_spark(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text(NILE)
    code = (
        "import sys; from jobs.filter import run; from jobs.core.settings import Settings\n"
        f"run(Settings.load(), 'nile', {str(tmp_path / 'in.csv')!r}, {str(tmp_path / 'out.csv')!r})\n"
        "print([name for name in ('pandas', 'pyspark') if name in sys.modules])"
    )
    done = program("-c", code)
    assert done.stdout == "[]\n", done.stderr


def test_status_needs_neither_pandas_nor_spark(tmp_path: Path) -> None:
    held = {"model": ["nile", "nile", "other"], "status": pa.array([None, "replayed", None], pa.string())}
    write_deltalake(str(tmp_path / "quarantine"), pa.table(held))
    code = (
        "import sys; from jobs.status import run; from jobs.core.settings import Settings\n"
        f"done = run(Settings.load({str(tmp_path)!r}), 'nile').data['models'][0]['measurements']['quarantined']\n"
        "print(done, [name for name in ('pandas', 'pyspark') if name in sys.modules])"
    )
    done = program("-c", code)
    assert done.stdout == "1 []\n", done.stderr


def test_sigterm_ends_a_verb_tidily(tmp_path: Path) -> None:
    # One key's rows are filtered one after the other, so that the signal comes in mid-work.
    rows = "".join(f"nile,{1000 + i // 365}-01-01T00:{i % 60:02d}:00,1120\n" for i in range(400_000))
    (tmp_path / "in.csv").write_text(NILE.splitlines()[0] + "\n" + rows)
    args = ["-m", "jobs.filter", "--model", "nile", "--input", str(tmp_path / "in.csv")]
    process = subprocess.Popen(
        [sys.executable, *args, "--output", str(tmp_path / "out.csv")],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("filter nile: try a model on a file")
    time.sleep(1.0)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (143, "error: stopped by SIGTERM\n")
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]


def test_a_reader_that_goes_away_is_no_error() -> None:
    # more than a pipe holds, so that the writer meets the closed end
    code = (
        "from jobs import status; from jobs.core.report import Report; from jobs.cli import app\n"
        "status.run.function = lambda *_, **__: Report(lines=['x' * 99] * 9999)\n"
        "app(['status'])"
    )
    command = f'{sys.executable} -c "{code}" | head -1'
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "x" * 99 + "\n", "")
