"""A DAG's form gives values of options, whatever is typed into it: never an option, never another value."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from airflow.sdk import Param
from airflow.sdk.exceptions import AirflowFailException
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.core.command import build_application, insert_verb
from kalman_dags.operator import KalmanOperator
from tests.dags.conftest import MODELS, load_bag
from tests.dags.test_follower_dags import SECTIONS

pytestmark = pytest.mark.airflow

HOSTILE = [
    "--models=/x",
    "--warehouse",
    "-q",
    "--debug",
    "--",
    "--json\n--models=/x",
    "x --models=/x",
    "2024-01-01T00:00:00Z --models /x",
    "2024-01-01T00:00:00Z\n",
    "available-now\n--debug",
    "5%\n",
    "=",
    "'; rm -rf / #",
    "$(id)",
    "{{ 7 * 7 }}",
    "{% raw %}",
    "../../etc/passwd",
    "a\0b",
    "\x1b[31m",
    "\u202e",
    "\ud800",
    "x" * 200_000,
]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, KalmanOperator]]:
    """Every task of every DAG that runs a verb, with its DAG."""
    folder = tmp_path_factory.mktemp("models")
    text = (MODELS / "tiny.yaml").read_text() + "".join(SECTIONS.values())
    (folder / "tiny.yaml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KALMAN_MODELS", str(folder))
        bag = load_bag()
    assert bag.import_errors == {}
    found = [
        (dag, task) for dag in bag.dags.values() for task in dag.tasks if isinstance(task, KalmanOperator)
    ]
    assert {task.verb for _, task in found} >= {
        "estimate", "export", "forecast", "ingest", "maintain", "monitor", "pretrain", "rollback", "skill", "stream",
        "upgrade", "verify",
    }  # fmt: skip
    return found


NEEDED = {"import_states": {"input": "states.csv"}}
"""Fields of a form that have no default, by verb, with a value."""


def words_of(dag: Any, task: KalmanOperator, form: dict[str, Any]) -> list[str]:
    """Return the words that a task's verb is started with when its form has these values."""
    at = datetime(2024, 5, 1, tzinfo=UTC)
    run = SimpleNamespace(
        data_interval_start=at, data_interval_end=at, run_after=at, run_type="manual", logical_date=at
    )
    macros = dag.user_defined_macros or {}
    context = {
        "params": {**dict(dag.params), **NEEDED.get(task.verb, {}), **form},
        "triggering_asset_events": {},
        "dag_run": run,
        "run_id": "manual__1",
        "ds": "2024-05-01",
    }
    rendered = task.render_template(
        {"options": task.options, "flags": task.flags},
        {**context, **macros, "data_interval_start": at},  # type: ignore[arg-type]
        dag.get_template_env(),
    )
    before = task.options, task.flags
    task.options, task.flags = rendered["options"], rendered["flags"]
    try:
        return task.words()
    finally:
        task.options, task.flags = before


@cache
def command_line(verb: str) -> Any:
    """Return the command line of a verb that is submitted."""
    app = build_application()
    importlib.import_module(f"jobs.{verb}").run.add_to(app, verb)
    return typer.main.get_command(app)


def understood(verb: str, words: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the global options, and the verb's own, as the verb understands its words; nothing is run."""
    group = command_line(verb)
    ctx = group.make_context("kalman-pipeline", insert_verb(verb, words))
    assert ctx._protected_args[:1] == [verb]
    own = group.commands[verb].make_context(verb, [*ctx._protected_args[1:], *ctx.args], parent=ctx)
    return ctx.params, own.params


def texts(dag: Any) -> Iterator[tuple[str, Param]]:
    """Yield the fields of a DAG's form that take text."""
    for name in dag.params:
        field = dag.params.get_param(name)
        kinds = field.schema.get("type", "string")
        if "string" in (kinds if isinstance(kinds, list) else [kinds]):
            yield name, field


def accepted(param: Param, value: str) -> bool:
    """Tell whether Airflow accepts a value of a form."""
    try:
        Param(param.value, **param.schema).resolve(value)
    except Exception:
        return False
    return True


def usual_options(dag: Any, task: KalmanOperator) -> dict[str, Any]:
    """Return the verb's options when nothing is typed into the form."""
    return understood(task.verb, words_of(dag, task, {}))[1]


def check(dag: Any, task: KalmanOperator, name: str, value: str, usual: dict[str, Any]) -> str:
    """Put a value into one field; say whether the form refused it, or it came through as the value that it is."""
    form = {name: value}
    # Whether or not the form would take it: nothing must get through by another way.
    try:
        words = words_of(dag, task, form)
    except (AirflowFailException, ValueError) as error:  # a control character, or no instant
        assert "Traceback" not in str(error)
        return "refused"
    globals_, options = understood(task.verb, words)
    assert not any(value for value in globals_.values()), words
    changed = [given for option, given in options.items() if given != usual[option]]
    # Options that may be repeated are lists.
    flat = [one for given in changed for one in (given if isinstance(given, list | tuple) else [given])]
    assert all(str(one) == value for one in flat), (words, changed)
    return "value"


def test_hostile_values_stay_values(tasks: list[tuple[Any, KalmanOperator]]) -> None:
    seen = 0
    for dag, task in tasks:
        names = [name for name, field in texts(dag) if "enum" not in field.schema]
        usual = usual_options(dag, task) if names else {}
        for name in names:
            for value in HOSTILE:
                check(dag, task, name, value, usual)
                seen += 1
    assert seen > 400


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=st.one_of(st.text(min_size=1), st.builds("--{}={}".format, st.text(), st.text())), data=st.data()
)
def test_any_value_stays_a_value(
    tasks: list[tuple[Any, KalmanOperator]], value: str, data: st.DataObject
) -> None:
    fields = [
        (dag, task, name) for dag, task in tasks for name, field in texts(dag) if "enum" not in field.schema
    ]
    dag, task, name = data.draw(st.sampled_from(fields))
    check(dag, task, name, value, usual_options(dag, task))


def test_every_text_of_a_form_is_checked_before_a_run_begins(tasks: list[tuple[Any, KalmanOperator]]) -> None:
    for dag, _ in tasks:
        for name, field in texts(dag):
            place = f"{dag.dag_id}.{name}"
            for value in ("--models=/x", "a\0b", "a\n", "x" * 200_000):
                assert not accepted(field, value), (place, value[:20])
            if field.schema.get("format") == "date-time":
                good = ("2024-05-01T00:00:00Z", "2024-05-01T00:00:00+02:00", "2024-05-01T00:00:00.123456Z")
                assert all(accepted(field, value) for value in good), place
                bad = ("2024-02-31T00:00:00Z", "2024-05-01", "yesterday", "2024-05-01T00:00:00Z\n")
                assert not any(accepted(field, value) for value in bad), place
    names = {name: field for dag, _ in tasks for name, field in texts(dag)}
    assert accepted(names["key"], "-5") and accepted(names["key"], 'Zürich "1"')
    assert accepted(names["input"], "/data/2024 05/*.csv.gz")


def test_no_word_of_a_submitted_verb_is_a_global_option_but_the_first() -> None:
    words = ["--warehouse", "/w", "--quiet", "--model", "m", "--as-of", "--models=/x"]
    assert insert_verb("pretrain", words) == [
        *("--warehouse", "/w", "--quiet", "pretrain", "--model", "m", "--as-of", "--models=/x"),
    ]
    assert insert_verb("export", ["--model=m", "--models=/x"]) == ["export", "--model=m", "--models=/x"]


def test_a_global_option_behind_a_submitted_verb_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    export = importlib.import_module("jobs.export")
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    monkeypatch.setattr("sys.argv", ["export.py", "--model=m", f"--models={tmp_path}"])
    with pytest.raises(SystemExit) as ended:
        export.run.main()
    assert ended.value.code == 2
    assert re.search("no such option.*--models", capsys.readouterr().err)
